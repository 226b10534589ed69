"""Rules about the sources of rows that need the recipe alone, and about the other files that it names."""

from __future__ import annotations

from collections.abc import Sequence

from ftcli.assets import asset, is_template_file, template_path
from ftcli.config.data import DatasetConfig
from ftcli.paths import expanded, is_file, is_folder
from ftcli.plan.execution import takes_rows
from ftcli.preflight.checks.context import Context, Findings
from ftcli.rows.places import is_hub, resolve_path

_HUB_ONLY = ("name", "revision", "streaming")


def check(context: Context) -> Findings:
    """FT257 and FT258 for sources, FT259 for layouts of batches that have no effect."""
    recipe = context.recipe
    for section, sources in (("data.train", recipe.data.train), ("data.eval", recipe.data.eval)):
        for index, source in enumerate(sources):
            yield from _options(context, f"{section}.{index}", source)
    for number, task in enumerate(recipe.eval.tasks):
        for index, source in enumerate(task.data):
            yield from _options(context, f"eval.tasks.{number}.data.{index}", source)
    yield from _weights(context, recipe.data.train)
    method = context.method
    if recipe.data.packing and not method.packs and context.command == method.command:
        message = f"data.packing has no effect in {method.command}: completions are generated"
        yield context.warning("FT259", "data.packing", message)
    refusal = takes_rows(recipe, context.work)
    if recipe.data.padding_free is True and refusal is not None:
        yield context.warning("FT259", "data.padding_free", f"data.padding_free has no effect: {refusal}")


def _options(context: Context, path: str, source: DatasetConfig) -> Findings:
    taken = sorted(set(source.remove_columns) & set(source.columns.values()))
    if taken:
        message = f"remove_columns takes {taken[0]!r} away, which columns reads"
        yield context.error("FT257", f"{path}.remove_columns", message, "remove it from one of the two")
    if not is_hub(source):
        for name in _HUB_ONLY:
            if getattr(source, name):
                yield context.error(
                    "FT257",
                    f"{path}.{name}",
                    f"{name} is for datasets of the Hub, but {source.path} is read from this machine",
                    f"write the path as hub:ORG/NAME, or remove {name}",
                )
        if source.split and is_file(resolve_path(source.path)):
            yield context.error(
                "FT257",
                f"{path}.split",
                f"{source.path} is one file and has no splits",
                "remove split, or name a folder",
            )
    elif source.streaming and source.max_rows is None:
        yield context.error(
            "FT258",
            f"{path}.streaming",
            f"{source.path} is streamed without a limit, but all rows are tokenized before training starts",
            "add max_rows, or remove streaming to download the whole split",
        )
    if source.weight is not None and not path.startswith("data.train"):
        yield context.error(
            "FT257", f"{path}.weight", "weight is for training data; each held-out row counts once", "remove weight"
        )


def _weights(context: Context, sources: Sequence[DatasetConfig]) -> Findings:
    weighted = [source.weight is not None for source in sources]
    if any(weighted) and not all(weighted):
        index = weighted.index(False)
        yield context.error(
            "FT257",
            f"data.train.{index}",
            f"{sources[index].path} has no weight, but another source has one",
            "give every source of data.train a weight, or none",
        )
    elif any(weighted) and context.work == "train" and not context.method.mixes:
        yield context.error(
            "FT257",
            "data.train.0.weight",
            f"weights of sources are not supported yet in {context.method.title}",
            "repeat rows in the file, or remove it",
        )


def check_files(context: Context) -> Findings:
    """FT424 for a chat template that is not there, FT725 for a checkpoint that is not."""
    template = context.recipe.data.chat_template
    if template is not None:
        yield from _template(context, template)
    resume = context.recipe.run.resume
    if context.trains and context.recipe.run.resumes_elsewhere and not is_folder(expanded(resume)):
        yield context.error(
            "FT725",
            "run.resume",
            f"cannot resume from {resume}: there is no such folder",
            help="name a folder like runs/NAME/checkpoints/step-00000100, or use auto",
        )


def _template(context: Context, name: str) -> Findings:
    of_file, path = is_template_file(name), template_path(name)
    if is_file(path):
        return
    bundled = sorted(p.stem for p in asset("templates").glob("*.jinja"))
    what = f"no file at {path.absolute()}" if of_file else f"no bundled template is called {name!r}"
    yield context.error(
        "FT424",
        "data.chat_template",
        f"data.chat_template: {what}",
        help=f"name a .jinja file, or one of: {', '.join(bundled) or 'none'}",
    )
