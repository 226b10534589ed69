"""Log-probabilities from hidden states, for every family: hidden states and logits are never taken for each other.

The field's bug (Unsloth 1790, and 8204 again): a model's forward is asked for hidden states in the place of logits,
answers with logits all the same where nobody taught it, and the loss multiplies them by the head: "a and b must have
same reduction dim, but got [s0, 32000] X [4096, 32000]". Where both widths are equal, it trains on nonsense.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ftcli.config.model import QuantizationConfig
from ftcli.model.backbone import HiddenStates, head_of, hidden_states
from ftcli.model.loss import next_token_log_probs
from tests.quantized import load
from tests.small_models import MULTIMODAL, STRUCTURES, TEXT, VOCABULARY, build, by_kind

FAMILIES = sorted({*TEXT, *MULTIMODAL})
TEMPERATURE = 0.8


def batch() -> tuple[Tensor, Tensor]:
    """Ids, and labels of which the first four of each row are a prompt."""
    torch.manual_seed(1)
    ids = torch.randint(5, 255, (2, 14))
    labels = ids.clone()
    labels[:, :4] = -100
    return ids, labels


def plain(model: Any, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies of the labelled tokens out of the model's own logits."""
    log_p = torch.log_softmax(model(input_ids=ids, use_cache=False).logits[:, 3:-1].float() / TEMPERATURE, -1)
    return log_p.gather(2, ids[:, 4:, None]).flatten(), -(log_p.exp() * log_p).sum(-1).flatten()


@torch.no_grad()
def check(model: Any) -> None:
    """Ours are the model's own; what is not hidden states is refused."""
    ids, labels = batch()
    wanted = plain(model, ids)
    head, hidden = head_of(model), hidden_states(model, {"input_ids": ids})
    found = next_token_log_probs(hidden, head, labels, temperature=TEMPERATURE)
    for mine, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)
    vocabulary, width = head.weight.shape
    assert width != vocabulary >= VOCABULARY
    logits = HiddenStates(torch.zeros(2, 14, vocabulary))
    with pytest.raises(TypeError, match="logits were passed where hidden states are meant"):
        next_token_log_probs(logits, head, labels, temperature=1.0)


@pytest.mark.parametrize("model_type", by_kind(FAMILIES, STRUCTURES))
def test_unsloth_1790_hidden_states_are_hidden_states_in(model_type: str) -> None:
    check(build(model_type))


def test_unsloth_1790_a_model_that_ignores_requests_for_hidden_states() -> None:
    """Nothing is asked of its forward, so there is nothing that it could ignore."""
    model = build("mistral")
    forward = model.forward
    asked: list[str] = []

    def deaf(*args: Any, output_hidden_states: Any = None, return_dict: Any = None, **kwargs: Any) -> Any:
        asked.append("forward")
        return forward(*args, **kwargs)

    model.forward = deaf
    check(model)
    assert asked == ["forward"]  # for its own logits, which are compared


def test_logits_of_the_width_of_hidden_states_have_another_type() -> None:
    """Where a vocabulary is as large as the hidden size, widths tell nothing: types do."""
    _, labels = batch()
    with pytest.raises(AttributeError):
        next_token_log_probs(torch.zeros(2, 14, 32), head_of(build("llama")), labels, temperature=1.0)  # type: ignore[arg-type]


def test_a_packed_head_is_refused() -> None:
    """A quantized head has no floating matrix: its packed weight would be multiplied as if it were one."""
    model = build("llama")
    packed = nn.Linear(32, VOCABULARY, bias=False)
    packed.weight = nn.Parameter(torch.zeros(32 * VOCABULARY // 2, 1, dtype=torch.uint8), requires_grad=False)
    model.set_output_embeddings(packed)
    with pytest.raises(TypeError, match="expected a floating"):
        head_of(model)


@pytest.mark.parametrize("method", ["nf4", "fp8"])
def test_a_quantized_base_keeps_a_floating_head(method: str) -> None:
    model = load(settings=QuantizationConfig(method=method)).eval()
    head = head_of(model)
    assert head.weight.is_floating_point()
    check(model)


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
@pytest.mark.parametrize("model_type", ["llama", "gemma2"], ids=["untied", "tied"])
def test_a_saved_head_is_the_trained_copy_and_its_reference_the_original(model_type: str) -> None:
    import peft

    config = peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(build(model_type), config).eval()
    trained = dict(model.named_parameters())["base_model.model.lm_head.modules_to_save.default.weight"]
    with torch.no_grad():
        trained.mul_(1.5)
    ids, labels = batch()

    def ours() -> Tensor:
        states = hidden_states(model, {"input_ids": ids})
        return next_token_log_probs(states, head_of(model), labels, temperature=TEMPERATURE)[0]

    torch.testing.assert_close(ours(), plain(model, ids)[0], rtol=1e-4, atol=1e-4)
    with model.disable_adapter():
        torch.testing.assert_close(ours(), plain(model, ids)[0], rtol=1e-4, atol=1e-4)
    ours().sum().backward()
    assert trained.grad is not None
    assert trained.grad.norm() > 0
