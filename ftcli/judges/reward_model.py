"""The built-in judge ``reward_model``: a sequence classifier with one number, as `ftcli export` writes one.

transformers loads and computes it, as whoever else serves it would. It is loaded when it is first asked.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ftcli.errors import ExitCode, FtcliError, first_line
from ftcli.judges.verdicts import CompletionBatch, FailedJudgement, Verdict
from ftcli.paths import expanded, is_file

#: Answers that are scored together: about so many tokens, padding included.
_TOKENS = 16_384


def reward_model(model: str) -> Callable[[CompletionBatch], list[Verdict]]:
    """A judge that gives a completion the score of ``model``, a folder in transformers' layout.

    A prompt of messages is rendered with the answer by the model's own chat template. Text is scored as it stands, with
    the end-of-sequence token after it.

    Raises FtcliError FT469 (exit 2) for a folder that holds no such model.
    """
    folder = classifier_folder(model)
    loaded: list[_Classifier] = []

    def verdicts(batch: CompletionBatch) -> list[Verdict]:
        if not loaded:
            loaded.append(_Classifier(folder, model))
        return loaded[0].verdicts(batch)

    return verdicts


def classifier_folder(name: str) -> Path:
    """The folder of a sequence classifier with one number. Raises FtcliError FT469 (exit 2) where there is none."""
    folder = expanded(name)
    if is_file(folder / "adapter_config.json"):
        raise _unusable(name, "it holds an adapter alone", "`ftcli export --format safetensors` merges it")
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        architectures = [str(one) for one in config["architectures"]]
        labels = len(config.get("id2label") or {"0": "", "1": ""})
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _unusable(name, f"its config.json cannot be read ({first_line(error)})") from error
    if not any(one.endswith("ForSequenceClassification") for one in architectures) or labels != 1:
        raise _unusable(name, f"it is a {architectures[0] if architectures else 'model'} of {labels} labels")
    return folder


def classifier_files(name: str) -> Iterator[Path]:
    """The files that scores depend on; none of a folder that cannot be used."""
    folder = expanded(name)
    for path in sorted(folder.glob("*")):
        if path.suffix in (".safetensors", ".jinja") or path.name in ("config.json", "tokenizer.json"):
            yield path


class _Classifier:
    """The loaded model, on the current GPU if there is one."""

    def __init__(self, folder: Path, name: str) -> None:
        import torch
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        self._name = name
        self._device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else "cpu"
        options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
        dtype = torch.bfloat16 if torch.cuda.is_available() else torch.float32
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(str(folder), **options)
            model, told = AutoModelForSequenceClassification.from_pretrained(
                str(folder), dtype=dtype, use_safetensors=True, output_loading_info=True, **options
            )
        except (OSError, ValueError, KeyError, RuntimeError, ImportError) as error:
            raise _unusable(name, first_line(error)) from error
        if told["missing_keys"]:
            raise _unusable(name, f"{sorted(told['missing_keys'])[0]} is not stored")
        if model.config.pad_token_id is None:
            raise _unusable(name, "its config.json names no pad_token_id, so rows of different length have no end")
        self._model = model.to(self._device).eval()

    def verdicts(self, batch: CompletionBatch) -> list[Verdict]:
        rows = [self._ids(batch, at) for at in range(len(batch.completions))]
        found: list[Verdict] = [None] * len(rows)
        for places in _in_batches([len(row) for row in rows]):
            for at, score in zip(places, self._scores([rows[at] for at in places]), strict=True):
                found[at] = score if math.isfinite(score) else FailedJudgement(f"gave {score}")
        return found

    def _ids(self, batch: CompletionBatch, at: int) -> list[int]:
        asked, answer = batch.asked[at] if batch.asked else None, batch.completions[at]
        if asked is not None and asked.messages is not None:
            if self._tokenizer.chat_template is None:
                raise _unusable(
                    self._name,
                    "the prompts are messages, and it has no chat template",
                    "add chat_template.jinja to its folder, or write prompts as text",
                )
            turns = [*asked.messages, {"role": "assistant", "content": answer}]
            tools = list(asked.tools) if asked.tools else None
            text = self._tokenizer.apply_chat_template(turns, tools=tools, tokenize=False, **asked.switches)
            return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])
        ids = list(self._tokenizer(batch.prompts[at] + answer)["input_ids"])
        end = self._tokenizer.eos_token_id
        return ids if end is None or (ids and ids[-1] == end) else [*ids, int(end)]

    def _scores(self, rows: Sequence[list[int]]) -> list[float]:
        import torch
        from torch.nn.utils.rnn import pad_sequence

        tensors = [torch.tensor(row) for row in rows]
        ids = pad_sequence(tensors, True, int(self._model.config.pad_token_id))
        mask = pad_sequence([torch.ones_like(row) for row in tensors], True)
        with torch.no_grad():
            found = self._model(input_ids=ids.to(self._device), attention_mask=mask.to(self._device)).logits
        return [float(score) for score in found.float().squeeze(-1)]


def _in_batches(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Places of rows that are scored together, rows of like length."""
    order = sorted(range(len(lengths)), key=lambda at: -lengths[at])
    while order:
        size = max(1, _TOKENS // max(1, lengths[order[0]]))
        yield order[:size]
        order = order[size:]


def _unusable(
    name: str, reason: str, help: str = "name a folder that `ftcli export` wrote of a reward model"
) -> FtcliError:
    message = f"{name} cannot be used as a reward model: {reason}"
    return FtcliError.single("FT469", message, exit_code=ExitCode.RECIPE, help=help)
