"""On a GPU: greedy completions are those of transformers' generate in float32, and graphs change nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ftkernels.sampling import Sampling, row_seed

from ftcli.facts.generation import EngineLayout, pages_of
from ftcli.generation.decoding import Forward
from ftcli.generation.engine import Engine
from ftcli.generation.requests import GenerationRequest
from ftcli.model.patch import patch
from ftcli.plan.precision import DtypePlan
from ftcli.tables.families import TABLE
from tests.small_models import build

pytestmark = pytest.mark.gpu

PLAN = DtypePlan("float32", "float32", "float32", False, "a test")
LONGEST = 160


def engine_of(model: Any, *, graphs: bool, plan: DtypePlan = PLAN) -> Engine:
    device = torch.device("cuda")
    layout = EngineLayout(5, 5 * pages_of(LONGEST) + 2, False)
    return Engine(Forward(model, plan, device), layout, LONGEST, plan, device, graphs=graphs)


def requests(limit: int, several: int = 1) -> list[GenerationRequest]:
    generator = torch.Generator().manual_seed(0)
    sizes = (3, 70, 1, 64, 20, 100, 65)
    return [
        GenerationRequest(
            tuple(torch.randint(5, 250, (size,), generator=generator).tolist()),
            limit - at,
            tuple(row_seed(at, number) for number in range(several)),
        )
        for at, size in enumerate(sizes)
    ]


BOTH_WAYS = ("llama", "mistral", "qwen3", "gemma2", "gemma3_text", "phi3", "gpt_oss")
#: Heads that the kernels take.
SIZES: dict[str, dict[str, int]] = {
    "qwen3_5_text": {"linear_key_head_dim": 32, "linear_value_head_dim": 32},
    "youtu": {"qk_rope_head_dim": 16},
}


@pytest.mark.parametrize(
    ("model_type", "kernels"),
    [*((name, way) for name in BOTH_WAYS for way in ("off", "auto")), ("qwen3_5_text", "auto"), ("youtu", "auto")],
)
def test_greedy_is_generates(model_type: str, kernels: Any) -> None:
    model = build(model_type, head_dim=16, **SIZES.get(model_type, {})).requires_grad_(False).cuda()
    expected = []
    for request in requests(40):
        ids = torch.tensor([request.prompt], device="cuda")
        with torch.no_grad():
            out = model.generate(
                input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=request.limit, do_sample=False,
                eos_token_id=[-1], pad_token_id=0,
            )  # fmt: skip
        expected.append(out[0, ids.shape[1] :].tolist())
    patch(model, kernels)
    engine = engine_of(model, graphs=True)
    for _ in range(2):
        assert [one[0].tokens for one in engine.complete(requests(40))] == expected
    captured = kernels != "off" or TABLE[model_type].experts is None
    assert (engine.stepper.status.replays > 20) is captured
    assert (engine.stepper.status.stopped is None) is captured


@pytest.mark.parametrize("model_type", ["gemma2", "qwen3_5_text", "gpt_oss"])
@pytest.mark.parametrize("autocast", [False, True])
def test_graphs_change_no_token(autocast: bool, model_type: str) -> None:
    """Nor do states: completions of a prompt that enter one after the other, in slots that others have left."""
    model = build(model_type, head_dim=16, **SIZES.get(model_type, {})).requires_grad_(False).cuda()
    plan = DtypePlan("float32", "float32", "bfloat16", True, "a test") if autocast else PLAN
    patch(model, "auto")
    found = [
        [
            [one.tokens for one in each]
            for each in engine_of(model, graphs=graphs, plan=plan).complete(requests(40, 3), sampling)
        ]
        for graphs in (True, False)
        for sampling in (Sampling(1.0, top_p=0.9),)
    ]
    assert found[0] == found[1]
    assert len({tuple(tokens) for each in found[0] for tokens in each}) > 15
