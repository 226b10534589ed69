"""The models whose shapes are timed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from ftkernels.limits import Activation


@dataclass(frozen=True)
class Shape:
    """One decoder layer and its head, and how many tokens go through it."""

    name: str
    hidden: int
    inner: int
    q_heads: int
    k_heads: int
    head_dim: int
    vocabulary: int
    activation: Activation
    form: Literal["llama", "gemma"]
    softcap: float
    layers: int
    batch: int = 2
    seq_len: int = 4096

    @property
    def tokens(self) -> int:
        """Rows of every matrix."""
        return self.batch * self.seq_len

    def tiny(self) -> Shape:
        """The same structure, small enough for a CPU."""
        return replace(self, hidden=64, inner=96, q_heads=4, k_heads=2, head_dim=16, vocabulary=300, batch=1, seq_len=8)


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("llama3.1-8b", 4096, 14336, 32, 8, 128, 128256, "silu", "llama", 0.0, 32),
        Shape("gemma2-9b", 3584, 14336, 16, 8, 256, 256000, "gelu_tanh", "gemma", 30.0, 42),
    )
}
