"""The start-up self-check: one small batch through the patched and the unpatched model.

The loss of the whole model is compared, and every layer by itself: the original and the fused layer get the same
input and the same output gradient, so rounding does not pile up over the depth and a fault is named where it is.

Weights that are trained whole have gradients as large as themselves, so only those of a few layers are held at a time.

Adapters start with B = 0, where the gradient of A vanishes and half of the backward would go unchecked; for the check
B holds small random numbers and is put back afterwards, bit for bit.

:func:`check_head` compares the logits that the loss implies with the model's own. The loss never calls the model's
``forward``: it multiplies the backbone's hidden states by the head itself. A family whose head does something else, by
a setting that ftcli does not know, would train on other logits than it answers with.
"""

from __future__ import annotations

import os
import traceback
from collections import UserDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from triton.errors import TritonError

from ftcli.config.model import Kernels
from ftcli.errors import ExitCode, FtcliError, first_line
from ftcli.labels import IGNORE_INDEX
from ftcli.model.backbone import base_of, compute_context, decoder_layers, head_of, hidden_states, rotation_kept
from ftcli.model.loss import forward_loss
from ftcli.model.patch import Patch, patch
from ftcli.model.pretrained import IMPOSSIBLE, hollow, impossible, without_memory
from ftcli.model.quantized import QuantizedLinear, Tolerance
from ftcli.model.routing import same_routing
from ftcli.plain import JsonObject, plain_fields
from ftcli.plan.precision import DtypePlan

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

Model: TypeAlias = "PreTrainedModel | PeftModel"

ROWS, TOKENS = 2, 64
#: Bytes of gradients that are held at a time, one layer's at least.
_HELD_BYTES = 2**31
_B_STD = 0.02


#: In half precision both sides round differently; a missing or wrong term shows as tens of percent.
TOLERANCES: Mapping[str, Tolerance] = {
    "float32": Tolerance(1e-5, 1e-5, 1e-4),
    "bfloat16": Tolerance(1e-2, 3e-2, 8e-2),
    "float16": Tolerance(2e-3, 4e-3, 2e-2),
}
#: No rounding excuses more than this.
_MOST_ROUNDED = Tolerance(0.0, 0.1, 0.25)


@dataclass(frozen=True, slots=True)
class LayerCheck:
    """Relative differences (Frobenius norm) of one layer; ``worst`` names the gradient that differs most."""

    layer: str
    output: float
    gradient: float
    worst: str

    def within(self, tolerance: Tolerance) -> bool:
        """True if it passes; NaN does not."""
        return self.output <= tolerance.output and self.gradient <= tolerance.gradient


@dataclass(frozen=True, slots=True)
class SelfCheck:
    """Result of the comparison. ``worst`` is the layer with the largest gradient difference."""

    rows: int
    tokens: int
    loss_patched: float
    loss_unpatched: float
    loss_difference: float
    worst: LayerCheck
    tolerance: Tolerance

    @property
    def passed(self) -> bool:
        return self.loss_difference <= self.tolerance.loss and self.worst.within(self.tolerance)

    def as_dict(self) -> JsonObject:
        return {"passed": self.passed, **plain_fields(self)}


def self_check(
    model: Model, applied: Patch, kernels: Kernels, batch: Mapping[str, Tensor], plan: DtypePlan
) -> tuple[SelfCheck, Patch]:
    """Compares on at most two rows of 64 tokens; the model leaves as it came, patched.

    Args:
        applied: The patch in force. It is undone for the comparison and made anew.
        batch: ``input_ids`` and ``labels`` of shape (rows, seq_len), on the model's device.

    Returns:
        The result and the patch that is in force now.

    Raises:
        FtcliError: FT704 (exit 1) when loss, output or a gradient differs by more than the tolerance, naming the layer;
            and when Triton cannot build a kernel for this GPU; with exit 3 where transformers' own layer fails.
    """
    small = {name: value[:ROWS, :TOKENS] for name, value in batch.items() if name in ("input_ids", "labels")}
    training = model.training
    applied.undo()  # before the mode changes: what stands in for a layer does not hand it on to that layer
    model.eval()  # no dropout: both sides must see the same numbers
    tolerance = _tolerance(model, plan)
    with (
        rotation_kept(model),
        _random_adapters(model),
        same_routing(model),
        compute_context(small["input_ids"].device, plan.compute, plan.autocast),
    ):
        unpatched_loss, calls = _forward(model, small)
        applied = patch(model, kernels)
        checks: list[LayerCheck] = []
        try:
            patched_loss, own = _forward(model, small)
            for some in _few_at_a_time(_layers(model)):
                # First: routers learn in it which tokens go elsewhere, whose weights get no gradient in the other pass.
                found = {index: _layer_pass(_layers(model)[index], calls[index], own[index]) for index in some}
                applied.undo()
                for index in some:
                    wanted = _unpatched_pass(_layers(model)[index], calls[index])
                    checks.append(_compare(f"layers.{index}", found[index], wanted))
                applied = patch(model, kernels)
            worst = _worst(checks, tolerance)
            if not worst.within(tolerance):
                applied.undo()
                index = checks.index(worst)
                tolerance = _of_rounding(_layers(model)[index], calls[index], tolerance)
                applied = patch(model, kernels)
        except TritonError as error:
            raise _refused(error) from error
    model.train(training)
    model.zero_grad(set_to_none=True)
    check = SelfCheck(
        rows=small["input_ids"].shape[0],
        tokens=small["input_ids"].numel(),
        loss_patched=patched_loss,
        loss_unpatched=unpatched_loss,
        loss_difference=abs(patched_loss - unpatched_loss) / max(abs(unpatched_loss), 1e-12),
        worst=_worst(checks, tolerance),
        tolerance=tolerance,
    )
    if not check.passed:
        raise _failed(check)
    return check, applied


def _few_at_a_time(layers: Sequence[nn.Module]) -> Iterator[range]:
    """All layers in order, as many at a time as their gradients may be held of."""
    most = max(sum(4 * p.numel() for p in layer.parameters() if p.requires_grad) for layer in layers)
    each = max(1, _HELD_BYTES // max(most, 1))
    for start in range(0, len(layers), each):
        yield range(start, min(start + each, len(layers)))


def _tolerance(model: Model, plan: DtypePlan) -> Tolerance:
    """The tolerance of the compute dtype, or of quantized layers whose products are coarser."""
    own = (module.tolerance for module in model.modules() if isinstance(module, QuantizedLinear))
    return next((tolerance for tolerance in own if tolerance is not None), TOLERANCES[plan.compute])


#: How much more than an input that is off by a last place the roundings of both sides may make of a gradient, and how
#: many such inputs are tried: a wrong term makes a hundred times more.
_MORE, _DRAWS = 4, 2


def _of_rounding(layer: nn.Module, call: _Call, tolerance: Tolerance) -> Tolerance:
    """The tolerance, or some times what the layer as transformers built it makes of inputs that are off by a last place
    of their dtype, where that is more: gradients that nearly cancel, and routers whose scores are nearly equal, enlarge
    it.
    """
    wanted, chance = _layer_pass(layer, call, call), torch.Generator().manual_seed(0)
    found = []
    for _ in range(_DRAWS):
        shaken = _shaken(call.hidden, call.hidden.dtype, chance)
        found.append(_compare("", _layer_pass(layer, replace(call, hidden=shaken), call), wanted))
    output, gradient = max(each.output for each in found), max(each.gradient for each in found)
    return Tolerance(
        tolerance.loss,
        max(tolerance.output, min(_MORE * output, _MOST_ROUNDED.output)),
        max(tolerance.gradient, min(_MORE * gradient, _MOST_ROUNDED.gradient)),
    )


def _failed(check: SelfCheck) -> FtcliError:
    worst = check.worst
    return FtcliError.single(
        "FT704",
        f"self-check failed: patched loss {check.loss_patched:.6g}, unpatched {check.loss_unpatched:.6g}; in "
        f"{worst.layer} the output differs by {worst.output:.2g}, "
        f"the gradient of {worst.worst} by {worst.gradient:.2g}",
        exit_code=ExitCode.BUG,
        help="train with model.kernels: off, and report this with the run's manifest.json",
    )


def _refused(error: TritonError) -> FtcliError:
    return FtcliError.single(
        "FT704",
        f"a kernel cannot be built for this GPU: {str(error).strip().splitlines()[-1]}",
        exit_code=ExitCode.BUG,
        help="train with model.kernels: off, and report this with the run's manifest.json",
    )


def _unpatched_pass(layer: nn.Module, call: _Call) -> _Pass:
    """transformers takes a package for some layers where it is installed, which may refuse this GPU or Triton."""
    try:
        return _layer_pass(layer, call, call)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise FtcliError.single(
            "FT704",
            f"transformers' own layer fails here, so that there is nothing to compare with: {first_line(error)}",
            exit_code=ExitCode.PREFLIGHT,
            help="if a package says so that transformers takes where it is installed (flash-linear-attention refuses "
            "Triton 3.4 to 3.7.0 on Hopper), uninstall it, which ftcli's kernels do not need, or do as it says",
        ) from error


@dataclass(frozen=True, slots=True)
class _Call:
    """The model's call of a layer: its input, what else is given by place (an input of its own), and the keyword
    arguments (rotation, mask).
    """

    hidden: Tensor
    kwargs: dict[str, Any]
    others: tuple[Any, ...] = ()

    def without_graph(self) -> dict[str, Any]:
        """Keys and values that layers share, as an argument of one layer's pass alone; empty where they share none."""
        shared = self.kwargs.get(_SHARED)
        if shared is None:
            return {}
        return {_SHARED: UserDict({kind: tuple(x.detach() for x in pair) for kind, pair in shared.items()})}


#: transformers' name of the argument through which layers share keys and values.
_SHARED = "shared_kv_states"


@dataclass(frozen=True, slots=True)
class _Pass:
    """One layer's output and gradients by name; ``input`` is the gradient of its input."""

    output: Tensor
    gradients: dict[str, Tensor]


def _layers(model: Model) -> Sequence[nn.Module]:
    return list(decoder_layers(base_of(model)))


@torch.no_grad()
def _forward(model: Model, batch: dict[str, Tensor]) -> tuple[float, list[_Call]]:
    calls: list[_Call] = []

    def record(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.append(_Call(args[0], dict(kwargs), args[1:]))

    with ExitStack() as stack:
        for layer in _layers(model):
            handle = layer.register_forward_pre_hook(record, with_kwargs=True)
            stack.callback(handle.remove)
        items = (batch["labels"][:, 1:] != IGNORE_INDEX).sum().clamp(min=1)
        loss = forward_loss(model, batch, num_items=items).loss
    return float(loss), calls


def _layer_pass(layer: nn.Module, shared: _Call, own: _Call) -> _Pass:
    """Runs ``layer`` on ``shared``'s inputs with ``own``'s other arguments (each attention has a mask of its own)."""
    hidden = shared.hidden.detach().clone().requires_grad_()
    layer.zero_grad(set_to_none=True)
    output = layer(hidden, *shared.others, **{**own.kwargs, **shared.without_graph()})
    generator = torch.Generator().manual_seed(1)
    upstream = torch.randn(output.shape, generator=generator).to(output)
    output.backward(upstream)
    gradients = {n: p.grad.detach().float() for n, p in layer.named_parameters() if p.grad is not None}
    if hidden.grad is not None:
        gradients["input"] = hidden.grad.float()
    layer.zero_grad(set_to_none=True)
    return _Pass(output.detach().float(), gradients)


#: Share of the largest gradient of a layer's weights, below which a gradient is not judged by its own size: where decay
#: has forgotten all, that of a delta net's `in_proj_a` is 1e-5 of the others, and rounding in float32 makes 7% of it.
_LEAST_SHARE = 1e-4


def _compare(name: str, found: _Pass, wanted: _Pass) -> LayerCheck:
    sizes = (float(value.norm()) for key, value in wanted.gradients.items() if key != "input")
    least = _LEAST_SHARE * max(sizes, default=0.0)
    differences = {
        key: relative_difference(found.gradients[key], value, least) if key in found.gradients else float("inf")
        for key, value in wanted.gradients.items()
    }
    worst = max(differences, key=lambda key: _rank(differences[key]), default="")
    return LayerCheck(name, relative_difference(found.output, wanted.output), differences.get(worst, 0.0), worst)


def relative_difference(found: Tensor, wanted: Tensor, least: float = 0.0) -> float:
    """The norm of the difference over that of ``wanted``, or over ``least`` if that is more. Of one shape."""
    return float((found - wanted).norm() / wanted.norm().clamp(min=max(least, 1e-12)))


def _shaken(states: Tensor, dtype: torch.dtype, chance: torch.Generator) -> Tensor:
    """Each number off by a last place of ``dtype``."""
    signs = torch.randint(2, states.shape, generator=chance).mul_(2).sub_(1).to(states.device)
    return (states.float() * (1.0 + torch.finfo(dtype).eps * signs)).to(states.dtype)


@contextmanager
def rounded_otherwise(model: Model, dtype: torch.dtype) -> Iterator[None]:
    """A block in which each number of the embeddings is off by a last place of ``dtype``, up or down by chance."""
    chance = torch.Generator().manual_seed(0)
    embedding = base_of(model).get_input_embeddings()
    hook = embedding.register_forward_hook(lambda _module, _inputs, states: _shaken(states, dtype, chance))
    try:
        yield
    finally:
        hook.remove()


def _rank(value: float) -> float:
    """NaN counts as the largest."""
    return value if value == value else float("inf")


def _worst(checks: Sequence[LayerCheck], tolerance: Tolerance) -> LayerCheck:
    return max(checks, key=lambda c: max(_rank(c.output) / tolerance.output, _rank(c.gradient) / tolerance.gradient))


@contextmanager
def _random_adapters(model: Model) -> Iterator[None]:
    generator = torch.Generator().manual_seed(0)
    kept = {n: p.detach().clone() for n, p in model.named_parameters() if ".lora_B." in n and p.requires_grad}
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name in kept:
            noise = torch.randn(parameters[name].shape, generator=generator) * _B_STD
            parameters[name].copy_(noise)
    try:
        yield
    finally:
        with torch.no_grad():
            for name, value in kept.items():
                parameters[name].copy_(value)


_CODE_OF_MODELS = os.path.join("transformers", "models", "")  # noqa: PTH118 - with its separator
#: Tokens that are looked at.
_HEAD_TOKENS = 32
#: Largest relative difference (Frobenius norm) by compute dtype: one product, rounded in another place. A scale or a
#: cap that is missing shows as percents.
_ALLOWED: Mapping[str, float] = {"float32": 1e-4, "bfloat16": 2e-2, "float16": 4e-3}


@torch.no_grad()
def check_head(model: PreTrainedModel, input_ids: Sequence[int], plan: DtypePlan, device: torch.device) -> float:
    """The relative difference between both kinds of logits on one row; the model leaves as it came.

    Args:
        input_ids: Ordinary text: no ids that stand for images.

    Raises:
        FtcliError: FT335 (exit 3) when they differ, or when the head is of a kind that the loss cannot read; FT305
            (exit 3) when the config's values make layers that do not fit each other.
    """
    ids = torch.tensor([list(input_ids)[:_HEAD_TOKENS]], device=device)
    training = model.training
    model.eval()
    with rotation_kept(model), compute_context(device, plan.compute, plan.autocast):
        try:
            wanted = model(input_ids=ids, use_cache=False).logits.float()
        except IMPOSSIBLE as error:
            if not _fails_alike(model, ids, error):
                raise
            raise impossible(error) from error
        try:
            found = _logits(model, ids)
        except TypeError as error:
            raise _head_differs(model, str(error)) from error
    if training:
        model.train()
    if not bool(torch.isfinite(wanted).all()):
        return 0.0  # a broken model is not a matter of its head: training and evaluation name it
    difference = relative_difference(found, wanted)
    if not difference <= _ALLOWED[plan.compute]:  # NaN fails, too
        said = f"its own logits and those of the loss differ by {difference:.2g} (relative, on one row)"
        raise _head_differs(model, said)
    return difference


def _fails_alike(model: PreTrainedModel, ids: Tensor, error: Exception) -> bool:
    """True if transformers' own model of the same config fails with the same words, or by the same line of its code,
    where it has no memory: no device, dtype or quantization plays a part there.
    """
    outline = hollow(model.config, attn_implementation=model.config._attn_implementation).eval()
    try:
        with FakeTensorMode():
            without_memory(outline)
            outline(input_ids=torch.zeros(ids.shape, dtype=torch.long), use_cache=False)
    except IMPOSSIBLE as again:
        place = _line_of_model(error)
        return str(again) == str(error) or (place is not None and place == _line_of_model(again))
    return False


def _line_of_model(error: Exception) -> tuple[str, int] | None:
    """The innermost line of transformers' code of a model that an error came through."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = ((one.filename, one.lineno or 0) for one in reversed(frames) if _CODE_OF_MODELS in one.filename)
    return next(lines, None)


def _logits(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """(1, S, vocab_size) float32, as :func:`ftcli.model.loss.next_token_loss` understands the head."""
    head = head_of(model)
    hidden = hidden_states(model, {"input_ids": ids}).tensor
    if hidden.shape[-1] != head.weight.shape[1]:
        raise TypeError(f"hidden states of width {hidden.shape[-1]} do not fit a head of width {head.weight.shape[1]}")
    bias = None if head.bias is None else head.bias.to(hidden.dtype)
    logits = torch.nn.functional.linear(hidden, head.weight.to(hidden.dtype), bias).float() * head.logit_scale
    return torch.tanh(logits / head.softcap) * head.softcap if head.softcap else logits


def _head_differs(model: PreTrainedModel, said: str) -> FtcliError:
    return FtcliError.single(
        "FT335",
        f"ftcli would compute the loss of a {type(model).__name__} with this config.json wrongly: {said}",
        help="choose another model, and report this with the model's name: a value in its config.json is unknown here",
    )
