"""The kernels' limits and allocations: the rules that need neither torch nor triton.

The kernels call these rules when they run. A program that plans a run can call them on a machine without torch or GPU.

Each ``why_no_...`` returns the reason for a refusal as one clause, or None where the kernels run. Dtypes are torch's
names without ``torch.``, such as ``bfloat16``. Outside CUDA the kernels run in Triton's interpreter only, which has no
tensor cores and no limit on shared memory, so the rules about those two do not apply there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

#: Forms of RMSNorm: ``ftkernels.rms_norm`` has the formulas.
NormForm = Literal["llama", "gemma", "plain"]
#: What one norm of queries or keys is taken over: each head, or all heads of a token together.
NormSpan = Literal["head", "width"]
#: Features that a rotation turns together: ``ftkernels.rope`` has the formulas.
RopeLayout = Literal["halves", "pairs"]
#: Activations of a gated unit: ``ftkernels.glu`` has the formulas.
Activation = Literal["silu", "gelu_tanh", "gelu", "relu2"]
#: Gated units of experts: act(gate) * up of an activation, or ``ftkernels.primitives.gated_unit``'s clamped form.
Unit = Literal[Activation, "clamped"]
#: Rows of the table of attention tiles, ``ftkernels.attention_config``.
Generation = Literal["hopper", "blackwell", "ampere", "small", "interpreter"]

#: Lowest compute capability for elementwise and row-wise kernels.
ELEMENTWISE_CAPABILITY = (7, 0)
#: Lowest one for matrix products inside kernels: below it Triton emits no tensor-core code.
PRODUCTS_CAPABILITY = (8, 0)
#: Lowest one for products of float8 operands.
FLOAT8_CAPABILITY = (8, 9)

#: Shared memory that the smallest tiles of the attention kernels need, in bytes a block.
ATTENTION_SHARED_MEMORY = 99 * 1024
#: The attention kernels take head sizes that are multiples of this ...
HEAD_SIZE_MULTIPLE = 16
#: ... up to this.
LARGEST_HEAD_SIZE = 512

#: Features of keys and of values that the kernels of the delta rule take, and widths of the filter in front of it. With
#: keys of 16 in float32 the gradients' kernels read beyond shared memory on Hopper: Triton's ptxas, 12.8, leaves
#: registers unwritten (``unwritten`` in tests/ops/compile_offline.py).
DELTA_KEYS, DELTA_VALUES = (32, 64, 128), (16, 32, 64, 128)
FILTER_WIDTHS = range(2, 9)

#: Positions of a page of cached keys and values: a tile of the kernel that attends to them.
CACHE_PAGE = 64

#: Shared memory of the kernel that attends to float32 pages of more than 128 features, and of more than 256, in bytes a
#: block.
_DECODE_WIDE_FLOAT32, _DECODE_WIDEST_FLOAT32 = 144 * 1024, 160 * 1024

#: Adapters of smaller ranks are padded to this one.
SMALLEST_PACKED_RANK = 16
#: Elementwise kernels keep tiles of (rows, rank) and (columns, rank) beside their data. Above this padded rank,
#: products of their own are faster.
LARGEST_FUSED_RANK = 64

#: One chunk's logits stay below this. The products of a few rows fill the last wave of tiles badly; with a frozen head
#: those of so many rows take hardly longer than larger ones (2% for Llama-3.1 on an H200), and of half as many 5% more.
#: A chunk on a GPU has a quarter of the tokens, but no fewer than the first, and no more than the second or than
#: half of the workspace holds.
LOSS_WORKSPACE_BYTES = 2**29
LOSS_ROWS = (512, 1024)
#: Without the kernel, so many float32 copies of a chunk's logits are alive at once; with it, none.
LOSS_TORCH_COPIES = 4
#: A chunk of the loss has a multiple of so many rows.
LOSS_ROW_MULTIPLE = 256
#: The gradient of the head accumulates in float32. Off the GPU so many rows of the vocabulary at a time, so that the
#: temporary stays small.
LOSS_VOCABULARY_SLAB = 16384

#: Log-probabilities go over tiles of so many rows and at most so many entries of the vocabulary: in float32 128 MiB,
#: whatever the vocabulary. A row of a tile is held in registers.
LOG_PROB_ROWS, LOG_PROB_COLUMNS = 2048, 16384

#: Kernels that hold whole rows in registers do so up to this width. Norms of wider rows take the torch form; what
#: rounds rows reads them twice.
WIDEST_ROW = 32768

#: Elements that share a scale in an NF4 weight, and scales that share one of their own under double quantization.
NF4_BLOCK_SIZE = 64
NF4_NESTED_BLOCK_SIZE = 256

_ATTENTION_DTYPES = ("bfloat16", "float16", "float32")
_HALF_PRECISION = ("bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU's facts that the rules depend on.

    Attributes:
        capability: CUDA compute capability (major, minor); None outside CUDA.
        shared_memory_bytes: the most shared memory that one block can have; 0 outside CUDA.
    """

    capability: tuple[int, int] | None
    shared_memory_bytes: int


def why_no_elementwise(gpu: Gpu) -> str | None:
    """The reason why the elementwise and row-wise kernels cannot run, or None."""
    if gpu.capability is None or gpu.capability >= ELEMENTWISE_CAPABILITY:
        return None
    needed, found = capability_text(ELEMENTWISE_CAPABILITY), capability_text(gpu.capability)
    return f"the kernels need compute capability {needed}, not {found}"


def why_no_attention(gpu: Gpu, dtype: str, head_size: int) -> str | None:
    """The reason why the attention kernels cannot run on tensors of ``dtype``, or None."""
    if dtype not in _ATTENTION_DTYPES:
        return f"the attention kernels take bfloat16, float16 and float32, not {dtype}"
    if head_size % HEAD_SIZE_MULTIPLE or not 0 < head_size <= LARGEST_HEAD_SIZE:
        return (
            f"the attention kernels take head sizes that are multiples of {HEAD_SIZE_MULTIPLE} up to "
            f"{LARGEST_HEAD_SIZE}, not {head_size}"
        )
    below = why_no_tensor_cores(gpu)
    if below is not None:
        return f"{below}; the attention kernels need {capability_text(PRODUCTS_CAPABILITY)}"
    if attention_generation(gpu) is None:
        needed, available = ATTENTION_SHARED_MEMORY >> 10, gpu.shared_memory_bytes >> 10
        return f"the attention kernels need {needed} KiB of shared memory a block, this GPU has {available} KiB"
    return None


def why_no_delta_rule(gpu: Gpu, key_size: int, value_size: int) -> str | None:
    """The reason why the kernels of the delta rule cannot run on heads of these sizes, or None."""
    for what, sizes, size in (("keys", DELTA_KEYS, key_size), ("values", DELTA_VALUES, value_size)):
        if size not in sizes:
            taken = ", ".join(map(str, sizes[:-1]))
            return f"the delta rule's kernels take {what} of {taken} and {sizes[-1]} features, not of {size}"
    below = why_no_tensor_cores(gpu)
    return None if below is None else f"{below}; the delta rule's kernels need {capability_text(PRODUCTS_CAPABILITY)}"


def why_no_decode_attention(gpu: Gpu, dtype: str, head_size: int) -> str | None:
    """The reason why the kernels that attend to cached keys and values of ``dtype`` cannot run, or None."""
    if gpu.capability is None:
        return None
    below = why_no_tensor_cores(gpu)
    if below is not None:
        return f"{below}; attention to cached keys needs {capability_text(PRODUCTS_CAPABILITY)}"
    needed = ATTENTION_SHARED_MEMORY
    if dtype == "float32" and head_size > 128:
        needed = _DECODE_WIDE_FLOAT32 if head_size <= 256 else _DECODE_WIDEST_FLOAT32
    if gpu.shared_memory_bytes >= needed:
        return None
    what = f"attention to cached {dtype} keys of {head_size} features"
    return f"{what} needs {needed >> 10} KiB of shared memory a block, this GPU has {gpu.shared_memory_bytes >> 10} KiB"


def attention_generation(gpu: Gpu) -> Generation | None:
    """The GPU's row in the table of attention tiles; None where its shared memory is too small for every row."""
    if gpu.capability is None:
        return "interpreter"
    if gpu.shared_memory_bytes >= 227 * 1024 and gpu.capability[0] in (9, 10):
        return "hopper" if gpu.capability[0] == 9 else "blackwell"
    if gpu.shared_memory_bytes >= 160 * 1024:
        return "ampere"
    return "small" if gpu.shared_memory_bytes >= ATTENTION_SHARED_MEMORY else None


def why_no_products(gpu: Gpu, dtype: str) -> str | None:
    """The reason why small products do not ride in the elementwise kernels, or None.

    In float32 they would take plain arithmetic, since they are exact, and spill registers.
    """
    if dtype not in _HALF_PRECISION:
        return f"{dtype} products in a kernel would not use the tensor cores"
    return why_no_tensor_cores(gpu)


def why_no_fp8(gpu: Gpu, dtype: str) -> str | None:
    """The reason why float8 operands are not multiplied as they are for a result in ``dtype``, or None."""
    if gpu.capability is None:
        return "outside CUDA there are no fp8 instructions"
    if gpu.capability < FLOAT8_CAPABILITY:
        return f"capability {capability_text(gpu.capability)} has no fp8 instructions"
    return None if dtype == "bfloat16" else f"fp8 products are written in bfloat16, not {dtype}"


def why_no_int8(gpu: Gpu, dtype: str) -> str | None:
    """The reason why int8 operands are not multiplied on tensor cores, or None. Every result ``dtype`` will do."""
    if gpu.capability is None:
        return "outside CUDA int8 values are multiplied in float32"
    return why_no_tensor_cores(gpu)


def packed_rank(rank: int) -> int:
    """Columns that adapters of at most this rank take in the kernels' layout: a power of two; 0 without adapters."""
    return max(SMALLEST_PACKED_RANK, 1 << (rank - 1).bit_length()) if rank else 0


def loss_rows(tokens: int, vocabulary: int, element_bytes: int, *, on_gpu: bool, trained_width: int = 0) -> int:
    """Rows of one chunk of the loss: equal chunks whose logits fit the workspace, rounded up to the row multiple.

    ``element_bytes`` is the size of one logit. ``trained_width``: the columns of a head that is trained, whose gradient
    in float32 each chunk but the first reads and writes: there the logits may take as much memory as that.
    """
    most = _most_rows(tokens, vocabulary, element_bytes, on_gpu=on_gpu, trained_width=trained_width)
    rows = _equal_rows(max(tokens, 1), most)
    return -(-rows // LOSS_ROW_MULTIPLE) * LOSS_ROW_MULTIPLE


def loss_bytes(tokens: int, vocabulary: int, element_bytes: int, *, on_gpu: bool, trained_width: int = 0) -> int:
    """Estimated workspace of the loss over ``tokens`` labelled rows: one buffer of logits, which all chunks share, and
    off the GPU float32 copies of it. Arguments as :func:`loss_rows`.
    """
    most = _most_rows(tokens, vocabulary, element_bytes, on_gpu=on_gpu, trained_width=trained_width)
    buffer = min(tokens, _equal_rows(tokens, most)) * vocabulary * element_bytes
    return buffer if on_gpu else buffer + min(tokens, most) * vocabulary * LOSS_TORCH_COPIES * 4


def log_prob_bytes(rows: int, hidden_size: int, vocabulary: int, element_bytes: int, *, on_gpu: bool) -> int:
    """Estimated workspace of log-probabilities of ``rows`` tokens, whose gradient of the hidden states is not in it:
    one tile, off the GPU float32 copies of it, and for its rows the hidden states, the label's row of the head, and
    float32 sums of such rows.

    ``element_bytes`` is the size of the operands' elements.
    """
    together = min(rows, LOG_PROB_ROWS)
    tile = together * min(vocabulary, LOG_PROB_COLUMNS) * 4
    copies = 1 if on_gpu else 1 + LOSS_TORCH_COPIES
    return copies * tile + together * hidden_size * (2 * element_bytes + 2 * 4)


#: Bytes of logits that a divergence has at a time, and the most rows; fewer off the GPU, where products gain nothing.
DIVERGENCE_BYTES, DIVERGENCE_ROWS = {"cuda": 5 * 2**28, "cpu": 2**26}, 1024


def divergence_rows_at_once(device: str, vocabulary: int, accumulate_bytes: int) -> int:
    """Rows whose logits exist at a time in ``linear_divergence``: two of the accumulating dtype, and a gradient."""
    most = DIVERGENCE_BYTES["cuda" if device == "cuda" else "cpu"] // (vocabulary * 3 * accumulate_bytes)
    return max(16, min(DIVERGENCE_ROWS, most // 64 * 64))


def divergence_bytes(rows: int, hidden_size: int, vocabulary: int, element_bytes: int, *, on_gpu: bool) -> int:
    """Estimated workspace of the divergence of ``rows`` tokens, whose gradient of the hidden states is not in it."""
    together = min(rows, divergence_rows_at_once("cuda" if on_gpu else "cpu", vocabulary, 4))
    copies = 0 if on_gpu else 3
    return together * (vocabulary * (8 + element_bytes + 4 * copies) + hidden_size * (2 * element_bytes + 4))


def _most_rows(tokens: int, vocabulary: int, element_bytes: int, *, on_gpu: bool, trained_width: int = 0) -> int:
    """Rows whose logits fit the workspace, a multiple of ``LOSS_ROW_MULTIPLE`` and at least that."""
    if on_gpu:
        gradient, row = 4 * vocabulary * trained_width, vocabulary * element_bytes
        most = max(LOSS_WORKSPACE_BYTES, gradient) // row
        few, usual = LOSS_ROWS
        enough = min(max(few, tokens // 4), max(usual, LOSS_WORKSPACE_BYTES // 2 // row))
        rows = most if trained_width else min(most, enough)
    else:
        rows = LOSS_WORKSPACE_BYTES // (vocabulary * element_bytes * LOSS_TORCH_COPIES)
    return max(rows // LOSS_ROW_MULTIPLE * LOSS_ROW_MULTIPLE, LOSS_ROW_MULTIPLE)


def _equal_rows(tokens: int, most: int) -> int:
    """Rows of each chunk when ``tokens`` rows are cut into as few equal chunks of at most ``most`` as possible."""
    chunks = -(-tokens // most)
    return -(-tokens // chunks)


def why_no_tensor_cores(gpu: Gpu) -> str | None:
    """The reason why kernels' products do not run on tensor cores, or None; None outside CUDA, in the interpreter."""
    if gpu.capability is None or gpu.capability >= PRODUCTS_CAPABILITY:
        return None
    return f"on capability {capability_text(gpu.capability)} Triton makes no tensor-core code"


def capability_text(capability: tuple[int, int]) -> str:
    """A compute capability as people write it, such as ``8.9``."""
    return f"{capability[0]}.{capability[1]}"
