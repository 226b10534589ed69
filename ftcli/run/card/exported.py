"""What a card says of an export: how it is served, and what its verification found."""

from __future__ import annotations

from pathlib import Path

from ftcli.facts.weights import EXPORT_RECORD
from ftcli.plain import JsonMap
from ftcli.run.atomic import read_json_object
from ftcli.run.report.values import as_text, map_in

_MODELFILE = "Modelfile"


def serving(folder: Path) -> str:
    """Command lines that serve what is no folder of transformers' or PEFT's; empty for those."""
    name = folder.name.removeprefix(".tmp-")
    if (folder / _MODELFILE).is_file():
        return f"ollama create {name} -f {_MODELFILE} && ollama run {name}"
    files = sorted(path.name for path in folder.glob("*.gguf") if "-LoRA-" not in path.name)
    return "\n".join(f"llama-server -m {file} --jinja" for file in files)


def verification_rows(folder: Path) -> list[tuple[str, str]]:
    """What was compared when it was written, and what came out; empty where nothing was, or for no export."""
    verification: JsonMap = map_in(read_json_object(folder / EXPORT_RECORD), "verification")
    if not verification or "verified" in verification:
        return []
    return [
        (name.replace("_", " "), as_text(value)) for name, value in verification.items() if not name.endswith("_bytes")
    ]
