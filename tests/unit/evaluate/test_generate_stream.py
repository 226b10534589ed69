"""Streaming gives the text of evaluation, in whole characters, and stops when it is told to."""

from __future__ import annotations

import random
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ftcli.assets import asset
from ftcli.config.evaluation import GenerateConfig
from ftcli.errors import ExitCode, FtcliError
from ftcli.evaluate.generate import CompletionEnd, Detokenizer, StreamSettings, generate, stream
from ftcli.generation.requests import TextUntilStop
from ftcli.plan.precision import DtypePlan
from ftcli.reporting import SilentReporter

PLAN = DtypePlan("float32", "float32", "float32", False, "a test")
CPU = torch.device("cpu")
PROMPT = "<bos><start_of_turn>user\nWhat is 12 + 30?<end_of_turn>\n<start_of_turn>model\n"


@pytest.fixture(scope="module")
def loaded() -> tuple[Any, Any]:
    source = str(Path(asset("models", "tiny-gemma2")))
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, attn_implementation="eager")
    return model.requires_grad_(False), AutoTokenizer.from_pretrained(source)


def streamed(
    loaded: tuple[Any, Any], sampling: StreamSettings, stops: tuple[int, ...] | None = None, max_length: int = 64
) -> tuple[list[str], CompletionEnd]:
    model, tokenizer = loaded
    stops = (tokenizer.eos_token_id,) if stops is None else stops
    pieces = stream(model, tokenizer, PROMPT, sampling, plan=PLAN, device=CPU, stops=stops, max_length=max_length)
    return taken(pieces)


def taken(pieces: Generator[str, None, CompletionEnd]) -> tuple[list[str], CompletionEnd]:
    found = []
    while True:
        try:
            found.append(next(pieces))
        except StopIteration as end:
            return found, end.value


def prompt_length(tokenizer: Any) -> int:
    return len(tokenizer(PROMPT, add_special_tokens=False)["input_ids"])


def test_the_pieces_are_the_completion_of_evaluation(loaded: tuple[Any, Any]) -> None:
    model, tokenizer = loaded
    for stops in ((tokenizer.eos_token_id,), (3,)):  # with its own it says little
        whole = generate(
            model, tokenizer, [PROMPT], GenerateConfig(max_new_tokens=40), batch_size=1, plan=PLAN, device=CPU,
            reporter=SilentReporter(), stops=stops,
        )  # fmt: skip
        pieces, _ = streamed(loaded, StreamSettings(40), stops, max_length=10_000)
        assert "".join(pieces) == whole[0].text
    assert len(pieces) > 1


def test_why_it_ended(loaded: tuple[Any, Any]) -> None:
    model, tokenizer = loaded
    with torch.no_grad():
        ids = tokenizer(PROMPT, add_special_tokens=False, return_tensors="pt")["input_ids"]
        first = int(model(input_ids=ids).logits[0, -1].argmax())
    assert streamed(loaded, StreamSettings(8), stops=(first,)) == ([], CompletionEnd(1, "stop"))
    other = next(number for number in range(tokenizer.vocab_size) if number != first)
    assert streamed(loaded, StreamSettings(1), stops=(other,))[1] == CompletionEnd(1, "max_new_tokens")
    length = prompt_length(tokenizer)
    assert streamed(loaded, StreamSettings(8), stops=(other,), max_length=length + 1)[1] == CompletionEnd(
        1, "max_seq_len"
    )


def test_a_window_that_slides_goes_on_from_its_last_tokens(loaded: tuple[Any, Any]) -> None:
    model, tokenizer = loaded
    ids = tokenizer(PROMPT, add_special_tokens=False)["input_ids"]
    length = len(ids) + 3
    pieces = stream(
        model, tokenizer, PROMPT, StreamSettings(30), plan=PLAN, device=CPU, stops=(), max_length=length, slides=True
    )
    found, done = taken(pieces)
    assert done == CompletionEnd(30, "max_new_tokens")
    made: list[int] = []
    seen = list(ids)
    while len(made) < 30:
        if len(seen) >= length:
            seen = seen[-(length - length // 4) :]
        with torch.no_grad():
            token = int(model(input_ids=torch.tensor([seen])).logits[0, -1].argmax())
        seen.append(token)
        made.append(token)
    assert "".join(found) == tokenizer.decode(made, skip_special_tokens=True)
    longer = stream(
        model,
        tokenizer,
        PROMPT,
        StreamSettings(4),
        plan=PLAN,
        device=CPU,
        stops=(),
        max_length=len(ids) // 2,
        slides=True,
    )
    assert taken(longer)[1] == CompletionEnd(4, "max_new_tokens")


def test_a_stop_string_ends_it_and_no_part_of_it_is_told(loaded: tuple[Any, Any]) -> None:
    free, ended = streamed(loaded, StreamSettings(40), stops=(3,))
    whole = "".join(free)
    assert len(whole) > 12
    for length in (1, 2, 5):
        stop = whole[6 : 6 + length]
        found, how = streamed(loaded, StreamSettings(40, stop_strings=("never", stop)), stops=(3,))
        assert "".join(found) == whole[: whole.index(stop)]
        assert how.stop == "stop"
    end = whole[-1] + "never"  # its beginning is said, and comes in the end
    found, how = streamed(loaded, StreamSettings(40, stop_strings=(end,)), stops=(3,))
    assert ("".join(found), how) == (whole, ended)


def test_pieces_are_held_back_while_they_may_begin_a_stop_string() -> None:
    until = TextUntilStop(("END", "E!"))
    assert [until.add(piece) for piece in ("a", "bE", "Nc", "E", "EN", "D!", "x")] == ["a", "b", "ENc", "", "E", "", ""]
    assert until.finish() == ""
    until = TextUntilStop(("END",))
    assert until.add("xEN") + until.finish() == "xEN"
    plain = TextUntilStop(())
    assert plain.add("E") == "E"


def test_a_seed_repeats_what_is_sampled(loaded: tuple[Any, Any]) -> None:
    said = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        said.append("".join(streamed(loaded, StreamSettings(16, temperature=2.0), stops=(0,), max_length=10_000)[0]))
    assert said[0] == said[1] != said[2]


def test_closing_it_ends_the_generation(loaded: tuple[Any, Any]) -> None:
    model, tokenizer = loaded
    calls: list[int] = []
    hook = model.get_input_embeddings().register_forward_hook(lambda *_: calls.append(1))
    pieces = stream(
        model, tokenizer, PROMPT, StreamSettings(100_000), plan=PLAN, device=CPU, stops=(0,), max_length=200_000
    )  # fmt: skip
    next(pieces)
    pieces.close()
    hook.remove()
    assert 0 < len(calls) < 1000


def test_logits_that_are_not_finite_are_an_error(loaded: tuple[Any, Any]) -> None:
    model, _ = loaded
    weight = model.get_output_embeddings().weight
    before = weight.data.clone()
    weight.data.fill_(float("nan"))
    try:
        with pytest.raises(FtcliError) as caught:
            streamed(loaded, StreamSettings(4))
    finally:
        weight.data.copy_(before)
    assert caught.value.findings[0].code == "FT762"
    assert caught.value.exit_code == ExitCode.DIVERGED


TOKENIZERS = sorted(str(path.parent) for path in Path(asset()).glob("*/*/tokenizer.json"))


@pytest.mark.parametrize("source", TOKENIZERS, ids=lambda path: Path(path).name)
def test_no_character_is_broken_and_none_is_lost(source: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(source)
    text = "Grüße, 世界! 👩‍👩‍👧 नमस्ते\n\tмир  two spaces"
    assert told(tokenizer, tokenizer(text, add_special_tokens=False)["input_ids"]) == text
    tokens = random.Random(0)
    for _ in range(20):  # bytes that are no characters, and special tokens, among others
        ids = [tokens.randrange(len(tokenizer)) for _ in range(60)]
        assert told(tokenizer, ids, broken=True) == tokenizer.decode(ids, skip_special_tokens=True)


def told(tokenizer: Any, ids: list[int], *, broken: bool = False) -> str:
    detokenizer = Detokenizer(tokenizer)
    pieces = [detokenizer.add(token) for token in ids]
    last = detokenizer.finish()
    assert broken or not any("\ufffd" in piece for piece in (*pieces, last))
    assert not any(piece.endswith("\ufffd") for piece in pieces)
    return "".join((*pieces, last))
