"""llama.cpp itself: what it makes of a file is compared with training, and that it is not there is said once.

The library is asked where it is installed; elsewhere a stand-in of `llama-server` says what the test has it say.
"""

from __future__ import annotations

import dataclasses
import json
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ftcli.config.evaluation import ExportConfig
from ftcli.errors import FtcliError
from ftcli.export.gguf import verify as llama
from ftcli.export.gguf.file import ExpectedFile
from ftcli.export.gguf.verify import LIBRARY, FileReport, installed_llama_cpp, verify_file
from ftcli.export.gguf.write import write_type
from ftcli.export.verify import TEXTS
from ftcli.export.writing import export_run
from ftcli.tables.gguf import TYPES
from tests.small_models import build
from tests.unit.export.conftest import Heard
from tests.unit.export.gguf_runs import adapt, prepared_of

pytest.importorskip("gguf")

#: Speaks as much of llama-server's protocol as is asked of it, and says what lies beside it.
SERVER = """#!{python}
import json, pathlib, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
said = json.loads(pathlib.Path(__file__).with_name("said.json").read_text())
if said.get("dies"):
    sys.exit(said["dies"])
class Handler(BaseHTTPRequestHandler):
    def answer(self, document):
        data = json.dumps(document).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
    def do_GET(self):
        self.answer({{"build_info": "b1"}} if self.path == "/props" else {{"status": "ok"}})
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/tokenize":
            self.answer({{"tokens": said["texts"][asked["content"]]}})
        else:
            right = [each for each in said["steps"] if each["prompt"] == asked["prompt"] and not asked["temperature"]]
            self.answer(right[0] if right else {{}})
    def log_message(self, *_):
        pass
HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, Any]], Path]:
    """Puts a `llama-server` on the PATH that says what it is given; the library is not there."""

    def put(said: dict[str, Any]) -> Path:
        folder = tmp_path / "bin"
        folder.mkdir(exist_ok=True)
        (folder / "said.json").write_text(json.dumps(said))
        program = folder / "llama-server"
        program.write_text(SERVER.format(python=sys.executable))
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", str(folder), prepend=":")
        monkeypatch.setattr(llama, "find_spec", lambda _: None)
        return program

    return put


def truth(prepared: ExpectedFile) -> dict[str, Any]:
    """What llama.cpp should say of a file."""
    wanted = prepared
    rows = torch.log_softmax(wanted.logits[wanted.probe.continued_at].double(), dim=-1)
    told = [
        {"top_logprobs": [{"id": i, "logprob": float(row[i])} for i in row.topk(200).indices.tolist()]} for row in rows
    ]
    texts = {text: wanted.tokenizer(text, add_special_tokens=False)["input_ids"] for text in TEXTS}
    greedy = wanted.probe.greedy.tolist()
    prompt = wanted.probe.prompt[0].tolist()
    steps = [
        {"prompt": [*prompt, *greedy[:place]], "tokens": [token], "completion_probabilities": [told[place]]}
        for place, token in enumerate(greedy)
    ]
    return {"steps": steps, "texts": texts}


def verified(prepared: ExpectedFile, found: str | None, folder: Path, kind: str = "f32") -> FileReport:
    path = folder / "model.gguf"
    write_type(prepared, path, kind)
    return verify_file(path, kind, dataclasses.replace(prepared, llama_cpp=found))


def test_what_the_server_says_is_held_against_training(
    shared: ExpectedFile, stand_in: Callable[..., Path], tmp_path: Path
) -> None:
    program = stand_in(truth(shared))
    assert installed_llama_cpp() == str(program)
    report = verified(shared, installed_llama_cpp(), tmp_path)
    assert not report.problems
    facts = report.facts("f32_")
    assert facts["f32_llama_cpp"] == "llama-server b1"
    assert float(facts["f32_llama_cpp_error"]) < 1e-6
    assert facts["f32_llama_cpp_greedy_tokens"] == "6 of 6"


def other_token(said: dict[str, Any]) -> None:
    said["steps"][2]["tokens"] = [(said["steps"][2]["tokens"][0] + 1) % 264]
    said["steps"][2]["stop_type"] = "eos"


def other_logits(said: dict[str, Any]) -> None:
    for place, told in enumerate(said["steps"][0]["completion_probabilities"][0]["top_logprobs"]):
        told["logprob"] += 0.2 * (place % 2)


def other_pieces(said: dict[str, Any]) -> None:
    said["texts"][TEXTS[1]].pop()


def dies(said: dict[str, Any]) -> None:
    said["dies"] = "unknown model architecture"


def says_something_else(said: dict[str, Any]) -> None:
    said["steps"][0] = {"prompt": said["steps"][0]["prompt"], "content": "Hello"}


FAULTS = {
    other_token: "in llama.cpp generated token 3 differs",
    other_logits: "in llama.cpp the likeliest tokens' logits differ by",
    other_pieces: "is cut into different tokens",
    dies: "in llama.cpp it cannot be loaded: unknown model architecture",
    says_something_else: "answered something other than was asked",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_the_server_says_otherwise_fails_the_verification(
    fault: Callable[[dict[str, Any]], None], shared: ExpectedFile, stand_in: Callable[..., Path], tmp_path: Path
) -> None:
    said = truth(shared)
    fault(said)
    report = verified(shared, str(stand_in(said)), tmp_path)
    assert FAULTS[fault] in " ".join(report.problems)


def test_a_server_that_is_too_old_is_not_asked(
    shared: ExpectedFile, stand_in: Callable[..., Path], tmp_path: Path
) -> None:
    report = verified(shared, str(stand_in({"dies": "error: invalid argument: --no-repack"})), tmp_path)
    assert not report.problems
    assert "not asked: it cannot be loaded: error: invalid" in str(report.facts("")["llama_cpp"])


def test_probabilities_too_small_for_float32_tell_nothing(
    shared: ExpectedFile, stand_in: Callable[..., Path], tmp_path: Path
) -> None:
    """llama-server's are softmax's, whose logarithm is that of zero for many tokens of a model that is sure."""
    said = truth(shared)
    for step in said["steps"]:
        step["completion_probabilities"][0]["top_logprobs"][-1]["logprob"] = -3.4e38
    del said["steps"][1]["completion_probabilities"]  # as where the text so far ends inside a character
    assert not verified(shared, str(stand_in(said)), tmp_path).problems


def test_a_failure_in_llama_cpp_leaves_nothing(tmp_path: Path, stand_in: Callable[..., Path]) -> None:
    stand_in({"dies": "no such tensor"})
    made = adapt(tmp_path, build("llama"))
    settings = ExportConfig.model_validate({"gguf": {"types": ["f32"]}})
    with pytest.raises(FtcliError, match=r"in llama\.cpp it cannot be loaded") as caught:
        export_run(made.run, ["gguf"], reporter=Heard(), offline=True, settings=settings)
    assert {finding.code for finding in caught.value.findings} == {"FT741"}
    assert not list(made.run.export_dir.iterdir())


def test_that_it_is_not_there_is_said_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ftcli.export.writing.installed_llama_cpp", lambda: None)
    made, heard = adapt(tmp_path, build("llama")), Heard()
    settings = ExportConfig.model_validate({"gguf": {"types": ["f32", "q8_0"]}})
    gguf, ollama = export_run(made.run, ["gguf", "ollama"], reporter=heard, offline=True, settings=settings)
    assert sum("llama.cpp is not on this machine" in line for line in heard.lines) == 1
    assert gguf.verification.facts["q8_0_llama_cpp"] == "not on this machine"
    assert ollama.verification.facts["llama_cpp"] == "not on this machine"
    heard.lines.clear()
    export_run(made.run, ["adapter"], reporter=heard, offline=True)
    assert not [line for line in heard.lines if "llama.cpp is not" in line]


def test_a_fault_of_llama_cpps_own_is_told_and_no_failure(
    shared: ExpectedFile, stand_in: Callable[..., Path], tmp_path: Path
) -> None:
    said = truth(shared)
    other_token(said)
    faulty = dataclasses.replace(shared.architecture, fault="it reads nothing")
    known = dataclasses.replace(shared, architecture=faulty)
    report = verified(known, str(stand_in(said)), tmp_path)
    assert not report.problems
    assert str(report.facts("")["llama_cpp"]).endswith("differs: it reads nothing")


def test_a_library_that_is_broken_is_none(
    shared: ExpectedFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here it is not installed, or the process has not found it: the export is whole, and its record says so."""
    from ftcli.export.clean.request import ReloadAnswer, ReloadRequest

    def without(request: ReloadRequest, sent: Any) -> ReloadAnswer:
        if request.kind == "llama":
            return ReloadAnswer(unavailable="llama-cpp-python cannot be imported: no such file")
        return shared.reload(request, sent)

    alone = dataclasses.replace(shared, reload=without)
    report = verified(alone, LIBRARY, tmp_path)
    assert not report.problems
    assert "no such file" in str(report.facts("")["llama_cpp"])


@pytest.mark.parametrize("family", ["llama", "gemma2", "mistral", "olmo3", "glm4", "apertus", "qwen3_5_text"])
def test_the_library_answers_as_training_did(family: str, tmp_path: Path, clean_process: Any) -> None:
    pytest.importorskip("llama_cpp")
    prepared = prepared_of(adapt(tmp_path, build(family)), clean_process)
    report = verified(prepared, LIBRARY, tmp_path)
    assert not report.problems
    assert float(report.facts("")["llama_cpp_error"]) < 1e-3


def test_the_library_notices_other_numbers(shared: ExpectedFile, tmp_path: Path) -> None:
    """A file that llama.cpp computes, of another model than the one that was trained."""
    pytest.importorskip("llama_cpp")
    wanted = dataclasses.replace(shared, logits=shared.logits.flip(-1), llama_cpp=LIBRARY)
    path = tmp_path / "model.gguf"
    write_type(shared, path, "f32")
    assert "in llama.cpp logits differ" in llama.run_in_llama_cpp(path, TYPES["f32"], wanted, 0.0).problems[0]
