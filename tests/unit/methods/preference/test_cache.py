"""The reference on disk: never another one's, never damaged, and the same run as one that computes it in each step."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import peft
import pytest
import torch

from ftcli.config.model import QuantizationConfig
from ftcli.data.tokens import RowImage, shown_digest, unit_digest
from ftcli.methods.preference import cache as key_module
from ftcli.methods.preference.cache import ReferenceCache, reference_key
from ftcli.methods.preference.reference import (
    AheadOfTraining,
    Reference,
    by_answer,
    by_unit,
    scored_ahead,
)
from ftcli.methods.preference.settings import PreferenceConfig
from ftcli.model.initial_adapters import remember_initial, remember_start
from ftcli.model.patch import patch
from ftcli.train.epochs import seen_units, steps_of
from tests.unit.methods.preference import steps
from tests.unit.methods.preference.steps import PADDED, UNPADDED, epochs_of_pairs, objective_of, require_same, step

WHOLE = [[0, 1, 2, 3]]


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def cache(tmp_path: Path, said: list[str]) -> ReferenceCache:
    return ReferenceCache(tmp_path / "of-one-model", said.append)


def some(count: int, first: int = 0) -> dict[bytes, Any]:
    """Pairs by digest, with values that tell them apart."""
    return {bytes([i]) * 16: np.full(4, -1.5 * i, np.float32) for i in range(first, first + count)}


def equal(found: dict[bytes, Any], wanted: dict[bytes, Any]) -> bool:
    return found.keys() == wanted.keys() and all(np.array_equal(found[key], wanted[key]) for key in wanted)


def test_what_was_kept_is_found_to_the_last_bit(cache: ReferenceCache, said: list[str]) -> None:
    values = {b"a" * 16: np.array([-0.1, -1e30, -3.3333333, 0], np.float32)}
    assert not cache.is_there
    assert equal(cache.add(values), values)
    assert cache.is_there
    assert equal(cache.read(), values)
    assert not said


@pytest.mark.parametrize("damage", ["bit", "cut", "empty", "gone", "longer", "pipe", "endless"])
def test_a_damaged_entry_is_not_trusted(cache: ReferenceCache, said: list[str], tmp_path: Path, damage: str) -> None:
    cache.add(some(3))
    cache.add(some(2, first=3))
    file = tmp_path / "of-one-model/00000001/pairs.bin"
    content = bytearray(file.read_bytes())
    if damage == "bit":
        content[-5] ^= 1
    file.write_bytes({"cut": content[:-7], "empty": b"", "longer": content + b"0" * 32}.get(damage, content))
    if damage in ("gone", "pipe", "endless"):
        file.unlink()
    if damage == "pipe":
        os.mkfifo(file)
    if damage == "endless":
        file.symlink_to("/dev/zero")
    assert equal(cache.read(), some(2, first=3))
    assert len(said) == 1
    assert "damaged and computed again" in said[0]
    cache.add(some(3))
    assert equal(cache.read(), some(5))
    assert len(said) == 1


def test_a_faster_run_s_values_are_taken(cache: ReferenceCache, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are written between this run's look at the folder and its writing."""
    faster = {bytes([1]) * 16: np.full(4, -7, np.float32), bytes([9]) * 16: np.full(4, -9, np.float32)}
    looked: list[list[Path]] = []
    own = cache._entries

    def look() -> list[Path]:
        found = list(own())
        if not looked:
            looked.append(found)
            cache.add(faster)
        return found

    monkeypatch.setattr(cache, "_entries", look)
    kept = cache.add(some(3))
    assert looked == [[]]
    assert kept[bytes([1]) * 16][0] == -7
    assert equal(cache.read(), {**some(3), **faster})
    assert equal({key: cache.read()[key] for key in kept}, kept)


def test_many_runs_at_once_agree(tmp_path: Path) -> None:
    """Each has rounded otherwise; what each of them goes on with is what every later one finds."""
    warned: list[str] = []
    kept: list[dict[bytes, Any]] = [{} for _ in range(8)]
    ready = threading.Barrier(8)

    def run(number: int) -> None:
        cache = ReferenceCache(tmp_path / "shared", warned.append)
        mine = {key: values + number / 64 for key, values in some(40, first=number).items()}
        ready.wait()
        kept[number] = cache.add(mine)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = ReferenceCache(tmp_path / "shared", warned.append).read()
    assert len(found) == 47
    assert all(np.array_equal(found[key], values) for of_run in kept for key, values in of_run.items())
    assert not warned
    assert not list((tmp_path / "shared").glob(".writing-*"))


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path, said: list[str]) -> None:
    (tmp_path / "file").write_text("")
    cache = ReferenceCache(tmp_path / "file/below", said.append)
    assert equal(cache.add(some(2)), some(2))
    assert "cannot be kept" in said[0]
    assert cache.read() == {}


def test_a_pair_is_its_tokens_and_what_is_scored_of_them() -> None:
    chosen, rejected = steps.rows()[:2]
    known = unit_digest(chosen, rejected)
    assert unit_digest(replace(chosen), replace(rejected)) == known
    ids, labels = list(chosen.input_ids), list(chosen.labels)
    others = [
        (replace(chosen, input_ids=[*ids[:-1], ids[-1] + 1]), rejected),
        (replace(chosen, labels=[*labels[:-1], -100]), rejected),
        (chosen, replace(rejected, labels=list(rejected.input_ids))),
        (replace(chosen, input_ids=[*ids, 5], labels=[*labels, -100]), rejected),
        (rejected, chosen),
    ]
    found = [unit_digest(*pair) for pair in others]
    assert len({known, *found}) == 6


def test_a_pair_is_what_its_images_hold() -> None:
    """Tokens stand for the size of an image alone: another of that size had the reference's values of the first."""
    chosen, rejected = steps.rows()[:2]
    held = [RowImage(None, content, 2, 2, (1, 1), 3) for content in (b"red", b"blu")]
    files = [RowImage("shown.png", None, 2, 2, (1, 1), 3, digest=shown_digest(content)) for content in (b"red", b"blu")]
    found = [unit_digest(replace(chosen, images=(image,)), rejected) for image in (*held, *files)]
    assert found[:2] == found[2:]
    assert len({*found, unit_digest(chosen, rejected)}) == 3


def job_of(folder: Path | None = None, batches: Any = PADDED, said: list[str] | None = None, **of_recipe: Any) -> Any:
    """A job as far as a reference asks for it."""
    made = steps.job_of(batches, size=2)
    train = made.recipe.train.model_copy(update={"method": "dpo", **of_recipe.pop("train", {})})
    recipe = SimpleNamespace(
        train=train,
        preference=PreferenceConfig.model_validate(of_recipe.pop("preference", {})),
        quantization=QuantizationConfig.model_validate(of_recipe.pop("quantization", {})),
        lora=of_recipe.pop("lora", SimpleNamespace(start_from=None)),
        launch=SimpleNamespace(is_sharded=False, context_parallel_size=1),
        model=SimpleNamespace(kernels=of_recipe.pop("kernels", "off")),
    )
    assert not of_recipe
    layers = SimpleNamespace(code="transformers")
    execution = SimpleNamespace(on_kernels=False, layers=layers, attention="sdpa")
    made.recipe, made.session = recipe, SimpleNamespace(cache_dir=folder)
    made.plan = SimpleNamespace(execution=execution, stream="float32")
    if said is not None:
        told = said.append
        made.reporter = SimpleNamespace(info=told, warn=told, finding=told, progress=made.reporter.progress)
    return made


@pytest.mark.parametrize("on_kernels", [False, True], ids=["transformers", "kernels"])
def test_every_weight_of_the_base_is_in_the_key(tmp_path: Path, on_kernels: bool) -> None:
    """By one bit of one element."""
    model = steps.adapted_model(tmp_path)
    if on_kernels:
        assert any(entry.on for entry in patch(model, "reference").table)
    job = job_of()
    known = reference_key(job, model, 1.0)
    frozen = [p for p in (*model.parameters(), *model.buffers()) if not p.requires_grad and p.is_floating_point()]
    assert len(frozen) > 15
    for number, weight in enumerate(frozen):
        place = (number * 7919) % weight.numel()
        word = weight.data.reshape(-1).view(torch.int32)[place : place + 1]
        word ^= 1
        assert reference_key(job, model, 1.0) != known
        word ^= 1
    assert reference_key(job, model, 1.0) == known


def test_two_weights_that_change_places_are_another_model(tmp_path: Path) -> None:
    model = steps.base_model(tmp_path)
    known = reference_key(job_of(), model, 1.0)
    flat = model.get_input_embeddings().weight.data.reshape(-1)
    flat[5000:5004] = flat[5000:5004].flip(0)  # none of them is 0
    assert reference_key(job_of(), model, 1.0) != known


def other_config(model: Any) -> None:
    model.config.query_pre_attn_scalar += 1


KEYED: dict[str, Callable[[], Any]] = {
    "kernels": lambda: job_of(kernels="reference"),
    "layout": lambda: job_of(batches=UNPADDED),
    "quantization": lambda: job_of(quantization={"method": "nf4"}),
    "images": lambda: SimpleNamespace(**{**vars(job_of()), "vision": SimpleNamespace(identity="an image processor")}),
}


@pytest.mark.parametrize("changed", KEYED)
def test_how_it_is_computed_is_in_the_key(tmp_path: Path, changed: str) -> None:
    model = steps.base_model(tmp_path)
    assert reference_key(KEYED[changed](), model, 1.0) != reference_key(job_of(), model, 1.0)


def test_so_are_ld_alpha_dtypes_device_config_attention_and_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, job = steps.base_model(tmp_path), job_of()
    keys = [reference_key(job, model, 1.0), reference_key(job, model, 0.5)]
    dtypes = job.dtypes
    job.dtypes = replace(dtypes, compute="bfloat16")
    keys.append(reference_key(job, model, 1.0))
    job.dtypes, job.device = dtypes, torch.device("meta")
    keys.append(reference_key(job, model, 1.0))
    job.device, job.plan.execution.attention = torch.device("cpu"), "eager"
    keys.append(reference_key(job, model, 1.0))
    job.plan.execution.attention = "sdpa"
    other_config(model)
    keys.append(reference_key(job, model, 1.0))
    model = steps.base_model(tmp_path)
    monkeypatch.setattr(key_module, "_SCORING", 2)
    keys.append(reference_key(job, model, 1.0))
    monkeypatch.setattr(key_module, "_SCORING", 1)
    keys.append(reference_key(job, steps.base_model(tmp_path).bfloat16(), 1.0))
    assert len(set(keys)) == len(keys) == 8
    assert reference_key(job, model, 1.0) == keys[0]


def test_a_quantized_base_is_another_model(tmp_path: Path) -> None:
    job = job_of()
    plain, packed = (steps.base_model(tmp_path, method) for method in ("none", "nf4"))  # type: ignore[arg-type]
    known = reference_key(job, packed, 1.0)
    assert known != reference_key(job, plain, 1.0)
    state = next(buffer for name, buffer in packed.named_buffers() if buffer.dtype == torch.uint8)
    state.view(-1)[3] ^= 1
    assert reference_key(job, packed, 1.0) != known


def test_no_setting_of_training_is_in_the_key(tmp_path: Path) -> None:
    """A sweep over loss, beta, learning rate, batch and adapters has one reference."""
    known = reference_key(job_of(), steps.base_model(tmp_path), 1.0)
    wider = peft.LoraConfig(r=8, target_modules=["q_proj"], task_type="CAUSAL_LM")
    others = [
        job_of(preference={"beta": 0.7, "loss": "ipo", "sft_weight": 1, "label_smoothing": 0.1}),
        job_of(train={"learning_rate": 1e-3, "num_train_epochs": 3.0, "per_device_train_batch_size": 7}),
    ]
    models = [steps.adapted_model(tmp_path), peft.get_peft_model(steps.base_model(tmp_path), wider)]
    assert {reference_key(job, model, 1.0) for job in others for model in models} == {known}


def test_adapters_that_begin_as_a_part_of_the_weights_are_in_the_key(tmp_path: Path) -> None:
    job, model = job_of(), steps.adapted_model(tmp_path)
    plain = reference_key(job, model, 1.0)
    remember_initial(model)
    known = reference_key(job, model, 1.0)
    assert known != plain
    next(p for p in model.parameters() if p.requires_grad).data.view(-1)[0] += 1
    assert reference_key(job, model, 1.0) != known


def test_an_adapter_that_is_gone_on_from_is_in_the_key_with_its_scale(tmp_path: Path) -> None:
    job, model = job_of(), steps.adapted_model(tmp_path)
    known = [reference_key(job, model, 1.0)]
    remember_start(model)
    known.append(reference_key(job, model, 1.0))
    next(p for p in model.parameters() if p.requires_grad).data.view(-1)[0] += 1
    known.append(reference_key(job, model, 1.0))
    model.peft_config["default"].lora_alpha *= 2
    known.append(reference_key(job, model, 1.0))
    assert len(set(known)) == 4


def test_what_is_scored_ahead_is_what_each_step_computes(tmp_path: Path) -> None:
    model, documents = steps.adapted_model(tmp_path), steps.rows()
    epochs = epochs_of_pairs(documents)
    for settings in ({"beta": 0.3}, {"beta": 0.3, "ld_alpha": 0.5}, {"loss": "ipo", "beta": 0.5}):
        job = job_of(train={"num_train_epochs": 2.0}, preference=settings)
        ahead = scored_ahead(job, model, epochs, [], None)
        assert ahead.of_units is not None
        wanted = step(objective_of(model, documents, **settings), model, WHOLE)
        found = step(objective_of(model, documents, known=ahead.of_units, **settings), model, [[0, 1], [2], [3]])
        require_same(found, wanted)


@pytest.mark.parametrize("settings", [{}, {"ld_alpha": 0.5, "sft_weight": 0.5}], ids=str)
def test_a_step_is_the_same_to_the_last_bit_as_one_that_computes_its_reference(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    """In float32, of pairs that are scored one by one in either case."""
    model = steps.adapted_model(tmp_path)
    job = job_of(train={"num_train_epochs": 2.0, "per_device_train_batch_size": 1}, preference=settings)
    ahead = scored_ahead(job, model, epochs_of_pairs(steps.rows()), [], None)
    split = [[unit] for unit in range(6)]
    live, known = objective_of(model, **settings), objective_of(model, known=ahead.of_units, **settings)
    wanted, found = step(live, model, split), step(known, model, split)
    assert found[0] == wanted[0]
    assert all(torch.equal(found[1][name], gradient) for name, gradient in wanted[1].items())
    assert known.metrics() == live.metrics()


def test_the_known_reference_is_not_computed_again(tmp_path: Path) -> None:
    model = steps.adapted_model(tmp_path)
    known = np.full((6, 4), -20.0, np.float32)
    known[5] = np.nan  # not seen
    objective = objective_of(model, known=known)
    batch = dict(objective.micro_batch([0, 1], blank=False).inputs)
    reference_of_batch = objective._of_reference(batch, batch.pop("reference"))
    assert reference_of_batch.sums.tolist() == [-20.0] * 4
    blank = objective.micro_batch([0], blank=True).inputs["reference"]
    assert blank.tolist() == [[0, 0], [0, 0]]


def test_values_of_pairs_and_of_answers_are_the_same_numbers() -> None:
    values = np.arange(8, dtype=np.float32).reshape(2, 4)
    answers = by_answer(values)
    assert answers.tolist() == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert np.array_equal(by_unit(answers, 2), values)


def test_a_second_run_reads_what_the_first_has_computed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, documents, said = steps.adapted_model(tmp_path), steps.rows(), []  # type: ignore[var-annotated]
    epochs, folder = epochs_of_pairs(documents), tmp_path / "cache"
    scored: list[int] = []
    own = AheadOfTraining._scored
    monkeypatch.setattr(AheadOfTraining, "_scored", lambda *args: scored.append(len(args[-1])) or own(*args))
    twice, once = {"num_train_epochs": 2.0}, {"num_train_epochs": 1.0}
    assert scored_ahead(job_of(folder, train=once), model, epochs, documents, None) == Reference()  # it would not pay
    first = scored_ahead(job_of(folder, train=twice), model, epochs, documents[:4], None)
    assert scored == [8]  # pairs that are held out as well are another entry of the same
    sweep = job_of(folder, train={**once, "learning_rate": 1e-3}, preference={"beta": 0.9}, said=said)
    second = scored_ahead(sweep, model, epochs, documents[:4], None)
    assert scored == [8]
    assert np.array_equal(first.of_units, second.of_units)  # type: ignore[arg-type]
    assert first.held_out.keys() == second.held_out.keys()
    assert said == [f"reference: scored ahead, 8 of 8 pairs found in {folder / 'reference'}, 0 computed"]
    more = steps.rows((*steps.SIZES, (3, 2, 5)))
    scored_ahead(job_of(folder, train=twice), model, epochs_of_pairs(more), [], None)
    assert scored == [8, 1]
    assert scored_ahead(job_of(folder, train=once, preference={"reference_cache": "off"}), model, epochs, [], None) == (
        Reference()
    )


def test_an_own_folder_is_always_filled_and_damage_in_it_computed_again(tmp_path: Path) -> None:
    model, said, folder = steps.adapted_model(tmp_path), [], tmp_path / "mine"  # type: ignore[var-annotated]
    epochs = epochs_of_pairs(steps.rows())
    job = job_of(preference={"reference_cache": str(folder)}, said=said)
    first = scored_ahead(job, model, epochs, [], None)
    (file,) = folder.rglob("pairs.bin")
    file.write_bytes(file.read_bytes()[:-1])
    again = scored_ahead(job, model, epochs, [], None)
    assert np.array_equal(first.of_units, again.of_units)  # type: ignore[arg-type]
    assert [("damaged" in line, "6 computed" in line) for line in said] == [(False, True), (True, False), (False, True)]


def test_weights_trained_whole_are_scored_before_they_change(tmp_path: Path) -> None:
    """No second model: the values are those that one would give."""
    model, documents = steps.base_model(tmp_path), steps.rows()
    ahead = scored_ahead(job_of(lora=None), model, epochs_of_pairs(documents), [], None)
    second = steps.base_model(tmp_path)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.01
    wanted = step(objective_of(model, documents, reference=second, beta=0.3), model, WHOLE)
    found = step(objective_of(model, documents, known=ahead.of_units, beta=0.3), model, WHOLE)
    require_same(found, wanted)


def test_pairs_that_no_step_reaches_are_not_scored(tmp_path: Path) -> None:
    model, epochs = steps.base_model(tmp_path), epochs_of_pairs(steps.rows())
    job = job_of(lora=None, train={"max_steps": 2})  # of two pairs each
    ahead = scored_ahead(job, model, epochs, [], None)
    assert ahead.of_units is not None
    seen = [unit for unit in range(6) if not np.isnan(ahead.of_units[unit]).any()]
    assert seen == sorted(epochs.order(0)[:4])


@pytest.mark.parametrize(
    ("train", "ranks", "wanted"),
    [
        ({"num_train_epochs": 1.0}, 1, (6, False)),
        ({"num_train_epochs": 1.5}, 1, (6, True)),
        ({"max_steps": 3}, 1, (6, False)),
        ({"max_steps": 4}, 1, (6, True)),
        ({"max_steps": 1}, 1, (2, False)),
        ({"max_steps": 1, "gradient_accumulation_steps": 2}, 1, (4, False)),
        ({"max_steps": 1}, 2, (4, False)),
        ({"max_steps": 2}, 2, (6, False)),
        ({"max_steps": 3}, 2, (6, True)),
    ],
)
def test_which_pairs_a_run_sees_and_whether_it_sees_them_again(
    train: dict[str, Any], ranks: int, wanted: tuple[int, bool]
) -> None:
    group: Any = SimpleNamespace(size=ranks)
    epochs = epochs_of_pairs(steps.rows())
    seen, again = seen_units(epochs, steps_of(job_of(train=train), epochs, group))
    assert (len(seen), again) == wanted


def test_a_run_that_began_without_a_cache_goes_on_without(tmp_path: Path) -> None:
    """Another run may have filled it meanwhile, in batches of other shapes."""
    model = steps.adapted_model(tmp_path)
    progress = SimpleNamespace(step=1)
    known = np.zeros((6, 4), np.float32)
    live = objective_of(model)
    ahead = objective_of(model, known=known)
    assert [objective.state()["reference"] for objective in (live, ahead)] == ["live", "ahead"]
    again = objective_of(model, known=known)
    again.restore(live.state(), progress)  # type: ignore[arg-type]
    assert "reference" not in again.micro_batch([0], blank=False).inputs
    again = objective_of(model, known=known)
    again.restore(ahead.state(), progress)  # type: ignore[arg-type]
    assert "reference" in again.micro_batch([0], blank=False).inputs
    said: list[str] = []
    gone = objective_of(model, job=job_of(said=said))
    gone.restore(ahead.state(), progress)  # type: ignore[arg-type]
    assert "that this run began with are gone" in said[0]
