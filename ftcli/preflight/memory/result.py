"""What a run is estimated to need, by part and by phase; :mod:`ftcli.preflight.memory.estimate` makes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ftcli.preflight.memory.activations import Offloaded


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Bytes by part and by phase.

    ``parts`` maps each part's name to bytes. ``phases`` maps each phase to the names of the parts it holds at once.
    ``peak`` is the phase that needs most and ``total_bytes`` what it needs. ``pinned_host_bytes`` are on the host, and
    in none of these; ``offloaded`` says of what (None: nothing is sent there). ``kept_layers`` of the decoder layers
    hold the numbers of their quantised weights in full.
    """

    parts: Mapping[str, int]
    phases: Mapping[str, tuple[str, ...]]
    pinned_host_bytes: int = 0
    offloaded: Offloaded | None = None
    kept_layers: int = 0

    def phase_bytes(self, phase: str) -> int:
        """Bytes that are needed at once in a phase."""
        return sum(self.parts[name] for name in self.phases[phase])

    @property
    def peak(self) -> str:
        """Name of the phase that needs most."""
        return max(self.phases, key=self.phase_bytes)

    @property
    def total_bytes(self) -> int:
        """Bytes that the run needs at its peak."""
        return self.phase_bytes(self.peak)

    @property
    def allocated_bytes(self) -> int:
        """The same without what CUDA takes itself: what torch's allocator counts at its peak."""
        return self.total_bytes - self.parts["runtime"]

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON; all sizes in bytes."""
        return {
            "total_bytes": self.total_bytes,
            "allocated_bytes": self.allocated_bytes,
            "peak": self.peak,
            "parts": dict(self.parts),
            "phases": {phase: self.phase_bytes(phase) for phase in self.phases},
            "peak_parts": list(self.phases[self.peak]),
            "pinned_host_bytes": self.pinned_host_bytes,
            "offloaded": self.offloaded,
        }
