"""A trainer's part in a group of ranks: one batch each, gradients added up, and every decision made by all.

transformers and accelerate know nothing of the other ranks: to them each is a process of its own. What a rank computes
is what one process computes for one of several accumulated micro-batches; the sum over ranks takes the place of the
sum over micro-batches. So N ranks are the same run as one process that accumulates N times as many.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ftcli.errors import ExitCode, FtcliError
from ftcli.model.gradients import Gradients
from ftcli.model.sequence_parallel import SequencePart

if TYPE_CHECKING:
    from ftcli.run.group import RankGroup

#: The key of a batch under which its tokens are counted: supervised, real, computed. It is taken out with the rows.
COUNTS_KEY = "ftcli_counts"
_COUNTS = 3
_NORM = "the gradient norm"
#: Ranks that train the same weights compute the same gradient norm; other kinds of GPU may round it differently.
_DRIFT = 1e-3
#: Multiplies the recipe's seed, so that neighbouring seeds, steps and ranks have nothing in common.
SPREAD = 1_000_003


def host_counts(batch: Mapping[str, Tensor], supervised: Tensor, blank: bool) -> list[int]:
    """Supervised, real and computed tokens of a batch, or a rank's part of it, that lies on the host."""
    if blank:
        return [0, 0, batch["input_ids"].numel()]
    real = batch["attention_mask"] if "attention_mask" in batch else batch["lengths"]
    return [supervised.numel(), int(real.sum()), batch["input_ids"].numel()]


def numbers_agreed(batches: int, batch_size: int) -> int:
    """How many numbers a rank tells the others before a step of so many batches."""
    return 1 + _COUNTS + batches * batch_size


def sequence_part(group: RankGroup | None, parts: int) -> SequencePart | None:
    """This rank's part of the rows that ``parts`` consecutive ranks share; None where rows are not shared. All ranks
    call it.
    """
    if group is None or parts == 1:
        return None
    return SequencePart(group.rank % parts, parts, group.teams(parts))


class TogetherMixin:
    """Mixed into a trainer before :class:`ftcli.trainers.base.RunTrainerMixin`; does nothing without a group.

    Attributes:
        group: The ranks that train together.
        reduces: Whether they do; `ftcli bench` times the same step without.
    """

    group: RankGroup | None = None
    reduces = True
    _losses: list[Tensor]
    _counts: Sequence[int] = (0,) * _COUNTS
    _rows_of_all: Sequence[tuple[int, ...]] = ()
    _last_norm = 0.0
    _summed: Gradients | None = None
    _with_gradient: Sequence[nn.Parameter] = ()
    _without: Sequence[nn.Parameter] = ()

    # -- a step ----------------------------------------------------------------------------------------------

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> tuple[list[Any], Any]:
        """This rank's batches of one step, and the supervised tokens of all ranks' batches, by which the loss is
        divided."""
        batches, items = super().get_batch_samples(*args, **kwargs)  # type: ignore[misc]
        nothing = (0,) * _COUNTS
        counts = [batch.pop(COUNTS_KEY, nothing) if isinstance(batch, dict) else nothing for batch in batches]
        group = self.group
        if group is None or not self.reduces or not batches:
            return batches, items
        mine = [sum(column) for column in zip(*counts, strict=True)]
        size = self.args.per_device_train_batch_size  # type: ignore[attr-defined]
        padded = [row for rows in self._rows for row in (*(r + 1 for r in rows), *(0,) * (size - len(rows)))]  # type: ignore[attr-defined]
        told = group.agree("step begins", [_bits(self._last_norm), *mine, *padded])
        self._require_alike([row[0] for row in told])
        self._counts = [sum(row[1 + i] for row in told) for i in range(_COUNTS)]
        self._rows_of_all = _rows_by_batch([row[1 + _COUNTS :] for row in told], len(batches), size)
        self._losses = []
        return batches, torch.tensor(self._counts[0], device=self.args.device)  # type: ignore[attr-defined]

    def begin_step(self) -> None:
        """As its base. What is drawn at random in this step depends on seed, step and rank alone, so that a run that is
        continued draws the same."""
        super().begin_step()  # type: ignore[misc]
        if self.group is not None:
            step = self.args.seed * SPREAD + self.state.global_step  # type: ignore[attr-defined]
            torch.manual_seed((step * SPREAD + self.group.rank) % 2**63)

    def count_tokens(self, mask: Tensor, computed: int = 0) -> None:
        """As its base for one process. The tokens of a group are counted on the host, when their step is whole."""
        if self.group is None or not self.reduces:
            super().count_tokens(mask, computed)  # type: ignore[misc]

    def watch_loss(self, loss: Tensor) -> None:
        """Remembers the loss of a batch, to be checked for NaN and infinity later."""
        if self.group is None or not self.reduces:
            super().watch_loss(loss)  # type: ignore[misc]

    @property
    def _micro_batches_left(self) -> int:
        """Of the step, with the one that is being computed."""
        return len(self._rows) - len(self._losses)  # type: ignore[attr-defined]

    def training_step(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Forward and backward of one batch; after the last one of a step gradients and losses of all ranks."""
        with nullcontext() if self.group is None else self.group.exchanging():
            loss: Tensor = super().training_step(model, inputs, *args, **kwargs)  # type: ignore[misc]
        if self.group is None or not self.reduces:
            return loss
        self._losses.append(loss)
        if len(self._losses) < len(self._rows):  # type: ignore[attr-defined]
            return torch.zeros_like(loss)
        return self._together(self.group)

    def _together(self, group: RankGroup) -> Tensor:
        """Adds up the gradients, and returns what is still to be added to the sum of the losses."""
        group.agree("step ends")
        self._reduce(group)
        slots = torch.zeros(len(self._losses) * group.size, device=self._losses[0].device)
        slots[group.rank :: group.size] = torch.stack(self._losses).float()
        group.add_up([slots])  # the others' places hold zeros: every loss is told as it is, NaN included
        for index, loss in enumerate(slots):
            name = f"the loss of rank {index % group.size}"
            self.watch(name, loss, self._rows_of_all[index])
        for loss in slots[:-1]:  # in the order in which one process would have computed them
            self._tr_loss += loss  # type: ignore[attr-defined]
        _, real, computed = self._counts
        self.tokens_seen += real  # type: ignore[attr-defined]
        self.window.tokens += real  # type: ignore[attr-defined]
        self.tokens_computed += computed  # type: ignore[attr-defined]
        return slots[-1].clone()

    def _reduce(self, group: RankGroup) -> None:
        """Makes each trained weight's gradient the sum over all ranks."""
        if not self._with_gradient:
            trained = [p for p in self.model.parameters() if p.requires_grad]  # type: ignore[attr-defined]
            has = torch.tensor([p.grad is not None for p in trained], dtype=torch.uint8)
            anywhere = torch.stack(group.gather(has)).amax(0).tolist()
            self._with_gradient = [p for p, some in zip(trained, anywhere, strict=True) if some]
            self._without = [p for p, some in zip(trained, anywhere, strict=True) if not some]
        if any(p.grad is not None for p in self._without):
            raise RuntimeError("a weight has a gradient that had none on any rank in the first step")
        if self._summed is None:
            self._summed = Gradients.zeros_like(self._with_gradient)
        summed = self._summed.tensors
        pairs = list(zip(summed, self._with_gradient, strict=True))
        missing = [total for total, p in pairs if p.grad is None]
        if missing:
            torch._foreach_zero_(missing)
        present = [(total, p.grad) for total, p in pairs if p.grad is not None]
        torch._foreach_copy_([total for total, _ in present], [gradient for _, gradient in present])
        group.add_up(self._summed.buffers)
        for total, parameter in pairs:
            parameter.grad = total

    # -- decisions -------------------------------------------------------------------------------------------

    def check_finite(self, *, before_step: int | None = None) -> None:
        """As its base, on the same numbers on every rank: all raise, or none."""
        for watched in self._pending:  # type: ignore[attr-defined]
            if watched.name == _NORM and (before_step is None or watched.step < before_step):
                self._last_norm = watched.number()
        super().check_finite(before_step=before_step)  # type: ignore[misc]

    def watch(self, name: str, value: Tensor, rows: tuple[int, ...] | None = None) -> None:
        """As its base. The gradient norm is that of all ranks' rows."""
        if self.group is not None and self.reduces and name == _NORM:
            rows = tuple(row for batch in self._rows_of_all for row in batch)
        super().watch(name, value, rows)  # type: ignore[misc]

    def _require_alike(self, norms: Sequence[int]) -> None:
        found = [_number(bits) for bits in norms]
        low, high = min(found), max(found)
        if math.isfinite(low) and math.isfinite(high) and high - low > _DRIFT * max(abs(high), abs(low)):
            listed = ", ".join(f"{norm:.6g} on rank {rank}" for rank, norm in enumerate(found))
            raise FtcliError.single(
                "FT711",
                f"the ranks do not train the same weights any more: the last gradient norm is {listed}",
                exit_code=ExitCode.DIVERGED,
                help="a GPU that computes wrongly is the likely reason: train on each alone to find it. Go on from an "
                "earlier checkpoint",
            )

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Rank 0 writes for all."""
        if self.group is None or self.group.leads:
            super()._save_checkpoint(model, trial)  # type: ignore[misc]
            return
        self.check_finite()
        self.take_token_count()  # type: ignore[attr-defined]
        self.saved_step = self.state.global_step  # type: ignore[attr-defined]


def _bits(number: float) -> int:
    """A float as an integer, to the last bit."""
    return int(struct.unpack("q", struct.pack("d", number))[0])


def _number(bits: int) -> float:
    return float(struct.unpack("d", struct.pack("q", bits))[0])


def _rows_by_batch(told: Sequence[Sequence[int]], batches: int, size: int) -> list[tuple[int, ...]]:
    """The rows of each batch of a step in the order in which one process would take them: the first of each rank, then
    the second of each."""
    return [
        tuple(row - 1 for row in rank[batch * size : (batch + 1) * size] if row)
        for batch in range(batches)
        for rank in told
    ]
