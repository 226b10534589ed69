"""What each rank has to say, on all of them: bytes, JSON, rows of numbers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from ftcli.run.process_group import RankGroup


def gather_bytes(group: RankGroup, where: str, mine: bytes) -> list[bytes]:
    """What each rank has, on all of them; called by all at the same place, whose first seven letters name it.

    Raises PeerFailed or RankLost as :meth:`ftcli.run.process_group.RankGroup.agree`.
    """
    sizes = [numbers[0] for numbers in group.agree(where, [len(mine)])]
    padded = torch.zeros(max(*sizes, 1), dtype=torch.uint8)
    padded[: len(mine)] = torch.from_numpy(np.frombuffer(mine, np.uint8).copy())
    found = group.all_gather(padded)
    return [row[:size].numpy().tobytes() for row, size in zip(found, sizes, strict=True)]


def gather_json(group: RankGroup, where: str, mine: Any) -> list[Any]:
    """As :func:`gather_bytes`, for what JSON can say; floats come as they are, NaN included."""
    return [json.loads(said) for said in gather_bytes(group, where, json.dumps(mine).encode())]


def of_leader(group: RankGroup | None, where: str, mine: Mapping[str, float]) -> Mapping[str, float]:
    """Rank 0's numbers, on all ranks."""
    if group is None:
        return mine
    found: Mapping[str, float] = gather_json(group, where, dict(mine))[0]
    return found


def gather_rows(group: RankGroup, where: str, mine: Tensor) -> Tensor:
    """All ranks' rows of a float32 matrix, in order, on the device of ``mine``."""
    told = gather_bytes(group, where, mine.cpu().float().contiguous().numpy().tobytes())
    parts = [torch.from_numpy(np.frombuffer(said, np.float32).copy()).view(-1, mine.shape[1]) for said in told]
    return torch.cat(parts).to(mine.device)
