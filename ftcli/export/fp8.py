"""A complete model whose linear layers are eight bits wide, in the layout of compressed-tensors that vLLM loads.

The scheme is llm-compressor's ``FP8_DYNAMIC``: weights (O, I) are float8_e4m3fn times a scale for each output channel,
``weight_scale`` (O, 1); activations are rounded by token while the model is served. Only linear layers of the decoder
layers are rounded. Embeddings, head, norms and everything beside the language model are as ``safetensors`` has them.

A scale is the row's largest number over 448, rounded up to what bfloat16 holds: programs that keep it in bfloat16 and
those that keep it in float32 compute with the same number, and no weight ends beyond what the type holds.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib.util import find_spec
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from ftcli.errors import ExitCode, FtcliError, first_line
from ftcli.export.further import passed_over
from ftcli.export.merge import outputs
from ftcli.export.safetensors import ModelPlan, plan_model, require_kept_base, save_model
from ftcli.export.source import ExportSource, not_verified, plain_config, source_tokenizer, unwritten
from ftcli.export.tensorfile import TensorFile, TensorToWrite, computed, copied, tensor_files
from ftcli.export.verify import (
    Verified,
    check_answer,
    difference,
    elements,
    loaded,
    model_request,
    not_asked,
    probe_batch,
    reloaded,
    sent,
    shortened,
    trained_logits,
    unlike_names,
)
from ftcli.export.weights import MergedWeights, StoredWeights, base_weights, source_updates
from ftcli.model.backbone import decoder_layers
from ftcli.model.pretrained import hollow
from ftcli.plain import JsonObject

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: The largest number of float8_e4m3fn, and its smallest step.
LARGEST, SMALLEST = 448.0, 2.0**-9
#: Largest relative error of the logits, activations rounded: 0.07 to 0.23 measured on small random models.
LOGITS_TOLERANCE = 0.5
#: Largest error of a weight: half a unit of three bits, or half the smallest step times the scale.
_ROUNDING = 2.0**-4
_PACKAGE = "compressed_tensors"


def write(source: ExportSource, folder: Path, say: Callable[[str], None]) -> Verified:
    """Write a complete model into ``folder`` and verify it.

    Raises:
        FtcliError: FT740 for stacks of experts, FT741 when what was written is not the model, FT747 for a base of
            random weights, FT758 where the package compressed-tensors is not
            there, and as the format ``safetensors``.
        OSError: it cannot be written.
    """
    require_kept_base(source)
    if source.verify:
        require_compressed_tensors()
    plan = plan_model(source)
    model = hollow(plain_config(plan.config))
    rounded = _rounded(model, plan.base)
    say(f"rounding {len(rounded)} weights to 8 bits")
    further = [copied(key, file) for key, file in passed_over(source).items()]
    save_model(source, plan, [*_outputs(plan, rounded), *further], folder)
    _declare(folder / "config.json", _ignored(model, rounded))
    if not source.verify:
        return not_asked(plan.merged_with)
    return _verify(source, folder, plan, rounded, say)


def require_compressed_tensors() -> None:
    """Raises FtcliError FT758 where the package that transformers reads this layout by is not installed."""
    if find_spec(_PACKAGE) is None:
        message = "to verify fp8, transformers needs the package compressed-tensors, which is not installed"
        raise FtcliError.single("FT758", message, exit_code=ExitCode.PREFLIGHT, help="pip install 'ftcli[fp8]'")


def scale_key(key: str) -> str:
    """The name of a weight's scale in the files."""
    return f"{key}_scale"


def _rounded(model: PreTrainedModel, base: StoredWeights) -> dict[str, str]:
    """The tensors that are eight bits wide: the name in the model of each, by its key in the files."""
    layers = {id(module) for layer in decoder_layers(model) for module in layer.modules()}
    linear = {
        f"{name}.weight"
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and id(module) in layers
    }
    names: dict[str, str] = {}
    for stored in base.stored:
        if stored.roles and not stored.packed:
            raise _stacked(stored.names[0])
        if stored.names and stored.names[0] in linear:
            roles = stored.roles or ("weight",)
            names[next(key for key, role in zip(stored.keys, roles, strict=True) if role == "weight")] = stored.names[0]
    return names


def _outputs(plan: ModelPlan, rounded: Mapping[str, str]) -> Iterator[TensorToWrite]:
    """The merged model's tensors, a scale after each weight of eight bits. Both are computed when they are written."""

    def exact(name: str) -> Tensor:
        return plan.adapter.merged(name, plan.base.read(name).float())

    def weight(name: str) -> Tensor:
        merged = exact(name)
        return to_float8(merged, scale_of(merged))

    def scale(name: str) -> Tensor:
        return scale_of(exact(name))

    for output in outputs(plan.base, plan.adapter, plan.rounding):
        name = rounded.get(output.key)
        if name is None:
            yield output
            continue
        rows = output.shape[0]
        yield computed(output.key, output.shape, torch.float8_e4m3fn, partial(weight, name))
        yield computed(scale_key(output.key), (rows, 1), torch.float32, partial(scale, name))


def scale_of(weight: Tensor) -> Tensor:
    """The scale (O, 1) float32 of each row of ``weight`` (O, I); 1 where a row is zero."""
    wanted = weight.abs().amax(1, keepdim=True) / LARGEST
    held = wanted.to(torch.bfloat16).float()
    up = torch.nextafter(held.to(torch.bfloat16), torch.tensor(torch.inf, dtype=torch.bfloat16)).float()
    return torch.where(wanted == 0, 1.0, torch.where(held < wanted, up, held))


def to_float8(weight: Tensor, scale: Tensor) -> Tensor:
    """``weight`` (O, I) float32 over its scale, in float8_e4m3fn."""
    return (weight / scale).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)


def _ignored(model: PreTrainedModel, rounded: Mapping[str, str]) -> list[str]:
    wide = set(rounded.values())
    linear = (name for name, module in model.named_modules() if isinstance(module, nn.Linear))
    return [name for name in linear if f"{name}.weight" not in wide]


def _declare(path: Path, ignored: list[str]) -> None:
    """Says in config.json how the weights are stored, as llm-compressor does."""
    eight: JsonObject = {"num_bits": 8, "type": "float", "symmetric": True, "group_size": None, "block_structure": None}
    group: JsonObject = {
        "format": "float-quantized",
        "targets": ["Linear"],
        "weights": {**eight, "strategy": "channel", "dynamic": False, "observer": "minmax"},
        "input_activations": {**eight, "strategy": "token", "dynamic": True, "observer": None},
        "output_activations": None,
    }
    config = json.loads(path.read_text(encoding="utf-8"))
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ignored,
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _verify(
    source: ExportSource,
    folder: Path,
    plan: ModelPlan,
    rounded: Mapping[str, str],
    say: Callable[[str], None],
) -> Verified:
    say("verifying: comparing weights")
    base, adapted = base_weights(source), plan.adapted
    merged = MergedWeights(base, {} if adapted is None else source_updates(source, adapted))
    problems = _compare_weights(folder, plan, rounded, merged, passed_over(source))
    say("verifying: loading the result again")
    tokenizer = source_tokenizer(source)
    model: Any = unwritten(plan.config) if adapted is None else adapted
    probe, trained = trained_logits(model, base, probe_batch(tokenizer, base.shape(base.ends[0])[0]))
    request = model_request(folder, probe, elements(base), names=_keys(rounded, merged))
    answer = source.reload(request, sent(probe))
    problems += answer.problems
    if problems:
        raise not_verified(folder, problems)
    problems, facts = check_answer(answer, trained, probe, tokenizer, plan.stops, LOGITS_TOLERANCE)
    if problems:
        raise not_verified(folder, problems)
    compared = "every weight, logits with rounded activations, tokenizer, stop tokens"
    facts = {"rounded": len(rounded), **facts, "loaded": loaded(request), **reloaded(answer)}
    return Verified(compared, facts, merged_with=plan.merged_with)


def _compare_weights(
    folder: Path,
    plan: ModelPlan,
    rounded: Mapping[str, str],
    merged: MergedWeights,
    further: Mapping[str, TensorFile],
) -> list[str]:
    """Problems of the files, tensor by tensor: compared with what the adapter's own file says, without PEFT.

    ``further``: Tensors that are not the model's own.
    """
    try:
        files, not_rounded = tensor_files(folder), _not_rounded(rounded, merged)
        for stored in merged.base.stored:
            further = {**further, **(dict(zip(stored.keys, stored.files, strict=True)) if not stored.names else {})}
        expected = {*rounded, *not_rounded, *(scale_key(key) for key in rounded), *further}
        problems = unlike_names(files, expected, "is not the model's")
        if problems:
            return shortened(problems)
        for key, name in rounded.items():
            scale = files[scale_key(key)].read(scale_key(key))
            problem = _unlike(files[key].read(key), scale, merged.read(name).float())
            problems += [f"{key} {problem}"] if problem else []
        for key, file in further.items():
            pieces = zip_longest(files[key].pieces(key), file.pieces(key))
            problems += [] if all(one == other for one, other in pieces) else [f"{key} differs from the base model's"]
        for key, name in not_rounded.items():
            exact = name not in merged.changes or merged.changes[name].whole is not None
            dtype = plan.rounding.of(name, merged.base.of(name))
            problem = difference(files[key].read(key), merged.read(name), dtype, exact=exact)
            problems += [f"{key} {problem}"] if problem else []
    except (OSError, SafetensorError) as error:
        return [f"its weights cannot be read: {first_line(error)}"]
    return shortened(problems)


def _not_rounded(rounded: Mapping[str, str], merged: MergedWeights) -> dict[str, str]:
    """The name in the model of each tensor that is no wider or narrower than in ``safetensors``, by its key."""
    found = {stored.keys[0]: stored.names[0] for stored in merged.base.stored if stored.names}
    found |= {merged.base.renaming.key_of(name): name for name in merged.untied}
    return {key: name for key, name in found.items() if key not in rounded}


def _keys(rounded: Mapping[str, str], merged: MergedWeights) -> dict[str, str]:
    """The key of each tensor of the model that is written, scales among them; a tied head has its embedding's."""
    found = {name: key for key, name in {**_not_rounded(rounded, merged), **rounded}.items()}
    found |= {scale_key(name): scale_key(key) for key, name in rounded.items()}
    return found | {name: found[other] for name, other in merged.base.ties.items() if name not in found}


def _unlike(found: Tensor, scale: Tensor, wanted: Tensor) -> str | None:
    if found.dtype != torch.float8_e4m3fn or found.shape != wanted.shape or scale.shape != (wanted.shape[0], 1):
        return f"is {found.dtype} {tuple(found.shape)} with a scale {tuple(scale.shape)}"
    largest = wanted.abs().amax(1, keepdim=True)
    if not bool((torch.isfinite(scale) & (scale > 0)).all()):
        return "has a scale that is not a positive number"
    if bool(((scale * LARGEST > 1.02 * largest) & (largest > 0)).any()):
        return "has a scale that wastes the type's range"
    again = found.float() * scale
    # As much again for the order of sums in merging, which moves what lies half-way between two values.
    room = _ROUNDING * wanted.abs() + SMALLEST / 2 * scale + 1e-6 * largest
    if not bool(((again - wanted).abs() <= room).all()):
        return f"differs by up to {float((again - wanted).abs().max()):.3g} from what was trained"
    return None


def _stacked(name: str) -> FtcliError:
    message = f"nothing can be rounded to fp8: {name} is a stack of experts, and ftcli rounds linear layers alone"
    return FtcliError.single("FT740", message, help="export.formats: [safetensors] writes the model in 16 bits")
