"""Model families: one row a ``model_type``, with all that the program knows of how it is built.

The memory estimate, the rules about layers and the kernels read the same row. A ``model_type`` without a row still
trains, on transformers' own layers; the checks that need the row are reported as not made.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
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
    """

    q: str = "q_norm"
    k: str = "k_norm"
    span: Literal["head", "width"] = "head"
    weights: bool = True
    after_rotation: bool = False


@dataclass(frozen=True, slots=True)
class DeltaNets:
    """Layers whose mixer is a gated delta net (arXiv 2412.06464), beside those that attend.

    Attributes:
        module: The mixer's name in a layer.
        entering: Its linears that read the layer's input: queries, keys and values together; the output's gate; write
            strength; decay.
        leaving: The linear behind it.
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

    Attributes:
        q_rank: Features of the queries' latent where the config has no ``q_lora_rank``. None: there is no such latent.
    """

    q_rank: int | None


@dataclass(frozen=True, slots=True)
class Experts:
    """Layers whose MLP is a mixture of experts, each a gated unit, of which a router chooses some for a token.

    transformers' own router is asked, so that every kind of it is right; the experts are stacks ``gate_up_proj``
    (E, 2F, H) and ``down_proj`` (E, H, F) in ``experts`` of the block, with biases ``gate_up_proj_bias`` (E, 2F) and
    ``down_proj_bias`` (E, H) or none.

    Attributes:
        block: The mixture's name in a layer.
        router: The router's name in the block.
        shared: The name there of an expert that every token goes to.
        shared_gate: That of its own gate, a linear with one output whose sigmoid multiplies it.
        count, used, width: The config's names of the number of experts (the first that it has), of those of a token,
            and of the features of each.
        shared_width, shared_count: Those of the features of the shared expert, or of how many times it is as wide as
            one of the others.
        dense: Which layers have one MLP instead: those that the config lists in ``mlp_only_layers`` and those that
            ``decoder_sparse_step`` leaves out (``listed``), by ``mlp_layer_types``, those or without the key the first
            one (``types_or_first``), or the ``first_k_dense_replace`` first ones (``first``).
        takes_names: PEFT takes the names of dense layers' linears for those of experts, and adapts them as parameters:
            where they are quantized they have no adapter.
        only_if: The config's key without which no layer has experts.
        beside_mlp: The block is the layer itself: the mixture reads the residual stream, beside the MLP that every
            token goes to. These are the norms behind that, before the experts, and behind them; both are added, and
            normalised again.
        biases: Experts and router have biases.
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
    dense: Literal["none", "listed", "mlp_layer_types", "types_or_first", "first"] = "none"
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
        norms: Where a layer has norms.
        norm: Their form. ``gemma`` multiplies by (1 + weight) in float32 before it casts back, ``plain`` by the weight,
            ``llama`` casts first; all are RMSNorms. ``layer`` is LayerNorm.
        final_norm: The form of the norm at the model's end where that is another.
        norm_bias: The norms, that of the model's end included, have a bias.
        parallel: Both halves of a layer read the same and are added at once: always, never, or as the config says.
        head_norm: Norms of queries and keys.
        sub_norms: BitNet's two further norms, of width hidden_size and intermediate_size.
        joined: Which projections are one linear layer: q, k and v; gate and up; or each head's query and then the gate
            of its output, in q_proj.
        mlp: Names of the MLP's linears: gate, up and down; or two, with an activation between them.
        output_gate: The linear whose sigmoid multiplies attention's output, by its name in the attention.
        delta_nets: The layers that do not attend.
        latents: Attention makes keys and values of latent vectors.
        experts: The layers whose MLP is a mixture of experts.
        kernels: What ftcli's kernels stand in for: whole layers, or nothing.
        qkv_bias, o_bias, mlp_bias: Which linears have biases.
        tied: Whether embedding and head are one matrix where the config does not say.
        head_dim: Features of a head where the config does not say; None: hidden_size over heads.
        activation: transformers' name of the MLP's activation where the config does not say.
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


def _sizes(experts: int, used: int, width: int | None = None) -> tuple[tuple[str, float | bool], ...]:
    """transformers' defaults of the number of experts, of those of a token, and of the features of each."""
    found = (("num_local_experts", experts), ("num_experts_per_tok", used))
    return found if width is None else (*found, ("moe_intermediate_size", width))


_GEMMA = "gelu_pytorch_tanh"
_BY_HEAD = HeadNorms()
_ATTENTION_BIAS = "attention_bias"

_GEMMA4 = Family(
    SANDWICH,
    "plain",
    head_norm=_BY_HEAD,
    value_norm="v_norm",
    global_heads=True,
    shared_keys="num_kv_shared_layers",
    layer_scalar="layer_scalar",
    qkv_bias=_ATTENTION_BIAS,
    o_bias=_ATTENTION_BIAS,
    tied=True,
    head_dim=256,
    activation=_GEMMA,
    window=1024,
    full_attention_every=6,
    defaults=(
        ("vocab_size", 262_144),
        ("num_attention_heads", 8),
        ("num_key_value_heads", 4),
        ("max_position_embeddings", 131_072),
    ),
)
#: transformers' defaults, of every family with latent attention.
_LATENT_SIZES = (("kv_lora_rank", 512), ("qk_rope_head_dim", 64))
#: Experts beside shared ones, behind a few dense layers.
_BESIDE_SHARED = Experts(
    shared="shared_experts",
    count=("n_routed_experts", "num_local_experts"),
    shared_count="n_shared_experts",
    dense="first",
    takes_names=True,
)

_QWEN_NETS = DeltaNets(
    module="linear_attn",
    entering=("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),
    leaving="out_proj",
    attention_every=4,
    defaults=(
        ("linear_num_key_heads", 16),
        ("linear_num_value_heads", 32),
        ("linear_key_head_dim", 128),
        ("linear_value_head_dim", 128),
        ("linear_conv_kernel_dim", 4),
    ),
)

TABLE: Mapping[str, Family] = MappingProxyType(
    {
        "llama": Family(qkv_bias=_ATTENTION_BIAS, o_bias=_ATTENTION_BIAS, mlp_bias="mlp_bias"),
        "mistral": Family(window=4096, window_on_config=True),
        "qwen2": Family(qkv_bias=True, windows_from="max_window_layers"),
        "qwen3": Family(
            qkv_bias=_ATTENTION_BIAS,
            o_bias=_ATTENTION_BIAS,
            head_norm=_BY_HEAD,
            head_dim=128,
            windows_from="max_window_layers",
        ),
        "qwen3_moe": Family(
            experts=Experts(dense="listed"),
            qkv_bias=_ATTENTION_BIAS,
            o_bias=_ATTENTION_BIAS,
            head_norm=_BY_HEAD,
            window=4096,
            defaults=(("use_sliding_window", False), ("num_key_value_heads", 4), *_sizes(128, 8, 768)),
        ),
        "qwen2_moe": Family(
            experts=Experts(
                shared="shared_expert",
                shared_gate="shared_expert_gate",
                shared_width="shared_expert_intermediate_size",
                dense="listed",
            ),
            qkv_bias="qkv_bias",
            not_with=("use_sliding_window",),
            defaults=(
                ("qkv_bias", True),
                ("shared_expert_intermediate_size", 5632),
                *_sizes(60, 4, 1408),
            ),
        ),
        "qwen3_vl_moe_text": Family(
            experts=Experts(dense="listed"),
            qkv_bias=_ATTENTION_BIAS,
            o_bias=_ATTENTION_BIAS,
            head_norm=_BY_HEAD,
            four_positions=True,
            defaults=_sizes(60, 4, 1408),
        ),
        "glm4_moe": Family(
            experts=_BESIDE_SHARED,
            qkv_bias=_ATTENTION_BIAS,
            rotary_share=0.5,
            not_with=("use_qk_norm",),
            defaults=(("n_shared_experts", 1), ("first_k_dense_replace", 1), *_sizes(128, 8, 1408)),
        ),
        "glm4_moe_lite": Family(
            latents=Latents(q_rank=768),
            experts=replace(_BESIDE_SHARED, dense="types_or_first"),
            qkv_bias=_ATTENTION_BIAS,
            o_bias=_ATTENTION_BIAS,
            rotary="pairs",
            defaults=(
                ("n_shared_experts", 1),
                *_LATENT_SIZES,
                ("qk_nope_head_dim", 192),
                ("v_head_dim", 256),
                *_sizes(64, 4, 1536),
            ),
        ),
        "deepseek_v3": Family(  # Moonlight and Kanana-2 are of this type, too
            latents=Latents(q_rank=1536),
            experts=_BESIDE_SHARED,
            qkv_bias=_ATTENTION_BIAS,
            o_bias=_ATTENTION_BIAS,
            rotary="pairs",
            defaults=(
                ("n_shared_experts", 1),
                ("first_k_dense_replace", 3),
                *_LATENT_SIZES,
                ("qk_nope_head_dim", 128),
                ("v_head_dim", 128),
                *_sizes(256, 8, 2048),
            ),
        ),
        "youtu": Family(
            latents=Latents(q_rank=1536),
            qkv_bias=_ATTENTION_BIAS,
            o_bias=_ATTENTION_BIAS,
            rotary="pairs",
            tied=True,
            defaults=(*_LATENT_SIZES, ("qk_nope_head_dim", 128), ("v_head_dim", 128)),
        ),
        "mixtral": Family(
            experts=Experts(width="intermediate_size"),
            window_on_config=True,
            not_with=("router_jitter_noise",),
            defaults=_sizes(8, 2),
        ),
        "olmoe": Family(
            experts=Experts(width="intermediate_size"),
            head_norm=HeadNorms(span="width"),
            qkv_bias=_ATTENTION_BIAS,
            o_bias=_ATTENTION_BIAS,
            not_with=("clip_qkv",),
            defaults=_sizes(64, 8),
        ),
        "granitemoe": Family(
            experts=Experts("block_sparse_moe", "router", width="intermediate_size"),
            qkv_bias=_ATTENTION_BIAS,
            o_bias=_ATTENTION_BIAS,
            residual_multiplier="residual_multiplier",
            defaults=_sizes(8, 2),
        ),
        "mellum": Family(
            experts=Experts(dense="mlp_layer_types"),
            head_norm=_BY_HEAD,
            head_dim=128,
            qkv_bias=_ATTENTION_BIAS,
            o_bias=_ATTENTION_BIAS,
            window=1024,
            full_attention_every=1,  # without layer_types no layer has the window
            defaults=_sizes(64, 8, 896),
        ),
        "gpt_oss": Family(
            norm="plain",
            experts=Experts(
                router="router",
                width="intermediate_size",
                biases=True,
                transposed=True,
                interleaved=True,
                clamped=True,
            ),
            qkv_bias=_ATTENTION_BIAS,
            o_bias=_ATTENTION_BIAS,
            head_dim=64,
            window=128,
            full_attention_every=2,
            sinks=True,
            single_angles=True,
            only_with=(("swiglu_alpha", 1.702), ("swiglu_limit", 7.0)),
            defaults=((_ATTENTION_BIAS, True), *_sizes(128, 4)),
        ),
        "gemma": Family(
            norm="gemma",
            qkv_bias=_ATTENTION_BIAS,
            o_bias=_ATTENTION_BIAS,
            tied=True,
            head_dim=256,
            activation=_GEMMA,
        ),
        "gemma2": Family(
            SANDWICH,
            "gemma",
            qkv_bias=_ATTENTION_BIAS,
            o_bias=_ATTENTION_BIAS,
            tied=True,
            head_dim=256,
            activation=_GEMMA,
            attention_softcap=50.0,
            final_softcap=30.0,
            window=4096,
            full_attention_every=2,
        ),
        "gemma3_text": Family(
            SANDWICH,
            "gemma",
            head_norm=_BY_HEAD,
            qkv_bias=_ATTENTION_BIAS,
            o_bias=_ATTENTION_BIAS,
            tied=True,
            head_dim=256,
            activation=_GEMMA,
            full_attention_every=6,
            defaults=(
                ("vocab_size", 262_208),
                ("num_attention_heads", 8),
                ("num_key_value_heads", 4),
                ("max_position_embeddings", 131_072),
            ),
            window=4096,
        ),
        "gemma4_text": replace(
            _GEMMA4,
            layer_input="hidden_size_per_layer_input",
            window=512,
            experts=Experts(
                block="",
                router="router",
                used="top_k_experts",
                only_if="enable_moe_block",
                beside_mlp=(
                    "post_feedforward_layernorm_1",
                    "pre_feedforward_layernorm_2",
                    "post_feedforward_layernorm_2",
                ),
            ),
            defaults=(*_GEMMA4.defaults, ("hidden_size_per_layer_input", 256)),
        ),
        # The language models of multimodal checkpoints.
        "gemma4_unified_text": _GEMMA4,
        "qwen2_vl_text": Family(qkv_bias=True, four_positions=True, windows_from="max_window_layers"),
        "qwen2_5_vl_text": Family(qkv_bias=True, four_positions=True, windows_from="max_window_layers"),
        "qwen3_vl_text": Family(qkv_bias=_ATTENTION_BIAS, o_bias=_ATTENTION_BIAS, head_norm=_BY_HEAD, head_dim=128),
        "qwen3_5_text": Family(
            norm="gemma",
            head_norm=_BY_HEAD,
            joined=("q_gate",),
            delta_nets=_QWEN_NETS,
            qkv_bias=_ATTENTION_BIAS,
            o_bias=_ATTENTION_BIAS,
            head_dim=256,
            rotary_share=0.25,
        ),
        "qwen3_5_moe_text": Family(
            norm="gemma",
            head_norm=_BY_HEAD,
            joined=("q_gate",),
            delta_nets=_QWEN_NETS,
            experts=Experts(
                shared="shared_expert",
                shared_gate="shared_expert_gate",
                shared_width="shared_expert_intermediate_size",
            ),
            qkv_bias=_ATTENTION_BIAS,
            o_bias=_ATTENTION_BIAS,
            head_dim=256,
            rotary_share=0.25,
            defaults=(("shared_expert_intermediate_size", 512), *_sizes(256, 8, 512)),
        ),
        "ministral3": Family(head_dim=128, window_on_config=True, scaled_by_position=True),
        "phi3": Family(joined=("qkv", "gate_up"), window_on_config=True),
        "smollm3": Family(
            qkv_bias=_ATTENTION_BIAS,
            o_bias=_ATTENTION_BIAS,
            mlp_bias="mlp_bias",
            tied=True,
            unrotated="no_rope_layers",
        ),
        "olmo2": Family(
            POST, "plain", head_norm=HeadNorms(span="width"), qkv_bias=_ATTENTION_BIAS, o_bias=_ATTENTION_BIAS
        ),
        "olmo3": Family(
            POST,
            "plain",
            head_norm=HeadNorms(span="width"),
            qkv_bias=_ATTENTION_BIAS,
            o_bias=_ATTENTION_BIAS,
            window=4096,
            full_attention_every=4,
        ),
        "granite": Family(
            qkv_bias=_ATTENTION_BIAS,
            o_bias=_ATTENTION_BIAS,
            mlp_bias="mlp_bias",
            residual_multiplier="residual_multiplier",
        ),
        "arcee": Family(
            mlp=("up_proj", "down_proj"),
            qkv_bias=_ATTENTION_BIAS,
            o_bias=_ATTENTION_BIAS,
            mlp_bias="mlp_bias",
            activation="relu2",
        ),
        "helium": Family(
            norm="plain",
            qkv_bias=_ATTENTION_BIAS,
            head_dim=128,
            mlp_bias="mlp_bias",
            rotary="pairs",
        ),
        "vaultgemma": Family(
            Norms("input_layernorm", None, "pre_feedforward_layernorm", None),
            "gemma",
            qkv_bias=_ATTENTION_BIAS,
            o_bias=_ATTENTION_BIAS,
            tied=True,
            head_dim=256,
            activation=_GEMMA,
            attention_softcap=50.0,
            final_softcap=30.0,
            window=4096,
            full_attention_every=2,
        ),
        "jais2": Family(
            norm="layer",
            norm_bias=True,
            mlp=("up_proj", "down_proj"),
            qkv_bias=_ATTENTION_BIAS,
            o_bias=_ATTENTION_BIAS,
            mlp_bias="mlp_bias",
            activation="relu2",
            defaults=((_ATTENTION_BIAS, True), ("mlp_bias", True)),
        ),
        "apertus": Family(
            Norms("attention_layernorm", None, "feedforward_layernorm", None),
            head_norm=_BY_HEAD,
            mlp=("up_proj", "down_proj"),
            qkv_bias=_ATTENTION_BIAS,
            o_bias=_ATTENTION_BIAS,
            activation="xielu",
            activation_parameters=2,
        ),
        "exaone4": Family(POST, head_norm=_BY_HEAD, window=4096, full_attention_every=4, unrotated="global"),
        "cohere2": Family(
            PARALLEL,
            "layer",
            parallel=True,
            qkv_bias=_ATTENTION_BIAS,
            o_bias=_ATTENTION_BIAS,
            tied=True,
            window=4096,
            full_attention_every=4,
            rotary="pairs",
            repeated_angles=True,
            unrotated="global",
        ),
        "glm": Family(
            qkv_bias=_ATTENTION_BIAS,
            joined=("gate_up",),
            rotary="pairs",
            rotary_share=0.5,
            head_dim=128,
            defaults=((_ATTENTION_BIAS, True),),
        ),
        "glm4": Family(
            Norms("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"),
            qkv_bias=_ATTENTION_BIAS,
            joined=("gate_up",),
            rotary="pairs",
            rotary_share=0.5,
            head_dim=128,
            defaults=((_ATTENTION_BIAS, True),),
        ),
        "starcoder2": Family(
            norm="layer",
            norm_bias=True,
            mlp=("c_fc", "c_proj"),
            qkv_bias="use_bias",
            o_bias="use_bias",
            mlp_bias="use_bias",
            tied=True,
            activation=_GEMMA,
            window_on_config=True,
            defaults=(("use_bias", True),),
        ),
        "stablelm": Family(
            norm="layer",
            norm_bias=True,
            parallel="use_parallel_residual",
            qkv_bias="use_qkv_bias",
            rotary_share=0.25,
            attention_alone=True,
            not_with=("qk_layernorm",),
        ),
        "seed_oss": Family(
            qkv_bias=_ATTENTION_BIAS,
            o_bias="attention_out_bias",
            mlp_bias="mlp_bias",
            head_dim=128,
            defaults=((_ATTENTION_BIAS, True),),
        ),
        "ernie4_5": Family(
            qkv_bias="use_bias", o_bias="use_bias", mlp_bias="use_bias", tied=True, head_dim=128, rotary="pairs"
        ),
        "hunyuan_v1_dense": Family(
            qkv_bias=_ATTENTION_BIAS,
            o_bias=_ATTENTION_BIAS,
            head_norm=HeadNorms("query_layernorm", "key_layernorm", after_rotation=True),
        ),
        "muse_glimmer_text": Family(
            SANDWICH,
            "gemma",
            final_norm="plain",
            head_norm=HeadNorms("qk_norm", "qk_norm", weights=False),
            output_gate="gate_proj",
            qkv_bias=_ATTENTION_BIAS,
            o_bias=_ATTENTION_BIAS,
            head_dim=128,
            final_softcap=20.0,
            window=2048,
            full_attention_every=-4,
            unrotated="layer_rope_theta",
            query_multiplier="qk_scale_factor",
        ),
        "bitnet": Family(
            sub_norms=True, kernels="none", qkv_bias=_ATTENTION_BIAS, o_bias=_ATTENTION_BIAS, activation="relu2"
        ),
    }
)


def family_of(model_type: str) -> Family | None:
    """The row of a ``model_type``; None where there is none."""
    return TABLE.get(model_type)


@dataclass(frozen=True, slots=True)
class Multimodal:
    """A checkpoint that takes more than text and is trained on text, through the class that has all its parts.

    The language model is trained; everything else is frozen and exported as it is.

    Attributes:
        senses: What the other parts are for.
        text: The language model's ``model_type`` where config.json does not say.
        tied: Whether embedding and head are one matrix where config.json does not say.
        towers: Code: a function of a :class:`ftcli.facts.towers.VisionConfig` and the config.json that counts the other
            parts' parameters. None where nothing is known of them.
    """

    senses: str
    text: str
    tied: bool = False
    towers: str | None = None


MULTIMODAL: Mapping[str, Multimodal] = MappingProxyType(
    {
        "gemma3": Multimodal("vision", "gemma3_text", tied=True, towers="ftcli.facts.towers:siglip"),
        "gemma4": Multimodal("vision and audio", "gemma4_text", tied=True, towers="ftcli.facts.towers:gemma4"),
        "gemma4_unified": Multimodal(
            "vision and audio", "gemma4_unified_text", tied=True, towers="ftcli.facts.towers:gemma4_unified"
        ),
        "mistral3": Multimodal("vision", "mistral", tied=True, towers="ftcli.facts.towers:pixtral"),
        "muse_glimmer": Multimodal("vision", "muse_glimmer_text", towers="ftcli.facts.towers:muse_glimmer"),
        "qwen2_vl": Multimodal("vision", "qwen2_vl_text", towers="ftcli.facts.towers:qwen2"),
        "qwen2_5_vl": Multimodal("vision", "qwen2_5_vl_text", towers="ftcli.facts.towers:qwen2_5"),
        "qwen3_vl": Multimodal("vision", "qwen3_vl_text", towers="ftcli.facts.towers:qwen3"),
        "qwen3_vl_moe": Multimodal("vision", "qwen3_vl_moe_text", towers="ftcli.facts.towers:qwen3"),
        "qwen3_5": Multimodal("vision", "qwen3_5_text", towers="ftcli.facts.towers:qwen3_5"),
        "qwen3_5_moe": Multimodal("vision", "qwen3_5_moe_text", towers="ftcli.facts.towers:qwen3_5"),
    }
)

#: Code: what is known of a model whose family has no row, as a function of a :class:`ftcli.plan.measured.Question`.
MEASURED_BY = "ftcli.model.measure:measured"
