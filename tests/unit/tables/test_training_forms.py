"""A collection of training forms is a row and a function: a made-up one is asked, and its form is trained."""

from __future__ import annotations

from typing import Any

import pytest

from ftcli.labels import IGNORE_INDEX
from ftcli.tables import code_of, training_forms
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


def test_a_template_that_nobody_knows_is_split(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training_forms, "TABLE", {})
    qwen3 = Official("qwen3")
    read = qwen3.read({"messages": CHAT}, history="template")
    assert [sum(label != IGNORE_INDEX for label in tokens.labels) > 0 for tokens in read.tokens] == [True, True]
    assert read.counts["turns_split"] == 1


def test_every_code_reference_resolves() -> None:
    for row in training_forms.TABLE.values():
        assert callable(code_of(row.code))
