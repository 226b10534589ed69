"""Whether pairs share their prompt, what a run says of it, and that nothing else changes by it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch

from ftcli.data.collate import lengths_once
from ftcli.labels import IGNORE_INDEX
from ftcli.methods.preference.evaluate import PairEvaluator
from ftcli.methods.preference.pairs import AnswerScorer
from ftcli.methods.preference.settings import PreferenceConfig
from ftcli.model.backbone import head_of
from ftcli.model.fused import stack_of
from ftcli.model.patch import patch
from ftcli.plan.batches import Batches, bucket
from ftcli.plan.run import RunPlan
from ftcli.reporting import SilentReporter
from ftcli.train.data import computed_with
from tests.estimates import Case, estimate_of, plan_of
from tests.unit.methods.preference import steps
from tests.unit.methods.preference.steps import PADDED, SHARED, UNPADDED

PAIRS = (
    "model: {name_or_path: meta-llama/Llama-3.1-8B}\nlora: {r: 16}\ndata: {max_seq_len: 520}\ntrain: {method: dpo}\n"
)
#: Two processes, each with a GPU of its own.
TWO = "launch.num_processes=2"


@pytest.fixture
def plan(load: Callable[..., Any]) -> Callable[..., RunPlan]:
    def _plan(*settings: str, device: str = "h200", work: str = "dpo", text: str = PAIRS) -> RunPlan:
        made = Case(load(text, *settings))
        return plan_of(made.recipe, made.facts, device, work)

    return _plan


@pytest.mark.parametrize(
    ("settings", "device", "shares", "told"),
    [
        ((), "h200", True, "a pair's prompt is computed once"),
        ((TWO, "launch.engine=ddp"), "h200", True, "a pair's prompt is computed once"),
        (("quantization.method=nf4",), "rtx4090", True, "a pair's prompt is computed once"),
        (("preference.share_prompts=off",), "h200", False, "with each answer (preference.share_prompts: off)"),
        (("data.padding_free=false",), "h200", False, "data.padding_free: false; a pair's prompt is computed with"),
        (("data.padding_free=true", "model.kernels=off"), "h200", False, "although transformers' own attention"),
        (("model.kernels=off",), "h200", False, "a pair's prompt is computed with each answer"),
        (
            ("model.name_or_path=Qwen/Qwen3.5-9B",),
            "h200",
            False,
            "(a layer's state at the prompt's end would go on into",
        ),
        ((), "cpu", False, "a pair's prompt is computed with each answer"),
    ],
)
def test_where_pairs_share_their_prompt(
    settings: tuple[str, ...], device: str, shares: bool, told: str, plan: Callable[..., RunPlan]
) -> None:
    for work in ("dpo", "eval"):
        batches = plan(*settings, device=device, work=work).execution.batches
        assert batches.shares_prompts is shares
        assert told in batches.reason


def test_ranks_that_share_rows_have_prompts_apart(plan: Callable[..., RunPlan]) -> None:
    """A sharded model has them once."""
    found = plan()

    def changed(**change: Any) -> RunPlan:
        launch = found.recipe.launch.model_copy(update={"num_processes": 2, "engine": "fsdp", **change})
        return replace(found, recipe=found.recipe.model_copy(update={"launch": launch}))

    assert changed().execution.batches.shares_prompts
    batches = changed(context_parallel_size=2).execution.batches
    assert not batches.shares_prompts
    assert "with each answer (ranks share rows)" in batches.reason
    assert replace(changed(context_parallel_size=2), work="eval").execution.batches.shares_prompts


def test_rows_that_are_no_pairs_have_nothing_to_say_of_it(plan: Callable[..., RunPlan]) -> None:
    batches = plan(text=PAIRS.replace("method: dpo", "method: sft"), work="sft").execution.batches
    assert (batches.shares_prompts, "prompt" in batches.reason) == (False, False)


def test_the_estimate_has_the_states_that_are_picked_out(plan: Callable[..., RunPlan]) -> None:
    """At worst pairs have nothing in common; the rest is that of separate rows."""
    shared, apart = (
        plan("train.gradient_checkpointing=false", f"preference.share_prompts={s}") for s in ("auto", "off")
    )
    few, rows = shared.execution.batches.few_up_to, shared.recipe.train.per_device_train_batch_size
    assert shared.tokens == apart.tokens == bucket(2 * 520 * rows, few)
    more = shared.method_memory.loss_bytes - apart.method_memory.loss_bytes  # type: ignore[operator]
    assert more == 2 * shared.rows * 520 * 4096 * 2
    one, other = (estimate_of(p.recipe, p.facts, "h200", "dpo").allocated_bytes for p in (shared, apart))
    assert other <= one <= other + more


def test_tokens_that_an_epoch_computes() -> None:
    """In tokens.json and in what a run says at its start."""
    documents = steps.rows()
    said: list[str] = []
    job: Any = steps.job_of(size=3)
    job.reporter = SimpleNamespace(info=said.append)
    lengths = torch.tensor([len(row.input_ids) for row in documents]).numpy()

    class Table(list):  # type: ignore[type-arg]
        pass

    table = Table(documents)
    table.lengths = lengths  # type: ignore[attr-defined]
    prepared: Any = SimpleNamespace(sequences=table)
    epochs = steps.epochs_of_pairs(documents)
    once, apart = (computed_with(job, epochs, prepared, batches) for batches in (SHARED, UNPADDED))
    assert apart.tokens == int(lengths.sum())
    assert once.tokens == int(lengths_once(documents).sum()) == apart.tokens - sum(size[0] for size in steps.SIZES)
    assert once.tokens + once.filler == 2 * 64
    assert [line for line in said if "shared prompts" in line] == [
        f"shared prompts: {21 / apart.tokens:.1%} fewer tokens than with each answer a row of its own"
    ]


@pytest.mark.parametrize("quantization", ["none", "nf4", "fp8"])
def test_on_every_base(quantization: Literal["none", "nf4", "fp8"], tmp_path: Path) -> None:
    """On our layers in plain torch, as one stack: policy and reference. fp8 products round what they read to 3 bits, so
    that the last bit of a sum can move an element by a sixteenth.
    """
    results = []
    for batches in (PADDED, SHARED):
        model = steps.adapted_model(tmp_path, quantization)
        assert any(entry.on for entry in patch(model, "reference").table)
        objective = steps.objective_of(model, batches=batches, beta=0.3)
        stack = stack_of(model, torch.float32)
        assert not isinstance(stack, str)
        objective._stack = stack
        results.append((steps.step(objective, model, [[0, 1], [2, 3, 4, 5]]), objective.metrics()))
    (found, said), (wanted, expected) = reversed(results)
    coarse = quantization == "fp8"
    steps.require_same(found, wanted, rel=6e-3 if coarse else 1e-5)
    assert said == pytest.approx(expected, abs=2e-2 if coarse else 1e-4)


def test_held_out_pairs_have_the_same_results(tmp_path: Path) -> None:
    model = steps.adapted_model(tmp_path)
    patch(model, "reference")
    documents, results = steps.rows(), []
    for batches in (PADDED, SHARED):
        job = steps.job_of(batches)
        job.recipe.train = job.recipe.train.model_copy(update={"method": "dpo"})
        job.recipe.preference, job.recipe.eval = None, SimpleNamespace(per_device_eval_batch_size=4)
        job.reporter = SilentReporter()
        results.append(PairEvaluator(job, documents).loss_of(model, documents))
    wanted, found = results
    assert found.loss == pytest.approx(wanted.loss, abs=1e-5)
    assert found.tokens == wanted.tokens
    assert found.more == pytest.approx(wanted.more, abs=1e-4)
    assert {"stop_logp", "stop_change", "accuracy_length_controlled"} <= set(found.more or ())
    assert found.margins is not None
    assert wanted.margins is not None
    assert found.margins.values == pytest.approx(wanted.margins.values, abs=1e-4)
    assert (found.margins.lengths == wanted.margins.lengths).all()


@pytest.mark.parametrize("batches", [PADDED, UNPADDED, SHARED], ids=["padded", "unpadded", "shared"])
def test_weights_by_the_policy_are_those_of_whole_logits(batches: Batches, tmp_path: Path) -> None:
    """WPO: the mean over an answer's tokens of log p_y - log sum_v p_v^2, of each row by itself in float64."""
    model, documents = steps.adapted_model(tmp_path), steps.rows()
    patch(model, "reference")
    wanted = []
    for row in documents:
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([row.input_ids])).logits[0].double()
        logp = logits.log_softmax(-1)
        each = [
            float(logp[n - 1, label] - logp[n - 1].mul(2).logsumexp(-1))
            for n, label in enumerate(row.labels)
            if n and label != IGNORE_INDEX
        ]
        wanted.append(sum(each) / len(each))
    scorer = AnswerScorer(batches, 0, head_of(model).weight.shape[0], 1.0)
    found = scorer.score(model, scorer.batch(documents), aligned=True).aligned
    assert found is not None
    assert found.tolist() == pytest.approx(wanted, rel=1e-4, abs=1e-5)
    assert max(wanted) - min(wanted) > 0.1


@pytest.mark.parametrize("loss", ["sigmoid", "ipo"])
def test_pairs_that_are_weighed_by_the_policy_take_the_same_step(loss: str, tmp_path: Path) -> None:
    """And have the same held-out results."""
    documents, results = steps.rows(), []
    for batches in (PADDED, SHARED):
        model = steps.adapted_model(tmp_path)
        patch(model, "reference")
        settings = {"loss": loss, "beta": 0.5, "use_weighting": True}
        objective = steps.objective_of(model, batches=batches, **settings)
        job = steps.job_of(batches)
        job.recipe.train = job.recipe.train.model_copy(update={"method": "dpo"})
        job.recipe.preference = PreferenceConfig.model_validate(settings)
        job.recipe.eval = SimpleNamespace(per_device_eval_batch_size=4)
        held_out = PairEvaluator(job, documents).loss_of(model, documents)
        results.append((steps.step(objective, model, [[0, 1], [2, 3, 4, 5]]), held_out))
    (wanted, expected), (found, said) = results
    steps.require_same(found, wanted)
    assert said.loss == pytest.approx(expected.loss, rel=1e-5)
    plain = steps.step(steps.objective_of(model, batches=SHARED, loss=loss, beta=0.5), model, [[0, 1], [2, 3, 4, 5]])
    assert plain[0] != pytest.approx(found[0], rel=1e-2)
