"""Training forms of chat templates, from the collections in ``ftcli.tables.training_forms``."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Protocol

from ftcli.tables import code_of, training_forms

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class FormOf(Protocol):
    """The code of one collection."""

    def __call__(self, tokenizer: PreTrainedTokenizerBase, template: str) -> str | None: ...


def training_form(tokenizer: PreTrainedTokenizerBase, template: str) -> str | None:
    """The training form of ``template``, from the first collection that knows it; None when none does."""
    for row in training_forms.rows():
        code: FormOf = code_of(row.code)
        found = code(tokenizer, template)
        if found is not None:
            return found
    return None


def of_trl(tokenizer: PreTrainedTokenizerBase, template: str) -> str | None:
    """The form that the installed TRL has for this very template."""
    from trl.chat_template_utils import get_training_chat_template

    stand_in = copy.copy(tokenizer)
    stand_in.chat_template = template
    try:
        form: str | None = get_training_chat_template(stand_in)
    except ValueError:  # a template that TRL does not know
        return None
    return form
