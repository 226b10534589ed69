"""The report in a real browser: wide, narrow and dark. Skipped where no Chromium is installed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from browser import Browser, find_browser, open_browser

from ftcli.config.recipe import Recipe
from ftcli.facts.device import named_device
from ftcli.plan.precision import DtypePlan
from ftcli.run.atomic import store_json, write_json
from ftcli.run.completions import Completions, ScoredCompletion
from ftcli.run.directory import RunDirectory
from ftcli.run.manifest import Fingerprint, build_manifest
from ftcli.run.metrics import MetricsWriter
from ftcli.run.report import LiveProgress, write_report
from ftcli.run.results import AnsweredRow, EvalScores, Evaluation, TaskScore
from ftcli.run.resume import open_run
from tests.unit.run.test_report import HOSTILE
from tests.unit.run.test_report_margins import side

PROGRAM = find_browser()
pytestmark = pytest.mark.skipif(PROGRAM is None, reason="no Chromium here")

LONG = "a_very_long_word_without_any_place_to_break_it_" * 8
#: Elements that people can see and whose content is wider than they are, scrolling ones aside.
CUT = """[...document.querySelectorAll('main *')].filter(e => {
  const style = getComputedStyle(e), box = e.getBoundingClientRect();
  if (e.closest('svg, .scroll, thead') || style.display === 'none' || box.width < 2) return false;
  return e.scrollWidth > e.clientWidth + 1 && style.overflowX !== 'auto' && style.display !== 'inline';
}).map(e => `${e.tagName}.${e.className} ${e.scrollWidth}>${e.clientWidth} ${e.textContent.slice(0, 40)}`)"""
#: Elements that stick out of the window.
OUTSIDE = """[...document.querySelectorAll('main *')].filter(e => !e.closest('.scroll, thead, .switch ~ svg'))
  .map(e => [e, e.getBoundingClientRect()])
  .filter(([e, box]) => box.width > 1 && (box.right > innerWidth + 1 || box.left < -1))
  .map(([e]) => `${e.tagName}.${e.className} ${e.textContent.slice(0, 40)}`)"""
#: Contrast of each text with what is behind it, where it is too low to be read (WCAG asks for 4.5).
PALE = """(() => {
  const parse = text => text.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map(v => v / 255)
    .map(v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = e => { for (; e; e = e.parentElement) {
    const c = parse(getComputedStyle(e).backgroundColor); if (c.length === 3 || c[3] === 1) return c; }
    return [255, 255, 255]; };
  return [...document.querySelectorAll('main *')].filter(e => !e.closest('svg') && e.offsetParent !== null)
    .filter(e => [...e.childNodes].some(n => n.nodeType === 3 && n.textContent.trim()))
    .map(e => { const a = light(parse(getComputedStyle(e).color)), b = light(behind(e));
      const name = `${e.tagName}.${e.className} ${e.textContent.slice(0, 30)}`;
      return [(Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), name]; })
    .filter(([ratio]) => ratio < 4.5);
})()"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    assert PROGRAM is not None
    with open_browser(PROGRAM, tmp_path_factory.mktemp("browser")) as opened:
        yield opened


def make_run(path: Path, *, rewards: bool) -> RunDirectory:
    """A run with long names, hostile texts and many numbers."""
    raw = {
        "version": 1,
        "run": {"name": LONG[:99] if rewards else "demo"},
        "model": {"name_or_path": f"someone/{LONG[:80]}"},
        "lora": {"r": 8},
        "train": {"learning_rate": 0.003, "max_steps": 60},
    }
    text = yaml.safe_dump(Recipe.model_validate(raw).model_dump(mode="json"))
    rng = random.Random(0)
    with open_run(path, "auto", text) as opened:
        directory = opened.directory
        manifest = build_manifest(
            command="train", recipe_yaml=text, device=replace(named_device("h200"), name="NVIDIA H200"),
            seeds={"seed": 42}, dtype_plan=DtypePlan("bfloat16", "float32", "bfloat16", True, "GPU"), parts=[],
            activations={"requested": False, "gradient_checkpointing": False, "reason": "as the recipe says"},
            predicted_memory=None,
            data=[Fingerprint(LONG, 10, "ab" * 32)],
        )  # fmt: skip
        manifest["kernels"] = [{"layer": LONG, "on": False, "reason": HOSTILE}]
        store_json(directory.manifest_path, manifest)
        with MetricsWriter(directory.metrics_path) as metrics:
            for step in range(1, 61):
                line: dict[str, Any] = {
                    "loss": 6 * 0.9**step + rng.random() / 5,
                    "learning_rate": 3e-3 * (1 - step / 60),
                }
                line |= {
                    "grad_norm": 1 + rng.random(),
                    "tokens_per_second": 123456.7,
                    "tokens": step * 10**9,
                    "epoch": 1.5,
                }
                line |= {"peak_memory_bytes": 123 * 2**30}
                if rewards:
                    line |= {
                        "reward": step / 60,
                        "reward_std": 0.2,
                        "kl": 0.001 * step,
                        "completions/mean_length": 900.0,
                    }
                    line |= {f"rewards/{name}/mean": step / 90 for name in ("exact", LONG[:60])}
                    line |= {"completions/min_length": 3, "completions/max_length": 2048}
                metrics.write(step, line)
                if step % 10 == 0:
                    metrics.write(step, {"eval_loss": 5 * 0.9**step + 0.1, "eval_token_accuracy": step / 61})
        counts = {"rows": 123456, "rows_kept": 123455, "rows_dropped": 1, "rows_truncated": 0, "longest": 8192}
        tokens = {"tokens_kept": 10**9, "tokens_cut": 10**6, "tokens_masked": 4 * 10**8}
        write_json(directory.tokens_path, {"datasets": [{"name": LONG, "split": "train", **counts, **tokens}]})
        base, tuned = (EvalScores(v, 9.9, 0.5, 50, (TaskScore("exact_match", v / 9, 4000),)) for v in (6.2, 1.1))
        rows = [
            AnsweredRow("Say it", "the right words", "the wrong words", "the right", "a", 0, 0),
            AnsweredRow("p", "x", None, "x"),
        ]
        rows += [AnsweredRow(HOSTILE, LONG, HOSTILE, LONG + "x", "b"), AnsweredRow(LONG * 20, "y", "", LONG * 20, "b")]
        store_json(directory.eval_path, Evaluation(base, tuned, tuple(rows)))
        write_json(directory.margins_path, {"before": side(0.0), "after": side(1.0)})
        if rewards:
            said = [
                ScoredCompletion(f"{LONG} {i}", HOSTILE + LONG, {"exact": 0.5, LONG[:60]: None}, 1.0) for i in range(3)
            ]
            for step in (1, 60):
                Completions(directory.completions_dir).write(step, said)
        opened.finish(6, message=f"{LONG} {HOSTILE}")
    return directory


@pytest.mark.parametrize("rewards", [False, True])
def test_nothing_is_cut_or_pale_wide_narrow_and_dark(browser: Browser, tmp_path: Path, rewards: bool) -> None:
    run = make_run(tmp_path / "run", rewards=rewards)
    write_report(run)
    for width, dark in ((1280, False), (420, False), (320, True), (1280, True)):
        browser.open(run.report_path, width=width, dark=dark)
        assert browser.evaluate("document.documentElement.scrollWidth") <= width, width
        assert browser.evaluate(CUT) == [], width
        assert browser.evaluate(OUTSIDE) == [], width
        assert browser.evaluate(PALE) == [], (width, dark)
        assert browser.requests() == [run.report_path.resolve().as_uri()]
        said = [
            event for event in browser.events if event.get("method") in ("Log.entryAdded", "Runtime.consoleAPICalled")
        ]
        assert said == []
        assert browser.evaluate("document.title") != ""
        assert browser.evaluate("typeof window.x") == "undefined"


def test_samples_are_cards_on_a_narrow_screen_and_tiles_show_their_numbers(browser: Browser, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", rewards=False)
    write_report(run)
    browser.open(run.report_path, width=420)
    label = "getComputedStyle(document.querySelector('%s'), '::before').content"
    assert browser.evaluate(label % ".rows:not(.wrong) td") == '"Task"'
    assert browser.evaluate(label % ".wrong td:last-child") == '"Margin"'
    assert browser.evaluate("[...document.querySelectorAll('.fact b')].every(e => e.scrollWidth <= e.clientWidth)")
    for width in (420, 1100):
        browser.open(run.report_path, width=width)
        assert browser.evaluate("document.body.innerText.includes('Wall time')")
        broken = "[...document.querySelectorAll('.fact b')].filter(e => e.clientHeight > 35).map(e => e.innerText)"
        assert browser.evaluate(broken) == [], "a number and its unit stand on one line"
    browser.open(run.report_path, width=420)
    smallest = (
        "Math.min(...[...document.querySelectorAll('svg.linear .tick')].map(e => e.getBoundingClientRect().height))"
    )
    assert browser.evaluate(smallest) >= 9


def test_the_switch_changes_the_scale_and_works_from_the_keyboard(browser: Browser, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", rewards=False)
    write_report(run)
    browser.open(run.report_path, width=1280)
    shown = "[...document.querySelectorAll('figure')][0].querySelector('svg.%s').getBoundingClientRect().height > 0"
    assert browser.evaluate(shown % "linear")
    assert not browser.evaluate(shown % "log")
    browser.evaluate("document.querySelector('.switch').focus()")
    browser.send("Input.dispatchKeyEvent", type="keyDown", key=" ", code="Space", text=" ")
    browser.send("Input.dispatchKeyEvent", type="keyUp", key=" ", code="Space")
    assert browser.evaluate(shown % "log")
    assert not browser.evaluate(shown % "linear")


def test_a_page_loads_itself_again_until_the_run_is_over(browser: Browser, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", rewards=False)
    write_report(run, LiveProgress(10, 60, 30.0))
    page = run.report_path
    page.write_text(page.read_text().replace('http-equiv="refresh" content="5"', 'http-equiv="refresh" content="1"'))
    browser.open(page, width=1280)
    assert "step 10 of 60" in browser.evaluate("document.body.innerText")
    write_report(run)
    for _ in range(30):  # it may have been loaded again before the report was written
        if "step 10 of 60" not in browser.evaluate("document.body.innerText"):
            break
        browser.wait_for("Page.loadEventFired")
        browser.events.clear()
    assert "step 10 of 60" not in browser.evaluate("document.body.innerText")
    assert browser.evaluate("document.querySelector('meta[http-equiv=refresh]')") is None
