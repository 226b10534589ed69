"""The model that transformers builds from a config.json: its layers, sizes and parameter counts, without torch.

The row of a family in :mod:`ftcli.tables.families` says how it is built. Tests compare the numbers with models that
transformers builds on the meta device.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, TypeAlias

from ftcli.facts.language import Config, text_values
from ftcli.facts.layers import Attention, DeltaNet, LatentAttention, Layer, Linear, means
from ftcli.facts.towers import other_parameters
from ftcli.tables.architecture import PARALLEL, Experts, Family, Groups, Latents, Norms
from ftcli.tables.families import family_of


@dataclass(frozen=True, slots=True)
class LayerTable:
    """A table of layers' own inputs: for each of ``entries`` tokens, ``width`` features a layer."""

    entries: int
    width: int


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Everything about a model's size that memory and arithmetic depend on. Counts are elements, not bytes.

    All of it is about the language model; ``other_parameters`` are those of a multimodal model's other parts, which are
    held and not trained. ``layers`` describes each decoder layer; widths of the model are those of every layer, and
    heads those of every layer that attends; where they differ, those of the first, and ``by_kind`` has each.
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
    layer_input: LayerTable | None = None

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def linears(self) -> tuple[Linear, ...]:
        """The linears that layers have, those of all kinds of layers."""
        return tuple(dict.fromkeys(linear for kind in self.by_kind for linear in kind.layers[0].linears))

    def layers_with(self, linear: Linear) -> int:
        """Number of the layers that have a linear."""
        return sum(kind.num_layers for kind in self.by_kind if linear in kind.layers[0].linears)

    @property
    def by_kind(self) -> tuple[ModelShape, ...]:
        """The model with the layers of one kind alone, by what mixes tokens, its heads, the linears, and whether there
        are experts: what is true of one of its layers is then true of all, but for windows and rotation. Itself where
        there is one kind.
        """
        kinds = Counter(_kind(layer) for layer in self.layers)
        if len(kinds) == 1:
            return (self,)
        parts = [tuple(layer for layer in self.layers if _kind(layer) == kind) for kind in kinds]
        return tuple(self._of(part) for part in parts)

    def _of(self, layers: tuple[Layer, ...]) -> ModelShape:
        """With these layers of one kind."""
        attention, width = layers[0].attention, layers[0].mlp_width
        if attention is None:
            return replace(self, layers=layers, intermediate_size=width)
        kv_heads, head_dim = attention.kv_heads, attention.head_dim
        return replace(self, layers=layers, intermediate_size=width, num_kv_heads=kv_heads, head_dim=head_dim)

    @property
    def attending(self) -> tuple[Attention, ...]:
        return tuple(layer.attention for layer in self.layers if layer.attention is not None)

    @property
    def delta_nets(self) -> tuple[DeltaNet, ...]:
        return tuple(layer.delta_net for layer in self.layers if layer.delta_net is not None)

    @property
    def latents(self) -> tuple[LatentAttention, ...]:
        return tuple(layer.latent for layer in self.layers if layer.latent is not None)

    @property
    def has_experts(self) -> bool:
        return any(layer.stacks for layer in self.layers)

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
    def active_parameters(self) -> int:
        """Elements that a token goes through: of experts, those that it is sent to."""
        unused = sum(x.parameters // x.experts * (x.experts - x.used) for layer in self.layers for x in layer.stacks)
        return self.parameters - unused

    @property
    def embedding_parameters(self) -> int:
        """Elements of the token embedding (and of the head, when it is not tied), and of layers' own inputs."""
        own = 0
        if self.layer_input is not None:  # tables, and what is added to them: a linear and a norm
            rows = self.layer_input.entries + self.hidden_size
            own = rows * self.layer_input_features + self.layer_input.width
        return self.vocab_size * self.hidden_size * (1 if self.tied else 2) + own

    @property
    def layer_input_features(self) -> int:
        """Features of a token's own inputs of all layers."""
        return 0 if self.layer_input is None else self.layer_input.width * self.num_layers

    @property
    def norm_parameters(self) -> int:
        """Elements of all norm weights, and of what activations have."""
        last = self.hidden_size * (2 if self.family.norm_bias else 1)
        return sum(layer.other_parameters for layer in self.layers) + last

    @property
    def norms(self) -> Norms:
        """Norms of width hidden_size in a layer."""
        return PARALLEL if self.parallel else self.family.norms

    @property
    def rotates_in_part(self) -> bool:
        """True if some layers rotate a part of each head."""
        return any(each.rotary_dim not in (0, self.head_dim) for each in self.attending)

    @property
    def half_inputs(self) -> int:
        """Tensors of the residual stream that a layer's halves are run again from: see the family's. Parallel halves
        are run again together, from one; what a layer does with its own input, from one more.
        """
        if self.parallel:
            return 1
        # Of experts' half, the norm behind it runs again with it.
        return (2 if self.has_experts else self.family.half_inputs) + (self.layer_input is not None)

    @property
    def most_sent(self) -> int:
        """Tensors that a layer on the kernels sends to the host at most."""
        return 1 if self.parallel else self.half_inputs + 1

    @property
    def language_parameters(self) -> int:
        """Elements of the language model, each counted once."""
        return self.linear_parameters + self.embedding_parameters + self.norm_parameters

    @property
    def parameters(self) -> int:
        """All elements, each counted once."""
        return self.language_parameters + self.other_parameters

    def adapted(self, target_modules: str | tuple[str, ...], *, experts: bool = True) -> tuple[Linear, ...]:
        """The layer's linears that PEFT would adapt: all (``experts``: stacks of experts too), or those whose name is
        or ends in a target.
        """
        if isinstance(target_modules, str):
            return tuple(linear for linear in self.linears if experts or linear.experts == 1)
        return tuple(
            linear for linear in self.linears if any(means(t, f"model.layers.0.{linear.name}") for t in target_modules)
        )


def _kind(layer: Layer) -> Hashable:
    attention = layer.attention
    heads = None if attention is None else (attention.kv_heads, attention.head_dim)
    return heads, layer.groups, layer.mlp_width, bool(layer.stacks)


def shape_of(config: Config) -> ModelShape | None:
    """The shape of the model that a config.json describes; None for one that the family table does not describe.

    Raises KeyError with the name of a key that is missing and for which transformers has no usable default; ValueError
    where a value is not a positive whole number, the heads do not divide, or there are more layers than any model has:
    names are made of every layer.
    """
    others = other_parameters(config)
    config = text_values(config)
    family = family_of(str(config.get("model_type")))
    if family is None or others is None or _is_built_otherwise(config, family):
        return None
    family = _as_stated(config, family)
    hidden = _whole(config, "hidden_size")
    # A model may consist of experts alone.
    intermediate = _whole(config, "intermediate_size", None if family.experts is None else 1)
    heads = _whole(config, "num_attention_heads")
    kv_heads = _whole(config, "num_key_value_heads", heads)
    if heads % kv_heads:
        raise ValueError(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    latent = None if family.latents is None else _latent(config, family.latents, heads)
    if family.head_dim is None and latent is None and config.get("head_dim") is None and hidden % heads:
        raise ValueError(f"hidden_size {hidden} is not a multiple of num_attention_heads {heads}")
    head_dim = _whole(config, "head_dim", family.head_dim or max(hidden // heads, 1))
    if latent is not None:
        kv_heads, head_dim = latent.kv_heads, latent.head_dim
    tied = config.get("tie_word_embeddings")
    parallel = _stated(config, family.parallel)
    norms = _norm_parameters(family, hidden, intermediate, parallel=parallel)
    of_heads = _head_norm_parameters(family, heads, kv_heads, head_dim)
    count = _layers(config)
    if isinstance(types := config.get("layer_types"), list) and len(types) < count:
        raise ValueError(f"layer_types names {len(types)} layers, and num_hidden_layers is {count}")
    windows, rotary_dim = windows_of(config, family, count), int(head_dim * _rotary_share(config, family))
    rotated = _rotated(config, family, windows)
    nets, sparse = _delta_nets(config, family, count), _sparse(config, family, count)
    widths = hidden, intermediate, heads * head_dim, kv_heads * head_dim
    shape = ModelShape(
        family=family,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=_whole(config, "vocab_size"),
        tied=family.tied if tied is None else bool(tied),
        layers=(),
        other_parameters=others,
        parallel=parallel,
    )
    if family.global_heads:
        return _varied(config, shape, windows)
    mixture = None if family.experts is None else _Mixture.of(config, family.experts, hidden)
    layers = []
    for window, turns, net, has_experts in zip(windows, rotated, nets, sparse, strict=True):
        own = net or latent
        mixer = own or Attention(heads, kv_heads, head_dim, window, rotary_dim if turns else 0)
        groups, beside = (family.groups if net is None else family.delta_groups), norms
        if latent is not None:
            groups = family.latent_groups(compressed=latent.q_rank is not None)
        beside += of_heads if own is None else own.parameters
        beside += heads if family.sinks and own is None else 0
        inner, stacks = intermediate, tuple[Linear, ...]()
        if has_experts and mixture is not None:
            inner, stacks, groups = mixture.shared_width, mixture.stacks, family.with_experts(groups)
            beside += mixture.router_parameters
        linears = _linears(config, family, (hidden, inner, *widths[2:]), groups, own)
        layers.append(Layer(mixer, inner, (*linears, *stacks), groups, beside))
    inner = layers[0].mlp_width if len(set(sparse)) == 1 else intermediate
    return replace(shape, intermediate_size=inner, layers=tuple(layers))


def _as_stated(config: Config, family: Family) -> Family:
    """The row without what a config says that its model does not have."""
    norms, experts = family.head_norm, family.experts
    if norms is not None and norms.only_if and not config.get(norms.only_if):
        family = replace(family, head_norm=None)
    if experts is not None and experts.shared_count is not None and config.get(experts.shared_count) == 0:
        family = replace(family, experts=replace(experts, shared=None))
    return family


def _is_built_otherwise(config: Config, family: Family) -> bool:
    """True of a config that says what the family's row does not describe; of attention that is not causal, too."""
    stated = any(config.get(key) for key in family.not_with)
    other = any(config.get(key) not in (None, value) for key, value in family.only_with)
    return stated or other or config.get("use_bidirectional_attention") == "all"


def _varied(config: Config, shape: ModelShape, windows: tuple[int | None, ...]) -> ModelShape | None:
    """``shape`` with layers that differ in their heads, in whether they make keys, and in their MLPs (Gemma-4). None
    where they differ in more.
    """
    family, heads, types = shape.family, shape.num_heads, config.get("layer_types")
    count = max(len(windows), len(types) if isinstance(types, list) else 0)  # a model may have its first layers alone
    if count == len(windows):
        windows = (*windows[:-1], None)  # the last layer sees everything, whatever a config says
    own = _own_heads(config, windows)
    if any(set(values) - {name for name, _ in _VARIED} for values in own.values()):
        return None
    if family.experts is not None and not config.get(str(family.experts.only_if)):
        family = replace(family, experts=None)
    first = count - _at_least(config, str(family.shared_keys), 0)
    sees_all = [window is None for window in windows]
    if set(sees_all[max(first, 0) :]) - set(sees_all[: max(first, 0)]):
        raise ValueError(f"{family.shared_keys} leaves no layer of a kind that makes keys")
    attentions = []
    for at, window in enumerate(windows):
        kv_heads, head_dim = (_whole(own.get(at, {}), key, getattr(shape, name)) for key, name in _VARIED)
        if heads % kv_heads:
            raise ValueError(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
        one = config.get("attention_k_eq_v") and window is None
        keys: Literal["own", "one", "shared"] = "shared" if at >= first else "one" if one else "own"
        attentions.append(Attention(heads, kv_heads, head_dim, window, head_dim, keys=keys))
    inputs = 0 if family.layer_input is None else _at_least(config, family.layer_input, 0)
    return replace(
        shape,
        family=family,
        intermediate_size=_whole(config, "intermediate_size"),
        layers=tuple(_varied_layer(config, family, each, inputs) for each in attentions),
        layer_input=LayerTable(_whole(config, "vocab_size_per_layer_input", 262_144), inputs) if inputs else None,
    )


def _own_heads(config: Config, windows: tuple[int | None, ...]) -> dict[int, Mapping[str, Any]]:
    """Heads of single layers by the config: as transformers writes it, or as it is released."""
    stated = config.get("per_layer_config")
    if isinstance(stated, Mapping):
        if not all(isinstance(values, Mapping) for values in stated.values()):
            raise ValueError("per_layer_config holds something else than settings of layers")
        return {int(at): values for at, values in stated.items()}
    values = {"head_dim": config.get("global_head_dim") or 512}
    if config.get("attention_k_eq_v") and config.get("num_global_key_value_heads"):
        values["num_key_value_heads"] = config["num_global_key_value_heads"]
    return {at: values for at, window in enumerate(windows) if window is None}


def _varied_layer(config: Config, family: Family, attention: Attention, inputs: int) -> Layer:
    """A layer with this attention, and an input of its own of so many features; 0: it has none."""
    hidden, inner = _whole(config, "hidden_size"), _whole(config, "intermediate_size")
    if attention.keys == "shared" and config.get("use_double_wide_mlp"):
        inner *= 2
    groups = family.groups._replace(qkv=family.groups.qkv[: {"own": 3, "one": 2, "shared": 1}[attention.keys]])
    if not inputs:
        groups = groups._replace(input_gate=(), input_projection=())
    linears = _linears(config, family, (hidden, inner, attention.width, attention.key_width), groups, None, inputs)
    beside = _norm_parameters(family, hidden, inner, parallel=False) + (hidden if inputs else 0)
    beside += attention.head_dim * (1 if attention.keys == "shared" else 2)
    if family.experts is not None:
        mixture = _Mixture.of(config, family.experts, hidden)
        linears += mixture.stacks
        beside += mixture.router_parameters
    return Layer(attention, inner, linears, groups, beside)


#: The config's names of what layers of one model may differ in, and ours.
_VARIED = (("num_key_value_heads", "num_kv_heads"), ("head_dim", "head_dim"))


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
    """The part of a head that is rotated. Raises ValueError for what is no part."""
    inner = [config.get(key) for key in ("rope_parameters", "rope_scaling")]
    stated = [each.get("partial_rotary_factor") for each in inner if isinstance(each, Mapping)]
    stated += [config.get("partial_rotary_factor", config.get("rope_pct"))]
    share = next((each for each in stated if isinstance(each, int | float)), family.rotary_share)
    if not 0 <= share <= 1:
        raise ValueError(f"partial_rotary_factor {share} is no part of a head")
    return float(share)


def _stated(config: Config, asked: bool | str) -> bool:
    """A value that the family fixes, or that the config has under this name."""
    return bool(config.get(asked)) if isinstance(asked, str) else asked


def _norm_parameters(family: Family, hidden: int, inner: int, *, parallel: bool) -> int:
    """Elements of the norms of a layer, but those of queries and keys, and of its activation."""
    count = len((PARALLEL if parallel else family.norms).names)
    total = count * hidden * (2 if family.norm_bias else 1)
    return total + family.activation_parameters + (hidden + inner if family.sub_norms else 0)


def _head_norm_parameters(family: Family, heads: int, kv_heads: int, head_dim: int) -> int:
    """Elements of the norms of queries and keys."""
    if family.head_norm is None or not family.head_norm.weights:
        return 0
    return head_dim * (heads + kv_heads if family.head_norm.span == "width" else 2)


def _delta_nets(config: Config, family: Family, count: int) -> tuple[DeltaNet | None, ...]:
    """The delta net of each layer; None of one that attends."""
    if family.delta_nets is None:
        return (None,) * count
    sizes = [_whole(config, key, default) for key, default in family.delta_nets.defaults]
    net = DeltaNet(*sizes)
    if net.value_heads % net.key_heads:
        said = f"linear_num_value_heads {net.value_heads} is not a multiple of linear_num_key_heads {net.key_heads}"
        raise ValueError(said)
    if isinstance(types := config.get("layer_types"), list):
        return tuple(net if kind == "linear_attention" else None for kind in types[:count])
    every = _whole(config, "full_attention_interval", family.delta_nets.attention_every)
    return tuple(net if (at + 1) % every else None for at in range(count))


def _latent(config: Config, latents: Latents, heads: int) -> LatentAttention:
    """The latent attention of each layer."""
    rotated, plain = _whole(config, "qk_rope_head_dim"), _whole(config, "qk_nope_head_dim")
    q_rank = config.get("q_lora_rank") if "q_lora_rank" in config else latents.q_rank
    return LatentAttention(
        heads,
        heads,
        plain + rotated,
        None,
        rotated,
        None if q_rank is None else _whole({"q_lora_rank": q_rank}, "q_lora_rank"),
        _whole(config, "kv_lora_rank"),
        _whole(config, "v_head_dim"),
    )


class _Mixture(NamedTuple):
    """The experts of a layer: their stacks, the width of the shared one (0: there is none), and the elements of what
    chooses among them, and of norms of theirs.
    """

    stacks: tuple[Linear, Linear]
    shared_width: int
    router_parameters: int

    @classmethod
    def of(cls, config: Config, experts: Experts, hidden: int) -> _Mixture:
        """By the config's sizes. Raises ValueError where a token would go to more experts than there are."""
        name = next((key for key in experts.count if config.get(key) is not None), experts.count[0])
        count, used = _whole(config, name), _whole(config, experts.used)
        width = _whole(config, experts.width)
        if not 1 <= used <= count or count < 2:
            raise ValueError(f"{experts.used} {used} does not fit {name} {count}")
        first, last = experts.stacks
        stacks = (
            Linear(first, hidden, 2 * width, experts.biases, count, used),
            Linear(last, width, hidden, experts.biases, count, used),
        )
        shared = 0
        if experts.shared_width is not None:
            shared = _whole(config, experts.shared_width)
        elif experts.shared_count is not None:
            shared = width * _at_least(config, experts.shared_count, 0)
        gate = (hidden if experts.shared_gate is not None else 0) + (count if experts.choice_bias else 0)
        if experts.beside_mlp is not None:  # norms, and the router's scales of features and of experts
            gate = (len(experts.beside_mlp) + 1) * hidden + count
        return cls(stacks, shared, count * (hidden + experts.biases) + gate)


def _sparse(config: Config, family: Family, count: int) -> tuple[bool, ...]:
    """For each layer, whether its MLP is a mixture of experts."""
    experts = family.experts
    if experts is None:
        return (False,) * count
    if experts.dense == "none":
        return (True,) * count
    if experts.dense in ("mlp_layer_types", "types_or_first"):
        types = config.get("mlp_layer_types")
        alone = ["dense"] if experts.dense == "types_or_first" else []
        listed = types if isinstance(types, list) else [*alone, *["sparse"] * (count - len(alone))]
        if len(listed) < count:
            raise ValueError(f"mlp_layer_types names {len(listed)} layers, and num_hidden_layers is {count}")
        return tuple(kind == "sparse" for kind in listed[:count])
    if experts.dense == "first":
        first = _at_least(config, "first_k_dense_replace", 1)
        return tuple(at >= first for at in range(count))
    if experts.dense == "outside":
        first, step = _at_least(config, "moe_layer_start_index", 1), _whole(config, "moe_layer_interval", 1)
        last = config.get("moe_layer_end_index", -1)
        last = count - 1 if last in (None, -1) else int(last)
        return tuple(first <= at <= last and (at + 1) % step == 0 for at in range(count))
    dense, step = config.get("mlp_only_layers"), _whole(config, "decoder_sparse_step", 1)
    left = dense if isinstance(dense, list) else []
    return tuple(at not in left and (at + 1) % step == 0 for at in range(count))


#: Paths of linears that share an input, its features, theirs, and whether they have biases.
_Linears: TypeAlias = tuple[tuple[str, ...], int, tuple[int, ...], bool]


def _linears(
    config: Config,
    family: Family,
    widths: tuple[int, int, int, int],
    groups: Groups,
    own: DeltaNet | LatentAttention | None,
    inputs: int = 0,
) -> tuple[Linear, ...]:
    """The linears of ``groups``. ``widths``: of the residual stream, the MLP, all query heads, and all key heads.
    ``own``: the mixer, where it is no plain attention; ``inputs``: features of a layer's own input.
    """
    hidden, inner, q, kv = widths
    biases = [_stated(config, each) for each in (family.qkv_bias, family.o_bias, family.mlp_bias)]
    first = (2 * inner,) if "gate_up" in family.joined else (inner,) * len(groups.gate_up)
    entering: tuple[int, ...] = (q + 2 * kv,) if "qkv" in family.joined else (q, kv, kv)
    if "q_gate" in family.joined:
        entering = (2 * q, kv, kv)
    if isinstance(own, DeltaNet):
        biases[:2] = False, False
        entering, q = (own.channels, own.width, own.value_heads, own.value_heads), own.width
    first_ones: list[_Linears] = [(groups.qkv, hidden, entering[: len(groups.qkv)], biases[0])]
    if isinstance(own, LatentAttention):
        first_ones, q = _latent_linears(own, hidden, groups, bias=biases[0]), own.output_width
    sizes: list[_Linears] = [
        *first_ones,
        (groups.o, q, (hidden,), biases[1]),
        (groups.gate_up, hidden, first[: len(groups.gate_up)], biases[2]),
        (groups.down, inner, (hidden,) * len(groups.down), biases[2]),
        (groups.gate, hidden, (q,) * len(groups.gate), False),
        (groups.input_gate, hidden, (inputs,) * len(groups.input_gate), False),
        (groups.input_projection, inputs, (hidden,) * len(groups.input_projection), False),
    ]
    return tuple(
        Linear(name, width, out, bias)
        for names, width, outs, bias in sizes
        for name, out in zip(names, outs, strict=True)
    )


def _latent_linears(latent: LatentAttention, hidden: int, groups: Groups, *, bias: bool) -> list[_Linears]:
    """Those in front of attention; what makes queries or keys and values of their latents, or of no latent, has no
    bias.
    """
    q, kv = latent.entering
    return [
        (groups.qkv[:1], hidden, (q,), bias and latent.q_rank is not None),
        (groups.qkv[1:], hidden, (kv,), bias),
        (groups.queries, latent.q_rank or 0, (latent.width,) * len(groups.queries), False),
        (groups.keys_values, latent.kv_rank, (latent.expanded,), False),
    ]


#: Of any size: far from what no float can be.
_MOST = 1 << 40
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
    if value > _MOST:
        raise ValueError(f"{key} has {value.bit_length()} bits, more than any model has")
    return value
