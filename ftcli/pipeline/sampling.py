"""`ftcli sample`: several answers to each prompt, judged, and rows for the next training of the best or of pairs."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ftcli.config.load import LoadedRecipe
from ftcli.config.recipe import Recipe
from ftcli.errors import Finding, FtcliError, Origin
from ftcli.facts.weights import ADAPTER_CONFIG
from ftcli.judges import JudgeAccess
from ftcli.paths import expanded
from ftcli.pipeline.weights import weights_of
from ftcli.plain import JsonObject, plain
from ftcli.preflight.stages import checked
from ftcli.reporting import Session
from ftcli.run.atomic import read_text
from ftcli.run.directory import RunDirectory, is_run_directory, run_that_owns
from ftcli.run.samples import SampleFolder

if TYPE_CHECKING:
    from ftcli.job import Job
    from ftcli.pipeline.sample_answers import Drawing
    from ftcli.pipeline.sample_rows import SampleOptions, SampleResult, SampleSummary
    from ftcli.run.inputs import WeightFile

#: Answers of a prompt, of recipes without GRPO.
NUM_GENERATIONS = 8


def sample_recipe(loaded: LoadedRecipe, session: Session, run_dir: Path | None, options: SampleOptions) -> SampleResult:
    """Draws, judges and writes; resumes where a run with the same settings was stopped.

    Raises FtcliError FT159 (exit 2) for options that contradict each other, FT284 for a recipe without a judge, FT773
    where the folder holds samples of something else; FT763, FT725, FT735, FT749 for a run as `ftcli eval`; whatever
    preflight, rows, judges and loading raise.
    """
    run = None if run_dir is None else RunDirectory(run_dir)
    chosen, weights = weights_of(loaded, run, options.checkpoint, session.reporter, "sampling")
    recipe = _for_sampling(loaded.recipe, options)
    _refuse_contradictions(recipe, options)
    target = _folder(recipe, run, options)
    _refuse_folder_of_run(target)
    report = checked(replace(loaded, recipe=recipe), session, "sample")
    from ftcli.data.asked import asked_rows, room_of_task
    from ftcli.data.generated import GeneratedRows
    from ftcli.job import open_job
    from ftcli.pipeline.sample_answers import AnswerFiles, Scorer
    from ftcli.pipeline.sample_rows import SampleResult, write_rows

    job, data, drawing = open_job(report, session), recipe.data, _drawing(recipe, options)
    room = replace(room_of_task(data, recipe.eval.generate), cut_to=None, help=_LONG_PROMPT)
    asked, warnings = asked_rows(
        data.train, data, job.tokenizer, room, offline=session.offline, max_rows=options.max_prompts
    )
    for warning in warnings:
        session.reporter.finding(warning)
    scorer = Scorer(recipe, asked, session.reporter, JudgeAccess(session.secret, session.cache_dir))
    with SampleFolder(target) as folder:
        drawn = {**_model_identity(job, weights), **plain(asdict(drawing))}
        files = AnswerFiles(job, asked, drawing, scorer, folder, run, weights)
        rate = files.draw(drawn, replace=options.force)
        rows = GeneratedRows(job.tokenizer, job.stops, data)
        summary = write_rows(files, folder, rows, scorer.full, options)
        folder.note(drawn, scorer.settings(), plain(summary))
    for finding in _told(summary):
        session.reporter.finding(finding)
    where, of_run = str(folder.path), None if run is None else str(run.path)
    checkpoint = None if chosen is None else str(chosen)
    return SampleResult(str(loaded.path), where, of_run, checkpoint, tuple(scorer.names), drawing, summary, rate)


_LONG_PROMPT = "raise data.max_seq_len, or choose data.overlong: drop"


def cannot_sample(message: str, help: str, option: str) -> FtcliError:
    """FT159: options contradict each other."""
    return FtcliError.single("FT159", message, origin=Origin(option), help=help)


def _for_sampling(recipe: Recipe, options: SampleOptions) -> Recipe:
    """The recipe whose evaluation generates as asked, and reads nothing else than the prompts."""
    own, grpo = recipe.eval.generate, recipe.grpo
    longest = own.max_new_tokens if grpo is None else grpo.max_completion_length
    return recipe.changed(
        {
            "eval.generate.max_new_tokens": options.max_new_tokens or longest,
            "eval.generate.do_sample": True,
            "eval.generate.overflow": "end",  # an answer to more than data.max_seq_len could not be learnt
            "eval.generate.stop_strings": own.stop_strings if grpo is None else grpo.stop_strings,
            "eval.lm_eval": (),
            "data.eval": (),
        }
    )


def _refuse_contradictions(recipe: Recipe, options: SampleOptions) -> None:
    count = _count(recipe, options)
    for option, value in (("--min-score", options.min_score), ("--min-margin", options.min_margin)):
        if not math.isfinite(value or 0.0):
            raise cannot_sample(f"{option} {value} is no number to compare with", "write one, as in 0.5", option)
    if count == 1 and options.kept == "pairs":
        raise cannot_sample("a pair needs two answers", "use --num-generations 2 or more", "--num-generations 1")
    if count > 1 and options.temperature == 0:
        help = "use a higher temperature, or --num-generations 1"
        raise cannot_sample(f"at temperature 0 all {count} answers of a prompt are the same", help, "--temperature 0")


def _count(recipe: Recipe, options: SampleOptions) -> int:
    own = NUM_GENERATIONS if recipe.grpo is None else recipe.grpo.num_generations
    return own if options.num_generations is None else options.num_generations


def _drawing(recipe: Recipe, options: SampleOptions) -> Drawing:
    """The options; what they leave open is the recipe's (``grpo``, else ``eval.generate``)."""
    from ftcli.pipeline.sample_answers import Drawing

    grpo, generate = recipe.grpo, recipe.eval.generate
    temperature = generate.temperature if grpo is None else grpo.temperature
    top_p, top_k = (1.0, 0) if grpo is None else (grpo.top_p, grpo.top_k)
    return Drawing(
        num_generations=_count(recipe, options),
        temperature=temperature if options.temperature is None else options.temperature,
        top_p=top_p if options.top_p is None else options.top_p,
        top_k=top_k if options.top_k is None else options.top_k,
        max_new_tokens=generate.max_new_tokens,
        stop_strings=generate.stop_strings,
        seed=recipe.run.seed if options.seed is None else options.seed,
        max_length=recipe.data.max_seq_len,
    )


def _folder(recipe: Recipe, run: RunDirectory | None, options: SampleOptions) -> Path:
    if options.output is not None:
        return options.output
    named = Path(str(recipe.run.output_dir)) if run is None else run.path
    return expanded("samples") / named.resolve().name


def _refuse_folder_of_run(folder: Path) -> None:
    """Raises FT773 (exit 2) for a run's folder, and for one of its own inside."""
    try:
        resolved = folder.resolve()
    except (OSError, RuntimeError):  # making it will say why
        return
    run = resolved if is_run_directory(resolved) else run_that_owns(resolved)
    if run is not None:
        message = (
            f"{folder} is {'' if run == resolved else 'in '}the folder of a run, which samples would be mixed with"
        )
        raise FtcliError.single("FT773", message, help="name another folder with --output")


def _model_identity(job: Job, weights: Path | None) -> JsonObject:
    """The identity of the model that answers; prompts are told apart by their texts."""
    from huggingface_hub import try_to_load_from_cache

    from ftcli.run.inputs import base_inputs, stored_weights

    model, commit = job.recipe.model, None
    if not job.facts.is_local:
        cached = try_to_load_from_cache(model.name_or_path, "config.json", revision=model.revision)
        commit = Path(cached).parent.name if isinstance(cached, str) else None
    base = base_inputs(job.facts, model, commit, _weights_in(stored_weights(job.facts, model)))
    # The settings of an adapter, its scale among them; none of whole weights.
    settings = None if weights is None else weights / ADAPTER_CONFIG
    adapter = read_text(settings) if settings is not None and settings.is_file() else ""
    own = None if weights is None else [plain(_weights_in(weights)), adapter]
    return {
        "model": model.name_or_path,
        "base": _digest(plain(base)),
        "random_weights_of": job.recipe.run.seed if model.init == "random" else None,
        "weights": None if own is None else _digest(own),
        "quantization": job.recipe.quantization.model_dump(mode="json"),
        "dtype": job.dtypes.compute,
        "stops": list(job.stops),
    }


def _weights_in(folder: Path | None) -> list[WeightFile]:
    """Identities of weight files by samples alone: whether all bytes are read depends on the memory that is free."""
    from ftcli.run.inputs import weight_identities

    return [] if folder is None else [replace(one, crc32="") for one in weight_identities(folder)]


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def _told(summary: SampleSummary) -> Iterator[Finding]:
    """FT774: files that teach nothing, and rows that are not what was generated."""
    for name, written in (("sft", summary.sft), ("pairs", summary.pairs)):
        if written is None:
            continue
        if not written.rows:
            reasons = ", ".join(f"{count:,} {reason}" for reason, count in written.left_out.items())
            message = f"{written.path} holds no row; of the prompts: {reasons}"
            yield Finding("FT774", message, help=_NO_ROWS[name], severity="warning")
        elif written.otherwise:
            message = f"{written.path}: {written.otherwise:,} answers are trained otherwise than they were generated"
            help = "chat templates trim white space, most often; `ftcli check --show-sample 3` shows what is trained"
            yield Finding("FT775", message, help=help, severity="note")


_NO_ROWS = {
    "sft": "draw more answers (--num-generations), longer ones (--max-new-tokens), or lower --min-score",
    "pairs": "draw more answers (--num-generations) or more varied ones (--temperature), or judge in finer grades",
}
