"""What a rank needs of weights that are spread over all of them (``launch.engine: fsdp``).

Each holds its part. While a layer computes, its weights are there whole, the next layer's are being put together, and
what came from the other ranks lies in a buffer; embedding and head are whole during a whole step. Where weights are
trained, the gradients of two layers are there, and what is being added up of them, in float32.
"""

from __future__ import annotations

from ftcli.facts.quantization import weight_bytes
from ftcli.preflight.memory.setup import Setup

#: Times that the bytes of a layer are there while one computes: its weights, the next one's, and the buffer which
#: these come from.
_LAYERS_AT_ONCE = 3
#: Bytes of a gradient while it is added up: its float32 form, and this rank's share of the sum.
_SUMMED_BYTES = 4


def outer_elements(setup: Setup) -> int:
    """Elements of embedding, head and last norm."""
    shape = setup.shape
    return shape.hidden_size * (shape.vocab_size * (1 if shape.tied else 2) + 1)


def part_bytes(setup: Setup, whole: int) -> int:
    """A rank's part of ``whole`` bytes of weights: what is left over of rows goes to the first ranks."""
    return -(-whole // setup.spread_over)


def put_together_bytes(setup: Setup, dequantized_layers: int) -> int:
    """Whole weights and their buffers at their most."""
    shape, trained = setup.shape, setup.recipe.lora is None
    element = setup.plan.compute_bytes if trained else setup.plan.parameter_bytes
    whole = weight_bytes(
        setup.recipe.quantization, shape, element, dequantized_layers=dequantized_layers, trained=trained
    )
    outer = outer_elements(setup) * element
    layer = (whole - outer) // shape.num_layers
    return outer + _LAYERS_AT_ONCE * layer


def summed_bytes(setup: Setup) -> tuple[int, int]:
    """Gradients of trained weights that are being added up: those of layers, of which one is added up while the next
    one's are made; and those of embedding and head, the last of a backward pass.
    """
    if setup.recipe.lora is not None:
        return 0, 0
    outer, element = outer_elements(setup), setup.plan.compute_bytes
    layer = (setup.shape.parameters - outer) // setup.shape.num_layers
    each = element + _SUMMED_BYTES + _SUMMED_BYTES // setup.spread_over
    return 2 * layer * each, outer * each
