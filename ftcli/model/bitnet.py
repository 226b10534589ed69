"""Linear layers of BitNet b1.58: trained from float32 masters, or frozen as ternary values. ``ftkernels.bitlinear`` has
the formulas and where they come from.

In training the quantized values may be mixed with the exact ones (``share``, the lambda of a conversion). Evaluation
and generation always have the quantized ones, which is what a saved model has.

Files hold such layers packed, with norms of their own, or as ternary values in full precision.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from ftkernels.bitlinear import Int8Rows, bit_linear, mixed_linear, norm_quantize, quantize_int8, round_weight
from ftkernels.device import choose_backend
from ftkernels.glu import glu
from ftkernels.limits import Activation
from ftkernels.rms_norm import rms_norm_reference
from ftkernels.ternary import SMALLEST, Ternary, remaster, ternarise, unpack_ternary
from torch import Tensor, nn

from ftcli.config.model import QuantizationConfig
from ftcli.facts.layers import SHARED_INPUTS
from ftcli.facts.model import activation_of
from ftcli.model.backbone import decoder_layers
from ftcli.model.fused import norm_eps
from ftcli.model.quantized import QuantizedLinear, TrainedQuantizedLinear, unreadable_weights
from ftcli.plain import JsonMap, JsonObject
from ftcli.plan.execution import ACTIVATIONS
from ftcli.tables.architecture import Family
from ftcli.tables.families import family_of

if TYPE_CHECKING:
    from ftkernels.device import BackendName
    from transformers import PreTrainedModel

_METHOD = "bitnet"
_GATED = ("gate_proj", "up_proj", "down_proj")
_UNITS: Mapping[str, Activation] = MappingProxyType({**ACTIVATIONS, "relu2": "relu2"})
#: transformers' own, where its config names none.
INPUT_NORM_EPS = 1e-6


class InputNorm(nn.Module):
    """The RMSNorm of one linear layer's input (``use_rms_norm`` of transformers): its ``rms_norm``.

    "An Extra RMSNorm is All You Need for Fine Tuning to 1.58 Bits" (arXiv 2505.08823).
    """

    def __init__(self, weight: Tensor, eps: float, *, trained: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.detach().float(), requires_grad=trained)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """(..., I) -> (..., I)."""
        return rms_norm_reference(x, self.weight, self.eps)


class BitLinear(TrainedQuantizedLinear):
    """A trained linear layer (O, I): float32 masters in ``weight``, ternarised once for each of their values.

    Attributes:
        share: How far training goes from exact to quantized values, 0 to 1.
        rms_norm: The norm of its own input, where it has one.
    """

    method = _METHOD

    def __init__(self, weight: Tensor, bias: nn.Parameter | None, name: str) -> None:
        nn.Module.__init__(self)  # not nn.Linear's, which would draw a weight
        self.out_features, self.in_features = weight.shape
        self.layer_name = name
        self.share = 1.0
        self.backend: BackendName = "auto"
        self.weight = nn.Parameter(weight.detach().float())
        self.register_parameter("bias", bias)
        self.rms_norm: InputNorm | None = None
        self._ternary: Ternary | None = None
        self._made_of: tuple[int, int] | None = None
        self._notified = False

    @property
    def ternary(self) -> Ternary:
        """The masters rounded to ternary values.

        Torch does not count what kernels of optimizers write (its own fused ones, and those of others): its count of
        writes alone would leave the model as it was before training. So weights that are trained are rounded every
        time, unless :meth:`written` has been called, as it then is after each writing.
        """
        now = (self.weight._version, self.weight.data_ptr())
        kept = self._notified or not self.weight.requires_grad
        if self._ternary is None or self._made_of != now or not kept:
            self._ternary, self._made_of = round_weight(self.weight, backend=self.backend), now
        return self._ternary

    def written(self) -> None:
        """Marks the masters as changed; from the first call on every change has to be marked."""
        self._ternary, self._notified = None, True

    def train(self, mode: bool = True) -> BitLinear:
        """nn.Module.train; drops the cached ternary weights when the mode changes: evaluation may use other weights."""
        if mode != self.training:  # trainers say it before every micro-batch
            self._ternary = None
        super().train(mode)
        return self

    def forward(self, x: Tensor | Int8Rows) -> Tensor:
        """(..., I) -> (..., O), in autocast's dtype or x's."""
        if not isinstance(x, Int8Rows):
            if self.mixes:
                x = x if self.rms_norm is None else self.rms_norm(x)
                return mixed_linear(x, self.weight, self.ternary, self.bias, self.share)
            x = _rows(x, self.rms_norm, self.backend)
        return bit_linear(x, self.weight, self.ternary, self.bias, backend=self.backend)

    @property
    def mixes(self) -> bool:
        """True if its values are partly exact."""
        return self.training and self.share < 1.0

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}, {self.method}"


@dataclass(frozen=True, slots=True)
class _Between:
    """A norm and the layers that read it. No module: all of them have their names elsewhere in the model."""

    norm: Any
    readers: tuple[BitLinear, ...]
    fuses: bool


class RoundingNorm(nn.Module):
    """An RMSNorm that hands its output to linear layers in int8, which they share.

    It stands where the norm stood and has its weight, under the same name. Where the norm is of the llama form and the
    kernels run, its output is rounded before it is ever written.
    """

    def __init__(self, norm: Any, readers: Sequence[BitLinear], *, fuses: bool) -> None:
        super().__init__()
        self.weight: nn.Parameter = norm.weight
        self._between = _Between(norm, tuple(readers), fuses)
        self.train(norm.training)

    def forward(self, x: Tensor) -> Tensor | Int8Rows:
        """(..., H) -> (..., H); a tensor while the layers that read it mix exact values in."""
        norm, first = self._between.norm, self._between.readers[0]
        if first.mixes:
            normed: Tensor = norm(x)
            return normed
        if self._between.fuses:
            return norm_quantize(x, self.weight, norm_eps(norm), backend=first.backend)
        return quantize_int8(norm(x), backend=first.backend)


class RoundedMlp(nn.Module):
    """A gated MLP whose unit is one kernel where the kernels run, and transformers' own elsewhere and in a warm-up.

    Autocast on a GPU takes squares in float32, which would keep two tensors of that for BitNet's squared ReLU. It has
    the layers of the module that it stands for, under the same names.
    """

    def __init__(self, mlp: nn.Module, activation: Activation) -> None:
        super().__init__()
        for name, child in mlp.named_children():
            self.add_module(name, child)
        self._activation: Activation = activation
        self.train(mlp.training)

    def forward(self, x: Tensor | Int8Rows) -> Tensor:
        """(..., H) -> (..., H)."""
        layers: Any = self
        gate, up = layers.gate_proj(x), layers.up_proj(x)
        first: BitLinear = layers.gate_proj
        if first.mixes or not choose_backend(gate.device, first.backend).is_triton:
            hidden = layers.act_fn(gate) * up
        else:
            hidden = glu(gate, up, self._activation, backend=first.backend)
        if "ffn_sub_norm" in self._modules:
            hidden = layers.ffn_sub_norm(hidden)
        out: Tensor = layers.down_proj(hidden)
        return out


class TernaryLinear(QuantizedLinear):
    """A frozen linear layer of ternary values, a byte each, which adapters are trained on. The gradient flows to x."""

    method = _METHOD
    rounds_input = True

    def __init__(self, weight: Ternary, bias: Tensor | None, name: str) -> None:
        super().__init__(int(weight.shape[1]), int(weight.shape[0]), bias, name)
        self.register_buffer("ternary", weight.data)
        self.register_buffer("scale", weight.scale)
        self.rms_norm: InputNorm | None = None

    def frozen_weight(self) -> Ternary:
        """See :meth:`ftcli.model.quantized.QuantizedLinear.frozen_weight`; nothing is copied."""
        data, scale = self._buffers.get("ternary"), self._buffers.get("scale")
        if data is None or scale is None:
            raise self.state_lost("ternary values or scale gone")
        try:
            weight = Ternary(data, scale)
        except ValueError as error:
            raise self.state_lost(str(error)) from error
        if weight.shape != (self.out_features, self.in_features):
            raise self.state_lost(f"its values have shape {tuple(weight.shape)}")
        return weight

    def check_state(self) -> None:
        """See :meth:`ftcli.model.quantized.QuantizedLinear.check_state`: three values, and a finite scale."""
        weight = self.frozen_weight()
        if weight.data.numel() and int(weight.data.abs().max()) > 1:
            raise self.state_lost("its values are not -1, 0 and 1, so their memory was never written")
        if not bool(torch.isfinite(weight.scale)):
            raise self.state_lost("its scale is not finite")

    def forward(self, x: Tensor) -> Tensor:
        """(..., I) -> (..., O), in autocast's dtype or x's."""
        return bit_linear(_rows(x, self.rms_norm, "auto"), None, self.frozen_weight(), self.bias)


def _rows(x: Tensor, norm: InputNorm | None, backend: BackendName) -> Int8Rows:
    """(..., I), normed where the layer has a norm, in int8."""
    if norm is None:
        return quantize_int8(x, backend=backend)
    return norm_quantize(x, norm.weight, norm.eps, backend=backend)


def bit_linear_of(linear: nn.Linear, settings: QuantizationConfig, name: str) -> BitLinear:
    """``linear`` with float32 masters; a float32 weight is shared. Raises FtcliError FT323 for NaN or infinity."""
    _require_finite(linear, name)
    return BitLinear(linear.weight, linear.bias, name)


def ternary_linear(linear: nn.Linear, settings: QuantizationConfig, name: str) -> TernaryLinear:
    """``linear``'s weight rounded to ternary values. Raises FtcliError FT323 for NaN or infinity."""
    _require_finite(linear, name)
    return TernaryLinear(ternarise(linear.weight), linear.bias, name)


def masters_of(layer: TernaryLinear) -> BitLinear:
    """Masters that are rounded to just the layer's values and scale."""
    weight = layer.frozen_weight()
    bias = None if layer.bias is None else nn.Parameter(layer.bias.detach())
    masters = BitLinear(remaster(weight.data, float(weight.scale)), bias, layer.layer_name)
    if layer.rms_norm is not None:
        masters.rms_norm = InputNorm(layer.rms_norm.weight, layer.rms_norm.eps, trained=True)
    return masters


def round_in_norms(model: PreTrainedModel, *, kernels: bool, settings: QuantizationConfig | None = None) -> None:
    """Has norms round what they hand to linear layers, and notes in the model's config that these round their weights.

    Without that note transformers would take the masters for ordinary weights, and say nothing. With ``use_rms_norm``
    in the recipe's section, layers without a norm of their own get one, of ones.
    """
    for module in [module for module in model.modules() if isinstance(module, BitLinear)]:
        module.backend = "auto" if kernels else "torch"
        if settings is not None and settings.use_rms_norm and module.rms_norm is None:
            ones = torch.ones(module.in_features, device=module.weight.device)
            module.rms_norm = InputNorm(ones, INPUT_NORM_EPS, trained=True)
    family = family_of(model.config.get_text_config().model_type)
    if family is not None:
        unit = _UNITS.get(str(activation_of(model.config.get_text_config().to_dict(), family)))
        for layer in decoder_layers(model):
            _share_rows(layer, family)
            mlp: Any = layer.mlp if hasattr(layer, "mlp") else None
            parts = [getattr(mlp, name, None) for name in _GATED]
            if unit is not None and all(isinstance(part, BitLinear) for part in parts):
                layer.mlp = RoundedMlp(mlp, unit)
    model.config.quantization_config = {**declaration(model), "quantization_mode": "online"}


def _share_rows(layer: nn.Module, family: Family) -> None:
    """Puts a :class:`RoundingNorm` in the place of each norm that only such linear layers read."""
    before_mlp = family.norms.before_mlp or "post_attention_layernorm"
    readers = {"input_layernorm": SHARED_INPUTS[0], before_mlp: SHARED_INPUTS[1]}
    if family.sub_norms:
        readers |= {"self_attn.attn_sub_norm": ("self_attn.o_proj",), "mlp.ffn_sub_norm": ("mlp.down_proj",)}
    modules = dict(layer.named_modules())
    for name, wanted in readers.items():
        found = [module for each in wanted if isinstance(module := modules.get(each), BitLinear)]
        if name in modules and len(found) == len(wanted) and not any(reader.rms_norm for reader in found):
            layer.set_submodule(name, RoundingNorm(modules[name], found, fuses=family.norm == "llama"))


def declaration(model: nn.Module) -> JsonObject:
    """quantization_config of any saved form; names the linear layers of full precision."""
    plain = [name for name, module in model.named_modules() if type(module) is nn.Linear]
    found: JsonObject = {"quant_method": _METHOD, "linear_class": "autobitlinear", "modules_to_not_convert": plain}
    norms = {module.eps for module in model.modules() if isinstance(module, InputNorm)}
    return {**found, "use_rms_norm": True, "rms_norm_eps": norms.pop()} if norms else found


def written(model: nn.Module) -> None:
    """Marks the masters of all layers as changed; from the first call on every change has to be marked."""
    for module in model.modules():
        if isinstance(module, BitLinear):
            module.written()


def set_share(model: nn.Module, share: float) -> None:
    """Sets how far training goes from exact to quantized values, in every layer."""
    for module in model.modules():
        if isinstance(module, BitLinear):
            module.share = share


def _require_finite(linear: nn.Linear, name: str) -> None:
    if not bool(torch.isfinite(linear.weight).all()):
        raise unreadable_weights(f"{name} {tuple(linear.weight.shape)}: the weight holds NaN or infinity")


_NORM_KEY = ".rms_norm.weight"


def already_ternary(linear: nn.Linear, name: str) -> TernaryLinear | None:
    """``linear`` where all its weights are -a, 0 and a: what is left of ternary values that were written out in full
    precision, from GGUF or from packed files. Rounding them by their mean would shrink them by their density.
    """
    weight = linear.weight.detach()
    scale = weight.abs().amax() if weight.numel() else weight.new_zeros(())
    if not bool(scale >= SMALLEST) or not bool(torch.isfinite(scale)):
        return None
    values = weight.sign()
    if not torch.equal(values * scale, weight):
        return None
    return TernaryLinear(Ternary(values.to(torch.int8), scale.float()), linear.bias, name)


class PackedTernaryReader:
    """Reads layers as transformers' ``bitnet`` stores them: ``weight`` (O / 4, I) uint8 and ``weight_scale`` (1,).

    What the scale means depends on ``linear_class`` in config.json: ``autobitlinear`` multiplies by it, ``bitlinear``,
    which is the default, divides. With ``use_rms_norm`` every layer, packed or of masters, has an ``rms_norm.weight``
    (I,) as well.
    """

    def __init__(self, config: JsonMap) -> None:
        stored = config.get("quantization_config") or {}
        self._divides = stored.get("linear_class", "bitlinear") == "bitlinear"
        self._eps = float(stored.get("rms_norm_eps", INPUT_NORM_EPS)) if stored.get("use_rms_norm") else None

    def part_of(self, key: str) -> tuple[str, str] | None:
        """See :meth:`ftcli.model.quantized.PackedReader.part_of`."""
        if self._eps is not None and key.endswith(_NORM_KEY):
            return key.removesuffix(_NORM_KEY), "rms_norm"
        layer, _, leaf = key.rpartition(".")
        return (layer, leaf) if leaf == "weight_scale" else None

    def is_packed(self, weight: Tensor) -> bool:
        """See :meth:`ftcli.model.quantized.PackedReader.is_packed`: packed values are integers, never floating."""
        return False

    def layer(self, parts: Mapping[str, Tensor], linear: nn.Linear, name: str) -> TernaryLinear:
        """See :meth:`ftcli.model.quantized.PackedReader.layer`."""
        if "weight" not in parts or "weight_scale" not in parts:
            raise ValueError(f"it is stored packed, without its {'weight_scale' if 'weight' in parts else 'weight'}")
        values, stored = unpack_ternary(parts["weight"]), parts["weight_scale"].double()
        if values.shape != (linear.out_features, linear.in_features):
            raise ValueError(f"its packed bytes are of a matrix {tuple(values.shape)}")
        if stored.numel() != 1 or not bool((stored > 0) & torch.isfinite(stored)):
            raise ValueError("its weight_scale is not a positive number")
        scale = (1.0 / stored if self._divides else stored).float().reshape(())
        made = TernaryLinear(Ternary(values, scale), linear.bias, name)
        made.rms_norm = self._norm(parts, made, trained=False)
        return made

    def add(self, parts: Mapping[str, Tensor], layer: nn.Module) -> None:
        """See :meth:`ftcli.model.quantized.PackedReader.add`."""
        if not isinstance(layer, (BitLinear, TernaryLinear)):
            raise ValueError("it has a norm of its own, and ftcli keeps it in full precision")
        layer.rms_norm = self._norm(parts, layer, trained=isinstance(layer, BitLinear))

    def require(self, model: nn.Module) -> None:
        """See :meth:`ftcli.model.quantized.PackedReader.require`."""
        if self._eps is None:
            return
        for layer in model.modules():
            if isinstance(layer, (BitLinear, TernaryLinear)) and layer.rms_norm is None:
                raise ValueError(f"config.json says use_rms_norm, and {layer.layer_name}.rms_norm is not stored")

    def _norm(self, parts: Mapping[str, Tensor], layer: nn.Linear, *, trained: bool) -> InputNorm | None:
        weight = parts.get("rms_norm")
        if weight is None or self._eps is None:
            return None
        if weight.shape != (layer.in_features,):
            raise ValueError(f"its rms_norm has shape {tuple(weight.shape)}")
        return InputNorm(weight, self._eps, trained=trained)
