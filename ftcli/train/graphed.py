"""Puts the decoder layers of a job's model into CUDA graphs, or says why not."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ftcli.job import Job
from ftcli.model.backbone import root_of
from ftcli.model.cuda_graphs import GraphRunner
from ftcli.model.fused import DecoderStack, stack_of

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel


def why_not_graphed(job: Job, model: PreTrainedModel | PeftModel) -> str | None:
    """The reason why the layers of ``model`` are trained without CUDA graphs, as one clause; None if they have them."""
    reason: str | None = job.plan.why_no_graphs
    if reason is not None:
        return reason
    stack = stack_of(model, getattr(torch, job.dtypes.compute))
    return stack if isinstance(stack, str) else None


def use_stack(job: Job, model: PreTrainedModel | PeftModel) -> tuple[DecoderStack | None, GraphRunner | None]:
    """The model's layers as one function, where all are on the kernels, and the graphs that run them, if there are.

    Layers whose weights are sharded over ranks are called one by one, since each has its weights in its own call alone.
    """
    if root_of(model) is not None:
        return None, None
    stack = stack_of(model, getattr(torch, job.dtypes.compute))
    if isinstance(stack, str):
        return None, None
    if why_not_graphed(job, model):
        return stack, None
    memory = job.report.memory
    pool = 0 if memory is None else memory.graph_pool_bytes
    stack.runner = runner = GraphRunner(stack, job.plan.graph_tokens, job.reporter, pool_bytes=pool)
    return stack, runner
