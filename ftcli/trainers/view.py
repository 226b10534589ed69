"""A model as a training loop needs it: its trained parameters, found once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.nn import Parameter


class TrainedView(nn.Module):
    """Stands for ``model`` in transformers' loop, which asks for its mode, parameters and gradients in every step.

    Each of these walks over every module, some ten milliseconds for an adapted model of 32 layers, in which a GPU that
    has few tokens to work on waits. The view holds no modules and no parameters of its own.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        object.__setattr__(self, "model", model)  # not a submodule
        self._trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        # transformers loads models in evaluation mode, and PEFT's wrapper around one is in training mode all the same:
        # what ``model.training`` says goes for its modules only once the mode was set here.
        model.train(model.training)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's."""
        model: Any = self.model
        return model(*args, **kwargs)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Parameter]]:
        """The trained ones."""
        return iter(self._trained)

    def parameters(self, recurse: bool = True) -> Iterator[Parameter]:
        """The trained ones."""
        return (parameter for _, parameter in self._trained)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Takes the gradients away, whatever ``set_to_none`` says."""
        for _, parameter in self._trained:
            parameter.grad = None

    def train(self, mode: bool = True) -> TrainedView:
        """Puts the model into training or evaluation mode, if it is not in it."""
        model: Any = self.model
        if model.training != mode:
            model.train(mode)
        self.training = mode
        return self
