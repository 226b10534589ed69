"""SIGTERM and SIGINT, whenever they come: nothing is lost, and the exit status says what to do next."""

from __future__ import annotations

import signal

import pytest

from tests.e2e.resilience import EVALUATE, NO_EVAL, SAVE, SAVE_RESULT, STEP, Drills
from tests.tiers import telling

TERM, INT = signal.SIGTERM, signal.SIGINT
PARTS = {
    "checking": ("ftcli.preflight.stages:preflight", "checking the recipe"),
    "fingerprints": ("ftcli.train.lifecycle:fingerprint", "reading the data's fingerprints"),
    "tokenizing": ("ftcli.data.encode:Encoder.batch", "preparing data"),
    "loading": ("ftcli.train.assembly:load_model", "loading the model"),
    "the trainer": ("ftcli.train.build:use_stack", "preparing the trainer"),
}


@pytest.mark.parametrize(("part", "number"), [*((part, TERM) for part in PARTS), ("tokenizing", INT), ("loading", INT)])
def test_before_training_the_run_ends_at_once(drills: Drills, part: str, number: int) -> None:
    target, name = PARTS[part]
    drill = drills.paused(drills.recipe("r"), target)
    drill.signal(number)
    status = 75 if number == TERM else 130
    assert drill.wait() == status, drill.said
    assert f"error[FT728]: stopped by {'SIGTERM' if number == TERM else 'SIGINT'} while {name}" in drill.said
    assert "Traceback" not in drill.said
    if part != "checking":  # the run's directory is opened after the checks
        written = drills.status("r")
        assert (written["state"], written["exit_code"], written["resumable"]) == ("preempted", status, True)


def test_between_two_parts_the_next_one_is_not_begun(drills: Drills) -> None:
    said = drills.stopped(drills.recipe("r"), "ftcli.train.context:RunContext.phase", 1, INT, 130)
    assert "stopped by SIGINT while loading libraries" in said  # imports alone take many seconds on a cold disk


@pytest.mark.parametrize(
    ("command", "target", "phase"),
    [
        ("eval", "ftcli.train.assembly:load_model", "evaluating"),
        ("export", "ftcli.export.adapter:copy_adapter", "exporting"),
    ],
)
def test_evaluation_and_export_are_left_at_once(drills: Drills, command: str, target: str, phase: str) -> None:
    recipe = drills.recipe("r", train={"max_steps": 1}, export={"formats": ["adapter"]})
    if command == "export":
        drills.run(recipe, "--set", "data.eval=[]")
    for number, status in ((TERM, 75), (INT, 130)):
        drill = drills.paused(recipe, target, command=command)
        drill.signal(number)
        assert drill.wait() == status, drill.said
        assert f"error[FT728]: stopped by {number.name} while {phase}" in drill.said
        assert not list((drills.folder / "r").glob("export/*"))


def test_the_report_of_a_complete_run_is_made_when_it_is_missing_or_old(drills: Drills) -> None:
    recipe = drills.recipe("r", train={"max_steps": 1}, **NO_EVAL)
    drill = drills.paused(recipe, "ftcli.train.lifecycle:write_report")
    drill.signal(signal.SIGKILL)
    drill.wait()
    assert drills.status("r")["state"] == "completed"
    report = drills.folder / "r" / "report.html"
    assert "running" in report.read_text()  # as it was while the run went on, and would say for good
    assert "holds the finished run" in drills.run(recipe)
    assert "completed" in report.read_text()
    made = report.stat().st_mtime_ns
    drills.run(recipe)
    assert report.stat().st_mtime_ns == made


@pytest.mark.parametrize("target", ["ftcli.train.lifecycle:write_card", "ftcli.cli.app:_text_of"])
def test_ctrl_c_when_the_run_is_complete_changes_nothing(drills: Drills, target: str) -> None:
    said = drills.stopped(drills.recipe("r", train={"max_steps": 1}, **NO_EVAL), target, 1, INT, 0)
    assert "stopping" not in said
    assert "FT191" not in said
    assert drills.status("r")["exit_code"] == 0
    assert "completed" in (drills.folder / "r" / "report.html").read_text()


@pytest.mark.parametrize(("number", "status"), [(TERM, 75), (INT, 130), (signal.SIGHUP, 75)])
def test_in_training_the_step_is_finished_and_saved(drills: Drills, number: int, status: int) -> None:
    said = drills.stopped(drills.recipe("r", **NO_EVAL), STEP, 2, number, status)
    checkpoint = drills.folder / "r" / "checkpoints" / "step-00000002"
    assert checkpoint.is_dir()
    assert f"after step 2; checkpoint written to {checkpoint}" in said
    written = drills.status("r")
    assert (written["state"], written["exit_code"], written["resumable"]) == ("preempted", status, True)
    assert [line["step"] for line in drills.metrics("r")] == [1, 2]


def test_with_on_sigterm_false_sigterm_kills(drills: Drills) -> None:
    drill = drills.paused(drills.recipe("r", checkpoint={"on_sigterm": False}, **NO_EVAL), STEP, 2)
    drill.signal(TERM)
    assert drill.wait() == -TERM


def test_an_evaluation_in_training_is_left_and_made_again(drills: Drills) -> None:
    change = {"eval": {"every_steps": 2}, "checkpoint": {"every_steps": 5}}
    whole = drills.whole(**change)
    recipe = drills.recipe("r", **change)
    drill = drills.paused(recipe, EVALUATE, 2)  # the first one is before training
    drill.signal(TERM)  # and is never released: it has to leave by itself
    assert drill.wait() == 75, drill.said
    assert drills.checkpoints("r") == ["step-00000002"]
    drills.run(recipe)
    drills.require_same_run("r", whole)


def test_an_evaluation_that_is_made_again_and_again_is_logged_once(drills: Drills) -> None:
    """A run that was stopped before an evaluation, and killed after it had made it, logged it twice (found by fuzz)."""
    change = {"eval": {"every_steps": 2}, "checkpoint": {"every_steps": 5}}
    whole = drills.whole(**change)
    recipe = drills.recipe("r", **change)
    drills.stopped(recipe, STEP, 2, TERM, 75)
    assert [line["step"] for line in drills.metrics("r")] == [1, 2]
    killed = drills.paused(recipe, STEP, 1)
    assert [line["step"] for line in drills.metrics("r")] == [1, 2, 2]
    killed.signal(signal.SIGKILL)
    assert killed.wait() == -signal.SIGKILL
    drills.run(recipe)
    drills.require_same_run("r", whole)


def test_while_a_checkpoint_is_saved_it_is_finished_and_is_the_last(drills: Drills) -> None:
    change = {"checkpoint": {"every_steps": 2}, **NO_EVAL}
    whole = drills.whole(**change)
    recipe = drills.recipe("r", **change)
    said = drills.stopped(recipe, SAVE, 1, TERM, 75)
    assert "after step 2" in said
    assert drills.checkpoints("r") == ["step-00000002"]
    drills.run(recipe)
    drills.require_same_run("r", whole)


@pytest.mark.parametrize(
    ("target", "call"),
    telling(
        {
            "saving": (SAVE_RESULT, 1),
            "evaluating": (EVALUATE, 1),
            "sampling": ("ftcli.evaluate.suite:Evaluator.samples", 1),
            "the last step": (STEP, 3),
        },
        *("saving", "sampling"),
    ),
)
def test_after_the_last_step_nothing_is_trained_again(drills: Drills, target: str, call: int) -> None:
    whole = drills.whole(train={"max_steps": 3})
    recipe = drills.recipe("r", train={"max_steps": 3})
    said = drills.stopped(recipe, target, call, TERM, 75)
    assert "while evaluating" in said
    result = drills.folder / "r/adapter/adapter_model.safetensors"
    before = result.stat()
    said = drills.run(recipe)
    assert "training is complete (3 steps)" in said
    assert result.stat().st_mtime_ns == before.st_mtime_ns
    assert drills.metrics("r") == drills.metrics(whole)
    assert drills.status("r")["state"] == "completed"
    assert (drills.folder / "r/eval.json").read_text() == (whole / "eval.json").read_text()


@pytest.mark.parametrize(
    ("target", "call", "numbers", "status"),
    telling(
        {
            "in a step": (STEP, 3, (TERM, TERM), 75),
            "in a step, by another": (STEP, 3, (TERM, INT), 130),
            "while saving": (SAVE, 2, (INT, INT), 130),
        },
        *("in a step, by another", "while saving"),
    ),
)
def test_a_second_signal_stops_at_once(
    drills: Drills, target: str, call: int, numbers: tuple[int, int], status: int
) -> None:
    recipe = drills.recipe("r", checkpoint={"every_steps": 2}, **NO_EVAL)
    drill = drills.paused(recipe, target, call)
    drill.signal(numbers[0])
    drill.until_said("A second signal")  # the system merges signals that come at once
    drill.signal(numbers[1])
    assert drill.wait() == status, drill.said
    assert "stopped at once by a second signal" in drill.said
    assert "Traceback" not in drill.said
    assert drills.checkpoints("r") == ["step-00000002"]
    assert drills.status("r")["exit_code"] == status
    assert "resuming from" in drills.run(recipe)
