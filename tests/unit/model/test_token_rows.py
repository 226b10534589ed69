"""Rows of new tokens: the loss and its gradients are those of PEFT's own layers, which copy the whole matrix."""

from __future__ import annotations

import copy
from typing import Any

import peft
import pytest
import torch
from torch import Tensor

from ftcli.config.model import LoraConfig
from ftcli.model.backbone import head_of
from ftcli.model.lora import apply_lora
from ftcli.model.loss import forward_loss
from ftcli.model.token_rows import draw_rows
from ftcli.plan.precision import DtypePlan
from tests.small_models import build

pytestmark = pytest.mark.filterwarnings("ignore")

IDS = [266, 264, 265]
FLOAT32 = DtypePlan("float32", "float32", "float32", autocast=False, reason="")


def adapted(family: str, *, tied: bool, rows: int = 272) -> tuple[Any, Any]:
    """A model of ours with adapters and new rows, and the same one as PEFT has it."""
    base = build(family, vocab_size=rows, tie_word_embeddings=tied)
    draw_rows(base, IDS)
    plain = copy.deepcopy(base)
    ours, _ = apply_lora(base, LoraConfig(r=2), FLOAT32, seed=0, tokens=IDS)
    theirs = peft.get_peft_model(plain, ours.peft_config["default"])
    theirs.load_state_dict(ours.state_dict())
    return ours, theirs


def batch() -> tuple[Tensor, Tensor]:
    ids = torch.randint(5, 264, (2, 12), generator=torch.Generator().manual_seed(0))
    ids[:, 3], ids[0, 7], ids[1, 11] = 265, 264, 266
    labels = ids.clone()
    labels[:, :2] = -100
    return ids, labels


def loss_of(model: Any) -> Tensor:
    ids, labels = batch()
    return forward_loss(model, {"input_ids": ids, "labels": labels}, num_items=int((labels[:, 1:] != -100).sum())).loss


def oracle(model: Any) -> Tensor:
    ids, labels = batch()
    found: Tensor = model(input_ids=ids, labels=labels).loss
    return found


@pytest.mark.parametrize(
    ("family", "tied", "rows"),
    [("llama", True, 272), ("llama", False, 264), ("gemma3_text", True, 264), ("gemma2", False, 272)],
)
def test_gradients_are_those_of_pefts_layers_as_they_change(family: str, tied: bool, rows: int) -> None:
    ours, theirs = adapted(family, tied=tied, rows=rows)
    before = oracle(theirs).item()
    for _ in range(2):
        for model, loss in ((ours, loss_of(ours)), (theirs, oracle(theirs))):
            model.zero_grad()
            loss.backward()
        wanted = {name: p.grad for name, p in theirs.named_parameters() if p.grad is not None}
        found = {name: p.grad for name, p in ours.named_parameters() if p.grad is not None}
        assert found.keys() == wanted.keys()
        assert sum("trainable_tokens_delta" in name for name in found) == (1 if tied else 2)
        for name, grad in wanted.items():
            assert float((found[name] - grad).norm()) <= 2e-5 * float(grad.norm()) + 1e-9, name
        with torch.no_grad():  # an uneven step, after which the rows are others
            for model in (ours, theirs):
                for name, parameter in model.named_parameters():
                    if name in wanted:
                        parameter -= 0.3 * wanted[name]
    with torch.no_grad():
        assert loss_of(ours).item() == pytest.approx(oracle(theirs).item(), rel=1e-5)
        with ours.disable_adapter():
            assert loss_of(ours).item() == pytest.approx(before, rel=1e-5)
            assert head_of(ours).rows is None
        assert loss_of(ours).item() == pytest.approx(oracle(theirs).item(), rel=1e-5)


def test_the_matrices_stay_what_they_are_and_are_not_copied() -> None:
    ours, _ = adapted("llama", tied=False)
    base = ours.get_base_model()
    weights = {"embedding": base.get_input_embeddings().token_adapter.base_layer.weight, "head": head_of(ours).weight}
    before = {name: weight.detach().clone() for name, weight in weights.items()}
    loss_of(ours).backward()
    assert head_of(ours).weight is weights["head"]
    for name, weight in weights.items():
        assert weight.grad is None
        assert torch.equal(weight[:264], before[name][:264])


def test_rows_that_a_kernel_has_changed_are_seen() -> None:
    """Optimizers with kernels of their own (adamw_8bit, bitsandbytes') write behind torch's back."""
    ours, theirs = adapted("llama", tied=False)
    loss_of(ours).backward()
    for model in (ours, theirs):
        for name, parameter in model.named_parameters():
            if "trainable_tokens_delta" in name:
                parameter.data.mul_(-1.5)  # which leaves the parameter's version as it is
    with torch.no_grad():
        assert loss_of(ours).item() == pytest.approx(oracle(theirs).item(), rel=1e-5)


def test_new_rows_begin_as_the_mean_of_the_others() -> None:
    model = build("llama", vocab_size=264, tie_word_embeddings=True)
    before = model.get_input_embeddings().weight.detach().clone()
    draw_rows(model, [264, 265])
    after = model.get_input_embeddings().weight
    assert model.get_output_embeddings().weight is after
    assert (model.config.vocab_size, len(after)) == (266, 266)
    assert torch.equal(after[:264], before)
    torch.testing.assert_close(after[264:], before.mean(0).expand(2, -1))
