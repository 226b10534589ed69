"""The process that loads exports again: a request a line on stdin, an answer a line on stdout.

It loads what was written with plain libraries, as whoever serves it would, and computes with it. It ends when its stdin
is closed.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import queue
import resource
import sys
import tempfile
import threading
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from ftcli.empty_weights import Undrawn, fill_with_nan, model_class
from ftcli.errors import first_line
from ftcli.export.clean.request import (
    ANSWER,
    ATTENTION_MASK,
    GREEDY,
    IMAGE,
    INPUT_IDS,
    LAYER,
    LOGITS,
    OURS,
    PICTURE,
    PROMPT,
    READ,
    SEEN,
    TENSOR,
    ReloadRequest,
    rows_for,
)
from ftcli.export.lazy import Read, computing_from
from ftcli.plain import JsonMap, JsonObject

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: What nearly every answer imports: here while whoever asks is still writing.
_LIBRARIES = (
    "transformers.generation.utils",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
)
#: What transformers, PEFT, jinja and gguf raise for files that are damaged, or are none of theirs.
_DAMAGED = (
    OSError,
    ValueError,
    KeyError,
    IndexError,
    TypeError,
    AttributeError,
    RuntimeError,
    ImportError,
    ArithmeticError,
    MemoryError,
    SafetensorError,
)


def serve() -> None:
    """Answers until stdin is closed, and then ends at once, whatever it is doing."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print is no answer
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(lines,), daemon=True).start()
    for name in _LIBRARIES:
        importlib.import_module(name)
    gc.freeze()
    gc.enable()  # it was disabled while all this was imported
    while True:
        asked: dict[str, Any] = json.loads(lines.get())
        answers.write(f"{ANSWER}{json.dumps(answered(**asked))}\n")
        answers.flush()


def _read(lines: queue.SimpleQueue[str]) -> None:
    for line in sys.stdin:
        lines.put(line)
    os._exit(0)


def answered(request: JsonMap, sent: str, back: str) -> JsonObject:
    """The answer to ``request``, as JSON has it."""
    asked = ReloadRequest(**request)
    torch.set_num_threads(asked.threads)
    kinds = {"model": _model, "adapter": _adapter, "gguf": _gguf, "llama": _llama}
    told: JsonObject = {}
    tensors: dict[str, Tensor] = {}
    try:
        with torch.no_grad():
            told, tensors = kinds[asked.kind](asked, load_file(sent))
    except _DAMAGED as error:
        told = {"problems": [f"it cannot be loaded: {type(error).__name__}: {first_line(error)}"]}
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, back)
    mine = sorted(name for name in sys.modules if name.startswith(OURS))
    if mine:
        told["problems"] = [*told.get("problems", []), f"the process that loads it has imported {mine[0]}"]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return {**told, "peak_bytes": peak, "libraries": _libraries()}


def _libraries() -> str:
    found = [
        name
        for name in ("torch", "transformers", "peft", "gguf", "compressed_tensors", "llama_cpp")
        if name in sys.modules
    ]
    return ", ".join(f"{name} {getattr(sys.modules[name], '__version__', '')}".strip() for name in found)


def _model(asked: ReloadRequest, sent: dict[str, Tensor]) -> tuple[JsonObject, dict[str, Tensor]]:
    """A folder as transformers loads it."""
    config = _config(asked.folder)
    if asked.from_disk and asked.names and _is_quantized(config):
        return _streamed(asked, config, sent)
    options: dict[str, Any] = {"dtype": "auto" if asked.dtype == "stored" else torch.float32}
    if _has_zero_points(config):
        from transformers import CompressedTensorsConfig

        options["quantization_config"] = CompressedTensorsConfig(**config.quantization_config, dequantize=True)
    if asked.from_disk:
        options = {"dtype": torch.float32, "device_map": {"": "disk"}}
    # transformers compiles how some layers unpack their weights and round, which needs a compiler and takes longer.
    plainly = torch.compiler.set_stance("force_eager") if _is_quantized(config) else nullcontext()
    with plainly, tempfile.TemporaryDirectory(prefix="ftcli-offload-") as spare:
        if asked.from_disk:
            options["offload_folder"] = spare  # for weights that are put together of several
        model, told = model_class(config).from_pretrained(
            asked.folder,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            attn_implementation="eager",
            output_loading_info=True,
            **options,
        )
        model.eval()
        if not asked.from_disk:
            _widen(model)
        problems = [f"{name} is not stored" for name in sorted(told["missing_keys"])]
        problems += [f"{found[0]} is stored in another shape" for found in sorted(told["mismatched_keys"])]
        tensors = {} if problems else _computed(model, asked, sent)
        facts: JsonObject = {"problems": problems, "stops": _stops(model), "tokenizer": _tokenizer(asked)}
    return facts, tensors


def _widen(model: PreTrainedModel) -> None:
    """Has the model compute in float32; what a quantization keeps otherwise stays as it is."""
    quantizer: Any = getattr(model, "hf_quantizer", None)
    if not _is_quantized(model.config):
        model.float()
    elif hasattr(model, "ct_decompress_hook"):
        quantizer.compressor.decompress_model(model)  # as its first pass would, but for the dtype
        for parameter in model.parameters():
            if parameter.dtype in (torch.bfloat16, torch.float16):
                parameter.data = parameter.data.float()


def _is_quantized(config: Any) -> bool:
    return getattr(config, "quantization_config", None) is not None


def _has_zero_points(config: Any) -> bool:
    """True for packed weights that are not symmetric: transformers loads these only as plain weights."""
    groups = dict(getattr(config, "quantization_config", None) or {}).get("config_groups", {})
    return any(group["weights"] and not group["weights"]["symmetric"] for group in groups.values())


def _computed(model: PreTrainedModel, asked: ReloadRequest, sent: dict[str, Tensor]) -> dict[str, Tensor]:
    found = {LOGITS: _logits(model, sent)}
    shown = {name.removeprefix(IMAGE): tensor for name, tensor in sent.items() if name.startswith(IMAGE)}
    if shown:
        seen: Any = model
        found[SEEN] = seen(**shown, use_cache=False).logits[0].float()
    if asked.new_tokens:
        from transformers import GenerationConfig

        plain = GenerationConfig(do_sample=False, max_new_tokens=asked.new_tokens, pad_token_id=0)
        plain.eos_token_id = getattr(model.generation_config, "eos_token_id", None)
        model.generation_config = plain
        prompt = sent[PROMPT]
        output: Any = model.generate(prompt, attention_mask=torch.ones_like(prompt))
        found[GREEDY] = output[0, prompt.shape[1] :]
    for name, features in asked.layers.items():
        found[f"{LAYER}{name}"] = model.get_submodule(name)(rows_for(features)).float()
    return found


def _logits(model: Any, sent: dict[str, Tensor]) -> Tensor:
    mask = sent[ATTENTION_MASK]
    output = model(input_ids=sent[INPUT_IDS], attention_mask=mask, use_cache=False)
    found: Tensor = output.logits.float()
    return found if found.dim() == 2 else found[mask.bool()]  # a classifier has scores of rows


def _stops(model: PreTrainedModel) -> dict[str, list[int]]:
    # Some of transformers' releases lose what config.json of Qwen2.5-VL says outside of its text_config.
    text = model.config.get_text_config() if getattr(model.config, "eos_token_id", None) is None else model.config
    found = {}
    generation = getattr(model, "generation_config", None)  # a classifier has none
    for label, config in (("config.json", text), ("generation_config.json", generation)):
        named = getattr(config, "eos_token_id", None)
        found[label] = list(named) if isinstance(named, list) else [] if named is None else [int(named)]
    return found


def _tokenizer(asked: ReloadRequest) -> JsonObject:
    """The tokenizer beside the weights; nothing where there is none."""
    from jinja2.exceptions import TemplateError
    from transformers import AutoTokenizer

    if not Path(asked.folder, "tokenizer_config.json").is_file():
        return {}
    tokenizer: Any = AutoTokenizer.from_pretrained(asked.folder, local_files_only=True, trust_remote_code=False)
    rendered = []
    for text in asked.texts:
        try:
            turns = [{"role": "user", "content": text}]
            shown = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        except (TemplateError, *_DAMAGED):  # without a template, or one that refuses it
            rendered.append(list(tokenizer(text)["input_ids"]))
        else:
            rendered.append(list(tokenizer(shown, add_special_tokens=False)["input_ids"]))
    names = ("eos_token_id", "pad_token_id", "bos_token_id", "chat_template")
    return {**{name: getattr(tokenizer, name) for name in names}, "tokens": len(tokenizer), "rendered": rendered}


def _config(folder: str) -> Any:
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


def _empty(config: Any) -> PreTrainedModel:
    """A model of a config: its buffers are what they should be, its parameters NaN without memory.

    Gemma-4's wrapper looks at a row of the embeddings itself, for tokens of images, before any layer has computed.
    """
    from accelerate import init_empty_weights

    with init_empty_weights(include_buffers=False), Undrawn():
        model: PreTrainedModel = model_class(config).from_config(
            config, dtype=torch.float32, attn_implementation="eager", trust_remote_code=False
        )
    fill_with_nan(model)
    return model.eval()


def _adapter(asked: ReloadRequest, _: dict[str, Tensor]) -> tuple[JsonObject, dict[str, Tensor]]:
    """A folder as PEFT loads it, into a model of the base's shape: every tensor as it then is."""
    import warnings

    import peft

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what is missing or left over is seen in the tensors
        base = _empty(_config(asked.config)).to_empty(device="cpu")  # never written, so it takes no memory
        adapted = peft.PeftModel.from_pretrained(base, asked.folder)
    held = peft.get_peft_model_state_dict(adapted, save_embedding_layers=asked.embeddings)
    tensors = {f"{TENSOR}{name}": tensor.clone() for name, tensor in held.items()}
    return {"tokenizer": _tokenizer(asked)}, tensors


def _gguf(asked: ReloadRequest, sent: dict[str, Tensor]) -> tuple[JsonObject, dict[str, Tensor]]:
    """A file as the gguf library reads it, dequantized tensor by tensor into the model that the file describes."""
    from ftcli.export.gguf.metadata import take_description, usual_activation
    from ftcli.gguf import ReadFile, reader_of
    from ftcli.tables.gguf import architecture_of

    file, config = ReadFile(Path(asked.folder)), _config(asked.config)
    text = config.get_text_config()
    architecture = architecture_of(text.model_type, usual_activation(text))
    if architecture is None:
        raise ValueError(f"no architecture of llama.cpp's for {text.model_type}")
    problems = take_description(config, file, architecture)
    if problems:
        return {"problems": problems}, {}
    model = _empty(config)
    with computing_from(model, reader_of(model, file, asked.names, asked.heads, architecture), asked.names):
        return {}, {LOGITS: _logits(model, sent)}


def _llama(asked: ReloadRequest, sent: dict[str, Tensor]) -> tuple[JsonObject, dict[str, Tensor]]:
    """A file as llama.cpp's library computes it."""
    from ftcli.export.clean import llama

    try:
        import llama_cpp  # noqa: F401
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        return {"unavailable": f"llama-cpp-python cannot be imported: {first_line(error)}"}, {}
    if asked.projector:
        picture = sent[PICTURE].numpy()
        read, found = llama.see_with_llama(
            Path(asked.folder), Path(asked.projector), asked.texts[0], picture, threads=asked.threads
        )
        return {}, {READ: torch.tensor(read), LOGITS: torch.from_numpy(found)[None]}
    rows = [ids[mask.bool()].tolist() for ids, mask in zip(sent[INPUT_IDS], sent[ATTENTION_MASK], strict=True)]
    said = llama.ask_llama(Path(asked.folder), rows, asked.texts, threads=asked.threads)
    facts: JsonObject = {"tokenizer": {"rendered": said.tokens}, "stops": {"llama-cpp-python": said.ends}}
    return facts, {LOGITS: torch.cat([torch.from_numpy(each) for each in said.logits])}


def _streamed(asked: ReloadRequest, config: Any, sent: dict[str, Tensor]) -> tuple[JsonObject, dict[str, Tensor]]:
    """A folder whose weights are rounded, layer by layer: transformers itself would hold them as a whole.

    The layers are the ones that it computes with: those of compressed-tensors, which round activations, or its own of
    BitNet. Their numbers are read from the folder's files while a layer computes.
    """
    from transformers import GenerationConfig

    said = dict(config.quantization_config)
    del config.quantization_config  # transformers would build its own layers, with memory
    model = _empty(config)
    makers = {"compressed-tensors": _compressed, "bitnet": _ternary}
    if said.get("quant_method") not in makers:
        raise ValueError(f"weights in {said.get('quant_method')} are not read layer by layer")
    read = makers[said["quant_method"]](model, said, _reader(Path(asked.folder), asked.names))
    model.generation_config = GenerationConfig.from_pretrained(asked.folder, local_files_only=True)
    with computing_from(model, read, frozenset(asked.names)), torch.compiler.set_stance("force_eager"):
        logits = _logits(model, sent)
    return {"stops": _stops(model), "tokenizer": _tokenizer(asked)}, {LOGITS: logits}


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


def _compressed(model: PreTrainedModel, said: dict[str, Any], read: Read) -> Read:
    """Numbers of layers that round their inputs, where config.json says so, and compute with unpacked weights."""
    from compressed_tensors.compressors import BaseCompressor, ModelCompressor
    from compressed_tensors.quantization import QuantizationStatus, apply_quantization_config
    from transformers import CompressedTensorsConfig

    settings = ModelCompressor.from_compression_config(CompressedTensorsConfig(**said)).quantization_config
    apply_quantization_config(model, settings, run_compressed=False, show_progress=False)
    kind: Any = BaseCompressor.get_value_from_registry(said["format"])
    parts: dict[str, tuple[str, ...]] = {}
    for path, module in model.named_modules():
        layer: Any = module
        if getattr(layer, "quantization_scheme", None) is None:
            continue
        layer.quantization_status = QuantizationStatus.COMPRESSED  # its weight is rounded already
        parts[f"{path}.weight"] = kind.compression_param_names(layer.quantization_scheme)
        for name in [name for name in layer._parameters if name.startswith("weight_") or name.endswith("zero_point")]:
            del layer._parameters[name]

    def number(name: str) -> Tensor:
        if name not in parts:
            return read(name)
        path = name.removesuffix("weight")
        held = {part: read(f"{path}{part}") for part in parts[name] if part.startswith("weight")}
        if held["weight_scale"].dtype == torch.bfloat16:  # in whose dtype the product would be rounded
            held["weight_scale"] = held["weight_scale"].float()
        layer: Any = model.get_submodule(path.removesuffix("."))
        numbers: Tensor = kind.decompress(held, layer.quantization_scheme)["weight"]
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
