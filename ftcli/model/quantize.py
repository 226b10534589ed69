"""Quantises linear layers by the recipe's method, and says what the code of a quantisation's row must offer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

from torch import Tensor, nn

from ftcli.config import QuantizationConfig
from ftcli.errors import ExitCode, FtcliError
from ftcli.model.lora_targets import is_read_by_mixer, is_router
from ftcli.model.quantized import QuantizedLinear
from ftcli.plain import JsonMap
from ftcli.tables import code_of, quantizations

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class QuantizeLinear(Protocol):
    """``quantize`` of a row of :mod:`ftcli.tables.quantizations`."""

    def __call__(self, linear: nn.Linear, settings: QuantizationConfig, name: str) -> QuantizedLinear:
        """The layer with its weight (O, I) quantised, on the device where it is; the bias is shared.

        Raises:
            FtcliError: FT323 when the weight holds NaN or infinity.
        """
        ...


class TrainQuantized(Protocol):
    """``training.layer`` of a row of :mod:`ftcli.tables.quantizations`."""

    def __call__(self, linear: nn.Linear, settings: QuantizationConfig, name: str) -> nn.Linear:
        """The layer with master weights in float32, made of ``linear``'s (O, I), on its device; the bias is shared.

        Raises:
            FtcliError: FT323 when the weight holds NaN or infinity.
        """
        ...


class PackedReader(Protocol):
    """``packed_files.read`` of a row of :mod:`ftcli.tables.quantizations`: makes layers of files that are quantised."""

    def part_of(self, key: str) -> tuple[str, str] | None:
        """Layer and part that the stored tensor ``key`` is, such as ``absmax``; None for a tensor of another kind."""
        ...

    def is_packed(self, weight: Tensor) -> bool:
        """Whether the floating tensor that is stored under a layer's ``weight`` holds packed bytes."""
        ...

    def layer(self, parts: Mapping[str, Tensor], linear: nn.Linear, name: str) -> QuantizedLinear:
        """The quantised layer in the place of ``linear``, made of its parts by name; ``weight`` is one of them.

        Raises:
            ValueError: A part is missing or does not fit.
        """
        ...

    def add(self, parts: Mapping[str, Tensor], layer: nn.Module) -> None:
        """Gives ``layer``, which was stored in full precision, the parts that lie beside its weight.

        Raises:
            ValueError: A part does not fit, or the layer takes none.
        """
        ...

    def require(self, model: nn.Module) -> None:
        """Looks whether every layer has what config.json says that it has.

        Raises:
            ValueError: A layer has not.
        """
        ...


def can_be_packed(name: str, module: nn.Module) -> bool:
    """Whether files may hold a module's weight packed: every plain linear layer but the head, which the loss reads, and
    the time step's of state-space mixers, which they read themselves.
    """
    return type(module) is nn.Linear and name.rpartition(".")[2] not in ("lm_head", "dt_proj")


def layers_to_quantize(model: PreTrainedModel) -> frozenset[str]:
    """Names of the layers whose full-precision weights are quantised: the linear layers of the language model.

    Towers of other kinds, which are kept and not trained, stay as they are; so do routers, weights that a mixer reads
    itself, and what transformers names as too fragile.

    Raises:
        FtcliError: FT336 (exit 3) for a model without any such layer, such as GPT-2, whose layers are no ``nn.Linear``.
    """
    from transformers.quantizers.quantizers_utils import should_convert_module

    root = model.get_decoder()
    prefix = next(name for name, module in model.named_modules() if module is root)
    fragile = list(model._keep_in_fp32_modules or ())
    found = frozenset(
        name
        for name, module in root.named_modules(prefix=prefix)
        if can_be_packed(name, module)
        and not is_router(name)
        and not is_read_by_mixer(model, name)
        and should_convert_module(name, fragile)
    )
    if not found:
        raise FtcliError.single(
            "FT336",
            f"a {type(model).__name__} has no linear layers that could be stored quantized",
            exit_code=ExitCode.PREFLIGHT,
            help="remove the section quantization",
        )
    return found


def quantize_linear(linear: nn.Linear, settings: QuantizationConfig, name: str, *, trained: bool = False) -> nn.Linear:
    """``linear``'s weight quantised by ``settings.method``, on the device where it is; its bias is shared.

    ``trained``: with master weights, if the method trains them.

    Raises:
        ValueError: The method stores no quantised linear layers.
        FtcliError: FT323 when the weight holds NaN or infinity.
    """
    method = quantizations.row(settings.method)
    if trained and method.training is not None:
        train: TrainQuantized = code_of(method.training.layer)
        return train(linear, settings, name)
    if method.quantize is None:
        raise ValueError(f"quantization.method {settings.method} does not quantise linear layers")
    quantize: QuantizeLinear = code_of(method.quantize)
    return quantize(linear, settings, name)


def stores_packed(config: JsonMap, settings: QuantizationConfig) -> bool:
    """Whether a model of this config.json has files that are packed by ``settings.method``."""
    files = quantizations.row(settings.method).packed_files
    return files is not None and bool(code_of(files.recognise)(config))


def stores_masters(config: JsonMap, settings: QuantizationConfig) -> bool:
    """Whether a model of this config.json has files of masters that the method rounds when they are used."""
    files = quantizations.row(settings.method).packed_files
    return files is not None and files.masters is not None and bool(code_of(files.masters)(config))


def packed_reader(settings: QuantizationConfig, config: JsonMap) -> PackedReader | None:
    """What reads the method's packed files, told what their config.json says of them; None where it has none."""
    files = quantizations.row(settings.method).packed_files
    if files is None:
        return None
    reader: PackedReader = code_of(files.read)(config)
    return reader
