"""Tiles of the attention kernels: a short table by GPU generation and head size, and what fits in shared memory.

The entries marked measured come from one H200; the others are chosen so that accumulators stay in registers (checked
by compiling for the architecture) and are then cut by the shared memory of the device.
"""

from __future__ import annotations
