"""Log-probabilities of the reference, scored before the first step: looked up in the cache, computed, and kept there.

One rank reads and writes the cache; the others have its values all-reduced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import torch
from torch import Tensor

from ftcli.data.order import Epochs
from ftcli.data.tokens import TokenizedRow, unit_digest
from ftcli.errors import ExitCode, FtcliError
from ftcli.evaluate.loss import in_batches, in_step
from ftcli.methods.preference.cache import WIDTHS, LogProbs, ReferenceCache, reference_key
from ftcli.methods.preference.checks import caches, compares
from ftcli.methods.preference.pairs import AnswerScorer
from ftcli.methods.preference.settings import PreferenceConfig
from ftcli.model.backbone import compute_context, head_of, root_of
from ftcli.model.initial_adapters import as_base
from ftcli.model.shards import reshard_model, try_forward
from ftcli.train.epochs import seen_units, steps_of
from ftcli.train.parallel import sequence_part

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

    from ftcli.errors import Origin
    from ftcli.job import Job
    from ftcli.reporting import Reporter
    from ftcli.run.process_group import RankGroup

#: The rows of a unit: both of a pair, or one.
Rows: TypeAlias = "tuple[TokenizedRow, ...]"
_NAMES = {1: "rows", 2: "pairs"}
_DOING = "scoring the reference"


@dataclass(frozen=True, slots=True)
class Units:
    """Pairs, or single rows, whose log-probabilities are asked for.

    Attributes:
        rows: Those of each unit by its number. They are read anew each time: all of them would be gigabytes.
    """

    count: int
    rows: Callable[[int], Rows]

    def and_then(self, others: Units) -> Units:
        return Units(
            self.count + others.count,
            lambda unit: self.rows(unit) if unit < self.count else others.rows(unit - self.count),
        )


#: Makes units, which takes a while of many rows.
Wanted: TypeAlias = "Callable[[], Units]"


def no_units() -> Units:
    """None: nothing is trained."""
    return Units(0, lambda unit: ())


@dataclass(frozen=True, slots=True)
class ScoredUnits:
    """Log-probabilities (units, width) float32, and the digest of each unit."""

    digests: Sequence[bytes]
    values: LogProbs

    def by_digest(self) -> dict[bytes, list[float]]:
        """The values of each unit by its content."""
        return dict(zip(self.digests, self.values.tolist(), strict=True))

    def split(self, count: int) -> tuple[ScoredUnits, ScoredUnits]:
        first, others = (self.digests[:count], self.values[:count]), (self.digests[count:], self.values[count:])
        return ScoredUnits(*first), ScoredUnits(*others)


@dataclass(frozen=True, slots=True)
class _Lookup:
    """Units with what is kept of them: NaN for those that are ``missing``."""

    units: Units
    shares: int
    cache: ReferenceCache | None
    digests: Sequence[bytes]
    values: LogProbs
    missing: Sequence[int]


@dataclass(frozen=True, slots=True)
class AheadOfTraining:
    """How units of a run are scored ahead of its first step. All ranks call what it has.

    Attributes:
        shares: Ranks that share each row in training. Evaluation never shares rows.
        folder: Where log-probabilities are kept, one folder for each reference; None: nowhere.
    """

    job: Job
    model: PreTrainedModel | PeftModel
    group: RankGroup | None
    rows: int
    shares: int
    ld_alpha: float
    folder: Path | None

    def score(self, training: Wanted, held_out: Wanted, *, certain: bool) -> tuple[ScoredUnits, ScoredUnits] | None:
        """Scores the units of training, and those of evaluation. None where it is not ``certain`` that this pays, and
        not everything is kept already; what is wanted is only asked for where it may be.
        """
        if not certain and self.folder is None:
            return None
        if self.shares == 1:
            found = self._looked_up([(1, lambda: training().and_then(held_out()))], certain)
            return None if found is None else found[0].split(len(found[0].digests) - held_out().count)
        measures = [(1, held_out)] if held_out().count else []
        found = self._looked_up([(self.shares, training), *measures], certain)
        return None if found is None else (found[0], found[1] if measures else found[0].split(0)[0])

    def _looked_up(self, asked: Sequence[tuple[int, Wanted]], certain: bool) -> list[ScoredUnits] | None:
        """Each of these, by the ranks that share its rows, completed by what is computed; None as :meth:`score`."""
        looked: list[_Lookup] = []
        for shares, wanted in asked:
            found = self._lookup(shares, wanted, certain)
            if found is None:
                return None
            looked.append(found)
        for each in looked:
            if each.missing:
                self._complete(each)
        count, computed = sum(len(each.digests) for each in looked), sum(len(each.missing) for each in looked)
        self.job.reporter.info(
            f"reference: scored ahead, {count - computed:,} of {count:,} {_NAMES[self.rows]} found"
            f"{'' if self.folder is None else f' in {self.folder}'}, {computed:,} computed"
        )
        return [ScoredUnits(each.digests, each.values) for each in looked]

    # -- the cache -------------------------------------------------------------------------------------------

    def _lookup(self, shares: int, wanted: Wanted, certain: bool) -> _Lookup | None:
        """Looks these up in the cache; None where they are not to be computed and something is missing."""
        cache = self._cache(shares)
        if not certain and not self._for_all(cache is not None and cache.is_there):
            return None
        units = wanted()
        digests = [unit_digest(*units.rows(unit)) for unit in range(units.count)]
        values = self._shared(self._laid_out({} if cache is None else cache.read(), digests))
        missing = np.flatnonzero(np.isnan(values).any(axis=1)).tolist()
        return None if missing and not certain else _Lookup(units, shares, cache, digests, values, missing)

    def _complete(self, looked: _Lookup) -> None:
        """Computes what is missing, and keeps it; on all ranks, as it is kept."""
        values, missing, digests = looked.values, looked.missing, looked.digests
        values[missing] = self._computed(looked.units, looked.shares, missing)
        self._require_finite(looked)
        if looked.cache is not None:
            kept = looked.cache.add({digests[unit]: values[unit] for unit in missing})
            values[missing] = np.stack([kept[digests[unit]] for unit in missing])
        values[:] = self._shared(values)

    def _require_finite(self, looked: _Lookup) -> None:
        """Raises FtcliError FT702 (exit 6) where what was computed is not finite: nothing has been trained yet."""
        broken = [unit for unit in looked.missing if not np.isfinite(looked.values[unit]).all()]
        if not broken:
            return
        dtype, origin = self.job.dtypes.compute, looked.units.rows(broken[0])[0].row.origin
        what = f"{len(broken):,} of {len(looked.missing):,} {_NAMES[self.rows]}"
        raise FtcliError.single(
            "FT702",
            f"the log-probabilities that the reference gives {what} are not finite, before anything is trained",
            exit_code=ExitCode.DIVERGED,
            origin=origin,
            help=f"look whether it answers at all (`ftcli chat`): its weights are damaged, or overflow {dtype}",
        )

    def _cache(self, shares: int) -> ReferenceCache | None:
        """The reference's, on the leading rank."""
        leads = self.group is None or self.group.leads
        if self.folder is None or not (leads or root_of(self.model) is not None):
            return None
        key = reference_key(self.job, self.model, self.ld_alpha, rows=self.rows, shares=shares)
        return ReferenceCache(self.folder / key, self.job.reporter.warn, WIDTHS[self.rows]) if leads else None

    def _laid_out(self, known: Mapping[bytes, LogProbs], digests: Sequence[bytes]) -> LogProbs:
        values = np.full((len(digests), WIDTHS[self.rows]), np.nan, np.float32)
        for unit, digest in enumerate(digests):
            if digest in known:
                values[unit] = known[digest]
        return values

    def _for_all(self, said: bool) -> bool:
        """The leading rank's word, on all ranks."""
        return said if self.group is None else bool(self.group.agree("looked for the reference", [said])[0][0])

    def _shared(self, values: LogProbs) -> LogProbs:
        """The leading rank's values, on all ranks."""
        if self.group is None:
            return values
        return self._summed(values if self.group.leads else np.zeros_like(values), self.group)

    def _summed(self, values: LogProbs, group: RankGroup) -> LogProbs:
        mine = torch.from_numpy(values).to(self.job.device)
        with group.exchanging():
            group.all_reduce([mine])
        return mine.cpu().numpy()

    # -- what is not there -----------------------------------------------------------------------------------

    def _computed(self, units: Units, shares: int, missing: Sequence[int]) -> LogProbs:
        """(missing, width), of the longest units first; ranks take batches in turn."""
        places = {unit: place for place, unit in enumerate(missing)}
        ordered = sorted(missing, key=lambda unit: -sum(len(row.input_ids) for row in units.rows(unit)))
        values, group = np.zeros((len(missing), WIDTHS[self.rows]), np.float32), self.group
        training = self.model.training
        self.model.eval()
        try:
            with torch.no_grad(), self._untrained():
                for done, found in self._scored(units, shares, ordered):
                    values[[places[unit] for unit in done]] = by_unit(found, self.rows)
        finally:
            self.model.train(training)
        reshard_model(self.model)
        if group is None:
            return values
        group.agree("scored the reference")
        group.stop_if_asked(_DOING)
        return self._summed(values, group)

    def _scored(self, units: Units, shares: int, ordered: Sequence[int]) -> Iterator[tuple[Sequence[int], Tensor]]:
        """Units of this rank with what their answers are given, (answers, 2): sums and weighed sums. Of ranks that
        share rows the first one has them.
        """
        job, group, model = self.job, self.group, self.model
        sharded, sequence = root_of(model) is not None, sequence_part(group, shares)
        # Ranks that share rows exchange heads within a layer: one that runs out of memory there ends the run.
        halves = sharded and sequence is None
        head = head_of(model)
        size, pixels = head.weight.shape[0], job.pixel_reader()
        scorer = AnswerScorer(job.batches(model), job.pad_token_id, size, self.ld_alpha, sequence, pixels)

        def attempt(chosen: Sequence[int]) -> Tensor | None:
            batch = scorer.batch([row for unit in chosen for row in units.rows(unit)])
            inputs = {name: value.to(job.device) for name, value in batch.items()}
            with compute_context(job.device, job.dtypes.compute, job.dtypes.autocast):
                score = partial(scorer.score, model, inputs)
                scored = try_forward(model, score) if halves else score()
            return None if scored is None else torch.stack([scored.sums, scored.weighed], 1)

        def where(unit: int) -> Origin:
            return units.rows(unit)[0].row.origin

        if group is None or not (sharded or shares > 1):
            yield from self._by_itself(ordered, attempt, where)
            return
        size, reporter = job.recipe.train.per_device_train_batch_size, job.reporter
        turns = in_step(
            group, ordered, size, attempt,
            where=where, reporter=reporter, what="the reference", doing=_DOING, shares=shares,
        )  # fmt: skip
        with reporter.progress(len(ordered), _DOING) as progress:
            for turn in turns:
                progress.advance(turn.of_all)
                if turn.found is not None and (sequence is None or sequence.part == 0):
                    yield turn.items, turn.found

    def _by_itself(
        self, ordered: Sequence[int], attempt: Callable[[Sequence[int]], Tensor | None], where: Callable[[int], Origin]
    ) -> Iterator[tuple[Sequence[int], Tensor]]:
        """The batches of a rank that needs no other one in a pass, until it is asked to stop."""
        group, reporter = self.group, self.job.reporter
        size = self.job.recipe.train.per_device_train_batch_size
        if group is not None:
            batches = [ordered[start : start + size] for start in range(0, len(ordered), size)]
            ordered = [unit for batch in batches[group.rank :: group.size] for unit in batch]

        def run(chosen: Sequence[int]) -> Tensor:
            found = attempt(chosen)
            assert found is not None
            return found

        runs = in_batches(ordered, size, run, where=where, reporter=reporter, what="the reference")
        with (
            nullcontext() if group is None else group.exchanging(),
            reporter.progress(len(ordered), _DOING) as progress,
        ):
            for done, found in runs:
                yield done, found
                progress.advance(len(done))
                if group is not None and group.signalled:
                    return

    def _untrained(self) -> AbstractContextManager[None]:
        """Of a model with adapters its base; one that is trained whole has not changed yet."""
        return as_base(self.model) if hasattr(self.model, "disable_adapter") else nullcontext()


def by_answer(values: LogProbs) -> Tensor:
    """(2 P, 2) float32 of (P, 4): sums and weighed sums of chosen and rejected answers in turn."""
    return torch.from_numpy(np.ascontiguousarray(values.reshape(-1, 2, 2).transpose(0, 2, 1).reshape(-1, 2)))


def by_unit(answers: Tensor, rows: int) -> LogProbs:
    """Of pairs the inverse of :func:`by_answer`, on the host; of single rows their sums, (R, 1)."""
    host = answers.detach().float().cpu().numpy()
    if rows == 1:
        return np.ascontiguousarray(host[:, :1])
    return np.ascontiguousarray(host.reshape(-1, 2, 2).transpose(0, 2, 1).reshape(-1, WIDTHS[rows]))


def cache_folder(settings: PreferenceConfig, of_session: Path | None) -> Path | None:
    """The folder that keeps log-probabilities: the recipe's, or ftcli's cache; None for nowhere."""
    if settings.reference_cache not in ("auto", "off"):
        return Path(settings.reference_cache).expanduser()
    return None if of_session is None else of_session / "reference"


@dataclass(frozen=True, slots=True)
class Reference:
    """The reference of pairs, or of labelled answers. It is computed in each step where nothing is known.

    Attributes:
        model: A second model; None where the trained one can be computed without its adapters, or nothing is needed.
        of_units: Log-probabilities of the training pairs, (pairs, 4) float32; NaN for those that are not seen.
        of_rows: Those of training rows with a label and of the mismatched rows of all steps, by
            :func:`~ftcli.data.tokens.unit_digest`.
        held_out: Those of held-out pairs or rows, likewise; of rows also those of mismatched ones.
        other: The name of another model that has been scored and is gone, so that nothing more can be computed.
    """

    model: PreTrainedModel | None = None
    of_units: LogProbs | None = None
    of_rows: Mapping[bytes, float] | None = None
    held_out: Mapping[bytes, list[float]] = field(default_factory=dict)
    other: str | None = None


def shares_of(job: Job, group: RankGroup | None) -> int:
    """Ranks that share each row in training; 1 where this process is alone."""
    return 1 if group is None else job.recipe.launch.context_parallel_size


def goes_on_live(began: str | None, reporter: Reporter, *, known: bool, can_compute: bool) -> bool:
    """True if a resumed run computes its reference in each step, as it ``began``: another run may have filled the cache
    since then. Says so where what a run began with is gone.
    """
    if began == "ahead" and not known:
        reporter.warn(
            "the reference's log-probabilities that this run began with are gone: they are computed in each step "
            "from here on, which rounds them otherwise"
        )
    return not known or (began == "live" and can_compute)


def scored_ahead(
    job: Job,
    model: PreTrainedModel | PeftModel,
    epochs: Epochs | None,
    held_out: Sequence[TokenizedRow],
    group: RankGroup | None,
    *,
    keep: bool = True,
) -> Reference:
    """Log-probabilities of all pairs that training (None: there is none) and evaluation will see, where that pays;
    ``model`` has not been trained yet. What is missing in the cache is computed and kept there, unless it is not to be
    looked at. All ranks call it.
    """
    recipe = job.recipe
    settings = recipe.preference or PreferenceConfig()
    if not compares(recipe.train.method, settings) or not caches(recipe, "possibly"):
        return Reference()
    units, again = ((), False) if epochs is None else seen_units(epochs, steps_of(job, epochs, group))
    folder = cache_folder(settings, job.session.cache_dir) if keep else None
    scoring = AheadOfTraining(job, model, group, 2, shares_of(job, group), settings.ld_alpha, folder)
    found = scoring.score(
        no_units if epochs is None else _trained(epochs, units),
        lambda: Units(len(held_out) // 2, lambda pair: (held_out[2 * pair], held_out[2 * pair + 1])),
        certain=again or caches(recipe, "surely"),
    )
    if found is None:
        return Reference()
    of_units = None
    if epochs is not None:
        of_units = np.full((epochs.units, WIDTHS[2]), np.nan, np.float32)
        of_units[list(units)] = found[0].values
    return Reference(of_units=of_units, held_out=found[1].by_digest())


def _trained(epochs: Epochs, units: Sequence[int]) -> Wanted:
    def pairs() -> Units:
        return Units(len(units), lambda number: tuple(epochs.members(units[number])))

    return pairs
