"""Optimizers: what ``train.optim`` may name. transformers builds most of them by the same name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from ftcli.tables import Package


@dataclass(frozen=True, slots=True)
class Optimizer:
    """One optimizer.

    Attributes:
        state: How the state is laid out, if not ``state_bytes`` for each parameter. ``factored``: one float32 sum for
            each row and each column of a matrix. ``blockwise``: in 8 bits where a tensor has 4096 elements or more and
            is no embedding. ``momentum``: one float32 moment for each element of a hidden matrix, two for all else.
        paged: State of large tensors lies in managed memory, which the driver moves to the host when the GPU is full.
        workspace: What a step allocates: ``copy`` of all parameters in float32 where they are updated at once (on a
            GPU), ``largest`` matrix in float32 and four times in bfloat16, or nothing to speak of.
        reads: Which settings of the section ``train`` it reads, of those that not every optimizer reads.
        schedule_free: It averages the weights in place of a schedule: evaluated and saved is the average.
        warms_up: It reads ``warmup_steps`` itself.
        rounds: How it can round updates of parameters in bfloat16: ``nearest``, ``stochastic``. What is listed computes
            them in float32, and keeps its state as ``state`` says. Without any, it trains float32 parameters alone.
        build_own: Code: a class of ours that takes its place in full fine-tuning on the kernels, and for parameters
            in bfloat16; made with the keyword argument ``rounding``. None: it is itself everywhere.
        on_gpu: The row that takes its place on a GPU where adapters are trained on the kernels: the same formula in
            fewer passes. None: it is itself.
        build: Code: a class of optimizer that transformers does not have, made from parameter groups and keyword
            arguments; ``hidden`` in a group says that it holds hidden matrices. None: transformers builds it.
    """

    about: str = ""
    state_bytes: int = 0
    state: Literal["whole", "factored", "blockwise", "momentum"] = "whole"
    paged: bool = False
    workspace: Literal["none", "copy", "largest"] = "none"
    reads: tuple[str, ...] = ()
    package: Package | None = None
    schedule_free: bool = False
    warms_up: bool = False
    rounds: tuple[Literal["nearest", "stochastic"], ...] = ()
    build_own: str | None = None
    on_gpu: str | None = None
    build: str | None = None


_BOTH: tuple[Literal["nearest", "stochastic"], ...] = ("nearest", "stochastic")
_OWN, _OWN_8BIT = "ftcli.train.adamw:AdamW", "ftcli.train.adamw:AdamW8bit"
_ADAM = ("adam_beta1", "adam_beta2", "adam_epsilon")
_BETAS = _ADAM[:2]
_BITSANDBYTES = Package(
    "bitsandbytes", "ftcli[bitsandbytes]", "optimizers with 8-bit and paged state; NF4 does not need it"
)
_SCHEDULE_FREE = Package("schedulefree", "ftcli[schedulefree]", "schedule-free optimizers")

TABLE: Mapping[str, Optimizer] = {
    "adamw_torch": Optimizer(
        "AdamW.", state_bytes=8, workspace="copy", reads=_ADAM, rounds=_BOTH, build_own=_OWN,
        on_gpu="adamw_torch_fused",
    ),
    "adamw_torch_fused": Optimizer(
        "AdamW in one kernel.", state_bytes=8, reads=_ADAM, rounds=_BOTH, build_own=_OWN
    ),
    "adamw_8bit": Optimizer(
        "AdamW with its state in 8 bits.",
        state_bytes=8, state="blockwise", reads=_ADAM, rounds=_BOTH[:1], package=_BITSANDBYTES,
        build_own=_OWN_8BIT,
    ),
    "paged_adamw_8bit": Optimizer(
        "AdamW with its state in 8 bits; that of large tensors moves to the host when the GPU is full.",
        state_bytes=8, state="blockwise", paged=True, reads=_ADAM, rounds=_BOTH[:1], package=_BITSANDBYTES,
    ),
    "paged_adamw_32bit": Optimizer(
        "AdamW; the state of large tensors moves to the host when the GPU is full.",
        state_bytes=8, paged=True, reads=_ADAM, rounds=_BOTH[:1], package=_BITSANDBYTES,
    ),
    "lion_32bit": Optimizer("Lion.", state_bytes=4, reads=_BETAS, package=_BITSANDBYTES),
    "lion_8bit": Optimizer(
        "Lion with its state in 8 bits.", state_bytes=4, state="blockwise", reads=_BETAS, package=_BITSANDBYTES
    ),
    "paged_lion_8bit": Optimizer(
        "Lion with its state in 8 bits; that of large tensors moves to the host when the GPU is full.",
        state_bytes=4, state="blockwise", paged=True, reads=_BETAS, package=_BITSANDBYTES,
    ),
    "muon": Optimizer(
        "Muon for the matrices of the layers (or their adapters), scaled so that AdamW's learning rates suit it; "
        "AdamW for all else.",
        state_bytes=8, state="momentum", workspace="largest", reads=_ADAM,
        build="ftcli.train.adamw:MuonWithAdamW",
    ),
    "schedule_free_adamw": Optimizer(
        "AdamW that averages the weights in place of a schedule.",
        state_bytes=8, workspace="copy", reads=_ADAM, schedule_free=True, warms_up=True, package=_SCHEDULE_FREE,
    ),
    "schedule_free_radam": Optimizer(
        "RAdam that averages the weights in place of a schedule and needs no warm-up.",
        state_bytes=8, workspace="copy", reads=_ADAM, schedule_free=True, package=_SCHEDULE_FREE,
    ),
    "schedule_free_sgd": Optimizer(
        "SGD that averages the weights in place of a schedule.",
        state_bytes=4, schedule_free=True, warms_up=True, package=_SCHEDULE_FREE,
    ),
    "sgd": Optimizer("SGD without momentum."),
    "adafactor": Optimizer("Adafactor at the recipe's learning rate.", state="factored"),
}  # fmt: skip


def names() -> tuple[str, ...]:
    return tuple(TABLE)


def row(name: str) -> Optimizer:
    return TABLE[name]


def optimizer_settings() -> tuple[str, ...]:
    """Every setting that some optimizer reads, in the order of the table."""
    return tuple(dict.fromkeys(setting for each in TABLE.values() for setting in each.reads))
