"""transformers' renaming of stored tensors, for weights that are read here one by one.

Some families' files have other names than the model (GPT-NeoX's head), or one tensor for each expert where the model
has a stack of all. The rules are transformers' own; only the reading is ours.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from copy import deepcopy
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Renaming:
    """Maps stored tensors to a model's own names.

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

    def joined(self, whole: str | None = None) -> Iterator[tuple[str, Tensor]]:
        """Tensors made of the kept parts, by name; the parts are freed one by one. ``whole``: of this name alone, and
        only if as many parts are there as its stack has experts.

        Raises:
            RuntimeError, ValueError: parts are missing, or do not fit together.
        """
        for first in list(self._parts) if whole is None else self._complete(whole):
            yield from self.join(first, self._parts.pop(first)).items()

    def _complete(self, name: str) -> list[str]:
        """The name, if one part of each pattern is there for every expert."""
        parts = self._parts[name]
        patterns = self._by_pattern[parts[0][1]].source_patterns
        return [name] if len(parts) == len(patterns) * self._state[name].shape[0] else []

    def join(self, name: str, parts: Sequence[tuple[str, str, Tensor]]) -> dict[str, Tensor]:
        """Makes ``name`` of its ``parts``, and whatever else the same rule makes of them, by name.

        Args:
            parts: Key, pattern and value of each, as :meth:`name_of` gives them.

        Raises:
            RuntimeError, ValueError: parts are missing, or do not fit together.
        """
        from transformers.core_model_loading import dot_natural_key

        ordered = sorted(parts, key=lambda part: dot_natural_key(part[0]))
        rule: Any = deepcopy(self._by_pattern[ordered[0][1]])
        for key, pattern, tensor in ordered:
            rule.add_tensor(name, key, pattern, tensor)
        made = rule.convert(name, model=self._model, config=self._model.config)
        return {each: value[0] if isinstance(value, list) else value for each, value in made.items()}

    def part(self, made: Mapping[str, Tensor], keys: Collection[str]) -> dict[str, Tensor]:
        """The reverse of :meth:`join`: the parts under the ``keys`` that they were stored by.

        Raises:
            ValueError: transformers takes them apart into others.
        """
        from transformers.core_model_loading import revert_weight_conversion

        by_present_name = {self._renamed(key): key for key in keys}
        parts = {
            key if key in keys else by_present_name.get(self._renamed(key), key): tensor
            for key, tensor in revert_weight_conversion(self._model, dict(made)).items()
        }
        if set(parts) != set(keys):
            raise ValueError(f"{', '.join(sorted(made))} cannot be taken apart again into what was stored")
        return parts

    def key_of(self, name: str) -> str:
        """Key for a tensor that the files do not hold yet: transformers' own, where that is read back."""
        from transformers.core_model_loading import revert_weight_conversion

        (key,) = revert_weight_conversion(self._model, {name: self._state[name]})
        return key if self.name_of(key) == (name, None) else name

    def _renamed(self, key: str) -> str:
        """A part's name of today: files of older versions have others."""
        from transformers.core_model_loading import rename_source_key

        renamed: str = rename_source_key(key, self._renamings, [], self._model.base_model_prefix, self._state)[0]
        return renamed
