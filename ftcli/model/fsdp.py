"""A model whose weights are spread over the ranks of a run, by torch's ``fully_shard`` (FSDP2).

Each decoder layer is a unit of its own: all ranks put together its weights right before it computes, and let them go
after. What is left, embedding, last norm and head, is the root's. Inside a unit's forward its weights are plain
tensors, so kernels and layers know nothing of it.

Frozen weights alone are spread where there are adapters: those are small, every rank has all of them, and their
gradients are added up as under ``ddp``. So whatever deals with what is trained finds it as it always is.

Quantised weights lie in parameters then, since torch spreads no buffers. Frozen weights that read the same input are
one parameter (:mod:`ftcli.model.joint`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from ftcli.errors import ExitCode, FtcliError
from ftcli.facts.precision import DtypePlan
from ftcli.model.backbone import base_of, decoder_layers, set_root
from ftcli.model.parts import RankWeights, is_part, ready
from ftcli.model.shards import as_spread
from ftcli.tables import engines

if TYPE_CHECKING:
    from peft import PeftModel
    from torch.distributed.device_mesh import DeviceMesh
    from transformers import PreTrainedModel

T = TypeVar("T")


class ShardedRoot(nn.Module):
    """What is called in place of a model whose weights are spread, with what is to be computed of it, from token ids to
    loss: so the head's weights are whole where the loss reads them.

    Attributes:
        running: Whether a call is under way.
    """

    def __init__(self, model: PreTrainedModel | PeftModel) -> None:
        super().__init__()
        self.model = model
        self.running = False

    def forward(self, compute: Callable[[], T]) -> T:
        """What ``compute`` makes; torch looks for tensors in tuples, lists and dicts of it."""
        self.running = True
        try:
            return compute()
        finally:
            self.running = False


def shard(model: PreTrainedModel | PeftModel, mesh: DeviceMesh, parts: RankWeights, plan: DtypePlan) -> None:
    """Spreads ``model``, which is on the kernels and the same on all ranks, in place.

    Args:
        mesh: The ranks; in two dimensions (copies, ranks that share one) each row has a copy of the weights, and
            gradients are added up over all.
        parts: What this rank has kept of layers that are not whole any more.
        plan: Weights that are trained are put together in its compute dtype, and their gradients added up in float32.

    Raises:
        FtcliError: FT713 (exit 1) when what the ranks put together is not what they have taken apart.
    """
    base = base_of(model)
    adapted = hasattr(model, "peft_config")
    dtypes = {} if adapted or not plan.autocast else {"param_dtype": getattr(torch, plan.compute)}
    policy = MixedPrecisionPolicy(**dtypes, reduce_dtype=torch.float32, cast_forward_inputs=False)
    trained = {p for p in model.parameters() if p.requires_grad} if adapted else set()
    layers: list[Any] = list(decoder_layers(base))
    first: dict[str, Tensor] = {}
    for index, layer in enumerate(layers):
        if not is_part(layer):
            ready(layer, joins=parts.joins)
        if not index:
            first = {n: p.detach().clone() for n, p in layer.named_parameters() if p not in trained}
        kept = _on_meta(layer, parts)
        fully_shard(layer, mesh=mesh, mp_policy=policy, ignored_params=trained)
        _load(layer, kept, mesh)
    root: Any = ShardedRoot(model)
    fully_shard(root, mesh=mesh, mp_policy=policy, ignored_params=trained)
    set_root(base, root)
    for unit in [root, *layers]:
        # The loss is divided by the tokens of all ranks: gradients are added up, not averaged.
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)
    _require_same(layers[0], first, policy)


def _on_meta(layer: nn.Module, parts: RankWeights) -> dict[str, tuple[torch.Size, Tensor]]:
    """Puts parameters on ``meta`` that stand for a whole of which this rank has kept its rows; what those are."""
    found = {}
    for prefix, module in layer.named_modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None and (rows := parts.kept.pop(parameter, None)) is not None:
                hollow = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
                module._parameters[name] = nn.Parameter(hollow, parameter.requires_grad)
                found[f"{prefix}.{name}"] = parameter.shape, rows
    return found


def _load(layer: nn.Module, kept: Mapping[str, tuple[torch.Size, Tensor]], mesh: DeviceMesh) -> None:
    """Gives a layer that was spread on ``meta`` its rows."""
    state = {name: as_spread(rows, mesh, shape, _strides(shape)) for name, (shape, rows) in kept.items()}
    layer.load_state_dict(state, strict=False, assign=True)


def _strides(shape: torch.Size) -> tuple[int, ...]:
    return torch.empty(shape, device="meta").stride()


def _require_same(layer: Any, whole: Mapping[str, Tensor], policy: MixedPrecisionPolicy) -> None:
    """Holds what the ranks put together of a layer against what it was, bit for bit. All ranks call this."""
    layer.unshard()
    found = dict(layer.named_parameters())
    for name, before in whole.items():
        wanted = before if policy.param_dtype is None else before.to(policy.param_dtype)
        if not torch.equal(_bytes(found[name].detach()), _bytes(wanted)):
            raise FtcliError.single(
                "FT713",
                f"{name} of the first layer has changed after the ranks put it together from their parts",
                exit_code=ExitCode.BUG,
                help=f"train with launch.engine: {engines.by_auto(spreads=False)} if the model fits each GPU, and "
                "report this with the run's manifest.json",
            )
    layer.reshard()


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)
