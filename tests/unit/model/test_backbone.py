"""Hidden states and logits cannot be confused, and the chunked loss is the model's own loss."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import Gemma2Config, LlamaConfig, PreTrainedModel
from transformers.models.gemma2.modeling_gemma2 import Gemma2ForCausalLM
from transformers.models.llama.modeling_llama import LlamaForCausalLM

from ftcli.model.backbone import HiddenStates, head_of, hidden_states
from ftcli.model.loss import forward_loss, next_token_loss

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def gemma2() -> PreTrainedModel:
    torch.manual_seed(0)
    config = Gemma2Config(**SIZES, head_dim=8, sliding_window=4, final_logit_softcapping=3.0)
    config._attn_implementation = "eager"
    return Gemma2ForCausalLM(config).double()


def llama() -> PreTrainedModel:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES)).double()


def batch() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    ids = torch.randint(3, 96, (3, 11))
    labels = ids.clone()
    labels[:, :4] = -100
    mask = torch.ones_like(ids)
    mask[1, 8:] = 0
    labels[1, 8:] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


@pytest.mark.parametrize("make", [gemma2, llama])
def test_loss_and_gradients_equal_the_models_own(make: Any) -> None:
    model, inputs = make(), batch()
    ours = forward_loss(model, inputs, num_items=(inputs["labels"][:, 1:] != -100).sum())
    ours.loss.backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    theirs = model(**inputs).loss
    theirs.backward()
    torch.testing.assert_close(ours.loss.double(), theirs.double(), rtol=1e-6, atol=0)  # theirs is float32
    assert gradients
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-4, atol=1e-7, msg=name)


def test_count_and_correct() -> None:
    model, inputs = llama(), batch()
    result = forward_loss(model, inputs)
    logits = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits[:, :-1]
    labels = inputs["labels"][:, 1:]
    chosen = labels != -100
    assert int(result.count) == int(chosen.sum())
    assert result.correct is not None
    assert int(result.correct) == int((logits.argmax(-1) == labels)[chosen].sum())


def test_logits_passed_as_hidden_states_are_refused() -> None:
    """The field's bug: "a and b must have same reduction dim, but got [s0, 32000] X [4096, 32000]"."""
    model, inputs = llama(), batch()
    logits = model(input_ids=inputs["input_ids"]).logits
    with pytest.raises(TypeError, match="logits were passed where hidden states are meant"):
        next_token_loss(HiddenStates(logits), head_of(model), inputs["labels"])


def test_hidden_states_have_the_width_of_the_head() -> None:
    model, inputs = gemma2(), batch()
    states = hidden_states(model, {"input_ids": inputs["input_ids"]})
    assert states.tensor.shape == (3, 11, 32)
    assert head_of(model).weight.shape == (96, 32)
    assert head_of(model).softcap == 3.0


def test_a_packed_head_is_refused_by_shape_and_dtype() -> None:
    """The field's bug: a packed 4-bit weight of shape (n, 1) uint8 reached a matmul."""
    model = llama()
    model.lm_head.weight = torch.nn.Parameter(torch.zeros((96 * 32 // 2, 1), dtype=torch.uint8), requires_grad=False)
    with pytest.raises(TypeError, match=r"torch\.uint8.*expected a floating \(vocab_size, 32\)"):
        head_of(model)


def test_labels_of_another_length_are_refused() -> None:
    model, inputs = llama(), batch()
    states = hidden_states(model, {"input_ids": inputs["input_ids"]})
    with pytest.raises(TypeError, match="differ in length"):
        next_token_loss(states, head_of(model), inputs["labels"][:, :-1])
