"""Decides whether the decoder layers of a run are launched as CUDA graphs, for preflight and for the trainer."""

from __future__ import annotations

from ftcli.config.recipe import Recipe
from ftcli.facts.flops import step_flops
from ftcli.facts.model import ModelFacts
from ftcli.plan.execution import Execution, ExecutionPart
from ftcli.tables import policies

#: Operations of one layer in a micro-batch above which the GPU takes longer than the host needs to launch its kernels:
#: graphs would save no time, and keep memory to themselves. The host takes some 6 ms for a layer's step; at 700
#: TFLOP/s, an H200's rate, that is 4e12 operations. The rest is room for slower hosts.
MOST_OPERATIONS = 6e12


def most_graph_tokens(recipe: Recipe, facts: ModelFacts) -> int | None:
    """Tokens of the largest micro-batch whose launches the host is too slow for; None where the shape is not known."""
    train = recipe.train
    flops = step_flops(
        facts,
        recipe.lora,
        seq_len=recipe.data.max_seq_len,
        gradient_checkpointing=train.checkpointing,
        uncheckpointed_layers=train.uncheckpointed_layers,
    )
    if flops is None or facts.shape is None:
        return None
    return int(MOST_OPERATIONS * facts.shape.num_layers / flops.layers)


def why_no_graphs(recipe: Recipe, facts: ModelFacts, execution: Execution, *, tokens: int) -> str | None:
    """The reason why a training run does without graphs, as one clause; None if its small micro-batches have them.

    Args:
        execution: How its layers are computed.
        tokens: Tokens of a micro-batch at its largest.
    """
    train, lora = recipe.train, recipe.lora
    if execution.layers.code != "fused":
        return "the layers are not on Triton kernels"
    if recipe.launch.is_sharded:
        return "the weights are sharded over ranks, which all-gather them layer by layer"
    if not train.cuda_graphs:
        return "train.cuda_graphs: false"
    if policies.row(train.checkpointing).on_host:
        return f"gradient_checkpointing: {train.checkpointing} waits for copies to the host"
    if recipe.launch.context_parallel_size > 1:
        return "ranks share rows, and exchange heads in each layer"
    if lora is None:
        return "the gradients of all weights would be held three times"
    if lora.dropout > 0 or facts.drops_attention or facts.drops_residual:
        return "dropout draws different numbers in each step"
    most = most_graph_tokens(recipe, facts)
    if most is None:
        return "the size of the layers is not known"
    # Rows that are neither packed nor padded make micro-batches of all sizes, in few shapes.
    if tokens > most and (recipe.data.packing or execution.batches.layout == "padded"):
        return f"a micro-batch of {tokens:,} tokens keeps the GPU busy"
    return None


def graphs_part(reason: str | None, tokens: int) -> ExecutionPart:
    """The line of `ftcli check` about how kernels are launched, from what :func:`why_no_graphs` said, and from the most
    tokens that a graph takes.
    """
    if reason is None:
        return ExecutionPart(
            "launches", "cuda graphs", f"the host is slower than the GPU with up to {tokens:,} tokens at a time"
        )
    return ExecutionPart("launches", "one by one", reason)
