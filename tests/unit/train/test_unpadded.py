"""Unpadded micro-batches train what padded ones do: loss and gradients of every family, on our layers and others'."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from random import Random
from typing import Any

import pytest
import torch
from ftkernels.device import interpreting
from torch import Tensor
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM
from transformers.masking_utils import AttentionMaskInterface

from ftcli.data.collate import EpochCollator, unpadded_batch
from ftcli.data.order import plain_epochs
from ftcli.data.tokens import TokenizedRow
from ftcli.evaluate.loss import evaluate_loss
from ftcli.labels import IGNORE_INDEX
from ftcli.model import attention
from ftcli.model.backbone import base_of
from ftcli.model.loss import forward_loss
from ftcli.model.masks import CallMask, Documents, mask_for
from ftcli.model.patch import patch
from ftcli.plan.batches import Batches
from ftcli.plan.precision import DtypePlan
from ftcli.reporting import SilentReporter
from ftcli.rows.row import Row
from ftcli.tables import families
from ftcli.tables.packing import LEAKING
from ftcli.train.assembly import check_isolation
from tests import small_models
from tests.tiers import in_turn

PADDED, UNPADDED = Batches("padded", "a test"), Batches("unpadded", "a test")
INTERPRETED = "ftcli-unpadded-interpreted"
CPU = torch.device("cpu")
FLOAT32 = DtypePlan("float32", "float32", "float32", False, "a test")
SMALL: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "sliding_window": 6,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
#: The interpreter takes a second for each layer and two heads; one key of both queries is enough.
INTERPRETED_SMALL = {"num_attention_heads": 2, "num_key_value_heads": 1}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
LATENT = {**small_models.TEXT["youtu"], "head_dim": 8}
#: transformers' names of layers with a window and without.
CHANGES: dict[str, dict[str, Any]] = {
    "bitnet": {"head_dim": 8},
    "glm4_moe": {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "first_k_dense_replace": 0,
    },
    "glm4_moe_lite": {**LATENT, **small_models.TEXT["deepseek_v3"], "mlp_layer_types": ["sparse", "sparse"]},
    "deepseek_v3": {**LATENT, **small_models.TEXT["deepseek_v3"], "first_k_dense_replace": 0},
    "youtu": LATENT,
    "ernie4_5_moe": {**small_models.TEXT["ernie4_5_moe"], "moe_layer_start_index": 0, "head_dim": 16},
    "deepseek_v2": {**LATENT, **small_models.TEXT["deepseek_v2"], "first_k_dense_replace": 0},
    "granitemoe": small_models.TEXT["granitemoe"],
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "mellum": {**EXPERTS, "layer_types": ["sliding_attention", "full_attention"]},
    "mixtral": small_models.TEXT["mixtral"],
    "olmoe": {**EXPERTS, "num_attention_heads": 2, "num_key_value_heads": 1},
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 24},
    "qwen3_moe": EXPERTS,
    "gemma4_text": {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "global_head_dim": 32,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 97,
    },
    "gemma4_unified_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "global_head_dim": 32,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
    },
    "gemma2": {"attn_logit_softcapping": 50.0, "layer_types": ["sliding_attention", "full_attention"]},
    "gemma3_text": {"layer_types": ["sliding_attention", "full_attention"]},
    "llama": {
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
        "max_position_embeddings": 16,
    },
    "ministral3": {
        "rope_parameters": {
            **small_models.SCALED_BY_POSITION,
            "factor": 32.0,
            "original_max_position_embeddings": 4,
        }
    },
    "seed_oss": {"attention_dropout": 0.0, "residual_dropout": 0.0},
    "helium": INTERPRETED_SMALL,  # whose heads make up the hidden size
    "stablelm": INTERPRETED_SMALL,
}
#: Language models that are built only within a model of several towers, and two that are built within one as well.
TOWERS = {
    row.text: name
    for name, row in families.MULTIMODAL.items()
    if row.text in families.TABLE and row.text.endswith(("_vl_text", "_vl_moe_text", "glimmer_text"))
}
WITH_TOWERS = {**{name: name for name in ("gemma3", "mistral3")}, **TOWERS}
FAMILIES = sorted({*families.TABLE, *("gemma3", "mistral3")})
KERNELS = [name for name in FAMILIES if name not in families.TABLE or families.TABLE[name].kernels != "none"]


def model_of(family: str, kernels: str) -> Any:
    """A model with trained adapters: on transformers' layers, on ours in plain torch, or with the interpreted kernel
    of attention.
    """
    if family in WITH_TOWERS:
        made = small_models.build(WITH_TOWERS[family])
        targets = r".*language_model.*_proj"
    else:
        change = CHANGES.get(family, {})
        if kernels == "interpreted" and "head_dim" not in change:
            layers = len(change.get("layer_types", ("full_attention",)))
            change = {**INTERPRETED_SMALL, "num_hidden_layers": layers, **change}
        config = AutoConfig.for_model(family, **{**SMALL, **change})
        beyond = getattr(config, "attn_logit_softcapping", None) or families.TABLE[family].sinks
        own = "eager" if beyond else "sdpa"
        torch.manual_seed(0)
        made = AutoModelForCausalLM.from_config(config, attn_implementation=own, dtype=torch.float32)
        targets = "all-linear"
    model = small_models.adapted_everywhere(made, targets=targets)
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(std=0.1)
        if family.startswith("gemma4") and "q_norm" in name:  # whose scores have no other scale
            parameter.data.mul_(0.2)
    if kernels != "off":
        assert any(entry.on for entry in patch(model, "reference").table)
    if kernels == "interpreted":
        if not interpreting():
            pytest.skip("Triton's interpreter is off (TRITON_INTERPRET=1 turns it on)")
        AttentionInterface.register(INTERPRETED, partial(attention.ftcli_attention_forward, kernels="triton"))
        AttentionMaskInterface.register(INTERPRETED, mask_for)
        base_of(model).set_attn_implementation(INTERPRETED)
    return model


def rows(lengths: Sequence[int]) -> list[TokenizedRow]:
    rng = Random(1)
    made = []
    for number, length in enumerate(lengths):
        ids = [rng.randrange(3, 97) for _ in range(length)]
        masked = rng.randint(1, max(1, length // 2))
        made.append(TokenizedRow(Row("d", number, {}), ids, [IGNORE_INDEX] * masked + ids[masked:]))
    return made


def step(
    model: Any, documents: Sequence[TokenizedRow], batches: Batches, micro_batch: int
) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of one optimizer step over ``documents`` in micro-batches, as training makes them."""
    model.zero_grad()
    items = sum(label != IGNORE_INDEX for row in documents for label in row.labels)
    collate = EpochCollator(plain_epochs(documents, 0), 0, batches)
    total = 0.0
    for start in range(0, len(documents), micro_batch):
        batch = collate(range(start, min(start + micro_batch, len(documents))))
        batch.pop("lengths", None)
        loss = forward_loss(model, batch, num_items=items).loss
        loss.backward()
        total += float(loss.detach())
    return total, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def require_same_step(model: Any, documents: Sequence[TokenizedRow], micro_batch: int) -> None:
    (loss, wanted), (found_loss, found) = (step(model, documents, b, micro_batch) for b in (PADDED, UNPADDED))
    assert found_loss == pytest.approx(loss, abs=1e-6)
    assert set(found) == set(wanted)
    assert any(float(gradient.norm()) > 0 for gradient in wanted.values())
    for name, gradient in wanted.items():
        assert float((found[name] - gradient).norm()) <= 2e-6 + 1e-5 * float(gradient.norm()), name


#: Rows of different lengths, some longer than every window, and two micro-batches of different sizes.
MIXED = (23, 5, 30, 11, 9)


@pytest.mark.parametrize("family", small_models.by_kind(name for name in FAMILIES if name not in LEAKING))
def test_on_transformers_layers(family: str) -> None:
    require_same_step(model_of(family, "off"), rows(MIXED), 3)


@pytest.mark.parametrize(
    ("family", "kernels"),
    in_turn(small_models.by_kind(KERNELS), ["reference", "interpreted"], whole=("llama", "gemma2")),
)
def test_on_our_layers(family: str, kernels: str) -> None:
    if kernels == "interpreted" and family in WITH_TOWERS:
        pytest.skip("the heads of these small models are too small for the kernel")
    model = model_of(family, kernels)
    assert attention.is_ours(base_of(model))
    # What a second micro-batch changes, the kernel shows with one family with windows and one without.
    one = kernels == "interpreted" and family not in ("gemma2", "llama")
    require_same_step(model, rows(MIXED[:3] if one else MIXED), 3)


@pytest.mark.parametrize(
    ("lengths", "kernels"),
    in_turn([(21,), (64,), (32, 32), (21, 21, 21), (1, 2, 3), (2, 2)], ["off", "reference", "interpreted"]),
)
def test_single_rows_and_rows_of_one_length(kernels: str, lengths: tuple[int, ...]) -> None:
    """The rotation of this Llama grows with the largest position: what fills rows up must not have larger ones."""
    require_same_step(model_of("llama", kernels), rows(lengths), len(lengths))


@pytest.mark.parametrize("kernels", ["off", "reference", "interpreted"])
def test_nothing_supervised_sees_what_fills_a_row_up(kernels: str) -> None:
    """Other tokens there change no bit of loss and gradients; other tokens of a document change them."""
    model, documents = model_of("gemma2", kernels), rows((9, 5))

    def bits(change: str) -> tuple[Tensor, list[Tensor]]:
        model.zero_grad()
        batch = unpadded_batch(documents, 0)
        assert batch["input_ids"].shape == (1, 64)
        where = {"nothing": slice(0, 0), "filler": slice(14, None), "document": slice(2, 3)}[change]
        batch["input_ids"][:, where] = 50
        loss = forward_loss(model, {name: value for name, value in batch.items() if name != "lengths"}).loss
        loss.backward()
        return loss.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None]

    (loss, gradients), (same, alike), (other, _) = (bits(change) for change in ("nothing", "filler", "document"))
    assert torch.equal(loss, same)
    assert all(torch.equal(a, b) for a, b in zip(gradients, alike, strict=True))
    assert not torch.equal(loss, other)


def test_the_device_is_not_asked_where_documents_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers would look for them in positions, which waits for a GPU; the batch says it itself."""
    model, seen = model_of("gemma2", "reference"), []

    def refuse(*_: Any) -> Any:
        raise AssertionError("transformers looked for documents")

    def watched(documents: Documents, mask: CallMask) -> CallMask:
        found = within(documents, mask)
        seen.append((found.window, found.kind, found.ranges.key_lo.tolist()[0][14:17]))
        return found

    within = Documents.within
    monkeypatch.setattr("transformers.masking_utils.find_packed_sequence_indices", refuse)
    monkeypatch.setattr(Documents, "within", watched)
    for lengths in ((9, 5), (40,)):
        batch = unpadded_batch(rows(lengths), 0)
        forward_loss(model, {name: value for name, value in batch.items() if name != "lengths"})
    assert seen == [
        *((6, "intervals", [14, 14, 14]), (None, "intervals", [14, 14, 14])),
        *((6, "plain", [9, 10, 11]), (None, "plain", [0, 0, 0])),
    ]


@pytest.mark.parametrize("kernels", ["off", "interpreted"])
def test_documents_of_the_layout_do_not_see_each_other(kernels: str) -> None:
    model = model_of("gemma2", kernels)
    before = [parameter.clone() for parameter in model.parameters()]
    check_isolation(model, rows(MIXED), FLOAT32, CPU, pad_token_id=0)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize("kernels", ["off", "reference", "interpreted"])
@pytest.mark.parametrize("pack_length", [None, 64])
def test_evaluation_gives_the_same_numbers(kernels: str, pack_length: int | None) -> None:
    model, documents = model_of("gemma2", kernels), rows(MIXED)
    options: dict[str, Any] = {"pad_token_id": 0, "batch_size": 2, "plan": FLOAT32, "device": CPU}
    wanted = evaluate_loss(model, documents, reporter=SilentReporter(), layout="right", **options)
    found = evaluate_loss(
        model, documents, reporter=SilentReporter(), layout="unpadded", pack_length=pack_length, **options
    )
    assert found.loss == pytest.approx(wanted.loss, abs=1e-6)
    assert (found.token_accuracy, found.tokens, found.rows) == (wanted.token_accuracy, wanted.tokens, wanted.rows)


def test_a_callers_own_rule_stays_in_force_among_documents() -> None:
    """A mask that is no interval is narrowed to documents, not replaced."""
    seen = torch.ones(1, 1, 6, 6, dtype=torch.bool).tril()
    seen[..., 2:, 1] = False  # a hole
    mask = CallMask(6, 6, None, CPU, None, None, True, 1, lambda: seen)
    found = Documents(torch.tensor([[0, 0, 0, 0, 4, 4]], dtype=torch.int32)).within(mask)
    apart = torch.zeros(6, 6, dtype=torch.bool)
    apart[:4, :4] = apart[4:, 4:] = True
    assert found.kind == "any"
    assert torch.equal(found.dense[0, 0], seen[0, 0] & apart)
