"""What a run says of its CUDA graphs in the end. The graphs themselves need a GPU: tests/gpu/test_graphs.py."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ftcli.model import cuda_graphs
from ftcli.model.cuda_graphs import GraphRunner
from ftcli.model.fused import DecoderStack, StackCall
from ftcli.model.loss import forward_loss
from ftcli.train.loop import TrainingLoop
from tests.e2e.conftest import User
from tests.unit.model.test_stack import adapted, taken


@pytest.fixture
def stack() -> tuple[Any, DecoderStack, GraphRunner]:
    """A model whose layers a runner takes, and that runner."""
    model = adapted("llama")
    stack = taken(model)
    reporter: Any = SimpleNamespace(info=print)
    stack.runner = GraphRunner(stack, 1024, reporter)
    return model, stack, stack.runner


def step(model: Any, stack: DecoderStack, tokens: int) -> None:
    ids = torch.randint(3, 200, (1, tokens))
    forward_loss(model, {"input_ids": ids, "labels": ids.clone()}, stack=stack).loss.backward()


def test_graphs_that_were_given_up_are_not_called_on(
    stack: tuple[Any, DecoderStack, GraphRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(self: GraphRunner, call: StackCall) -> Any:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(GraphRunner, "_capture_with_room", no_memory)
    model, layers, runner = stack
    step(model, layers, 8)
    assert runner.status.outcome == "on"
    step(model, layers, 8)
    assert runner.status.outcome == "given up after 0 micro-batches: no memory was left for another CUDA graph"


def test_shapes_beyond_the_limit_are_counted(
    stack: tuple[Any, DecoderStack, GraphRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_graphs, "MOST_SHAPES", 0)
    model, layers, runner = stack
    for tokens in (8, 9, 8, 9, 8):
        step(model, layers, tokens)
    assert (runner.status.without, runner.status.beyond) == (5, 3)
    assert runner.status.outcome == "on, except for 3 micro-batches of shapes beyond the first 0"


@pytest.mark.parametrize("outcome", [None, "on", "given up after 7 micro-batches: no memory was left"])
def test_the_manifest_says_in_the_end_what_became_of_them(
    narrow: User, monkeypatch: pytest.MonkeyPatch, outcome: str | None
) -> None:
    monkeypatch.setattr(TrainingLoop, "cuda_graphs", lambda self: outcome)
    narrow.done("train", narrow.recipe(train={"max_steps": 1}, data={"eval": []}))
    manifest = json.loads((narrow.folder / "r" / "manifest.json").read_text())
    planned = "the layers are not on Triton kernels"
    assert manifest["cuda_graphs"] == (planned if outcome in (None, "on") else outcome)
