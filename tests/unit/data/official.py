"""Official chat templates, as TRL ships their texts, on the bundled byte tokenizer with their special tokens."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import trl
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from ftcli.assets import asset
from ftcli.config.data import DataConfig
from ftcli.data.encode import Encoder, TokenizedRows
from ftcli.labels import IGNORE_INDEX
from ftcli.rows.row import Row

FOLDER = Path(trl.__file__).parent / "chat_templates"
#: Stop tokens by the beginning of a template's name, as these models' generation_config.json names them.
_STOPS = {
    "qwen": ("<|im_end|>", "<|endoftext|>"),
    "phi": ("<|endoftext|>", "<|end|>", "<|assistant|>"),
    "gptoss": ("<|return|>", "<|call|>", "<|endoftext|>"),
    "deepseek": ("<｜end▁of▁sentence｜>",),
    "glm": ("<|endoftext|>", "<|user|>", "<|observation|>"),
    "llama3": ("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"),
    "cohere": ("<|END_OF_TURN_TOKEN|>",),
    "gemma4": ("<turn|>", "<|tool_response>"),
    "diffusion": ("<turn|>", "<|tool_response>"),
    "gemma": ("<end_of_turn>",),
    "lfm": ("<|im_end|>",),
    "nemotron": ("<|im_end|>",),
    "muse": ("<|eot|>",),
    "idefics": ("<end_of_utterance>",),
    "smolvlm": ("<end_of_utterance>",),
    "llava": ("</s>",),
}
_SPECIAL = re.compile(
    r"<[|｜][^<>{}' ]{1,40}[|｜]>|<\|[a-z_\"]+>|<[a-z_\"]+\|>|</?think>|</?tool_(?:call|response)>|\[gMASK\]|<sop>"
)
#: A tokenizer of these models has one token for two line breaks, and begins of text and answer that meet in it.
_BREAKS = "\n\n"

NAMES = sorted(path.stem for path in FOLDER.glob("*.jinja") if not path.stem.endswith("_training"))


@dataclass
class Official:
    """A template with its tokenizer and stop tokens."""

    name: str
    tokenizer: Any = field(init=False)
    stops: list[int] = field(init=False)

    def __post_init__(self) -> None:
        text = (FOLDER / f"{self.name}.jinja").read_text(encoding="utf-8")
        stops = next(tokens for start, tokens in _STOPS.items() if self.name.startswith(start))
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(str(asset("tokenizers", "bytes")))
        tokenizer.add_special_tokens({"additional_special_tokens": sorted({*_SPECIAL.findall(text), *stops})})
        tokenizer.add_tokens([_BREAKS])
        tokenizer.eos_token = stops[0]
        tokenizer.chat_template = text
        self.tokenizer = tokenizer
        self.stops = [int(tokenizer.convert_tokens_to_ids(stop)) for stop in stops]

    def read(self, fields: dict[str, Any], layout: str = "messages", **data: Any) -> TokenizedRows:
        """One row through the encoder."""
        config = DataConfig.model_validate({"train": ["x"], "max_seq_len": 10**6, **data})
        return Encoder(self.tokenizer, self.stops, config, layout).rows([Row("f", 1, fields)])

    def trained(self, read: TokenizedRows) -> list[list[str]]:
        """The trained texts of each row."""
        rows = []
        for tokens in read.tokens:
            texts: list[list[int]] = []
            for n, label in enumerate(tokens.labels):
                if label != IGNORE_INDEX:
                    if tokens.labels[n - 1] == IGNORE_INDEX:
                        texts.append([])
                    texts[-1].append(label)
            rows.append([self.tokenizer.decode(ids) for ids in texts])
        return rows

    def prompt(self, messages: list[dict[str, Any]], tools: list[Any] | None = None) -> list[int]:
        """What plain transformers gives generation for a history."""
        text = self.tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True)
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids
