"""Files that a recipe names besides its data: chat template, checkpoint, output directory."""

from __future__ import annotations

from pathlib import Path

from ftcli.assets import asset
from ftcli.preflight.checks.context import Context, Findings


def check(context: Context) -> Findings:
    """FT424 for a chat template that is not there, FT725 for a checkpoint that is not."""
    template = context.recipe.data.chat_template
    if template is not None:
        yield from _template(context, template)
    resume = context.recipe.run.resume
    if context.trains and resume not in ("auto", "never"):
        folder = Path(resume).expanduser()
        if not folder.is_dir():
            yield context.error(
                "FT725",
                "run.resume",
                f"cannot resume from {resume}: there is no such folder",
                help="name a folder like runs/NAME/checkpoints/step-00000100, or use auto",
            )


def _template(context: Context, name: str) -> Findings:
    is_file = name.endswith((".jinja", ".j2"))
    path = Path(name).expanduser() if is_file else asset("templates", f"{name}.jinja")
    if path.is_file():
        return
    bundled = sorted(p.stem for p in asset("templates").glob("*.jinja"))
    what = f"no file at {path.absolute()}" if is_file else f"no bundled template is called {name!r}"
    yield context.error(
        "FT424",
        "data.chat_template",
        f"data.chat_template: {what}",
        help=f"name a .jinja file, or one of: {', '.join(bundled) or 'none'}",
    )
