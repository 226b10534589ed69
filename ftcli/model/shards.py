"""Shards of tensors and weights (DTensor): a rank's own and the whole; forward passes in step over the ranks.

A layer's all-gather takes all ranks. A rank whose forward pass ends early, for instance out of memory, or that has
nothing to compute takes part in the all-gathers of the layers that it has not come to. Where a GPU has room for all
weights, they are gathered once for many passes, in which ranks need not wait for each other.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from ftcli.model.backbone import base_of, decoder_layers, root_of, within_root

if TYPE_CHECKING:
    from peft import PeftModel
    from torch.distributed.device_mesh import DeviceMesh
    from transformers import PreTrainedModel


def local_shard(tensor: Tensor) -> Tensor:
    """This rank's shard, sharing its memory; an unsharded tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def shard_like(whole: Tensor, like: Tensor) -> Tensor:
    """The shard of ``whole`` that this rank has of ``like``; all where that is not sharded. Nothing is copied."""
    if not isinstance(like, DTensor):
        return whole
    chunks, rank = torch.chunk(whole, like.device_mesh.size(like.device_mesh.ndim - 1)), shard_rank(like)
    return chunks[rank] if rank < len(chunks) else whole[:0]


def shard_rank(tensor: Tensor) -> int:
    """This rank's number among those that share ``tensor``; 0 where it is not sharded."""
    return tensor.device_mesh.get_local_rank(tensor.device_mesh.ndim - 1) if isinstance(tensor, DTensor) else 0


def replicas_of(model: Any) -> int:
    """Replicas of the sharded weights over all ranks (hybrid sharding)."""
    meshes = [p.device_mesh for p in model.parameters() if isinstance(p, DTensor)]
    return max((mesh.size(0) for mesh in meshes if mesh.ndim > 1), default=1)


def as_dtensor(rows: Tensor, mesh: DeviceMesh, shape: torch.Size, stride: tuple[int, ...]) -> DTensor:
    """A DTensor sharded over ``mesh``, of which ``rows`` are this rank's shard."""
    placements: list[Placement] = [Replicate()] * (mesh.ndim - 1) + [Shard(0)]
    found: DTensor = DTensor.from_local(rows, mesh, placements, run_check=False, shape=shape, stride=stride)
    return found


def gather_shards(tensor: Tensor, *, wanted: bool) -> Tensor | None:
    """All-gathers a tensor, to the host of a rank that wants it. All ranks call this, in the same order."""
    found = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return found.detach().cpu() if wanted else None


def gather_like(rows: Tensor, like: Tensor, *, wanted: bool) -> Tensor | None:
    """:func:`gather_shards` this rank's rows of something in the shape of ``like``."""
    if not isinstance(like, DTensor):
        return rows.cpu() if wanted else None
    return gather_shards(as_dtensor(rows, like.device_mesh, like.shape, like.stride()), wanted=wanted)


def trained_is_sharded(model: Any) -> bool:
    """True if trained weights are sharded over ranks, and not only frozen ones."""
    return any(isinstance(p, DTensor) for p in model.parameters() if p.requires_grad)


def reshard_model(model: Any) -> None:
    """Reshards all-gathered weights, so that the model's parameters are this rank's shards."""
    root: Any = root_of(model)
    if root is None:
        return
    root.reshard()
    layers: list[Any] = list(decoder_layers(base_of(model)))
    for layer in layers:
        layer.reshard()


def gather_weights(model: PreTrainedModel, *, wanted: bool) -> dict[str, Tensor] | None:
    """All-gathers all weights, by name on the host of a rank that wants them; tied ones once. With them what is saved
    beside weights, such as the numbers that Gemma-4's layers are multiplied by. All ranks call this.
    """
    reshard_model(model)
    found = {name: gather_shards(p, wanted=wanted) for name, p in model.named_parameters()}
    if not wanted:
        return None
    return {name: tensor for name, tensor in found.items() if tensor is not None} | dict(_saved_buffers(model))


def _saved_buffers(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Buffers that are part of a checkpoint, on the host; each rank has them whole."""
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}".removeprefix("."), buffer.detach().cpu()


def load_shards(model: PreTrainedModel, stored: dict[str, Tensor], *, kept: Collection[str] = ()) -> None:
    """Loads this rank's shards of weights that are stored whole. Weights named in ``kept`` stay as they are.

    Raises:
        KeyError: a weight is not stored.
        ValueError: one is stored in another shape.
    """
    reshard_model(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in kept:
                continue
            whole = stored[name]
            if whole.shape != parameter.shape:
                raise ValueError(f"{name} is stored with shape {tuple(whole.shape)}, not {tuple(parameter.shape)}")
            local_shard(parameter).copy_(shard_like(whole, parameter))


T = TypeVar("T")


class _ForwardsInStep:
    """Keeps this rank in step with the others' layer all-gathers during forward passes."""

    def __init__(self, model: PreTrainedModel | PeftModel) -> None:
        self._layers: list[Any] = list(decoder_layers(base_of(model)))
        self._done = len(self._layers)

    @contextmanager
    def counted(self) -> Iterator[None]:
        """A block in which layers that have computed are counted."""

        def count(*_: object) -> None:
            self._done += 1

        with ExitStack() as hooks:
            for layer in self._layers:  # after torch has resharded its weights
                hooks.callback(layer.register_forward_hook(count).remove)
            yield

    @contextmanager
    def announced(self, announce: Callable[[], object]) -> Iterator[None]:
        """:meth:`counted`, with any number of passes, each of which is announced before its first layer."""

        def begin(*_: object) -> None:
            self.finish()
            announce()
            self.begin()

        # Before torch all-gathers the layer's weights.
        hook = self._layers[0].register_forward_pre_hook(begin, prepend=True)
        try:
            with self.counted():
                yield
            self.finish()
        finally:
            hook.remove()

    def begin(self) -> None:
        self._done = 0

    def follow(self) -> None:
        """Takes part in the all-gathers of a whole pass."""
        self.begin()
        self.finish()

    def finish(self) -> None:
        """Takes part in the all-gathers that the pass has not come to; does nothing after a whole one.

        A layer that failed may be whole already, or on its way: torch all-gathers it once.
        """
        for layer in self._layers[self._done :]:
            layer.unshard()
            layer.reshard()
        self._done = len(self._layers)


def try_forward(model: PreTrainedModel | PeftModel, compute: Callable[[], T]) -> T | None:
    """Runs ``compute``, one forward pass of a model with sharded weights; None if memory ran out.

    All ranks call this, each with something of its own to compute, and all come back.
    """
    passes = _ForwardsInStep(model)

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


def forwards_in_step(
    model: PreTrainedModel | PeftModel, compute: Callable[[], T] | None, announce: Callable[[bool], bool]
) -> T | None:
    """Runs ``compute``, any number of forward passes, on this rank of a model with sharded weights; None where it has
    nothing to compute.

    All ranks call this. One that is done, or makes fewer passes, takes part in the all-gathers of the others'.

    Args:
        announce: Called by all ranks together before each pass, and after the last one; says on all of them whether
            there is one on any, from what each gives.
    """
    passes = _ForwardsInStep(model)

    def compute_and_follow() -> T | None:
        found = None
        if compute is not None:
            with passes.announced(lambda: announce(True)):
                found = compute()
        while announce(False):
            passes.follow()
        return found

    found = within_root(model, compute_and_follow)
    reshard_model(model)
    return found


def with_whole_weights(model: PreTrainedModel | PeftModel, compute: Callable[[], T]) -> T:
    """Runs ``compute`` while each rank has all weights of a model with sharded ones, all-gathered once.

    All ranks call this, and none waits for another in ``compute``.
    """
    layers: list[Any] = list(decoder_layers(base_of(model)))

    def gathered() -> T:
        for layer in layers:
            layer.unshard()
        return compute()

    try:
        return within_root(model, gathered)
    finally:
        reshard_model(model)
