"""How a family of models is built, as a value: norms, mixers, experts, the linears of a layer.

:mod:`ftcli.tables.families` has a row of these for each ``model_type``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias


@dataclass(frozen=True, slots=True)
class Norms:
    """Norms of width hidden_size in a layer, by module name: before and after each half. None: there is none.

    Without ``before_mlp`` the MLP reads the residual stream itself, or, where the halves are parallel, what attention
    reads.
    """

    before_attention: str | None = "input_layernorm"
    after_attention: str | None = None
    before_mlp: str | None = "post_attention_layernorm"
    after_mlp: str | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Those that there are, in order."""
        found = (self.before_attention, self.after_attention, self.before_mlp, self.after_mlp)
        return tuple(name for name in found if name is not None)


PRE = Norms()
SANDWICH = Norms(
    "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"
)
POST = Norms(None, "post_attention_layernorm", None, "post_feedforward_layernorm")
PARALLEL = Norms("input_layernorm", None, None, None)


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """Norms of queries and keys: their module names in the attention, and their form.

    Attributes:
        span: ``head``: over head_dim, head by head. ``width``: over all heads at once.
        weights: False: nothing is multiplied.
        after_rotation: They come after the rotary embedding.
        only_if: The config's key without which there are none.
    """

    q: str = "q_norm"
    k: str = "k_norm"
    span: Literal["head", "width"] = "head"
    weights: bool = True
    after_rotation: bool = False
    only_if: str | None = None


@dataclass(frozen=True, slots=True)
class DeltaNets:
    """Layers whose mixer is a gated delta net (arXiv 2412.06464), beside those that attend.

    Attributes:
        entering: Its linears that read the layer's input: queries, keys and values together; the output's gate; write
            strength; decay.
        attention_every: Where the config has no ``layer_types``: every n-th layer attends, n being
            ``full_attention_interval`` where the config has it.
        defaults: The config's sizes where it does not say: key heads, value heads, their features, and the filter's.
    """

    module: str
    entering: tuple[str, str, str, str]
    leaving: str
    attention_every: int
    defaults: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class Latents:
    """Multi-head latent attention (arXiv 2405.04434): a token's keys and values are made of one latent vector of few
    features and of a rotated key that all heads share; its queries of another latent, or of the input itself.

    Modules have the names that DeepSeek gave them. The config's ``rope_interleave`` says which features turn together.
    ``q_rank``: features of the queries' latent where the config has no ``q_lora_rank``. None: there is no such latent.
    """

    q_rank: int | None


@dataclass(frozen=True, slots=True)
class Experts:
    """Layers whose MLP is a mixture of experts, each a gated unit, of which a router chooses some for a token.

    transformers' own router is asked, so that every kind of it is right; the experts are stacks ``gate_up_proj``
    (E, 2F, H) and ``down_proj`` (E, H, F) in ``experts`` of the block, with biases ``gate_up_proj_bias`` (E, 2F) and
    ``down_proj_bias`` (E, H) or none.

    Attributes:
        shared: The name there of an expert that every token goes to.
        shared_gate: That of its own gate, a linear with one output whose sigmoid multiplies it.
        count, used, width: The config's names of the number of experts (the first that it has), of those of a token,
            and of the features of each.
        shared_width, shared_count: Those of the features of the shared expert, or of how many times it is as wide as
            one of the others.
        dense: Which layers have one MLP instead: those that the config lists in ``mlp_only_layers`` and those that
            ``decoder_sparse_step`` leaves out (``listed``), by ``mlp_layer_types``, those or without the key the first
            one (``types_or_first``), the ``first_k_dense_replace`` first ones (``first``), or all but every
            ``moe_layer_interval``-th from ``moe_layer_start_index`` to ``moe_layer_end_index`` (``outside``).
        choice_bias: The router has a bias for the choice among its parameters, one number an expert.
        cast_bytes: Bytes of each number of its input that the router casts, and keeps where it is trained, unless all
            is in float32. 0: it reads it as it is.
        balanced: transformers has an auxiliary loss for its routers.
        takes_names: PEFT takes the names of dense layers' linears for those of experts, and adapts them as parameters:
            where they are quantized they have no adapter.
        only_if: The config's key without which no layer has experts.
        beside_mlp: The block is the layer itself: the mixture reads the residual stream, beside the MLP that every
            token goes to. These are the norms behind that, before the experts, and behind them; both are added, and
            normalised again.
        transposed: The stacks are (E, H, 2F) and (E, F, H).
        interleaved: Gate and up take turns in the first stack's features, and are not one behind the other.
        clamped: The unit is gpt-oss's (``ftkernels.primitives.gated_unit``), whatever the config calls the activation.
    """

    block: str = "mlp"
    router: str = "gate"
    shared: str | None = None
    shared_gate: str | None = None
    count: tuple[str, ...] = ("num_experts", "num_local_experts")
    used: str = "num_experts_per_tok"
    width: str = "moe_intermediate_size"
    shared_width: str | None = None
    shared_count: str | None = None
    dense: Literal["none", "listed", "mlp_layer_types", "types_or_first", "first", "outside"] = "none"
    choice_bias: bool = False
    cast_bytes: int = 0
    balanced: bool = True
    takes_names: bool = False
    biases: bool = False
    transposed: bool = False
    interleaved: bool = False
    clamped: bool = False
    only_if: str | None = None
    beside_mlp: tuple[str, str, str] | None = None

    def path(self, name: str) -> str:
        """The path in a layer of a part of the block."""
        return f"{self.block}.{name}" if self.block else name

    @property
    def stacks(self) -> tuple[str, str]:
        """Paths of both stacks in a layer."""
        return self.path("experts.gate_up_proj"), self.path("experts.down_proj")


#: Whether linears have a bias: always, never, or as the config says under this name.
Bias: TypeAlias = bool | str


@dataclass(frozen=True, slots=True)
class Family:
    """The architecture of one ``model_type``.

    Attributes:
        norm: Their form. ``gemma`` multiplies by (1 + weight) in float32 before it casts back, ``plain`` by the weight,
            ``llama`` casts first; all are RMSNorms. ``layer`` is LayerNorm.
        final_norm: The form of the norm at the model's end where that is another.
        norm_bias: The norms, that of the model's end included, have a bias.
        parallel: Both halves of a layer read the same and are added at once: always, never, or as the config says.
        sub_norms: BitNet's two further norms, of width hidden_size and intermediate_size.
        joined: Which projections are one linear layer: q, k and v; gate and up; or each head's query and then the gate
            of its output, in q_proj.
        mlp: Names of the MLP's linears: gate, up and down; or two, with an activation between them.
        output_gate: The linear whose sigmoid multiplies attention's output, by its name in the attention.
        kernels: What ftcli's kernels stand in for: whole layers, or nothing.
        qkv_bias, o_bias, mlp_bias: Which linears have biases.
        head_dim: Features of a head where the config does not say; None: hidden_size over heads.
        activation_parameters: Elements that the activation itself has in each layer.
        attention_softcap, final_softcap: Caps on scores and logits where the config does not say.
        window: The sliding window where the config does not say; a config may say that there is none.
        full_attention_every: Where the config has a sliding window and no ``layer_types``: every n-th layer sees
            everything, n being ``sliding_window_pattern`` where the config has it; below 0 they are counted back from
            the last. None: every layer has the window.
        windows_from: The config's name of the number of first layers that see everything.
        sinks: Attention has a learned score for each query head, ``sinks``, beside those of the keys.
        window_on_config: transformers' attention modules do not hold their window; it is read from the config.
        rotary: Features that turn together: those of the two halves of a head, or neighbours (``pairs``).
        rotary_share: The part of a head that is rotated, its first features, where the config does not say.
        repeated_angles: transformers hands over the angles of pairs, and not of halves.
        single_angles: transformers hands over each angle once, and not for both features that it turns.
        complex_angles: And as a complex number.
        unrotated: Layers without rotation: those that the config lists (``no_rope_layers``, ``layer_rope_theta``), or
            those without a window in a model that has one (``global``).
        scaled_by_position: Queries are multiplied by a function of their position (``llama_4_scaling_beta``).
        residual_multiplier: The config's name of the factor of each half's output before it is added.
        query_multiplier: The attention's name of what queries are multiplied by behind their norm.
        value_norm: The attention's name of the norm of values, head by head and without weights.
        global_heads: Layers without a window have heads of another size and number (``per_layer_config``, or
            ``global_head_dim`` and ``num_global_key_value_heads``), and under ``attention_k_eq_v`` values that are what
            k_proj gives.
        shared_keys: The config's name of the number of last layers that take keys and values of the last layer of their
            kind before them. Under ``use_double_wide_mlp`` their MLP is twice as wide.
        layer_input: The config's name of the features of a token that each layer has a table of its own for.
        layer_scalar: The name of the number in a layer that multiplies what it gives.
        attention_alone: transformers' layers hand attention no further arguments: documents and pages of a cache reach
            attention in ftcli's layers only.
        four_positions: Positions are given four times, for text and for time, height and width of images. Given once,
            they say nothing of documents.
        not_with: Keys of the config that, where they are true, make layers that are not described here.
        only_with: Keys of the config with the only value that is described here.
        defaults: What transformers takes for values that released config.json files leave out.
    """

    norms: Norms = PRE
    norm: Literal["llama", "gemma", "plain", "layer"] = "llama"
    final_norm: Literal["plain"] | None = None
    norm_bias: bool = False
    parallel: bool | str = False
    head_norm: HeadNorms | None = None
    sub_norms: bool = False
    joined: tuple[Literal["qkv", "gate_up", "q_gate"], ...] = ()
    mlp: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
    output_gate: str | None = None
    delta_nets: DeltaNets | None = None
    latents: Latents | None = None
    experts: Experts | None = None
    kernels: Literal["layers", "none"] = "layers"
    qkv_bias: Bias = False
    o_bias: Bias = False
    mlp_bias: Bias = False
    tied: bool = False
    head_dim: int | None = None
    activation: str = "silu"
    activation_parameters: int = 0
    attention_softcap: float | None = None
    final_softcap: float | None = None
    window: int | None = None
    full_attention_every: int | None = None
    windows_from: str | None = None
    window_on_config: bool = False
    sinks: bool = False
    rotary: Literal["halves", "pairs"] = "halves"
    rotary_share: float = 1.0
    repeated_angles: bool = False
    single_angles: bool = False
    complex_angles: bool = False
    unrotated: Literal["no_rope_layers", "layer_rope_theta", "global"] | None = None
    scaled_by_position: bool = False
    residual_multiplier: str | None = None
    query_multiplier: str | None = None
    value_norm: str | None = None
    global_heads: bool = False
    shared_keys: str | None = None
    layer_input: str | None = None
    layer_scalar: str | None = None
    attention_alone: bool = False
    four_positions: bool = False
    not_with: tuple[str, ...] = ()
    only_with: tuple[tuple[str, float], ...] = ()
    defaults: tuple[tuple[str, float | bool], ...] = ()

    @property
    def closes(self) -> bool:
        """True if the output of each half is normalised before it is added."""
        return self.norms.after_mlp is not None

    @property
    def groups(self) -> Groups:
        """Linears of a layer on the kernels."""
        attention = ("q_proj", "k_proj", "v_proj") if "qkv" not in self.joined else ("qkv_proj",)
        *first, last = self.mlp
        if "gate_up" in self.joined:
            first = ["gate_up_proj"]
        return Groups(
            qkv=tuple(f"self_attn.{name}" for name in attention),
            o=("self_attn.o_proj",),
            gate_up=tuple(f"mlp.{name}" for name in first),
            down=(f"mlp.{last}",),
            gate=() if self.output_gate is None else (f"self_attn.{self.output_gate}",),
            input_gate=() if self.layer_input is None else (LAYER_INPUT.gate,),
            input_projection=() if self.layer_input is None else (LAYER_INPUT.projection,),
        )

    @property
    def delta_groups(self) -> Groups:
        """Linears of a layer on the kernels whose mixer is a delta net."""
        nets, others = self.delta_nets, self.groups
        if nets is None:
            raise ValueError("this family has no delta nets")
        entering = tuple(f"{nets.module}.{name}" for name in nets.entering)
        return Groups(entering, (f"{nets.module}.{nets.leaving}",), others.gate_up, others.down)

    def latent_groups(self, *, compressed: bool) -> Groups:
        """Linears of a layer on the kernels with latent attention; ``compressed``: queries come from a latent, too."""
        others, first = self.groups, ("q_a_proj" if compressed else "q_proj", "kv_a_proj_with_mqa")
        return others._replace(
            qkv=tuple(f"self_attn.{name}" for name in first),
            queries=("self_attn.q_b_proj",) if compressed else (),
            keys_values=("self_attn.kv_b_proj",),
        )

    def with_experts(self, groups: Groups) -> Groups:
        """A layer's linears where its MLP is a mixture: of what is no expert of a router, the shared one alone."""
        experts = self.experts
        if experts is None or experts.shared is None:
            return groups._replace(gate_up=(), down=())
        inside = experts.path(experts.shared)
        *first, last = (f"{inside}.{name}" for name in self.mlp)
        return groups._replace(gate_up=tuple(first), down=(last,))

    @property
    def gates_output(self) -> bool:
        """True if attention's output is multiplied by a sigmoid of its own."""
        return self.output_gate is not None or "q_gate" in self.joined

    @property
    def mlp_from_stream(self) -> bool:
        """True if the gated unit's kernels read the residual stream and apply the norm, if any: they compute their half
        again from that. An MLP behind a LayerNorm, or without a gate, is checkpointed as any other code is.
        """
        return self.norm != "layer" and len(self.mlp) == 3

    @property
    def has_windows(self) -> bool:
        """True if transformers' layers of this family read a sliding window from the config; others ignore the key."""
        some = (self.window, self.full_attention_every, self.windows_from, self.window_on_config or None)
        return any(each is not None for each in some) or self.unrotated == "no_rope_layers"

    @property
    def half_inputs(self) -> int:
        """Tensors of the residual stream that the halves of a layer are run again from: the input of each, and where
        the MLP's output is normalised that one too. Parallel halves are run again together.
        """
        return 3 if self.closes and self.mlp_from_stream else 2


class Groups(NamedTuple):
    """Linears of a layer that read the same input, by their paths in the layer: q, k and v; o; gate and up; down; and,
    which most families have not, the gate of attention's output, and both linears of a layer's own input. Of a delta
    net what enters it, and what is behind it, stand for the first two. Of latent attention what makes the latents
    stands for the first, and each latent is the input of a group of its own.
    """

    qkv: tuple[str, ...]
    o: tuple[str, ...]
    gate_up: tuple[str, ...]
    down: tuple[str, ...]
    gate: tuple[str, ...] = ()
    input_gate: tuple[str, ...] = ()
    input_projection: tuple[str, ...] = ()
    queries: tuple[str, ...] = ()
    keys_values: tuple[str, ...] = ()


class LayerInput(NamedTuple):
    """Names of what a layer does with its own input: ``norm(projection(act(gate(h)) * input))`` is added to h. And in
    the model the table of it, and what is added to that of the hidden states: a linear and a norm.
    """

    gate: str = "per_layer_input_gate"
    projection: str = "per_layer_projection"
    norm: str = "post_per_layer_input_norm"
    table: str = "embed_tokens_per_layer"
    from_hidden: tuple[str, str] = ("per_layer_model_projection", "per_layer_projection_norm")


LAYER_INPUT = LayerInput()
