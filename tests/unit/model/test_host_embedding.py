"""An embedding in host memory: the bits of one on the device, and nothing that asks for parameters meets it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ftcli.generation.generator import merged_model
from ftcli.model.backbone import base_of, stream_in
from ftcli.model.gradient_checkpointing import use_checkpointing
from ftcli.model.loss import forward_loss
from ftcli.model.offload import HostEmbedding, use_host_embedding, why_not_on_host
from ftcli.plan.precision import DtypePlan
from ftcli.reporting import SilentReporter
from tests.unit.model.test_gradient_checkpointing import adapted, gradients, same
from tests.unit.model.test_tied import model


def on_host(made: Any) -> Any:
    use_host_embedding(made, SilentReporter())
    assert isinstance(base_of(made).get_input_embeddings(), HostEmbedding)
    return made


def test_lean_gives_the_bits_of_every_other_policy() -> None:
    for name, kernels in (("llama", "reference"), ("qwen3", "off")):
        wanted = gradients(adapted(name, kernels), accumulated=2)
        made = on_host(adapted(name, kernels))
        use_checkpointing(made, "lean")
        layers = base_of(made).model.layers
        assert all(layer.gradient_checkpointing for layer in layers)
        assert same(gradients(made, accumulated=2), wanted)


def test_it_is_no_parameter_and_is_not_saved() -> None:
    made, plain = on_host(adapted("llama", "reference")), adapted("llama", "reference")
    missing = plain.state_dict().keys() - made.state_dict().keys()
    assert [name.rpartition(".")[2] for name in missing] == ["weight"]
    assert all("embed_tokens" in name for name in missing)
    assert not list(base_of(made).get_input_embeddings().parameters())
    moved = made.to("meta")  # what moves the model does not move the table
    assert base_of(moved).get_input_embeddings().weight.device.type == "cpu"


def test_hooks_go_with_it() -> None:
    """Such as the one that rounds what it gives."""
    made = adapted("llama", "off")
    stream_in(made, torch.bfloat16)
    on_host(made)
    assert base_of(made).get_input_embeddings()(torch.tensor([[1, 2]])).dtype == torch.bfloat16


def test_a_second_model_for_generation_reads_the_same_table() -> None:
    made = on_host(adapted("llama", "reference"))
    plan = DtypePlan("float32", "float32", "float32", autocast=False, reason="")
    second = merged_model(made, plan, "reference").model
    table = base_of(made).get_input_embeddings().weight
    assert second.get_input_embeddings().weight.data_ptr() == table.data_ptr()


def test_what_is_trained_tied_or_more_than_a_table_stays() -> None:
    frozen = model(tied=True).requires_grad_(False)
    assert "same weight" in (why_not_on_host(frozen) or "")
    trained = model(tied=False)
    assert "trained" in (why_not_on_host(trained) or "")
    scaled = model(tied=False).requires_grad_(False)
    scaled.set_input_embeddings(type("Scaled", (nn.Embedding,), {})(96, 64))
    assert "Scaled" in (why_not_on_host(scaled) or "")
    use_host_embedding(scaled, SilentReporter())
    assert not isinstance(scaled.get_input_embeddings(), HostEmbedding)


def test_evaluation_is_that_of_the_table_on_the_device() -> None:
    ids = torch.randint(3, 96, (2, 9), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "labels": ids.clone()}
    with torch.no_grad():
        losses = [
            forward_loss(made.eval(), dict(batch)).loss
            for made in (adapted("llama", "reference"), on_host(adapted("llama", "reference")))
        ]
    assert torch.equal(*losses)
