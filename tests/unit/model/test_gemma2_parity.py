"""Gemma-2 on our path computes what transformers' eager Gemma-2 computes, in float32, around every window's edge.

The field's failure that this table rules out: evaluation past the 4096 window ended in "'bool' object is not
subscriptable" or a broadcast error, or went on with global layers silently windowed. So each case runs on a model whose
layers alternate, on one with global layers only and on one with windowed layers only: a mask on the wrong layers
fails in one of them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import peft
import pytest
import torch
import transformers
from ftkernels.device import interpreting
from torch import Tensor
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from ftcli.model.attention import ftcli_attention_forward
from ftcli.model.backbone import base_of, head_of, hidden_states
from ftcli.model.loss import next_token_loss
from ftcli.model.masks import mask_for
from ftcli.model.patch import patch
from tests.pairs import all_pairs

KINDS = {
    "alternating": ["sliding_attention", "full_attention"],
    "global": ["full_attention"],
    "windowed": ["sliding_attention"],
}
INTERPRETED = "ftcli-interpreted"
Model = Any


def config(kind: str, window: int, **changes: Any) -> Any:
    """A tiny Gemma-2 with weights so large that scores reach the cap and logits theirs."""
    values: dict[str, Any] = {
        "vocab_size": 48,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": len(KINDS[kind]),
        "layer_types": KINDS[kind],
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "query_pre_attn_scalar": 24,
        "sliding_window": window,
        "max_position_embeddings": 2 * window + 8,
        "initializer_range": 0.4,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    made = transformers.Gemma2Config(**{**values, **changes})
    made._attn_implementation = "eager"
    return made


def build(made: Any) -> Model:
    """The model with adapters whose B is not zero; its config is its own, for that is where its attention stands."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(copy.deepcopy(made))
    model = peft.get_peft_model(
        model, peft.LoraConfig(r=2, lora_alpha=4, target_modules="all-linear", task_type="CAUSAL_LM")
    )
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(std=0.05)
    return model


def on_torch(model: Model) -> None:
    """Our layers and our attention on plain torch, as on a machine without the kernels."""
    assert all(entry.on for entry in patch(model, "reference").table)


def on_kernels(model: Model) -> None:
    """The same with our Triton attention in the interpreter; tests/ops has the other kernels."""
    if not interpreting():
        pytest.skip("Triton's interpreter is off (TRITON_INTERPRET=1 turns it on)")
    on_torch(model)
    AttentionInterface.register(INTERPRETED, partial(ftcli_attention_forward, kernels="triton"))
    AttentionMaskInterface.register(INTERPRETED, mask_for)
    base_of(model).set_attn_implementation(INTERPRETED)


@dataclass(frozen=True)
class Batch:
    """One layout of one length; ``tokens`` is True where the reference's logits mean something."""

    name: str
    inputs: dict[str, Tensor]
    labels: Tensor
    tokens: Tensor


def layouts(length: int, rows: tuple[int, ...] = (1, 3)) -> Iterator[Batch]:
    """Whole, padded on either side, and packed rows, in batches of 1 and of 3."""
    for count in rows:
        generator = torch.Generator().manual_seed(length + count)
        ids = torch.randint(3, 48, (count, length), generator=generator)
        every = torch.ones_like(ids, dtype=torch.bool)
        yield Batch(f"{count} whole", {"input_ids": ids}, ids, every)
        yield packed(ids)
        if count > 1:
            sizes = torch.tensor([length, max(length // 2, 1), max(length - 3, 1)])[:count, None]
            for side in ("left", "right"):
                tokens = torch.arange(length) < sizes
                tokens = tokens.flip(1) if side == "left" else tokens
                inputs = {"input_ids": ids.masked_fill(~tokens, 0), "attention_mask": tokens.long()}
                # What padding says of the first token is no part of the loss.
                labels = ids.masked_fill(~(tokens & tokens.roll(1, 1)), -100)
                yield Batch(f"{count} {side}", inputs, labels, tokens)


def packed(ids: Tensor, starts: tuple[int, ...] = ()) -> Batch:
    """Documents of different lengths in each row, and no attention mask, as packed training gives them."""
    count, length = ids.shape
    positions = torch.arange(length).repeat(count, 1)
    for row in range(count):
        for start in starts or (length // 3 + row, length // 2 + 2 * row):
            positions[row, start:] = torch.arange(max(length - start, 0))
    labels = ids.masked_fill(positions == 0, -100)
    every = torch.ones_like(ids, dtype=torch.bool)
    return Batch(f"{count} packed", {"input_ids": ids, "position_ids": positions}, labels, every)


def relative(value: Tensor, exact: Tensor) -> float:
    """Frobenius norm of the difference over that of the exact value."""
    return float((value - exact).detach().norm() / exact.detach().norm())


def reference(model: Model, batch: Batch) -> tuple[Tensor, Tensor]:
    """transformers' own logits and loss; with a cache it would not look for packed documents."""
    out = model(**batch.inputs, labels=batch.labels, use_cache=False)
    return out.logits, out.loss


def ours(model: Model, batch: Batch) -> tuple[Tensor, Tensor]:
    """Logits of the patched model, and the loss through the chunked head, as training and evaluation take it."""
    hidden = hidden_states(model, batch.inputs)
    base = base_of(model)
    logits = base.lm_head(hidden.tensor)
    cap = base.config.final_logit_softcapping
    found = next_token_loss(hidden, head_of(model), batch.labels)
    return torch.tanh(logits / cap) * cap, found.loss / found.count


def gradients(model: Model, loss: Tensor) -> dict[str, Tensor]:
    """Of every adapter."""
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_parity(expected: Model, model: Model, batches: list[Batch], *, training: bool) -> None:
    """Logits and loss within 1e-5, gradients within 1e-4."""
    assert base_of(expected).config._attn_implementation == "eager"
    expected.train(training)
    model.train(training)
    for batch in batches:
        with torch.set_grad_enabled(training):
            logits, loss = reference(expected, batch)
            got_logits, got_loss = ours(model, batch)
        assert relative(got_logits[batch.tokens], logits[batch.tokens]) <= 1e-5, batch.name
        assert got_loss.item() == pytest.approx(loss.item(), rel=1e-5), batch.name
        if training:
            wanted, got = gradients(expected, loss), gradients(model, got_loss)
            assert set(got) == set(wanted)
            for name, value in wanted.items():
                assert relative(got[name], value) <= 1e-4, (batch.name, name)


def around(window: int) -> list[int]:
    """Lengths at the window's edge and well past it."""
    return [window - 1, window, window + 1, 2 * window + 3]


@pytest.mark.parametrize(("kind", "window", "pass_"), all_pairs(list(KINDS), (8, 64), ("evaluation", "training")))
def test_every_layout_around_the_window(kind: str, window: int, pass_: str) -> None:
    """A training pass has evaluation's logits and loss in it; masks are made in one way for both."""
    made = config(kind, window)
    expected, model = build(made), build(made)
    on_torch(model)
    batches = [batch for length in around(window) for batch in layouts(length)]
    assert_parity(expected, model, batches, training=pass_ == "training")


@pytest.mark.parametrize(
    ("kind", "length", "name"), all_pairs(list(KINDS), (9, 19), ("3 whole", "3 packed", "3 left", "3 right"))
)
def test_every_layout_on_the_kernels(kind: str, length: int, name: str) -> None:
    """tests/ops has the kernels at every edge; here they get their masks from transformers.

    A mask depends on two of the three at most: on layer and length, layer and layout, or length and layout.
    """
    made = config(kind, 8)
    expected, model = build(made), build(made)
    on_kernels(model)
    batch = next(batch for batch in layouts(length, rows=(3,)) if batch.name == name)
    assert_parity(expected, model, [batch], training=False)


def test_training_on_the_kernels_past_the_window() -> None:
    made = config("alternating", 8)
    expected, model = build(made), build(made)
    on_kernels(model)
    batches = [batch for batch in layouts(19, rows=(3,)) if batch.name in ("3 left", "3 packed")]
    assert_parity(expected, model, batches, training=True)


def test_a_larger_window_on_the_kernels() -> None:
    made = config("alternating", 64, num_attention_heads=1)
    expected, model = build(made), build(made)
    on_kernels(model)
    assert_parity(expected, model, list(layouts(131, rows=(1,))), training=False)


@pytest.mark.parametrize(
    ("attention", "name"), [(on_torch, "3 left"), (on_kernels, "1 packed")], ids=["torch", "kernels"]
)
def test_gradient_checkpointing_runs_on_the_same_masks(attention: Callable[[Model], None], name: str) -> None:
    """Layers that are run again in the backward find the mask of their own call."""
    made = config("alternating", 8)
    expected, model = build(made), build(made)
    attention(model)
    for each in (expected, model):
        base_of(each).gradient_checkpointing_enable({"use_reentrant": False})
        each.enable_input_require_grads()
    assert_parity(expected, model, [b for b in layouts(11) if b.name == name], training=True)


#: Past the true window with little more than the window itself: one head, and a tenth of a billion scores a layer.
TRUE_WINDOW = {"num_attention_heads": 1, "hidden_size": 16, "intermediate_size": 16}


@pytest.mark.parametrize(("kind", "length", "name"), [
    ("windowed", 4095, "1 packed"),
    ("alternating", 4096, "1 whole"),
    ("global", 4097, "1 whole"),
])  # fmt: skip
def test_gemma2s_own_window(kind: str, length: int, name: str) -> None:
    batch = next(batch for batch in layouts(length, rows=(int(name[0]),)) if batch.name == name)
    assert_parity_at_gemma2s_own_window(kind, batch)


def test_a_padded_row_past_gemma2s_own_window() -> None:
    """Its window counts from its own end, behind the padding on its left."""
    ids = torch.randint(3, 48, (1, 4100), generator=torch.Generator().manual_seed(1))
    tokens = (torch.arange(4100) >= 3)[None]
    inputs = {"input_ids": ids.masked_fill(~tokens, 0), "attention_mask": tokens.long()}
    labels = ids.masked_fill(~(tokens & tokens.roll(1, 1)), -100)
    assert_parity_at_gemma2s_own_window("windowed", Batch("1 left", inputs, labels, tokens))


@pytest.mark.slow
def test_a_document_past_gemma2s_own_window_behind_others() -> None:
    ids = torch.randint(3, 48, (1, 4300), generator=torch.Generator().manual_seed(1))
    assert_parity_at_gemma2s_own_window("alternating", packed(ids, (70, 190)))


def assert_parity_at_gemma2s_own_window(kind: str, batch: Batch) -> None:
    made = config(kind, 4096, **TRUE_WINDOW)
    expected, model = build(made), build(made)
    on_torch(model)
    assert_parity(expected, model, [batch], training=False)


def prompts(lengths: tuple[int, ...], side: str) -> dict[str, Tensor]:
    """Random prompts, padded to the longest."""
    longest = max(lengths)
    tokens = torch.arange(longest) < torch.tensor(lengths)[:, None]
    tokens = tokens.flip(1) if side == "left" else tokens
    ids = torch.randint(3, 48, tokens.shape, generator=torch.Generator().manual_seed(longest))
    return {"input_ids": ids.masked_fill(~tokens, 0), "attention_mask": tokens.long()}


def generated(model: Model, inputs: dict[str, Tensor], tokens: int) -> tuple[Tensor, Tensor]:
    """Greedy continuation and the logits of every step (steps, rows, vocabulary)."""
    model.eval()
    out = model.generate(
        **inputs,
        max_new_tokens=tokens,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
        eos_token_id=None,
    )
    return out.sequences, torch.stack(out.logits)


@pytest.mark.whole_grid
@pytest.mark.parametrize(("window", "lengths", "new"), [(8, (5, 3, 7), 14), (8, (19, 8, 9), 4), (64, (63, 20, 64), 6)])
@pytest.mark.parametrize("kind", KINDS)
def test_cached_generation_past_the_window(kind: str, window: int, lengths: tuple[int, ...], new: int) -> None:
    made = config(kind, window)
    expected, model = build(made), build(made)
    on_torch(model)
    inputs = prompts(lengths, "left")
    sequences, logits = generated(expected, inputs, new)
    got_sequences, got_logits = generated(model, inputs, new)
    assert torch.equal(got_sequences, sequences)
    assert relative(got_logits, logits) <= 1e-5


def test_cached_generation_past_gemma2s_own_window() -> None:
    made = config("alternating", 4096, **TRUE_WINDOW)
    expected, model = build(made), build(made)
    on_torch(model)
    inputs = prompts((4094,), "left")
    sequences, logits = generated(expected, inputs, 5)
    got_sequences, got_logits = generated(model, inputs, 5)
    assert torch.equal(got_sequences, sequences)
    assert relative(got_logits, logits) <= 1e-5


def test_prefill_and_cache_on_the_kernels() -> None:
    made = config("alternating", 8)
    expected, model = build(made), build(made)
    on_kernels(model)
    inputs = prompts((11, 6), "left")
    sequences, logits = generated(expected, inputs, 3)
    got_sequences, got_logits = generated(model, inputs, 3)
    assert torch.equal(got_sequences, sequences)
    assert relative(got_logits, logits) <= 1e-5


def test_gemma_2_evaluation_past_the_window_with_batches_and_either_padding_side() -> None:
    """The failure elsewhere: "'bool' object is not subscriptable", broadcast errors, global layers silently windowed.

    Every row gets the loss that it gets alone, in a batch of any size and on either side of its padding; and a model
    whose windowed layers are made global, or the reverse, gives another one: a mask on the wrong layers would show.
    """
    model = build(config("alternating", 8))
    on_torch(model)
    model.eval()
    rows = [prompts((length,), "left")["input_ids"] for length in (19, 7, 8, 9, 31)]
    with torch.no_grad():
        alone = [ours(model, Batch("", {"input_ids": ids}, ids, ids > 0))[1].item() for ids in rows]
        for side in ("left", "right"):
            for count in (2, 5):
                weights = [row.shape[1] - 1 for row in rows[:count]]
                expected = sum(w * a for w, a in zip(weights, alone, strict=False)) / sum(weights)
                assert ours(model, joined(rows[:count], side))[1].item() == pytest.approx(expected, rel=1e-5)
        for kind in ("full_attention", "sliding_attention"):
            other = build(config("alternating", 8, layer_types=[kind, kind]))
            on_torch(other)
            other.eval()
            loss = ours(other, Batch("", {"input_ids": rows[4]}, rows[4], rows[4] > 0))[1].item()
            assert loss != pytest.approx(alone[4], rel=1e-3)


def joined(rows: list[Tensor], side: str) -> Batch:
    """Rows of (1, length) as one padded batch; nothing predicts the first token of a row."""
    longest = max(row.shape[1] for row in rows)
    ids = torch.zeros(len(rows), longest, dtype=torch.long)
    labels = torch.full_like(ids, -100)
    for i, row in enumerate(rows):
        start = longest - row.shape[1] if side == "left" else 0
        ids[i, start : start + row.shape[1]] = row[0]
        labels[i, start + 1 : start + row.shape[1]] = row[0, 1:]
    return Batch(side, {"input_ids": ids, "attention_mask": (ids > 0).long()}, labels, ids > 0)
