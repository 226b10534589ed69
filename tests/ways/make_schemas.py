"""Writes schemas/: what the launchers' own packages say of their files.

Run where they are installed: `pip install skypilot dstack kubernetes-validate modal runpod`, then this file.
"""

from __future__ import annotations

import inspect
import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).with_name("schemas")


def kubernetes() -> dict[str, Any]:
    """The schema of a batch/v1 Job with all that it refers to, where no key is unknown."""
    import kubernetes_validate

    folder = Path(kubernetes_validate.__file__).parent / "kubernetes-json-schema"
    newest = max(folder.glob("v1.*-local-strict"), key=lambda path: int(path.name.split(".")[1]))
    known: dict[str, Any] = json.loads((newest / "_definitions.json").read_text())["$defs"]
    kept: dict[str, Any] = {}
    waiting = ["io.k8s.api.batch.v1.Job"]
    while waiting:
        name = waiting.pop()
        if name not in kept:
            kept[name] = _plain(known[name])
            waiting += {ref.rpartition("/")[2] for ref in _refs(kept[name])}
    told = newest.name.removesuffix("-local-strict")
    return {"version": told, "$defs": kept, "$ref": "#/$defs/io.k8s.api.batch.v1.Job"}


def _plain(node: Any) -> Any:
    if isinstance(node, dict):
        left = {key: _plain(value) for key, value in node.items() if key != "description" or not isinstance(value, str)}
        return {key: value.replace("_definitions.json", "") if key == "$ref" else value for key, value in left.items()}
    return [_plain(item) for item in node] if isinstance(node, list) else node


def _refs(node: Any) -> set[str]:
    if isinstance(node, dict):
        own = {node["$ref"]} if isinstance(node.get("$ref"), str) else set()
        return own.union(*map(_refs, node.values()))
    return set().union(*map(_refs, node)) if isinstance(node, list) else set()


def skypilot() -> dict[str, Any]:
    """SkyPilot's schemas of a task and of its resources."""
    from sky.utils import schemas

    return {
        "version": version("skypilot"),
        "task": schemas.get_task_schema(),
        "resources": schemas.get_resources_schema(),
    }


def dstack() -> dict[str, Any]:
    """dstack's schema of a task."""
    from dstack._internal.core.models.configurations import TaskConfiguration

    return {"version": version("dstack"), **_plain(TaskConfiguration.model_json_schema())}


def signatures() -> dict[str, Any]:
    """The arguments of what the launchers in Python call."""
    import modal
    import runpod

    called = {
        "modal.App": modal.App, "app.function": modal.App.function, "app.local_entrypoint": modal.App.local_entrypoint,
        "modal.Image.from_dockerfile": modal.Image.from_dockerfile, "modal.Volume.from_name": modal.Volume.from_name,
        "modal.Secret.from_name": modal.Secret.from_name, "modal.Retries": modal.Retries,
        "runpod.create_pod": runpod.create_pod,
    }  # fmt: skip
    of = {
        name: [each for each in inspect.signature(code).parameters if each != "self"] for name, code in called.items()
    }
    return {"modal": version("modal"), "runpod": version("runpod"), "signatures": of}


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for made in (kubernetes, skypilot, dstack, signatures):
        text = json.dumps(made(), separators=(",", ":"), sort_keys=True)
        (FOLDER / f"{made.__name__}.json").write_text(text + "\n", encoding="utf-8")
