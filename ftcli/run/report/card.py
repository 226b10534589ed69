"""README.md of adapters, models and exports: a model card filled from a run's recipe, manifest and results.

No path of the machine is in it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined

from ftcli import __version__
from ftcli.assets import BUNDLED
from ftcli.facts.config_file import looks_local
from ftcli.facts.weights import ADAPTER_CONFIG, EXPORT_RECORD, MODEL_CARD
from ftcli.plain import JsonMap, JsonObject, is_number, map_in, maps
from ftcli.rows.places import HUB
from ftcli.run.atomic import read_bytes, read_json_object, storage_errors, write_text
from ftcli.run.directory import RunDirectory
from ftcli.run.recipe_changes import recipe_in
from ftcli.run.report.charts import as_text, count, page_text
from ftcli.run.report.tables import changed, score_rows, settings_by_section
from ftcli.tables import methods, quantizations
from ftcli.tables.methods import Method

#: The end of a card that may be written anew.
MARK = "<!-- Written by ftcli, and again after each evaluation of the run: remove this line to make it yours. -->"
_REPO = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
#: A folder in the Hub's cache says which repository it is of.
_CACHED = re.compile(r"models--([\w.-]+?)--([\w.-]+)(?:/|$)")


@dataclass(frozen=True, slots=True)
class PublicBase:
    """The base model as others may know it: ``repo`` is its id on the Hub, None where it has none."""

    name: str
    repo: str | None
    commit: str | None


def write_card(run: RunDirectory, folder: Path | None = None, *, of_result: bool = True, merged_with: str = "") -> None:
    """Writes the card of what lies in ``folder``; of the run's result, where there is one, when None. A card without
    :data:`MARK` belongs to somebody else, and is left as it is.

    ``of_result``: False for weights of a checkpoint, which the run's results are not about; ``merged_with``: which form
    of the base an adapter was merged with. Raises FtcliError FT723 or FT724.
    """
    folder = run.result_dir if folder is None else folder
    if folder is not None and not _is_somebodys(folder / MODEL_CARD):
        path = folder / MODEL_CARD
        with storage_errors(path):
            write_text(path, render_card(run, folder, of_result=of_result, merged_with=merged_with))


def _is_somebodys(path: Path) -> bool:
    """True if a card is there that ftcli has not written, or that somebody has made their own."""
    try:
        return MARK.encode() not in read_bytes(path)
    except FileNotFoundError:
        return False
    except OSError:
        return True


def render_card(run: RunDirectory, folder: Path, *, of_result: bool = True, merged_with: str = "") -> str:
    """The card of what lies in ``folder``: an adapter, a model, or something else that was made of the run's result."""
    recipe = recipe_in(run.recipe_path)
    manifest, tokens = read_json_object(run.manifest_path), read_json_object(run.tokens_path)
    evaluation = read_json_object(run.eval_path) if of_result else {}
    status = read_json_object(run.status_path)
    base, stored = _base(recipe, manifest), str(map_in(recipe, "quantization").get("method"))
    adapter, model = (folder / ADAPTER_CONFIG).is_file(), (folder / "config.json").is_file()
    licence = {} if _is_random(recipe) else licence_of_base(manifest)
    method = _method(recipe, manifest)
    text: str = _template().render(
        head=_head(base, licence, manifest, recipe, adapter=adapter, model=model),
        title=str(map_in(recipe, "run").get("name") or run.path.name),
        about=_about(base, recipe, manifest, adapter=adapter),
        licence=_licence_text(licence),
        random=_is_random(recipe),
        scores=score_rows(evaluation, methods.TABLE.get(str(map_in(recipe, "train").get("method")))),
        measured=_measured(evaluation, exported=not adapter and (folder / EXPORT_RECORD).is_file()),
        adapter=adapter,
        model=model,
        scoring=method is not None and method.classifier,
        chats=(folder / "chat_template.jinja").is_file(),
        serving=_Own(serving(folder)),
        base_is_local=adapter and base.repo is None,
        stored=stored if adapter and recipe.get("lora") and quantizations.is_stored(stored) else "",
        training=[
            *([] if of_result else [("weights", "of a checkpoint, written before the end of the run")]),
            *training_rows(recipe, manifest, map_in(map_in(status, "trained"), "summary") if of_result else {}),
            *([("merged with", merged_with)] if merged_with else []),
        ],
        data=_data(manifest, tokens),
        exported=(folder / EXPORT_RECORD).is_file(),
        verification=verification_rows(folder),
        versions=_versions(manifest),
        mark=_Own(MARK),
    )
    return text


@cache
def _template() -> Any:
    # What would be markup in Markdown is escaped in _cell: autoescape is for HTML.
    return Environment(  # noqa: S701
        loader=PackageLoader(__package__, ""),
        finalize=_cell,
        undefined=StrictUndefined,
        keep_trailing_newline=True,
    ).get_template("card.md.jinja")


def _cell(value: object) -> object:
    """Text of a recipe or of data in a line of Markdown. Our own pieces, which are marked as such, stay as they are."""
    if isinstance(value, _Own):
        return value
    text = page_text(" ".join(str(value).split()))
    return re.sub(r"([|`<>\[\]*])", r"\\\1", text)


class _Own(str):
    """Markdown that this file has written."""

    __slots__ = ()


def _base(recipe: JsonMap, manifest: JsonMap) -> PublicBase:
    model = map_in(recipe, "model")
    return public_base(str(model.get("name_or_path") or "unknown"), model.get("revision"), manifest)


def licence_of_base(manifest: JsonMap) -> JsonObject:
    """The base model's licence as a run has recorded it: ``id``, ``name``, ``link``; empty where it is not known."""
    return map_in(map_in(manifest, "base"), "licence")


def public_base(name: str, revision: str | None, manifest: JsonMap) -> PublicBase:
    """The base model as others may know it, from its name and revision in a recipe and the run's manifest, which knows
    the commit.
    """
    commit = map_in(manifest, "inputs").get("commit")
    revision = commit if isinstance(commit, str) else revision
    if name.startswith(BUNDLED):
        return PublicBase(f"{name.removeprefix(BUNDLED)} (a small model that ftcli bundles)", None, None)
    cached = _CACHED.search(name)
    if cached is not None:
        return PublicBase(f"{cached[1]}/{cached[2]}", f"{cached[1]}/{cached[2]}", revision)
    if looks_local(name) or not _REPO.fullmatch(name):
        return PublicBase(Path(name).name or "a local model", None, None)
    return PublicBase(name, name, revision if isinstance(revision, str) else None)


def _head(
    base: PublicBase,
    licence: JsonMap,
    manifest: JsonMap,
    recipe: JsonMap,
    *,
    adapter: bool,
    model: bool,
) -> str:
    """The front matter that the Hub reads."""
    values: JsonObject = {}
    repo = None if _is_random(recipe) else base.repo
    if repo is not None:
        values["base_model"] = repo
    if adapter or model:
        values["library_name"] = "peft" if adapter else "transformers"
    method = _method(recipe, manifest)
    values["pipeline_tag"] = "text-classification" if method is not None and method.classifier else "text-generation"
    for key, name in (("license", "id"), ("license_name", "name"), ("license_link", "link")):
        if licence.get(name):
            values[key] = licence[name]
    repos = [row.removeprefix(HUB) for row in _sources(recipe) if row.startswith(HUB)]
    if repos:
        values["datasets"] = repos
    kind = "adapter" if adapter else "finetune"
    tags = ["ftcli", *([] if method is None else [method.name])]
    tags += ["lora"] if recipe.get("lora") else []
    tags += [f"base_model:{kind}:{repo}"] if repo is not None else []
    values["tags"] = sorted(tags)
    return _Own(f"---\n{yaml.safe_dump(values, sort_keys=False, allow_unicode=True)}---\n")


def _method(recipe: JsonMap, manifest: JsonMap) -> Method | None:
    """The training method: the command's own, or the one that the recipe names for it."""
    row = methods.of_commands().get(str(manifest.get("command")))
    named = methods.TABLE.get(str(map_in(recipe, "train").get("method")))
    return row if row is None or row.section is not None else named or row


def _sources(recipe: JsonMap) -> list[str]:
    found = map_in(recipe, "data").get("train")
    return list(dict.fromkeys(str(one.get("path")) for one in maps(found)))


def _about(base: PublicBase, recipe: JsonMap, manifest: JsonMap, *, adapter: bool) -> str:
    what = "LoRA adapter for" if adapter else "Merged LoRA fine-tune of" if recipe.get("lora") else "Full fine-tune of"
    what += " random weights in the shape of" if _is_random(recipe) else ""
    at = f" at commit `{base.commit}`" if base.commit is not None else ""
    named = f"[{base.repo}](https://huggingface.co/{base.repo})" if base.repo is not None else str(_cell(base.name))
    row = _method(recipe, manifest)
    method = "training" if row is None else row.title
    version = manifest.get("ftcli") or __version__
    return _Own(f"{what} {named}{at}, made by {method} with ftcli {_cell(version)}.")


def _is_random(recipe: JsonMap) -> bool:
    """True if nothing of the base but its shape is in what was trained."""
    return map_in(recipe, "model").get("init") == "random"


def _measured(evaluation: JsonMap, *, exported: bool) -> str:
    """Says what the held-out results were measured on, where that is not what lies here."""
    step = evaluation.get("step")
    after = f"after step {step:,} of training, before its end" if is_number(step) else ""
    before = "on the run's own result, before it was written in this format" if exported else ""
    return f"Measured {' and '.join(filter(None, (after, before)))}." if after or before else ""


def _licence_text(licence: JsonMap) -> str:
    if not licence.get("id"):
        return ""
    name = licence.get("name") or licence["id"]
    return _Own(f"[{name}]({licence['link']})" if licence.get("link") else str(name))


def _data(manifest: JsonMap, tokens: JsonMap) -> list[tuple[str, str, str, str]]:
    """Name, rows, tokens and SHA-256 of the training data, in the recipe's order; files of a folder have no counts."""
    digests = {str(file.get("name")): str(file.get("sha256")) for file in maps(manifest.get("data"))}
    counted = [one for one in maps(tokens.get("datasets")) if one.get("split") == "train"]
    rows = []
    for one in counted:
        name, kept, trained = str(one.get("name")), count(one.get("rows_kept")), count(one.get("tokens_trained"))
        rows.append((public_name(name), kept, trained, digests.pop(name, "–")))
    return [*rows, *((public_name(name), "–", "–", sha256) for name, sha256 in digests.items())]


def public_name(name: str) -> str:
    """A dataset's name as others may know it: no folder of this machine."""
    if name.startswith((HUB, BUNDLED)):
        return name
    return Path(name).name


def _versions(manifest: JsonMap) -> str:
    libraries = map_in(manifest, "libraries")
    shown = {"ftcli": manifest.get("ftcli"), "Python": manifest.get("python"), **libraries}
    return ", ".join(f"{name} {version}" for name, version in shown.items() if version)


_MODELFILE = "Modelfile"


def serving(folder: Path) -> str:
    """Command lines that serve what is no folder of transformers' or PEFT's; empty for those."""
    name = folder.name.removeprefix(".tmp-")
    if (folder / _MODELFILE).is_file():
        return f"ollama create {name} -f {_MODELFILE} && ollama run {name}"
    files = sorted(path.name for path in folder.glob("*.gguf") if "-LoRA-" not in path.name)
    return "\n".join(f"llama-server -m {file} --jinja" for file in files)


def verification_rows(folder: Path) -> list[tuple[str, str]]:
    """Results of an export's verification; empty where nothing was compared."""
    verification: JsonMap = map_in(read_json_object(folder / EXPORT_RECORD), "verification")
    if not verification or "verified" in verification:
        return []
    return [
        (name.replace("_", " "), as_text(value)) for name, value in verification.items() if not name.endswith("_bytes")
    ]


#: What everybody looks for, changed or not.
_ALWAYS = (
    "lora.r",
    "lora.alpha",
    "lora.dropout",
    "lora.target_modules",
    "data.max_seq_len",
    "train.learning_rate",
    "train.lr_scheduler_type",
    "train.warmup_steps",
    "train.optim",
    "train.weight_decay",
)
_SECTIONS = ("lora", "quantization", "data", "train")
#: Told in other words, or places on the user's disk; so are the rewards of training methods.
_ELSEWHERE = (
    "data.train",
    "data.eval",
    "data.chat_template",
    "train.per_device_train_batch_size",
    "train.gradient_accumulation_steps",
    "train.max_steps",
    "train.num_train_epochs",
    "preference.reference",
    "preference.reference_revision",
)
#: What is surely a path is never told, whatever the key.
_PATH = re.compile(r"(~|\.{1,2})?/")


def training_rows(recipe: JsonMap, manifest: JsonMap, summary: JsonMap) -> list[tuple[str, str]]:
    """Names and values: how it was trained, with what settings, for how long, and on what."""
    device, plan = map_in(manifest, "device"), map_in(manifest, "dtype_plan")
    rows = [("method", _method_text(recipe)), ("effective batch", _batch(recipe, manifest))]
    if is_number(summary.get("steps")):
        tokens = f", {summary['tokens']:,} tokens" if is_number(summary.get("tokens")) else ""
        rows.append(("steps", f"{summary['steps']:,}{tokens}"))
    rows += [*_settings(recipe), ("compared with", _reference(recipe, manifest)), ("rewards", _rewards(recipe))]
    rows += [("seed", as_text(map_in(recipe, "run").get("seed"))), ("device", as_text(device.get("name")))]
    quantized = map_in(recipe, "quantization").get("method")
    frozen = {"linear layers": quantized} if recipe.get("lora") and quantizations.is_stored(quantized) else {}
    others = "other parameters" if frozen else "parameters"
    dtypes = {
        **frozen,
        others: plan.get("parameter"),
        "adapters": plan.get("adapter"),
        "computed in": plan.get("compute"),
    }
    rows.append(("dtypes", ", ".join(f"{name} {as_text(value)}" for name, value in dtypes.items() if value)))
    return [(name, value) for name, value in rows if value not in ("", "–")]


def _method_text(recipe: JsonMap) -> str:
    kind = "LoRA" if recipe.get("lora") else "full fine-tuning"
    quantized = map_in(recipe, "quantization").get("method")
    if quantizations.is_stored(quantized) and recipe.get("lora"):
        return f"{kind} on a base in {quantized}"
    return f"{kind}, weights rounded in every product ({quantized})" if quantizations.is_stored(quantized) else kind


def _batch(recipe: JsonMap, manifest: JsonMap) -> str:
    """Rows of an optimizer step, over all processes: the manifest counts what each of them accumulates."""
    train = map_in(recipe, "train")
    size, accumulated = (train.get(name) for name in ("per_device_train_batch_size", "gradient_accumulation_steps"))
    together = manifest.get("micro_batches", accumulated)
    if not isinstance(size, int) or not isinstance(together, int):
        return ""
    return f"{size * together} = {size} x {together} micro-batches"


def _settings(recipe: JsonMap) -> list[tuple[str, str]]:
    sections = methods.sections()
    every = settings_by_section({name: recipe.get(name) for name in (*_SECTIONS, *sections)})
    values = {f"{section}.{one.key}": one.value for section, rows in every.items() for one in rows}
    always = (*_ALWAYS, *(name for method in methods.TABLE.values() for name in method.told))
    names = dict.fromkeys([*(name for name in always if name in values), *(one.key for one in changed(every))])
    elsewhere = (*_ELSEWHERE, *(f"{section}.rewards" for section in sections))
    return [(name, values[name]) for name in names if name not in elsewhere and not _PATH.match(values[name])]


def _reference(recipe: JsonMap, manifest: JsonMap) -> str:
    """Another model that answers were compared with; empty where it is the model as it started, or nothing."""
    section = map_in(recipe, "preference")
    named = section.get("reference")
    if not isinstance(named, str) or named in ("start", "none"):
        return ""
    asked = map_in(map_in(manifest, "inputs"), "asked")
    found = public_base(named, section.get("reference_revision"), {"inputs": asked})
    return found.name if found.commit is None else f"{found.name} at {found.commit}"


def _rewards(recipe: JsonMap) -> str:
    """Built-in rewards by name, the user's by the function's: the file's path is nobody's business."""
    rewards = [one for section in methods.sections() for one in maps(map_in(recipe, section).get("rewards"))]
    names = [str(one.get("use") or str(one.get("file")).rpartition(":")[2]) for one in rewards]
    return ", ".join(f"{name} (weight {as_text(one.get('weight'))})" for name, one in zip(names, rewards, strict=True))
