"""Linear layers whose frozen weight is kept and multiplied in e4m3."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Self

import torch
from ftkernels.fp8 import Fp8Rows, Fp8Weight, join_fp8, part_fp8, quantize_rows, quantize_weight
from torch import Tensor, nn

from ftcli.config.model import QuantizationConfig
from ftcli.model.quantized import JoinedParameter, QuantizedLinear, Tolerance, unreadable_weights

#: fp8 rounds each product's operands to 3 bits: what differs in the last bit before may differ by 6% after. Measured on
#: an H200 with random weights: loss 1.3e-3, output 5.9e-2, gradient 7.3e-2 (Llama-3.1-8B), less for Gemma-2-9B.
FP8_TOLERANCE = Tolerance(1e-2, 1.2e-1, 1.5e-1)

_STATE = ("data", "scale", "transposed", "transposed_scale")


class Fp8Linear(QuantizedLinear):
    """A frozen linear layer in e4m3: the parts of an ``ftkernels.fp8.Fp8Weight``, as buffers.

    Products in forward and in the gradient of the input are fp8 products on a GPU that has them (capability 8.9), and
    the same numbers multiplied in the compute dtype elsewhere.
    """

    method = "fp8"
    sharded = ("data", "transposed")
    tolerance = FP8_TOLERANCE

    def __init__(self, weight: Fp8Weight, bias: Tensor | None, name: str) -> None:
        super().__init__(int(weight.shape[1]), int(weight.shape[0]), bias, name)
        self.hold(weight)

    @classmethod
    def join(cls, layers: Sequence[Self]) -> Callable[[], None]:
        """Joins the layers' weights; apart again they are the same to the bit."""
        for layer, weight in zip(layers, join_fp8([layer.frozen_weight() for layer in layers]), strict=True):
            layer.hold(weight)
        return partial(_part, layers)

    @classmethod
    def join_for_sharding(
        cls, layers: Sequence[Self], joint: Callable[[Sequence[Tensor], int], JoinedParameter]
    ) -> None:
        """Joins values and transposed values. Scales are neighbours as they are, and not sharded."""
        weights = join_fp8([layer.frozen_weight() for layer in layers])
        if weights[0].data.shape[1] % 4 or sum(int(w.shape[0]) for w in weights) % 4:
            return  # is_shardable
        rows, columns = joint([w.data for w in weights], 0), joint([w.transposed for w in weights], 1)
        for index, (layer, weight) in enumerate(zip(layers, weights, strict=True)):
            layer.hold(weight)
            layer.share("data", rows, index)
            layer.share("transposed", columns, index)

    def hold(self, weight: Fp8Weight) -> None:
        """Takes ``weight``'s tensors for its state."""
        for name in _STATE:
            self.register_buffer(name, getattr(weight, name))

    def frozen_weight(self) -> Fp8Weight:
        """See :meth:`ftcli.model.quantized.QuantizedLinear.frozen_weight`; nothing is copied."""
        parts = [self.state(name) for name in _STATE]
        present = [part for part in parts if part is not None]
        if len(present) < len(parts):
            missing = [name for name, part in zip(_STATE, parts, strict=True) if part is None]
            raise self.state_lost(f"{', '.join(missing)} gone")
        try:
            weight = Fp8Weight(*present)
        except ValueError as error:
            raise self.state_lost(str(error)) from error
        if weight.shape != (self.out_features, self.in_features):
            raise self.state_lost(f"its values have shape {tuple(weight.shape)}")
        return weight

    def check_state(self) -> None:
        """Requires scales that are powers of two, and two copies that stand for one matrix."""
        weight = self.frozen_weight()
        for scale in (weight.scale, weight.transposed_scale):
            mantissa, _ = torch.frexp(scale)
            if not bool((mantissa == 0.5).all()):
                raise self.state_lost("its scales are not powers of two, so their memory was never written")
        # The second copy rounds what lies below its smallest step, 2^-9 of the scale.
        back = Fp8Rows(weight.transposed, weight.transposed_scale).dequantize(torch.bfloat16).t()
        off = (weight.dequantize(torch.bfloat16) - back).abs_().float()
        if not bool((off <= weight.transposed_scale * 2.0**-9).all()):
            raise self.state_lost("its two copies of the weight differ")


def fp8_linear(linear: nn.Linear, settings: QuantizationConfig, name: str) -> Fp8Linear:
    """``linear``'s weight in e4m3, on the device where it is; its bias is shared.

    Raises:
        FtcliError: FT323 when the weight holds NaN or infinity.
    """
    try:
        weight = quantize_weight(linear.weight)
    except ValueError as error:
        raise unreadable_weights(f"{name} {tuple(linear.weight.shape)}: {error}") from error
    return Fp8Linear(weight, linear.bias, name)


def fp8_stack(weight: Tensor, settings: QuantizationConfig) -> Fp8Rows:
    """All experts' matrices, one below the other, in e4m3, once: their products dequantize them. Raises ValueError
    where they hold NaN or infinity.
    """
    return quantize_rows(weight)


def _part(layers: Sequence[Fp8Linear]) -> None:
    """Gives each layer memory of its own again."""
    for layer in layers:
        layer.hold(part_fp8(layer.frozen_weight()))
