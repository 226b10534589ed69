"""One loss, whatever the batch size, the padding side, the packing and the order; and what happens without memory."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import transformers

from ftcli.data.tokens import TokenizedRow
from ftcli.errors import ExitCode, Finding, FtcliError
from ftcli.evaluate.loss import LossResult, combine, evaluate_loss
from ftcli.model.patch import patch
from ftcli.plan.precision import DtypePlan
from ftcli.reporting import SilentProgress, SilentReporter
from ftcli.rows.row import Row

PLAN = DtypePlan("float32", "float32", "float32", False, "a test")
CPU = torch.device("cpu")
LENGTHS = (19, 7, 8, 9, 33, 2)


class Heard(SilentReporter):
    """Remembers findings, and how far the progress went."""

    def __init__(self) -> None:
        self.findings: list[Finding] = []
        self.done = 0

    def finding(self, finding: Finding) -> None:
        self.findings.append(finding)

    @contextmanager
    def progress(self, total: int | None, description: str) -> Iterator[Any]:
        heard = self

        class Counting(SilentProgress):
            def advance(self, count: int = 1) -> None:
                heard.done += count

        yield Counting()


@pytest.fixture(scope="module", params=["transformers", "kernels"])
def model(request: pytest.FixtureRequest) -> Any:
    """A Gemma-2 with a window of 8, as transformers has it and on our layers."""
    config = transformers.Gemma2Config(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, sliding_window=8, max_position_embeddings=64, initializer_range=0.3,
    )  # fmt: skip
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    made = transformers.AutoModelForCausalLM.from_config(config).requires_grad_(False)
    if request.param == "kernels":
        assert all(entry.on for entry in patch(made, "reference").table)
    return made


def rows(lengths: tuple[int, ...] = LENGTHS) -> list[TokenizedRow]:
    """Rows of random ids of which the first third is a prompt; the last has nothing supervised."""
    generator = torch.Generator().manual_seed(1)
    made = []
    for number, length in enumerate(lengths, start=1):
        ids = torch.randint(3, 64, (length,), generator=generator).tolist()
        prompt = max(length // 3, 1)
        labels = [-100] * prompt + ids[prompt:] if number < len(lengths) else [-100] * length
        made.append(TokenizedRow(Row("eval.jsonl", number, {}), ids, labels))
    return made


def evaluated(model: Any, sequences: list[TokenizedRow], batch_size: int = 2, **options: Any) -> LossResult:
    settings: dict[str, Any] = {
        "pad_token_id": 0, "batch_size": batch_size, "plan": PLAN, "device": CPU, "reporter": SilentReporter(),
    }  # fmt: skip
    return evaluate_loss(model, sequences, **{**settings, **options})


def by_hand(model: Any, sequences: list[TokenizedRow]) -> tuple[float, float, int]:
    """Summed in double precision from all logits of one row at a time."""
    total, correct, count = 0.0, 0, 0
    for row in sequences:
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([row.input_ids])).logits[0].double().log_softmax(-1)
        for position in range(1, len(row.input_ids)):
            if row.labels[position] != -100:
                total -= logits[position - 1, row.labels[position]].item()
                correct += int(logits[position - 1].argmax() == row.labels[position])
                count += 1
    return total / count, correct / count, count


def test_it_is_what_all_the_logits_say(model: Any) -> None:
    loss, accuracy, count = by_hand(model, rows())
    found = evaluated(model, rows())
    assert found.loss == pytest.approx(loss, rel=1e-5)
    assert found.token_accuracy == pytest.approx(accuracy, rel=1e-12)
    assert (found.tokens, found.rows) == (count, len(LENGTHS))
    assert found.perplexity == math.exp(found.loss)


@pytest.mark.parametrize("layout", ["right", "left", "packed"])
def test_batch_size_padding_side_packing_and_order_change_nothing(model: Any, layout: str) -> None:
    alone = evaluated(model, rows(), 1)
    for batch_size in (1, 2, 5):
        for sequences in (rows(), rows()[::-1]):
            found = evaluated(model, sequences, batch_size, layout=layout)
            assert found.loss == pytest.approx(alone.loss, rel=1e-5)
            assert found.token_accuracy == alone.token_accuracy
            assert (found.tokens, found.rows) == (alone.tokens, alone.rows)


def test_packs_may_be_longer_than_any_row(model: Any) -> None:
    alone = evaluated(model, rows(), 1)
    assert evaluated(model, rows(), 1, layout="packed", pack_length=64).loss == pytest.approx(alone.loss, rel=1e-5)


def test_parts_combine_to_the_whole(model: Any) -> None:
    parts = [evaluated(model, part) for part in (rows()[:2], rows()[2:])]
    whole = evaluated(model, rows())
    combined = combine(parts)
    assert combined is not None
    assert combined.loss == pytest.approx(whole.loss, rel=1e-6)
    assert combined.token_accuracy == pytest.approx(whole.token_accuracy)
    assert (combined.tokens, combined.rows) == (whole.tokens, whole.rows)
    assert combine([]) is None


def test_the_mode_comes_back(model: Any) -> None:
    model.train()
    try:
        evaluated(model, rows())
        assert model.training
    finally:
        model.eval()


class Limited(torch.nn.Module):
    """A model on a device that holds ``limit`` tokens at once; what does not fit raises what CUDA raises."""

    def __init__(self, model: Any, limit: int) -> None:
        super().__init__()
        self.inner, self.limit = model, limit
        self.shapes: list[tuple[int, int]] = []

    base_model_prefix = "model"

    @property
    def config(self) -> Any:
        return self.inner.config

    def get_input_embeddings(self) -> Any:
        return self.inner.get_input_embeddings()

    def get_output_embeddings(self) -> Any:
        return self.inner.get_output_embeddings()

    @property
    def model(self) -> Any:
        def backbone(input_ids: torch.Tensor, **kwargs: Any) -> Any:
            if input_ids.numel() > self.limit:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            self.shapes.append(tuple(input_ids.shape))
            return self.inner.model(input_ids=input_ids, **kwargs)

        return backbone


@pytest.mark.parametrize("layout", ["right", "left", "packed"])
def test_out_of_memory_halves_the_batch_says_so_and_goes_on(model: Any, layout: str) -> None:
    reporter = Heard()
    limited = Limited(model, 70)
    found = evaluated(limited, rows((30,) * 7), 6, layout=layout, pack_length=30, reporter=reporter)
    assert found.loss == pytest.approx(evaluated(model, rows((30,) * 7), 1).loss, rel=1e-5)
    assert [finding.code for finding in reporter.findings] == ["FT764", "FT764"]
    assert "6 rows at a time: going on with 3" in reporter.findings[0].message
    assert "3 rows at a time: going on with 1" in reporter.findings[1].message
    assert {finding.severity for finding in reporter.findings} == {"warning"}
    assert limited.shapes == [(1, 30)] * 7
    assert reporter.done == 7


def test_a_row_that_does_not_fit_alone_is_named(model: Any) -> None:
    with pytest.raises(FtcliError, match="FT761") as raised:
        evaluated(Limited(model, 20), rows(), 4)
    assert raised.value.exit_code == ExitCode.OUT_OF_MEMORY
    assert str(raised.value.findings[0].origin) == "eval.jsonl:5"


def test_a_loss_that_is_not_finite_is_an_error(model: Any) -> None:
    weight = model.get_output_embeddings().weight
    kept = weight.data.clone()
    try:
        weight.data[:] = float("nan")
        with pytest.raises(FtcliError, match="FT762") as raised:
            evaluated(model, rows())
    finally:
        weight.data.copy_(kept)
    assert raised.value.exit_code == ExitCode.DIVERGED
