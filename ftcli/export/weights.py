"""The weights of a model read one by one from its files, with what an adapter does to each.

Nothing but the tensor that was asked for is in memory: so a model is written, and held against what was written, on a
machine that it would not fit into.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from ftcli.errors import ExitCode, FtcliError
from ftcli.export.adapter import finite_tensors
from ftcli.export.loading import attach, unwritten
from ftcli.export.resolve import ExportSource, read_adapter_config
from ftcli.export.verify import Update, places, updates
from ftcli.facts.model import read_facts
from ftcli.model.checkpoint import hollow, weight_files
from ftcli.model.load import config_of
from ftcli.model.renaming import Renaming
from ftcli.model.tokenizer import source_of

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PretrainedConfig, PreTrainedModel


class Weights(Protocol):
    """The tensors of a model by the names that they have in it."""

    @property
    def names(self) -> Sequence[str]:
        """All that are stored; of tied ones the embedding alone."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, without reading it."""
        ...

    def read(self, name: str) -> Tensor:
        """A tensor, as it is stored or in float32; a tied head is read by its own name, too."""
        ...


class StoredWeights:
    """A model's safetensors files, opened and not read.

    Attributes:
        tied: Whether the head is the embedding, and not stored.
        embedding: The embedding's name.
    """

    def __init__(self, files: Sequence[Path], model: PreTrainedModel) -> None:
        from safetensors import safe_open

        renaming = Renaming(model)
        self._files: dict[str, tuple[Any, str]] = {}
        for path in files:
            file: Any = safe_open(path, framework="pt")
            for key in file.keys():  # noqa: SIM118  # no dict
                name, pattern = renaming.name_of(key)
                if pattern is not None:
                    raise _in_parts(name)
                if name in renaming.names:
                    self._files[name] = (file, key)
        self.embedding, self._head = ends(model)
        self.tied = bool(self._head) and self._head not in self._files
        missing = sorted(name for name, _ in model.named_parameters() if name not in self._files)
        if missing and not (self.tied and missing == [self._head]):
            raise _incomplete(missing[0])

    @property
    def names(self) -> Sequence[str]:
        """All that are stored."""
        return tuple(self._files)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, without reading it."""
        file, key = self._files[self._stored(name)]
        return tuple(file.get_slice(key).get_shape())

    def read(self, name: str) -> Tensor:
        """A tensor as it is stored."""
        file, key = self._files[self._stored(name)]
        tensor: Tensor = file.get_tensor(key)
        return tensor

    def _stored(self, name: str) -> str:
        return self.embedding if name == self._head and self.tied else name


class MergedWeights:
    """Base and adapter: ``W + s B A`` in float32, one rounding short of what is written. Other tensors are the base's.

    Tied embeddings of which one side was adapted are two tensors.

    Attributes:
        base: The base's own.
        changes: What the adapter does to each weight.
        tied: Whether the head is the embedding, and not stored.
    """

    def __init__(self, base: StoredWeights, changes: Mapping[str, Update], head: str) -> None:
        self.base, self.changes = base, changes
        self.tied = base.tied and not set(changes) & {head, base.embedding}
        self._extra = (head,) if base.tied and not self.tied else ()

    @property
    def names(self) -> Sequence[str]:
        """All that a merged model stores."""
        return (*self.base.names, *self._extra)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, without reading it."""
        return self.base.shape(name)

    def read(self, name: str) -> Tensor:
        """A tensor: as the base stores it, or merged, in float32."""
        tensor, change = self.base.read(name), self.changes.get(name)
        return tensor if change is None else change.applied(tensor.float())


def ends(model: PreTrainedModel) -> tuple[str, str]:
    """The names of the embedding's and the head's weight; the head's is empty where there is none."""
    inputs, outputs = model.get_input_embeddings(), model.get_output_embeddings()
    names = {id(module): f"{name}.weight" for name, module in model.named_modules()}
    return names[id(inputs)], names.get(id(outputs), "")


def source_weights(source: ExportSource, *, offline: bool) -> StoredWeights | MergedWeights:
    """What is exported, read tensor by tensor.

    Raises:
        FtcliError: FT323 when the weights are not there, FT742 when the adapter is damaged or does not fit.
    """
    from ftcli.export.loading import base_files

    config = source_config(source, offline=offline)
    model = hollow(config)
    if source.kind == "model":
        return StoredWeights(weight_files(str(source.folder), None, offline=True), model)
    base = StoredWeights(base_files(source, offline=offline), model)
    adapted = attach(unwritten(config), source.folder)
    return MergedWeights(base, source_updates(source, adapted), ends(model)[1])


def source_updates(source: ExportSource, adapted: PeftModel) -> dict[str, Update]:
    """What the adapter of ``source`` does to each weight."""
    return updates(read_adapter_config(source.folder), finite_tensors(source.folder), places(adapted))


def source_config(source: ExportSource, *, offline: bool) -> PretrainedConfig:
    """transformers' config of what is exported: the base's, or that of the full fine-tune."""
    from ftcli.model.checkpoint import read_config

    if source.kind == "model":
        return read_config(source_of(str(source.folder)), revision=None, offline=True)
    return config_of(read_facts(source.base, offline=offline, origins=source.origins).raw)


def _in_parts(name: str) -> FtcliError:
    return FtcliError.single(
        "FT748",
        f"{name} is stored in parts that have to be joined, which this format does not do",
        exit_code=ExitCode.PREFLIGHT,
        help="use export.formats: [safetensors]",
    )


def _incomplete(name: str) -> FtcliError:
    return FtcliError.single(
        "FT323",
        f"{name} is not among the stored weights",
        exit_code=ExitCode.PREFLIGHT,
        help="download or copy the model again",
    )
