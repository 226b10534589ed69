"""Pairs that share their prompt train what separate rows do: in every family on the kernels, under every policy."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from ftcli.data.collate import lengths_once
from ftcli.data.tokens import TokenizedRow
from ftcli.errors import FtcliError
from ftcli.labels import IGNORE_INDEX
from ftcli.methods.preference.objective import PairObjective
from ftcli.methods.preference.pairs import SCORED
from ftcli.model.backbone import hidden_states
from ftcli.model.fused import stack_of
from ftcli.model.gradient_checkpointing import use_checkpointing
from ftcli.model.masks import Documents
from ftcli.model.patch import patch
from ftcli.rows.row import Row
from ftcli.tables.families import TABLE
from ftcli.train.assembly import check_branches
from tests.small_models import by_kind
from tests.tiers import in_turn
from tests.unit.methods.preference import steps
from tests.unit.methods.preference.steps import PADDED, SHARED, UNPADDED, Result, require_same
from tests.unit.model.test_stack import captured
from tests.unit.train.test_unpadded import CPU, FLOAT32, KERNELS, SMALL, WITH_TOWERS, model_of

#: Tokens of a prompt, of what both answers begin with, and of the rest of each; windows are 6.
SIZES = ((9, 0, 7, 12), (3, 2, 9, 1), (1, 0, 4, 6), (0, 0, 5, 3), (14, 1, 2, 5))
WHOLE = [[0, 1, 2, 3, 4]]


def rows() -> list[TokenizedRow]:
    """Chosen and rejected rows in turn. In the third pair a token in the midst of each answer bears no loss, in the
    fourth the rows have nothing in common.
    """
    rng, made = Random(3), []

    def some(size: int) -> list[int]:
        return [rng.randrange(3, 97) for _ in range(size)]

    for number, (asked, alike, *rest) in enumerate(SIZES):
        prompt, begin = some(asked), some(alike)
        for index, size in enumerate(rest):
            ids = [*prompt, *begin, 95 + index, *some(size)]
            labels = [IGNORE_INDEX] * max(asked, 1) + ids[max(asked, 1) :]
            if number == 2:
                labels[asked + 2] = IGNORE_INDEX
            made.append(TokenizedRow(Row("pairs.jsonl", number, {}), ids, labels))
    return made


def objective_of(model: Any, batches: Any, **settings: Any) -> PairObjective:
    return steps.objective_of(model, rows(), batches, **{"beta": 0.3, "sft_weight": 0.5, **settings})


def step(model: Any, batches: Any, split: Sequence[Sequence[int]] = WHOLE, *, stack: bool = False, **settings: Any) -> Result:  # fmt: skip  # noqa: E501
    objective = objective_of(model, batches, **settings)
    if stack:
        found = stack_of(model, torch.float32)
        assert not isinstance(found, str), found
        objective._stack = found
    return steps.step(objective, model, split)


#: A state at the prompt's end goes on into one answer: tests/unit/methods/preference/test_shared.py.
ATTENDING = [name for name in KERNELS if name not in TABLE or TABLE[name].delta_nets is None]


@pytest.mark.parametrize(
    ("family", "kernels"), in_turn(by_kind(ATTENDING), ["reference", "interpreted"], whole=("llama", "gemma2"))
)
def test_every_family(family: str, kernels: str) -> None:
    """Of the interpreter, which is slow, one micro-batch; in plain torch two."""
    if kernels == "interpreted" and family in WITH_TOWERS:
        pytest.skip("the heads of these small models are too small for the kernel")
    model = model_of(family, kernels)
    split = [[0, 1, 2, 3, 4]] if kernels == "interpreted" else [[3, 0], [4, 2, 1]]
    require_same(step(model, SHARED, split), step(model, PADDED), rel=2e-6)


def test_delta_nets_compute_rows_apart() -> None:
    """Which the plan has them do: answers that share a prompt are refused, and unpadded rows are padded ones."""
    model = model_of("qwen3_5_text", "reference")
    require_same(step(model, UNPADDED, [[3, 0], [4, 2, 1]]), step(model, PADDED), rel=1e-5)
    with pytest.raises(ValueError, match="documents that branch"):
        step(model, SHARED)


@pytest.mark.parametrize("settings", [
    {"loss": "ipo", "beta": 0.5}, {"ld_alpha": 0.5, "label_smoothing": 0.1}, {"method": "orpo"}, {"method": "simpo"},
])  # fmt: skip
def test_every_loss_and_split(settings: dict[str, Any]) -> None:
    model = model_of("gemma2", "reference")
    wanted = step(model, PADDED, **settings)
    for split in (WHOLE, [[0, 1], [2, 3, 4]], [[4], [3], [2], [1], [0]], [[2, 0, 4, 1, 3]]):
        require_same(step(model, SHARED, split, **settings), wanted, rel=2e-6)
    require_same(step(model, UNPADDED, **settings), wanted, rel=2e-6)


@pytest.mark.parametrize("policy", ["selective", "offload", "lean", True])
def test_every_checkpointing_policy(policy: Any) -> None:
    """As one stack, as a run has them. Recomputation finds the branches, too."""
    wanted = step(model_of("gemma2", "reference"), SHARED, stack=True)
    model = model_of("gemma2", "reference")
    if policy is True:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    else:
        use_checkpointing(model, policy)
    found = step(model.train(), SHARED, stack=True)
    assert found[0] == wanted[0]
    assert all(torch.equal(found[1][name], gradient) for name, gradient in wanted[1].items())


def test_a_checkpoint_keeps_the_output_of_the_interpreted_kernel() -> None:
    wanted = step(model_of("llama", "interpreted"), PADDED, [[0, 1]])
    model = model_of("llama", "interpreted")
    use_checkpointing(model, "lean")
    require_same(step(model.train(), SHARED, [[0, 1]], stack=True), wanted, rel=2e-6)


def test_two_runs_give_the_same_bits() -> None:
    """Positions that predict for both answers add up two gradients."""
    model = model_of("llama", "reference")
    one, other = (step(model, SHARED) for _ in range(2))
    assert one[0] == other[0]
    assert all(torch.equal(one[1][name], gradient) for name, gradient in other[1].items())


def whole_model(seed: int) -> Any:
    """A model that is trained whole, with its head on the embedding's weight."""
    config = AutoConfig.for_model("qwen3", **{**SMALL, "tie_word_embeddings": True})
    torch.manual_seed(seed)
    made = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.float32)
    assert any(entry.on for entry in patch(made, "reference").table)
    return made.train()


def test_full_fine_tuning() -> None:
    """Of the embedding, too, in which the prompt's tokens are looked up once: its gradients are those of both rows."""
    model, reference = whole_model(0), whole_model(1).requires_grad_(False).eval()
    found, wanted = (step(model, batches, reference=reference) for batches in (SHARED, PADDED))
    assert "model.embed_tokens.weight" in wanted[1]
    require_same(found, wanted, rel=2e-6)


def test_tokens_are_counted_once() -> None:
    model, documents = model_of("llama", "reference"), rows()
    objective = objective_of(model, SHARED)
    batch = objective.micro_batch([0, 3], blank=False)
    chosen = [documents[0], documents[1], documents[6], documents[7]]
    assert batch.counts.real == (9 + 1 + 7) + (1 + 12) + (1 + 5) + (1 + 3) == int(lengths_once(chosen).sum())
    assert (batch.counts.computed, batch.counts.pairs) == (64, 2)
    apart = objective_of(model, PADDED).micro_batch([0, 3], blank=False)
    assert batch.counts.supervised == apart.counts.supervised
    assert torch.equal(batch.inputs[SCORED], apart.inputs[SCORED])
    assert objective.micro_batch([0], blank=True).counts.real == 0


def test_a_token_outside_the_vocabulary_is_refused() -> None:
    documents = rows()
    documents[0].input_ids[-1] = documents[0].labels[-1] = 97
    objective = steps.objective_of(model_of("llama", "reference"), documents, SHARED)
    with pytest.raises(ValueError, match="97"):
        objective.micro_batch([0], blank=False)


def test_the_trial_passes_and_leaves_the_model_as_it_was() -> None:
    model, documents = model_of("gemma2", "interpreted"), rows()
    before = [parameter.clone() for parameter in model.parameters()]
    for index in (0, 2, 6):
        check_branches(model, (documents[index], documents[index + 1]), FLOAT32, CPU, pad_token_id=0)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize("fault", ["sees the other answer", "wrong positions"])
def test_the_trial_finds_a_model_that_mixes_answers(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from ftcli.train import assembly

    shared = assembly.shared_batch

    def broken(*given: Any) -> Any:
        batch, *rest = shared(*given)
        if fault == "wrong positions":
            width = batch["position_ids"].shape[1]
            return {**batch, "position_ids": torch.arange(width)[None]}, *rest
        return {**batch, "branch_starts": batch["document_starts"]}, *rest

    monkeypatch.setattr(assembly, "shared_batch", broken)
    documents = rows()
    with pytest.raises(FtcliError, match="apart that share their prompt") as error:
        check_branches(model_of("llama", "reference"), (documents[0], documents[1]), FLOAT32, CPU, pad_token_id=0)
    assert (error.value.findings[0].code, error.value.findings[0].help) == (
        "FT443",
        "train with preference.share_prompts: off; train.method: reward with data.padding_free: false",
    )


def test_attention_that_is_not_ours_takes_no_branches() -> None:
    batch = objective_of(model_of("llama", "reference"), SHARED).micro_batch([0], blank=False)
    inputs = {name: batch.inputs[name] for name in ("input_ids", "position_ids", "document_starts", "branch_starts")}
    with pytest.raises(ValueError, match="our own attention only"):
        hidden_states(model_of("llama", "off"), inputs)


def test_the_bounds_of_a_captured_call_are_copied_into_it() -> None:
    """A CUDA graph reads its own tensors: those of holes must be among them, and its shape a key of its own."""
    from ftcli.model import cuda_graphs
    from ftcli.model.fused import LayerCall, StackCall
    from ftcli.model.masks import mask_for

    rotation = (torch.zeros(1, 8, 4), torch.zeros(1, 8, 4))

    def call_of(branches: Tensor | None) -> StackCall:
        made = mask_for(batch_size=1, q_length=8, kv_length=8, mask_function=lambda *_: torch.tensor(True))
        starts = torch.zeros(1, 8, dtype=torch.int32)
        mask = Documents(starts, branches=branches).within(made)
        return StackCall(torch.zeros(1, 8, 4), (LayerCall(mask, rotation),))

    def branching(fork: int, second: int) -> Tensor:
        starts = [0] * fork + [fork] * (second - fork) + [second] * (8 - second)
        return torch.tensor([starts], dtype=torch.int32)

    one, other, plain = call_of(branching(2, 5)), call_of(branching(3, 4)), call_of(None)
    assert cuda_graphs._key(one) == cuda_graphs._key(other) != cuda_graphs._key(plain)
    fixed = captured(one)
    cuda_graphs._copy_in(fixed, other)
    assert torch.equal(fixed.layer_calls[0].mask.ranges.dense(), other.layer_calls[0].mask.ranges.dense())
