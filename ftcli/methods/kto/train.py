"""Learning from labelled answers as a run on rows; of held-out ones loss with the KL of all, accuracy, margin and what
became of log-probabilities.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np
import torch
from torch import Tensor

from ftcli.config.recipe import Recipe
from ftcli.data.order import Epochs, Mixture, Packs, mixture
from ftcli.data.prepare import PreparedData
from ftcli.data.tokens import TokenizedRow, TokenTable, by_file, digest_of
from ftcli.errors import Finding, FtcliError
from ftcli.evaluate.loss import LossResult, Sums, require_finite
from ftcli.evaluate.margins import Floats, RowTable, margins_of_answers
from ftcli.job import Job
from ftcli.methods.kto.checks import rows_a_step
from ftcli.methods.kto.losses import LABEL_SUMS, LabelledAnswers, LabelLoss, LabelSettings, label_sums, measures
from ftcli.methods.kto.objective import LabelObjective
from ftcli.methods.kto.reference import mismatched_rows
from ftcli.methods.kto.reference import scored_ahead as answers_ahead
from ftcli.methods.preference.evaluate import ComparedEvaluator, forward_pass
from ftcli.methods.preference.figures import held_out_names, stop_columns, stop_measures
from ftcli.methods.preference.pairs import SCORED
from ftcli.methods.preference.train import Compared, start_of
from ftcli.model.backbone import compute_context
from ftcli.train.on_rows import ObjectiveParts
from ftcli.train.progress import TrainingRows

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

#: Of a batch's answers, (N,) each: log-probabilities, what they have gained over the reference, tokens; then what
#: :func:`~ftcli.methods.preference.figures.stop_columns` gives.
_Scores = tuple[Tensor, Tensor, Tensor, tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class LabelEvaluator(ComparedEvaluator):
    """Measures models on held-out labelled answers, all with one KL; mismatched rows have a reference, too."""

    def files_of(self, rows: Sequence[TokenizedRow]) -> dict[str, list[TokenizedRow]]:
        """Rows are mismatched within a file."""
        return by_file(rows)

    def result(self, sums: Sequence[float], columns: Floats, rows: Sequence[TokenizedRow]) -> LossResult:
        """Mean loss, and ``more`` beside it."""
        loss, (total, *of_answers) = self._loss(), sums
        of_answers[-2:] = [float(columns[0, 4]), 1.0]
        wanted, unwanted, logp, tokens, other_tokens = (of_answers[n] for n in (0, 1, 6, 8, 9))
        answers = wanted + unwanted
        mean = require_finite(total / max(answers, 1) - loss.sft_weight * logp / max(tokens, 1))
        found = measures(of_answers, kl=loss.estimates_kl)
        more = held_out_names(found) | stop_measures(columns[:, 2:4])
        margins = margins_of_answers(rows, columns[:, 0], columns[:, 1], self.job.tokenizer)
        return LossResult(mean, None, None, int(tokens + other_tokens), int(answers), more, margins)

    def _loss(self) -> LabelLoss:
        return LabelLoss.of(self.job.recipe.preference)

    def scored_files(
        self, model: PreTrainedModel | PeftModel, files: dict[str, list[TokenizedRow]]
    ) -> dict[str, tuple[Sums, Floats]]:
        """Each file under the KL of all of them: z is 0 for a loss that needs none."""
        loss, gained, count = self._loss(), 0.0, 0
        for rows in files.values() if loss.estimates_kl else ():
            made = mismatched_rows(rows, self.job.recipe.data.max_seq_len)
            (found,) = self._summed(model, made, lambda _, scores: (float(scores[1].double().sum()),), width=1)
            gained, count = gained + found, count + len(made)
        kl = max(0.0, gained / count) if count else 0.0
        return {name: self.scored(model, rows, kl) for name, rows in files.items()}

    def scored(
        self, model: PreTrainedModel | PeftModel, rows: Sequence[TokenizedRow], kl: float = 0.0
    ) -> tuple[Sums, Floats]:
        """Summed loss, and the sums of :func:`label_sums`; then of each answer its reward, its tokens, the stop columns
        of desirable ones, and the KL.
        """
        loss, table = self._loss(), RowTable(len(rows), 5)

        def of_batch(numbers: Sequence[int], scores: _Scores) -> Sums:
            logp, gained, tokens, of_stops = scores
            labels = torch.tensor([rows[number].value for number in numbers], device=logp.device)
            stops = (torch.where(labels > 0, column, torch.nan) for column in of_stops)
            table.fill(numbers, (loss.beta * gained.double(), tokens, *stops, torch.full_like(tokens, kl).double()))
            answers = LabelledAnswers(gained, labels, torch.tensor(kl, device=logp.device))
            total = float(loss.values(answers).double().sum())
            return (total, *label_sums(answers, logp, tokens, loss.beta).tolist())

        sums = self._summed(model, rows, of_batch, width=1 + LABEL_SUMS, last=True)
        return sums, table.gathered(self.group, self.job.recipe.eval.per_device_eval_batch_size)

    def _summed(
        self,
        model: PreTrainedModel | PeftModel,
        rows: Sequence[TokenizedRow],
        of_batch: Callable[[Sequence[int], _Scores], Sums],
        *,
        width: int,
        last: bool = False,
    ) -> Sums:
        """Sums over ``rows``, of each batch's answers, by their numbers, as they are scored, over all ranks.

        ``last``: the stop columns are asked for.
        """
        job, scorer = self.job, self.scorer(model, ld_alpha=1.0)

        def attempt(numbers: Sequence[int]) -> Sums | None:
            documents = [rows[number] for number in numbers]
            inputs = {key: value.to(job.device) for key, value in scorer.batch(documents).items()}
            with compute_context(job.device, job.dtypes.compute, job.dtypes.autocast):
                policy = forward_pass(model, scorer, inputs)
                known = self.of_reference(model, scorer, inputs, [(row,) for row in documents], policy, last=last)
            if policy is None or policy.last is None or known is None:
                return None
            reference = torch.from_numpy(known[0][:, 0]).to(job.device)
            of_stops = stop_columns(documents, job.stops, policy.last, known[1])
            tokens = (inputs[SCORED] > 0).sum(1).float()
            return of_batch(numbers, (policy.sums, policy.sums - reference, tokens, of_stops))

        return self.summed(model, len(rows), attempt, lambda number: rows[number].row.origin, width=width)


class Labelled(Compared):
    """Answers that are called good or bad: the one are to become likelier, the other less likely."""

    evaluates = LabelEvaluator
    compares_rows = True
    scored_ahead = staticmethod(answers_ahead)

    def epochs(self, job: Job, prepared: PreparedData) -> Epochs:
        """Both labels, interleaved. Reports what is compared."""
        recipe, loss = job.recipe, LabelLoss.of(job.recipe.preference)
        epochs = labelled_epochs(prepared.sequences, recipe.data.weights, recipe.run.seed)
        wanted, unwanted = label_counts(epochs)
        job.reporter.info(f"labels: {wanted:,} desirable and {unwanted:,} undesirable answers an epoch")
        job.reporter.info(f"loss: {loss.name} (beta {loss.beta:g}), compared with {start_of(recipe)}")
        return epochs

    def findings(self, recipe: Recipe, table: TokenTable) -> Iterator[Finding]:
        """Labels that teach something else than they say. Raises FtcliError FT465 (exit 4) where all are one."""
        require_both_labels(table)
        wanted, unwanted = label_counts(labelled_epochs(table, recipe.data.weights, recipe.run.seed))
        settings = LabelLoss.of(recipe.preference).settings
        yield from label_findings(wanted, unwanted, settings, rows_a_step(recipe))
        yield from contradictions(table)

    def training_rows(self, recipe: Recipe, rows: int, tokens: int) -> TrainingRows:
        return TrainingRows(rows, "labelled answers", tokens)

    def objective(
        self, job: Job, model: Any, epochs: Epochs, reference: Any, **parts: Unpack[ObjectiveParts]
    ) -> LabelObjective:
        return LabelObjective(job, model, epochs, LabelLoss.of(job.recipe.preference), reference=reference, **parts)


#: The weighted ratio of desirable to undesirable answers that the paper advises (its equation 8).
LOWEST, HIGHEST = 1.0, 4 / 3
#: Answers that are named one by one where they have both labels.
_NAMED = 5


def labelled_epochs(table: TokenTable, weights: Sequence[float] | None, seed: int) -> Epochs:
    """Epochs in which wanted and unwanted answers are evenly interleaved: whatever is cut out of one holds both, in the
    proportion of the data to within one row of each. Its units are single rows of the table.

    Args:
        weights: One for each source, or None to see every row once.
    """
    wanted = table.values > 0
    sources = list(zip(table.starts[:-1], table.starts[1:], strict=True)) if weights else [(0, len(table))]
    strata, shares = [], []
    for (start, end), weight in zip(sources, weights or (1.0,), strict=True):
        for label in (True, False):
            rows = start + np.flatnonzero(wanted[start:end] == label)
            if len(rows):
                strata.append(rows)
                shares.append(weight * len(rows) / (end - start))
    sizes = tuple(len(rows) for rows in strata)
    counts = mixture(sizes, shares).counts if weights else sizes
    packs = Packs(np.concatenate(strata), np.arange(1, len(table) + 1, dtype=np.int64))
    return Epochs(table, Mixture(sizes, counts, weighted=True), packs, seed)


def label_counts(epochs: Epochs) -> tuple[int, int]:
    """Wanted and unwanted answers in an epoch."""
    starts = np.cumsum((0, *epochs.mix.sizes[:-1]))
    of_strata = [epochs.members(int(start))[0].value > 0 for start in starts]
    wanted = sum(count for count, label in zip(epochs.mix.counts, of_strata, strict=True) if label)
    return wanted, len(epochs) - wanted


def require_both_labels(table: TokenTable) -> None:
    """Raises FtcliError FT465 (exit 4) where all answers have one label: nothing tells the two kinds apart."""
    wanted = int((table.values > 0).sum())
    if 0 < wanted < len(table):
        return
    which, other = ("desirable", "undesirable") if wanted else ("undesirable", "desirable")
    message = f"all {len(table):,} answers are {which} and none is {other}"
    help = "to imitate good answers, use train.method: sft; else add rows with the other label"
    raise FtcliError.single("FT465", message, origin=table[0].row.origin, help=help)


def label_findings(wanted: int, unwanted: int, how: LabelSettings, rows_a_step: int) -> Iterator[Finding]:
    """FT466, a warning, for labels out of balance, and for a label that some steps will have no answer of."""
    ratio = how.desirable_weight * wanted / (how.undesirable_weight * unwanted)
    if not LOWEST * (1 - 1e-6) <= ratio <= HIGHEST * (1 + 1e-6):
        middle = (LOWEST + HIGHEST) / 2
        desirable, undesirable = how.desirable_weight * middle / ratio, how.undesirable_weight * ratio / middle
        yield Finding(
            "FT466",
            f"{wanted:,} desirable answers weigh {ratio:.3g} times as much as {unwanted:,} undesirable ones; KTO's "
            "authors advise 1 to 1.33",
            None,
            f"set preference.desirable_weight: {desirable:.2g}, or preference.undesirable_weight: {undesirable:.2g}",
            "warning",
        )
    fewer, name = min((wanted, "desirable"), (unwanted, "undesirable"))
    if fewer * rows_a_step < wanted + unwanted:
        yield Finding(
            "FT466",
            f"{fewer / (wanted + unwanted):.1%} of the answers are {name}: most steps of {rows_a_step} rows have none",
            None,
            "raise train.gradient_accumulation_steps, or give a source of such rows a `weight`",
            "warning",
        )


def contradictions(table: Sequence[TokenizedRow]) -> Iterator[Finding]:
    """FT467, a warning, for an answer that another row gives the other label."""
    seen: dict[bytes, int] = {}
    count = 0
    for index, row in enumerate(table):
        first = seen.setdefault(digest_of(row), index)
        other = table[first] if first != index else row
        if other.value == row.value:
            continue
        count += 1
        if count <= _NAMED:
            message = f"this answer has the other label in {other.row.origin}: the two teach nothing together"
            yield Finding("FT467", message, row.row.origin, "remove one of them", "warning")
    if count > _NAMED:
        yield Finding("FT467", f"and {count - _NAMED:,} more answers like these", None, "remove one of each", "warning")
