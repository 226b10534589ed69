"""The kernels of a training step in their order, and what lies between them.

    python kernels/bench/timeline.py full short-2048 --out FOLDER

The cases are those of `steps.py`. Of the last two steps: how long kernels ran by name, between which of them nothing
ran, and into FOLDER/CASE.txt every kernel with its beginning, its length and its stream, in microseconds.
"""

from __future__ import annotations

import argparse
import gc
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from steps import CASES, bench, line


@dataclass(frozen=True)
class Ran:
    """A kernel, copy or fill: microseconds from the step's beginning, and how long."""

    name: str
    start: float
    us: float
    stream: int


def last_of(profile: Any, ms: float) -> list[Ran]:
    """What ran on the device in the last ``ms``, in order."""
    found = [e for e in profile.events() if e.device_type.name == "CUDA" and not e.is_user_annotation]
    begin = max(e.time_range.end for e in found) - ms * 1e3
    return sorted(
        (
            Ran(_short(e.name), e.time_range.start - begin, e.time_range.elapsed_us(), int(e.device_resource_id))
            for e in found
            if e.time_range.start >= begin
        ),
        key=lambda ran: ran.start,
    )


def gaps(ran: Sequence[Ran]) -> Counter[str]:
    """Microseconds in which nothing ran, by what ended before and what came then."""
    found: Counter[str] = Counter()
    reached, before = ran[0].start, ran[0].name
    for each in ran:
        if each.start > reached:
            found[f"{before} -> {each.name}"] += round(each.start - reached)
        if each.start + each.us >= reached:
            reached, before = each.start + each.us, each.name
    return found


def _short(name: str) -> str:
    """A kernel's name without what its templates were given; of a product the tile."""
    tile = re.search(r"(tilesize|\d{2,3}x\d{2,3}x?\d*)[^\s,]*", name)
    plain = re.sub(r"<.*", "", name.removeprefix("void "))
    return f"{plain[-60:]} {tile.group(0)[:40]}" if tile and tile.group(0) not in plain[-60:] else plain[-70:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="+", choices=list(CASES), metavar="CASE")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--rows", type=int, default=40)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    for name in given.cases:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            result = bench(replace(CASES[name], steps=given.steps))
            torch.cuda.synchronize()
        print(line(name, [result]), flush=True)
        ran = last_of(profile, 2 * result.measured.timing.step_ms)
        show(ran, given.rows)
        if given.out is not None:
            rows = "\n".join(f"{r.start:10.1f} {r.us:8.1f} {r.stream:3d} {r.name}" for r in ran)
            (given.out / f"{name}.txt").write_text(rows + "\n")
        del result, profile
        gc.collect()
        torch.cuda.empty_cache()


def show(ran: Sequence[Ran], rows: int) -> None:
    """Prints the lists."""
    by_name: Counter[str] = Counter()
    for each in ran:
        by_name[each.name] += each.us
    counts = Counter(each.name for each in ran)
    between = gaps(ran)
    span = max(r.start + r.us for r in ran) - ran[0].start
    print(f"{len(ran)} kernels, first to last {span / 1e3:.1f} ms, nothing runs in {between.total() / 1e3:.1f}")
    for name, us in by_name.most_common(rows):
        print(f"{us / 1e3:9.3f} ms {counts[name]:6d} x {us / counts[name]:9.1f} us  {name}")
    print("between:")
    for pair, us in between.most_common(12):
        print(f"{us / 1e3:9.3f} ms  {pair}")


if __name__ == "__main__":
    main()
