"""The engine computes layers that round their input as the model does: masters, and frozen ternary values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from ftcli.config.evaluation import GenerateConfig
from ftcli.config.model import QuantizationConfig
from ftcli.evaluate.generate import complete
from ftcli.generation.requests import StopCheck, StopConditions
from ftcli.model import bitnet
from ftcli.model.quantized import layers_to_quantize, quantize_linear
from ftcli.plan.precision import DtypePlan
from ftcli.reporting import SilentReporter
from tests import small_models


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("family", ["bitnet", "llama"])
def test_what_is_generated_is_what_the_whole_model_says(family: str, trained: bool) -> None:
    model = small_models.build(family)
    for name in layers_to_quantize(model):
        linear = model.get_submodule(name)
        assert isinstance(linear, nn.Linear)
        made = quantize_linear(linear, QuantizationConfig(method="bitnet"), name, trained=trained)
        model.set_submodule(name, made)
    if trained:
        bitnet.round_in_norms(model, kernels=True)
    prompts = [[9, 20, 31, 42], [100, 90]]
    options: dict[str, Any] = {
        "pad": 0,
        "batch_size": 2,
        "plan": DtypePlan("float32", None, "float32", False, "a test"),
        "device": torch.device("cpu"),
        "reporter": SilentReporter(),
        "stopping": StopCheck(StopConditions(frozenset()), None),
    }
    found = complete(model.eval(), prompts, GenerateConfig(max_new_tokens=12), **options)
    for prompt, tokens in zip(prompts, found, strict=True):
        ids = list(prompt)
        for token in tokens:
            with torch.no_grad():
                logits = model(torch.tensor([ids])).logits[0, -1]
            assert float(logits.max() - logits[token]) <= 1e-3  # a rounding may go the other way
            ids.append(token)
