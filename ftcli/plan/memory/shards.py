"""Memory of a rank whose weights are sharded over all ranks (``launch.engine: fsdp``).

Each holds its part. While a layer computes, its weights are there whole, the next layer's are being gathered, and what
came from the other ranks lies in a buffer; embedding and head are whole until the last layer's backward is over. Where
weights are trained, the gradients of two layers are there, and what is being reduce-scattered of them, in float32.
"""

from __future__ import annotations

from ftcli.plan.quantization import weight_bytes
from ftcli.plan.run import RunPlan

#: Times that the bytes of a layer are there while one computes: its weights, the next one's, and the buffer which
#: these come from.
LAYERS_AT_ONCE = 3
#: Bytes of a gradient in a reduce-scatter: its float32 form, and this rank's share of the sum.
SUMMED_BYTES = 4


def outer_elements(plan: RunPlan) -> int:
    """Elements of embedding, head, last norm, and of what makes layers' own inputs."""
    shape = plan.shape
    return shape.embedding_parameters + shape.hidden_size


def shard_bytes(plan: RunPlan, whole: int) -> int:
    """A rank's part of ``whole`` bytes of weights: what is left over of rows goes to the first ranks."""
    return -(-whole // plan.shard_size)


def gathered_bytes(plan: RunPlan, dequantized_layers: int, *, whole: bool = False) -> int:
    """Gathered weights and their buffers at their most: layer by layer, or of the ``whole`` model at once."""
    shape, trained = plan.shape, plan.recipe.lora is None
    element = plan.dtypes.compute_bytes if trained else plan.dtypes.parameter_bytes
    every = weight_bytes(
        plan.recipe.quantization, shape, element, dequantized_layers=dequantized_layers, trained=trained
    )
    outer = outer_elements(plan) * element
    layer = (every - outer) // shape.num_layers
    return every + layer if whole else outer + LAYERS_AT_ONCE * layer


def shards_trained(plan: RunPlan) -> bool:
    """True if the sharded weights are trained."""
    return plan.shard_size > 1 and plan.recipe.lora is None


def reduced_bytes(plan: RunPlan) -> int:
    """Gradients of trained layers in their reduce-scatter: one's while the next one's are made."""
    layer, each = _layer_elements(plan), plan.dtypes.compute_bytes + SUMMED_BYTES
    return 2 * layer * (each + SUMMED_BYTES // plan.shard_size)


def last_bytes(plan: RunPlan, workspace: int) -> int:
    """Bytes at the end of a backward pass beside the ranks' own parts, the gradients included.

    Either the first layer's backward with its ``workspace``, while embedding and head are whole, the head has its
    gradient, and those of the layer are reduce-scattered; or those of embedding and head are, of which the whole
    weights are gone by then. These are in the gradients only afterwards, unless they are added to earlier ones.
    """
    outer, layer, element = outer_elements(plan), _layer_elements(plan), plan.dtypes.compute_bytes
    own = SUMMED_BYTES * outer // plan.shard_size
    there_before = plan.recipe.train.gradient_accumulation_steps > 1
    head = plan.shape.hidden_size * plan.shape.vocab_size
    summed = layer * (element + SUMMED_BYTES + SUMMED_BYTES // plan.shard_size)
    first_layer = element * (outer + layer + head) + summed + workspace - (0 if there_before else own)
    return max(first_layer, outer * (element + SUMMED_BYTES) + (own if there_before else 0))


def _layer_elements(plan: RunPlan) -> int:
    return (plan.shape.parameters - outer_elements(plan)) // plan.shape.num_layers
