"""`ftcli serve-check` against stand-ins of four servers, each fault told by its name, and a real llama-server."""

from __future__ import annotations

import copy
import json
import shutil
import socket
import subprocess
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from ftcli.assets import asset
from ftcli.cli.app import main
from tests.e2e.conftest import RECIPE, User, merged
from tests.e2e.stand_in import FORMS, StandIn, serving
from tests.tiers import in_turn

#: What each stand-in's fault is called; Ollama's takes no token ids.
FAULTS = ("template", "missing_bos", "doubled_bos", "stop", "early_stop", "adapter", "numerics")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that answers otherwise than its base and ends its answers, and its recipe."""
    folder = tmp_path_factory.mktemp("served")
    change = {
        "run": {"output_dir": str(folder / "run")},
        "lora": {"r": 8},
        "data": {"train": [{"path": "bundled:smoke-train", "max_rows": 320}]},
        "train": {"max_steps": 24, "per_device_train_batch_size": 8, "learning_rate": 5e-3},
        "eval": {"samples": 0, "generate": {"max_new_tokens": 12}},
        "export": {"formats": ["gguf"], "gguf": {"types": ["f32"]}},
    }
    path = folder / "r.yaml"
    path.write_text(yaml.safe_dump(merged(RECIPE, change)))
    assert main(["train", str(path), "--offline", "--quiet"]) == 0
    return folder


@pytest.fixture(scope="module")
def loaded(folder: Path) -> tuple[Any, Any]:
    """What a server would load: the base with the run's adapter, and the tokenizer that was saved with it."""
    base = AutoModelForCausalLM.from_pretrained(asset("models", "tiny-gemma2"), dtype=torch.float32)
    model = PeftModel.from_pretrained(base, str(folder / "run" / "adapter")).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder / "run" / "adapter")
    if model.generation_config.eos_token_id != [4, 1]:
        model.generation_config.eos_token_id = [4, 1]  # <end_of_turn>, <eos>
    return model, tokenizer


@pytest.fixture(scope="module")
def rounded(loaded: tuple[Any, Any]) -> Any:
    """The same model with its weights in a few levels."""
    model = copy.deepcopy(loaded[0])
    for name, weight in model.named_parameters():
        if weight.dim() == 2 and "lora" not in name:
            scale = weight.data.abs().amax(1, keepdim=True) / 4
            weight.data = (weight.data / scale).round() * scale
    return model


def checked(user: User, folder: Path, url: str, *words: str) -> tuple[int, dict[str, Any]]:
    return user.run("serve-check", str(folder / "run"), "--url", url, "--prompts", "4", *words)


@pytest.mark.parametrize("form", FORMS)
def test_what_is_served_as_it_was_trained(form: str, folder: Path, loaded: tuple[Any, Any], user: User) -> None:
    with serving(StandIn(*loaded, form=form)) as url:
        status, document = checked(user, folder, url)
    result = document["result"]
    assert (status, result["faults"], result["different"]) == (0, [], [])
    assert result["chat"]["same"] == result["chat"]["asked"] == result["prompts"] == 4
    assert set(result["prompt_tokens"]) == {0}
    if form == "ollama":
        assert result["tokens"] is None
        assert [each.partition(":")[0] for each in result["not_made"]] == [
            "completions of token ids",
            "log-probabilities",
        ]
    else:
        assert result["tokens"]["same"] == 4
        assert result["chat"]["log_prob_difference"] < 1e-4
        assert result["tokens"]["log_prob_difference"] < 1e-4
        assert result["not_made"] == []


@pytest.mark.parametrize(("fault", "form"), in_turn(FAULTS, FORMS))
def test_each_planted_fault_is_told_by_its_name(
    fault: str, form: str, folder: Path, loaded: tuple[Any, Any], rounded: Any, user: User
) -> None:
    model, tokenizer = loaded
    with serving(StandIn(rounded if fault == "numerics" else model, tokenizer, form=form, fault=fault)) as url:
        status, document = checked(user, folder, f"{url}/v1")
    result = document["result"]
    assert (status, [each["name"] for each in result["faults"]]) == (1, [fault]), result
    (told,) = [each for each in document["findings"] if each["severity"] == "error"]
    assert told["code"] == "FT793"
    assert told["help"]


def test_two_faults_at_once(folder: Path, loaded: tuple[Any, Any], user: User) -> None:
    model, tokenizer = loaded
    with serving(StandIn(model.get_base_model(), tokenizer, fault="doubled_bos")) as url, model.disable_adapter():
        status, document = checked(user, folder, url)
    assert (status, [each["name"] for each in document["result"]["faults"]]) == (1, ["doubled_bos", "adapter"])


def test_settings_of_chats_alone(folder: Path, loaded: tuple[Any, Any], user: User) -> None:
    with serving(StandIn(*loaded, fault="chat")) as url:
        status, document = checked(user, folder, url)
    assert (status, [each["name"] for each in document["result"]["faults"]]) == (1, ["chat"])
    assert document["result"]["tokens"]["same"] == 4
    assert document["result"]["different"][0]["asked"] == "chat"


def test_another_model(folder: Path, loaded: tuple[Any, Any], user: User) -> None:
    other = copy.deepcopy(loaded[0])
    for weight in other.parameters():
        weight.data = torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)) * 0.05
    with serving(StandIn(other, loaded[1])) as url:
        status, document = checked(user, folder, url)
    assert (status, [each["name"] for each in document["result"]["faults"]]) == (1, ["weights"])


def test_what_people_read(folder: Path, loaded: tuple[Any, Any], capsys: pytest.CaptureFixture[str]) -> None:
    words = ["serve-check", str(folder / "run"), "--offline", "--prompts", "2", "--url"]
    with serving(StandIn(*loaded)) as url:
        assert main([*words, url]) == 0
        assert f"{url}/v1 serves the model as it was trained (mine, 2 prompts)" in capsys.readouterr().out
    with serving(StandIn(*loaded, fault="template")) as url:
        assert main([*words, url]) == 1
    shown = capsys.readouterr()
    assert "error[FT793]: template: the server writes conversations otherwise than in training: after" in shown.err
    assert "help: give it the chat_template.jinja" in shown.err
    assert "answers otherwise (mine, 2 prompts)" in shown.out


def test_an_answer_that_is_nested_too_deeply_is_none(folder: Path, user: User) -> None:
    class Deep(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"[" * 100_000)

        def log_message(self, *_: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Deep) as server:
        threading.Thread(target=server.handle_request).start()
        status, document = checked(user, folder, f"http://127.0.0.1:{server.server_port}")
    assert (status, [each["code"] for each in document["findings"]]) == (2, ["FT790"])


REFUSED: dict[str, tuple[str, list[str], str]] = {
    "nobody listens": ("http://127.0.0.1:9", [], "FT790"),
    "no scheme": ("localhost:8000", [], "FT790"),
    "a key in the address": ("http://me:secret@localhost:8000", [], "FT790"),
    "no such model": ("", ["--model", "yours"], "FT791"),
    "no key": ("key", [], "FT791"),
    "the variable is not set": ("key", ["--api-key-env", "FTCLI_NO_SUCH_KEY"], "FT791"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_servers_that_cannot_be_asked(
    kind: str, folder: Path, loaded: tuple[Any, Any], user: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, words, code = REFUSED[kind]
    with serving(StandIn(*loaded, models=("mine", "base"), key="k-123" if url == "key" else None)) as own:
        chosen = url if ":" in url else own
        status, document = checked(user, folder, chosen, *words)
        assert (status, [each["code"] for each in document["findings"]]) == (2, [code])
        (told,) = document["findings"]
        assert told["help"]
        if kind == "no such model":
            assert "it has mine, base" in told["message"]
            status, document = checked(user, folder, chosen)
            assert (status, document["findings"][0]["help"]) == (2, "name one with --model: mine, base")
        if kind == "no key":
            monkeypatch.setenv("SERVERS_KEY", "k-123")
            words = ["--api-key-env", "SERVERS_KEY", "--model", "mine", "--prompts", "1"]
            status, document = checked(user, folder, chosen, *words)
            assert status == 0
            assert "k-123" not in json.dumps(document)


def test_rows_that_no_server_is_asked(folder: Path, loaded: tuple[Any, Any], user: User, tmp_path: Path) -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    row = {"prompt": [{"role": "user", "content": "f"}], "tools": [tool]}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    template = tmp_path / "t.jinja"
    template.write_text("{{ tools }}{% for m in messages %}{{ m['content'] }}{% endfor %}")
    data = ["--set", f"data.eval=[{tmp_path / 'rows.jsonl'}]", "--set", f"data.chat_template={template}"]
    with serving(StandIn(*loaded)) as url:
        status, document = checked(user, folder, url, *data)
    assert (status, document["findings"][-1]["code"]) == (4, "FT792")


@pytest.fixture(scope="module")
def gguf(folder: Path) -> Path:
    """The run as llama-server loads it."""
    assert main(["export", str(folder / "run"), "--format", "gguf", "--offline", "--quiet"]) == 0
    return next((folder / "run" / "export" / "gguf").glob("*F32.gguf"))


@contextmanager
def llama_server(*words: str) -> Iterator[str]:
    """The address of a real one, for a block."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = ["llama-server", "--port", str(port), "-c", "512", "-t", "1", *words]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            for _ in range(600):
                with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health"):
                    break
                assert process.poll() is None, "llama-server has ended"
                time.sleep(0.1)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()


LLAMA_SERVER: dict[str, tuple[list[str], list[str]]] = {
    "as trained": (["--jinja"], []),
    "another template": (["--chat-template", "chatml"], ["template"]),
    "no first token": (["--chat-template-file", ""], ["missing_bos"]),
    "two first tokens": (["--chat-template-file", "{{- bos_token -}}{{- bos_token -}}"], ["doubled_bos"]),
}


@pytest.mark.skipif(shutil.which("llama-server") is None, reason="needs llama.cpp's llama-server on the PATH")
@pytest.mark.parametrize("kind", LLAMA_SERVER)
def test_a_real_llama_server(kind: str, folder: Path, gguf: Path, user: User, tmp_path: Path) -> None:
    words, faults = LLAMA_SERVER[kind]
    if words[0] == "--chat-template-file":  # the run's own with another beginning, which the server does not mend
        own = (folder / "run" / "adapter" / "chat_template.jinja").read_text()
        assert own.count("{{- bos_token -}}") == 1
        (tmp_path / "t.jinja").write_text(own.replace("{{- bos_token -}}", words[1]))
        words = ["--jinja", words[0], str(tmp_path / "t.jinja")]
        words += ["--override-kv", "tokenizer.ggml.add_bos_token=bool:false"]
    with llama_server("-m", str(gguf), *words) as url:
        status, document = checked(user, folder, url)
    result = document["result"]
    assert (status, [each["name"] for each in result["faults"]]) == (int(bool(faults)), faults)
    assert result["tokens"]["same"] == 4
    assert result["tokens"]["log_prob_difference"] < 1e-3
