"""llama.cpp itself: what it makes of a file is compared with training, and that it is not there is said once.

The library is asked where it is installed; elsewhere the process that loads it says what the test has it say.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ftcli.config.evaluation import ExportConfig
from ftcli.errors import FtcliError
from ftcli.export.clean.process import Reload
from ftcli.export.clean.request import LOGITS, ReloadAnswer
from ftcli.export.gguf import verify as llama
from ftcli.export.gguf.file import ExpectedFile
from ftcli.export.gguf.verify import LIBRARY, FileReport, verify_file
from ftcli.export.gguf.write import write_type
from ftcli.export.verify import TEXTS
from ftcli.export.writing import export_run
from ftcli.tables.gguf import TYPES
from tests.small_models import build
from tests.unit.export.conftest import Heard
from tests.unit.export.gguf_runs import adapt, changed, prepared_of

pytest.importorskip("gguf")


def truth(prepared: ExpectedFile) -> ReloadAnswer:
    """What llama.cpp should say of a file."""
    texts = [list(prepared.tokenizer(text, add_special_tokens=False)["input_ids"]) for text in TEXTS]
    return ReloadAnswer(
        tokenizer={"rendered": texts},
        stops={LIBRARY: prepared.stops},
        libraries="torch 2, llama_cpp 0.3",
        tensors={LOGITS: prepared.logits.clone()},
    )


def saying(answer: ReloadAnswer, otherwise: Reload) -> Reload:
    """A process that answers so when it is asked about llama.cpp."""
    return lambda request, sent: answer if request.kind == "llama" else otherwise(request, sent)


def verified(prepared: ExpectedFile, answer: ReloadAnswer | None, folder: Path, kind: str = "f32") -> FileReport:
    path = folder / "model.gguf"
    write_type(prepared, path, kind)
    reload = prepared.reload if answer is None else saying(answer, prepared.reload)
    return verify_file(path, kind, dataclasses.replace(prepared, llama_cpp=True, reload=reload))


def test_what_the_library_says_is_held_against_training(shared: ExpectedFile, tmp_path: Path) -> None:
    report = verified(shared, truth(shared), tmp_path)
    assert not report.problems
    facts = report.facts("f32_")
    assert facts["f32_llama_cpp"] == "llama_cpp 0.3"
    assert float(facts["f32_llama_cpp_error"]) < 1e-6
    assert facts["f32_llama_cpp_greedy_tokens"] == "6 of 6"


def other_token(said: ReloadAnswer, prepared: ExpectedFile) -> ReloadAnswer:
    logits = said.tensors[LOGITS].clone()
    row = logits[prepared.probe.continued_at][2]
    best = int(row.argmax())
    row[(best + 1) % len(row)] = row[best] + 1.0
    return dataclasses.replace(said, tensors={LOGITS: logits})


def other_logits(said: ReloadAnswer, _: ExpectedFile) -> ReloadAnswer:
    logits = said.tensors[LOGITS].clone()
    logits[:, ::2] += 0.2
    return dataclasses.replace(said, tensors={LOGITS: logits})


def other_pieces(said: ReloadAnswer, _: ExpectedFile) -> ReloadAnswer:
    first, second = said.tokenizer["rendered"]
    return dataclasses.replace(said, tokenizer={"rendered": [first, second[:-1]]})


def other_stops(said: ReloadAnswer, _: ExpectedFile) -> ReloadAnswer:
    return dataclasses.replace(said, stops={LIBRARY: ()})


def cannot_load(_: ReloadAnswer, __: ExpectedFile) -> ReloadAnswer:
    return ReloadAnswer(problems=("it cannot be loaded: ValueError: llama.cpp cannot load it",))


FAULTS = {
    other_token: "in llama.cpp generated token 3 differs",
    other_logits: "in llama.cpp logits differ by",
    other_pieces: "is cut into different tokens",
    other_stops: "in llama.cpp generation does not end at the stop token",
    cannot_load: "in llama.cpp it cannot be loaded: ValueError: llama.cpp cannot load it",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_the_library_says_otherwise_fails_the_verification(
    fault: Callable[[ReloadAnswer, ExpectedFile], ReloadAnswer], shared: ExpectedFile, tmp_path: Path
) -> None:
    report = verified(shared, fault(truth(shared), shared), tmp_path)
    assert FAULTS[fault] in " ".join(report.problems)


def test_a_failure_in_llama_cpp_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ftcli.export.writing.has_llama_cpp", lambda: True)
    failed = FileReport(("in llama.cpp it cannot be loaded: no such tensor",))
    monkeypatch.setattr(llama, "run_in_llama_cpp", lambda *_: failed)
    made = adapt(tmp_path, build("llama"))
    settings = ExportConfig.model_validate({"gguf": {"types": ["f32"]}})
    with pytest.raises(FtcliError, match=r"in llama\.cpp it cannot be loaded") as caught:
        export_run(made.run, ["gguf"], reporter=Heard(), offline=True, settings=settings)
    assert {finding.code for finding in caught.value.findings} == {"FT741"}
    assert not list(made.run.export_dir.iterdir())


def test_that_it_is_not_there_is_said_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ftcli.export.writing.has_llama_cpp", lambda: False)
    made, heard = adapt(tmp_path, build("llama")), Heard()
    settings = ExportConfig.model_validate({"gguf": {"types": ["f32", "q8_0"]}})
    gguf, ollama = export_run(made.run, ["gguf", "ollama"], reporter=heard, offline=True, settings=settings)
    assert sum("llama.cpp is not on this machine" in line for line in heard.lines) == 1
    assert gguf.verification.facts["q8_0_llama_cpp"] == "not on this machine"
    assert ollama.verification.facts["llama_cpp"] == "not on this machine"
    heard.lines.clear()
    export_run(made.run, ["adapter"], reporter=heard, offline=True)
    assert not [line for line in heard.lines if "llama.cpp is not" in line]


def test_a_fault_of_llama_cpps_own_is_told_and_no_failure(shared: ExpectedFile, tmp_path: Path) -> None:
    faulty = dataclasses.replace(shared.architecture, fault="it reads nothing")
    known = dataclasses.replace(shared, architecture=faulty)
    report = verified(known, other_token(truth(shared), shared), tmp_path)
    assert not report.problems
    assert str(report.facts("")["llama_cpp"]).endswith("it reads nothing")


def test_a_library_that_is_broken_is_none(shared: ExpectedFile, tmp_path: Path) -> None:
    """Here it is not installed, or the process has not found it: the export is whole, and its record says so."""
    broken = ReloadAnswer(unavailable="llama-cpp-python cannot be imported: no such file")
    report = verified(shared, broken, tmp_path)
    assert not report.problems
    assert "no such file" in str(report.facts("")["llama_cpp"])


def test_what_the_process_says_of_an_absent_library(shared: ExpectedFile, tmp_path: Path) -> None:
    """The true process, which imports it first."""
    if llama.has_llama_cpp():
        pytest.skip("it is installed")
    report = verified(shared, None, tmp_path)
    assert not report.problems
    assert str(report.facts("")["llama_cpp"]).startswith("not asked: llama-cpp-python cannot be imported")


RUN = ("llama", "gemma2", "mistral", "olmo3", "glm4", "apertus", "qwen3_5_text", "gpt_oss", "gemma4_text", "gemma4")


@pytest.mark.parametrize("family", RUN)
def test_the_library_answers_as_training_did(family: str, tmp_path: Path, clean_process: Any) -> None:
    pytest.importorskip("llama_cpp")
    model = build(family)
    if family == "gpt_oss":  # what llama.cpp rounds of it is 1e-3 here
        rotation = {**model.config.rope_parameters, "truncate": True}
        model = changed(family, rope_parameters=rotation)
    prepared = prepared_of(adapt(tmp_path, model), clean_process)
    report = verified(prepared, None, tmp_path)
    assert not report.problems
    assert float(report.facts("")["llama_cpp_error"]) < 1e-3


def test_the_library_notices_other_numbers(shared: ExpectedFile, tmp_path: Path) -> None:
    """A file that llama.cpp computes, of another model than the one that was trained."""
    pytest.importorskip("llama_cpp")
    wanted = dataclasses.replace(shared, logits=shared.logits.flip(-1), llama_cpp=True)
    path = tmp_path / "model.gguf"
    write_type(shared, path, "f32")
    assert "in llama.cpp logits differ" in llama.run_in_llama_cpp(path, TYPES["f32"], wanted, 0.0).problems[0]
