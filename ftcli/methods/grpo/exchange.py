"""What ranks tell each other about rollouts: bytes, JSON, completions and tensors, gathered on all of them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ftcli.generation.requests import Completion

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


def gather_completions(group: RankGroup | None, mine: Sequence[Completion]) -> list[tuple[list[int], list[float]]]:
    """Tokens of all ranks' completions and what is known of their log-probabilities, in order."""
    found = [(one.tokens, one.logprobs) for one in mine]
    if group is None:
        return found
    return [one for said in gather_bytes(group, "rollouts", _packed(found)) for one in _unpacked(said)]


def gather_rows(group: RankGroup, where: str, mine: Tensor) -> Tensor:
    """All ranks' rows of a float32 matrix, in order, on the device of ``mine``."""
    told = gather_bytes(group, where, mine.cpu().float().contiguous().numpy().tobytes())
    parts = [torch.from_numpy(np.frombuffer(said, np.float32).copy()).view(-1, mine.shape[1]) for said in told]
    return torch.cat(parts).to(mine.device)


def _packed(completions: Sequence[tuple[list[int], list[float]]]) -> bytes:
    """Their number, the numbers of tokens and of log-probabilities of each, then all of both."""
    sizes = [len(completions), *(len(each) for one in completions for each in one)]
    tokens = [token for one, _ in completions for token in one]
    known = [number for _, one in completions for number in one]
    return np.array([*sizes, *tokens], np.int64).tobytes() + np.array(known, np.float64).tobytes()


def _unpacked(said: bytes) -> list[tuple[list[int], list[float]]]:
    whole = np.frombuffer(said, np.int64)
    count = int(whole[0])
    sizes = whole[1 : 1 + 2 * count].reshape(count, 2)
    start = 1 + 2 * count
    tokens = whole[start : start + int(sizes[:, 0].sum())]
    known = np.frombuffer(said, np.float64)[start + len(tokens) :]
    ends = sizes.cumsum(0)
    return [
        (tokens[end[0] - size[0] : end[0]].tolist(), known[end[1] - size[1] : end[1]].tolist())
        for size, end in zip(sizes, ends, strict=True)
    ]
