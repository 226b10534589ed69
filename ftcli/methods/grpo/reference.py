"""What `grpo.beta` compares the policy with: the model as it started, or one that follows the policy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ftcli.methods.grpo.settings import GrpoConfig
from ftcli.train.assembly import of_reference

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

#: Lies in a checkpoint once the reference has moved; no *.safetensors, all of which are the policy's.
_FILE = "reference.pt"


class Reference:
    """The reference of a run.

    With ``sync_ref_model`` it becomes alpha policy + (1 - alpha) reference after every ``ref_model_sync_steps`` steps,
    as in TRL's SyncRefModelCallback. Of adapters a copy is kept, which is put in their place while it is asked: A and B
    mixed each for itself would be no mixture of what they add, so alpha is 1 (FT274).

    Args:
        other: A second model, which is the reference; None: the policy without its adapters.
    """

    def __init__(self, model: PreTrainedModel | PeftModel, other: PreTrainedModel | None, grpo: GrpoConfig) -> None:
        self._model, self._other = model, other
        self._every = grpo.ref_model_sync_steps if grpo.sync_ref_model else None
        self._alpha = grpo.ref_model_mixup_alpha
        self._kept: dict[str, Tensor] | None = None

    @contextmanager
    def at_hand(self) -> Iterator[PreTrainedModel | None]:
        """A block in which the model that it gives is the reference; None: the policy's model is."""
        if self._other is not None or self._kept is None:
            with of_reference(self._other, self._model):
                yield self._other
            return
        now = {name: parameter.detach().clone() for name, parameter in self._trained()}
        self._put(self._kept)
        try:
            yield None
        finally:
            self._put(now)

    @torch.no_grad()
    def follow(self, step: int) -> None:
        """``step`` is done."""
        if self._every is None or step % self._every:
            return
        if self._other is None:
            self._kept = {name: parameter.detach().clone() for name, parameter in self._trained()}
            return
        theirs = dict(self._other.named_parameters())
        for name, parameter in self._trained():
            theirs[name].mul_(1 - self._alpha).add_(parameter.to(theirs[name].dtype), alpha=self._alpha)
        self._kept = {name: theirs[name].detach() for name, _ in self._trained()}

    def save(self, folder: Path) -> None:
        """Writes what has moved."""
        if self._kept is not None:
            torch.save(self._kept, folder / _FILE)

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        """Reads what :meth:`save` wrote."""
        if not (folder / _FILE).exists():
            return
        stored = torch.load(folder / _FILE, map_location="cpu", weights_only=True)
        if self._other is None:
            self._kept = {name: stored[name].to(parameter) for name, parameter in self._trained()}
            return
        theirs = dict(self._other.named_parameters())
        for name, value in stored.items():
            theirs[name].copy_(value)
        self._kept = {name: theirs[name].detach() for name in stored}

    def _trained(self) -> list[tuple[str, Any]]:
        return [(name, one) for name, one in self._model.named_parameters() if one.requires_grad]

    @torch.no_grad()
    def _put(self, values: dict[str, Tensor]) -> None:
        for name, parameter in self._trained():
            parameter.copy_(values[name])
