"""Starting, continuing and refusing runs."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from ftcli.config.recipe import Recipe
from ftcli.errors import ExitCode, FtcliError
from ftcli.run.directory import RunDirectory, is_locked, is_run_directory
from ftcli.run.resume import OpenedRun, open_run
from ftcli.run.status import TrainingSummary, read_status


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def recipe(**sections: dict[str, Any]) -> str:
    raw = {"version": 1, "model": {"name_or_path": "bundled:tiny-gemma2"}, **sections}
    return yaml.safe_dump(Recipe.model_validate(raw).model_dump(mode="json"), sort_keys=False)


def save(opened: OpenedRun, step: int) -> Path:
    with opened.directory.checkpoints.staging(step) as folder:
        (folder / "weights").write_text(str(step))
    return opened.directory.checkpoints.path(step)


def unfinished(path: Path, *steps: int, text: str | None = None) -> RunDirectory:
    with open_run(path, "auto", text or recipe()) as opened:
        for step in steps:
            save(opened, step)
    return opened.directory


def codes(error: FtcliError) -> list[str]:
    return [finding.code for finding in error.findings]


def test_a_fresh_run_is_made_with_recipe_and_status(tmp_path: Path) -> None:
    with open_run(tmp_path / "runs" / "a", "auto", recipe()) as opened:
        assert (opened.resume_from, opened.resume_step, opened.already_complete) == (None, 0, False)
        assert opened.directory.recipe_path.read_text() == recipe()
        status = read_status(opened.directory.status_path)
        assert status is not None
        assert (status.state, status.pid, status.exit_code) == ("running", os.getpid(), None)
        assert is_locked(opened.directory.path)
        assert is_run_directory(opened.directory.path)
    assert not is_locked(opened.directory.path)


def test_auto_continues_from_the_newest_usable_checkpoint(tmp_path: Path) -> None:
    run = unfinished(tmp_path / "a", 5, 10, 15)
    os.truncate(run.checkpoints.path(15) / "weights", 0)
    with open_run(run.path, "auto", recipe()) as opened:
        assert opened.resume_from == run.checkpoints.path(10)
        assert opened.resume_step == 10
        assert [w.code for w in opened.warnings] == ["FT726"]


def test_auto_starts_over_without_a_checkpoint_and_clears_leftovers(tmp_path: Path) -> None:
    run = unfinished(tmp_path / "a")
    (run.checkpoints_dir / ".tmp-step-00000005.77").mkdir()
    with open_run(run.path, "auto", recipe()) as opened:
        assert opened.resume_from is None
        assert names(run.checkpoints_dir) == []


def test_auto_on_a_finished_run_changes_nothing(tmp_path: Path) -> None:
    with open_run(tmp_path / "a", "auto", recipe()) as opened:
        save(opened, 5)
        opened.directory.adapter_dir.mkdir()
        opened.finish(ExitCode.OK)
    before = {p: p.read_bytes() for p in opened.directory.path.iterdir() if p.is_file() and p.name != ".lock"}
    with open_run(tmp_path / "a", "auto", recipe(logging={"every_steps": 3})) as again:
        assert again.already_complete
    assert {p: p.read_bytes() for p in before} == before


def test_auto_on_a_finished_run_whose_result_was_deleted_makes_it_again(tmp_path: Path) -> None:
    with open_run(tmp_path / "a", "auto", recipe()) as opened:
        save(opened, 5)
        opened.finish(ExitCode.OK)
    with open_run(tmp_path / "a", "auto", recipe()) as again:
        assert not again.already_complete
        assert again.resume_step == 5


def trained(path: Path) -> RunDirectory:
    with open_run(path, "auto", recipe()) as opened:
        save(opened, 5)
        opened.directory.adapter_dir.mkdir()
        (opened.directory.adapter_dir / "weights").write_text("trained")
        opened.note_trained(TrainingSummary(8, 99))
        opened.finish(ExitCode.PREEMPTED)
    return opened.directory


def test_a_run_that_was_stopped_after_training_is_not_trained_again(tmp_path: Path) -> None:
    run = trained(tmp_path / "a")
    for _ in range(2):  # it may be stopped there any number of times
        with open_run(run.path, "auto", recipe(eval={"per_device_eval_batch_size": 1})) as again:
            assert not again.already_complete
            assert again.trained is not None
            assert again.trained.summary == TrainingSummary(8, 99)
            assert (again.resume_step, again.resume_from) == (8, None)


@pytest.mark.parametrize("how", ["deleted", "cut short", "one byte", "emptied", "of another kind"])
def test_a_result_that_is_not_whole_any_more_is_trained_again(tmp_path: Path, how: str) -> None:
    run = trained(tmp_path / "a")
    weights = run.adapter_dir / "weights"
    if how == "cut short":
        os.truncate(weights, 3)
    elif how == "one byte":
        weights.write_text("trainee")
    elif how == "of another kind":
        run.adapter_dir.rename(run.model_dir)
    else:
        weights.unlink()
        if how == "deleted":
            run.adapter_dir.rmdir()
    with open_run(run.path, "auto", recipe()) as again:
        assert again.trained is None
        assert again.resume_step == 5
        assert [warning.code for warning in again.warnings] == ["FT771"]


def test_a_complete_run_whose_result_was_changed_is_left_alone_and_said(tmp_path: Path) -> None:
    run = trained(tmp_path / "a")
    with open_run(run.path, "auto", recipe()) as opened:
        opened.finish(ExitCode.OK)
    (run.adapter_dir / "weights").write_text("trainee")
    with open_run(run.path, "auto", recipe()) as again:
        assert again.already_complete
        assert [warning.code for warning in again.warnings] == ["FT771"]


def test_an_explicit_checkpoint_is_trained_from_whatever_was_trained(tmp_path: Path) -> None:
    run = trained(tmp_path / "a")
    with open_run(run.path, str(run.checkpoints.path(5)), recipe()) as again:
        assert again.trained is None
        assert again.resume_step == 5
    status = read_status(run.status_path)
    assert status is not None
    assert status.trained is None


def test_a_start_without_any_usable_checkpoint_is_told(tmp_path: Path) -> None:
    run = unfinished(tmp_path / "a", 5)
    (run.checkpoints.path(5) / "weights").unlink()
    with open_run(run.path, "auto", recipe()) as opened:
        assert opened.resume_from is None
        assert [w.code for w in opened.warnings] == ["FT726", "FT733"]


def test_leftovers_of_a_crash_go_and_files_of_people_stay(tmp_path: Path) -> None:
    run = unfinished(tmp_path / "a", 5)
    for name in (".tmp-status.json.7", ".trash-adapter.1", ".writing-model"):
        (run.path / name).mkdir()
        (run.path / name / "x").touch()
    (run.path / "notes.txt").touch()
    (run.path / ".gitignore").touch()
    open_run(run.path, "auto", recipe()).close()
    hidden = [name for name in names(run.path) if name.startswith(".")]
    assert hidden == [".gitignore", ".lock"]
    assert (run.path / "notes.txt").exists()


@pytest.mark.parametrize("code", [ExitCode.PREEMPTED, ExitCode.INTERRUPTED, ExitCode.BUG, ExitCode.OUT_OF_MEMORY])
def test_auto_continues_a_run_that_ended_early(tmp_path: Path, code: ExitCode) -> None:
    with open_run(tmp_path / "a", "auto", recipe()) as opened:
        save(opened, 5)
        opened.finish(code, message="why")
    status = read_status(opened.directory.status_path)
    assert status is not None
    assert (status.exit_code, status.resumable, status.message) == (code, True, "why")
    assert status.state == ("preempted" if code in (75, 130) else "failed")
    with open_run(tmp_path / "a", "auto", recipe()) as again:
        assert again.resume_step == 5


def test_a_changed_recipe_is_refused_with_old_and_new_values(tmp_path: Path) -> None:
    run = unfinished(tmp_path / "a", 5, text=recipe(train={"learning_rate": 2e-4, "max_steps": 10}))
    changed = recipe(train={"learning_rate": 1e-5, "max_steps": 20}, lora={"r": 8}, logging={"every_steps": 1})
    with pytest.raises(FtcliError) as caught:
        open_run(run.path, "auto", changed)
    message = "\n".join(finding.message for finding in caught.value.findings)
    assert set(codes(caught.value)) == {"FT721"}
    assert {str(finding.origin) for finding in caught.value.findings} == {str(run.recipe_path)}
    assert "--resume never" in str(caught.value.findings[-1].help)
    assert caught.value.exit_code is ExitCode.RECIPE
    assert "train.learning_rate: 0.0002 -> 1.0e-05" in message
    assert "train.max_steps: 10 -> 20" in message
    assert "lora" in message
    assert "logging" not in message
    assert not is_locked(run.path)
    assert "max_steps: 10" in run.recipe_path.read_text()


def test_a_run_that_was_refused_before_its_first_step_does_not_claim_its_folder(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "a")
    with open_run(run.path, "auto", recipe(train={"max_steps": 10})) as opened:
        opened.finish(ExitCode.DATA, message="FT411: no rows")
    with open_run(run.path, "auto", recipe(train={"max_steps": 20})) as opened:
        assert (opened.resume_from, opened.already_complete) == (None, False)
        assert "max_steps: 20" in run.recipe_path.read_text()
        run.metrics_path.write_text('{"step": 1, "loss": 2.0}\n')
        opened.finish(ExitCode.DIVERGED)
    with pytest.raises(FtcliError, match="FT721"):
        open_run(run.path, "auto", recipe(train={"max_steps": 10}))


@pytest.mark.parametrize("state", ["finished", "unfinished", "by name"])
def test_a_run_goes_on_by_the_command_that_began_it(tmp_path: Path, state: str) -> None:
    run = unfinished(tmp_path / "a", 5)
    run.manifest_path.write_text('{"command": "train"}')
    if state == "finished":
        with open_run(run.path, "auto", recipe()) as opened:
            run.adapter_dir.mkdir()
            opened.finish(ExitCode.OK)
    before = run.status_path.read_text()
    resume = str(run.checkpoints.path(5)) if state == "by name" else "auto"
    path = tmp_path / "b" if state == "by name" else run.path
    with pytest.raises(FtcliError, match=r"begun by `ftcli train`, and this is `ftcli grpo`") as caught:
        open_run(path, resume, recipe(), "grpo")
    assert codes(caught.value) == ["FT721"]
    assert run.status_path.read_text() == before
    open_run(run.path, "never", recipe(), "grpo").close()


def test_a_run_that_never_began_takes_another_command(tmp_path: Path) -> None:
    run = unfinished(tmp_path / "a")
    run.manifest_path.write_text('{"command": "train"}')
    open_run(run.path, "auto", recipe(), "grpo").close()


def test_the_time_of_earlier_processes_is_kept(tmp_path: Path) -> None:
    run = unfinished(tmp_path / "a", 5)
    raw = json.loads(run.status_path.read_text())
    raw |= {"started": "2026-11-21T03:00:00Z", "ended": "2026-11-21T03:10:00Z", "earlier_seconds": 30}
    run.status_path.write_text(json.dumps(raw))
    with open_run(run.path, "auto", recipe()) as opened:
        opened.finish(ExitCode.OK)
    status = read_status(run.status_path)
    assert status is not None
    assert status.seconds is not None
    assert 630 <= status.seconds <= 660


def test_a_lock_that_is_a_link_leaves_what_it_leads_to_alone(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "precious").write_text("mine")
    (tmp_path / "a" / ".lock").symlink_to(tmp_path / "precious")
    with pytest.raises(FtcliError, match="FT723"):
        open_run(tmp_path / "a", "auto", recipe())
    assert (tmp_path / "precious").read_text() == "mine"


def test_harmless_changes_are_taken_over(tmp_path: Path) -> None:
    run = unfinished(tmp_path / "a", 5)
    new = recipe(
        run={"resume": "auto", "name": "other"},
        logging={"every_steps": 1},
        eval={"every_steps": 7},
        checkpoint={"keep_last": 9},
        data={"eval": ["x.jsonl"]},
        train={"gradient_checkpointing": "offload"},
    )
    with open_run(run.path, "auto", new) as opened:
        assert opened.resume_step == 5
    assert run.recipe_path.read_text() == new


HELD, OTHER = {"eval": ["held.jsonl"]}, {"eval": [{"path": "other.jsonl", "max_rows": 3}]}
TASKS = {"tasks": [{"use": "contains"}]}


@pytest.mark.parametrize(
    ("command", "before", "now", "key"),
    [
        ("train", {"data": HELD}, {"data": OTHER}, "data.eval"),
        ("train", {"data": HELD}, {}, "data.eval"),
        ("train", {"data": HELD, "eval": TASKS}, {"data": HELD}, None),  # no task is asked
        ("train", {}, {"data": HELD}, None),  # nothing was measured so far
        ("grpo", {"data": HELD}, {"data": OTHER}, "data.eval"),
        ("grpo", {"data": HELD, "eval": TASKS}, {"data": HELD}, "eval.tasks"),
        ("grpo", {"eval": TASKS}, {"eval": {**TASKS, "generate": {"max_new_tokens": 5}}}, "eval.generate"),
        ("grpo", {"eval": TASKS}, {"eval": {**TASKS, "every_steps": 5}}, None),
    ],
)
def test_what_is_measured_on_stays_what_it_was(
    tmp_path: Path, command: str, before: dict[str, Any], now: dict[str, Any], key: str | None
) -> None:
    with open_run(tmp_path / "a", "auto", recipe(**before), command) as opened:
        checkpoint = save(opened, 5)
        opened.directory.manifest_path.write_text(json.dumps({"command": command}))
    if key is not None:
        with pytest.raises(FtcliError, match=f"the recipe differs .*: {key}") as caught:
            open_run(tmp_path / "a", "auto", recipe(**now), command)
        assert (caught.value.exit_code, {*codes(caught.value)}) == (ExitCode.RECIPE, {"FT721"})
    with open_run(tmp_path / "a", str(checkpoint), recipe(**now), command) as opened:
        assert all(f"another setting: {key}" in warning.message for warning in opened.warnings)
        assert [w.code for w in opened.warnings] == ["FT732"] * (key is not None)


def test_never_keeps_every_old_run_beside_the_new_one(tmp_path: Path) -> None:
    run = unfinished(tmp_path / "a", 5)
    unfinished_again = open_run(run.path, "never", recipe(train={"max_steps": 3}))
    save(unfinished_again, 1)
    unfinished_again.close()
    with open_run(run.path, "never", recipe()) as opened:
        assert opened.resume_from is None
        assert is_locked(run.path)
        assert names(run.checkpoints_dir) == []
    assert (tmp_path / "a.previous-1/checkpoints/step-00000005").is_dir()
    assert (tmp_path / "a.previous-2/checkpoints/step-00000001").is_dir()
    assert not is_locked(tmp_path / "a.previous-1")


def test_a_named_checkpoint_of_the_same_run_sets_later_ones_aside(tmp_path: Path) -> None:
    run = unfinished(tmp_path / "a", 5, 10)
    with open_run(run.path, str(run.checkpoints.path(5)), recipe(train={"learning_rate": 1e-5})) as opened:
        assert opened.resume_step == 5
        assert [w.code for w in opened.warnings] == ["FT732", "FT730"]
        assert "train.learning_rate: 0.0002 -> 1.0e-05" in opened.warnings[0].message
    assert run.checkpoints.newest() == run.checkpoints.path(5)
    assert (run.checkpoints_dir / "step-00000010.superseded-1").is_dir()


def test_a_named_checkpoint_of_another_run_starts_a_new_directory(tmp_path: Path) -> None:
    other = unfinished(tmp_path / "a", 5)
    with open_run(tmp_path / "b", str(other.path), recipe()) as opened:
        assert opened.resume_from == other.checkpoints.path(5)
    # killed before its first checkpoint: auto goes back to where it came from
    with open_run(tmp_path / "b", "auto", recipe()) as again:
        assert again.resume_from == other.checkpoints.path(5)
    with pytest.raises(FtcliError) as caught:
        open_run(tmp_path / "b", str(other.checkpoints.path(5)), recipe())
    assert codes(caught.value) == ["FT722"]


def test_a_named_checkpoint_with_another_model_shape_is_refused(tmp_path: Path) -> None:
    other = unfinished(tmp_path / "a", 5, text=recipe(lora={"r": 8}))
    with pytest.raises(FtcliError) as caught:
        open_run(tmp_path / "b", str(other.checkpoints.path(5)), recipe(lora={"r": 16}))
    assert codes(caught.value) == ["FT721"]
    assert "lora.r: 8 -> 16" in caught.value.findings[0].message
    assert not RunDirectory(tmp_path / "b").recipe_path.exists()


@pytest.mark.parametrize("what", ["absent", "file", "damaged", "name", "empty run"])
def test_an_unusable_named_checkpoint_is_ft725(tmp_path: Path, what: str) -> None:
    run = unfinished(tmp_path / "a", *(() if what == "empty run" else (5,)))
    checkpoint = run.checkpoints.path(5)
    named = {"absent": tmp_path / "nowhere", "file": run.recipe_path, "name": tmp_path, "empty run": run.path}
    if what == "damaged":
        os.truncate(checkpoint / "weights", 0)
    with pytest.raises(FtcliError) as caught:
        open_run(tmp_path / "b", str(named.get(what, checkpoint)), recipe())
    assert codes(caught.value) == ["FT725"]
    assert caught.value.exit_code is ExitCode.RECIPE


@pytest.mark.parametrize("resume", ["auto", "never"])
def test_other_peoples_folders_are_refused_and_untouched(tmp_path: Path, resume: str) -> None:
    (tmp_path / "thesis.tex").write_text("x")
    (tmp_path / "recipe.yaml").write_text(recipe())
    with pytest.raises(FtcliError) as caught:
        open_run(tmp_path, resume, recipe())
    assert codes(caught.value) == ["FT722"]
    assert names(tmp_path) == ["recipe.yaml", "thesis.tex"]


def test_a_file_in_the_way_is_ft722_and_below_a_file_ft723(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for path, code in ((tmp_path / "file", "FT722"), (tmp_path / "file" / "run", "FT723")):
        with pytest.raises(FtcliError) as caught:
            open_run(path, "auto", recipe())
        assert codes(caught.value) == [code]


def test_an_unreadable_old_recipe_is_ft727_and_never_starts_anew(tmp_path: Path) -> None:
    run = unfinished(tmp_path / "a", 5)
    run.recipe_path.write_text("a: [1")
    with pytest.raises(FtcliError) as caught:
        open_run(run.path, "auto", recipe())
    assert codes(caught.value) == ["FT727"]
    with open_run(run.path, "never", recipe()) as opened:
        assert opened.resume_from is None


def test_a_key_that_an_older_version_did_not_write_counts_as_its_default(tmp_path: Path) -> None:
    run = unfinished(tmp_path / "a", 5)
    raw = yaml.safe_load(run.recipe_path.read_text())
    del raw["train"]["adam_beta2"]
    run.recipe_path.write_text(yaml.safe_dump(raw))
    with open_run(run.path, "auto", recipe()) as opened:
        assert opened.resume_step == 5


def test_status_json_is_plain_for_scripts(tmp_path: Path) -> None:
    with open_run(tmp_path / "a", "auto", recipe()) as opened:
        opened.finish(ExitCode.DIVERGED, message="loss is NaN at step 3", resumable=False)
    raw = json.loads(opened.directory.status_path.read_text())
    assert raw["state"] == "failed"
    assert raw["exit_code"] == 6
    assert raw["resumable"] is False
    assert raw["started"].endswith("Z")
    assert raw["ended"].endswith("Z")


SOURCES = [{"path": "a.jsonl", "weight": 1.0}, {"path": "b.jsonl", "weight": 0.5, "columns": {"text": "t"}}]


@pytest.mark.parametrize(
    ("now", "said"),
    [
        ([SOURCES[0], {**SOURCES[1], "weight": 0.25}], ["data.train.1.weight: 0.5 -> 0.25"]),
        ([SOURCES[0], {**SOURCES[1], "columns": {"text": "u"}}], ["data.train.1.columns.text: t -> u"]),
        (
            [{"path": "c.jsonl", "weight": 2.0}, SOURCES[1]],
            ["data.train.0.path: a.jsonl -> c.jsonl", "data.train.0.weight: 1.0 -> 2.0"],
        ),
        (SOURCES[:1], ["data.train: without b.jsonl"]),
        ([*SOURCES, {"path": "d.jsonl", "weight": 3}], ["data.train: with d.jsonl"]),
        ([{"path": "e.jsonl", "weight": 3}], ["data.train: without a.jsonl", "without b.jsonl", "with e.jsonl"]),
        ([], ["data.train: ["]),
    ],
)
def test_of_changed_sources_it_says_what_has_changed(tmp_path: Path, now: list[Any], said: list[str]) -> None:
    """It printed both lists whole: a thousand characters for one number."""
    run = unfinished(tmp_path / "a", 5, text=recipe(data={"train": SOURCES, "max_seq_len": 64}))
    with pytest.raises(FtcliError) as caught:
        open_run(run.path, "auto", recipe(data={"train": now, "max_seq_len": 64}))
    (finding,) = caught.value.findings
    assert all(each in finding.message for each in said), finding.message
    assert not now or "remove_columns" not in finding.message
