"""Base quantizations: what ``quantization.method`` may name, and the code that stores and multiplies each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StoredProducts:
    """Products of the weights as they are stored, where GPU and compute dtype allow it.

    Elsewhere the weights are dequantized for each product. Every attribute but the last names code.

    Attributes:
        capability: The lowest compute capability of a GPU that has such products, (major, minor).
        why_not: A function of ``ftkernels.limits.Gpu`` and the compute dtype: why there are no such products, or None.
        known: A function of a GPU's compute capability: why such products are not to be relied on there, or None.
        tried: The same of this machine's GPU, by trying them.
        measure_rate: A function of a torch device that measures how many operations a second such products do.
        exact: What a product gives does not depend on where it is taken, so people need not be warned.
    """

    capability: str
    why_not: str
    known: str | None = None
    tried: str | None = None
    measure_rate: str | None = None
    exact: bool = False


@dataclass(frozen=True, slots=True)
class PackedFiles:
    """Weight files that hold the weights quantized already. Every attribute names code.

    Attributes:
        recognise: A function of a config.json's content that answers whether the model's files are of this kind.
        read: A function of that content that makes a :class:`ftcli.model.quantized.PackedReader`.
        masters: As ``recognise``, for files in full precision that are meant for this method and no other.
    """

    recognise: str
    read: str
    masters: str | None = None


@dataclass(frozen=True, slots=True)
class QuantizedTraining:
    """Full training of weights that every forward pass quantizes. Every attribute names code.

    Attributes:
        layer: Of a linear layer, the section and its name, one with master weights in float32.
        of_packed: The same made of the frozen layer that ``packed_files.read`` has made.
        more_bytes: A function of a :class:`ftcli.facts.layers.Linear` and the recipe's section: bytes that a layer
            holds beside what is trained.
        more_trained: The same: elements that are trained beside its masters.
        finish: A function of a model that is whole, of whether the kernels may be used, and of the recipe's section,
            that puts in what its layers share and notes in its config how its weights are to be read.
        written: A function of a model that is called whenever its weights may have been written to: between two calls
            its layers may keep what they were quantized to.
        share: A function of a model and of how far its values go from exact (0) to quantized (1) in training.
        reads: Settings of the section that have no effect on frozen weights.
    """

    layer: str
    of_packed: str
    more_bytes: str
    more_trained: str
    finish: str
    written: str
    share: str
    reads: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Quantization:
    """One way to store the base model's linear layers.

    Attributes:
        freezes_base: The stored weights cannot be trained, so a recipe needs adapters.
        reads: Settings of the section ``quantization`` that it reads, beside ``method``. One that reads
            ``keep_dequantized`` can hold its layers dequantized.
        quantize: Code: of a linear layer, the section and its name, one that is stored quantized. None: none is.
        stored_bytes: Code: a function of a :class:`ftcli.facts.layers.Linear` and the recipe's section that answers how
            many bytes the layer's weight takes. None where ``quantize`` is None.
        products: None: the weights are dequantized for each product, on every device.
        quantize_stack: Code: a function of a matrix (E * O, I) of all experts and the recipe's section that answers
            with a ``ftkernels.projection.FrozenWeight``. None: experts stay in full precision.
        packed_files: None: weights are only read in full precision.
        training: How the weights are trained where a recipe has no adapters; None where they cannot be.
        already: Code: a function of a linear layer in full precision and its name: the layer's numbers as a
            :class:`ftcli.model.quantized.QuantizedLinear`, exactly, where they are quantized ones that were written
            out; else None. None: that is never looked for, since quantizing again changes nothing.
        reads_gguf: A folder's weights may be a GGUF file: it holds the quantized numbers, and the method keeps them.
    """

    freezes_base: bool = True
    reads: tuple[str, ...] = ()
    quantize: str | None = None
    stored_bytes: str | None = None
    products: StoredProducts | None = None
    quantize_stack: str | None = None
    packed_files: PackedFiles | None = None
    training: QuantizedTraining | None = None
    already: str | None = None
    reads_gguf: bool = False

    @property
    def holds_dequantized(self) -> bool:
        """True if its layers can be held dequantized."""
        return "keep_dequantized" in self.reads


TABLE: Mapping[str, Quantization] = {
    "none": Quantization(freezes_base=False),
    "nf4": Quantization(
        reads=("double_quant", "keep_dequantized"),
        quantize="ftcli.model.nf4:nf4_linear",
        stored_bytes="ftcli.plan.quantization:nf4_bytes",
        quantize_stack="ftcli.model.nf4:nf4_stack",
        packed_files=PackedFiles(
            recognise="ftcli.plan.quantization:stores_nf4", read="ftcli.model.nf4:BitsandbytesReader"
        ),
    ),
    "fp8": Quantization(
        quantize="ftcli.model.fp8:fp8_linear",
        stored_bytes="ftcli.plan.quantization:fp8_bytes",
        quantize_stack="ftcli.model.fp8:fp8_stack",
        products=StoredProducts(
            capability="ftkernels.limits:FLOAT8_CAPABILITY",
            why_not="ftkernels.limits:why_no_fp8",
            known="ftkernels.fp8_trial:why_no_rows",
            tried="ftkernels.fp8_trial:why_no_rows_here",
            measure_rate="ftcli.train.bench:measure_fp8_rate",
        ),
    ),
    "bitnet": Quantization(
        freezes_base=False,
        reads=("lambda_warmup_steps", "use_rms_norm"),
        quantize="ftcli.model.bitnet:ternary_linear",
        stored_bytes="ftcli.plan.quantization:ternary_bytes",
        products=StoredProducts(
            capability="ftkernels.limits:PRODUCTS_CAPABILITY",
            why_not="ftkernels.limits:why_no_int8",
            exact=True,
        ),
        packed_files=PackedFiles(
            recognise="ftcli.plan.quantization:stores_ternary",
            read="ftcli.model.bitnet:PackedTernaryReader",
            masters="ftcli.plan.quantization:stores_ternary_masters",
        ),
        training=QuantizedTraining(
            layer="ftcli.model.bitnet:bit_linear_of",
            of_packed="ftcli.model.bitnet:masters_of",
            more_bytes="ftcli.plan.quantization:ternary_bytes",
            more_trained="ftcli.plan.quantization:input_norm_elements",
            finish="ftcli.model.bitnet:round_in_norms",
            written="ftcli.model.bitnet:written",
            share="ftcli.model.bitnet:set_share",
            reads=("lambda_warmup_steps", "use_rms_norm"),
        ),
        already="ftcli.model.bitnet:already_ternary",
        reads_gguf=True,
    ),
}


def names(*, freezes_base: bool | None = None) -> tuple[str, ...]:
    """Methods that a recipe may name; with ``freezes_base`` only those that do, or do not, freeze the base."""
    return tuple(name for name, each in TABLE.items() if freezes_base in (None, each.freezes_base))


def row(name: str) -> Quantization:
    return TABLE[name]


def is_stored(name: object) -> bool:
    """True for the name of a method that stores weights in a form of its own; also for a method of another version that
    is not known here.
    """
    return isinstance(name, str) and (name not in TABLE or TABLE[name].quantize is not None)


def trained() -> tuple[str, ...]:
    """Methods that can train the weights themselves, rounded in every pass."""
    return tuple(name for name, each in TABLE.items() if each.training is not None)


def multiplied_as_stored() -> tuple[str, ...]:
    """Methods whose weights are multiplied as they are stored, where the GPU can, at a rate that is measured."""
    return tuple(name for name, each in TABLE.items() if each.products is not None and each.products.measure_rate)


def methods_that_read(setting: str) -> tuple[str, ...]:
    """Methods that read a setting of the section ``quantization``."""
    return tuple(name for name, each in TABLE.items() if setting in each.reads)
