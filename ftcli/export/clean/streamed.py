"""Models of rounded linear layers, read layer by layer: transformers itself would hold them as a whole.

The layers are the ones that it computes with: those of compressed-tensors, which round activations, or its own of
BitNet. The numbers are read from the folder's files while a layer computes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from torch import Tensor

from ftcli.export.lazy import Read, computing_from

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@contextmanager
def streamed(folder: Path, config: Any, names: Mapping[str, str], empty: Callable[[Any], Any]) -> Iterator[Any]:
    """The model in ``folder``, which computes while this is entered.

    Args:
        config: As transformers reads it; how weights are rounded is taken out of it.
        names: The key in the files of each tensor of the model that is stored; a tied head has its embedding's.
        empty: Builds a model of a config, its parameters without memory.

    Raises:
        ValueError: nothing is known of how the weights are rounded; KeyError: a tensor is not stored.
    """
    from transformers import GenerationConfig

    said = dict(config.quantization_config)
    del config.quantization_config
    model = empty(config)
    makers = {"compressed-tensors": _eight_bits, "bitnet": _ternary}
    if said.get("quant_method") not in makers:
        raise ValueError(f"weights in {said.get('quant_method')} are not read layer by layer")
    read = makers[said["quant_method"]](model, said, _reader(folder, names))
    model.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)
    with computing_from(model.eval(), read, frozenset(names)):
        yield model


def _reader(folder: Path, names: Mapping[str, str]) -> Read:
    files: dict[str, Path] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            files |= dict.fromkeys(file.keys(), path)

    def read(name: str) -> Tensor:
        key = names[name]
        with safe_open(files[key], framework="pt") as file:
            tensor: Tensor = file.get_tensor(key)
        return tensor

    return read


def _eight_bits(model: PreTrainedModel, said: dict[str, Any], read: Read) -> Read:
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationStatus, apply_quantization_config
    from compressed_tensors.quantization.lifecycle.forward import dequantize
    from transformers import CompressedTensorsConfig

    scheme = ModelCompressor.from_compression_config(CompressedTensorsConfig(**said)).quantization_config
    apply_quantization_config(model, scheme, run_compressed=False)
    for module in model.modules():
        if getattr(module, "quantization_scheme", None) is not None:
            module.quantization_status = QuantizationStatus.COMPRESSED  # its weight is rounded already

    def number(name: str) -> Tensor:
        tensor = read(name)
        if tensor.dtype != torch.float8_e4m3fn:
            return tensor
        layer: Any = model.get_submodule(name.rpartition(".")[0])
        scale = read(f"{name}_scale").float()
        numbers: Tensor = dequantize(tensor, scale, args=layer.quantization_scheme.weights, dtype=torch.float32)
        return numbers

    return number


def _ternary(model: PreTrainedModel, said: dict[str, Any], read: Read) -> Read:
    from transformers import BitNetQuantConfig
    from transformers.integrations.bitnet import AutoBitLinear, replace_with_bitnet_linear, unpack_weights

    plain = said.get("modules_to_not_convert")
    settings = BitNetQuantConfig(**{key: value for key, value in said.items() if key != "quant_method"})
    replace_with_bitnet_linear(model, modules_to_not_convert=plain, quantization_config=settings)

    def number(name: str) -> Tensor:
        tensor = read(name)
        if tensor.dtype != torch.uint8 or not isinstance(model.get_submodule(name.rpartition(".")[0]), AutoBitLinear):
            return tensor
        unpacked: Tensor = unpack_weights(tensor, dtype=torch.float32)
        return unpacked

    return number
