"""The reference of labelled answers ahead of training: what is asked for, found by content, and the same run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ftcli.data.tokens import unit_digest
from ftcli.labels import IGNORE_INDEX
from ftcli.methods.kto.reference import known_of, mismatched_rows, scored_ahead
from ftcli.methods.preference.reference import AheadOfTraining, Reference
from ftcli.methods.preference.reference import scored_ahead as of_pairs
from ftcli.methods.preference.settings import PreferenceConfig
from ftcli.train.checkpoint_state import Progress
from tests.unit.methods.kto.labelled import LONGEST, SIZES, Monitor, epochs_of, objective_of, rows, step
from tests.unit.methods.preference import steps
from tests.unit.methods.preference.test_cache import job_of as job_of_pairs

TWICE = {"num_train_epochs": 2.0}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return steps.adapted_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows each look at the reference computes."""
    found: list[int] = []
    own = AheadOfTraining._scored
    monkeypatch.setattr(AheadOfTraining, "_scored", lambda *args: found.append(len(args[-1])) or own(*args))
    return found


def job_of(folder: Path | None = None, *, longest: int = LONGEST, **of_recipe: Any) -> Any:
    train = {"method": "kto", "per_device_train_batch_size": 4, **TWICE, **of_recipe.pop("train", {})}
    made = job_of_pairs(folder, train=train, **of_recipe)
    made.recipe.data = SimpleNamespace(max_seq_len=longest)
    made.recipe.preference = PreferenceConfig.model_validate(
        {"loss": "kto", **made.recipe.preference.model_dump(exclude_unset=True)}
    )
    return made


def ahead_of(job: Any, model: Any, documents: Any = None, held_out: Any = (), seed: int = 0) -> Reference:
    return scored_ahead(job, model, epochs_of(rows() if documents is None else documents, seed), held_out, None)


@pytest.mark.parametrize("settings", [{}, {"kl_rows": 3}, {"loss": "apo_zero_unpaired"}], ids=str)
def test_a_step_is_the_same_to_the_last_bit_as_one_that_computes_its_reference(
    model: Any, settings: dict[str, Any]
) -> None:
    """In float32, of rows that are scored one by one in either case. Loss, KL, gradients and metrics."""
    train = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4}
    ahead = ahead_of(job_of(preference=settings, train=train), model)
    assert ahead.of_rows is not None
    split: dict[str, Any] = {"size": 1, "accumulation": 4, "beta": 0.3, "sft_weight": 0.5, **settings}
    for number in range(4):
        live, known = objective_of(model, **split), objective_of(model, known=ahead.of_rows, **split)
        wanted, found = step(live, model, number), step(known, model, number)
        assert "reference" in known.micro_batch([0], blank=False).inputs
        assert found[0] == wanted[0]
        assert found[1].keys() == wanted[1].keys()
        assert all(torch.equal(found[1][name], gradient) for name, gradient in wanted[1].items())
        assert torch.equal(known._kl, live._kl)
        assert known.metrics() == live.metrics()


def test_the_known_reference_is_computed_neither_for_answers_nor_for_the_kl(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ahead = ahead_of(job_of(), model)
    objective = objective_of(model, known=ahead.of_rows, size=4)
    scored: list[int] = []
    own = objective._scorer.score
    monkeypatch.setattr(objective._scorer, "score", lambda *args, **kw: scored.append(1) or own(*args, **kw))
    step(objective, model, 0)
    assert len(scored) == 2  # the policy's answers, and its mismatched ones


def test_every_row_that_a_run_makes_is_known_and_no_other(model: Any) -> None:
    """Of two epochs, in which prompts and answers meet otherwise."""
    ahead, documents = ahead_of(job_of(train={"num_train_epochs": 2.5}), model), rows()
    objective = objective_of(model, known=ahead.of_rows, size=4)
    wanted = {unit_digest(row) for row in documents}
    of_epochs: list[set[bytes]] = []
    for number in range(5):
        made = mismatched_rows(objective.rows_of_step(number), LONGEST)
        of_epochs.append({unit_digest(row) for row in made})
        assert known_of(ahead.of_rows or {}, made).shape == (4, 1)
    assert of_epochs[0] | of_epochs[1] != of_epochs[2] | of_epochs[3]
    assert set(ahead.of_rows or {}) == wanted.union(*of_epochs)
    with pytest.raises(KeyError):
        objective_of(model, known=ahead.of_rows, size=3).micro_batches(0, Monitor())


def test_a_run_over_beta_and_rate_computes_nothing_again(model: Any, tmp_path: Path, computed: list[int]) -> None:
    first = ahead_of(job_of(tmp_path), model, held_out=rows(seed=3))
    sweep = job_of(tmp_path, preference={"beta": 0.9, "desirable_weight": 1.3}, train={"learning_rate": 1e-3})
    second = ahead_of(sweep, model, held_out=rows(seed=3))
    assert len(computed) == 1
    assert (second.of_rows, second.held_out) == (first.of_rows, first.held_out)
    # One epoch of the same order has nothing that two have not.
    assert ahead_of(job_of(tmp_path, train={"num_train_epochs": 1.0}), model).of_rows is not None
    assert len(computed) == 1


def other(number: int, **change: Any) -> list[Any]:
    documents = rows()
    documents[number] = replace(documents[number], **change)
    return documents


def contents(model: Any, documents: Any = None, longest: int = LONGEST, size: int = 4, seed: int = 0) -> set[Any]:
    """Tokens and scored places of all rows that two epochs make."""
    objective = objective_of(model, documents, size=size)
    objective._epochs = epochs_of(rows() if documents is None else documents, seed)
    made = [objective.rows_of_step(number) for number in range(2 * objective.steps_per_epoch)]
    made += [mismatched_rows(of_step, longest) for of_step in made]
    return {(*row.input_ids, *(label != IGNORE_INDEX for label in row.labels)) for of_step in made for row in of_step}


#: What of the job is changed, and what of the data; whether some rows are scored anew for it.
INGREDIENTS: dict[str, tuple[dict[str, Any], dict[str, Any], bool]] = {
    "nothing": ({}, {}, False),
    "a token of a prompt": ({}, {"documents": other(1, input_ids=[9, *rows()[1].input_ids[1:]])}, True),
    "a token of an answer": ({}, {"documents": other(1, input_ids=[*rows()[1].input_ids[:-1], 9])}, True),
    "what is scored": ({}, {"documents": other(1, labels=[*rows()[1].labels[:-1], IGNORE_INDEX])}, True),
    "the order": ({}, {"seed": 5}, True),
    "rows of a step": ({"train": {"per_device_train_batch_size": 8}}, {"size": 8}, True),
    "room for an answer": ({"longest": LONGEST - 3}, {"longest": LONGEST - 3}, True),
}


@pytest.mark.parametrize("changed", INGREDIENTS)
def test_rows_that_change_are_scored_anew_and_no_others(
    changed: str, model: Any, tmp_path: Path, computed: list[int]
) -> None:
    """And what is found is what a run without a cache has."""
    of_job, of_data, some = INGREDIENTS[changed]
    ahead_of(job_of(tmp_path), model)
    assert computed.pop() == len(contents(model))
    given = {key: value for key, value in of_data.items() if key in ("documents", "seed")}
    found = ahead_of(job_of(tmp_path, **of_job), model, **given)
    new = contents(model, **of_data) - contents(model)
    assert bool(new) == some
    assert sum(computed) == len(new)
    anew = ahead_of(job_of(**of_job), model, **given)
    assert found.of_rows is not None
    assert found.of_rows == pytest.approx(anew.of_rows, rel=1e-5)


@pytest.mark.parametrize("changed", ["nothing", "a weight", "quantization", "kernels"])
def test_another_reference_has_another_cache(changed: str, tmp_path: Path, computed: list[int]) -> None:
    model = steps.adapted_model(tmp_path)
    ahead_of(job_of(tmp_path), model)
    whole, of_job = computed.pop(), {"quantization": {"method": "nf4"}} if changed == "quantization" else {}
    if changed == "a weight":
        next(p for p in model.parameters() if not p.requires_grad).data.view(-1)[7] += 1e-3
    ahead_of(job_of(tmp_path, kernels="reference" if changed == "kernels" else "off", **of_job), model)
    assert sum(computed) == (0 if changed == "nothing" else whole)


def test_pairs_do_not_find_what_rows_have(tmp_path: Path) -> None:
    """Both are of one model in one folder."""
    model = steps.adapted_model(tmp_path)
    ahead_of(job_of(tmp_path), model)
    of_pairs(job_of_pairs(tmp_path, train=TWICE), model, steps.epochs_of_pairs(rows()), [], None)
    assert len(list((tmp_path / "reference").iterdir())) == 2


def test_unpaired_apo_asks_for_no_mismatched_rows(model: Any, computed: list[int]) -> None:
    ahead = ahead_of(job_of(preference={"loss": "apo_zero_unpaired"}), model, held_out=rows(seed=3))
    assert computed == [2 * len(SIZES)]
    assert set(ahead.held_out) == {unit_digest(row) for row in rows(seed=3)}


def test_held_out_rows_and_their_mismatched_ones_are_known_file_by_file(model: Any) -> None:
    held_out = rows(seed=3)
    held_out[5:] = [replace(row, row=replace(row.row, source="other.jsonl")) for row in held_out[5:]]
    ahead = ahead_of(job_of(), model, held_out=held_out)
    wanted = [*held_out, *mismatched_rows(held_out[:5], LONGEST), *mismatched_rows(held_out[5:], LONGEST)]
    assert set(ahead.held_out) == {unit_digest(row) for row in wanted}


def test_only_what_a_short_run_sees_is_scored(model: Any, computed: list[int]) -> None:
    """Of weights that are all trained, so that no second model is needed."""
    base = model.get_base_model()
    ahead_of(job_of(lora=None, train={"max_steps": 1}), base)
    assert computed == [4 + 4]


def test_one_epoch_without_a_cache_computes_in_each_step(model: Any, tmp_path: Path, computed: list[int]) -> None:
    once = {"train": {"num_train_epochs": 1.0}}
    assert ahead_of(job_of(tmp_path, **once), model) == Reference()
    assert ahead_of(job_of(**once), model) == Reference()
    assert ahead_of(job_of(preference={"reference_cache": "off"}), model) == Reference()
    assert computed == []


def test_a_run_goes_on_as_it_began(model: Any) -> None:
    """Another run may have filled the cache meanwhile; and runs of before this was possible do not say."""
    ahead = ahead_of(job_of(), model)
    live, known = objective_of(model), objective_of(model, known=ahead.of_rows)
    assert [objective.state()["reference"] for objective in (live, known)] == ["live", "ahead"]
    progress: Any = Progress(1, 2, 0.0, 0)
    for state, wanted in ((live.state(), False), ({}, False), (known.state(), True)):
        again = objective_of(model, known=ahead.of_rows, started=False)
        again.restore(state, progress)
        assert ("reference" in again.micro_batch([0], blank=False).inputs) == wanted


def test_a_blank_micro_batch_asks_for_no_row(model: Any) -> None:
    """The row that stands for it may be one that the run never sees."""
    objective = objective_of(model, known={})
    assert objective.micro_batch([0], blank=True).inputs["reference"].tolist() == [[0.0]]
