"""The recipes that ship with ftcli."""

from __future__ import annotations

from pathlib import Path


def shipped() -> dict[str, Path]:
    """Recipes by name: those inside an installed package, or those of the checkout that this package stands in."""
    package = Path(__file__).resolve().parents[1]
    inside = package / "assets" / "recipes"
    folder = inside if inside.is_dir() else package.parent / "recipes"
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}
