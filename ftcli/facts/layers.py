"""A decoder layer as a value: what mixes tokens, its linears, the elements of all else. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from ftcli.tables.architecture import Groups

#: Linear layers of a decoder layer that read the same input, by their paths in the layer. ftcli's kernels multiply by
#: the weights of a group at once.
SHARED_INPUTS = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("mlp.gate_proj", "mlp.up_proj"),
    ("linear_attn.in_proj_qkv", "linear_attn.in_proj_z", "linear_attn.in_proj_b", "linear_attn.in_proj_a"),
    ("self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa"),
)
#: The first half of the gated MLP: two linear layers, or one where a family joins them, or experts' stack.
_GATE_AND_UP = ("gate_proj", "up_proj", "gate_up_proj")


@dataclass(frozen=True, slots=True)
class Linear:
    """One linear layer of a decoder layer: PEFT's module path below the layer, and its logical shape. With ``experts``
    above 1 it is a stack of so many matrices in one parameter, of which a token goes through ``used``.
    """

    name: str
    in_features: int
    out_features: int
    bias: bool = False
    experts: int = 1
    used: int = 1

    @property
    def elements(self) -> int:
        """Weight elements, of all experts."""
        return self.in_features * self.out_features * self.experts

    @property
    def parameters(self) -> int:
        """Weight and bias elements, of all experts."""
        return self.elements + (self.out_features * self.experts if self.bias else 0)

    @property
    def leaf(self) -> str:
        """The last part of the name, as in ``lora.target_modules``."""
        return self.name.rpartition(".")[2]


def is_gate_and_up(linear: Linear) -> bool:
    """True if a layer is of the first half of a gated MLP."""
    return linear.leaf in _GATE_AND_UP and not linear.name.startswith("self_attn.")


@dataclass(frozen=True, slots=True)
class Attention:
    """The attention of one layer.

    Attributes:
        rotary_dim: Features of a head that are rotated, its first ones; 0: no rotation.
        keys: Where keys and values come from: linears of the layer, one linear for both (``one``), or an earlier layer
            of its kind (``shared``).
    """

    heads: int
    kv_heads: int
    head_dim: int
    window: int | None
    rotary_dim: int
    keys: Literal["own", "one", "shared"] = field(default="own", kw_only=True)

    @property
    def width(self) -> int:
        """Features of all query heads together."""
        return self.heads * self.head_dim

    @property
    def key_width(self) -> int:
        """Features of all key heads together (and of all value heads)."""
        return self.kv_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class LatentAttention(Attention):
    """Multi-head latent attention of one layer, of heads that are expanded from the latents: ``head_dim`` is that of
    queries and keys, of which the last ``rotary_dim`` features are rotated. The queries' latent has ``q_rank`` features
    (None: they are made of the layer's input), that of keys and values ``kv_rank``.
    """

    q_rank: int | None
    kv_rank: int
    value_dim: int

    @property
    def plain_dim(self) -> int:
        """Features of a head's queries and keys that are not rotated."""
        return self.head_dim - self.rotary_dim

    @property
    def expanded(self) -> int:
        """Features that the keys' and values' latent is expanded to, of all heads."""
        return self.heads * (self.plain_dim + self.value_dim)

    @property
    def entering(self) -> tuple[int, int]:
        """Features that the layer's input is multiplied to: queries or their latent; the other latent and the key that
        heads share.
        """
        return self.q_rank or self.width, self.kv_rank + self.rotary_dim

    @property
    def kept(self) -> tuple[int, int]:
        """Features that generation keeps of a token: the latent of keys and values, and the key that heads share."""
        return self.kv_rank, self.rotary_dim

    @property
    def parameters(self) -> int:
        """Elements of the latents' norms."""
        return (self.q_rank or 0) + self.kv_rank

    @property
    def output_width(self) -> int:
        """Features of all values together."""
        return self.heads * self.value_dim


@dataclass(frozen=True, slots=True)
class DeltaNet:
    """The gated delta net of one layer: heads, the features of a key and of a value, and the filter in front of it."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    filter_width: int

    @property
    def channels(self) -> int:
        """Features of all queries, keys and values together, which the filter runs over."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def width(self) -> int:
        """Features of all values together."""
        return self.value_heads * self.value_dim

    @property
    def joined_width(self) -> int:
        """Features of all that enters: queries, keys and values, the output's gate, write strengths and decays."""
        return self.channels + self.width + 2 * self.value_heads

    @property
    def parameters(self) -> int:
        """Elements beside the linears: filter, decays and their biases, and the norm."""
        return self.channels * self.filter_width + 2 * self.value_heads + self.value_dim


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer: what mixes tokens, the width of its MLP, its linears, those that share an input, and the
    elements of its norms, of its activation, of its mixer and of its router.

    A layer with experts has the MLP that every token goes through, if any, and the stacks of experts among its linears.
    """

    mixer: Attention | DeltaNet
    mlp_width: int
    linears: tuple[Linear, ...]
    groups: Groups
    other_parameters: int

    @property
    def attention(self) -> Attention | None:
        return self.mixer if isinstance(self.mixer, Attention) else None

    @property
    def latent(self) -> LatentAttention | None:
        return self.mixer if isinstance(self.mixer, LatentAttention) else None

    @property
    def delta_net(self) -> DeltaNet | None:
        return self.mixer if isinstance(self.mixer, DeltaNet) else None

    @property
    def stacks(self) -> tuple[Linear, ...]:
        """Its stacks of experts: gate and up, and down; none where it has no experts."""
        return tuple(linear for linear in self.linears if linear.experts > 1)

    @property
    def linear_parameters(self) -> int:
        return sum(linear.parameters for linear in self.linears)


def means(name: str, path: str) -> bool:
    """True if a name in a recipe, or in PEFT's settings, means the module of this path: it is the end of it."""
    return path == name or path.endswith(f".{name}")
