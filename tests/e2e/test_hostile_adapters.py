"""`eval --run` and `export` of a run whose adapter is missing, cut or misconfigured: told, never measured.

A run notes its adapter's digests, so what is changed in it is FT771. Damaged adapters have theirs noted anew here: what
holds an adapter against its run says nothing of them, and what reads it has to.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ftcli.run.integrity import result_files
from tests.e2e.conftest import RECIPE, merged
from tests.fuzz.contract import hold, run
from tests.fuzz.recipes import written
from tests.tiers import in_turn

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"


def _edit(**values: Any) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        path = folder / CONFIG
        path.write_text(json.dumps({**json.loads(path.read_text()), **values}))

    return edit


def _note(run: Path) -> None:
    status = json.loads((run / "status.json").read_text())
    status["trained"]["files"] = result_files(run / "adapter")
    (run / "status.json").write_text(json.dumps(status))


def _without_a_tensor(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    tensors.pop(min(tensors))
    save_file(tensors, folder / WEIGHTS)


def _of_another_shape(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    name = min(tensors)
    save_file({**tensors, name: torch.zeros(3, 3)}, folder / WEIGHTS)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "no weights": lambda folder: (folder / WEIGHTS).unlink(),
    "no config": lambda folder: (folder / CONFIG).unlink(),
    "nothing": shutil.rmtree,
    "cut weights": lambda folder: (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:5000]),
    "cut config": lambda folder: (folder / CONFIG).write_text((folder / CONFIG).read_text()[:50]),
    "weights that are text": lambda folder: (folder / WEIGHTS).write_text("rubbish"),
    "config that is a list": lambda folder: (folder / CONFIG).write_text("[]"),
    "a tensor less": _without_a_tensor,
    "a tensor of another shape": _of_another_shape,
    "another rank": _edit(r=2),
    "a rank that is text": _edit(r="x"),
    "no rank": _edit(r=0),
    "another kind of adapter": _edit(peft_type="PREFIX_TUNING"),
    "a kind of adapter that is none": _edit(peft_type="x"),
    "layers that are not there": _edit(target_modules=["nothing"]),
    "a package that is not there": _edit(megatron_config={"a": 1}, megatron_core="no.such.package"),
    "a scaling that is text": _edit(lora_alpha="x"),
    "an expression that never ends": _edit(target_modules="(([a-z_.0-9]+)+)+!"),
    "a rank's expression that never ends": _edit(rank_pattern={"(([a-z_.0-9]+)+)+!": 4}),
    "an expression that is none": _edit(rank_pattern={"(": 4}),
}

COMMANDS = [("eval", "r.yaml", "--run", "r"), ("export", "r", "--set", "export.formats=[adapter]")]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a recipe and its finished run."""
    folder = tmp_path_factory.mktemp("whole")
    own = {
        "run": {"output_dir": "r"},
        "train": {"max_steps": 1},
        "data": {"eval": [{"path": "bundled:smoke-eval", "max_rows": 2}]},
    }
    (folder / "r.yaml").write_bytes(written(merged(RECIPE, own)))
    assert run(folder, "train", "r.yaml", "--offline", "--json").status == 0
    return folder


@pytest.mark.parametrize(
    ("name", "words"), in_turn(list(DAMAGE), COMMANDS, ids=lambda value: value if isinstance(value, str) else value[0])
)
def test_an_adapter_that_is_damaged_is_refused(whole: Path, tmp_path: Path, name: str, words: tuple[str, ...]) -> None:
    folder = shutil.copytree(whole, tmp_path / "x")
    DAMAGE[name](folder / "r" / "adapter")
    _note(folder / "r")
    outcome = run(folder, *words, "--offline", "--json")
    hold(outcome, looks_only=False)
    assert outcome.codes & {"FT334", "FT740", "FT742", "FT763"}, outcome.stderr
    assert outcome.status in (2, 3)
    assert "result" not in outcome.document


@pytest.mark.parametrize("words", COMMANDS, ids=lambda w: w[0])
def test_an_adapter_that_is_not_what_its_run_noted_is_refused(
    whole: Path, tmp_path: Path, words: tuple[str, ...]
) -> None:
    folder = shutil.copytree(whole, tmp_path / "x")
    DAMAGE["cut weights"](folder / "r" / "adapter")
    outcome = run(folder, *words, "--offline", "--json")
    hold(outcome, looks_only=False)
    assert (outcome.status, "FT771" in outcome.codes) == (2, True), outcome.stderr
    assert WEIGHTS in outcome.stderr
    assert "result" not in outcome.document


@pytest.mark.parametrize("format", ["adapter", "safetensors"])
def test_a_tokenizer_without_an_end_is_not_exported(whole: Path, tmp_path: Path, format: str) -> None:
    folder = shutil.copytree(whole, tmp_path / "x")
    path = folder / "r" / "adapter" / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token": None}))
    _note(folder / "r")
    outcome = run(folder, "export", "r", "--set", f"export.formats=[{format}]", "--offline", "--json")
    hold(outcome, looks_only=False)
    assert (outcome.status, "FT322" in outcome.codes) == (3, True), outcome.stderr
    assert not (folder / "r" / "export" / format).exists()
