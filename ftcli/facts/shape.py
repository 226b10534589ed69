"""The layers that transformers builds from a config.json: linears, norms and parameter counts, computed without torch.

The row of a family in :mod:`ftcli.tables.families` says how it is built. Tests compare the numbers with models that
transformers builds on the meta device.
"""

from __future__ import annotations

from dataclasses import dataclass

from ftcli.facts.language import Config, text_values
from ftcli.facts.towers import other_parameters
from ftcli.tables.families import Family, family_of

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
class ModelShape:
    """Everything about a model's size that memory depends on. Counts are elements, not bytes.

    All of it is about the language model; ``other_parameters`` are those of a multimodal model's other parts, which are
    held and not trained.
    """

    family: Family
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    tied: bool
    linears: tuple[Linear, ...]
    other_parameters: int = 0

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
        return self.num_layers * sum(linear.parameters for linear in self.linears)

    @property
    def embedding_parameters(self) -> int:
        """Elements of the token embedding (and of the head, when it is not tied)."""
        return self.vocab_size * self.hidden_size * (1 if self.tied else 2)

    @property
    def norm_parameters(self) -> int:
        """Elements of all norm weights."""
        layer = self.family.norms * self.hidden_size
        if self.family.head_norm:
            layer += 2 * self.head_dim
        if self.family.sub_norms:
            layer += self.hidden_size + self.intermediate_size
        return self.num_layers * layer + self.hidden_size

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
    """The shape of the model that ``config`` describes; None for a family that ftcli does not know.

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
    if family is None or others is None:
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
    return ModelShape(
        family=family,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_layers=_layers(config),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=_whole(config, "vocab_size"),
        tied=family.tied if tied is None else bool(tied),
        linears=_linears(config, family, hidden, intermediate, heads * head_dim, kv_heads * head_dim),
        other_parameters=others,
    )


def _linears(config: Config, family: Family, hidden: int, inner: int, q: int, kv: int) -> tuple[Linear, ...]:
    if family.joined:
        return (
            Linear("self_attn.qkv_proj", hidden, q + 2 * kv),
            Linear("self_attn.o_proj", q, hidden),
            Linear("mlp.gate_up_proj", hidden, 2 * inner),
            Linear("mlp.down_proj", inner, hidden),
        )
    asked = family.bias == "config" and bool(config.get("attention_bias"))
    qkv_bias = asked or family.bias == "qkv"
    mlp_bias = family.mlp_bias and bool(config.get("mlp_bias"))
    return (
        Linear("self_attn.q_proj", hidden, q, qkv_bias),
        Linear("self_attn.k_proj", hidden, kv, qkv_bias),
        Linear("self_attn.v_proj", hidden, kv, qkv_bias),
        Linear("self_attn.o_proj", q, hidden, asked),
        Linear("mlp.gate_proj", hidden, inner, mlp_bias),
        Linear("mlp.up_proj", hidden, inner, mlp_bias),
        Linear("mlp.down_proj", inner, hidden, mlp_bias),
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
