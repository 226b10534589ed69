"""Forward passes of a model whose weights are spread over ranks: as many on each of them, whoever computes.

Putting a layer's weights together takes all ranks. A rank whose pass ends early, as where its memory runs out, or that
has nothing to compute takes its part for the layers that it has not come to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from ftcli.model.backbone import base_of, decoder_layers, within_root
from ftcli.model.shards import put_away

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

T = TypeVar("T")


class _Passes:
    """This rank's part in forward passes, one after the other."""

    def __init__(self, model: PreTrainedModel | PeftModel) -> None:
        self._layers: list[Any] = list(decoder_layers(base_of(model)))
        self._done = len(self._layers)

    @contextmanager
    def counted(self) -> Iterator[None]:
        """A block in which layers that have computed are counted."""

        def count(*_: object) -> None:
            self._done += 1

        with ExitStack() as hooks:
            for layer in self._layers:  # after torch has let go of its weights
                hooks.callback(layer.register_forward_hook(count).remove)
            yield

    @contextmanager
    def told(self, announce: Callable[[], object]) -> Iterator[None]:
        """:meth:`counted`, with any number of passes, each of which is announced before its first layer."""

        def begin(*_: object) -> None:
            self.finish()
            announce()
            self.begin()

        # Before torch puts the layer's weights together.
        hook = self._layers[0].register_forward_pre_hook(begin, prepend=True)
        try:
            with self.counted():
                yield
            self.finish()
        finally:
            hook.remove()

    def begin(self) -> None:
        """A pass begins."""
        self._done = 0

    def follow(self) -> None:
        """Takes part in a whole pass."""
        self.begin()
        self.finish()

    def finish(self) -> None:
        """Takes part in what the pass has not come to; does nothing after a whole one.

        A layer that failed may be whole already, or on its way: torch puts it together once.
        """
        for layer in self._layers[self._done :]:
            layer.unshard()
            layer.reshard()
        self._done = len(self._layers)


def tried(model: PreTrainedModel | PeftModel, compute: Callable[[], T]) -> T | None:
    """What ``compute`` makes in one forward pass of a model whose weights are spread; None where memory ran out.

    All ranks call this, each with something of its own to compute, and all come back.
    """
    passes = _Passes(model)

    def compute_or_follow() -> T | None:
        passes.begin()
        with passes.counted():
            try:
                return compute()
            except torch.OutOfMemoryError:
                pass
        # Outside the except block: the exception holds the frames of the pass, and with them its tensors.
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        passes.finish()
        return None

    return within_root(model, compute_or_follow)


def led(
    model: PreTrainedModel | PeftModel, compute: Callable[[], T] | None, announce: Callable[[bool], bool]
) -> T | None:
    """What the one rank that has something to ``compute`` makes in any number of forward passes of a model whose
    weights are spread; None on the others. All ranks call this.

    Args:
        announce: Called by all ranks together before each pass, and after the last one; says on all of them whether
            there is one, from what the rank that computes gives.
    """
    passes = _Passes(model)

    def lead(compute: Callable[[], T]) -> T:
        with passes.told(lambda: announce(True)):
            found = compute()
        announce(False)
        return found

    def follow() -> None:
        while announce(False):
            passes.follow()

    found = within_root(model, follow if compute is None else lambda: lead(compute))
    put_away(model)
    return found
