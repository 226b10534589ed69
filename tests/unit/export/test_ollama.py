"""Ollama: the Modelfile's template renders what training rendered, or is refused."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ftcli.assets import asset
from ftcli.errors import FtcliError
from ftcli.export import ollama as ollama_format
from ftcli.export.ollama import FORMS, differences, expected, form_of, go_template, rendered
from ftcli.export.writing import export_run
from ftcli.gguf import ReadFile
from tests.unit.data.official import Official
from tests.unit.export.conftest import Heard, Trained, tokenizer

pytest.importorskip("gguf")

SYSTEM = (("system", "Be brief."), ("user", "Hello"), ("assistant", "Yes"), ("user", 'A "quote" {{ .System }}\n'))
BUNDLED = ("gemma", "gemma-system", "chatml", "llama3", "mistral")
OFFICIAL = ("gemma", "gemma3", "llama3", "phi3", "phi3_5", "qwen2_5", "qwen3", "qwen3_instruct_2507")


def with_template(text: str) -> Any:
    made = tokenizer()
    made.chat_template = text
    return made


def tokenizer_of(name: str) -> Any:
    """With a bundled template, or (after ``official``) with one as its model has it."""
    kind, _, name = name.rpartition(" ")
    if kind:
        return Official(name).tokenizer
    return with_template((Path(asset("templates", "chatml.jinja")).parent / f"{name}.jinja").read_text("utf-8"))


NAMES = (*BUNDLED, *(f"official {name}" for name in OFFICIAL))


@pytest.mark.parametrize("name", NAMES)
def test_known_templates_render_alike(name: str) -> None:
    made = tokenizer_of(name)
    form = form_of(made)
    begin = made.bos_token if form.bos else ""
    said = [each.message for each in differences(form, made)]
    strips = name in ("official gemma", "official gemma3", "official llama3")
    assert any("strips" in message for message in said) == strips
    refuses = name in ("gemma", "mistral", "official gemma")
    assert any("refuses" in message for message in said) == refuses
    for turns in (SYSTEM, SYSTEM[1:], SYSTEM[1:2], ((*SYSTEM[0][:1], "Brief"), ("user", "A")), (("user", " a\n "),)):
        wanted = rendered(made, turns)
        if wanted is not None and not (strips and any(text != text.strip() for _, text in turns)):
            assert f"{begin}{expected(form, turns)}" == wanted


def test_a_template_that_drops_reasoning_tells_ollama_its_markers() -> None:
    made = tokenizer_of("official qwen3")
    form = form_of(made)
    assert form.no_thoughts == "<think>\n\n</think>\n\n"
    assert "<think>{{ .Thinking }}</think>" in go_template(form)
    turns = SYSTEM[1:]
    assert expected(form, turns, think=False) == rendered(made, turns, enable_thinking=False)
    assert ".Thinking" not in go_template(form_of(tokenizer_of("official qwen2_5")))


def test_a_system_turn_that_stands_where_nobody_gave_one() -> None:
    form = form_of(tokenizer_of("official qwen2_5"))
    assert form.opening.startswith("<|im_start|>system\nYou are Qwen")
    assert expected(form, SYSTEM[:2]).startswith("<|im_start|>system\nBe brief.<|im_end|>\n")


CHATML = "<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
LOOP = "{% for m in messages %}" + CHATML + "{% endfor %}<|im_start|>assistant\n"
REFUSED = {
    "renders the day": "{{ strftime_now('%d') }}" + LOOP,
    "none of the forms": "{% for m in messages %}[{{ m['content'] }}]{% endfor %}",
    "none of the forms that": LOOP.replace("{% endfor %}", "{{ 'x' if loop.index == 5 }}{% endfor %}"),
    "none of the forms that ftcli": "{{ messages | length }}" + LOOP,
    "refuses a plain conversation": "{{ raise_exception('no') }}",
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_is_not_known_is_refused(reason: str) -> None:
    with pytest.raises(FtcliError, match=reason) as caught:
        form_of(with_template(REFUSED[reason]))
    assert caught.value.findings[0].code == "FT759"


PROGRAM = """package main

import ("encoding/json"; "os"; "text/template")

type Message struct { Role, Content, Thinking string }

func main() {
	var cases []struct { Template string; Values map[string]any; Messages []*Message }
	if err := json.NewDecoder(os.Stdin).Decode(&cases); err != nil { panic(err) }
	for _, c := range cases {
		c.Values["Messages"] = c.Messages
		t := template.Must(template.New("").Option("missingkey=zero").Parse(c.Template))
		if err := t.Execute(os.Stdout, c.Values); err != nil { panic(err) }
		os.Stdout.Write([]byte{0})
	}
}
"""


@pytest.mark.skipif(shutil.which("go") is None, reason="no Go here")
def test_go_renders_what_is_expected_of_it(tmp_path: Path) -> None:
    forms = [*FORMS, *(form_of(tokenizer_of(name)) for name in NAMES)]
    talks = [SYSTEM, SYSTEM[1:], (("user", " a\n "), ("assistant", "<b> 'c' & d"), ("user", "}}"))]
    asked = [(form, turns, think) for form in forms for turns in talks for think in (None, True, False)]
    cases = [
        {
            "template": go_template(form),
            "messages": [{"role": role, "content": content} for role, content in turns],
            "values": {
                "System": "".join(content for role, content in turns if role == "system"),
                "IsThinkSet": think is not None,
                "Think": bool(think),
            },
        }
        for form, turns, think in asked
    ]
    (tmp_path / "main.go").write_text(PROGRAM)
    done = subprocess.run(
        ["go", "run", "main.go"], cwd=tmp_path, input=json.dumps(cases), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    wanted = [expected(form, turns, think=think) for form, turns, think in asked]
    assert done.stdout.split("\0")[:-1] == wanted


def test_a_refusal_is_known_before_other_formats_are_written(trained: Callable[..., Trained]) -> None:
    made = trained()
    (made.run.adapter_dir / "chat_template.jinja").write_text(REFUSED["none of the forms"])
    with pytest.raises(FtcliError) as caught:
        export_run(made.run, ["safetensors", "ollama"], reporter=Heard(), offline=True)
    assert caught.value.findings[0].code == "FT759"
    assert not made.run.export_dir.exists()


def test_an_export_has_file_template_and_stops(trained: Callable[..., Trained]) -> None:
    (result,) = export_run(trained().run, ["ollama"], reporter=Heard(), offline=True)
    text = (result.path / "Modelfile").read_text(encoding="utf-8")
    assert text.startswith("FROM ./run-Q8_0.gguf\n")
    assert 'PARAMETER stop "<end_of_turn>"\n' in text
    assert ReadFile(result.path / "run-Q8_0.gguf").values["tokenizer.ggml.add_bos_token"] is True


def lose_a_stop(text: str) -> str:
    return "\n".join(line for line in text.splitlines() if not line.startswith("PARAMETER"))


def another_turn(text: str) -> str:
    return text.replace("<start_of_turn>model", "<start_of_turn>assistant")


@pytest.mark.parametrize("damage", [lose_a_stop, another_turn, lambda _: "FROM ./other.gguf\n"])
def test_a_wrong_modelfile_is_caught_and_removed(
    damage: Callable[[str], str], trained: Callable[..., Trained], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, write = trained(), ollama_format.write_modelfile

    def damaged(path: Path, *rest: Any) -> None:
        write(path, *rest)
        path.write_text(damage(path.read_text(encoding="utf-8")), encoding="utf-8")

    monkeypatch.setattr(ollama_format, "write_modelfile", damaged)
    with pytest.raises(FtcliError, match="Modelfile") as caught:
        export_run(made.run, ["ollama"], reporter=Heard(), offline=True)
    assert {finding.code for finding in caught.value.findings} == {"FT741"}
    assert not list(made.run.export_dir.iterdir())
