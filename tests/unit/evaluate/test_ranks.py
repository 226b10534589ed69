"""Generation with a model whose weights are sharded, by one rank alone: on what was gathered of them."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ftcli.generation.generator import unsharded_model
from ftcli.model.backbone import decoder_layers, head_of, hidden_states, logits_of, root_of, within_root
from ftcli.model.fsdp import RankShards, shard
from ftcli.model.shards import with_whole_weights
from tests.quantized import PLAN
from tests.unit.model.test_stack import adapted

IDS = torch.arange(3, 27)[None]


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    """A process group of this process alone."""
    with tempfile.TemporaryDirectory() as folder:
        store = dist.FileStore(str(Path(folder) / "store"), 1)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        yield DeviceMesh.from_group(dist.group.WORLD, "cpu")
        dist.destroy_process_group()


@torch.no_grad()
def logits(model: Any) -> Tensor:
    states = hidden_states(model, {"input_ids": IDS})
    return logits_of(model, head_of(model), states.tensor[0])


@pytest.mark.parametrize("merged_in", [None, torch.float32], ids=["adapters beside", "adapters merged"])
def test_what_was_gathered_answers_as_the_model_does_and_leaves_no_trace(
    mesh: DeviceMesh, merged_in: torch.dtype | None
) -> None:
    model = adapted("llama").eval()
    wanted = logits(model)
    sharded = copy.deepcopy(model)
    shard(sharded, mesh, RankShards(0, 1, joins=True), PLAN)

    def answered() -> Tensor:
        second = unsharded_model(sharded, merged_in)
        assert root_of(second) is None
        projection = next(iter(decoder_layers(second))).self_attn.q_proj  # type: ignore[union-attr]
        assert (type(projection) is nn.Linear) == (merged_in is not None)
        return logits(second)

    found = with_whole_weights(sharded, answered)
    assert torch.allclose(found, wanted, rtol=1e-4, atol=1e-5)
    assert torch.equal(found, wanted) == (merged_in is None)
    assert torch.equal(within_root(sharded, lambda: logits(sharded)), wanted)
