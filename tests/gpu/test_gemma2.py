"""Gemma-2 at its true head size on a GPU: against transformers' eager form in wider numbers, past the window.

Two layers (one windowed, one global) of the 9B's own attention: 16 query heads on 8 key heads of 256, window 4096, both
caps; hidden size and vocabulary are smaller, so that the reference, which holds every score, fits beside it.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from typing import Any

import peft
import pytest
import torch
import transformers
from torch import Tensor

from ftcli.data.tokens import TokenizedRow
from ftcli.evaluate.loss import LossResult, evaluate_loss
from ftcli.model.backbone import base_of, head_of, hidden_states
from ftcli.model.loss import next_token_loss
from ftcli.model.patch import patch
from ftcli.plan.precision import DtypePlan
from ftcli.reporting import SilentReporter
from ftcli.rows.row import Row

pytestmark = pytest.mark.gpu

WINDOW, LENGTH, VOCABULARY = 4096, 8192, 2048
KINDS = {
    "alternating": ["sliding_attention", "full_attention"],
    "global": ["full_attention"] * 2,
    "windowed": ["sliding_attention"] * 2,
}
Model = Any


@pytest.fixture(autouse=True)
def _gpu() -> Iterator[None]:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA machine")
    allowed = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = allowed
    torch.cuda.empty_cache()


def build(kind: str) -> Model:
    """In float32 on transformers' eager attention, with adapters whose B is not zero."""
    config = transformers.Gemma2Config(
        vocab_size=VOCABULARY, hidden_size=1024, intermediate_size=2048, num_hidden_layers=2, layer_types=KINDS[kind],
        num_attention_heads=16, num_key_value_heads=8, head_dim=256, query_pre_attn_scalar=256, sliding_window=WINDOW,
        max_position_embeddings=LENGTH, attn_logit_softcapping=50.0, final_logit_softcapping=30.0,
    )  # fmt: skip
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    for name, parameter in model.named_parameters():
        if "q_proj" in name or "k_proj" in name:
            parameter.data.mul_(4.0)  # scores of tens, where the cap bends
    settings = peft.LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    model = peft.get_peft_model(model, settings)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(std=0.02)
    return model.eval()


def in_bfloat16(model: Model) -> Model:
    """The frozen weights rounded, the adapters as they are: what training holds."""
    copied = copy.deepcopy(model)
    for parameter in copied.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.bfloat16()
    return copied


def rounded(model: Model) -> Model:
    """The reference with the same rounded weights, computed in float32."""
    for parameter in model.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.bfloat16().float()
    return model


def batch(layout: str) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Inputs, labels, and where logits mean something."""
    generator = torch.Generator().manual_seed(7)
    count = 2 if layout in ("left", "right") else 1
    ids = torch.randint(3, VOCABULARY, (count, LENGTH), generator=generator)
    tokens = torch.ones_like(ids, dtype=torch.bool)
    if layout == "packed":
        positions = torch.cat([torch.arange(n) for n in (300, 4097, 1, LENGTH - 4398)])[None]
        labels = ids.masked_fill(positions == 0, -100)
        return {"input_ids": ids.cuda(), "position_ids": positions.cuda()}, labels.cuda(), tokens.cuda()
    if count == 2:
        tokens = torch.arange(LENGTH) < torch.tensor([[LENGTH], [5000]])
        tokens = tokens.flip(1) if layout == "left" else tokens
    labels = ids.masked_fill(~tokens, -100)
    labels = labels.masked_fill(tokens.cumsum(1) <= 1, -100)
    inputs = {"input_ids": ids.masked_fill(~tokens, 0).cuda()}
    if count == 2:
        inputs["attention_mask"] = tokens.long().cuda()
    return inputs, labels.cuda(), tokens.cuda()


def outputs(model: Model, inputs: dict[str, Tensor], labels: Tensor, *, autocast: bool) -> tuple[Tensor, Tensor]:
    """Hidden states before the head, and the mean loss."""
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        hidden = hidden_states(model, inputs)
        found = next_token_loss(hidden, head_of(model), labels)
    return hidden.tensor.float(), found.loss / found.count


def relative(value: Tensor, exact: Tensor) -> float:
    return float((value - exact).norm() / exact.norm())


@pytest.mark.parametrize("layout", ["whole", "left", "right", "packed"])
@pytest.mark.parametrize("kind", KINDS)
def test_two_windows_at_the_true_head_size_in_bfloat16(kind: str, layout: str) -> None:
    """As close to float32 as transformers' own bfloat16, 1.5 times over, and no scores in memory."""
    reference = build(kind)
    ours, plain = in_bfloat16(reference), in_bfloat16(reference)
    rounded(reference)
    assert all(entry.on for entry in patch(ours, "triton").table)
    inputs, labels, tokens = batch(layout)
    with torch.no_grad():
        exact, exact_loss = outputs(reference, inputs, labels, autocast=False)
        theirs, _ = outputs(plain, inputs, labels, autocast=True)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        found, loss = outputs(ours, inputs, labels, autocast=True)
        grown = torch.cuda.max_memory_allocated() - before
    error, allowed = relative(found[tokens], exact[tokens]), relative(theirs[tokens], exact[tokens])
    assert error <= max(1.5 * allowed, 1e-3), (error, allowed)
    assert loss.item() == pytest.approx(exact_loss.item(), rel=2e-3)
    # One layer's scores would be 16 heads x 8192² x 2 bytes = 2 GiB a row, a boolean mask 64 MiB and one for each kind.
    assert grown < 1.5 * 2**30, grown


@pytest.mark.parametrize("layout", ["left", "packed"])
def test_float32_on_the_kernels_is_float32(layout: str) -> None:
    reference = build("alternating")
    ours = copy.deepcopy(reference)
    assert all(entry.on for entry in patch(ours, "triton").table)
    inputs, labels, tokens = batch(layout)
    with torch.no_grad():
        exact, exact_loss = outputs(reference, inputs, labels, autocast=False)
        found, loss = outputs(ours, inputs, labels, autocast=False)
    assert relative(found[tokens], exact[tokens]) <= 1e-5
    assert loss.item() == pytest.approx(exact_loss.item(), rel=1e-5)


def test_gradients_past_the_window_in_bfloat16() -> None:
    reference = build("alternating")
    ours, plain = in_bfloat16(reference), in_bfloat16(reference)
    rounded(reference)
    patch(ours, "triton")
    inputs, labels, _ = batch("packed")
    wanted, theirs, found = (
        gradients(model, inputs, labels, autocast=model is not reference) for model in (reference, plain, ours)
    )
    assert set(found) == set(wanted)
    for name, exact in wanted.items():
        allowed = relative(theirs[name], exact)
        assert relative(found[name], exact) <= max(1.5 * allowed, 1e-3), (name, allowed)


def gradients(model: Model, inputs: dict[str, Tensor], labels: Tensor, *, autocast: bool) -> dict[str, Tensor]:
    outputs(model, inputs, labels, autocast=autocast)[1].backward()
    found = {name: p.grad.float() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def evaluated(model: Model, rows: list[TokenizedRow], batch_size: int, layout: Any) -> LossResult:
    plan = DtypePlan("float32", "float32", "float32", False, "a test")
    return evaluate_loss(
        model, rows, pad_token_id=0, batch_size=batch_size, plan=plan, device=torch.device("cuda"),
        reporter=SilentReporter(), layout=layout, pack_length=LENGTH,
    )  # fmt: skip


def test_evaluation_gives_one_loss_past_the_window() -> None:
    model = build("alternating").requires_grad_(False)
    patch(model, "triton")
    generator = torch.Generator().manual_seed(3)
    rows = []
    for number, length in enumerate((4095, 4096, 4097, 8192, 600, 2), start=1):
        ids = torch.randint(3, VOCABULARY, (length,), generator=generator).tolist()
        rows.append(TokenizedRow(Row("a test", number, {}), ids, [-100, *ids[1:]]))
    alone = evaluated(model, rows, 1, "right")
    for batch_size, layout in ((2, "right"), (5, "right"), (2, "left"), (5, "left"), (2, "packed")):
        found = evaluated(model, rows, batch_size, layout)
        assert found.loss == pytest.approx(alone.loss, rel=1e-5), (batch_size, layout)
        assert found.tokens == alone.tokens


def test_cached_generation_past_the_window_equals_running_it_all_again() -> None:
    model = build("alternating").requires_grad_(False)
    patch(model, "triton")
    ids = torch.randint(3, VOCABULARY, (1, WINDOW - 2), generator=torch.Generator().manual_seed(5)).cuda()
    cached = model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False, eos_token_id=None,
        pad_token_id=0, return_dict_in_generate=True, output_logits=True,
    )  # fmt: skip
    base = base_of(model)
    cap = base.config.final_logit_softcapping
    with torch.no_grad():
        states = hidden_states(model, {"input_ids": cached.sequences}).tensor[:, WINDOW - 3 : -1]
        again = torch.tanh(base.lm_head(states) / cap) * cap
    assert relative(torch.stack(cached.logits, dim=1), again) <= 1e-5


def test_masks_wait_for_the_device_at_most_once_a_call_and_layer_type() -> None:
    """Layers beyond the first of each type cost no synchronisation: four layers as many as two."""
    inputs, _, _ = batch("left")
    counts = []
    for layers in (2, 4):
        made = build("alternating").get_base_model().config
        made.num_hidden_layers, made.layer_types = layers, KINDS["alternating"] * (layers // 2)
        made.hidden_size, made.intermediate_size = 256, 256
        with torch.device("cuda"):
            model = transformers.AutoModelForCausalLM.from_config(made, dtype=torch.bfloat16).requires_grad_(False)
        patch(model, "triton")
        with torch.no_grad(), warnings.catch_warnings(record=True) as caught:
            hidden_states(model, inputs)
            warnings.simplefilter("always")
            caught.clear()
            torch.cuda.set_sync_debug_mode("warn")
            try:
                hidden_states(model, inputs)
            finally:
                torch.cuda.set_sync_debug_mode("default")
            counts.append(sum("synchronizing" in str(warning.message) for warning in caught))
    # The first model may have one more: what transformers looks at once in a process.
    assert counts[1] <= counts[0] <= 3, counts
