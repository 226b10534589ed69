"""Whether the decoder layers of a run are launched as CUDA graphs. Preflight asks, and the trainer."""

from __future__ import annotations

from ftcli.config import Recipe
from ftcli.facts.execution import LayerChoice, Part
from ftcli.facts.flops import step_flops
from ftcli.facts.model import ModelFacts
from ftcli.tables import policies

#: Operations of one layer in a micro-batch above which the GPU takes longer than the host needs to launch its kernels:
#: graphs would save no time, and keep memory to themselves. The host takes some 6 ms for a layer's step; at 700
#: TFLOP/s, an H200's rate, that is 4e12 operations. The rest is room for slower hosts.
MOST_OPERATIONS = 6e12


def why_no_graphs(recipe: Recipe, facts: ModelFacts, layers: LayerChoice, *, tokens: int) -> str | None:
    """Why a training run does without graphs, as one clause; None where it has them.

    Args:
        layers: What computes its layers.
        tokens: Tokens of a micro-batch at its largest.
    """
    train, lora = recipe.train, recipe.lora
    if layers.code != "fused":
        return "the layers are not on Triton kernels"
    if not train.cuda_graphs:
        return "train.cuda_graphs: false"
    if policies.row(train.checkpointing).on_host:
        return f"gradient_checkpointing: {train.checkpointing} waits for copies to the host"
    if (lora is not None and lora.dropout > 0) or facts.language.get("attention_dropout"):
        return "dropout draws other numbers in each step"
    flops = step_flops(
        facts,
        lora,
        seq_len=recipe.data.max_seq_len,
        gradient_checkpointing=train.checkpointing,
        uncheckpointed_layers=train.uncheckpointed_layers,
    )
    if flops is None or facts.shape is None:
        return "the size of the layers is not known"
    operations = (flops.total - flops.head) * tokens / facts.shape.num_layers
    if operations > MOST_OPERATIONS:
        return f"a micro-batch of {tokens:,} tokens keeps the GPU busy"
    return None


def graphs_part(reason: str | None, tokens: int) -> Part:
    """The line of `ftcli check` about how kernels are launched, from what :func:`why_no_graphs` said."""
    if reason is None:
        return Part(
            "launches", "cuda graphs", f"the host is slower than the GPU with at most {tokens:,} tokens at a time"
        )
    return Part("launches", "one by one", reason)
