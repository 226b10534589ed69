"""Gemma-4's layers on the kernels against transformers' own: the layout of each released size, small and random."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import Tensor

from ftcli.config.model import LoraConfig
from ftcli.model.backbone import base_of, decoder_layers, hidden_states
from ftcli.model.fused import stack_of
from ftcli.model.gradient_checkpointing import use_checkpointing
from ftcli.model.layers import FusedGemma4Layer
from ftcli.model.lora import apply_lora
from ftcli.model.loss import forward_loss
from ftcli.model.offload import ScaledHostEmbedding, use_host_embedding
from ftcli.model.patch import patch
from ftcli.model.trained_weights import save_weights
from ftcli.plan.precision import DtypePlan
from ftcli.reporting import SilentReporter
from tests.small_models import GEMMA4_MIXTURE, build
from tests.tiers import further, in_turn

PLAN = DtypePlan("float32", "float32", "float32", False, "a test")
#: E2B's and E4B's, with shared layers at every distance from those that give; 12B's; 31B's.
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "e4b": ("gemma4_text", {}),
    "shared 1": ("gemma4_text", {"num_kv_shared_layers": 1}),
    "shared 2": ("gemma4_text", {"num_kv_shared_layers": 2}),
    "narrow": ("gemma4_text", {"use_double_wide_mlp": False}),
    "unshared": ("gemma4_text", {"num_kv_shared_layers": 0}),
    "31b": (
        "gemma4_text",
        {"num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0, "attention_k_eq_v": True,
         "num_global_key_value_heads": 1},
    ),
    "26b": ("gemma4_text", GEMMA4_MIXTURE),
    "12b": ("gemma4_unified_text", {}),
    "wrapped": ("gemma4", {}),
    "wrapped 12b": ("gemma4_unified", {}),
}  # fmt: skip
#: Those that differ in what a kernel is asked; in `make test` the others run in plain torch.
INTERPRETED = {"e4b", "31b", "26b"}
POLICIES: tuple[Any, ...] = (False, True, "selective", "offload", "lean")


def adapted(layout: str) -> Any:
    """Adapters that say something on every linear layer of the decoder."""
    model_type, change = LAYOUTS[layout]
    model, _ = apply_lora(build(model_type, **change), LoraConfig(r=4, alpha=8), PLAN, seed=0)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.05)
    return model.train()


def run(model: Any, *, stacked: bool = False, rows: int = 2) -> dict[str, Tensor]:
    """The loss of two rows, of which one has two documents, and all gradients."""
    ids = torch.randint(5, 250, (rows, 41), generator=torch.Generator().manual_seed(2))
    positions = torch.arange(41).repeat(rows, 1)
    positions[-1, 9:] = torch.arange(32)
    labels = ids.masked_fill(torch.arange(41) < 3, -100)
    stack = stack_of(model, torch.float32) if stacked else None
    assert not isinstance(stack, str)
    model.zero_grad()
    batch = {"input_ids": ids, "labels": labels, "position_ids": positions}
    loss = forward_loss(model, batch, stack=stack).loss
    loss.backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **found}


def close(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert (found[name] - value).norm() <= 1e-5 * value.norm(), name


def on_the_kernels(model: Any, backend: str) -> None:
    """Kernels in Triton's interpreter, which no recipe asks for, or their plain torch versions."""
    assert not patch(model, "reference").off
    for layer in decoder_layers(base_of(model)):
        assert isinstance(layer, FusedGemma4Layer)
        layer._backend = backend  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("layout", "backend"),
    [
        pytest.param(name, backend, marks=() if (backend == "triton") == (name in INTERPRETED) else pytest.mark.long)
        for name in LAYOUTS
        for backend in ("torch", "triton")
    ],
)
def test_loss_and_gradients_are_transformers_own(layout: str, backend: str) -> None:
    model = adapted(layout)
    wanted = run(model)
    on_the_kernels(model, backend)
    found = run(model)
    assert len(found) > 8
    close(found, wanted)
    stacked = run(model, stacked=True)  # adapters that are packed for all layers at once
    assert all(torch.equal(stacked[name], value) for name, value in found.items())


@pytest.mark.parametrize("layout", ["wrapped", "wrapped 12b"])
def test_text_alone_is_seen_by_intervals(layout: str) -> None:
    """The kernels take no other masks; 12B's wrapper lays images over each mask of ones, also where there are none."""
    model, kinds = adapted(layout), set()
    on_the_kernels(model, "torch")

    def look(_layer: object, _given: object, named: dict[str, Any]) -> None:
        mask = named["documents"].within(named["attention_mask"])
        kinds.add((mask.kind, mask.window))

    for layer in decoder_layers(base_of(model)):
        layer.register_forward_pre_hook(look, with_kwargs=True)
    ids, starts = torch.arange(5, 25)[None], torch.tensor([[0] * 9 + [9] * 11])
    hidden_states(model, {"input_ids": ids, "document_starts": starts})
    assert kinds == {("intervals", None), ("intervals", 16)}


@pytest.mark.parametrize("layout", ["e4b", "31b", "12b", "wrapped 12b"])
def test_a_call_with_a_cache_is_transformers_own(layout: str) -> None:
    model, ids = adapted(layout).eval(), torch.arange(5, 25)[None]
    wanted = model(input_ids=ids, use_cache=True).logits
    on_the_kernels(model, "torch")
    assert torch.equal(model(input_ids=ids, use_cache=True).logits, wanted)


@pytest.mark.parametrize("layout", ["e4b", "31b", *further("wrapped")])
def test_weights_that_are_trained_get_transformers_gradients(layout: str) -> None:
    model_type, change = LAYOUTS[layout]
    model = build(model_type, **change).requires_grad_(True)
    wanted = run(model)
    on_the_kernels(model, "triton")
    close(run(model), wanted)


@pytest.mark.parametrize("stacked", [True, *further(False)])
@pytest.mark.parametrize(("policy", "layout"), in_turn(POLICIES, ["e4b", "shared 1", "31b", "26b"]))
def test_every_checkpointing_policy_gives_the_same_bits(layout: str, policy: Any, stacked: bool) -> None:
    """The giving layers' gradients too, which are lost where a layer that is run again gives anew."""
    model = adapted(layout)
    on_the_kernels(model, "torch")
    wanted = run(model, stacked=stacked)
    use_checkpointing(model, policy)
    if policy is True:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    found = run(model, stacked=stacked)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], value) for name, value in wanted.items())


def test_giving_layers_get_the_gradients_of_those_that_take() -> None:
    """Without the last layers' part it is another gradient: the test above can fail."""
    model = adapted("e4b")
    on_the_kernels(model, "torch")
    whole = run(model)
    layers = list(decoder_layers(base_of(model)))
    with torch.no_grad():
        for layer in layers[3:]:
            layer.self_attn.o_proj.base_layer.weight.zero_()
            for name in ("lora_A", "lora_B"):
                getattr(layer.self_attn.o_proj, name)["default"].weight.zero_()
    cut = run(model)
    name = next(n for n in whole if "layers.2.self_attn.k_proj.lora_B" in n)
    assert (whole[name] - cut[name]).norm() > 1e-2 * whole[name].norm()


def test_the_table_of_layers_inputs_goes_to_the_host_with_the_same_bits() -> None:
    """Under ``lean``; the embedding is the head's weight as well, and stays."""
    model = adapted("e4b")
    on_the_kernels(model, "torch")
    wanted = run(model, stacked=True)
    use_host_embedding(model, SilentReporter())
    use_checkpointing(model, "lean")
    decoder = base_of(model).get_decoder()
    assert isinstance(decoder.embed_tokens_per_layer, ScaledHostEmbedding)
    assert not any("embed_tokens_per_layer" in name for name in model.state_dict())
    found = run(model, stacked=True)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], value) for name, value in wanted.items())


@pytest.mark.parametrize("layout", ["e4b", "26b", "wrapped"])
def test_peft_loads_the_adapter_with_the_same_logits(layout: str, tmp_path: Path) -> None:
    model_type, change = LAYOUTS[layout]
    model = adapted(layout).eval()
    on_the_kernels(model, "torch")
    save_weights(model, tmp_path)
    other = peft.PeftModel.from_pretrained(build(model_type, **change), str(tmp_path))
    names = [name for name, _ in other.named_parameters() if "lora_" in name]
    assert names
    assert not any("vision" in name or "router" in name for name in names)
    ids = torch.randint(5, 250, (1, 21), generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        found, wanted = (each(input_ids=ids, use_cache=False).logits for each in (model, other.eval()))
    assert (found - wanted).norm() <= 1e-5 * wanted.norm()


def test_gradients_grow_with_the_scores_as_transformers_do() -> None:
    """What docs/troubleshooting.md says of large gradient norms: they are the model's, and the same here.

    Scores of normalised queries and keys, which nothing divides by sqrt(head_dim), have a deviation of that times the
    norms' weights. Layers that attend to hardly more than one key pass on larger gradients, each to the one below.
    """
    sizes: dict[str, Any] = {"head_dim": 64, "global_head_dim": 128, "num_hidden_layers": 12, "num_kv_shared_layers": 0}
    sizes["layer_types"] = (["sliding_attention"] * 5 + ["full_attention"]) * 2
    norms = {}
    for deviation in (1.0, 4.0):
        model, _ = apply_lora(build("gemma4_text", **sizes), LoraConfig(r=4, alpha=8), PLAN, seed=0)
        for name, parameter in model.named_parameters():
            if "q_norm" in name or "k_norm" in name:
                parameter.data.fill_((deviation / parameter.numel() ** 0.5) ** 0.5)
        wanted = run(model.train())
        patch(model, "reference")
        found = run(model)
        norms[deviation], ours = (torch.cat([g.flatten() for g in x.values()]).norm() for x in (wanted, found))
        assert abs(ours - norms[deviation]) < 1e-3 * norms[deviation]
    assert norms[4.0] > 10 * norms[1.0]
