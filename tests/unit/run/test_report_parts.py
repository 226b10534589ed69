"""Parts of the report: answers and what is wrong about them, rewards, completions, and how often it is rewritten."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ftcli.errors import FtcliError
from ftcli.run.atomic import write_json
from ftcli.run.completions import Completions, ScoredCompletion
from ftcli.run.directory import RunDirectory
from ftcli.run.metrics import MetricsWriter
from ftcli.run.report import LiveProgress, LiveReport, page, render_report
from ftcli.run.report.curves import curves
from ftcli.run.report.samples import SHOWN_ROWS, compared, sampled, samples
from ftcli.run.report.tables import key_facts, score_rows
from ftcli.train.progress import held_out
from tests.unit.run.test_report import HOSTILE, Page


def row(after: str | None, reference: str | None = "right", **more: Any) -> dict[str, Any]:
    return {"prompt": "p", "reference": reference, "before": None, "after": after, "task": None, **more}


def test_failures_come_first_then_what_nobody_judged_then_what_is_right() -> None:
    found = samples({"samples": [row("right"), row("said", None), row("wrong"), row(" right\n")]})
    assert found is not None
    assert [one.right for one in found.rows] == [False, None, True, True]


def test_the_tasks_own_judge_has_the_say() -> None:
    found = samples({"samples": [row("it is right", after_score=1.0), row("right", after_score=0.25)]})
    assert found is not None
    assert [(one.right, one.after.score) for one in found.rows if one.after] == [(False, "0.25"), (True, "")]


def test_a_running_evaluation_says_after_which_step() -> None:
    found = samples({"samples": [row("right")], "step": 40})
    assert found is not None
    assert found.step == 40
    assert found.has == {"reference", "after"}


def test_many_rows_are_counted() -> None:
    found = samples({"samples": [row("right")] * (SHOWN_ROWS + 7)})
    assert found is not None
    assert (len(found.rows), found.more) == (SHOWN_ROWS, 7)


@pytest.mark.parametrize(
    ("expected", "got", "pieces"),
    [
        ("kanoonak", "kanooak", [("same", "kanoo"), ("missing", "n"), ("same", "ak")]),
        ("kanoonak", "kanoonakx", [("same", "kanoonak"), ("extra", "x")]),
        ("kanoonak", "zzz", [("extra", "zzz")]),
        ("x", "  ", []),
        ("the cat sat " * 10, "the dog sat " + "the cat sat " * 9, None),
    ],
)
def test_differences_are_marked(expected: str, got: str, pieces: list[tuple[str, str]] | None) -> None:
    found = compared(expected, got).pieces
    if pieces is not None:
        assert found == pieces
    assert "".join(text for kind, text in found if kind != "missing") == got.strip()
    if pieces != [("extra", got)] and found:
        assert "".join(text for kind, text in found if kind != "extra") == expected.strip()


def test_words_are_compared_in_long_texts() -> None:
    expected, got = "one two three four " * 8, "one two three five " + "one two three four " * 7
    assert ("extra", "five") in compared(expected, got).pieces
    assert ("missing", "four") in compared(expected, got).pieces


def test_very_long_texts_are_compared_in_no_time_and_cut() -> None:
    text = compared("a " * 50_000, "b " * 50_000)
    assert text.left_out > 90_000


def rewarded(step: int, **more: float) -> dict[str, Any]:
    means = {"rewards/exact/mean": 0.2 * step, "rewards/exact/std": 0.1, "rewards/short/mean": 1.0}
    lengths = {"completions/mean_length": 9.0, "completions/min_length": 2, "completions/max_length": 30}
    return {
        "step": step,
        "loss": 1e-9,
        "reward": 0.3 * step,
        "reward_std": 0.2,
        "kl": 0.01 * step,
        **means,
        **lengths,
        **more,
    }


def test_rewards_take_the_place_of_a_loss_that_says_nothing() -> None:
    lines = [rewarded(step) for step in (1, 2, 3)]
    base = {"base": {"tasks": [{"name": "Exact_Match", "value": 0.1}]}}
    drawn = curves([*lines, {"step": 2, "eval_Exact_Match": 0.4}, {"step": 3, "eval_Exact_Match": 0.6}], base, [])
    text = "".join([*drawn[0], *drawn[1]])
    for title in ("Reward", "Reward of exact", "Reward of short", "KL to the base model", "Completion length, tokens"):
        assert f"<b>{title}</b>" in text, title
    assert "<b>Loss</b>" not in text
    assert "<b>Held-out Exact_Match</b>" in text
    assert "base model 10.0%" in text
    assert text.count("<polygon") >= 3  # reward, exact, lengths
    assert [fact.label for fact in key_facts(lines, {}, None)][:1] == ["Last reward"]
    assert "loss" not in str(key_facts(lines, {}, None)).lower()


def test_what_a_function_returns_is_a_share_only_within_0_and_1() -> None:
    both = {
        side: {"tasks": [{"name": "words", "value": value, "count": 9}]} for side, value in (("base", 0.5), ("run", 12))
    }
    fact = key_facts([], both, None)[0]
    assert (fact.value, fact.note) == ("12", "base model 0.5")
    assert [(row.before, row.after, row.change) for row in score_rows(both)] == [("0.5", "12", "+11.5")]
    assert held_out({"eval_words": 12.0, "eval_right": 0.5}) == {"words": "12", "right": "50.0%"}
    drawn = curves([rewarded(step) | {"eval_words": 3.0 * step} for step in (1, 2)], both, [])
    text = "".join([*drawn[0], *drawn[1]]).split("<b>Held-out words</b>")[1].split("</svg>")[0]
    assert "base model 0.5" in text
    assert "%" not in text


def test_entropy_clipping_groups_and_time_of_rewarded_runs_are_drawn() -> None:
    seen = {
        "entropy": 1.2, "clip_ratio/region_mean": 0.01, "frac_reward_zero_std": 0.25, "completions/clipped_ratio": 0.5,
        "seconds/rollout": 3.0, "seconds/training": 4.0, "seconds/rewards": 0.1, "throughput/rollout": 900.0,
        "throughput/training": 7000.0,
    }  # fmt: skip
    drawn = curves([rewarded(step, **seen) for step in (1, 2, 3)], {}, [])
    text = "".join([*drawn[0], *drawn[1]])
    titles = (
        "Entropy of sampled tokens, nats", "Clipped ratios", "Groups of equal rewards", "Completions cut off",
        "Seconds of a step", "Tokens/s of each part",
    )  # fmt: skip
    for title in titles:
        assert text.count(f"<b>{title}</b>") == 1, title
    assert "<b>Clipped ratios</b>" not in "".join(curves([rewarded(step) for step in (1, 2)], {}, [])[1])


def test_bands_do_not_go_where_no_value_can_be() -> None:
    share = [rewarded(1), rewarded(2)]
    low = [{**line, "rewards/exact/mean": 0.1, "rewards/exact/std": 0.3} for line in share]
    drawn = "".join(curves(low, {}, [])[0])
    assert "−" not in drawn.split("Reward of exact")[1].split("</svg>")[0]


COMPLETIONS = [
    ScoredCompletion("q1", "good", {"exact": 1.0, "short": None}, 0.5, "why \ud800"),
    ScoredCompletion("q1", "bad", {"exact": 0.0, "short": 1.0}, -0.5),
    ScoredCompletion(HOSTILE, HOSTILE, {"exact": -1.0, "short": None}, float("nan"), HOSTILE),
]


def test_completions_are_kept_and_read_back(tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    kept = Completions(tmp_path / "completions")
    for step in (3, 12, 7):
        kept.write(step, COMPLETIONS)
    assert kept.steps() == [3, 7, 12]
    first, second, _ = kept.read(7)
    assert (replace(first, reasoning="why \ud800"), second) == (COMPLETIONS[0], COMPLETIONS[1])
    assert first.reasoning == "why \\ud800", "what UTF-8 cannot hold is escaped"
    names = pq.read_table(kept.path(7)).column_names
    assert names == ["step", "prompt", "completion", "reasoning", "rewards/exact", "rewards/short", "advantage"]
    kept.forget_after(7)
    assert kept.steps() == [3, 7]
    kept.path(7).write_bytes(b"rubbish")
    assert kept.read(7) == []
    assert Completions(tmp_path / "none").steps() == []


def test_completions_of_a_long_run_are_thinned_out_alike_however_often_it_was_stopped(tmp_path: Path) -> None:
    """Completions that serve two steps are written at odd steps only."""
    written = range(1, 60, 2)
    whole, halves = (Completions(tmp_path / name, most=8) for name in ("whole", "halves"))
    for step in written:
        whole.write(step, COMPLETIONS[:1])
    for first, last, back in ((0, 20, 11), (11, 40, 33), (33, 60, 59)):
        for step in written:
            if first < step <= last:
                halves.write(step, COMPLETIONS[:1])
        halves.path(back).with_name(".tmp-step-00000099.parquet").write_bytes(b"half")
        halves.forget_after(back)
    assert whole.steps() == halves.steps() == [1, 9, 17, 25, 33, 41, 49, 57, 59]
    assert not list(halves.folder.glob(".tmp*"))


def test_completions_early_and_late_lowest_reward_first(tmp_path: Path) -> None:
    kept = Completions(tmp_path)
    assert sampled(kept) == {}
    kept.write(1, COMPLETIONS)
    assert list(sampled(kept)) == ["Step 1"]
    kept.write(40, COMPLETIONS[:2])
    found = sampled(kept, rows=2)
    assert list(found) == ["Early: step 1", "Late: step 40"]
    assert [len(rows) for rows in found.values()] == [2, 2]
    rewards = found["Early: step 1"][0]["rewards"]  # of different prompts, lowest first
    assert rewards == [("exact", "-1"), ("short", "none")]
    page = Page(render_report(RunDirectory(tmp_path)))
    assert "script" not in page.names()


def test_the_live_report_is_rewritten_now_and_then_and_never_ends_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = RunDirectory(tmp_path)
    now = itertools.count(0.0, 0.5)
    report = LiveReport(directory, clock=lambda: next(now))
    assert report.update(LiveProgress(1, 10))
    assert not report.update(LiveProgress(2, 10))
    assert "step 1 of 10" in directory.report_path.read_text()
    assert report.update(LiveProgress(3, 10), urgent=True)
    assert "step 3 of 10" in directory.report_path.read_text()
    written = sum(report.update(LiveProgress(step, 1000)) for step in range(200))
    assert 2 <= written <= 20, "a page that takes half a second to write is not written all the time"

    def fails(*_: Any) -> None:
        raise FtcliError.single("FT724", "full", exit_code=3)

    monkeypatch.setattr(page, "write_report", fails)
    assert not report.update(LiveProgress(4, 10), urgent=True)
    assert "step 4" not in directory.report_path.read_text()


def test_samples_of_a_page_are_a_table_with_marks(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path / "metrics.jsonl") as metrics:
        metrics.write(1, {"loss": 1.0})
    write_json(tmp_path / "eval.json", {"samples": [row("kanooak", "kanoonak", before="<b>"), row("okay", "okay")]})
    text = render_report(RunDirectory(tmp_path))
    assert "kanoo<del>n</del>ak" in text
    assert "<mark>&lt;b&gt;</mark>" in text
    assert text.index("kanoo<del>") < text.index("okay")
    assert '<tr class="failed">' in text
