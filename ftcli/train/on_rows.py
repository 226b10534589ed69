"""`ftcli train` on rows that hold their answers: recipe in, adapter or model out, whichever method learns from them."""

from __future__ import annotations

import gc
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypedDict, TypeVar, Unpack

import torch

from ftcli.config.load import LoadedRecipe
from ftcli.config.recipe import Recipe
from ftcli.data.tokens import TokenizedRow
from ftcli.errors import ExitCode, Finding, FtcliError
from ftcli.facts.tokenizer import foreign_tokens, foreign_tokens_finding
from ftcli.job import Job
from ftcli.judges import judges_of
from ftcli.model.tokenizer import load_tokenizer
from ftcli.plain import FLATTENED
from ftcli.reporting import Session
from ftcli.run.inputs import Inputs
from ftcli.tables import code_of
from ftcli.tables.methods import Method
from ftcli.train import assembly
from ftcli.train.context import BuiltModel, RunContext
from ftcli.train.evaluation import HeldOut, began_in
from ftcli.train.fit import FinishedRun, fit
from ftcli.train.lifecycle import CompleteRun, add_to_manifest, checked_run, complete_result, keep_inputs
from ftcli.train.progress import TrainingRows, held_out_line

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ftcli.data.ledger import DatasetLedger
    from ftcli.data.order import ComputedTokens, Epochs
    from ftcli.data.prepare import PreparedData
    from ftcli.data.tokens import TokenizedRow, TokenTable
    from ftcli.evaluate.suite import Evaluator
    from ftcli.job import Job
    from ftcli.judges import Judge
    from ftcli.model.fused import DecoderStack
    from ftcli.model.sequence_parallel import SequencePart
    from ftcli.plan.batches import Batches
    from ftcli.run.process_group import RankGroup
    from ftcli.train.loop import Objective, TrainerHooks, TrainingLoop


class ObjectiveParts(TypedDict):
    """An objective's arguments beside its job, model and epochs: the ranks that train together, the decoder layers as
    one function where all are on the kernels, and this rank's part of each row where ranks share rows.
    """

    group: RankGroup | None
    stack: DecoderStack | None
    sequence: SequencePart | None


class RowMethod(ABC):
    """A method's part of a run on rows that hold their answers: the class that its row of the table names.

    Attributes:
        evaluates: What measures models on held-out rows.
        compares_rows: Its findings compare training rows with each other, which takes time.
    """

    evaluates: ClassVar[type[Evaluator]]
    compares_rows: ClassVar[bool] = False

    @abstractmethod
    def epochs(self, job: Job, prepared: PreparedData) -> Epochs:
        """Makes the epochs of training; reports what there is to say of the data."""

    def findings(self, recipe: Recipe, table: TokenTable) -> Iterator[Finding]:
        """Findings on the training rows together. Raises FtcliError where nothing can be learned."""
        return iter(())

    def held_out_findings(self, before: Mapping[str, float], after: Mapping[str, float]) -> Iterator[Finding]:
        """Findings on the trained model, by held-out measures (``before``: what was measured then)."""
        return iter(())

    @abstractmethod
    def training_rows(self, recipe: Recipe, rows: int, tokens: int) -> TrainingRows:
        """Describes the training data of a run on so many tokenized rows, for the summary at its start."""

    @abstractmethod
    def objective(
        self, job: Job, model: Any, epochs: Epochs, reference: Any, **parts: Unpack[ObjectiveParts]
    ) -> Objective:
        """The objective that the loop trains ``model`` on."""

    def build(
        self,
        job: Job,
        model: Any,
        epochs: Epochs,
        hooks: TrainerHooks,
        group: RankGroup | None,
        reference: Any = None,
    ) -> TrainingLoop:
        """The loop that trains ``model``."""
        from ftcli.train.build import build_loop

        def make(stack: DecoderStack | None, sequence: SequencePart | None) -> Objective:
            return self.objective(job, model, epochs, reference, group=group, stack=stack, sequence=sequence)

        return build_loop(job, model, make, hooks, group)

    def evaluator(
        self,
        job: Job,
        rows: Sequence[TokenizedRow],
        group: RankGroup | None = None,
        *,
        judges: Mapping[str, Judge] | None = None,
        reference: Any = None,
    ) -> Evaluator:
        """An evaluator of held-out rows."""
        return self.evaluates(job, rows, judges or {}, group)

    def before_training(
        self,
        job: Job,
        model: Any,
        epochs: Epochs,
        held_out: Sequence[TokenizedRow],
        group: RankGroup | None,
        reference: Any = None,
        *,
        keep: bool = True,
    ) -> Any:
        """Prepares the reference before the first step, for :meth:`evaluator` and :meth:`build`. All ranks call it,
        with the model as it starts. ``keep``: what is computed may be of use to other runs.
        """
        return reference

    def ask_other(
        self,
        job: Job,
        model: Any,
        epochs: Epochs | None,
        held_out: Sequence[TokenizedRow],
        group: RankGroup | None,
    ) -> Any:
        """Asks another model, where the method's row of the table names one: what :meth:`evaluator` and :meth:`build`
        get for a reference. All ranks call it.

        Args:
            job, model: Those of that model.
            epochs: What is trained on; None: nothing is.
        """
        raise NotImplementedError

    def synthetic(self, rows: Sequence[TokenizedRow], prompt: int | None, seed: int) -> Epochs:
        """Epochs of synthetic rows, for `ftcli bench`; ``prompt`` tokens of a row are its prompt."""
        from ftcli.data.order import plain_epochs

        return plain_epochs(rows, seed)

    def start_of(self, recipe: Recipe) -> str | None:
        """The adapter that training goes on from, where the trained model is compared with it; None: with its base."""
        return None

    def needs_reference(self, recipe: Recipe) -> bool:
        """True if a second model is loaded, which the trained one is compared with."""
        return False


@dataclass(frozen=True, slots=True)
class RowsResult:
    """The answer of `ftcli train`: the run, and held-out numbers by name; none without held-out data."""

    fitted: FinishedRun = field(metadata=FLATTENED)
    eval: Mapping[str, float]
    seconds: float


def train_on_rows(loaded: LoadedRecipe, session: Session, group: RankGroup | None = None) -> RowsResult | CompleteRun:
    """Trains the recipe by its method into its run directory, as one of the ranks of ``group`` where there are several.

    Raises FtcliError for everything that a user can cause; exit 75 or 130 after a signal, with a checkpoint written.
    """
    with checked_run(loaded, session, "train", group) as context:
        if context is None:
            return complete_result(loaded.recipe, session)
        return _train(session, context)


def _train(session: Session, context: RunContext) -> RowsResult:
    with context.phase("loading libraries"):
        from ftcli.job import open_job
        from ftcli.model.experts import quantized_stacks
        from ftcli.model.quantized import quantized_layers
        from ftcli.train import assembly, data
        from ftcli.train.build import why_not_graphed

        method = row_method(context.report.plan.method)
    started, group = time.perf_counter(), context.group
    with context.phase("preparing data"), nullcontext() if group is None else group.after_leader("data"):
        job = open_job(context.report, session)
        train_data, eval_data = _training_rows(context, job), data.tokenized(job, "eval")
        scores_tasks = job.recipe.eval.tasks_every_steps is not None
        judges = judges_of(job.recipe) if scores_tasks else {}
        asked_tasks = method.evaluator(job, eval_data.sequences, judges=judges)
        if scores_tasks:
            asked_tasks.read_tasks()
        findings = data.also_trained(train_data.sequences, eval_data.sequences)
        for finding in (*findings, *method.findings(job.recipe, train_data.sequences)):
            job.reporter.finding(finding)
        epochs = method.epochs(job, train_data)
        planned = job.plan.execution.batches
        computed = _counted(context, job, epochs, train_data, eval_data, planned)
    asked = _asked_first(context, method, job, epochs, train_data.sequences, eval_data.sequences)
    with context.phase("loading the model"):
        read = assembly.begin_reading(job) if context.leads else tuple
        with nullcontext() if group is None else group.after_leader("weights", lambda: assembly.to_download(job) > 0):
            model = assembly.build_trainable(job)
        kernels = assembly.put_on_kernels(job, model, train_data.sequences)
        batches = assembly.laid_out(job, model, epochs.sequences)
        if batches != planned:
            computed = _counted(context, job, epochs, train_data, eval_data, batches)
        graphs, layout = why_not_graphed(job, model) or "on", data.EpochLayout(batches, computed)
        built = BuiltModel(
            kernels.table, kernels.self_check, [*quantized_layers(model), *quantized_stacks(model)], graphs, layout
        )
        add_to_manifest(context, built)
        reference = None
        if method.needs_reference(job.recipe):
            reference = assembly.build_reference(job, train_data.sequences)
        if group is not None:
            assembly.form_group(job, group)
            assembly.shard_weights(job, model, group, reference)
    if asked is not None:
        reference = asked.found
    else:
        with context.phase("scoring the reference"):
            reference = method.before_training(job, model, epochs, eval_data.sequences, group, reference)
    evaluator = method.evaluator(job, eval_data.sequences, group, judges=judges, reference=reference)
    evaluator.take_tasks(asked_tasks)
    held_out = HeldOut(context.directory, evaluator, model)
    if context.leads:
        inputs = assembly.inputs_of(job, model, read, train_data.digest())
        keep_inputs(context, inputs if asked is None else replace(inputs, asked=asked.inputs))
    _before(context, held_out)
    fitted = fit(
        context,
        job,
        model,
        lambda hooks: method.build(job, model, epochs, hooks, group, reference),
        held_out.after_step if job.recipe.data.eval or scores_tasks else None,
        method.training_rows(
            context.recipe, len(train_data.sequences), sum(each.tokens for each in train_data.ledgers)
        ),
    )
    measured = _after(context, held_out, fitted.summary.steps)
    if context.leads:
        base = held_out.base
        for finding in method.held_out_findings({} if base is None else base.measures or {}, measured):
            job.reporter.finding(finding)
    return RowsResult(fitted, measured, time.perf_counter() - started)


def _asked_first(
    context: RunContext,
    method: RowMethod,
    job: Job,
    epochs: Epochs,
    rows: Sequence[TokenizedRow],
    held_out: Sequence[TokenizedRow],
) -> Answered[Any] | None:
    if job.report.asked is None:
        return None
    with context.phase("scoring the reference"):
        return answers_of_other(method, job, epochs, rows, held_out, context.group)


def answers_of_other(
    method: RowMethod,
    job: Job,
    epochs: Epochs | None,
    rows: Sequence[TokenizedRow],
    held_out: Sequence[TokenizedRow],
    group: RankGroup | None = None,
) -> Answered[Any] | None:
    """The answers of the model that the method asks before the trained one is loaded; None where it asks none."""

    def ask(of_other: Job, model: Any) -> Any:
        return method.ask_other(of_other, model, epochs, held_out, group)

    return answered(job, ask, rows, held_out, group)


def row_method(method: Method) -> RowMethod:
    """The method's part of a run on rows.

    Raises FtcliError FT250 (exit 2) for a method whose table row names none.
    """
    if method.trains is None:
        help = "add `--set train.method=sft` for the loss of the answers"
        raise FtcliError.single("FT250", f"{method.title} measures nothing on held-out rows", help=help)
    found: RowMethod = code_of(method.trains)()
    return found


def _before(context: RunContext, held_out: HeldOut) -> None:
    """Measures the model before training, once in a run, where it is evaluated during training as well."""
    recipe = context.recipe
    if context.opened.resume_step:
        held_out.resume(began_in(context.opened))
    elif (recipe.data.eval or recipe.eval.tasks_every_steps) and recipe.eval.every_steps is not None:
        with context.phase("evaluating"):
            found = held_out_line({f"eval_{name}": value for name, value in held_out.begin().items()})
        context.session.reporter.info(f"held-out before training: {found}")


def _after(context: RunContext, held_out: HeldOut, steps: int) -> Mapping[str, float]:
    """Measures the trained model; nothing without held-out data."""
    with context.phase("evaluating"):
        final = held_out.end()
        if final:
            values = {f"eval_{name}": value for name, value in final.items()}
            context.write_line({"step": steps, **values})
            context.session.reporter.info(f"held-out {held_out_line(values)}")
    return final


def _counted(
    context: RunContext, job: Job, epochs: Epochs, train_data: PreparedData, eval_data: PreparedData, batches: Batches
) -> ComputedTokens:
    """Tokens that an epoch computes in ``batches``; written to tokens.json."""
    from ftcli.train.data import computed_with, write_token_counts

    computed = computed_with(job, epochs, train_data, batches)
    if context.leads:

        def write(trained: Sequence[DatasetLedger]) -> None:
            ledgers = {"train": trained, "eval": eval_data.ledgers}
            write_token_counts(context.directory.tokens_path, ledgers, epochs, computed, batches.layout)

        write(train_data.ledgers)
        if epochs.stream is not None:
            epochs.stream.told = write
    return computed


def _training_rows(context: RunContext, job: Job) -> PreparedData:
    """Training rows as token ids; of a stream a window of them, from where the run goes on."""
    from ftcli.data.order import STREAM
    from ftcli.train.checkpoint_state import WindowState, readable
    from ftcli.train.data import tell_prepared, tokenized
    from ftcli.train.stream import WindowStream

    if not job.recipe.data.streaming:
        return tokenized(job, "train")
    resume_from, found = context.opened.resume_from, None
    if resume_from is not None:
        with readable(str(resume_from)):
            found = WindowState.read(resume_from)
    window = WindowStream(job, context.group, None if found is None else found.extra.get(STREAM)).begin()
    tell_prepared(job, "train", window)
    return window


_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Answered(Generic[_T]):
    """Another model's answers, and the identity of its files."""

    found: _T
    inputs: Inputs


def answered(
    job: Job,
    ask: Callable[[Job, PreTrainedModel], _T],
    rows: Sequence[TokenizedRow],
    held_out: Sequence[TokenizedRow],
    group: RankGroup | None,
) -> Answered[_T] | None:
    """The answers of the model that the method asks; None where it asks none, or nothing. All ranks call this; they are
    connected then.

    Args:
        ask: Gets a job of that model, and the model, frozen.
        rows, held_out: What it is asked about; the self-check looks at the first of them.

    Raises:
        FtcliError: FT326 (exit 3) where a row has a token that is another one there, or none; what loading raises.
    """
    if job.report.asked is None or not (len(rows) or len(held_out)):
        return None
    found = _answered(_job_of_other(job), job, ask, rows, held_out, group)
    gc.collect()  # its modules know each other
    if job.device.type == "cuda":
        torch.cuda.empty_cache()
    return found


def _job_of_other(job: Job) -> Job:
    """The job with the other model in the place of the trained one; of its memory nothing was decided."""
    asked = job.report.asked
    assert asked is not None
    theirs = asked.plan.recipe
    recipe = job.recipe.model_copy(update={"model": theirs.model, "quantization": theirs.quantization})
    plan = replace(job.plan, recipe=recipe, facts=asked.facts)
    return replace(job, report=replace(job.report, plan=plan, memory=None))


def loaded_beside(
    job: Job, rows: Sequence[TokenizedRow], group: RankGroup | None
) -> tuple[PreTrainedModel, Batches, Inputs]:
    """The other model, frozen, which stays beside the trained one on each rank, or is sharded like it; how its batches
    are laid out; and the identity of its files.

    Args:
        rows: A few, for the self-check.

    Raises:
        FtcliError: FT326 (exit 3) where an id is another token there; what loading raises.
    """
    of_other = _job_of_other(job)
    model, batches, read = _loaded_other(job, of_other, (rows,), group)
    inputs = assembly.loaded_base(of_other, model, read)
    if group is not None:
        from ftcli.model.backbone import root_of

        assembly.shard_weights(of_other, model, group)
        root: Any = root_of(model)
        if root is not None:
            root.set_reshard_after_forward(False, recurse=False)  # its head is read behind its pass
    return model, batches, inputs


def _answered(
    of_other: Job,
    job: Job,
    ask: Callable[[Job, PreTrainedModel], _T],
    rows: Sequence[TokenizedRow],
    held_out: Sequence[TokenizedRow],
    group: RankGroup | None,
) -> Answered[_T]:
    model, _, read = _loaded_other(job, of_other, (rows, held_out), group)
    if group is not None:
        assembly.form_group(job, group)
        assembly.shard_weights(of_other, model, group)
    return Answered(ask(of_other, model), assembly.loaded_base(of_other, model, read))


def _loaded_other(
    job: Job, of_other: Job, tables: Sequence[Sequence[TokenizedRow]], group: RankGroup | None
) -> tuple[PreTrainedModel, Batches, Callable[[], Any]]:
    """The other model, frozen and on the kernels; how its batches are laid out; and what reads its files' identity."""
    with nullcontext() if group is None else group.after_leader("other tokens"):  # which may be downloaded
        require_same_tokens(job, of_other, tables)
    read = assembly.begin_reading(of_other) if group is None or group.leads else tuple
    needed = assembly.to_download(of_other) > 0
    with nullcontext() if group is None else group.after_leader("other weights", lambda: needed):
        model = assembly.build_base(of_other)
    model.requires_grad_(False).eval()
    shown = next((table for table in tables if len(table)), tables[0])
    assembly.put_on_kernels(of_other, model, shown)
    return model, assembly.laid_out(of_other, model, shown), read


def require_same_tokens(job: Job, of_other: Job, tables: Iterable[Sequence[TokenizedRow]]) -> None:
    """Raises FtcliError FT326 (exit 3) for ids that are other tokens of the other model's tokenizer; and for those that
    only one of the two has, if rows of ``tables`` have them.
    """
    theirs, ours = _vocabulary(of_other), {at: token for token, at in job.tokenizer.get_vocab().items()}
    said = foreign_tokens(ours, theirs, ours.keys() & theirs.keys())
    alone = ours.keys() - theirs.keys()
    if alone and not said:
        used = {at for table in tables for row in table for at in alone.intersection(row.input_ids)}
        said = foreign_tokens(ours, theirs, used)
    if said:
        raise FtcliError([foreign_tokens_finding(of_other.facts.name, said)], ExitCode.PREFLIGHT)


def _vocabulary(of_other: Job) -> dict[int, str]:
    tokenizer = load_tokenizer(of_other.recipe.model, offline=of_other.session.offline)
    return {at: token for token, at in tokenizer.get_vocab().items()}
