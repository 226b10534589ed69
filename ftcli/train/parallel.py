"""The ranks of one run in a step: one batch each, gradients all-reduced, every decision made by all.

What a rank computes is what one process computes for one of several accumulated micro-batches; the sum over ranks takes
the place of the sum over micro-batches. So N ranks are the same run as one process that accumulates N times as many.

Weights that are trained may be sharded over the ranks (full fine-tuning under ``launch.engine: fsdp``). Backward has
then reduced their gradients, the optimizer keeps state for this rank's shards alone, and what is written is what one
process would have written, so that any number of ranks can resume from it.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ftcli.errors import ExitCode, FtcliError
from ftcli.model.backbone import root_of
from ftcli.model.cuda_graphs import Gradients
from ftcli.model.sequence_parallel import SequencePart
from ftcli.model.shards import gather_like, gather_weights, replicas_of, reshard_model, trained_is_sharded
from ftcli.model.vision import trains_tower

if TYPE_CHECKING:
    from torch.optim import Optimizer
    from torch.optim.optimizer import StateDict

    from ftcli.run.process_group import RankGroup

#: Ranks that train the same weights compute the same gradient norm; other kinds of GPU may round it differently.
_DRIFT = 1e-3
#: Multiplies the recipe's seed, so that neighbouring seeds, steps and ranks have nothing in common.
SEED_STRIDE = 1_000_003


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """Tokens of a micro-batch: those that bear loss, all real ones, all positions that are computed; and its pairs, or
    answers with a label, if a method learns from these.
    """

    supervised: int = 0
    real: int = 0
    computed: int = 0
    pairs: int = 0

    def __add__(self, other: TokenCounts) -> TokenCounts:
        return TokenCounts(*(a + b for a, b in zip(self.numbers, other.numbers, strict=True)))

    @property
    def numbers(self) -> tuple[int, ...]:
        return (self.supervised, self.real, self.computed, self.pairs)


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The input of one forward and backward pass.

    Attributes:
        inputs: Tensors on the host, by name.
        rows: Numbers of the training rows in it, for messages.
        counts: Its tokens.
    """

    inputs: Mapping[str, Tensor]
    rows: tuple[int, ...]
    counts: TokenCounts


@dataclass(frozen=True, slots=True)
class StepTotal:
    """The tokens of a step over all ranks, and the rows of each micro-batch in the order of one process."""

    counts: TokenCounts
    rows: Sequence[tuple[int, ...]]


_COUNTED = 4


@dataclass(frozen=True, slots=True)
class Divisors:
    """Divisors of a step's loss, over all ranks: supervised tokens and pairs, float32 scalars on the device."""

    supervised: Tensor
    pairs: Tensor


def numbers_agreed(batches: int, batch_size: int) -> int:
    """Number of integers that ranks exchange before a step of so many batches."""
    return 1 + _COUNTED + batches * batch_size


def sequence_part(group: RankGroup | None, parts: int) -> SequencePart | None:
    """This rank's part of the rows that ``parts`` consecutive ranks share; None where rows are not shared. All ranks
    call it.
    """
    if group is None or parts == 1:
        return None
    return SequencePart(group.rank % parts, parts, group.subgroups(parts))


class Parallel:
    """One process, or one of the ranks of ``group``.

    Attributes:
        reduces: Whether the ranks train together; `ftcli bench` times the same step without.
    """

    def __init__(self, group: RankGroup | None, model: nn.Module, *, seed: int, batch_size: int) -> None:
        self.group, self.model = group, model
        self.reduces = True
        self._apart = 0  # joint steps whose norm is still of one that the ranks made apart: it is known a step later
        self._seed, self._batch_size = seed, batch_size
        self._sharded = trained_is_sharded(model)
        self._copies = replicas_of(model)
        self._reducer = GradientReducer(model)

    @property
    def active(self) -> bool:
        """True if there are other ranks that this one trains with."""
        return self.group is not None and self.reduces

    @property
    def leads(self) -> bool:
        return self.group is None or self.group.leads

    def exchanging(self) -> AbstractContextManager[None]:
        """A block in which ranks wait for each other inside libraries: one that fails ends the others' waiting."""
        return nullcontext() if self.group is None else self.group.exchanging()

    # -- a step ----------------------------------------------------------------------------------------------

    def begin_step(self, batches: Sequence[MicroBatch], last_norm: float) -> StepTotal:
        """Adds up the tokens of all ranks' batches, and holds the ranks' last gradient norms against each other.

        Raises FtcliError FT711 (exit 6) where the ranks do not train the same weights any more.
        """
        mine = sum((batch.counts for batch in batches), TokenCounts())
        if self.group is None or not self.reduces:
            self._apart = 2
            return StepTotal(mine, [batch.rows for batch in batches])
        size = self._batch_size
        rows = [row for b in batches for row in (*(r + 1 for r in b.rows), *(0,) * (size - len(b.rows)))]
        gathered = self.group.agree("step begins", [float_bits(last_norm), *mine.numbers, *rows])
        if not self._apart:
            require_alike([float_of(row[0]) for row in gathered])
        self._apart = max(0, self._apart - 1)
        total = TokenCounts(*(sum(row[1 + i] for row in gathered) for i in range(_COUNTED)))
        return StepTotal(total, rows_by_batch([row[1 + _COUNTED :] for row in gathered], len(batches), size))

    def seed(self, step: int) -> None:
        """Has what is drawn at random in ``step`` depend on seed, step and rank alone: a resumed run draws the same."""
        if self.group is not None:
            torch.manual_seed(((self._seed * SEED_STRIDE + step) * SEED_STRIDE + self.group.rank) % 2**63)

    def before_micro_batch(self, *, last: bool) -> None:
        """Copies of a sharded model reduce their gradients with each other once a step."""
        if self._sharded and self._copies > 1:
            root: Any = root_of(self.model)
            root.set_requires_all_reduce(last)

    def reduce(self, losses: Sequence[Tensor]) -> Tensor:
        """Adds up all ranks' gradients; every rank's losses, in the order in which one process would have them."""
        if self.group is None or not self.reduces:
            return torch.stack(list(losses))
        self.group.agree("step ends")
        if not self._sharded:  # else backward has reduced them
            self._reducer.reduce(self.group)
        slots = torch.zeros(len(losses) * self.group.size, device=losses[0].device)
        slots[self.group.rank :: self.group.size] = torch.stack(list(losses)).float()
        self.group.all_reduce([slots])  # the others' places hold zeros: every loss arrives as it is, NaN included
        return slots

    def norm_of_all(self, norm: Tensor) -> Tensor:
        """The norm of all gradients, from that of this rank's shards."""
        if not self._sharded or self.group is None:
            return norm
        square = norm.double() ** 2
        if self.group.rank >= self.group.size // self._copies:  # the same numbers as those of the first copy
            square.zero_()
        with self.group.exchanging():
            self.group.all_reduce([square])
        return square.sqrt().to(norm.dtype)

    # -- checkpoints and results -----------------------------------------------------------------------------

    @property
    def sharded(self) -> bool:
        """True if the trained weights are sharded over the ranks."""
        return self._sharded

    def reshard(self) -> None:
        """Frees gathered weights. Reading a state dict does so on rank 0, and all ranks have to stay in step."""
        reshard_model(self.model)

    def whole_weights(self) -> dict[str, Tensor] | None:
        """Gathers sharded trained weights on rank 0's host; None on the others, and where nothing is sharded."""
        if not self._sharded or self.group is None:
            return None
        with self.group.exchanging():
            found: dict[str, Tensor] | None = gather_weights(self.model, wanted=self.group.leads)
            return found

    def optimizer_state(self, optimizer: Optimizer) -> StateDict | None:
        """The optimizer's state as that of one process; None on ranks that do not lead. All ranks call this."""
        state = optimizer.state_dict()
        if not self._sharded or self.group is None:
            return state
        leads = self.group.leads
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        whole: dict[int, dict[str, Any]] = {}
        with self.group.exchanging():
            for index, kept in state["state"].items():
                like = parameters[index]
                found = {k: gather_like(v, like, wanted=leads) if isinstance(v, Tensor) else v for k, v in kept.items()}
                whole[index] = found if leads else {}
        return {**state, "state": whole} if leads else None

    def can_save_alone(self) -> bool:
        """True if this rank can write a checkpoint alone; False if shards are with ranks that may be gone.

        Adapters are on every rank, and behind nothing that waits for another one once connections are cut.
        """
        if self._sharded:
            return False
        if self.group is not None and root_of(self.model) is not None:
            self.group.cut()
        return True


class GradientReducer:
    """Makes each trained weight's gradient the sum over all ranks, in one all-reduce for each dtype.

    A tower that is trained has gradients in those steps alone in which some rank has images; the ranks then say in each
    step what they have. In others it stays without, as in one process.
    """

    def __init__(self, model: nn.Module) -> None:
        self._trained = [p for p in model.parameters() if p.requires_grad]
        self._varies = trains_tower(model)
        self._with_gradient: Sequence[nn.Parameter] = ()
        self._without: Sequence[nn.Parameter] = ()
        self._summed: Gradients | None = None

    def reduce(self, group: RankGroup) -> None:
        """All ranks call it."""
        if not self._with_gradient or self._varies:
            trained = self._trained
            has = torch.tensor([p.grad is not None for p in trained], dtype=torch.uint8)
            anywhere = torch.stack(group.all_gather(has)).amax(0).tolist()
            before = self._with_gradient
            self._with_gradient = [p for p, some in zip(trained, anywhere, strict=True) if some]
            if len(before) != len(self._with_gradient):
                self._summed = None
            self._without = [p for p, some in zip(trained, anywhere, strict=True) if not some]
        if any(p.grad is not None for p in self._without):
            raise RuntimeError("a weight has a gradient that had none on any rank in the first step")
        if self._summed is None:
            self._summed = Gradients.zeros_like(self._with_gradient)
        pairs = list(zip(self._summed.tensors, self._with_gradient, strict=True))
        missing = [total for total, p in pairs if p.grad is None]
        if missing:
            torch._foreach_zero_(missing)
        present = [(total, p.grad) for total, p in pairs if p.grad is not None]
        torch._foreach_copy_([total for total, _ in present], [gradient for _, gradient in present])
        group.all_reduce(self._summed.buffers)
        for total, parameter in pairs:
            parameter.grad = total


def require_alike(norms: Sequence[float]) -> None:
    """Raises FtcliError FT711 (exit 6) where the gradient norms of the ranks differ by more than rounding."""
    low, high = min(norms), max(norms)
    if math.isfinite(low) and math.isfinite(high) and high - low > _DRIFT * max(abs(high), abs(low)):
        listed = ", ".join(f"{norm:.6g} on rank {rank}" for rank, norm in enumerate(norms))
        raise FtcliError.single(
            "FT711",
            f"the ranks do not train the same weights any more: the last gradient norm is {listed}",
            exit_code=ExitCode.DIVERGED,
            help="a GPU that computes wrongly is the likely reason: train on each alone to find it. Go on from an "
            "earlier checkpoint",
        )


def float_bits(number: float) -> int:
    """A float as an integer, to the last bit."""
    return int(struct.unpack("q", struct.pack("d", number))[0])


def float_of(bits: int) -> float:
    """The float of :func:`float_bits`."""
    return float(struct.unpack("d", struct.pack("q", bits))[0])


def rows_by_batch(gathered: Sequence[Sequence[int]], batches: int, size: int) -> list[tuple[int, ...]]:
    """The rows of each batch of a step in the order in which one process would take them: the first of each rank, then
    the second of each."""
    return [
        tuple(row - 1 for row in rank[batch * size : (batch + 1) * size] if row)
        for batch in range(batches)
        for rank in gathered
    ]
