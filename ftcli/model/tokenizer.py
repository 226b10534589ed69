"""Loads tokenizers, and tries them: damage to a tokenizer.json often shows only in use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ftcli.assets import asset, bundled
from ftcli.config.model import ModelConfig
from ftcli.errors import ExitCode, FtcliError, Unwinding, first_line
from ftcli.facts.tokenizer import no_stop_finding

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

#: A little of everything: letters, digits, space, a line break, other scripts, a character beyond 16 bits.
_TEXT = "Hello, World 42!\n  é ß 名 🙂"


def source_of(name: str) -> str:
    """Path of a bundled model, or the name itself (Hub id or folder) for transformers to resolve."""
    return str(bundled(name, "models") or name)


def load_tokenizer(model: ModelConfig, *, offline: bool) -> PreTrainedTokenizerBase:
    """The recipe's tokenizer, padded on the right, with a pad token.

    Raises FtcliError FT321 when there is none to load and FT322 when it has no end-of-sequence token.
    """
    if model.tokenizer == "bytes":
        source = str(asset("tokenizers", "bytes"))
    else:
        source = source_of(model.tokenizer or model.name_or_path)
    tokenizer = read_tokenizer(source, revision=model.revision if model.tokenizer is None else None, offline=offline)
    require_stop(tokenizer, source)
    if tokenizer.pad_token_id is None:
        # Padding is masked in attention and loss by position, never by token id, so sharing eos is safe here.
        tokenizer.pad_token = tokenizer.eos_token
    if model.tokenizer == "bytes" and tokenizer.unk_token is None:
        # Beside some models' config.json (Qwen2's) transformers takes the family's own class, whatever the tokenizer
        # says of itself, and that one adds a token where none is named. Every byte is known: it is never used.
        tokenizer.unk_token = tokenizer.pad_token
    tokenizer.padding_side = "right"
    return tokenizer


def require_stop(tokenizer: PreTrainedTokenizerBase, source: str) -> None:
    """Raises FtcliError FT322 (exit 3) for a tokenizer without an end-of-sequence token."""
    if tokenizer.eos_token_id is None:
        raise FtcliError([no_stop_finding(f"of {source}")], ExitCode.PREFLIGHT)


def read_tokenizer(source: str, *, revision: str | None = None, offline: bool) -> PreTrainedTokenizerBase:
    """The tokenizer in a folder or on the Hub, as it is, after it has turned a text into ids and back.

    Raises:
        FtcliError: FT321 (exit 3) when there is none, or when its files make none that works.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            source, revision=revision, local_files_only=offline, trust_remote_code=False
        )
        tokenizer.decode(tokenizer(_TEXT)["input_ids"])
        _ = len(tokenizer), tokenizer.eos_token_id, tokenizer.all_special_ids, tokenizer.get_added_vocab()
    except (KeyboardInterrupt, SystemExit, GeneratorExit, Unwinding, MemoryError):
        raise
    # The library is written in Rust: it raises plain Exception, and what panics there is not even that.
    except BaseException as error:
        raise FtcliError.single(
            "FT321",
            f"no tokenizer can be loaded from {source}: {first_line(error)[:300]}",
            exit_code=ExitCode.PREFLIGHT,
            help="name one with model.tokenizer, or use `model.tokenizer: bytes`",
        ) from error
    return tokenizer
