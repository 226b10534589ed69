"""The report's section on held-out pairs and labelled answers, and its histograms and scatter plots."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import pytest

from ftcli.run.atomic import write_json
from ftcli.run.directory import RunDirectory
from ftcli.run.metrics import read_metrics
from ftcli.run.report import render_report
from ftcli.run.report.margins import held_out_rows, histogram, scatter
from ftcli.run.summary import damage_of
from tests.unit.run.test_report import HOSTILE, Page

WORST = {
    "origin": HOSTILE,
    "margin": -1.5,
    "prompt": {"text": HOSTILE, "left_out": 40},
    "chosen": {"text": "yes", "left_out": 0},
    "rejected": {"text": "no", "left_out": 0},
}


def side(mean: float, **more: Any) -> dict[str, Any]:
    rng = random.Random(0)
    margins = [rng.gauss(mean, 1) if mean else 0.0 for _ in range(200)]
    classes = [("chosen over twice as long", 120, 0.9, 1.25), ("rejected over twice as long", 80, 0.25, -0.5)]
    return {
        "kind": "pairs",
        "rows": 5000,
        "wrong": 41,
        "margins": margins,
        "lengths": [rng.randrange(-30, 30) for _ in margins],
        "by_length": [dict(zip(("length", "pairs", "accuracy", "margin"), each, strict=True)) for each in classes],
        "by_source": [],
        "worst": [WORST],
        **more,
    }


def test_pairs_are_shown_before_and_after() -> None:
    found = held_out_rows({"before": side(0.0), "after": side(2.0)})
    assert found is not None
    assert found["note"] == "5,000 held-out pairs, 200 of them drawn; 41 on the wrong side now."
    assert [title in str(chart) for title, chart in zip(("Margins", "against length"), found["charts"], strict=True)]
    assert "before training: median 0" in found["charts"][0]
    assert re.search(r"after training: median [12]\.", found["charts"][0])
    assert list(found["tables"]) == ["Accuracy by length"]
    table = found["tables"]["Accuracy by length"]
    assert table.head == ["Length", "Pairs", "Before", "After", "Mean margin"]
    assert table.rows[1] == ["rejected over twice as long", "80", "25.0%", "25.0%", "-0.5"]
    (wrong,) = found["wrong"]
    assert [name for name, _ in wrong["answers"]] == ["Chosen", "Rejected"]
    assert (wrong["prompt"].left_out, wrong["margin"]) == (40, "-1.5")


def test_a_run_that_goes_on_tells_its_step_and_one_without_a_beginning_has_one_column() -> None:
    found = held_out_rows({"before": {}, "after": side(1.0), "step": 40})
    assert found is not None
    assert "after step 40" in found["charts"][0]
    assert found["tables"]["Accuracy by length"].head == ["Length", "Pairs", "Accuracy", "Mean margin"]
    first = held_out_rows({"before": side(1.0), "after": {}})
    assert first is not None
    assert first["note"].endswith("41 on the wrong side before.")


def test_labelled_answers_are_shown_by_label() -> None:
    one = side(1.0, kind="answers", labels=[1, -1] * 100, by_length=[])
    one["worst"] = [{**WORST, "rejected": None, "label": -1}]
    found = held_out_rows({"before": {}, "after": one})
    assert found is not None
    assert (found["title"], found["columns"]) == ("Held-out answers", ("Answer", "Label", "Reward"))
    assert all("undesirable" in chart for chart in found["charts"])
    assert [(name, text.pieces[0][1]) for name, text in found["wrong"][0]["answers"]][1] == ("Label", "undesirable")


@pytest.mark.parametrize(
    "content",
    [
        {},
        {"before": 3, "after": "x"},
        {"after": {"margins": ["x", 1]}},
        {"after": {"margins": [1.0, None, 2.0]}},
        {
            "after": {
                "margins": [1.0, 2.0],
                "lengths": {},
                "worst": [3, {"prompt": 4, "label": []}],
                "by_length": [{}, 1],
            }
        },
        {"after": {"margins": [1e99, -1e99], "lengths": [1, 1e99], "kind": "answers", "labels": [[], "x"]}},
        {
            "after": {"margins": [0.0], "lengths": [0], "kind": "pairs", "rows": "many", "by_source": [{}, {}]},
            "step": [],
        },
    ],
    ids=str,
)
def test_whatever_stands_in_the_file_the_page_is_drawn(content: dict[str, Any], tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    write_json(run.margins_path, content)
    Page(render_report(run))


def test_text_of_data_is_only_text_and_damage_is_named(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    one = side(1.0, by_source=[{"source": f"{HOSTILE}{n}", "rows": 1, "accuracy": 1, "margin": 0} for n in (1, 2)])
    write_json(run.margins_path, {"before": one, "after": one})
    page = Page(render_report(run))
    assert not {"script", "img"} & page.names()
    assert "and 40 more characters" in "".join(page.text)
    assert "alert(1)" in "".join(page.text)
    run.margins_path.write_text("{")
    assert any(text.startswith("margins.json: ") for text in damage_of(run, read_metrics(run.metrics_path)))


def test_shares_of_a_histogram_add_up_and_ends_are_inside() -> None:
    values = [-2.0, -1.0, 0.0, 0.5, 0.5, 3.0]
    chart = str(histogram("Margins", {"now": values}, "margin"))
    shares = [float(found) for found in re.findall(r"now: ([\d.]+)% from", chart)]
    assert sum(shares) == pytest.approx(100, abs=0.5)
    assert max(shares) == 33.3
    assert histogram("Margins", {"now": []}, "margin") == ""


def test_a_sample_at_one_place_is_a_line_beside_one_that_spreads() -> None:
    """Before the first step every margin is 0: as a bar it would hide what came of them."""
    flat, spread = {"before": [0.0] * 50}, {"after": [n / 10 for n in range(-20, 60)]}
    beside = str(histogram("Margins", flat | spread, "margin"))
    assert "before: all around 0" in beside
    assert "before: 100.0%" not in beside
    assert "before: 100.0%" in str(histogram("Margins", flat, "margin"))


def test_dots_are_bounded_and_medians_follow_them() -> None:
    points = [(float(n % 100), 2.0 * (n % 100)) for n in range(5000)]
    chart = str(scatter("Margin against length", {"pairs": points}, "tokens"))
    assert 300 <= chart.count("<circle") <= 600
    assert chart.count("<polyline") == 1
    assert scatter("Margin against length", {"pairs": [(0.0, 1.0), (0.0, 2.0)]}, "tokens") == ""
