"""The logits of a merged model are held to base and adapter, weights rounded alike."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ftcli.export import safetensors as merged_format
from tests.unit.export.conftest import Trained
from tests.unit.export.test_export import VARIANTS, code, export, failure

pytestmark = pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")


#: The others are merged in the same dtype in test_fp8.py.
HERE = ("dropout", "some modules", "rank pattern", "embeddings trained whole", "head adapted")


@pytest.mark.parametrize("variant", HERE)
def test_logits_are_held_to_base_and_adapter_rounded_alike(trained: Callable[..., Trained], variant: str) -> None:
    """Issue 11: held to those before rounding, sensitive models (Mamba, Cohere) could not be exported."""
    (result,) = export(trained("llama", "bfloat16", **VARIANTS[variant]), "safetensors")
    assert result.verification.facts["relative_error"] < 1e-5 < result.verification.facts["rounding"]


def test_an_adapter_that_computes_something_else_than_is_merged_is_caught(
    trained: Callable[..., Trained], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fault that no weight shows, and smaller than a rounding to bfloat16."""
    made, attach = trained("llama", "bfloat16"), merged_format.attach

    def a_little_off(base: Any, folder: Path) -> Any:
        adapted = attach(base, folder)
        layer = adapted.base_model.model.model.layers[0].mlp.down_proj
        layer.register_forward_hook(lambda _module, _args, output: output * 1.001)
        return adapted

    monkeypatch.setattr(merged_format, "attach", a_little_off)
    error = failure(made, "safetensors")
    assert code(error) == "FT741"
    assert "logits differ" in error.findings[0].message
