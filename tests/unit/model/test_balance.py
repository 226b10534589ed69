"""The routers' auxiliary loss is transformers': its value and every gradient, whatever runs the layers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from ftcli.data.collate import packed_batch, padded_batch
from ftcli.model.fused import stack_of
from ftcli.model.gradient_checkpointing import use_checkpointing
from ftcli.model.loss import forward_loss
from ftcli.model.patch import patch
from ftcli.model.routing import RouterBalance, counted_tokens
from ftcli.tables.families import TABLE
from tests.small_models import TEXT, build, by_kind

pytestmark = pytest.mark.filterwarnings("ignore")

BALANCED = [name for name in TEXT if (row := TABLE.get(name)) and row.experts is not None and row.experts.balanced]
COEFFICIENT = 0.7
CPU = torch.device("cpu")
LENGTHS = (21, 9, 14)


def documents(lengths: tuple[int, ...] = LENGTHS) -> list[Any]:
    ids = torch.randint(5, 250, (sum(lengths),), generator=torch.Generator().manual_seed(3)).split(list(lengths))
    return [SimpleNamespace(input_ids=each.tolist(), labels=each.tolist()) for each in ids]


def padded(lengths: tuple[int, ...] = LENGTHS) -> dict[str, Tensor]:
    return padded_batch(documents(lengths), 0)


def model_of(name: str, kernels: Any = "reference", policy: Any = False) -> Any:
    torch.manual_seed(0)
    model = build(name)
    for parameter in model.parameters():  # so that tokens are not spread evenly
        parameter.data.add_(torch.randn_like(parameter), alpha=0.05)
    model.config.get_text_config().router_aux_loss_coef = COEFFICIENT
    if kernels != "off":
        assert all(entry.on for entry in patch(model, kernels).table)
        use_checkpointing(model, policy)
    return model.train()


def trained(model: Any, loss: Tensor) -> tuple[float, dict[str, Tensor]]:
    model.zero_grad()
    loss.backward()
    return float(loss), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def ours(model: Any, batch: dict[str, Tensor], items: int, balance: Any = None) -> Tensor:
    stack = stack_of(model, torch.float32)
    balance = balance or RouterBalance(model, None, CPU)
    balance.begin(counted_tokens(batch))
    inputs = {key: value for key, value in batch.items() if key != "lengths"}
    stack = None if isinstance(stack, str) else stack
    return forward_loss(model, inputs, num_items=items, stack=stack, balance=balance).loss


def require_alike(
    found: tuple[float, dict[str, Tensor]], wanted: tuple[float, dict[str, Tensor]], within: float = 1e-5
) -> None:
    assert found[0] == pytest.approx(wanted[0], rel=1e-5)
    assert found[1].keys() == wanted[1].keys()
    for name, gradient in wanted[1].items():
        assert (found[1][name] - gradient).norm() <= within * gradient.norm() + 1e-9, name


def theirs(name: str, batch: dict[str, Tensor]) -> tuple[float, dict[str, Tensor]]:
    """By transformers alone, its mask and its loss; the routers' part is far from nothing."""
    model = model_of(name, "off")
    model.router_aux_loss_coef = COEFFICIENT
    inputs = {key: value for key, value in batch.items() if key in ("input_ids", "attention_mask", "position_ids")}
    labels = batch["labels"]
    found = model(**inputs, labels=labels, output_router_logits=True, use_cache=False)
    assert float(found.loss) - COEFFICIENT * float(found.aux_loss) > 0
    assert float(found.aux_loss) > 1.0
    return trained(model, found.loss)


@pytest.mark.parametrize("name", by_kind(BALANCED))
def test_padded_rows_have_transformers_loss_and_gradients(name: str) -> None:
    batch = padded()
    wanted, items = theirs(name, batch), sum(LENGTHS) - len(LENGTHS)
    model = model_of(name)
    within = 5e-5 if "qwen3_5" in name else 1e-5  # delta nets' chunks in float32 are not transformers'
    require_alike(trained(model, ours(model, batch, items)), wanted, within)
    plain = model_of(name, "off")
    require_alike(trained(plain, ours(plain, batch, items)), wanted)


@pytest.mark.parametrize("policy", [True, "selective", "offload"])
def test_layers_that_run_again_note_the_same(policy: Any) -> None:
    batch = padded()
    once, again = model_of("qwen3_moe"), model_of("qwen3_moe", policy=policy)
    if policy is True:
        again.gradient_checkpointing_enable({"use_reentrant": False})
    (loss, gradients), (other, found) = (trained(model, ours(model, batch, 41)) for model in (once, again))
    assert loss == other
    assert all(torch.equal(found[name], gradient) for name, gradient in gradients.items())


def test_what_fills_packed_rows_up_is_not_counted() -> None:
    """transformers gets the documents one after the other, and nothing behind them."""
    items = sum(LENGTHS) - len(LENGTHS)
    whole, filled = (packed_batch([documents()], 0, width=width) for width in (None, 64))
    wanted, model = theirs("qwen3_moe", whole), model_of("qwen3_moe")
    require_alike(trained(model, ours(model, filled, items)), wanted)


def test_micro_batches_add_their_share() -> None:
    """The gradient is the mean of their auxiliary losses' by supervised tokens, and that of one without tokens is 0."""
    model = model_of("mixtral")
    balance = RouterBalance(model, None, CPU)
    parts = [padded(lengths) for lengths in ((21, 9), (14,))]
    blank = {**parts[0], "labels": torch.full_like(parts[0]["labels"], -100)}
    total = sum(float(ours(model, part, 41, balance=balance)) for part in [*parts, blank])
    wanted = sum(
        float(theirs("mixtral", part)[0]) * share for part, share in zip(parts, (28 / 41, 13 / 41), strict=True)
    )
    assert total == pytest.approx(wanted, rel=1e-5)


def test_evaluation_notes_nothing_and_a_second_one_replaces_the_first() -> None:
    model, batch = model_of("qwen3_moe"), padded()
    first = RouterBalance(model, None, CPU)
    second = RouterBalance(model, 0.0, CPU)
    model.eval()
    with torch.no_grad():
        forward_loss(model, batch)
    assert not second.ledger.counts.any()
    loss, gradients = trained(model.train(), ours(model, batch, 41, balance=second))
    assert second.ledger.counts.any()
    assert not first.ledger.counts.any()
    plain = model_of("qwen3_moe")
    require_alike((loss, gradients), trained(plain, forward_loss(plain, batch, num_items=41).loss))
