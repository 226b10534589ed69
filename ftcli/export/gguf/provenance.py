"""What a file was made from, under GGUF's own names: the base model and its licence. It holds no path."""

from __future__ import annotations

from ftcli.export.gguf.metadata import Value
from ftcli.export.resolve import ExportSource
from ftcli.run.atomic import read_json_object
from ftcli.run.directory import RunDirectory
from ftcli.run.report.card import licence_of_base, public_base

_HUB = "https://huggingface.co/"


def provenance_of(source: ExportSource) -> dict[str, Value]:
    """The licence that the run has recorded, and the base model where others can know it by its name on the Hub."""
    manifest = {} if source.run is None else read_json_object(RunDirectory(source.run[0]).manifest_path)
    base = public_base(source.base.name_or_path, source.base.revision, manifest)
    licence = licence_of_base(manifest)
    values: dict[str, Value] = {}
    for key, name in (("license", "id"), ("license.name", "name"), ("license.link", "link")):
        if licence.get(name):
            values[f"general.{key}"] = str(licence[name])
    if base.repo is None:
        return values
    organization, _, name = base.repo.rpartition("/")
    values |= {"general.base_model.count": 1, "general.base_model.0.name": name}
    values["general.base_model.0.repo_url"] = f"{_HUB}{base.repo}"
    if organization:
        values["general.base_model.0.organization"] = organization
    if base.commit is not None:
        values["general.base_model.0.version"] = base.commit
    return values
