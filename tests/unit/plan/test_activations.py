"""The activation arithmetic against what torch's autograd really keeps, for every family and precision plan."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import peft
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from ftcli.config.model import LoraConfig
from ftcli.facts.shape import ModelShape, shape_of
from ftcli.model.backbone import hidden_states, stream_in
from ftcli.model.gradient_checkpointing import use_checkpointing
from ftcli.model.lora import apply_lora
from ftcli.model.patch import patch
from ftcli.plan.memory.activations import ActivationSettings, LayerMemory, norm_bytes, plain_layers
from ftcli.plan.memory.checkpointing import HeldBytes, Offloaded
from ftcli.plan.memory.fused_activations import fused_layers, layer_input_bytes
from ftcli.plan.memory.workspaces import pinned_bytes
from ftcli.plan.precision import DtypePlan
from ftcli.tables import code_of, families, policies
from tests.small_models import KINDS, MULTIMODAL, by_kind
from tests.tiers import in_turn

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 160,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GEMMA2 = {"sliding_window": 64, "query_pre_attn_scalar": 16}
NETS = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 16,
}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 80}
OF_FAMILY: dict[str, dict[str, Any]] = {
    "gemma2": GEMMA2,
    "gemma3_text": {**GEMMA2, "sliding_window_pattern": 2},
    "phi3": {"hidden_size": 64},
    "bitnet": {"hidden_size": 64},
    "starcoder2": {"hidden_size": 64},
    "stablelm": {"hidden_size": 64},
    "helium": {"hidden_size": 64},
    "vaultgemma": GEMMA2,
    "seed_oss": {"attention_dropout": 0.0, "residual_dropout": 0.0},
    "qwen3_5_text": NETS,
    "qwen3_5_moe_text": {**NETS, **EXPERTS, "shared_expert_intermediate_size": 64},
    "qwen3_moe": EXPERTS,
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 64},
    "mixtral": {"num_local_experts": 6, "num_experts_per_tok": 2},
    "olmoe": {**EXPERTS, "hidden_size": 64},
    "granitemoe": {"num_local_experts": 6, "num_experts_per_tok": 2, "hidden_size": 64},
    "gpt_oss": {"num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": 16},
    "mellum": EXPERTS,
    "glm4_moe": {
        "n_routed_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 80,
        "first_k_dense_replace": 0,
    },
}
LATENT = {
    "q_lora_rank": 24,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 8,
    "v_head_dim": 32,
    "head_dim": 8,
    "num_key_value_heads": 4,
}
OF_FAMILY |= {
    "youtu": LATENT,
    "ernie4_5_moe": {
        "moe_num_experts": 6,
        "moe_k": 3,
        "moe_intermediate_size": 80,
        "moe_layer_start_index": 0,
        "moe_num_shared_experts": 1,
    },
    "deepseek_v2": {**OF_FAMILY["glm4_moe"], **LATENT, "v_head_dim": 16},
    "glm4_moe_lite": {**OF_FAMILY["glm4_moe"], **LATENT, "mlp_layer_types": ["sparse"] * 3},
    "deepseek_v3": {
        **OF_FAMILY["glm4_moe"],
        **LATENT,
        "q_lora_rank": None,
        "v_head_dim": 16,
        "n_group": 1,
        "topk_group": 1,
    },
}
GEMMA4 = {"sliding_window": 64, "global_head_dim": 32, "hidden_size_per_layer_input": 24}
#: Gemma-4's kinds of layers, by what they are named here; a model has two of each kind that sees what it sees besides.
GEMMA4_LAYERS: dict[str, tuple[str, dict[str, Any]]] = {
    "windowed": ("sliding_attention", GEMMA4),
    "global": ("full_attention", GEMMA4),
    "sharing": ("sliding_attention", {**GEMMA4, "use_double_wide_mlp": True, "num_kv_shared_layers": 1}),
    "sharing-global": ("full_attention", {**GEMMA4, "num_kv_shared_layers": 1}),
    "one-linear": (
        "full_attention",
        {**GEMMA4, "attention_k_eq_v": True, "num_global_key_value_heads": 1, "hidden_size_per_layer_input": 0},
    ),
    "mixture": (
        "sliding_attention",
        {
            **GEMMA4,
            "hidden_size_per_layer_input": 0,
            "enable_moe_block": True,
            "num_experts": 6,
            "top_k_experts": 3,
            "moe_intermediate_size": 80,
        },
    ),
}
#: Kinds of layers of one family, of which a model of one kind is measured.
LAYERS = {"gemma4_text": tuple(GEMMA4_LAYERS)} | dict.fromkeys(
    ("qwen3_5_text", "qwen3_5_moe_text"), ("linear_attention", "full_attention")
)
SPARSE = {name for name, row in families.TABLE.items() if row.experts is not None and row.experts.only_if is None}
#: Families whose scores are capped, and with those that have sinks all that transformers computes eagerly.
CAPPED = {name for name, row in families.TABLE.items() if row.attention_softcap is not None}
EAGER = CAPPED | {name for name, row in families.TABLE.items() if row.sinks}
#: Language models that only exist in a multimodal one, and the families that they are built like.
PARTS = {
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen3_vl_text": "qwen3",
    "qwen3_vl_moe_text": "qwen3_moe",
    "gemma4_unified_text": "gemma4_text",
}

#: One that is built like no other.
TOWERS = {"muse_glimmer_text": "muse_glimmer"}
PLANS = {
    "lora-float32": DtypePlan("float32", "float32", "float32", False, "test"),
    "lora-bfloat16": DtypePlan("bfloat16", "float32", "bfloat16", True, "test"),
    "full-float32": DtypePlan("float32", None, "float32", False, "test"),
    "full-bfloat16": DtypePlan("float32", None, "bfloat16", True, "test"),
}


def is_sparse(case: str) -> bool:
    """True of a family, or of a kind of its layers, with experts."""
    return case.split()[0] in SPARSE or case == "gemma4_text mixture"


def cases_of(family: str) -> list[str]:
    """The family, or each kind of its layers behind it."""
    return [f"{family} {kind}" for kind in LAYERS[family]] if family in LAYERS else [family]


def depths(family: str) -> tuple[int, int]:
    """Numbers of layers that differ by one, with every kind of layer, and every mask, in both."""
    return (2, 3) if "sliding_window" in OF_FAMILY.get(family, {}) else (1, 2)


# A length that is no width of any weight, so that activations cannot be taken for cast copies of weights.
BATCH, SEQ_LEN, RANK = 2, 72, 4
SENT: tuple[Offloaded, ...] = ("layers", "halves")


def held(
    layers: LayerMemory, shape: Any, setting: ActivationSettings, policy: Any, sent: Offloaded = "halves"
) -> HeldBytes:
    """What a layer holds under a policy of the table."""
    found: HeldBytes = code_of(policies.row(policy).held)(layers.layer(shape, setting), sent)
    return found


def build(
    family: str,
    attention: str,
    plan: DtypePlan,
    layers: int,
    *,
    dropout: float = 0.0,
    targets: Any = "all-linear",
    dora: bool = False,
) -> Any:
    sizes = {key: value for key, value in config_of(family, layers).items() if key != "model_type"}
    torch.manual_seed(0)
    if family in TOWERS:  # of which the text alone is computed here
        name = TOWERS[family]
        _, vision, beside = MULTIMODAL[name]
        config = AutoConfig.for_model(name, text_config=sizes, vision_config=vision, **beside)
        model = AutoModelForImageTextToText.from_config(config, attn_implementation=attention)
    else:
        config = AutoConfig.for_model(family.partition(" ")[0], **sizes)
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    model = model.to(getattr(torch, plan.parameter)).train()
    if plan.adapter is None:
        return model
    if is_sparse(family) or hasattr(config, "num_experts_per_tok"):
        adapted, _ = apply_lora(model, LoraConfig(r=RANK), plan, seed=0)
        return adapted.train()
    lora = peft.LoraConfig(
        r=RANK,
        lora_dropout=dropout,
        use_dora=dora,
        target_modules=list(targets) if targets != "all-linear" else targets,
        task_type="CAUSAL_LM",
    )
    return peft.get_peft_model(model, lora).train()


@contextmanager
def saved_storages(model: torch.nn.Module) -> Iterator[dict[int, torch.Tensor]]:
    """Every storage that autograd keeps within the block, parameters and buffers excluded."""
    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    kept: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        pointer = tensor.untyped_storage().data_ptr()
        if pointer not in own:
            kept.setdefault(pointer, tensor)  # holding it keeps the address from being given out again
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield kept


def measured_bytes(model: Any, plan: DtypePlan, *, batch: int = BATCH) -> int:
    """Bytes kept by the backbone's forward pass; adapters' and weights' cast copies are not activations."""
    ids = torch.randint(3, 97, (batch, SEQ_LEN))
    mask = torch.ones_like(ids)
    if batch > 1:
        mask[0, -3:] = 0
    base = model.get_base_model() if plan.adapter else model
    with saved_storages(model) as kept, torch.autocast("cpu", torch.bfloat16, enabled=plan.autocast):
        base.model(input_ids=ids, attention_mask=mask, use_cache=False)
    weights = {tuple(p.shape) for p in model.parameters()}
    weights |= {shape[::-1] for shape in weights}
    copies = [t for t in kept.values() if tuple(t.shape) in weights]
    return sum(t.untyped_storage().nbytes() for t in kept.values()) - sum(t.untyped_storage().nbytes() for t in copies)


def config_of(family: str, layers: int) -> dict[str, Any]:
    family, _, kind = family.partition(" ")
    if family == "gemma4_text":
        seen, own = GEMMA4_LAYERS[kind]
        types = ["sliding_attention", "full_attention", *[seen] * layers, "full_attention"]
        shared = {"num_kv_shared_layers": layers + 1} if "num_kv_shared_layers" in own else {}
        return {"model_type": family, **SIZES, **own, **shared, "num_hidden_layers": len(types), "layer_types": types,
                "vocab_size_per_layer_input": 97}  # fmt: skip
    values = {"model_type": family, **SIZES, **OF_FAMILY.get(family, {}), "num_hidden_layers": layers}
    return values | {"layer_types": [kind] * layers} if kind else values


def shape_of_one(family: str) -> ModelShape:
    """The shape of a model with one layer of the kind."""
    shape = shape_of(config_of(family, 1))
    assert shape is not None
    if not family.startswith("gemma4"):
        return shape
    return next(kind for kind in shape.by_kind if shape.layers[2] in kind.layers)


def own_inputs(family: str, setting: ActivationSettings) -> float:
    """Bytes per token of a layer's own input, which is made in front of the first."""
    shape = shape_of_one(family)
    return layer_input_bytes(shape, setting, gradient=True) / shape.num_layers


def setting_of(
    family: str,
    plan: DtypePlan,
    *,
    batch: int = BATCH,
    dropout: float = 0.0,
    targets: Any = "all-linear",
    dora: bool = False,
) -> ActivationSettings:
    shape = shape_of_one(family)
    return ActivationSettings(
        seq_len=SEQ_LEN,
        bytes_residual=plan.parameter_bytes,
        bytes_compute=plan.compute_bytes,
        autocast=plan.autocast,
        adapted=shape.adapted(targets) if plan.adapter else (),
        rank=RANK if plan.adapter else 0,
        dropout=dropout > 0,
        full=plan.adapter is None,
        softcap=family in CAPPED,
        padded=batch > 1,
        dora=dora,
    )


def predicted_bytes(family: str, attention: Any, plan: DtypePlan, *, batch: int = BATCH, **options: Any) -> float:
    """What the table says that one layer keeps."""
    shape = shape_of(config_of(family, 1))
    assert shape is not None
    setting = setting_of(family, plan, batch=batch, **options)
    return batch * SEQ_LEN * plain_layers(attention).layer_bytes(shape, setting)


#: Built like others, or measured where transformers' own code computes them.
APART = {*PARTS, *LAYERS, *SPARSE, *(name for name, row in families.TABLE.items() if row.latents is not None)}
#: Families of which `make test` takes every precision and policy; of each other kind it takes one, in turn.
WHOLE = ("llama", "gemma2", "qwen3_moe", "qwen3_5_text linear_attention", "bitnet")
MEASURED = [
    ("llama", "sdpa"),
    ("llama", "eager"),
    ("gemma3_text", "eager"),
    *((name, "eager" if name in EAGER else "sdpa") for name in families.TABLE if name not in APART),
]
CASES = in_turn(
    [each if each[0] in KINDS else pytest.param(each, marks=pytest.mark.long) for each in MEASURED],
    list(PLANS),
    whole=[each for each in MEASURED if each[0] in WHOLE],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)


@pytest.mark.parametrize(("case", "plan"), CASES)
def test_one_more_layer_keeps_what_the_table_says(case: tuple[str, str], plan: str) -> None:
    family, attention = case
    # The difference of two depths is exactly one layer, free of embeddings and the final norm.
    dtypes = PLANS[plan]
    sizes = [measured_bytes(build(family, attention, dtypes, layers), dtypes) for layers in depths(family)]
    predicted = predicted_bytes(family, attention, dtypes)
    assert predicted == pytest.approx(sizes[1] - sizes[0], rel=0.03)


@pytest.mark.parametrize("plan", ["lora-float32", "lora-bfloat16"])
def test_a_single_row_needs_no_mask_and_no_repeated_heads(plan: str) -> None:
    dtypes = PLANS[plan]
    sizes = [measured_bytes(build("llama", "sdpa", dtypes, layers), dtypes, batch=1) for layers in (1, 2)]
    predicted = predicted_bytes("llama", "sdpa", dtypes, batch=1)
    assert predicted == pytest.approx(sizes[1] - sizes[0], rel=0.03)


@pytest.mark.parametrize("plan", ["lora-float32", "lora-bfloat16"])
def test_adapters_on_some_layers_only_keep_only_their_inputs(plan: str) -> None:
    dtypes, targets = PLANS[plan], ("q_proj", "v_proj")
    sizes = [measured_bytes(build("gemma2", "eager", dtypes, n, targets=targets), dtypes) for n in (2, 3)]
    predicted = predicted_bytes("gemma2", "eager", dtypes, targets=targets)
    assert predicted == pytest.approx(sizes[1] - sizes[0], rel=0.03)
    assert predicted < 0.95 * predicted_bytes("gemma2", "eager", dtypes)


@pytest.mark.parametrize("targets", ["all-linear", ("q_proj", "down_proj")])
@pytest.mark.parametrize("plan", ["lora-float32", "lora-bfloat16"])
def test_dora_keeps_what_base_and_adapter_give(plan: str, targets: Any) -> None:
    # Differences in depth and in rows: free of what makes the norms, which does not grow with tokens and is not kept.
    dtypes, options = PLANS[plan], {"targets": targets, "dora": True}
    models = {n: build("llama", "sdpa", dtypes, n, **options) for n in (1, 2)}
    sizes = {(n, rows): measured_bytes(model, dtypes, batch=rows) for n, model in models.items() for rows in (2, 4)}
    measured = (sizes[2, 4] - sizes[1, 4]) - (sizes[2, 2] - sizes[1, 2])
    assert predicted_bytes("llama", "sdpa", dtypes, batch=2, **options) == pytest.approx(measured, rel=0.03)


@pytest.mark.parametrize(("family", "attention"), [("llama", "sdpa"), ("gemma2", "eager")])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("plan", list(PLANS))
def test_whole_model_is_within_ten_percent(family: str, attention: Any, plan: str, checkpointing: bool) -> None:
    dtypes, layers = PLANS[plan], 6
    model = build(family, attention, dtypes, layers)
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if dtypes.adapter:
            model.enable_input_require_grads()
    shape = shape_of(config_of(family, layers))
    assert shape is not None
    setting = setting_of(family, dtypes)
    kept = (
        BATCH * setting.seq_len * shape.num_layers * held(plain_layers(attention), shape, setting, checkpointing).kept
    )
    kept += BATCH * SEQ_LEN * norm_bytes(shape.hidden_size, shape, setting, setting.bytes_residual)  # the last one
    assert kept == pytest.approx(measured_bytes(model, dtypes), rel=0.10)


def on_kernels(
    family: str, plan: DtypePlan, layers: int, rows: Sequence[int], policy: Any = False, sent: Offloaded = "halves"
) -> list[int]:
    """Bytes kept by a model on the kernels' torch form, for each number of rows."""
    model = build(family, "eager" if family in EAGER else "sdpa", plan, layers)
    done = patch(model, "reference")
    assert not done.off
    use_checkpointing(model, policy, offloaded=sent)
    if policy is True:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if plan.adapter:
        model.enable_input_require_grads()
    if plan.parameter != plan.compute:
        stream_in(model, getattr(torch, plan.compute))
    sizes = []
    for count in rows:
        ids = torch.randint(3, 97, (count, SEQ_LEN))
        with saved_storages(model) as kept, torch.autocast("cpu", torch.bfloat16, enabled=plan.autocast):
            hidden_states(model, {"input_ids": ids})
        sizes.append(sum(t.untyped_storage().nbytes() for t in kept.values()))
    return sizes


ON_KERNELS = [
    case
    for name, row in sorted(families.TABLE.items())
    if row.kernels == "layers" and name not in PARTS
    for case in cases_of(name)
]


def test_language_models_of_multimodal_ones_are_measured_as_the_families_that_they_are_built_like() -> None:
    for name, as_ in PARTS.items():
        described = families.TABLE[name]
        other = families.TABLE[as_]
        own = {"windows_from": other.windows_from, "window": other.window, "head_dim": other.head_dim}
        own |= {"layer_input": other.layer_input, "experts": other.experts}  # Gemma-4 has a kind without either
        alike = replace(described, four_positions=False, defaults=other.defaults, **own)
        assert alike == other


@pytest.mark.parametrize(("family", "plan"), in_turn(by_kind(ON_KERNELS), list(PLANS), whole=WHOLE))
def test_one_more_fused_layer_keeps_what_the_table_says(family: str, plan: str) -> None:
    # Differences in depth and in rows leave one layer's bytes for two rows, free of packed adapters and tables.
    dtypes = PLANS[plan]
    fewer, more = (on_kernels(family, dtypes, n, (2, 4)) for n in depths(family))
    measured = (more[1] - fewer[1]) - (more[0] - fewer[0])
    shape = shape_of_one(family)
    policy = fused_layers(all_scores=family in EAGER, reference=True)
    setting = replace(setting_of(family, dtypes, batch=1), bytes_residual=dtypes.compute_bytes)
    kept = policy.layer_bytes(shape, setting) + own_inputs(family, setting)
    assert 2 * SEQ_LEN * kept == pytest.approx(measured, rel=0.03)


@pytest.mark.parametrize("plan", list(PLANS))
def test_layers_of_several_kinds_keep_their_mean(plan: str) -> None:
    """As many rows more of a model of all kinds keep what the layers of each kind keep together."""
    dtypes, policy = PLANS[plan], fused_layers(all_scores=False, reference=True)
    own = {"bytes_residual": dtypes.compute_bytes}
    one, other, both = (shape_of(config_of(case, 4)) for case in (*cases_of("qwen3_5_text"), "qwen3_5_text"))
    assert one is not None
    assert other is not None
    assert both is not None
    assert [len(kind.layers) for kind in both.by_kind] == [3, 1]
    settings = [replace(setting_of(case, dtypes, batch=1), **own) for case in (*cases_of("qwen3_5_text"),)]
    adapted = tuple(dict.fromkeys((*settings[0].adapted, *settings[1].adapted)))
    each = [policy.layer_bytes(shape, setting) for shape, setting in zip((one, other), settings, strict=True)]
    found = policy.layer(both, replace(settings[0], adapted=adapted))
    assert found.kept == pytest.approx((3 * each[0] + each[1]) / 4)
    assert found.halves == one.half_inputs == other.half_inputs


POLICIES = (("selective", "halves"), (True, "halves"), ("offload", "halves"), ("offload", "layers"))


@pytest.mark.parametrize(("family", "how"), in_turn(by_kind(ON_KERNELS), POLICIES, whole=WHOLE))
def test_one_more_checkpointed_layer_keeps_what_the_policy_says(family: str, how: tuple[Any, Offloaded]) -> None:
    """What is on its way to the host stays where it is, on a CPU."""
    for plan in ("full-bfloat16", *(["lora-bfloat16"] if is_sparse(family) else [])):
        require_what_the_policy_says(family, *how, PLANS[plan])


def require_what_the_policy_says(family: str, policy: Any, sent: Offloaded, dtypes: DtypePlan) -> None:
    fewer, more = (on_kernels(family, dtypes, n, (2, 4), policy, sent) for n in depths(family))
    shape = shape_of_one(family)
    layers = fused_layers(all_scores=family in EAGER, reference=True)
    setting = replace(setting_of(family, dtypes, batch=1), bytes_residual=dtypes.compute_bytes)
    found = held(layers, shape, setting, policy, sent)
    width, element = shape.hidden_size, dtypes.compute_bytes
    beside = 0.0  # plain torch's norms keep their input in float32, and not the tensor that others keep as well
    if policy == "offload" and sent == "halves" and shape.half_inputs >= 3:
        beside = norm_bytes(width, shape, setting, element) - element * width
    if policy in (True, "selective"):  # elsewhere layers that are run again hold their own inputs, which no hook sees
        beside += own_inputs(family, setting)
    elif shape.layer_input is not None:  # but for what made them
        beside += own_inputs(family, setting) - 4 * shape.layer_input.width
    if policy == "selective" and len(shape.family.mlp) == 2 and shape.family.norm != "layer":
        beside = element * width
    measured = (more[1] - fewer[1]) - (more[0] - fewer[0])
    predicted = 2 * SEQ_LEN * (found.kept + found.host + beside)
    if policy == "selective" and is_sparse(family) and dtypes.adapter is not None:
        # Torch's hooks do not see h @ A.T, which a padded rank makes large beside these widths.
        assert measured <= predicted <= 1.2 * measured
        return
    assert predicted == pytest.approx(measured, rel=0.03)


@pytest.mark.parametrize("plan", list(PLANS))
def test_dropout_of_what_halves_add_keeps_its_mask(plan: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(OF_FAMILY, "seed_oss", {"attention_dropout": 0.0, "residual_dropout": 0.1})
    dtypes, shape = PLANS[plan], shape_of(config_of("seed_oss", 1))
    assert shape is not None
    whole = [measured_bytes(build("seed_oss", "sdpa", dtypes, layers), dtypes) for layers in (1, 2)]
    setting = replace(setting_of("seed_oss", dtypes), drops_residual=True)
    predicted = BATCH * SEQ_LEN * plain_layers("sdpa").layer_bytes(shape, setting)
    assert predicted == pytest.approx(whole[1] - whole[0], rel=0.015)
    fewer, more = (on_kernels("seed_oss", dtypes, n, (2, 4)) for n in (1, 2))
    measured = (more[1] - fewer[1]) - (more[0] - fewer[0])
    setting = replace(setting, bytes_residual=dtypes.compute_bytes)
    policy = fused_layers(all_scores=False, reference=True)
    assert 2 * SEQ_LEN * policy.layer_bytes(shape, setting) == pytest.approx(measured, rel=0.025)


def test_kernels_keep_far_less_than_plain_layers() -> None:
    dtypes = PLANS["lora-bfloat16"]
    shape = shape_of(config_of("gemma2", 1))
    assert shape is not None
    setting = setting_of("gemma2", dtypes, batch=1)
    fused = fused_layers(all_scores=False, reference=False)
    assert fused.layer_bytes(shape, setting) < 0.5 * plain_layers("eager").layer_bytes(shape, setting)


def test_layers_whose_inputs_alone_are_offloaded_need_what_checkpointed_ones_do() -> None:
    shape, setting = shape_of(config_of("llama", 2)), setting_of("llama", PLANS["lora-bfloat16"])
    assert shape is not None
    policy = fused_layers(all_scores=False, reference=False, attention_by_kernel=True)
    stream = shape.hidden_size * setting.bytes_residual
    whole, halves = (held(policy, shape, setting, "offload", sent) for sent in SENT)
    checkpointed = held(policy, shape, setting, True)
    # The input of the layer at work is no longer among those that are kept, and one more is on its way.
    assert whole.workspace == checkpointed.workspace + 2 * stream
    assert (whole.kept, whole.host) == (0.0, stream)
    assert (halves.kept, halves.host) == (0.0, 3 * stream)
    assert halves.workspace < whole.workspace
    sizes = [
        pinned_bytes(shape.num_layers * round(each.host / stream), setting.seq_len * stream) for each in (whole, halves)
    ]
    assert sizes == [2 * 2**20, 6 * 2**20]  # a tensor takes a piece of 1 MiB at least
