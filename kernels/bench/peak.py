"""What lies in a GPU's memory at the peak of a training step, by the line that has allocated it.

    python kernels/bench/peak.py nf4-2048 --steps 3

The case is one of `steps.py`. torch's allocator records every allocation with its stack from before the model is there;
the record is played again, and what is alive at the worst instant is listed by place, in MiB. Memory of the CUDA
graphs' pools counts as in use, and is listed apart: what the pools hold, and what of it was in use at the most.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from steps import CASES, bench, line

_MIB = 2**20
#: Events that the allocator keeps; a step of Llama-3.1-8B has some 7,000.
_EVENTS = 400_000
_OURS = ("/ftcli/", "/ftkernels/", "/bench/")


@dataclass
class Live:
    """What is allocated while a record is played: bytes by address, and the most there was."""

    blocks: dict[int, tuple[int, str]] = field(default_factory=dict)
    total: int = 0
    most: int = 0
    at_most: dict[int, tuple[int, str]] = field(default_factory=dict)

    def take(self, address: int, size: int, place: str) -> None:
        """An allocation."""
        self.blocks[address] = (size, place)
        self.total += size
        if self.total > self.most:
            self.most, self.at_most = self.total, {}

    def free(self, address: int) -> None:
        """What is alive at the most is noted when the first block of it goes."""
        if self.total == self.most and not self.at_most:
            self.at_most = dict(self.blocks)
        size, _ = self.blocks.pop(address, (0, ""))
        self.total -= size

    def by_place(self) -> Counter[str]:
        """Bytes at the worst instant by place."""
        found: Counter[str] = Counter()
        for size, place in (self.at_most or self.blocks).values():
            found[place] += size
        return found


def place_of(frames: Iterable[Mapping[str, Any]]) -> str:
    """The innermost lines that are ours, from the inside to the outside; else the innermost of all."""
    shown, first = [], ""
    for frame in frames:
        file, text = str(frame["filename"]), f"{str(frame['filename']).rsplit('/', 1)[-1]}:{frame['line']}"
        first = first or text
        if any(part in file for part in _OURS):
            shown.append(f"{text} {frame['name']}")
        if len(shown) == 3:
            break
    return " < ".join(shown) or first or "no stack"


def played(trace: Iterable[Mapping[str, Any]], pools: Sequence[tuple[int, int]], *, inside: bool) -> Live:
    """The record of what lies in ``pools``, ranges of addresses, or of all else."""
    live = Live()
    for event in trace:
        address = int(event["addr"])
        if any(start <= address < end for start, end in pools) is not inside:
            continue
        if event["action"] == "alloc":
            live.take(address, int(event["size"]), place_of(event.get("frames", ())))
        elif event["action"] == "free_requested":
            live.free(address)
    return live


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="+", choices=list(CASES), metavar="CASE")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--rows", type=int, default=25)
    given = parser.parse_args()
    for name in given.cases:
        torch.cuda.memory._record_memory_history("all", context="alloc", stacks="python", max_entries=_EVENTS)
        result = bench(replace(CASES[name], steps=given.steps))
        snapshot = torch.cuda.memory._snapshot()  # before garbage is collected: the graphs' pools are there still
        print(line(name, [result]), flush=True)
        torch.cuda.memory._record_memory_history(None)
        show(snapshot, given.rows)


def show(snapshot: Mapping[str, Any], rows: int) -> None:
    """Prints the lists of a snapshot."""
    trace = snapshot["device_traces"][0]
    owned = [s for s in snapshot["segments"] if tuple(s.get("segment_pool_id", (0, 0))) != (0, 0)]
    pools = [(int(s["address"]), int(s["address"]) + int(s["total_size"])) for s in owned]
    outside, inside = (played(trace, pools, inside=which) for which in (False, True))
    held = sum(end - start for start, end in pools)
    print(
        f"{len(trace)} events; outside of pools at most {outside.most / _MIB:.0f} MiB; pools {held / _MIB:.0f} MiB, of"
    )
    print(f"them in use at most {inside.most / _MIB:.0f}; segments {[s['total_size'] // _MIB for s in owned]}")
    for title, live in (("outside", outside), ("pools", inside)):
        print(f"{title}, MiB at the worst instant:")
        for place, size in live.by_place().most_common(rows):
            print(f"{size / _MIB:9.1f}  {place}")


if __name__ == "__main__":
    main()
