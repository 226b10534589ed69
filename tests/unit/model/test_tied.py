"""Embedding and head that are one trained weight: one gradient, the sum of both."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from ftkernels.linear_cross_entropy import HeadGradient, linear_cross_entropy, tied_embedding
from torch import Tensor, nn

from ftcli.model.backbone import TiedEmbedding, use_tied_embedding
from ftcli.model.loss import forward_loss
from tests.unit.model.test_gradient_checkpointing import SIZES


def model(*, tied: bool = True, **more: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=tied, **more)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").train()


def gradients(made: Any, micro_batches: int = 2) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    for length in (13, 7)[:micro_batches]:
        ids = torch.randint(3, 96, (2, length), generator=generator)
        ids[:, 2] = ids[:, 0]  # a token that comes again
        forward_loss(made, {"input_ids": ids, "labels": ids.clone()}, num_items=40).loss.backward()
    return {name: p.grad.clone() for name, p in made.named_parameters()}


@pytest.mark.parametrize("padding", [None, 5])
def test_it_is_the_gradient_that_autograd_makes_of_two(padding: int | None) -> None:
    wanted = gradients(model(pad_token_id=padding))
    made = model(pad_token_id=padding)
    assert use_tied_embedding(made)
    assert isinstance(made.get_input_embeddings(), TiedEmbedding)
    assert made.get_input_embeddings().weight is made.get_output_embeddings().weight
    found = gradients(made)
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        assert torch.allclose(found[name], gradient, rtol=1e-5, atol=1e-7), name


def test_names_random_numbers_and_evaluation_are_as_before() -> None:
    made, plain = model(), model()
    before = torch.get_rng_state()
    use_tied_embedding(made)
    assert torch.equal(torch.get_rng_state(), before)
    assert made.state_dict().keys() == plain.state_dict().keys()
    assert [name for name, _ in made.named_parameters()] == [name for name, _ in plain.named_parameters()]
    ids = torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        assert torch.equal(made(input_ids=ids).logits, plain(input_ids=ids).logits)


def test_other_losses_of_the_same_model_lose_nothing() -> None:
    """Where the head's gradient comes by autograd, the embedding's is added to it by autograd."""
    grads = []
    for tied in (False, True):
        made = model()
        if tied:
            use_tied_embedding(made)
        ids = torch.tensor([[4, 5, 6, 4]])
        made(input_ids=ids).logits.square().mean().backward()
        grads.append(made.get_input_embeddings().weight.grad)
    assert torch.allclose(*grads, rtol=1e-5, atol=1e-8)


def test_weights_that_are_two_or_frozen_stay_as_they_are() -> None:
    assert not use_tied_embedding(model(tied=False))
    frozen = model()
    frozen.get_input_embeddings().weight.requires_grad_(False)
    assert not use_tied_embedding(frozen)


def test_a_head_whose_gradient_nobody_took_is_not_trained_in_silence() -> None:
    head, weight = HeadGradient(), nn.Parameter(torch.randn(20, 8))
    labels = torch.randint(0, 20, (6,))

    def step(*, embedded: bool) -> None:
        x = tied_embedding(torch.arange(6), weight, head) if embedded else torch.randn(6, 8, requires_grad=True)
        loss = linear_cross_entropy(x, weight, labels, handed=head)
        assert isinstance(loss, Tensor)
        loss.backward()

    step(embedded=True)
    assert weight.grad is not None
    step(embedded=False)
    with pytest.raises(RuntimeError, match="had no backward pass"):
        step(embedded=True)
