"""FSDP: shards a model's weights over the ranks of a run by torch's ``fully_shard`` (FSDP2).

Each decoder layer is a unit of its own: its weights are all-gathered right before it computes and resharded after.
Embedding, last norm and head are the root's. Inside a unit's forward its weights are plain tensors, so kernels and
layers know nothing of it. Where there are adapters, only frozen weights are sharded: every rank has all adapters, and
their gradients are all-reduced as under ``ddp``.

A model that is loaded tensor by tensor need never be whole anywhere. As soon as a layer has all its tensors, each rank
keeps the shard that ``fully_shard`` will give it and drops the rest. Parameters of the full shape without memory stand
in their place, for adapters and kernels to be set up by. The first layers stay whole, for the checks before training.

Quantized weights lie in parameters here, since torch shards no buffers. Frozen weights that read the same input are one
parameter: torch gathers several parameters into separate pieces of memory, and one product needs a single one
(``ftkernels.projection.joined``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from ftcli.errors import ExitCode, FtcliError
from ftcli.facts.layers import SHARED_INPUTS
from ftcli.model.backbone import base_of, decoder_layers, set_root
from ftcli.model.experts import QuantizedStack, StackParts, hide_stacks, part_stacks
from ftcli.model.quantized import QuantizedLinear, as_shardable
from ftcli.model.shards import as_dtensor
from ftcli.plan.precision import DtypePlan
from ftcli.tables import engines
from ftcli.tables.architecture import LAYER_INPUT

if TYPE_CHECKING:
    from peft import PeftModel
    from torch.distributed.device_mesh import DeviceMesh
    from transformers import PreTrainedModel


class JoinedTensors(nn.Module):
    """Tensors joined along ``dim`` in one frozen parameter; as :func:`ftcli.model.quantized.as_shardable` says.

    Raises:
        ValueError: they differ in dtype.
    """

    def __init__(self, tensors: Sequence[Tensor], dim: int = 0) -> None:
        super().__init__()
        if len({tensor.dtype for tensor in tensors}) > 1:
            raise ValueError("tensors of several dtypes cannot be joined")
        self._dtype, self._dim = tensors[0].dtype, dim
        self._bytes = [tensor.numel() * tensor.element_size() for tensor in tensors]
        self._sizes = [int(tensor.shape[dim]) for tensor in tensors]
        self.stored = nn.Parameter(as_shardable(torch.cat(list(tensors), dim)), requires_grad=False)

    def part(self, index: int) -> Tensor:
        """One of the tensors, as a view."""
        whole = self.stored if self.stored.dtype == self._dtype else self.stored.view(self._dtype)
        return whole.narrow(self._dim, sum(self._sizes[:index]), self._sizes[index])

    def shard_bytes(self, index: int) -> int:
        """Bytes of one of the tensors."""
        return self._bytes[index]


class JoinedLinear(nn.Linear):
    """A frozen linear layer (O, I) whose weight is one tensor of a :class:`JoinedTensors`, and no parameter."""

    def __init__(self, linear: nn.Linear, joint: JoinedTensors, index: int) -> None:
        nn.Module.__init__(self)  # not nn.Linear's, which would make a weight
        self.in_features, self.out_features = linear.in_features, linear.out_features
        object.__setattr__(self, "_joint", joint)  # not a submodule: it is its neighbours', too
        self._index = index
        self.register_parameter("bias", linear.bias)

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """(O, I), a view."""
        joint: JoinedTensors = self._joint  # type: ignore[assignment]
        return joint.part(self._index)


def join_shared(layer: nn.Module, *, mixture: bool = False) -> None:
    """Joins the frozen weights of a decoder layer that read the same input, adapted or not, in place.

    Those that are trained stay apart, and so do those that become neighbours when they are dequantized. A single layer
    that gives all of a group's outputs (Phi-3) is one parameter as it is; so are all weights of layers built otherwise.
    In a ``mixture`` PEFT adapts an MLP without experts by its weights, which have to be parameters for that.
    """
    found = dict(layer.named_modules())
    for names in SHARED_INPUTS:
        if any(name not in found for name in names) or (mixture and names[0].startswith("mlp.")):
            continue
        modules: list[Any] = [found[name] for name in names]
        bases = [getattr(module, "base_layer", module) for module in modules]
        if any(base.weight.requires_grad for base in bases):
            continue
        if all(isinstance(base, QuantizedLinear) for base in bases):
            if len({type(base) for base in bases}) == 1:
                type(bases[0]).join_for_sharding(bases, partial(_joined_beside, layer, names))
        elif not any(isinstance(base, QuantizedLinear) for base in bases):
            joint = _joined_beside(layer, names, [base.weight for base in bases], 0)
            for index, (name, base) in enumerate(zip(names, bases, strict=True)):
                inner = f"{name}.base_layer" if base is not layer.get_submodule(name) else name
                layer.set_submodule(inner, JoinedLinear(base, joint, index))


def _joined_beside(layer: nn.Module, names: Sequence[str], tensors: Sequence[Tensor], dim: int) -> JoinedTensors:
    """Beside the modules whose weights are joined, so that it goes where these go."""
    parent = layer.get_submodule(names[0].rpartition(".")[0])
    joint = JoinedTensors(tensors, dim)
    leaves = "_".join(name.rpartition(".")[2] for name in names)
    parent.add_module(f"joint_{leaves}" + ("_columns" if dim else ""), joint)
    return joint


#: Layers that stay whole until the model is sharded.
UNSHARDED_LAYERS = 2
_ATTRIBUTE = "_ftcli_rank_shards"


@dataclass(slots=True, eq=False)
class RankShards:
    """The shards that rank ``rank`` of ``size`` keeps of loaded weights, by the parameter that stands for the whole.

    Attributes:
        joins: Whether weights that read the same input are joined, as frozen ones are.
        mixture: Whether the model has experts.
    """

    rank: int
    size: int
    joins: bool
    mixture: bool = False
    kept: dict[nn.Parameter, Tensor] = field(default_factory=dict)

    def of(self, whole: Tensor) -> Tensor:
        """This rank's shard, copied."""
        chunks = torch.chunk(whole, self.size)
        return chunks[self.rank].clone() if self.rank < len(chunks) else whole[:0].clone()

    def keep(self, layer: nn.Module) -> None:
        """Keeps only this rank's shards of a whole layer without adapters.

        Raises:
            FtcliError: FT331 for a quantized layer whose state is not what it should be.
        """
        for module in layer.modules():
            if isinstance(module, QuantizedLinear):
                module.check_state()
        if self.joins:  # random weights are made to be trained, and adapters freeze them later
            layer.requires_grad_(False)
        prepare(layer, joins=self.joins, mixture=self.mixture)
        for module in layer.modules():
            for name, whole in list(module._parameters.items()):
                if whole is None or isinstance(whole, QuantizedStack):
                    continue
                if whole.dim() < 2 and not isinstance(module, QuantizedLinear | StackParts):
                    continue  # norms and biases take no room
                # Of the full shape on its device, and of one element: a parameter on `meta` would take adapters there.
                stand_in = nn.Parameter(whole.detach().new_empty(1).expand(whole.shape), whole.requires_grad)
                self.kept[stand_in] = self.of(whole.detach())
                module._parameters[name] = stand_in


def prepare(layer: nn.Module, *, joins: bool, mixture: bool = False) -> None:
    """Puts all large tensors of a whole layer into parameters, and joins those that read the same input."""
    if joins:
        join_shared(layer, mixture=mixture)
    for module in layer.modules():
        if isinstance(module, QuantizedLinear):
            module.as_parameters()
    part_stacks(layer)


def keep_shards(base: PreTrainedModel, shards: RankShards) -> None:
    """Keeps only this rank's shard of all layers but the first ones, and notes ``shards`` on the model."""
    for layer in list(decoder_layers(base))[UNSHARDED_LAYERS:]:
        if not has_shards_only(layer):
            shards.keep(layer)
    object.__setattr__(base, _ATTRIBUTE, shards)


def rank_shards_of(base: PreTrainedModel) -> RankShards | None:
    """The shards that :func:`keep_shards` has noted on the model."""
    found: RankShards | None = vars(base).get(_ATTRIBUTE)
    return found


def has_shards_only(layer: nn.Module) -> bool:
    """True if the layer holds shards in place of whole weights."""
    return any(p.numel() > 1 and not any(p.stride()) for p in layer.parameters())


@contextmanager
def unsharded_layers(model: PreTrainedModel | PeftModel) -> Iterator[None]:
    """A block in which the model has only its whole layers; the others come back at its end."""
    base = base_of(model)
    layers = decoder_layers(base)
    count = next((index for index, layer in enumerate(layers) if has_shards_only(layer)), len(layers))
    if count == len(layers):
        yield
        return
    config, others = base.config.get_text_config(), list(layers)[count:]
    before: Any = config.num_hidden_layers
    del layers[count:]
    config.num_hidden_layers = count
    inputs = _first_inputs(base, count, before)
    try:
        yield
    finally:
        config.num_hidden_layers = before
        for module, weight in inputs:
            module.weight = weight
        decoder = next(m for m in base.get_decoder().modules() if isinstance(m, nn.ModuleList) and len(m) == count)
        decoder.extend(others)


def _first_inputs(base: PreTrainedModel, count: int, layers: int) -> list[tuple[Any, nn.Parameter]]:
    """Leaves the model the own inputs of its first ``count`` layers: both weights, which have a part for each of
    ``layers``, as they were.
    """
    found: list[tuple[Any, nn.Parameter]] = []
    for name, dim in ((LAYER_INPUT.table, 1), (LAYER_INPUT.from_hidden[0], 0)):
        module: Any = getattr(base.get_decoder(), name, None)
        if module is not None:
            whole = module.weight
            first = whole.detach().narrow(dim, 0, whole.shape[dim] // layers * count)
            module.weight = nn.Parameter(first, whole.requires_grad)
            found.append((module, whole))
    return found


T = TypeVar("T")


class ShardedRoot(nn.Module):
    """The FSDP root of a model: its forward runs a computation from token ids to loss.

    So the head's weights are all-gathered where the loss reads them.

    Attributes:
        running: Whether a call is under way.
    """

    def __init__(self, model: PreTrainedModel | PeftModel) -> None:
        super().__init__()
        self.model = model
        self.running = False

    def forward(self, compute: Callable[[], T]) -> T:
        """Calls ``compute``; torch looks for tensors in tuples, lists and dicts of its result."""
        self.running = True
        try:
            return compute()
        finally:
            self.running = False


def shard(model: PreTrainedModel | PeftModel, mesh: DeviceMesh, shards: RankShards, plan: DtypePlan) -> None:
    """Shards ``model``, which is on the kernels and the same on all ranks, in place.

    Args:
        mesh: The ranks; in two dimensions (replicate, shard) each row has a replica of the weights, and gradients are
            reduced over all ranks.
        shards: Shards that this rank has kept of layers that are not whole any more.
        plan: Trained weights are all-gathered in its compute dtype, and their gradients reduced in float32. So are
            those of a model in which nothing is trained, such as a reference, unless some are quantized.

    Raises:
        FtcliError: FT713 (exit 1) when the all-gathered weights are not those that were sharded.
    """
    base = base_of(model)
    adapted = hasattr(model, "peft_config")
    bytes_in_it = any(isinstance(module, QuantizedLinear) for module in model.modules())  # which no cast would keep
    as_stored = adapted or bytes_in_it or not plan.autocast
    dtypes = {} if as_stored else {"param_dtype": getattr(torch, plan.compute)}
    policy = MixedPrecisionPolicy(**dtypes, reduce_dtype=torch.float32, cast_forward_inputs=False)
    trained = {p for p in model.parameters() if p.requires_grad} if adapted else set()
    layers: list[Any] = list(decoder_layers(base))
    first: dict[str, Tensor] = {}
    for index, layer in enumerate(layers):
        if not has_shards_only(layer):
            prepare(layer, joins=shards.joins, mixture=shards.mixture)
        hide_stacks(layer)
        if not index:
            first = {n: p.detach().clone() for n, p in layer.named_parameters() if p not in trained}
        kept = _on_meta(layer, shards)
        fully_shard(layer, mesh=mesh, mp_policy=policy, ignored_params=trained)
        _load(layer, kept, mesh)
    root: Any = ShardedRoot(model)
    # A backward pass needs embedding and head again, and no other pass does.
    again = None if any(p.requires_grad for p in model.parameters()) else True
    fully_shard(root, mesh=mesh, mp_policy=policy, ignored_params=trained, reshard_after_forward=again)
    set_root(base, root)
    for unit in [root, *layers]:
        # The loss is divided by the tokens of all ranks: gradients are summed, not averaged.
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)
    _require_same(layers[0], first, policy)


def _on_meta(layer: nn.Module, shards: RankShards) -> dict[str, tuple[torch.Size, Tensor]]:
    """Replaces sharded parameters by meta tensors of the full shape; returns {name: (shape, local shard)}."""
    found = {}
    for prefix, module in layer.named_modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None and (rows := shards.kept.pop(parameter, None)) is not None:
                hollow = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
                module._parameters[name] = nn.Parameter(hollow, parameter.requires_grad)
                found[f"{prefix}.{name}"] = parameter.shape, rows
    return found


def _load(layer: nn.Module, kept: Mapping[str, tuple[torch.Size, Tensor]], mesh: DeviceMesh) -> None:
    """Gives a layer that was sharded on ``meta`` its shards."""
    state = {
        name: as_dtensor(rows, mesh, shape, torch.empty(shape, device="meta").stride())
        for name, (shape, rows) in kept.items()
    }
    layer.load_state_dict(state, strict=False, assign=True)


def _require_same(layer: Any, whole: Mapping[str, Tensor], policy: MixedPrecisionPolicy) -> None:
    """Compares the all-gathered weights of a layer with the originals, bit for bit. All ranks call this."""
    layer.unshard()
    found = dict(layer.named_parameters())
    for name, before in whole.items():
        wanted = before if policy.param_dtype is None else before.to(policy.param_dtype)
        if not torch.equal(_bytes(found[name].detach()), _bytes(wanted)):
            raise FtcliError.single(
                "FT713",
                f"{name} of the first layer changed when it was all-gathered from its shards",
                exit_code=ExitCode.BUG,
                help=f"train with launch.engine: {engines.by_auto(shards=False)} if the model fits each GPU, and "
                "report this with the run's manifest.json",
            )
    layer.reshard()


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)
