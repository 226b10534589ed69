"""Loads tokenizers, and tries them: damage to a tokenizer.json often shows only in use."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING

from ftcli.assets import asset, bundled
from ftcli.config.model import ModelConfig
from ftcli.errors import ExitCode, FtcliError, Unwinding, first_line
from ftcli.facts.model import ModelFacts
from ftcli.facts.tokenizer import no_stop_finding

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

#: A little of everything: letters, digits, space, a line break, other scripts, a character beyond 16 bits.
_TEXT = "Hello, World 42!\n  é ß 名 🙂"


def source_of(name: str) -> str:
    """Path of a bundled model, or the name itself (Hub id or folder) for transformers to resolve."""
    return str(bundled(name, "models") or name)


def load_tokenizer(model: ModelConfig, *, offline: bool) -> PreTrainedTokenizerBase:
    """The recipe's tokenizer, padded on the right, with a pad token.

    Raises FtcliError FT321 when there is none to load, FT322 when it has no end-of-sequence token, and FT352 for a new
    token that it has.
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
    if model.tokenizer is not None and tokenizer.unk_token is None:
        # Beside some models' config.json (Qwen2's) transformers takes the family's own class, whatever the tokenizer
        # says of itself, and that one adds a token where none is named. No text is turned into this name's token.
        tokenizer.unk_token = tokenizer.pad_token
    tokenizer.padding_side = "right"
    _add(tokenizer, model.add_tokens)
    return tokenizer


def _add(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[str]) -> None:
    """Gives the tokenizer new tokens. Raises FtcliError FT352 (exit 3) for one that it has, or cannot add."""
    from transformers import AddedToken

    if not tokens:
        return
    before = tokenizer.get_vocab()
    # All at once: the tokenizer looks through all it has in each call.
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in tokens if token not in before])
    taken = set(before.values())
    for token in tokens:
        there, at = before.get(token), tokenizer.convert_tokens_to_ids(token)
        if there is not None or at in taken:
            raise FtcliError.single(
                "FT352",
                f"model.add_tokens: the tokenizer has {token!r} already"
                + ("" if there is None else f", as id {there}"),
                exit_code=ExitCode.PREFLIGHT,
                help="remove it from model.add_tokens: a token that is there is trained with the model's own row; "
                "lora.modules_to_save trains such rows, with all others",
            )
        taken.add(at)


def require_known_ids(tokenizer: PreTrainedTokenizerBase, facts: ModelFacts, added: Sequence[str] = ()) -> None:
    """Raises FtcliError FT315 (exit 3) for tokens beyond the model's vocabulary, which only loading shows; but for
    those that the recipe has ``added``.

    Preflight reads the largest id in the tokenizer's files; the class that transformers loads them by may add tokens.
    """
    size = facts.vocab_size
    found = {token: at for token, at in tokenizer.get_added_vocab().items() if size is not None and at >= size}
    beyond = {token: at for token, at in found.items() if token not in added}
    if beyond:
        token = max(beyond, key=lambda each: beyond[each])
        raise FtcliError.single(
            "FT315",
            f"the tokenizer gives {token!r} the id {beyond[token]}, and the vocabulary of {facts.name} has {size}",
            help="use the tokenizer that belongs to the model; where transformers has added a token for want of an "
            "unknown one, name any other of its tokens as unk_token in tokenizer_config.json",
        )


def pad_apart(tokenizer: PreTrainedTokenizerBase, stops: Collection[int]) -> None:
    """Has a tokenizer pad with a token that ends no turn, where it has one: transformers' sequence classifiers take
    the last token of a row that is not padding for its end.
    """
    if tokenizer.pad_token_id not in stops:
        return
    special = zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=False)
    known = {**tokenizer.get_added_vocab(), **dict(special)}
    free = {name: one for name, one in known.items() if one not in stops and one != tokenizer.bos_token_id}
    found = next((name for word in ("pad", "unk", "reserved", "") for name in free if word in name.lower()), None)
    if found is not None:
        tokenizer.pad_token = found


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
            help="name one with model.tokenizer, or use `model.tokenizer: bytes`",
        ) from error
    return tokenizer


#: End-of-turn tokens of the field's chat templates; those that a tokenizer has as special tokens end its turns.
TURN_ENDS = ("<end_of_turn>", "<|eot_id|>", "<|im_end|>", "<|eom_id|>", "<turn|>", "<|return|>", "<|call|>")
#: Tokens that end a turn, unless the tokenizer has the other one: gpt-oss ends its reasoning with `<|end|>`.
TURN_ENDS_WITHOUT = {"<|end|>": "<|return|>"}


def stop_token_ids(facts: ModelFacts, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Ids that end a turn: the tokenizer's eos, the eos ids of config.json and generation_config.json that it knows as
    special, its end-of-turn tokens.

    Needs no weights, so data can be tokenized and checked before a model is loaded.
    """
    candidates = list(facts.eos_token_ids)
    vocabulary = tokenizer.get_added_vocab()
    candidates += [vocabulary[name] for name in TURN_ENDS if name in vocabulary]
    candidates += [
        vocabulary[name] for name, other in TURN_ENDS_WITHOUT.items() if name in vocabulary and other not in vocabulary
    ]
    return tuple(dict.fromkeys([int(tokenizer.eos_token_id), *_special(candidates, tokenizer)]))


def align_special_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, stops: tuple[int, ...]) -> None:
    """Makes the model's configs name the tokenizer's special tokens and all ``stops``.

    What the model came with stays a stop token, if the tokenizer knows it: whoever serves the model relies on it.
    """
    brought = getattr(model.generation_config, "eos_token_id", None)
    ids = list(dict.fromkeys([*stops, *_special(brought if isinstance(brought, list) else [brought], tokenizer)]))
    for config in (model.config, model.config.get_text_config(), model.generation_config):
        if config is None:
            continue
        config.pad_token_id = tokenizer.pad_token_id
        config.bos_token_id = tokenizer.bos_token_id
        config.eos_token_id = ids[0] if len(ids) == 1 else list(ids)


def _special(ids: Iterable[object], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The special tokens of the tokenizer among ``ids``; a generation_config.json may name anything."""
    special = set(tokenizer.all_special_ids) | set(tokenizer.get_added_vocab().values())
    return [one for one in ids if type(one) is int and one in special]
