"""Device functions of the gated units: activations, units, and their derivatives."""

from __future__ import annotations

import triton
import triton.language as tl

#: exp(x) is 2 to this times x, which a GPU does in one instruction: four for exp itself, which minds denormal numbers.
LOG2_E = tl.constexpr(1.4426950408889634)
#: gpt-oss's clamped unit: the slope inside the sigmoid, and the largest gate and up.
CLAMPED_SLOPE, CLAMPED_LIMIT = tl.constexpr(1.702), tl.constexpr(7.0)


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x)) without an exp that overflows."""
    e = tl.exp2(tl.abs(x) * -LOG2_E)
    return tl.where(x < 0, e, 1.0) / (1.0 + e)


@triton.jit
def activate(x, ACT: tl.constexpr):
    """(act(x), act'(x)) for ACT in silu, gelu_tanh, gelu, relu2; what is not used is dropped by the compiler."""
    if ACT == "silu":
        s = sigmoid(x)
        value = x * s
        slope = s * (1.0 + x * (1.0 - s))
    elif ACT == "gelu_tanh":
        # (1 + tanh(y)) / 2 is sigmoid(2y), and 1 + tanh would cancel for negative x: 1e-5 is lost at x = -3.
        y = 1.5957691216057308 * x * (1.0 + 0.044715 * x * x)
        e = tl.exp2(tl.abs(y) * -LOG2_E)
        big = 1.0 / (1.0 + e)
        small = e * big
        s = tl.where(y < 0, small, big)
        value = x * s
        slope = s + x * (big * small) * 1.5957691216057308 * (1.0 + 0.134145 * x * x)
    elif ACT == "gelu":
        phi = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
        value = x * phi
        slope = phi + x * 0.3989422804014327 * tl.exp2(x * x * (-0.5 * LOG2_E))
    else:
        tl.static_assert(ACT == "relu2")
        positive = tl.maximum(x, 0.0)
        value = positive * positive
        slope = 2.0 * positive
    return value, slope


@triton.jit
def gated_unit(g, u, UNIT: tl.constexpr):
    """(h, dh/dg, dh/du) of act(g) * u, or for ``clamped`` of g' sigmoid(1.702 g') (u' + 1) with g' = min(g, 7) and u'
    between -7 and 7: what is beyond has no gradient. NaN stays NaN.
    """
    if UNIT == "clamped":
        gate = tl.where(g > CLAMPED_LIMIT, CLAMPED_LIMIT, g)
        up = 1.0 + tl.where(u > CLAMPED_LIMIT, CLAMPED_LIMIT, tl.where(u < -CLAMPED_LIMIT, -CLAMPED_LIMIT, u))
        s = sigmoid(gate * CLAMPED_SLOPE)
        value = gate * s
        slope = tl.where(g > CLAMPED_LIMIT, 0.0, s * (1.0 + gate * CLAMPED_SLOPE * (1.0 - s)))
        h, by_gate, by_up = value * up, slope * up, tl.where(tl.abs(u) > CLAMPED_LIMIT, 0.0, value)
    else:
        value, slope = activate(g, UNIT)
        h, by_gate, by_up = value * u, slope * u, value
    return h, by_gate, by_up
