"""A fixed batch and the logits that models give for it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ftcli.data.bounded import REFUSALS, limited_template

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

#: A user's messages, rendered in the model's chat template; plain text where it has none.
TEXTS = ("Name three rivers of Europe, and say where each one ends.", "def add(a, b):\n    return a + b\n")
ROW_TOKENS = 40
#: How many of the likeliest tokens the first row is gone on with; and by a model whose weights are read anew for each.
NEW_TOKENS, STREAMED_TOKENS = 6, 2


@dataclass(frozen=True, slots=True)
class Probe:
    """``input_ids`` and ``attention_mask`` are (rows, tokens), padded on the right.

    Attributes:
        new_tokens: How many tokens at the end of the first row are what the trained model goes on with.
    """

    input_ids: Tensor
    attention_mask: Tensor
    new_tokens: int = 0

    @property
    def prompt(self) -> Tensor:
        """The first row (1, tokens) without what the trained model goes on with."""
        return self.input_ids[:1, : self._first - self.new_tokens]

    @property
    def greedy(self) -> Tensor:
        """The tokens that the trained model goes on with: (new_tokens,)."""
        return self.input_ids[0, self._first - self.new_tokens : self._first]

    @property
    def continued_at(self) -> slice:
        """The positions, among those of :func:`logits`, at which the trained model chose each of these tokens."""
        return slice(self._first - self.new_tokens - 1, self._first - 1)

    @property
    def _first(self) -> int:
        return int(self.attention_mask[0].sum())


def probe_batch(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> Probe:
    """Two texts of different length and one row of ids from everywhere in the vocabulary; the same every time."""
    rows = [torch.tensor(rendered_ids(tokenizer, text)[:ROW_TOKENS], dtype=torch.long) for text in TEXTS]
    rows.append(torch.randint(0, vocab_size, (ROW_TOKENS,), generator=torch.Generator().manual_seed(0)))
    return _padded([row.clamp(max=vocab_size - 1) for row in rows], tokenizer.pad_token_id or 0)


def _padded(rows: Sequence[Tensor], padding: int, new_tokens: int = 0) -> Probe:
    ids = torch.full((len(rows), max(len(row) for row in rows)), padding)
    mask = torch.zeros_like(ids)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = row
        mask[i, : len(row)] = 1
    return Probe(ids, mask, new_tokens)


@torch.no_grad()
def continued(model: PreTrainedModel | PeftModel, probe: Probe, tokens: int = NEW_TOKENS) -> Probe:
    """``probe`` with the first row continued by ``model``: ``tokens`` times the likeliest token."""
    rows = [row[mask.bool()] for row, mask in zip(probe.input_ids, probe.attention_mask, strict=True)]
    for _ in range(tokens):
        alone = Probe(rows[0][None], torch.ones_like(rows[0][None]))
        rows[0] = torch.cat((rows[0], logits(model, alone)[-1:].argmax(-1)))
    return _padded(rows, 0, tokens)


def rendered_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """``text`` as a user's message up to where the answer begins; plain without a chat template that takes it."""
    try:
        with limited_template():
            shown = tokenizer.apply_chat_template(
                [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
            )
    except REFUSALS:  # without a template this is a ValueError
        return list(tokenizer(text)["input_ids"])
    return list(tokenizer(shown, add_special_tokens=False)["input_ids"])


@torch.no_grad()
def logits(model: PreTrainedModel | PeftModel, probe: Probe) -> Tensor:
    """Float32 logits (positions, vocabulary) of all positions that are not padding."""
    # transformers compiles the rounding of some layers, which needs a compiler and takes longer than the pass.
    quantized = getattr(model.config, "quantization_config", None) is not None
    with torch.compiler.set_stance("force_eager") if quantized else nullcontext():
        output = model(input_ids=probe.input_ids, attention_mask=probe.attention_mask, use_cache=False)
    real: Tensor = output.logits[probe.attention_mask.bool()].float()
    return real


@dataclass(frozen=True, slots=True)
class LogitsComparison:
    """Distance of logits from their reference.

    Each position's mean is removed first, since softmax does not see it.

    Attributes:
        relative_error: Root mean square of the difference, over that of the reference.
        top1_agreement: Share of positions with the same likeliest token.
        firm_disagreements: Positions with another likeliest token that rounding cannot explain: the reference's best
            is ahead of its second by more than ``4 · tolerance`` times its root mean square.
    """

    relative_error: float
    top1_agreement: float
    firm_disagreements: int


def compare_logits(found: Tensor, reference: Tensor, tolerance: float) -> LogitsComparison:
    """Compare two (positions, vocabulary) tensors; NaN anywhere gives an infinite error."""
    reference = reference.double() - reference.double().mean(dim=-1, keepdim=True)
    found = found.double() - found.double().mean(dim=-1, keepdim=True)
    scale = reference.square().mean().sqrt().clamp(min=1e-30)
    error = float((found - reference).square().mean().sqrt() / scale)
    same = found.argmax(-1) == reference.argmax(-1)
    best = reference.topk(2, dim=-1).values
    firm = (best[:, 0] - best[:, 1]) > 4 * tolerance * scale
    return LogitsComparison(
        relative_error=error if error == error else float("inf"),
        top1_agreement=float(same.double().mean()),
        firm_disagreements=int((firm & ~same).sum()),
    )
