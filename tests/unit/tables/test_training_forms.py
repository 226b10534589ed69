"""A collection of training forms is a row and a function: a made-up one is asked, and its form is trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ftcli.labels import IGNORE_INDEX
from ftcli.tables import code_of, training_forms
from tests.e2e.conftest import User
from tests.unit.data.official import Official

CHAT = [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(("q", "a", "r", "b"))]
FORM = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def form_of(tokenizer: Any, template: str) -> str | None:
    """The made-up collection: it knows Qwen3's template, and has a form without any reasoning for it."""
    return FORM if "<think>" in template and "reasoning_content" in template else None


def test_a_made_up_collection_is_asked_first_and_by_the_templates_text(monkeypatch: pytest.MonkeyPatch) -> None:
    made_up = {"made-up": training_forms.TrainingForms(f"{__name__}:form_of"), **training_forms.TABLE}
    monkeypatch.setattr(training_forms, "TABLE", made_up)
    qwen3 = Official("qwen3")
    assert qwen3.trained(qwen3.read({"messages": CHAT}, history="template")) == [["a<|im_end|>", "b<|im_end|>"]]
    other = Official("gemma")  # one that it does not know, and that needs none
    assert other.trained(other.read({"messages": CHAT}, history="template")) == [["a<end_of_turn>", "b<end_of_turn>"]]


#: It writes an answer otherwise once others follow.
REWRITING = (
    "{% for m in messages %}<|{{ m.role }}|>{{ '(last)' if m.role == 'assistant' and loop.last }}{{ m.content }}"
    "<end_of_turn>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def plain_form_of(tokenizer: Any, template: str) -> str | None:
    """The made-up collection of one template."""
    return REWRITING.replace("'(last)'", "''") if template == REWRITING else None


def test_the_program_trains_the_form_of_a_made_up_collection(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    user = User(tmp_path, capsys)
    (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": CHAT}) + "\n")
    (tmp_path / "t.jinja").write_text(REWRITING)
    data = {"train": [f"{tmp_path}/rows.jsonl"], "eval": [], "chat_template": f"{tmp_path}/t.jinja"}
    trained = {}
    for name, history in (("split", "split"), ("unknown", "template")):
        user.done("train", user.recipe(name, data={**data, "history": history}, train={"max_steps": 1}))
        (trained[name],) = json.loads((tmp_path / name / "tokens.json").read_text())["datasets"]
    made_up = {"made-up": training_forms.TrainingForms(f"{__name__}:plain_form_of")}
    monkeypatch.setattr(training_forms, "TABLE", made_up)
    user.done("train", user.recipe("form", data={**data, "history": "template"}, train={"max_steps": 1}))
    (trained["form"],) = json.loads((tmp_path / "form" / "tokens.json").read_text())["datasets"]
    assert trained["split"]["counts"] == trained["unknown"]["counts"] == {"chats": 1, "turns_split": 1}
    assert trained["form"]["counts"] == {"chats": 1}
    assert (trained["split"]["rows_kept"], trained["form"]["rows_kept"]) == (2, 1)
    assert trained["form"]["tokens_trained"] == trained["split"]["tokens_trained"] - 2 * len("(last)")


def test_a_template_that_nobody_knows_is_split(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training_forms, "TABLE", {})
    qwen3 = Official("qwen3")
    read = qwen3.read({"messages": CHAT}, history="template")
    assert [sum(label != IGNORE_INDEX for label in tokens.labels) > 0 for tokens in read.tokens] == [True, True]
    assert read.counts["turns_split"] == 1


def test_every_code_reference_resolves() -> None:
    for row in training_forms.TABLE.values():
        assert callable(code_of(row.code))
