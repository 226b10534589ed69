"""The loss stands for the model's own logits in every family, or the model is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ftcli.errors import FtcliError
from ftcli.model.backbone import head_of, rotation_kept
from ftcli.model.loss import forward_loss
from ftcli.model.selfcheck import _compare, _Pass, check_head
from ftcli.plan.precision import DtypePlan
from tests.small_models import MULTIMODAL, STRUCTURES, TEXT, VOCABULARY, build, by_kind, config_of

PLAN = DtypePlan("float32", "float32", "float32", False, "a test")
CPU = torch.device("cpu")


def ids(length: int = 24) -> torch.Tensor:
    return torch.randint(5, VOCABULARY - 8, (1, length), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("model_type", by_kind([*TEXT, *MULTIMODAL], (*STRUCTURES, "falcon_h1", "recurrent_gemma")))
def test_the_loss_is_the_models_own_in_every_family(model_type: str) -> None:
    """Issue 11, B5: RecurrentGemma's cap and Falcon-H1's multiplier were not read; the loss was 2 to 3% off."""
    model, row = build(model_type), ids()
    assert check_head(model, row[0].tolist(), PLAN, CPU) <= 1e-5
    with torch.no_grad():
        wanted = model(input_ids=row, labels=row).loss.item()
        found = forward_loss(model, {"input_ids": row, "labels": row}, num_items=row.numel() - 1).loss.item()
    assert found == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize(("model_type", "name"), [("falcon_h1", "lm_head_multiplier"), ("recurrent_gemma", "cap")])
def test_a_scale_under_a_name_that_nobody_knows(model_type: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ftcli.model.backbone.LOGIT_MULTIPLIERS", ())
    monkeypatch.setattr("ftcli.model.backbone.LOGIT_CAPS", ())
    with pytest.raises(FtcliError) as caught:
        check_head(build(model_type), ids()[0].tolist(), PLAN, CPU)
    assert caught.value.findings[0].code == "FT335"
    assert caught.value.exit_code == 3


def test_opts_narrow_head() -> None:
    import transformers

    config = config_of("opt")
    config.word_embed_proj_dim = 16
    torch.manual_seed(0)
    model: Any = transformers.AutoModelForCausalLM.from_config(config).eval()
    assert head_of(model).weight.shape == (VOCABULARY, 16)
    check_head(model, ids()[0].tolist(), PLAN, CPU)


def test_dynamic_rotary_tables_are_as_they_were_after_a_check() -> None:
    """Issue 11, B5: a long row of the self-check changed what every shorter one after it gave."""
    import transformers

    config = config_of("llama")
    config.rope_parameters = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    config.max_position_embeddings = 16
    torch.manual_seed(0)
    model: Any = transformers.AutoModelForCausalLM.from_config(config).eval()
    table = next(m for m in model.modules() if hasattr(m, "max_seq_len_cached"))
    before = table.inv_freq.clone(), table.max_seq_len_cached
    check_head(model, ids(40)[0].tolist(), PLAN, CPU)
    with torch.no_grad(), rotation_kept(model):
        model(input_ids=ids(40))
        assert table.max_seq_len_cached == 40
    assert torch.equal(table.inv_freq, before[0])
    assert table.max_seq_len_cached == before[1]


def test_a_cap_that_is_no_number_is_refused_with_the_file_that_says_it() -> None:
    model = build("llama")
    model.config.final_logit_softcapping = [30.0]
    with pytest.raises(FtcliError, match=r"the loss of a LlamaForCausalLM with this config\.json wrongly: ") as caught:
        check_head(model, ids()[0].tolist(), PLAN, CPU)
    assert (caught.value.findings[0].code, caught.value.exit_code) == ("FT335", 3)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("heads", [3, 7])
def test_layers_that_do_not_fit_each_other_are_the_configs_fault(heads: int, attention: str) -> None:
    """transformers builds them, and they fail in the first forward pass."""
    model = build("minimax", num_key_value_heads=heads)
    model.set_attn_implementation(attention)
    with pytest.raises(FtcliError, match="no model can be built of this config") as caught:
        check_head(model, ids()[0].tolist(), PLAN, CPU)
    assert (caught.value.findings[0].code, caught.value.exit_code) == ("FT305", 3)


def test_layers_that_fail_in_other_words_without_memory_are_the_configs_fault() -> None:
    """torch adds something about symbols there; the line of the model's code is the same."""
    model = build("zamba2", mamba_headdim=-(2**31))
    with pytest.raises(FtcliError, match="invalid shape dimension") as caught:
        check_head(model, ids()[0].tolist(), PLAN, CPU)
    assert caught.value.findings[0].code == "FT305"


def test_a_layer_that_fails_by_itself_is_no_fault_of_the_config() -> None:
    model = build("llama")
    model.model.layers[1].mlp.down_proj.weight = torch.nn.Parameter(torch.zeros(3, 3))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        check_head(model, ids()[0].tolist(), PLAN, CPU)


def test_a_gradient_that_is_next_to_nothing_is_not_judged_by_its_own_size() -> None:
    """A Qwen3.5 whose decay forgets all: rounding made 3.4e-4 of a gradient of 1.2e-7, and that was called a fault."""
    large, small = torch.full((4, 4), 1e-2), torch.full((4, 4), 3e-8)
    wanted = _Pass(torch.ones(2), {"input": torch.full((2,), 40.0), "a": large, "b": small})

    def gradient(**changed: torch.Tensor) -> tuple[float, str]:
        check = _compare("layers.0", _Pass(wanted.output, {**wanted.gradients, **changed}), wanted)
        return check.gradient, check.worst

    assert gradient(b=small * 1.0004)[0] < 2e-5
    assert gradient(b=torch.zeros_like(small)) == (pytest.approx(0.03, rel=1e-3), "b")  # what is missing is seen
    assert gradient(a=large * 1.0004) == (pytest.approx(4e-4, rel=1e-2), "a")
