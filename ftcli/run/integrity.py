"""Checks that a run's result and base model are those of training, before evaluation, export or chat.

Everything is compared by content. Where nothing notes what training had, the finding FT770 says so.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from ftcli.config.model import ModelConfig
from ftcli.errors import Finding, FtcliError
from ftcli.facts.weights import MODEL_CARD
from ftcli.plain import JsonMap, JsonObject, map_in
from ftcli.run.atomic import read_json_object, read_text
from ftcli.run.checkpoint import difference, inventory
from ftcli.run.directory import RunDirectory
from ftcli.run.inputs import Inputs, changed_base, noted_files, start_files
from ftcli.run.recipe_changes import map_of
from ftcli.run.status import FinishedTraining, read_status

_NO_INPUTS = (
    "manifest.json is missing or damaged, or names no inputs: which base, chat template and dtypes it was trained with "
    "is not known beyond what recipe.yaml says"
)


def result_files(folder: Path) -> list[JsonObject]:
    """Files of a result (:func:`ftcli.run.checkpoint.inventory`), without its card, which is written again."""
    return [each for each in inventory(folder) if not each["name"].endswith(MODEL_CARD)]


def changed_result(run: RunDirectory, trained: FinishedTraining) -> str | None:
    """The difference of adapter/ or model/ from the files that training wrote; None if every file is as it was, and no
    other.
    """
    folder = run.result_dir
    if folder is None or folder.name != trained.result:
        return f"{trained.result}/ is not there"
    try:
        changed = difference(folder, trained.files, thorough=True)
        added = {each["name"] for each in result_files(folder)} - {str(each["name"]) for each in trained.files}
    except OSError as error:
        return f"{error.filename} cannot be read ({error.strerror})"
    except (ValueError, KeyError, TypeError, AttributeError):
        return "status.json does not list its files"
    return changed or (f"{min(added)} was not there" if added else None)


def hold_result(run: RunDirectory) -> list[Finding]:
    """Refuse a result that is not what training wrote: FtcliError FT771 (exit 2) with the first file that differs.
    Returns FT770 where nothing notes what that was.
    """
    status = read_status(run.status_path)
    if status is None or status.trained is None:
        return [not_held(str(run.path), "status.json is missing or damaged: it does not list the files of the result")]
    changed = changed_result(run, status.trained)
    if changed is not None:
        raise FtcliError.single(
            "FT771",
            f"{run.path / status.trained.result} is not what training wrote: {changed}",
            help="restore the file, or take a checkpoint with --checkpoint STEP; to export an adapter that you changed "
            f"on purpose, name its folder: `ftcli export {run.path / status.trained.result}`",
        )
    if any(len(each) < 3 for each in status.trained.files):
        return [not_held(str(run.path), "ftcli 0.1 noted only the sizes of the result's files, which are the same")]
    return []


def hold_base(run: Path, model: ModelConfig, seed: int, now: Inputs, *, weights: bool = True) -> list[Finding]:
    """Refuse to join a run's result to a base model that it was not trained on: FtcliError FT735 (exit 2) with what
    differs. Returns FT770 with what cannot be held against training.

    Files and the Hub's commit are compared where both sides know them, whatever the model is called. Where no weights
    can be, as random ones, the recipes have to name the same model. ``weights``: the base's are read; a full fine-tune
    has its own.
    """
    known = read_json_object(RunDirectory(run).manifest_path).get("inputs")
    known = known if isinstance(known, Mapping) else {}
    before, named = _named_in(RunDirectory(run).recipe_path), _named(model.model_dump(mode="json"), seed)
    comparable = bool((noted_files(known.get("weights")) and now.weights) or (known.get("commit") and now.commit))
    changed = changed_base(known, now, weights=weights and comparable)
    if weights and not comparable:
        changed += [f"{key} {before[key]} -> {named.get(key)}" for key in before if before[key] != named.get(key)]
    if not changed:
        reasons = list(_unheld(known, model, now, weights=weights and not comparable))
        return [not_held(str(run), "; ".join(reasons))] if reasons else []
    name = before.get("model.name_or_path", model.name_or_path)
    said = name if name == model.name_or_path else f"{name}, not on {model.name_or_path}"
    raise FtcliError.single(
        "FT735",
        f"{run} was trained on {said}; what differs: {', '.join(changed)}",
        help="use the model that it was trained on: restore the files, or name them in model.name_or_path (of the "
        "Hub: pin model.revision to the commit that the run was trained on)",
    )


def hold_asked(run: Path, now: Inputs) -> None:
    """Refuse to compare a run's result with another reference than in training. What was not noted is accepted.

    Raises FtcliError FT735 (exit 2) with what differs.
    """
    known = map_in(map_in(read_json_object(RunDirectory(run).manifest_path), "inputs"), "asked")
    changed = changed_base(known, now)
    if changed:
        raise FtcliError.single(
            "FT735",
            f"{run} was compared with another reference; what differs: {', '.join(changed)}",
            help="restore the reference's files, or name them in preference.reference (of the Hub: pin "
            "preference.reference_revision to the commit that training used)",
        )


def hold_start(run: Path, start: str) -> None:
    """Refuse to compare a run's result with another adapter than it went on from. What was not noted is accepted.

    Raises FtcliError FT735 (exit 2) with what differs.
    """
    known = noted_files(read_json_object(RunDirectory(run).manifest_path).get("data"))
    now = {file.name: file.sha256 for file in start_files(start)}
    before = {name: file["sha256"] for name, file in known.items() if name in now or name.startswith(f"{start}/")}
    changed = sorted(name for name in {*before, *now} if before.get(name) != now.get(name))
    if known and changed:
        raise FtcliError.single(
            "FT735",
            f"{run} went on from another adapter, which it is compared with; what differs: {', '.join(changed)}",
            help="restore the adapter's files, or name them in lora.start_from",
        )


def _unheld(known: JsonMap, model: ModelConfig, now: Inputs, *, weights: bool) -> Iterator[str]:
    if not known:
        yield _NO_INPUTS
        return
    if weights and model.init != "random":
        yield "the run noted no weights or commit of its base that could be compared"
    if now.files and not noted_files(known.get("files")):
        yield "manifest.json names no config.json and tokenizer files of the base: it is ftcli 0.1's, or damaged"


def not_held(what: str, reason: str) -> Finding:
    """FT770: whether something is what training had cannot be told."""
    help = "no action is needed if you know that it is the same; runs of this version record all of it"
    return Finding("FT770", f"{what} could not be compared with training: {reason}", help=help, severity="warning")


def _named_in(recipe: Path) -> JsonObject:
    """The base model as a run's recipe names it; empty when it cannot be read."""
    try:
        raw = map_of(read_text(recipe))
        return _named(raw["model"], raw["run"]["seed"])
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _named(model: JsonMap, seed: int) -> JsonObject:
    named = {f"model.{key}": model[key] for key in ("name_or_path", "init")}
    return {**named, "run.seed": seed} if model["init"] == "random" else named
