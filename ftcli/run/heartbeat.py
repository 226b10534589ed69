"""Signs of life: each rank of a run says every second that it lives and where it is, from a thread of its own."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ftcli.ranks import Place

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Seconds: to find the others; until a wait is told; without a sign of life until a rank counts as lost; and that
    a rank that lives may be late.
    """

    meeting: float = 600.0
    told: float = 10.0
    silent: float = 60.0
    late: float = 7200.0


class Heartbeat(threading.Thread):
    """Says that this rank lives, and hears when the others have said so last.

    Attributes:
        at: Where this rank is, in words.
    """

    def __init__(self, store: Store, place: Place) -> None:
        super().__init__(daemon=True, name="signs of life")
        self._store, self._place = store, place
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._others = [rank for rank in range(place.size) if rank != place.rank]
        self._heard: dict[int, tuple[bytes, float]] = {}
        self._listening_since = time.monotonic()
        self.at = "starting"

    def run(self) -> None:
        """Says it and listens, every second."""
        count = 0
        while not self._over.is_set():
            count += 1
            with contextlib.suppress(RuntimeError):  # rank 0, which holds what is said, may be gone: its silence tells
                self._store.set(f"sign/{self._place.rank}", f"{count} {self.at}")
                self._listen()
            self._over.wait(_SECONDS)

    def _listen(self) -> None:
        now = time.monotonic()
        for rank in self._others:
            if self._store.check([f"sign/{rank}"]):
                said = self._store.get(f"sign/{rank}")
                with self._lock:
                    if self._heard.get(rank, (b"", 0.0))[0] != said:
                        self._heard[rank] = (said, now)

    def stop(self) -> None:
        """This rank says nothing more."""
        self._over.set()
        self.join(5)

    def silent_for(self) -> Mapping[int, float]:
        """Seconds since each other rank was heard last; since this one began to listen where it never was."""
        now = time.monotonic()
        with self._lock:
            return {rank: now - self._heard.get(rank, (b"", self._listening_since))[1] for rank in self._others}

    def described(self, ranks: Sequence[int], silent: Mapping[int, float]) -> str:
        """``rank 1 (at: step begins)``, or how long it has been silent."""
        with self._lock:
            places = {rank: self._heard[rank][0].decode().partition(" ")[2] for rank in ranks if rank in self._heard}
        return ", ".join(
            f"rank {rank} ("
            + (f"no sign of life for {silent[rank]:.0f} s" if silent[rank] > 3 else f"at: {places.get(rank, '?')}")
            + ")"
            for rank in ranks
        )
