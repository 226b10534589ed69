"""A sweep's runs: which are started, on what, what becomes of those that fail, and which one is named the best."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from ftcli.config.grid import combinations
from ftcli.config.yaml import dump_recipe
from ftcli.errors import ExitCode, Finding, FtcliError
from ftcli.pipeline import sweep as sweeping
from ftcli.pipeline.sweep import Sweep, SweepResult, SweepRun, plan_sweep
from ftcli.reporting import Session, SilentReporter
from ftcli.run.signals import SignalName

RECIPE = """\
version: 1
model: {name_or_path: bundled:tiny-gemma2, dtype: float32}
lora: {r: 4}
data: {train: [bundled:smoke-train], eval: [bundled:smoke-eval], max_seq_len: 64}
train: {max_steps: 2}
"""


class Listener(SilentReporter):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.findings: list[Finding] = []

    def finding(self, finding: Finding) -> None:
        self.findings.append(finding)


@dataclass
class FakeChild:
    """Ends after so many looks; a signal ends it with the status of a run that was stopped."""

    run: SweepRun
    looks: int
    end: tuple[int, str | None]
    heard: list[str] = field(default_factory=list)

    def ended(self) -> tuple[int, str | None] | None:
        self.looks -= 1
        if self.looks > 0:
            return None
        if self.end[0] == 0:
            write_run(self.run)
        return self.end

    def signal(self, name: SignalName) -> None:
        self.heard.append(name)
        self.looks, self.end = 2, (130 if name == "SIGINT" else 75, "FT701: stopped")


def write_run(run: SweepRun, loss: float | None = None, tokens: int = 100, state: str = "completed") -> None:
    """A run as `ftcli train` leaves it; its held-out loss is the learning rate unless told otherwise."""
    (run.path / "adapter").mkdir(parents=True)
    (run.path / "recipe.yaml").write_text(dump_recipe(run.recipe))
    status = {"state": state, "started": "2026-11-22T03:00:00Z", "ended": "2026-11-22T03:01:30Z", "pid": 1}
    (run.path / "status.json").write_text(json.dumps(status))
    scores = {"loss": run.recipe.train.learning_rate if loss is None else loss, "tokens": tokens}
    (run.path / "eval.json").write_text(json.dumps({"run": scores}))


class Fleet:
    """Starts fake children: ``ends`` says how those of certain names end, and after how many looks."""

    def __init__(self, ends: dict[str, tuple[int, str | None]] | None = None, looks: dict[str, int] | None = None):
        self.ends, self.looks = ends or {}, looks or {}
        self.started: list[tuple[str, str | None]] = []
        self.children: list[FakeChild] = []
        self.most = 0

    def __call__(self, run: SweepRun, device: str | None) -> FakeChild:
        name = run.combination.name
        self.started.append((name, device))
        child = FakeChild(run, self.looks.get(name, 2), self.ends.get(name, (0, None)))
        self.children.append(child)
        self.most = max(self.most, sum(each.looks > 0 for each in self.children))
        return child


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sweep:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sweeping, "check_all", lambda *_: None)
    monkeypatch.setattr(sweeping, "_SECONDS_BETWEEN_LOOKS", 0.001)
    (tmp_path / "r.yaml").write_text(RECIPE)
    return plan_sweep(Path("r.yaml"), combinations(["train.learning_rate=1e-3,2e-3,3e-3,4e-3"]), None)


def swept(plan: Sweep, fleet: Fleet, devices: tuple[str | None, ...] = (None,)) -> tuple[SweepResult, Listener]:
    listener = Listener()
    return sweeping.sweep(plan, Session(reporter=listener), fleet, devices), listener


def name(rate: str) -> str:
    return f"train.learning_rate={rate}"


def test_runs_lie_below_the_recipes_folder_and_have_names_that_trackers_take(plan: Sweep) -> None:
    assert plan.folder == Path("runs/r")
    assert plan.runs[0].path == Path("runs/r/train.learning_rate=0.001")
    assert plan.runs[0].recipe.run.name == "r-train.learning_rate-0.001"
    assert {run.command for run in plan.runs} == {"train"}


def test_all_run_in_order_and_the_lowest_held_out_loss_is_the_best(plan: Sweep) -> None:
    fleet = Fleet()
    result, _ = swept(plan, fleet)
    assert [name for name, _ in fleet.started] == [run.combination.name for run in plan.runs]
    assert fleet.most == 1
    assert result.best is not None
    assert result.html is not None
    assert result.comparison is not None
    assert result.best["settings"] == {"train.learning_rate": 1e-3}
    assert (result.best["metric"], result.best["value"]) == ("held-out loss", 1e-3)
    assert "smallest" in result.remarks[0]
    assert result.exit_code == 0
    assert result.html.is_file()
    assert list(result.comparison.differences) == ["train.learning_rate"]


def test_a_run_that_fails_does_not_end_the_sweep(plan: Sweep) -> None:
    fleet = Fleet({name("0.001"): (6, "FT702: diverged"), name("0.002"): (-9, "killed by signal 9")})
    result, listener = swept(plan, fleet)
    assert [run.exit_code for run in result.runs] == [6, -9, 0, 0]
    assert result.runs[0].reason == "FT702: diverged"
    assert result.best is not None
    assert result.best["settings"] == {"train.learning_rate": 3e-3}
    assert [finding.code for finding in listener.findings] == ["FT750", "FT750"]
    assert result.exit_code == 6
    assert replace(result, runs=[replace(result.runs[0], exit_code=-9)]).exit_code == 1


def test_no_run_complete_is_no_best(plan: Sweep) -> None:
    result, _ = swept(plan, Fleet({run.combination.name: (5, "FT703: memory") for run in plan.runs}))
    assert result.best is None
    assert result.exit_code == 5


def test_finished_runs_are_skipped_and_others_started_again(plan: Sweep) -> None:
    write_run(plan.runs[0])
    write_run(plan.runs[1], state="preempted")
    fleet = Fleet()
    plan.runs[1].path.joinpath("adapter").rmdir()

    def start(run: SweepRun, device: str | None) -> FakeChild:
        if run.path == plan.runs[1].path:
            for file in run.path.iterdir():
                file.unlink()
            run.path.rmdir()
        return fleet(run, device)

    result = sweeping.sweep(plan, Session(), start, (None,))
    assert [each for each, _ in fleet.started] == [name("0.002"), name("0.003"), name("0.004")]
    assert [run.skipped for run in result.runs] == [True, False, False, False]
    again = Fleet()
    assert swept(plan, again)[0].best == result.best
    assert again.started == []


def test_a_finished_run_of_another_recipe_is_not_skipped(plan: Sweep) -> None:
    write_run(plan.runs[0])
    Path("r.yaml").write_text(RECIPE.replace("max_steps: 2", "max_steps: 3"))
    other = plan_sweep(Path("r.yaml"), [run.combination for run in plan.runs], None)
    assert sweeping.is_finished(plan.runs[0])
    assert not sweeping.is_finished(other.runs[0])


def test_each_gpu_has_one_run_at_a_time(plan: Sweep) -> None:
    fleet = Fleet(looks={name("0.001"): 40})
    result, _ = swept(plan, fleet, ("GPU-a", "GPU-b"))
    assert fleet.started[:2] == [(name("0.001"), "GPU-a"), (name("0.002"), "GPU-b")]
    assert [device for _, device in fleet.started[2:]] == ["GPU-b", "GPU-b"]
    assert fleet.most == 2
    assert [run.exit_code for run in result.runs] == [0, 0, 0, 0]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 75), (signal.SIGHUP, 75)])
def test_a_signal_is_passed_on_and_ends_the_sweep(plan: Sweep, number: signal.Signals, code: int) -> None:
    before = signal.getsignal(signal.SIGHUP)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    fleet = Fleet(looks={name("0.001"): 10**6, name("0.002"): 10**6})

    def start(run: SweepRun, device: str | None) -> FakeChild:
        child = fleet(run, device)
        if len(fleet.children) == 2:
            os.kill(os.getpid(), number)
        return child

    try:
        with pytest.raises(FtcliError) as caught:
            sweeping.sweep(plan, Session(), start, ("0", "1"))
    finally:
        signal.signal(signal.SIGHUP, before)
    assert caught.value.exit_code == code
    assert "0 of 4 runs are complete" in caught.value.findings[0].message
    assert [child.heard for child in fleet.children] == [[number.name]] * 2
    assert len(fleet.started) == 2


def test_a_second_signal_is_passed_on_too(plan: Sweep) -> None:
    fleet = Fleet(looks={name("0.001"): 10**6})

    class Stubborn(FakeChild):
        def signal(self, name: SignalName) -> None:
            self.heard.append(name)
            if len(self.heard) == 1:
                os.kill(os.getpid(), signal.SIGINT)
            else:
                super().signal(name)

    def start(run: SweepRun, device: str | None) -> FakeChild:
        child = Stubborn(run, 10**6, (0, None))
        fleet.children.append(child)
        os.kill(os.getpid(), signal.SIGINT)
        return child

    with pytest.raises(FtcliError) as caught:
        sweeping.sweep(plan, Session(), start, (None,))
    assert caught.value.exit_code == ExitCode.INTERRUPTED
    assert fleet.children[0].heard[:2] == ["SIGINT", "SIGINT"]


def test_a_run_that_somebody_stopped_stops_the_sweep(plan: Sweep) -> None:
    fleet = Fleet({name("0.001"): (75, "FT701: stopped")})
    with pytest.raises(FtcliError) as caught:
        swept(plan, fleet)
    assert caught.value.exit_code == ExitCode.PREEMPTED
    assert len(fleet.started) == 1


def test_a_recipe_that_is_changed_meanwhile_ends_it(plan: Sweep) -> None:
    fleet = Fleet()

    def start(run: SweepRun, device: str | None) -> FakeChild:
        Path("r.yaml").write_text(RECIPE.replace("r: 4", "r: 8"))
        return fleet(run, device)

    with pytest.raises(FtcliError) as caught:
        sweeping.sweep(plan, Session(), start, (None,))
    assert [finding.code for finding in caught.value.findings] == ["FT751"]
    assert len(fleet.started) == 1


def test_other_held_out_tokens_are_remarked(plan: Sweep) -> None:
    for number, run in enumerate(plan.runs):
        write_run(run, loss=1.0, tokens=100 + number)
    result, _ = swept(plan, Fleet())
    assert any("different held-out tokens" in remark for remark in result.remarks)


def test_equal_runs_are_said_to_be_equal(plan: Sweep) -> None:
    for run, loss in zip(plan.runs, (2.0, 1.0, 1.0, 3.0), strict=True):
        write_run(run, loss=loss)
    result, _ = swept(plan, Fleet())
    assert result.best is not None
    assert result.best["settings"] == {"train.learning_rate": 2e-3}
    assert result.remarks == ["1 more came to the same held-out loss: the first is named"]


def test_a_loss_that_is_no_number_is_never_the_best(plan: Sweep) -> None:
    for run, loss in zip(plan.runs, (float("nan"), 2.0, 1.0, 3.0), strict=True):
        write_run(run, loss=loss)
    assert swept(plan, Fleet())[0].best is None


def test_a_folder_that_is_a_run_is_refused(plan: Sweep) -> None:
    write_run(SweepRun(plan.runs[0].combination, plan.folder, (), plan.runs[0].recipe, "train"))
    with pytest.raises(FtcliError) as caught:
        plan_sweep(plan.recipe, [run.combination for run in plan.runs], None)
    assert [finding.code for finding in caught.value.findings] == ["FT753"]
    assert "--output-dir runs/r-sweep" in str(caught.value.findings[0].help)


def test_what_the_schema_refuses_in_any_combination_is_told_at_once(plan: Sweep) -> None:
    with pytest.raises(FtcliError) as caught:
        plan_sweep(plan.recipe, combinations(["lora.r=0,4,x", "train.learning_rate=1e-3,2e-3"]), None)
    assert [finding.code for finding in caught.value.findings] == ["FT206", "FT204"]


@pytest.mark.slow
def test_preflight_of_all_comes_before_the_first_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("r.yaml").write_text(RECIPE.replace(", eval: [bundled:smoke-eval]", ""))
    fleet, listener = Fleet(), Listener()
    plan = plan_sweep(Path("r.yaml"), combinations(["data.max_seq_len=64,100000"]), None)
    with pytest.raises(FtcliError) as caught:
        sweeping.sweep(plan, Session(reporter=listener, offline=True), fleet, (None,))
    assert caught.value.exit_code == ExitCode.PREFLIGHT
    errors = [finding for finding in caught.value.findings if finding.severity == "error"]
    assert errors
    assert all(finding.message.endswith("[data.max_seq_len=100000]") for finding in errors)
    assert [finding.code for finding in listener.findings] == ["FT752"]
    assert fleet.started == []
