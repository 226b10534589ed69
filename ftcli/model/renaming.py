"""transformers' renaming of stored tensors, for weights that are read here one by one.

Some families' files have other names than the model (GPT-NeoX's head), or one tensor for each expert where the model
has a stack of all. The rules are transformers' own; only the reading is ours.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Renaming:
    """What the stored tensors of a model are in it.

    Attributes:
        names: The model's parameters and stored buffers.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming

        self._model = model
        self._state = model.state_dict()
        parameters = [name for name, _ in model.named_parameters(remove_duplicate=False)]
        self.names = frozenset([*parameters, *self._state])
        mapping = get_model_conversion_mapping(model)
        self._renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
        self._converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
        self._by_pattern = {pattern: entry for entry in self._converters for pattern in entry.source_patterns}
        self._parts: dict[str, list[tuple[str, str, Tensor]]] = {}

    def name_of(self, key: str) -> tuple[str, str | None]:
        """The model's name of a stored tensor, and the pattern of the rule by which it is a part of that; None where it
        is the whole. Files saved from the bare backbone leave the backbone's prefix out.
        """
        from transformers.core_model_loading import rename_source_key

        if key in self.names:
            return key, None
        name, pattern = rename_source_key(
            key, self._renamings, self._converters, self._model.base_model_prefix, self._state
        )
        if name in self.names:
            return name, pattern
        prefixed = f"{self._model.base_model_prefix}.{key}"
        return (prefixed if prefixed in self.names else key), None

    def keep_part(self, key: str, name: str, pattern: str, tensor: Tensor) -> None:
        """Keeps a tensor that is a part of ``name`` until all are there."""
        self._parts.setdefault(name, []).append((key, pattern, tensor))

    def joined(self) -> Iterator[tuple[str, Tensor]]:
        """What the kept parts make, by name; the parts are let go one by one.

        Raises:
            RuntimeError, ValueError: parts are missing, or do not fit together.
        """
        from transformers.core_model_loading import dot_natural_key

        for first in list(self._parts):
            parts = sorted(self._parts.pop(first), key=lambda part: dot_natural_key(part[0]))
            rule: Any = deepcopy(self._by_pattern[parts[0][1]])
            for key, pattern, tensor in parts:
                rule.add_tensor(first, key, pattern, tensor)
            for name, made in rule.convert(first, model=self._model, config=self._model.config).items():
                yield name, made[0] if isinstance(made, list) else made
