"""Files that a recipe names besides its data: chat template, checkpoint, output directory."""

from __future__ import annotations

from ftcli.assets import asset, is_template_file, template_path
from ftcli.paths import expanded, is_file, is_folder
from ftcli.preflight.checks.context import Context, Findings


def check(context: Context) -> Findings:
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
