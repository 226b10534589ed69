"""Completions of several turns: what the engine keeps between them is what the tokens would give anew."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from ftkernels.sampling import Sampling, row_seed

from ftcli.facts.generation import EngineLayout, pages_of
from ftcli.generation.decoding import Forward
from ftcli.generation.engine import Engine
from ftcli.generation.fallback import TransformersGenerator
from ftcli.generation.requests import Completion, GenerationRequest, StopCheck, StopConditions, StopReason
from ftcli.model.patch import patch
from ftcli.plan.precision import DtypePlan
from tests.small_models import build

PLAN = DtypePlan("float32", "float32", "float32", False, "a test")
CPU = torch.device("cpu")
LONGEST, LIMIT = 200, 90
STOPS = frozenset(range(5, 60))
SAMPLING = Sampling(1.0)


class Scripted:
    """Gives tokens between turns: a few to some completions, none at once to others, and to all late and in another
    order than they have ended.
    """

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)
        self.turns: dict[tuple[int, int], list[tuple[int, StopReason]]] = {}
        self.said: dict[tuple[int, int], list[list[int]]] = {}
        self.polls = self.waits = 0
        self._ready: list[tuple[int, int, list[int] | None]] = []

    def ended(self, request: int, completion: int, tokens: Sequence[int], reason: StopReason) -> bool:
        where = request, completion
        self.turns.setdefault(where, []).append((len(tokens), reason))
        if reason == "limit" or len(self.turns[where]) > 3:
            return False
        given: list[int] | None = [self._random.randrange(60, 250) for _ in range(self._random.choice((1, 5, 70)))]
        if given is not None and len(tokens) + len(given) >= LIMIT:
            given = None
        self._ready.append((*where, given))
        if given is not None:
            self.said.setdefault(where, []).append(given)
        return True

    def given(self, *, wait: bool) -> list[tuple[int, int, list[int] | None]]:
        self.polls += 1
        self.waits += wait
        self._random.shuffle(self._ready)
        count = len(self._ready) if wait else len(self._ready) // 2
        found, self._ready = self._ready[:count], self._ready[count:]
        return found


def requests() -> list[GenerationRequest]:
    generator = torch.Generator().manual_seed(0)
    sizes = [3, 70, 1, 64]
    prompts = [tuple(torch.randint(5, 250, (size,), generator=generator).tolist()) for size in sizes]
    return [GenerationRequest(prompt, LIMIT, (row_seed(1, at), row_seed(2, at))) for at, prompt in enumerate(prompts)]


def plain(model: Any, prompt: Sequence[int], completion: Completion) -> torch.Tensor:
    """Log-probabilities of a completion's tokens out of the model's own logits."""
    ids = torch.tensor([[*prompt, *completion.tokens]])
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
    return torch.log_softmax(logits, -1).gather(1, ids[0, len(prompt) :, None])[:, 0]


def check(model: Any, made: list[list[Completion]], script: Scripted) -> None:
    for number, request in enumerate(requests()):
        for at, one in enumerate(made[number]):
            given = script.said.get((number, at), [])
            assert [one.tokens[place] for place in one.given] == [token for each in given for token in each]
            ends = [length - 1 for length, reason in script.turns[number, at] if reason == "stop"]
            own = [place for place in range(len(one.tokens)) if place not in one.given]
            assert [place for place in own if one.tokens[place] in STOPS] == ends
            assert len(one.tokens) <= LIMIT
            wanted = plain(model, request.prompt, one)
            assert len(one.logprobs) == len(one.tokens)
            torch.testing.assert_close(torch.tensor(one.logprobs)[own], wanted[own], rtol=0, atol=2e-4)
            assert not any(one.logprobs[place] for place in one.given)
    assert sum(len(one.given) > 0 for each in made for one in each) >= 4


@pytest.mark.parametrize("rows", [3, 8])
@pytest.mark.parametrize(
    ("model_type", "kernels"), [("llama", "off"), ("gemma2", "reference"), ("qwen3_5_text", "reference")]
)
def test_what_is_said_between_turns_is_as_if_it_had_stood_there(model_type: str, kernels: Any, rows: int) -> None:
    model = build(model_type).requires_grad_(False)
    patch(model, kernels)
    layout = EngineLayout(rows, rows * pages_of(LONGEST) + 1, False)
    engine = Engine(Forward(model, PLAN, CPU), layout, LONGEST, PLAN, CPU)
    for seed, ahead in ((0, 0), (1, 4)):  # as on a GPU: steps are issued before the host has seen a turn's end
        engine._tools = replace(engine._tools, ahead=ahead)
        script = Scripted(seed)
        made = engine.converse(requests(), SAMPLING, StopCheck(StopConditions(STOPS), None), script)
        check(model, made, script)
        assert script.waits
        assert engine._tools.pool.free == layout.pages - 1, "all pages are free again"


def test_others_begin_while_all_wait_for_tools() -> None:
    """Turns of one length end together. Nobody waits for tools while a prompt waits for a place."""

    class AllAtOnce(Scripted):
        def given(self, *, wait: bool) -> list[tuple[int, int, list[int] | None]]:
            if wait:
                begun.append(len(self.turns))
            return super().given(wait=True) if wait else []

    class ThreeTokens:
        ids: frozenset[int] = frozenset()

        def stopped(self, tokens: Sequence[int]) -> bool:
            return len(tokens) == 3

    begun: list[int] = []
    model = build("llama").requires_grad_(False)
    engine = Engine(Forward(model, PLAN, CPU), EngineLayout(2, 60, False), LONGEST, PLAN, CPU)
    stopping: Any = ThreeTokens()
    made = engine.converse(requests(), SAMPLING, stopping, AllAtOnce())
    assert begun[0] == 8, "all completions had their first turn"
    assert all(one.given for each in made for one in each)


def test_pages_stay_between_turns_and_are_not_computed_again() -> None:
    model = build("llama").requires_grad_(False)
    layout = EngineLayout(8, 8 * pages_of(LONGEST) + 1, False)
    engine = Engine(Forward(model, PLAN, CPU), layout, LONGEST, PLAN, CPU)
    widths: list[int] = []
    hook = model.get_input_embeddings().register_forward_hook(lambda m, a, out: widths.append(out.shape[1]))
    engine.converse(requests(), SAMPLING, StopCheck(StopConditions(STOPS), None), Scripted())
    hook.remove()
    assert widths[0] == 138
    assert set(widths[1:]) == {1}, "after the prompts each pass is of one token a row"


def test_a_turn_that_never_ends_is_cut_where_the_completion_is() -> None:
    model = build("llama").requires_grad_(False)
    engine = Engine(Forward(model, PLAN, CPU), EngineLayout(8, 60, False), LONGEST, PLAN, CPU)
    script = Scripted()
    made = engine.converse(requests(), SAMPLING, StopCheck(StopConditions(frozenset()), None), script)
    assert {len(one.tokens) for each in made for one in each} == {LIMIT}
    assert {one.ended for each in made for one in each} == {"limit"}
    assert not script.said


def test_transformers_goes_on_as_well() -> None:
    model = build("llama").requires_grad_(False)
    generator = TransformersGenerator(model, PLAN, CPU, pad=0, rows=4)
    script = Scripted()
    made = generator.converse(requests(), SAMPLING, StopCheck(StopConditions(STOPS), None), script)
    for number, each in enumerate(made):
        for at, one in enumerate(each):
            given = script.said.get((number, at), [])
            assert [one.tokens[place] for place in one.given] == [token for said in given for token in said]
            assert len(one.tokens) <= LIMIT
    assert script.said


def test_a_stop_string_is_not_looked_for_in_what_was_given() -> None:
    class Letters:
        def decode(self, tokens: Sequence[int], skip_special_tokens: bool) -> str:
            return "".join(chr(token) for token in tokens)

    class Once(Scripted):
        def ended(self, request: int, completion: int, tokens: Sequence[int], reason: StopReason) -> bool:
            self.turns.setdefault((request, completion), []).append((len(tokens), reason))
            if reason == "limit" or len(self.turns[request, completion]) > 1:
                return False
            self._ready.append((request, completion, [ord("#")] * 3))
            return True

    model = build("llama").requires_grad_(False)
    engine = Engine(Forward(model, PLAN, CPU), EngineLayout(8, 60, False), LONGEST, PLAN, CPU)
    script = Once()
    tokenizer: Any = Letters()
    stopping = StopCheck(StopConditions(STOPS, ("###",)), tokenizer)
    made = engine.converse(requests(), SAMPLING, stopping, script)
    longer = [one for each in made for one in each if one.given]
    assert longer
    assert all(max(one.given) < len(one.tokens) - 1 for one in longer)
    assert any(len(one.tokens) - max(one.given) > 2 for one in longer)
