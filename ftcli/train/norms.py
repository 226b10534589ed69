"""Norms of gradients, each taken as soon as it is complete, beside the backward pass that goes on."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn


class GradientNorms:
    """The norm of each parameter's gradient, taken on a stream of its own when backward has accumulated it.

    Clipping needs the norm of all gradients before the optimizer changes any weight. Taken then, it is a pass over all
    of them in which products wait; here it reads what backward has just written while the next products run.

    In an accumulated step the norm of the last micro-batch's sum is the one that stays. Nothing else may change a
    gradient before :meth:`total` is asked.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        device = parameters[0].device
        self._norms = torch.zeros(len(parameters), dtype=torch.float32, device=device)
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        for index, parameter in enumerate(parameters):
            hook = partial(self._take, index)
            parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def _take(self, index: int, parameter: Tensor) -> None:
        gradient = parameter.grad
        assert gradient is not None
        self._stream.wait_stream(torch.cuda.current_stream(gradient.device))
        with torch.cuda.stream(self._stream):
            torch.linalg.vector_norm(gradient, dtype=torch.float32, out=self._norms[index])

    def total(self) -> Tensor:
        """The norm of all gradients since it was last asked, as a scalar on the device."""
        current = torch.cuda.current_stream(self._norms.device)
        current.wait_stream(self._stream)
        total: Tensor = torch.linalg.vector_norm(self._norms)
        self._norms.zero_()  # a parameter without a gradient in the next step counts for nothing
        self._stream.wait_stream(current)
        return total
