"""Ollama: the Modelfile's template renders what training rendered, or is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ftcli.assets import asset
from ftcli.errors import FtcliError
from ftcli.export.ollama import write as ollama_format
from ftcli.export.ollama.golang import render
from ftcli.export.ollama.template import go_template, rendered, template_parts
from ftcli.export.ollama.write import require_same
from ftcli.export.writing import export_run
from ftcli.gguf.file import ReadFile
from tests.unit.export.conftest import Heard, Trained, tokenizer

pytest.importorskip("gguf")

SYSTEM = (("system", "Be brief."), ("user", "Hello"), ("assistant", "Yes"), ("user", 'A "quote" {{ .System }}\n'))


def with_template(text: str) -> Any:
    made = tokenizer()
    made.chat_template = text
    return made


def bundled(name: str) -> str:
    return (Path(asset("templates", "chatml.jinja")).parent / f"{name}.jinja").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["gemma", "gemma-system", "chatml", "llama3"])
def test_bundled_templates_render_alike(name: str) -> None:
    made = with_template(bundled(name))
    parts = template_parts(made)
    template = go_template(parts)
    require_same(template, made, with_bos=parts.bos)
    for turns in (SYSTEM, SYSTEM[1:], SYSTEM[1:2]):
        wanted = rendered(made, turns)
        if wanted is not None:
            assert f"{made.bos_token if parts.bos else ''}{render(template, turns)}" == wanted
    assert parts.takes_system == (name != "gemma")
    assert parts.bos == (name != "chatml")


DEFAULT = (
    "{% if messages[0]['role'] != 'system' %}<sys>Be kind.</sys>\n{% endif %}"
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}</{{ m['role'] }}>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def test_a_system_turn_that_stands_where_nobody_gave_one() -> None:
    made = with_template(DEFAULT)
    parts = template_parts(made)
    assert parts.opening == "<sys>Be kind.</sys>\n"
    require_same(go_template(parts), made, with_bos=False)
    assert render(go_template(parts), SYSTEM[:2]) == "<system>Be brief.</system>\n<user>Hello</user>\n<assistant>"


REFUSED = {
    "renders the day": "{{ strftime_now('%d') }}{% for m in messages %}{{ m['content'] }}{% endfor %}",
    "does not write each content once": "{% for m in messages %}{{ m['content'] }}{{ m['content'] }}{% endfor %}",
    "depends on later ones": "{{ messages | length }}{% for m in messages %}[{{ m['content'] }}]{% endfor %}",
    "first user turn": "{% for m in messages %}[{{ m['content'] }}{{ '?' if loop.first }}]{% endfor %}",
    "written as one": "{% for m in messages %}[{{ m['content'] }}{{ 'x' if loop.index == 5 }}]{% endfor %}",
    "refuses a plain conversation": "{{ raise_exception('no') }}",
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_cannot_be_said_is_refused(reason: str) -> None:
    made = with_template(REFUSED[reason])

    def convert() -> None:
        parts = template_parts(made)
        require_same(go_template(parts), made, with_bos=parts.bos)

    with pytest.raises(FtcliError, match=reason) as caught:
        convert()
    assert caught.value.findings[0].code == "FT759"


@pytest.mark.parametrize(
    "text", ["plain", '{{ "a" }} {{ end }}', "{{ if $.System }}", "{{ .Unknown }}", "{{ if x }}{{ end }}"]
)
def test_the_renderer_knows_nothing_else(text: str) -> None:
    with pytest.raises(ValueError, match=r"outside|without|not ended|unknown"):
        render(text, SYSTEM)


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
