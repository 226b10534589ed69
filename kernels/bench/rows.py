"""Writes rows and prompts of exact lengths under the byte-level tokenizer, for runs that are measured."""

from __future__ import annotations

import json
import random
import string
from pathlib import Path

import common  # noqa: F401  (puts the checkout on the path)

from ftcli.config.load import LoadedRecipe, Override, load_recipe
from ftcli.data.template import Renderer
from ftcli.model.tokenizer import load_tokenizer
from ftcli.rows.prompts import prompts_of
from ftcli.rows.row import Row

#: Random weights and bytes need no download.
UNTRAINED = ("model.init=random", "model.tokenizer=bytes", "checkpoint.every_steps=null", "logging.tensorboard=false")


def loaded(recipe: Path, *settings: str) -> LoadedRecipe:
    """The recipe with ``settings`` as --set takes them, on random weights and bytes."""
    return load_recipe(recipe, [Override(text, f"--set {text}") for text in (*UNTRAINED, *settings)])


def letters(count: int, seed: int) -> str:
    """Random text: of one letter alone gradients would vanish, and the self-check would compare rounding errors."""
    return "".join(random.Random(seed).choices(string.ascii_lowercase, k=count))


def write_texts(of: LoadedRecipe, path: Path, batches: int) -> Path:
    """Plain text for ``batches`` batches: rows as long as the recipe allows, but for their first and last token."""
    rows = max(of.recipe.train.per_device_train_batch_size, of.recipe.eval.per_device_eval_batch_size)
    lines = [json.dumps({"text": letters(of.recipe.data.max_seq_len - 2, i)}) for i in range(rows * batches)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def write_prompts(of: LoadedRecipe, path: Path, count: int, *, equal: bool = False) -> Path:
    """``count`` prompts that take ``grpo.max_prompt_length`` tokens in the recipe's template.

    Unless they are to be ``equal``, every second one takes less, so that batches are padded as they are in any real
    run. Raises ValueError where the template alone is longer.
    """
    grpo = of.recipe.grpo
    assert grpo is not None
    tokenizer = load_tokenizer(of.recipe.model, offline=True)
    renderer = Renderer(tokenizer, of.recipe.data.chat_template)
    for length in range(grpo.max_prompt_length, 0, -1):
        fields = {"prompt": letters(length, 0), "answer": "7"}
        (prompt,) = prompts_of([Row(str(path), 1, fields)], of.recipe.data.format)
        if len(tokenizer(renderer.prompt(prompt), add_special_tokens=False)["input_ids"]) <= grpo.max_prompt_length:
            sizes = [length if equal or i % 2 else length - length // 4 for i in range(count)]
            lines = [json.dumps({**fields, "prompt": letters(size, i)}) for i, size in enumerate(sizes)]
            path.write_text("\n".join(lines) + "\n", encoding="utf-8")
            return path
    raise ValueError(f"the chat template alone takes more than {grpo.max_prompt_length} tokens")
