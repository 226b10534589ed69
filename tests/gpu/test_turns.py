"""On a GPU: turns go on behind steps that are already issued, in CUDA graphs, with pages that stay."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ftcli.facts.generation import EngineLayout, pages_of
from ftcli.generation.decoding import Forward
from ftcli.generation.engine import Engine
from ftcli.generation.requests import StopCheck, StopConditions
from ftcli.model.patch import patch
from tests.small_models import build
from tests.unit.generation.test_turns import LONGEST, PLAN, SAMPLING, STOPS, Scripted, check, requests

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("rows", [3, 8])
@pytest.mark.parametrize(("model_type", "kernels"), [("llama", "off"), ("gemma2", "auto")])
def test_turns_are_as_if_they_had_stood_there(model_type: str, kernels: Any, rows: int) -> None:
    model = build(model_type, head_dim=16).requires_grad_(False).cuda()
    patch(model, kernels)
    device = torch.device("cuda")
    layout = EngineLayout(rows, rows * pages_of(LONGEST) + 1, False)
    engine = Engine(Forward(model, PLAN, device), layout, LONGEST, PLAN, device)
    scripts = [Scripted(seed) for seed in (0, 1, 2)]
    stopping = StopCheck(StopConditions(STOPS), None)
    found = [engine.converse(requests(), SAMPLING, stopping, script) for script in scripts]
    assert engine.stepper.status.replays
    assert engine._tools.pool.free == layout.pages - 1
    plain = build(model_type, head_dim=16).requires_grad_(False)
    for made, script in zip(found, scripts, strict=True):
        check(plain, made, script)
