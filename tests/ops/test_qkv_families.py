"""Queries, keys and values of transformers' own attention layers, and their gradients, by one call of ``lora_qkv``."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from ftkernels.lora_qkv import lora_qkv
from ftkernels.projection import Norm, Projection
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

HIDDEN, HEADS, KV_HEADS, HEAD = 64, 4, 2, 16


@dataclass(frozen=True)
class Family:
    """A type of model: the prefix of its classes, how many features of a head it rotates, and its options.

    ``norms``: its modules of queries and keys. ``layer``: which of its layers.
    """

    prefix: str
    rotated: int = HEAD
    options: dict[str, Any] = field(default_factory=dict)
    norms: tuple[str, str] | None = None
    form: Any = "llama"
    config: dict[str, Any] = field(default_factory=dict)
    layer: int = 0


PAIRS = {"rope_layout": "pairs"}
BY_HEAD = ("q_norm", "k_norm")
LAYERS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4}
FAMILIES = {
    "olmo3": Family("Olmo3", options={"norm_span": "width"}, norms=BY_HEAD, form="plain", config=LAYERS),
    "hunyuan_v1_dense": Family(
        "HunYuanDenseV1", options={"norm_after_rope": True}, norms=("query_layernorm", "key_layernorm")
    ),
    "exaone4": Family("Exaone4", norms=BY_HEAD, config=LAYERS),
    "exaone4, not rotated": Family("Exaone4", 0, norms=BY_HEAD, config=LAYERS, layer=1),
    "glm4": Family("Glm4", 8, PAIRS, config={"attention_bias": True}),
    "ernie4_5": Family("Ernie4_5", options=PAIRS, config={"use_bias": True}),
    "stablelm": Family("StableLm", 4, config={"use_qkv_bias": True}),
    "smollm3, not rotated": Family("SmolLM3", 0, config={"no_rope_layers": [1, 0]}, layer=1),
}


def attention_of(family: Family, name: str, device: str) -> Any:
    """One attention layer with random weights, in float32."""
    module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    sizes = {
        "hidden_size": HIDDEN,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD,
        "num_hidden_layers": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": family.rotated / HEAD},
    }
    config = getattr(module, f"{family.prefix}Config")(**sizes, **family.config)
    config._attn_implementation = "taken"
    layer = getattr(module, f"{family.prefix}Attention")(config, layer_idx=family.layer).to(device)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.2)
    return layer


@pytest.mark.parametrize("case", FAMILIES)
def test_what_attention_takes_is_what_transformers_gives_it(
    case: str, device: str, tools: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[torch.Tensor] = []

    def take(_: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *__: Any, **___: Any) -> Any:
        taken[:] = (q, k, v)
        return q.transpose(1, 2).contiguous(), None

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "taken", take)
    family = FAMILIES[case]
    layer = attention_of(family, case.split(",")[0], device)
    z = torch.randn(2, 5, HIDDEN, device=device, requires_grad=True)
    half = torch.rand(1, 5, (family.rotated or HEAD) // 2, device=device) * 6
    angle = torch.cat((half, half), -1)
    rope = angle.cos(), angle.sin()
    layer(z, attention_mask=None, position_embeddings=rope)
    projections = [getattr(layer, f"{name}_proj") for name in "qkv"]
    norms = None if family.norms is None else [getattr(layer, name) for name in family.norms]
    made = lora_qkv(
        z,
        *(Projection(p.weight, p.bias) for p in projections),
        head_dim=HEAD,
        head_norms=None if norms is None else tuple(Norm(n.weight, n.variance_epsilon, family.form) for n in norms),
        rope=rope if family.rotated else None,
        backend="triton",
        **family.options,
    )
    leaves = [z, *(t for p in (*projections, *(norms or ())) for t in p.parameters())]
    incoming = [torch.randn_like(t) for t in taken]
    wanted = torch.autograd.grad(taken, leaves, incoming)
    found = torch.autograd.grad(made[:3], leaves, incoming)
    for ours, theirs in zip((*made[:3], *found), (*taken, *wanted), strict=True):
        assert ours.shape == theirs.shape
        assert tools.relative(ours.detach(), theirs.detach()) <= 1e-5
