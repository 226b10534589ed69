"""GGUF by llama.cpp's own converter: what it makes is the merged model, or nothing is left of it.

A stand-in with its command line writes the files; docs/performance.md says what the real one's were found to be.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText, AutoTokenizer

from ftcli.assets import asset
from ftcli.config.evaluation import ExportConfig
from ftcli.errors import FtcliError
from ftcli.export.clean.process import CleanProcess
from ftcli.export.clean.request import LOGITS, PICTURE, READ, ReloadAnswer, ReloadRequest
from ftcli.export.gguf import convert
from ftcli.export.gguf import images as llama_images
from ftcli.export.gguf.file import prepare_gguf
from ftcli.export.gguf.verify import LIBRARY
from ftcli.export.source import resolve_source
from ftcli.export.verify import TEXTS
from ftcli.export.writing import ExportResult, export_run
from ftcli.gguf import ReadFile
from tests.small_models import build
from tests.unit.export import converter_stand_in
from tests.unit.export.conftest import Heard, Trained, tokenizer
from tests.unit.export.gguf_runs import adapt

pytest.importorskip("gguf")
pytestmark = pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys")


def checkout(folder: Path, fault: str = "") -> Path:
    """A checkout of llama.cpp, by what is looked for in it."""
    folder.mkdir(exist_ok=True)
    shutil.copyfile(converter_stand_in.__file__, folder / "convert_hf_to_gguf.py")
    (folder / "fault.txt").write_text(fault)
    return folder


def export(made: Trained, converter: Path | None, *types: str, heard: Heard | None = None, **more: Any) -> ExportResult:
    stated = {"types": types or ("f32",), "converter": None if converter is None else str(converter), **more}
    settings = ExportConfig.model_validate({"gguf": stated})
    (result,) = export_run(made.run, ["gguf"], reporter=heard or Heard(), offline=True, settings=settings, force=True)
    return result


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """An adapter on a family without a row, with experts."""
    return adapt(tmp_path_factory.mktemp("olmoe"), build("olmoe"), target_modules=["q_proj", "o_proj"])


def test_a_family_without_a_row_is_the_converters(made: Trained, tmp_path: Path) -> None:
    heard = Heard()
    result = export(made, checkout(tmp_path / "llama.cpp"), "f32", "q8_0", heard=heard)
    assert sorted(path.name for path in result.path.iterdir()) == [
        "README.md", "ftcli_export.json", "run-F32.gguf", "run-Q8_0.gguf",
    ]  # fmt: skip
    facts = result.verification.facts
    assert "another version" in str(facts["converter"])
    assert facts["tensors"] == 27
    told = [finding.message for finding in heard.findings if finding.code == "FT757"]
    assert any("what llama.cpp computes" in message for message in told)  # the library is not asked here
    file = ReadFile(result.path / "run-Q8_0.gguf")
    assert file.values["general.name"] == "run"
    assert file.values["tokenizer.ggml.eos_token_id"] == tokenizer().eos_token_id
    assert "{%- generation" not in file.values["tokenizer.chat_template"]


FAULTS = {
    "a changed number": "is not in the file as it was merged",
    "another layer": "is not in the file as it was merged",
    "a lost tensor": "is not in the file as it was merged",
    "shuffled tokens": "token 100 is another piece, and so are 1 more",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_of_a_converter_are_seen(made: Trained, fault: str, tmp_path: Path) -> None:
    shutil.rmtree(made.run.export_dir, ignore_errors=True)
    with pytest.raises(FtcliError, match=FAULTS[fault]) as caught:
        export(made, checkout(tmp_path / "llama.cpp", fault))
    assert {finding.code for finding in caught.value.findings} == {"FT741"}
    assert not made.run.export_dir.exists() or not list(made.run.export_dir.iterdir())


def test_a_converter_that_is_not_there_or_fails_is_told_with_what_to_do(made: Trained, tmp_path: Path) -> None:
    def failure(converter: Path | None, **more: Any) -> tuple[str, str, str]:
        with pytest.raises(FtcliError) as caught:
            export(made, converter, **more)
        (finding,) = caught.value.findings
        return finding.code, finding.message, str(finding.help)

    code, message, help = failure(tmp_path / "nowhere")
    assert (code, "nowhere" in message) == ("FT758", True)
    assert "git clone" in help
    code, message, _ = failure(checkout(tmp_path / "a", "refusal"))
    assert (code, "ended with status 1" in message, "not recognized" in message) == ("FT756", True, True)
    assert failure(checkout(tmp_path / "b", "a missing module"))[2].startswith("pip install sentencepiece")
    assert failure(checkout(tmp_path / "c", "memory"))[0] == "FT756"
    assert failure(checkout(tmp_path / "c"), imatrix=True)[0] == "FT756"


def test_a_converter_that_does_not_end_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convert, "_SECONDS", 0.5)
    (tmp_path / "model").mkdir()
    command = convert.require_converter(str(checkout(tmp_path / "llama.cpp", "sleep")), "a test")
    with pytest.raises(FtcliError, match="did not end within"):
        convert.convert(command, tmp_path / "model", tmp_path / "made.gguf", "--outtype", "f32")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["llama.cpp", "model"]


@pytest.mark.parametrize("error", [0.0, 0.5])
def test_logits_of_llama_cpp_decide(
    made: Trained, error: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows in another order, or other metadata, are seen by nothing else."""
    from ftcli.export.gguf import converted

    told: list[torch.Tensor] = []
    computed, asked = converted._trained, CleanProcess.ask

    def remembered(*arguments: Any) -> Any:
        found = computed(*arguments)
        told.append(found.logits)
        return found

    def answering(self: CleanProcess, request: ReloadRequest, sent: Any) -> ReloadAnswer:
        if request.kind != "llama":
            return asked(self, request, sent)
        texts = [list(tokenizer()(text, add_special_tokens=False)["input_ids"]) for text in TEXTS]
        found = told[0] + error * told[0].flip(-1)
        return ReloadAnswer(
            tokenizer={"rendered": texts}, stops={LIBRARY: (1, 4)}, libraries="llama_cpp 0", tensors={LOGITS: found}
        )

    monkeypatch.setattr(converted, "_trained", remembered)
    monkeypatch.setattr(CleanProcess, "ask", answering)
    monkeypatch.setattr("ftcli.export.writing.has_llama_cpp", lambda: True)
    if error:
        with pytest.raises(FtcliError, match=r"in llama\.cpp logits differ"):
            export(made, checkout(tmp_path / "llama.cpp"))
        return
    result = export(made, checkout(tmp_path / "llama.cpp"))
    assert result.verification.facts["f32_llama_cpp_error"] < 1e-6
    assert "logits in llama.cpp" in result.verification.compared


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    stored = asset("models", "tiny-qwen3-vl")
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(stored), dtype=torch.float32)
    made = adapt(tmp_path_factory.mktemp("vision"), model)
    shutil.copyfile(stored / "preprocessor_config.json", made.base / "preprocessor_config.json")
    for folder in (made.base, made.run.adapter_dir):
        AutoTokenizer.from_pretrained(stored).save_pretrained(folder)
    return made


def test_a_projector_lies_beside_a_model_that_sees(seeing: Trained, tmp_path: Path) -> None:
    result = export(seeing, checkout(tmp_path / "llama.cpp"))
    assert {"mmproj-run-F32.gguf", "run-F32.gguf"} <= {path.name for path in result.path.iterdir()}
    assert result.verification.facts["projector_tensors"] == 39
    # without which llama.cpp takes the projector for another model's
    assert ReadFile(result.path / "run-F32.gguf").values["qwen3vl.n_deepstack_layers"] > 0
    with pytest.raises(FtcliError, match=r"mmproj-run-F32\.gguf: .*mlp\.linear_fc1\.weight is not in the file"):
        export(seeing, checkout(tmp_path / "llama.cpp", "a changed number"))


def test_what_llama_cpp_sees_is_held_to_training(
    seeing: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ids that it read are computed here, with the image's own tokens in their place."""
    computed, vocabulary = llama_images._trained, 512
    said = torch.randn(1, vocabulary, generator=torch.Generator().manual_seed(0))
    given: list[dict[str, torch.Tensor]] = []

    def known(source: Any, wanted: Any, row: Any) -> torch.Tensor:
        given.append(row)
        assert torch.isfinite(computed(source, wanted, row)).all()
        return said

    def answer(fault: str) -> tuple[dict[str, Any], list[str]]:
        def reload(request: ReloadRequest, sent: Any) -> ReloadAnswer:
            height, width = sent[PICTURE].shape[:2]
            count = (height // 16) * (width // 16) - (fault == "tokens")
            found = said.flip(-1) if fault == "logits" else said
            return ReloadAnswer(tensors={READ: torch.tensor([9, 10, *[-1] * count, 11]), LOGITS: found})

        return llama_images.compare_seen(source, replace(wanted, reload=reload), tmp_path, tmp_path, 0.02)

    monkeypatch.setattr(llama_images, "_trained", known)
    source = replace(resolve_source(seeing.run), offline=True, verify=False)
    wanted = prepare_gguf(source, lambda _: None)
    told, problems = answer("")
    assert (told["llama_cpp_image_error"], problems) == (0.0, [])
    (row,) = given[0]["input_ids"].tolist()
    assert (row[:2], row[-1]) == ([9, 10], 11)
    assert set(row[2:-1]) == {wanted.config.image_token_id}
    assert "with an image, in llama.cpp logits differ" in answer("logits")[1][0]
    assert "tokens in llama.cpp" in answer("tokens")[1][0]


def test_without_a_projector_the_language_model_is_written(
    seeing: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    for converter, said in ((None, "is not on the PATH"), (checkout(tmp_path / "x", "refusal"), "ended with status 1")):
        heard = Heard()
        result = export(seeing, converter, heard=heard)
        assert "run-F32.gguf" in {path.name for path in result.path.iterdir()}
        assert any(f.code == "FT757" and "no images" in f.message and said in f.message for f in heard.findings)
