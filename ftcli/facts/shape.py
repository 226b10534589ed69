"""The layers that transformers builds from a config.json: linears, norms and parameter counts, computed without torch.

The row of a family in :mod:`ftcli.tables.families` says how it is built. Tests compare the numbers with models that
transformers builds on the meta device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ftcli.facts.language import Config, text_values
from ftcli.facts.towers import other_parameters
from ftcli.tables.families import PARALLEL, Family, Norms, family_of

#: Linear layers of a decoder layer that read the same input, by their paths in the layer. ftcli's kernels multiply by
#: the weights of a group at once.
SHARED_INPUTS = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("mlp.gate_proj", "mlp.up_proj"),
)
#: The first half of the gated MLP: two linear layers, or one where a family joins them.
GATE_AND_UP = (*SHARED_INPUTS[1], "mlp.gate_up_proj")


@dataclass(frozen=True, slots=True)
class Linear:
    """One linear layer of a decoder layer: PEFT's module path below the layer, and its logical shape."""

    name: str
    in_features: int
    out_features: int
    bias: bool = False

    @property
    def parameters(self) -> int:
        """Weight and bias elements."""
        return self.in_features * self.out_features + (self.out_features if self.bias else 0)

    @property
    def leaf(self) -> str:
        """The last part of the name, as in ``lora.target_modules``."""
        return self.name.rpartition(".")[2]


@dataclass(frozen=True, slots=True)
class Attention:
    """The attention of one layer.

    Attributes:
        window: Keys that a query sees at most, itself included. None: all before it.
        rotary_dim: Features of a head that are rotated, its first ones; 0: no rotation.
    """

    heads: int
    kv_heads: int
    head_dim: int
    window: int | None
    rotary_dim: int

    @property
    def width(self) -> int:
        """Features of all query heads together."""
        return self.heads * self.head_dim


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer: what mixes tokens, the width of its MLP, its linears, and the elements of its norms and of
    its activation.
    """

    attention: Attention
    mlp_width: int
    linears: tuple[Linear, ...]
    other_parameters: int

    @property
    def linear_parameters(self) -> int:
        """Elements of the linears."""
        return sum(linear.parameters for linear in self.linears)


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Everything about a model's size that memory and arithmetic depend on. Counts are elements, not bytes.

    All of it is about the language model; ``other_parameters`` are those of a multimodal model's other parts, which are
    held and not trained. ``layers`` describes each decoder layer; widths of the model are those of every layer.
    """

    family: Family
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    tied: bool
    layers: tuple[Layer, ...]
    other_parameters: int = 0
    parallel: bool = False

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return len(self.layers)

    @property
    def linears(self) -> tuple[Linear, ...]:
        """The linears of a layer; all have the same."""
        return self.layers[0].linears

    @property
    def q_width(self) -> int:
        """Features of all query heads together."""
        return self.num_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Features of all key heads together (and of all value heads)."""
        return self.num_kv_heads * self.head_dim

    @property
    def linear_parameters(self) -> int:
        """Elements of the linear layers of all decoder layers, without embeddings and head."""
        return sum(layer.linear_parameters for layer in self.layers)

    @property
    def embedding_parameters(self) -> int:
        """Elements of the token embedding (and of the head, when it is not tied)."""
        return self.vocab_size * self.hidden_size * (1 if self.tied else 2)

    @property
    def norm_parameters(self) -> int:
        """Elements of all norm weights, and of what activations have."""
        return sum(layer.other_parameters for layer in self.layers) + _norm(self.family, self.hidden_size)

    @property
    def norms(self) -> Norms:
        """Norms of width hidden_size in a layer."""
        return _norms(self.family, parallel=self.parallel)

    @property
    def norm_count(self) -> int:
        """Number of these."""
        return len(self.norms.names)

    @property
    def rotated_share(self) -> float:
        """The share of the layers that rotate queries and keys."""
        return sum(layer.attention.rotary_dim > 0 for layer in self.layers) / self.num_layers

    @property
    def rotates_in_part(self) -> bool:
        """True if some layers rotate a part of each head."""
        return any(layer.attention.rotary_dim not in (0, self.head_dim) for layer in self.layers)

    @property
    def half_inputs(self) -> int:
        """Tensors of the residual stream that a layer's halves are run again from: see the family's. Parallel halves
        are run again together, from one.
        """
        return 1 if self.parallel else self.family.half_inputs

    @property
    def most_sent(self) -> int:
        """Tensors that a layer on the kernels sends to the host at most."""
        return 1 if self.parallel else self.family.most_sent

    @property
    def language_parameters(self) -> int:
        """Elements of the language model, each counted once."""
        return self.linear_parameters + self.embedding_parameters + self.norm_parameters

    @property
    def parameters(self) -> int:
        """All elements, each counted once."""
        return self.language_parameters + self.other_parameters

    def adapted(self, target_modules: str | tuple[str, ...]) -> tuple[Linear, ...]:
        """The layer's linears that PEFT would adapt: all, or those whose name is or ends in a target."""
        if isinstance(target_modules, str):
            return self.linears
        return tuple(
            linear for linear in self.linears if any(means(t, f"model.layers.0.{linear.name}") for t in target_modules)
        )


def means(name: str, path: str) -> bool:
    """True if a name in a recipe, or in PEFT's settings, means the module of this path: it is the end of it."""
    return path == name or path.endswith(f".{name}")


def shape_of(config: Config) -> ModelShape | None:
    """The shape of the model that ``config`` describes; None for one that the family table does not describe.

    Args:
        config: The content of config.json.

    Raises:
        KeyError: A key that transformers has no usable default for is missing; its args hold the name.
        ValueError: A value is not a positive whole number, the heads do not divide, or there are more layers than
            any model has: names are made of every layer.
    """
    others = other_parameters(config)
    config = text_values(config)
    family = family_of(str(config.get("model_type")))
    if family is None or others is None or any(config.get(key) for key in family.not_with):
        return None
    hidden = _whole(config, "hidden_size")
    intermediate = _whole(config, "intermediate_size")
    heads = _whole(config, "num_attention_heads")
    kv_heads = _whole(config, "num_key_value_heads", heads)
    if heads % kv_heads:
        raise ValueError(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    if family.head_dim is None and config.get("head_dim") is None and hidden % heads:
        raise ValueError(f"hidden_size {hidden} is not a multiple of num_attention_heads {heads}")
    head_dim = _whole(config, "head_dim", family.head_dim or hidden // heads)
    tied = config.get("tie_word_embeddings")
    parallel = _stated(config, family.parallel)
    linears = _linears(config, family, hidden, intermediate, heads * head_dim, kv_heads * head_dim)
    norms = _norm_parameters(family, hidden, intermediate, heads, kv_heads, head_dim, parallel=parallel)
    count = _layers(config)
    if isinstance(types := config.get("layer_types"), list) and len(types) < count:
        raise ValueError(f"layer_types names {len(types)} layers, and num_hidden_layers is {count}")
    windows, rotary_dim = windows_of(config, family, count), int(head_dim * _rotary_share(config, family))
    rotated = _rotated(config, family, windows)
    layers = tuple(
        Layer(Attention(heads, kv_heads, head_dim, window, rotary_dim if turns else 0), intermediate, linears, norms)
        for window, turns in zip(windows, rotated, strict=True)
    )
    return ModelShape(
        family=family,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=_whole(config, "vocab_size"),
        tied=family.tied if tied is None else bool(tied),
        layers=layers,
        other_parameters=others,
        parallel=parallel,
    )


def window_of(config: Config, family: Family | None) -> int | None:
    """The sliding window that some layers of a language model have; None where none has one."""
    if family is not None and not family.has_windows:
        return None
    window = config.get("sliding_window", None if family is None else family.window)
    if not isinstance(window, int) or isinstance(window, bool) or config.get("use_sliding_window") is False:
        return None
    layer_types = config.get("layer_types")
    return None if isinstance(layer_types, list) and "sliding_attention" not in layer_types else window


def windows_of(config: Config, family: Family | None, layers: int) -> tuple[int | None, ...]:
    """The sliding window of each of the first ``layers`` layers; None for one that sees everything."""
    window, types = window_of(config, family), config.get("layer_types")
    if window is None:
        return (None,) * layers
    if isinstance(types, list):
        return tuple(window if kind == "sliding_attention" else None for kind in types[:layers])
    every, first = None if family is None else family.full_attention_every, 0
    if every is not None and isinstance(stated := config.get("sliding_window_pattern"), int):
        every = stated
    if family is not None and family.windows_from is not None:
        # transformers' default for these families; a config that is older than the key has no window at all.
        first = _at_least(config, family.windows_from, 28)
    last = 1 if every is None or every > 0 else 1 - _whole(config, "num_hidden_layers")
    return tuple(None if at < first or (every and (at + last) % every == 0) else window for at in range(layers))


def _at_least(config: Config, key: str, default: int) -> int:
    value = config.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else default


def _rotated(config: Config, family: Family, windows: tuple[int | None, ...]) -> tuple[bool, ...]:
    """For each layer, whether queries and keys are rotated."""
    if family.unrotated is None:
        return (True,) * len(windows)
    if family.unrotated == "global":
        return tuple(window is not None or not any(windows) for window in windows)
    stated = config.get(family.unrotated)
    if stated is None and family.unrotated == "layer_rope_theta":
        return tuple(window is not None for window in windows)
    if isinstance(stated, list) and len(stated) >= len(windows):
        return tuple(bool(each) for each in stated[: len(windows)])
    every = max(_at_least(config, "no_rope_layer_interval", 4), 1)
    return tuple((at + 1) % every != 0 for at in range(len(windows)))


def _rotary_share(config: Config, family: Family) -> float:
    """The part of a head that is rotated."""
    for key in ("rope_parameters", "rope_scaling"):
        inner = config.get(key)
        if isinstance(inner, Mapping) and isinstance(share := inner.get("partial_rotary_factor"), int | float):
            return float(share)
    share = config.get("partial_rotary_factor", config.get("rope_pct"))
    return float(share) if isinstance(share, int | float) else family.rotary_share


def _stated(config: Config, asked: bool | str) -> bool:
    """A value that the family fixes, or that the config has under this name."""
    return bool(config.get(asked)) if isinstance(asked, str) else asked


def _norms(family: Family, *, parallel: bool) -> Norms:
    return PARALLEL if parallel else family.norms


def _norm(family: Family, width: int) -> int:
    return width * (2 if family.norm_bias else 1)


def _norm_parameters(
    family: Family, hidden: int, inner: int, heads: int, kv_heads: int, head_dim: int, *, parallel: bool
) -> int:
    """Elements of the norms of a layer."""
    total = len(_norms(family, parallel=parallel).names) * _norm(family, hidden)
    if family.head_norm is not None and family.head_norm.weights:
        total += head_dim * (heads + kv_heads if family.head_norm.span == "width" else 2)
    return total + family.activation_parameters + (hidden + inner if family.sub_norms else 0)


def _linears(config: Config, family: Family, hidden: int, inner: int, q: int, kv: int) -> tuple[Linear, ...]:
    biases = [_stated(config, each) for each in (family.qkv_bias, family.o_bias, family.mlp_bias)]
    groups = family.groups
    first = (2 * inner,) if "gate_up" in family.joined else (inner,) * len(groups.gate_up)
    sizes: list[tuple[tuple[str, ...], int, tuple[int, ...], bool]] = [
        (groups.qkv, hidden, (q + 2 * kv,) if "qkv" in family.joined else (q, kv, kv), biases[0]),
        (groups.o, q, (hidden,), biases[1]),
        (groups.gate_up, hidden, first, biases[2]),
        (groups.down, inner, (hidden,), biases[2]),
        (groups.gate, hidden, (q,) * len(groups.gate), False),
    ]
    return tuple(
        Linear(name, width, out, bias)
        for names, width, outs, bias in sizes
        for name, out in zip(names, outs, strict=True)
    )


#: No model has a tenth of these; a damaged config.json may say billions.
_MOST_LAYERS = 10_000


def _layers(config: Config) -> int:
    layers = _whole(config, "num_hidden_layers")
    if layers > _MOST_LAYERS:
        raise ValueError(f"num_hidden_layers is {layers:,}, more than the {_MOST_LAYERS:,} that are possible")
    return layers


def _whole(config: Config, key: str, default: int | None = None) -> int:
    value = config.get(key)
    if value is None:
        if default is None:
            raise KeyError(key)
        return default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{key} is {value!r}, not a positive whole number")
    return value
