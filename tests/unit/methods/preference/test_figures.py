"""Stop tokens of held-out answers, and the charts and scores that methods on preferences share."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from ftcli.data.tokens import TokenizedRow
from ftcli.labels import IGNORE_INDEX
from ftcli.methods.preference.figures import stop_columns, stop_findings, stop_measures
from ftcli.methods.preference.pairs import AnswerScorer, ends_at
from ftcli.model.patch import patch
from ftcli.plan.batches import Batches
from ftcli.rows.row import Row
from ftcli.tables import code_of, methods
from tests.unit.methods.preference import steps

STOP = 9


def row(*labels: int) -> TokenizedRow:
    return TokenizedRow(Row("a.jsonl", 1, {}), [1, *map(abs, labels)], [IGNORE_INDEX, *labels])


def test_an_answer_ends_with_its_last_scored_token() -> None:
    assert ends_at(row(5, STOP), {STOP})
    assert ends_at(row(5, STOP, IGNORE_INDEX), {STOP})
    assert not ends_at(row(STOP, 5), {STOP})
    assert not ends_at(row(IGNORE_INDEX), {STOP})


def test_answers_that_were_cut_off_have_no_stop_token() -> None:
    rows = [row(5, STOP), row(5, 6), row(STOP)]
    policy, reference = torch.tensor([-1.0, -2.0, -4.0]), torch.tensor([-0.5, -9.0, -1.0])
    columns = torch.stack(stop_columns(rows, {STOP}, policy, reference), 1).double().numpy()
    assert stop_measures(columns) == {"stop_logp": -2.5, "stop_change": -1.75}
    alone = torch.stack(stop_columns(rows, {STOP}, policy, None), 1).double().numpy()
    assert stop_measures(alone) == {"stop_logp": -2.5}
    none = torch.stack(stop_columns(rows[1:2], {STOP}, policy[1:2], None), 1).double().numpy()
    assert stop_measures(none) == {}


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        ({}, {"stop_logp": -3.0, "stop_change": -0.6}, False),
        ({}, {"stop_logp": -3.0, "stop_change": -2.3}, True),
        ({"stop_logp": -0.1}, {"stop_logp": -3.0}, True),  # compared with nothing, but measured before
        ({"stop_logp": -2.9}, {"stop_logp": -3.0}, False),
        ({}, {"stop_logp": -3.0}, False),
        ({"stop_logp": -0.1}, {}, False),
    ],
)
def test_a_stop_token_that_has_become_unlikely_is_told(
    before: dict[str, float], after: dict[str, float], told: bool
) -> None:
    found = list(stop_findings(before, after))
    assert [each.code for each in found] == ["FT717"] * told
    assert all("preference.sft_weight" in str(each.help) and each.severity == "warning" for each in found)


def test_the_warning_says_how_much_is_left() -> None:
    (found,) = stop_findings({}, {"stop_change": -math.log(20)})
    assert "lost 3 nats: 5.00% of its probability are left" in found.message
    (found,) = stop_findings({}, {"stop_change": -2000.0})
    assert "0.00%" in found.message


@pytest.mark.parametrize("batches", [steps.PADDED, steps.UNPADDED, steps.SHARED], ids=["padded", "flat", "shared"])
def test_the_last_token_is_what_it_adds_to_the_sum(tmp_path: Path, batches: Batches) -> None:
    model = steps.base_model(tmp_path)
    patch(model, "reference")
    documents = steps.rows(((3, 2, 4), (5, 6, 3)))
    shorter = [TokenizedRow(one.row, one.input_ids, [*one.labels[:-1], IGNORE_INDEX]) for one in documents]
    scorer = AnswerScorer(batches, 0, model.config.vocab_size, 0.5)
    with torch.no_grad():
        whole = scorer.score(model, scorer.batch(documents), last=True, aligned=True)
        without = scorer.score(model, scorer.batch(shorter))
        plain = scorer.score(model, scorer.batch(documents), aligned=True)
    assert whole.last is not None
    assert whole.last.tolist() == pytest.approx((whole.sums - without.sums).tolist(), abs=1e-4)
    assert whole.aligned is not None
    assert plain.aligned is not None
    assert torch.equal(whole.aligned, plain.aligned)
    assert torch.equal(whole.sums, plain.sums)


@pytest.mark.parametrize("name", ["dpo", "orpo", "simpo", "kto", "reward"])
def test_charts_and_scores_are_in_the_words_of_the_method(name: str) -> None:
    method = methods.row(name)
    assert method.charts is not None
    assert method.scores is not None
    charts, scores = code_of(method.charts), code_of(method.scores)
    words = " ".join([*(text for chart in charts for text in (chart.title, *(c.name for c in chart.curves))),
                      *(label for _, label, _, _ in scores)])  # fmt: skip
    assert "{" not in words
    assert ("desirable" in words, "rejected" in words) == (name == "kto", name != "kto")
    assert len({key for key, *_ in scores}) == len(scores)
    assert len({chart.title for chart in charts}) == len(charts)
    assert ("stop_logp" in {key for key, *_ in scores}) == (name != "reward")
