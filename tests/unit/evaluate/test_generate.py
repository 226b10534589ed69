"""Batched cached decoding says what one prompt at a time says without a cache, past the window too."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ftcli.assets import asset
from ftcli.config.evaluation import GenerateConfig
from ftcli.errors import Finding, FtcliError
from ftcli.evaluate.generate import complete, generate
from ftcli.generation.requests import StopCheck, StopConditions
from ftcli.model.patch import patch
from ftcli.plan.precision import DtypePlan
from ftcli.reporting import SilentReporter

PLAN = DtypePlan("float32", "float32", "float32", False, "a test")
PROMPTS = [
    "<bos><start_of_turn>user\nWhat is 12 + 30?<end_of_turn>\n<start_of_turn>model\n",
    "Hi",
    "<bos><start_of_turn>user\n" + "Repeat after me: one two three four five six seven eight. " * 3,
    "The window of this model is 32 tokens, and",
    "a",
]
NEW = 40


@pytest.fixture(scope="module", params=["transformers", "kernels"])
def loaded(request: pytest.FixtureRequest) -> tuple[Any, Any]:
    """The bundled Gemma-2, whose window is 32, and its tokenizer."""
    model = _model().requires_grad_(False)
    if request.param == "kernels":
        assert all(entry.on for entry in patch(model, "reference").table)
    return model, _tokenizer()


def _model() -> Any:
    source = str(Path(asset("models", "tiny-gemma2")))
    return AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, attn_implementation="eager")


def _tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(str(Path(asset("models", "tiny-gemma2"))))


def completions(
    loaded: tuple[Any, Any], prompts: Sequence[str], batch_size: int, reporter: Any = None, new: int = NEW
) -> list[str]:
    model, tokenizer = loaded
    found = generate(
        model, tokenizer, prompts, GenerateConfig(max_new_tokens=new), batch_size=batch_size, plan=PLAN,
        device=torch.device("cpu"), reporter=reporter or SilentReporter(), stops=(tokenizer.eos_token_id,),
    )  # fmt: skip
    return [one.text for one in found]


@pytest.fixture(scope="module")
def one_by_one() -> Callable[[int], list[str]]:
    """Greedy, by plain transformers and without a cache: the whole text through the model again for each token."""
    model, tokenizer = _model(), _tokenizer()
    found = []
    with torch.no_grad():
        for prompt in PROMPTS:
            ids = tokenizer(prompt, add_special_tokens=False, return_tensors="pt")["input_ids"]
            start = ids.shape[1]
            for _ in range(NEW):
                token = model(input_ids=ids, use_cache=False).logits[:, -1].argmax(-1, keepdim=True)
                ids = torch.cat([ids, token], dim=1)
                if int(token) == tokenizer.eos_token_id:
                    break
            found.append(ids[0, start:])
    return lambda new: [tokenizer.decode(ids[:new], skip_special_tokens=True) for ids in found]


def test_batched_cached_decoding_equals_uncached_decoding(
    loaded: tuple[Any, Any], one_by_one: Callable[[int], list[str]]
) -> None:
    expected = one_by_one(NEW)
    assert any(len(text) > 20 for text in expected)
    for batch_size in (2, 5):
        assert completions(loaded, PROMPTS, batch_size) == expected


def test_out_of_memory_halves_the_batch_and_goes_on(
    loaded: tuple[Any, Any], one_by_one: Callable[[int], list[str]]
) -> None:
    model, _ = loaded
    findings: list[Finding] = []

    class Heard(SilentReporter):
        def finding(self, finding: Finding) -> None:
            findings.append(finding)

    def limited(module: Any, args: Any) -> None:
        if args[0].shape[0] > 2:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    handle = model.get_input_embeddings().register_forward_pre_hook(limited)
    try:
        assert completions(loaded, PROMPTS, 5, Heard(), new=12) == one_by_one(12)
    finally:
        handle.remove()
    assert [finding.code for finding in findings] == ["FT764"]
    assert "generation with 5 rows at a time: going on with 2" in findings[0].message


def test_a_prompt_that_does_not_fit_alone_ends_it(loaded: tuple[Any, Any]) -> None:
    model, _ = loaded

    def never(module: Any, args: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    handle = model.get_input_embeddings().register_forward_pre_hook(never)
    try:
        with pytest.raises(FtcliError, match="FT761"):
            completions(loaded, PROMPTS, 2)
    finally:
        handle.remove()


def test_an_answer_ends_where_the_longest_sequence_does_and_that_is_told(loaded: tuple[Any, Any]) -> None:
    model, tokenizer = loaded
    told: list[str] = []
    new = 24

    class Heard(SilentReporter):
        def warn(self, text: str) -> None:
            told.append(text)

    sizes = [len(tokenizer(prompt, add_special_tokens=False)["input_ids"]) for prompt in PROMPTS]
    longest = max(sizes) + 5

    def answers(max_length: int | None, stops: tuple[int, ...] = (-1,)) -> list[str]:
        found = generate(
            model, tokenizer, PROMPTS, GenerateConfig(max_new_tokens=new), batch_size=5, plan=PLAN,
            device=torch.device("cpu"), reporter=Heard(), stops=stops, max_length=max_length,
        )  # fmt: skip
        assert all(one.cut for one in found) is (stops == (-1,)), "nothing but the limit ended them"
        return [one.text for one in found]

    free, bounded = answers(None), answers(longest)
    expected = [min(new, longest - size) for size in sizes]
    assert min(expected) == 5
    for whole, cut, room in zip(free, bounded, expected, strict=True):
        assert whole.startswith(cut.rstrip("\ufffd"))
        assert (cut == whole) == (room == new)
    ended = sum(room < new for room in expected)
    assert told == [f"{ended} of 5 answers were ended by data.max_seq_len {longest}"]


@pytest.mark.parametrize("sampled", [False, True])
def test_logits_that_are_not_finite_end_with_6(loaded: tuple[Any, Any], sampled: bool) -> None:
    model, tokenizer = loaded
    norm = model.model.norm.weight
    before = norm.detach().clone()
    with torch.no_grad():
        norm[0] = float("nan")
    try:
        with pytest.raises(FtcliError, match="FT762") as caught:
            generate(
                model, tokenizer, PROMPTS, GenerateConfig(max_new_tokens=2, do_sample=sampled), batch_size=5, plan=PLAN,
                device=torch.device("cpu"), reporter=SilentReporter(), stops=(tokenizer.eos_token_id,),
            )  # fmt: skip
        assert caught.value.exit_code == 6
    finally:
        with torch.no_grad():
            norm.copy_(before)
    assert not model.get_output_embeddings()._forward_hooks


def test_a_stop_string_across_tokens_ends_where_generate_ends(loaded: tuple[Any, Any]) -> None:
    model, tokenizer = loaded
    settings: dict[str, Any] = {"batch_size": 3, "plan": PLAN, "device": torch.device("cpu")}

    def texts(config: GenerateConfig) -> list[str]:
        found = generate(model, tokenizer, PROMPTS, config, stops=(3,), reporter=SilentReporter(), **settings)
        return [one.text for one in found]

    free = texts(GenerateConfig(max_new_tokens=24))
    stop = free[0][6:9]
    assert len(tokenizer(stop, add_special_tokens=False)["input_ids"]) > 1
    ids = tokenizer(PROMPTS[0], add_special_tokens=False, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        out = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False, eos_token_id=[3],
            stop_strings=[stop, "never"], tokenizer=tokenizer,
        )  # fmt: skip
    theirs = out[0, ids.shape[1] :].tolist()
    assert 3 <= len(theirs) < 24
    config = GenerateConfig(max_new_tokens=24, stop_strings=("never", stop))
    prompts = tokenizer(PROMPTS[:3], add_special_tokens=False)["input_ids"]
    stopping = StopCheck(StopConditions(frozenset((3,)), config.stop_strings), tokenizer)
    made = complete(model, prompts, config, pad=0, stopping=stopping, reporter=SilentReporter(), **settings)
    assert made[0] == theirs
    ended = texts(config)
    assert ended == [whole.partition(stop)[0] for whole in free]
    assert ended[0] != free[0]
