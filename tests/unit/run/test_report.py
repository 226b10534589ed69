"""report.html: complete, offline, and safe against what models say."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
import yaml

from ftcli.config.recipe import Recipe
from ftcli.facts.device import named_device
from ftcli.plan.precision import DtypePlan
from ftcli.run.atomic import read_json_object, store_json, write_json
from ftcli.run.directory import RunDirectory
from ftcli.run.manifest import Fingerprint, build_manifest
from ftcli.run.metrics import MetricsWriter
from ftcli.run.report import LiveProgress, render_report, write_report
from ftcli.run.report.charts import (
    HEIGHT,
    WIDTH,
    ChartLook,
    Series,
    line_chart,
    log_ticks,
    round_ticks,
    smoothed,
    tag,
    thinned,
)
from ftcli.run.results import AnsweredRow, EvalScores, Evaluation, TaskScore
from ftcli.run.resume import open_run
from ftcli.units import number

HOSTILE = "</pre><script>alert(1)</script><img src=x onerror='alert(2)'>\" onload=\"x\x00\x1b[2J\u202eevil\ud800"


class Page(HTMLParser):
    """Every element and attribute of a page, and whether all elements are closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)

    def names(self) -> set[str]:
        return {name for name, _ in self.elements}


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    raw = {
        "version": 1,
        "run": {"name": "demo"},
        "model": {"name_or_path": "bundled:tiny-gemma2"},
        "lora": {"r": 8},
        "train": {"learning_rate": 0.003},
    }
    text = yaml.safe_dump(Recipe.model_validate(raw).model_dump(mode="json"))
    with open_run(tmp_path / "run", "auto", text) as opened:
        directory = opened.directory
        manifest = build_manifest(
            command="train",
            recipe_yaml=text,
            device=replace(named_device("h200"), name="NVIDIA H200"),
            seeds={"seed": 42},
            dtype_plan=DtypePlan("bfloat16", "float32", "bfloat16", True, "GPU"),
            parts=[],
            activations={"requested": False, "gradient_checkpointing": False, "reason": "as the recipe says"},
            predicted_memory=None,
            data=[Fingerprint(HOSTILE, 10, "ab" * 32)],
        )
        manifest["kernels"] = [{"layer": "model.norm", "kernel": "rms_norm", "on": False, "reason": HOSTILE}]
        manifest["processes"].append({**manifest["processes"][0], "from_step": 2})
        store_json(directory.manifest_path, manifest)
        with MetricsWriter(directory.metrics_path) as metrics:
            for step in (1, 2, 3, 4):
                loss = float("nan") if step == 3 else 2.0 / step
                metrics.write(step, {"loss": loss, "grad_norm": 1.0, "learning_rate": 1e-3, "tokens_per_second": 900.0})
            metrics.write(4, {"eval_loss": 0.75})
        counts = {"rows": 9, "rows_kept": 8, "rows_dropped": 1, "rows_truncated": 0, "tokens": 100, "longest": 12}
        tokens = {"tokens_kept": 90, "tokens_cut": 10, "tokens_masked": 40}
        write_json(directory.tokens_path, {"datasets": [{"name": HOSTILE, "split": "train", **counts, **tokens}]})
        scores = [
            EvalScores(loss, None, None, 50, (TaskScore("exact_match", v, 40),)) for loss, v in ((2, 0.05), (1, 0.9))
        ]
        samples = (
            AnsweredRow(HOSTILE, "right", HOSTILE, "right", HOSTILE, before_reasoning=HOSTILE),
            AnsweredRow("p", None, "", None),
        )
        store_json(directory.eval_path, Evaluation(scores[0], scores[1], samples))
        opened.finish(6, message=f"diverged {HOSTILE}")
    return directory


def test_nothing_that_data_or_models_say_becomes_markup(run: RunDirectory) -> None:
    write_report(run)
    text = run.report_path.read_text(encoding="utf-8")
    page = Page(text)
    assert not page.names() & {"script", "img", "iframe", "object", "link", "a", "form", "base"}
    assert {attributes["class"] for name, attributes in page.elements if name == "input"} == {"switch"}
    assert not [key for _, attributes in page.elements for key in attributes if key.startswith("on")]
    assert "alert(1)" in "".join(page.text)  # it is shown, as text
    assert "␀␛[2J" in text
    assert not re.search("[\x00-\x08\x1b\u202e\ud800]", text)


def test_the_page_loads_nothing_and_forbids_scripts(run: RunDirectory) -> None:
    text = render_report(run)
    page = Page(text)
    policies = [a.get("content") or "" for n, a in page.elements if a.get("http-equiv") == "Content-Security-Policy"]
    assert policies
    assert policies[0].startswith("default-src 'none'")
    assert not [a for _, a in page.elements if {"src", "href", "srcset", "data"} & set(a)]
    style = next(piece for piece in page.text if "--page" in piece)
    assert "url(" not in style
    assert "@import" not in style
    assert "prefers-color-scheme: dark" in style


def test_the_page_shows_curves_settings_evaluation_tokens_samples_and_the_failure(run: RunDirectory) -> None:
    text = "".join(Page(render_report(run)).text)
    for expected in (
        "demo",
        "failed",
        "diverged",
        "LoRA r=8",
        "NVIDIA H200",
        "Learning rate",
        "Gradient norm",
        "Throughput",
        "loss was not finite at step 3".replace("loss", "training"),
        "exact_match, 40 rows",
        "base model 5.0%",
        "90.0%",
        "+85.0 points",
        "✓ right",
        "✗ wrong",
        "(empty)",
        "50.0% of all tokens trained",
        "0.003",
        "A dashed vertical line marks where the run was resumed.",
    ):
        assert expected in text, expected


def test_settings_that_differ_from_their_default_are_marked(run: RunDirectory) -> None:
    text = render_report(run)
    assert '<span class="set">0.003</span>' in text
    assert '<span class="set">linear</span>' not in text
    first, rest = text.split("All settings")
    assert '<td>train.learning_rate</td><td class="set">0.003</td><td class="soft">0.0002</td>' in first
    assert "lr_scheduler_type" not in first
    assert "lr_scheduler_type" in rest


def test_a_run_without_files_still_gives_a_page(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(b"garbage\n")
    (tmp_path / "eval.json").write_text("[1, 2]")
    (tmp_path / "tokens.json").write_text("{")
    text = "".join(Page(render_report(RunDirectory(tmp_path))).text)
    assert "metrics.jsonl: line 1 is not a metric" in text
    assert "recipe.yaml: it is missing" in text
    assert "eval.json: it is not a map" in text


def test_long_runs_stay_small_and_keep_their_peaks(run: RunDirectory) -> None:
    with MetricsWriter(run.metrics_path) as metrics:
        for step in range(1, 20001):
            metrics.write(step, {"loss": 99.0 if step == 7777 else 1.0 + step % 7})
    text = render_report(run)
    assert len(text) < 500_000
    assert "training: 99" in text


def test_a_single_point_is_no_curve(run: RunDirectory) -> None:
    with MetricsWriter(run.metrics_path) as metrics:
        metrics.write(1, {"loss": 1.0, "grad_norm": 2.0})
        metrics.write(2, {"loss": 0.5})
    text = "".join(Page(render_report(run)).text)
    assert "Loss" in text
    assert "Gradient norm" not in text


def test_escaping_is_the_default_and_survives_a_careless_join() -> None:
    assert tag("p", "<b>&'\"") == "<p>&lt;b&gt;&amp;&#39;&#34;</p>"
    assert tag("p", "<i>", tag("b", "x"), title='"<') == '<p title="&#34;&lt;">&lt;i&gt;<b>x</b></p>'
    assert tag("p", tag("b", "x") + "<script>") == "<p><b>x</b>&lt;script&gt;</p>"
    assert tag("p", "".join([tag("b", "x"), "<script>"])) == "<p>&lt;b&gt;x&lt;/b&gt;&lt;script&gt;</p>"
    assert tag("line", x1=1, class_="a", stroke_width=None) == '<line x1="1" class="a"></line>'


@pytest.mark.parametrize(
    ("low", "high"), [(0, 1), (1.23, 1.24), (-5, 5), (0, 1e-9), (3e9, 7e9), (2, 2), (0, 0), (-1e-4, 3e5)]
)
def test_ticks_are_round_even_and_cover_the_range(low: float, high: float) -> None:
    ticks = round_ticks(low, high)
    slack = 1e-6 * (high - low)  # less than a pixel
    assert ticks[0] <= low + slack
    assert ticks[-1] >= high - slack
    assert 2 <= len(ticks) <= 12
    steps = [b - a for a, b in itertools.pairwise(ticks)]
    assert max(steps) == pytest.approx(min(steps), rel=1e-6)
    assert f"{steps[0]:.6e}"[0] in "125"


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (12345.6, "12,346"), (0.0123, "0.0123"), (1.5e-5, "1.5e-5"), (-2.0, "-2"), (1e20, "1e20")],
)
def test_numbers_are_short(value: float, text: str) -> None:
    assert number(value) == text


def test_all_points_lie_inside_the_drawing() -> None:
    points = [(step, (-1.0) ** step * step**3) for step in range(1, 100)]
    chart = line_chart("x", [Series("a", points), Series("b", [(5, 1.0)])], ChartLook(marks=[50, 1000]))
    assert chart
    for pair in re.findall(r"(-?[\d.]+),(-?[\d.]+)", " ".join(re.findall(r'points="([^"]+)"', chart))):
        assert 0 <= float(pair[0]) <= WIDTH
        assert 0 <= float(pair[1]) <= HEIGHT
    assert chart.count('class="mark"') == 1


def test_a_chart_without_values_is_left_out() -> None:
    assert not line_chart("x", [Series("a", []), Series("b", [(1, None)])])


def test_smoothing_is_not_biased_towards_zero_at_the_start() -> None:
    assert [value for _, value in smoothed([(i, 3.0) for i in range(5)])] == pytest.approx([3.0] * 5)


def test_the_bold_curve_does_not_lag_and_says_what_it_is() -> None:
    falling = [(i, 3.0 * 0.9**i) for i in range(60)]
    assert smoothed(falling) == falling
    noisy = [(i, 1.0 if i % 2 else 3.0) for i in range(61)]
    assert all(value in (1.0, 3.0) for _, value in smoothed(noisy))
    spike = [(i, 50.0 if i == 30 else 1.0) for i in range(61)]
    assert [value for _, value in smoothed(spike)] == [1.0] * 61
    chart = line_chart("Loss", [Series("training", falling, smooth=True)])
    assert "bold: median of 21 points around" in chart
    assert "bold" not in str(line_chart("Loss", [Series("training", falling[:30], smooth=True)]))


def test_log_scale_is_a_switch_where_all_values_are_above_zero() -> None:
    falling = Series("training", [(i, 6.0 * 0.8**i) for i in range(1, 40)])
    chart = line_chart("Loss", [falling], ChartLook(log=True))
    page = Page(chart)
    assert [a.get("type") for name, a in page.elements if name == "input"] == ["checkbox"]
    labels = [a.get("for") for name, a in page.elements if name == "label"]
    assert labels == [a.get("id") for name, a in page.elements if name == "input"]
    drawings = [a for name, a in page.elements if name == "svg"]
    assert [a["class"] for a in drawings] == ["linear", "log"]
    assert "logarithmic" in str(drawings[1]["aria-label"])
    line = re.findall(r'<polyline points="([^"]+)"', chart)[1]
    ys = [float(pair.split(",")[1]) for pair in line.split()]
    steps = [b - a for a, b in itertools.pairwise(ys)]
    assert max(steps) - min(steps) < 0.25, "an exponential is a straight line"
    assert "checkbox" not in line_chart("Loss", [Series("a", [(1, 1.0), (2, 0.0)])], ChartLook(log=True))


@pytest.mark.parametrize(("low", "high"), [(0.1, 8), (1e-9, 1), (3, 3), (0.2, 0.4), (1, 1000), (5e-324, 1e300)])
def test_log_ticks_cover_the_range_and_are_few(low: float, high: float) -> None:
    ticks = log_ticks(low, high)
    assert ticks[0] <= low * 1.001
    assert ticks[-1] >= high * 0.999
    assert 2 <= len(ticks) <= 12
    assert ticks == sorted(set(ticks))


def test_the_base_model_is_a_line_and_held_out_points_can_be_seen() -> None:
    held_out = Series("held-out", [(step, 1.0) for step in range(1, 60)], dots=True)
    chart = line_chart("Loss", [Series("training", [(1, 2.0), (60, 1.0)]), held_out], levels={"base model": 6.4})
    assert chart.count('class="point s1"') == 59
    assert "base model 6.4" in chart
    assert "base model: 6.4" in chart  # in the label that is read out


def test_the_report_of_a_run_that_goes_on_says_where_it_is_and_loads_itself_again(run: RunDirectory) -> None:
    text = render_report(run, LiveProgress(45, 100, 185.0))
    page = Page(text)
    refresh = [a["content"] for name, a in page.elements if name == "meta" and a.get("http-equiv") == "refresh"]
    assert refresh == ["5"]
    assert "step 45 of 100, about 3m05s left" in text
    assert [(a["value"], a["max"]) for name, a in page.elements if name == "progress"] == [("45", "100")]
    assert 'http-equiv="refresh"' not in render_report(run)
    assert "progress" not in Page(render_report(run)).names()


def test_wall_time_is_that_of_all_processes(run: RunDirectory) -> None:
    raw = read_json_object(run.status_path)
    times = {"started": "2026-11-21T03:00:00Z", "ended": "2026-11-21T03:10:00Z", "earlier_seconds": 3000}
    write_json(run.status_path, {**raw, **times})
    assert "1h00m" in render_report(run)


def test_thinning_keeps_order_and_extremes() -> None:
    points = [(i, float(i % 10)) for i in range(5000)] + [(5000, 1e6)]
    thin = thinned(points, 100)
    assert len(thin) <= 100
    assert [step for step, _ in thin] == sorted(step for step, _ in thin)
    assert thin[-1] == (5000, 1e6)
