"""metrics.jsonl: no gap, no double line."""

from __future__ import annotations

import json
import os
import resource
from pathlib import Path

import pytest

from ftcli.errors import FtcliError
from ftcli.run.metrics import MetricsWriter, read_metrics


def write(path: Path, *steps: int) -> None:
    with MetricsWriter(path) as metrics:
        for step in steps:
            metrics.write(step, {"loss": step / 10})


def test_lines_are_readable_while_the_file_is_open(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as metrics:
        metrics.write(1, {"loss": 2.5, "zoë": 1.0})
        assert read_metrics(path).lines == [{"step": 1, "loss": 2.5, "zoë": 1.0}]


def test_a_resume_cuts_later_steps_and_keeps_the_rest_byte_for_byte(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, 0, 1, 2, 3, 4)
    lines = path.read_bytes().splitlines(keepends=True)
    with MetricsWriter(path, resume_step=2) as metrics:
        assert path.read_bytes() == b"".join(lines[:3])
        metrics.write(3, {"loss": 0.3})
    assert path.read_bytes() == b"".join(lines[:4])


def test_a_half_written_last_line_is_cut(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, 1, 2)
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"step": 2, "lo')
    assert [row["step"] for row in read_metrics(path).lines] == [1, 2]
    with MetricsWriter(path, resume_step=2):
        assert path.read_bytes() == whole


def test_a_start_from_step_zero_empties_the_file(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, 0, 1)
    with MetricsWriter(path):
        assert path.read_bytes() == b""


def test_nan_and_infinity_become_null(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as metrics:
        metrics.write(1, {"loss": float("nan"), "grad_norm": float("inf")})
    assert json.loads(path.read_text()) == {"step": 1, "loss": None, "grad_norm": None}


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\ngarbage\n{"step": 3}\n')
    found = read_metrics(path)
    assert [line["step"] for line in found.lines] == [1, 3]
    assert found.damage == "line 2 is not a metric"
    with pytest.raises(FtcliError) as caught, MetricsWriter(path, resume_step=3):
        pass
    assert caught.value.findings[0].code == "FT727"
    assert f"{path}:2" in caught.value.findings[0].message


@pytest.mark.parametrize("value", ["NaN", "1e308", "-Infinity", '"text"', "[1]", "{}", "true", "9" * 400])
def test_what_is_no_number_is_a_gap_and_said(value: str, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"step": 1, "loss": {value}, "tokens": 5}}\n{{"step": 2, "loss": 1.5, "reward": null}}\n')
    found = read_metrics(path)
    assert found.lines == [{"step": 1, "loss": None, "tokens": 5}, {"step": 2, "loss": 1.5, "reward": None}]
    assert found.damage == "line 1 has a loss that is no number"


@pytest.mark.parametrize("step", ['"1"', "1.5", "true", "-1", "1e300", "null", "9" * 400])
def test_a_line_whose_step_cannot_be_is_no_metric(step: str, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"step": {step}, "loss": 1.0}}\n{{"step": 2, "loss": 1.0}}\n')
    assert [line["step"] for line in read_metrics(path).lines] == [2]
    with pytest.raises(FtcliError, match="FT727"), MetricsWriter(path, resume_step=2):
        pass


def test_a_pipe_in_place_of_the_metrics_is_not_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    os.mkfifo(path)
    assert "a pipe" in read_metrics(path).damage
    for step in (0, 1):
        with pytest.raises(FtcliError, match="FT723"), MetricsWriter(path, resume_step=step):
            pass


def test_a_vanished_directory_is_ft723(tmp_path: Path) -> None:
    with pytest.raises(FtcliError) as caught:
        MetricsWriter(tmp_path / "gone" / "metrics.jsonl")
    assert caught.value.findings[0].code == "FT723"


def test_what_a_power_cut_left_after_the_last_sound_line_is_cut(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, 1, 2, 3)
    sound = path.read_bytes()
    path.write_bytes(sound + bytes(512) + b"\n{garbage\n\x00\x00")
    with MetricsWriter(path, resume_step=3):
        assert path.read_bytes() == sound


def test_a_damaged_line_among_sound_ones_is_named_on_resume(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\ngarbage\n{"step": 3}\n')
    with pytest.raises(FtcliError):
        MetricsWriter(path, resume_step=3)


def test_an_evaluation_that_is_to_be_made_again_goes_and_its_steps_loss_stays(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as metrics:
        for values in ({"loss": 1.0}, {"eval_loss": 2.0}):
            metrics.write(4, values)
    with MetricsWriter(path, resume_step=4):
        assert len(read_metrics(path).lines) == 2
    with MetricsWriter(path, resume_step=4, evaluate_again=True):
        assert read_metrics(path).lines == [{"step": 4, "loss": 1.0}]


def test_a_line_that_the_system_refuses_leaves_no_half_of_itself(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    child = os.fork()
    if child == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
        with MetricsWriter(path) as metrics:
            try:
                for step in range(1, 20):
                    metrics.write(step, {"loss": 0.125})
            except FtcliError as error:
                os._exit(24 if error.findings[0].code == "FT724" else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 24
    assert path.read_bytes().endswith(b"\n")
    assert [row["step"] for row in read_metrics(path).lines] == [1, 2, 3]


@pytest.mark.parametrize("how", ["deleted", "replaced"])
def test_lines_into_a_file_that_is_no_longer_there_are_refused(tmp_path: Path, how: str) -> None:
    """A deleted file takes every line, and nobody would ever see them."""
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as metrics:
        metrics.write(1, {})
        path.rename(tmp_path / "elsewhere")
        if how == "replaced":
            path.touch()
        for call in (lambda: metrics.write(2, {}), metrics.sync):
            with pytest.raises(FtcliError, match="vanished" if how == "deleted" else "replaced") as caught:
                call()
            assert caught.value.findings[0].code == "FT723"
