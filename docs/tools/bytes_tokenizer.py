"""Builds the bundled byte-level tokenizer: one token a byte, so that any text round-trips and nothing is unknown.

`python docs/tools/bytes_tokenizer.py FOLDER` writes what lies in `ftcli/assets/tokenizers/bytes`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from ftcli.assets import asset

#: Ids 0 to 7, in Gemma's order; byte b has the id 8 + b. 264 tokens, a multiple of 8.
SPECIAL_TOKENS = (
    "<pad>",
    "<eos>",
    "<bos>",
    "<start_of_turn>",
    "<end_of_turn>",
    "<unused0>",
    "<unused1>",
    "<unused2>",
)
FIRST_BYTE_ID = len(SPECIAL_TOKENS)


def byte_characters() -> list[str]:
    """The printable character that stands for each byte in a byte-level vocabulary (GPT-2's mapping).

    Printable Latin-1 bytes stand for themselves; the others take the characters from U+0100 on, in order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    shifted = {byte: chr(0x100 + n) for n, byte in enumerate(others)}
    return [chr(byte) if byte in printable else shifted[byte] for byte in range(256)]


def tokenizer_document(special_tokens: Sequence[str] = SPECIAL_TOKENS) -> dict[str, object]:
    """The content of `tokenizer.json`, in the format of Hugging Face's tokenizers."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    specials = [
        {
            "id": n,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for n, token in enumerate(special_tokens)
    ]
    vocabulary = {token: n for n, token in enumerate((*special_tokens, *byte_characters()))}
    bos = {"SpecialToken": {"id": "<bos>", "type_id": 0}}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": specials,
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [bos, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [bos, {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<bos>": {"id": "<bos>", "ids": [special_tokens.index("<bos>")], "tokens": ["<bos>"]}},
        },
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocabulary,
            "merges": [],
        },
    }


def tokenizer_config(eos: str = "<end_of_turn>") -> dict[str, object]:
    """The content of `tokenizer_config.json`.

    The end of a turn is the end-of-sequence token: generation, GRPO's completion mask and chat data all stop at it.
    """
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<bos>",
        "eos_token": eos,
        "pad_token": "<pad>",
        "padding_side": "right",
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],
    }


def write_tokenizer(
    folder: Path, chat_template: str, special_tokens: Sequence[str] = SPECIAL_TOKENS, eos: str = "<end_of_turn>"
) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja into `folder` (made when absent)."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in (
        ("tokenizer.json", tokenizer_document(special_tokens)),
        ("tokenizer_config.json", tokenizer_config(eos)),
    ):
        text = json.dumps(content, indent=1, ensure_ascii=False) + "\n"
        (folder / name).write_text(text, encoding="utf-8")
    (folder / "chat_template.jinja").write_text(chat_template, encoding="utf-8")


def main() -> None:
    """Write the tokenizer with the bundled Gemma template into the folder named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="folder to write; made when absent")
    template = asset("templates", "gemma.jinja")
    write_tokenizer(parser.parse_args().folder, template.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
