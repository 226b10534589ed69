"""Pairs on a model whose weights are sharded, by one rank alone: what is sharded, when, and the same step."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ftcli.methods.preference.cache import reference_key
from ftcli.methods.preference.objective import PairObjective
from ftcli.methods.preference.reference import scored_ahead
from ftcli.model.backbone import base_of
from ftcli.model.fsdp import RankShards, shard
from ftcli.model.patch import patch
from ftcli.model.weight_digests import weight_digests
from ftcli.plan.batches import Batches
from tests.quantized import PLAN
from tests.unit.methods.preference import steps
from tests.unit.methods.preference.steps import PADDED, SHARED, UNPADDED, objective_of, require_same, step
from tests.unit.methods.preference.test_cache import job_of as cache_job
from tests.unit.model.test_stack import adapted

SPLIT = [[0, 1], [2]]


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeviceMesh]:
    """A process group of this process alone."""
    store = dist.FileStore(str(tmp_path_factory.mktemp("group") / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield DeviceMesh.from_group(dist.group.WORLD, "cpu")
    dist.destroy_process_group()


def sharded(model: Any, mesh: DeviceMesh, *, joins: bool) -> Any:
    shard(model, mesh, RankShards(0, 1, joins=joins), PLAN)
    return model


def whole(model: Any) -> Any:
    """The base without adapters, all of it trained."""
    base = model.unload()
    return base.requires_grad_(True).train()


def is_gathered(model: Any) -> bool:
    """Whether embedding and head are whole."""
    return not isinstance(base_of(model).get_input_embeddings().weight, DTensor)


@pytest.mark.parametrize("batches", [PADDED, UNPADDED, SHARED], ids=["padded", "unpadded", "shared prompts"])
@pytest.mark.parametrize("settings", [{"beta": 0.3, "sft_weight": 0.5}, {"method": "orpo"}], ids=["dpo", "orpo"])
def test_adapters_on_a_sharded_base_take_the_same_step(
    mesh: DeviceMesh, batches: Batches, settings: dict[str, Any]
) -> None:
    model = adapted("llama")
    other = sharded(copy.deepcopy(model), mesh, joins=True)
    wanted = step(objective_of(model, batches=batches, **settings), model, SPLIT)
    require_same(step(objective_of(other, batches=batches, **settings), other, SPLIT), wanted, rel=1e-6)


def test_all_weights_and_a_reference_of_its_own_are_sharded(mesh: DeviceMesh) -> None:
    start = whole(adapted("llama"))
    policy = copy.deepcopy(start)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter += 0.02 * torch.randn_like(parameter)
    wanted = step(objective_of(policy, reference=start.requires_grad_(False), beta=0.3), policy, SPLIT)
    mine = sharded(copy.deepcopy(policy), mesh, joins=False)
    reference = sharded(copy.deepcopy(start), mesh, joins=False)
    objective: PairObjective = objective_of(mine, reference=reference, beta=0.3)
    loss, gradients = step(objective, mine, SPLIT)
    found = {name: gradient.full_tensor() for name, gradient in gradients.items() if isinstance(gradient, DTensor)}
    require_same((loss, found), wanted, rel=1e-5)
    assert not is_gathered(mine)
    batch = dict(objective.micro_batch([0], blank=False).inputs)
    objective._of_reference(batch)
    assert not is_gathered(reference), "nothing needs its embedding and head again"
    objective.loss(batch, steps.divisors(objective.micro_batch([0], blank=False).counts))
    assert is_gathered(mine), "backward needs them again"


def job() -> Any:
    """A job as far as a reference's key asks for it."""
    return cache_job(train={"num_train_epochs": 2.0})


def quantized(method: str) -> Any:
    """A model with adapters whose base is stored in ``method``, on the kernels."""
    model = steps.adapted_model(Path(tempfile.mkdtemp()), method)  # type: ignore[arg-type]
    patch(model, "reference")
    return model


KEYED = {
    "adapters": (lambda: adapted("llama"), True),
    "adapters on tied weights": (lambda: quantized("none"), True),
    "NF4": (lambda: quantized("nf4"), True),
    "fp8": (lambda: quantized("fp8"), True),
    "all weights": (lambda: whole(adapted("llama")), False),
}


@pytest.mark.parametrize("kind", KEYED)
def test_a_sharded_model_has_the_key_and_the_values_of_a_whole_one(mesh: DeviceMesh, kind: str) -> None:
    """To the last bit, in float32. And a weight that changes by one bit is another model."""
    make, joins = KEYED[kind]
    model = make()
    known = reference_key(job(), model, 1.0)
    epochs = steps.epochs_of_pairs(steps.rows())
    wanted = scored_ahead(job(), model, epochs, [], None)
    other = sharded(copy.deepcopy(model), mesh, joins=joins)
    assert len(weight_digests(other)) == len(weight_digests(model))
    assert reference_key(job(), other, 1.0) == known
    found = scored_ahead(job(), other, epochs, [], None)
    assert np.array_equal(found.of_units, wanted.of_units)  # type: ignore[arg-type]
    assert not is_gathered(other)
    weight = next(p for p in other.parameters() if isinstance(p, DTensor) and p.numel() > 100)
    weight.to_local().view(torch.int32).view(-1)[3] ^= 1
    assert reference_key(job(), other, 1.0) != known


def test_weights_that_are_gathered_in_another_dtype_are_another_reference(mesh: DeviceMesh) -> None:
    """One process multiplies float32 norms, and the ranks bfloat16 ones."""
    model = whole(adapted("llama"))
    plan = replace(PLAN, compute="bfloat16", autocast=True)
    of_job = job()
    of_job.dtypes = plan
    known = reference_key(of_job, model, 1.0)
    shard(model, mesh, RankShards(0, 1, joins=False), plan)
    assert reference_key(of_job, model, 1.0) != known


def test_ranks_that_share_rows_have_a_key_of_their_own() -> None:
    model = adapted("llama")
    keys = [reference_key(job(), model, 1.0, shares=shares) for shares in (1, 2, 4)]
    assert len(set(keys)) == 3
