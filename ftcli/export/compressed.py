"""A complete model whose linear layers are a few bits wide, in the layout of compressed-tensors that vLLM loads.

Only linear layers of the decoder layers are rounded, each as a :class:`Scheme` says. Embeddings, head, norms and
everything beside the language model are as ``safetensors`` has them.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from ftcli.errors import ExitCode, FtcliError, first_line
from ftcli.export.calibration import Calibrated, calibrate
from ftcli.export.clean.request import LOGITS
from ftcli.export.further import passed_over
from ftcli.export.merge import outputs
from ftcli.export.safetensors import ModelPlan, plan_model, require_kept_base, save_model
from ftcli.export.scheme import Scheme, SchemeOf
from ftcli.export.source import ExportSource, not_verified, plain_config, source_tokenizer, unwritten
from ftcli.export.tensorfile import DTYPES, TensorFile, TensorToWrite, copied, in_memory, tensor_files
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

_PACKAGE = "compressed_tensors"
_OUTPUTS = 8


def write_compressed(source: ExportSource, folder: Path, say: Callable[[str], None], scheme_of: SchemeOf) -> Verified:
    """Write a complete model into ``folder`` and verify it. Raises FtcliError FT740 for stacks of experts and as
    ``scheme_of``, FT778 as :func:`ftcli.export.calibration.calibrate`, FT741 when what was written is not the model,
    FT747 for a base of random weights, FT758 where the package compressed-tensors is not there, and as the format
    ``safetensors``; OSError where it cannot be written.
    """
    require_kept_base(source)
    if source.verify:
        require_compressed_tensors()
    plan = plan_model(source)
    model = hollow(plain_config(plan.config))
    rounded = _rounded(model, plan.base)
    scheme = scheme_of(frozenset(plan.base.shape(name)[1] for name in rounded.values()))
    further = [copied(key, file) for key, file in passed_over(source).items()]
    layers = folder / "calibrated"
    layers.mkdir()
    say(f"rounding {len(rounded)} weights to {scheme.bits} bits")
    if scheme.calibration is None:
        made = _rounded_alone(plan, rounded, scheme, layers)
    else:
        made = calibrate(source, plan, rounded, scheme, layers, say)
    save_model(source, plan, [*_outputs(plan, rounded, scheme, made), *further], folder)
    shutil.rmtree(layers)
    _declare(folder / "config.json", _ignored(model, rounded), scheme)
    if source.verify:
        verified = _verify(source, folder, plan, rounded, scheme, made, say)
    else:
        verified = not_asked(plan.merged_with)
    return replace(verified, warnings=(*verified.warnings, *made.warnings))


def require_compressed_tensors() -> None:
    """Raises FtcliError FT758 where the package that transformers reads this layout by is not installed."""
    if find_spec(_PACKAGE) is None:
        message = (
            "to verify what is compressed, transformers needs the package compressed-tensors, which is not installed"
        )
        raise FtcliError.single("FT758", message, exit_code=ExitCode.PREFLIGHT, help="pip install 'ftcli[fp8]'")


def _rounded(model: PreTrainedModel, base: StoredWeights) -> dict[str, str]:
    """The tensors that are rounded: the name in the model of each, by its key in the files.

    Layers whose outputs are no multiple of 8 stay as they are: programs that serve them have no kernels for these.
    """
    layers = {id(module) for layer in decoder_layers(model) for module in layer.modules()}
    linear = {
        f"{name}.weight"
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and id(module) in layers and module.out_features % _OUTPUTS == 0
    }
    names: dict[str, str] = {}
    for stored in base.stored:
        if stored.roles and not stored.packed:
            name = stored.names[0]
            message = f"nothing can be rounded: {name} is a stack of experts, and ftcli rounds linear layers alone"
            raise FtcliError.single("FT740", message, help="export.formats: [safetensors] writes the model in 16 bits")
        if stored.names and stored.names[0] in linear:
            roles = stored.roles or ("weight",)
            names[next(key for key, role in zip(stored.keys, roles, strict=True) if role == "weight")] = stored.names[0]
    return names


def _rounded_alone(plan: ModelPlan, rounded: Mapping[str, str], scheme: Scheme, folder: Path) -> Calibrated:
    """Encodes weights without calibration, into files in ``folder``, one for each weight."""
    files: dict[str, TensorFile] = {}
    for number, (key, name) in enumerate(rounded.items()):
        made = scheme.encode(plan.adapter.merged(name, plan.base.read(name).float()), None)
        path = folder / f"{number}.safetensors"
        save_file({_part_key(key, leaf): tensor.contiguous() for leaf, tensor in made.items()}, path)
        files |= dict.fromkeys((_part_key(key, leaf) for leaf in made), TensorFile(path))
    return Calibrated(files)


def _outputs(plan: ModelPlan, rounded: Mapping[str, str], scheme: Scheme, made: Calibrated) -> Iterator[TensorToWrite]:
    """The merged model's tensors, a rounded weight's parts in its place."""
    for output in outputs(plan.base, plan.adapter, plan.rounding):
        norm = made.norms.get(plan.base.renaming.name_of(output.key)[0])
        if output.key in rounded:
            keys = (_part_key(output.key, leaf) for leaf in scheme.parts(output.shape))
            yield from (copied(key, made.files[key]) for key in keys)
        else:
            yield output if norm is None else in_memory(output.key, norm.to(DTYPES[output.dtype]))


def _part_key(key: str, leaf: str) -> str:
    """The key of a part of the weight that ``key`` or a name is of."""
    return f"{key.removesuffix('weight')}{leaf}"


def _ignored(model: PreTrainedModel, rounded: Mapping[str, str]) -> list[str]:
    wide = set(rounded.values())
    linear = (name for name, module in model.named_modules() if isinstance(module, nn.Linear))
    return [name for name in linear if f"{name}.weight" not in wide]


def _declare(path: Path, ignored: list[str], scheme: Scheme) -> None:
    """Says in config.json how the weights are stored, as llm-compressor does."""
    group: JsonObject = {"format": scheme.layout, "targets": ["Linear"], **scheme.numbers, "output_activations": None}
    config = json.loads(path.read_text(encoding="utf-8"))
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": scheme.layout,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ignored,
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


@dataclass(frozen=True, slots=True)
class _Rounded:
    """The rounded weights of an export.

    Attributes:
        merged: What they were before that.
    """

    names: Mapping[str, str]
    scheme: Scheme
    made: Calibrated
    merged: MergedWeights

    def wanted(self, name: str) -> Tensor:
        """A tensor before rounding, with what calibration moved from one to the other."""
        return self.made.smoothed(name, self.merged.read(name))

    @property
    def others(self) -> dict[str, str]:
        """The name in the model of each tensor that is no wider or narrower than in ``safetensors``, by its key."""
        base = self.merged.base
        found = {stored.keys[0]: stored.names[0] for stored in base.stored if stored.names}
        found |= {base.renaming.key_of(name): name for name in self.merged.untied}
        return {key: name for key, name in found.items() if key not in self.names}

    @property
    def keys(self) -> dict[str, str]:
        """The key of each tensor of the model that is written, parts among them; a tied head has its embedding's."""
        found = {name: key for key, name in {**self.others, **self.names}.items()}
        for key, name in self.names.items():
            parts = self.scheme.parts(self.merged.base.shape(name))
            found |= {_part_key(name, leaf): _part_key(key, leaf) for leaf in parts}
        return found | {name: found[other] for name, other in self.merged.base.ties.items() if name not in found}


def _verify(
    source: ExportSource,
    folder: Path,
    plan: ModelPlan,
    names: Mapping[str, str],
    scheme: Scheme,
    made: Calibrated,
    say: Callable[[str], None],
) -> Verified:
    say("verifying: comparing weights")
    base, adapted = base_weights(source), plan.adapted
    merged = MergedWeights(base, {} if adapted is None else source_updates(source, adapted))
    rounded = _Rounded(names, scheme, made, merged)
    problems = _compare_weights(folder, plan, rounded, passed_over(source))
    say("verifying: loading the result again")
    tokenizer = source_tokenizer(source)
    model: Any = unwritten(plan.config) if adapted is None else adapted
    probe, trained = trained_logits(model, base, probe_batch(tokenizer, base.shape(base.ends[0])[0]))
    request = model_request(folder, probe, elements(base), names=rounded.keys)
    answer = source.reload(request, sent(probe))
    problems += answer.problems
    if problems:
        raise not_verified(folder, problems)
    problems, facts = check_answer(answer, trained, probe, tokenizer, plan.stops, scheme.tolerance)
    if problems:
        raise not_verified(folder, problems)
    how = " with rounded activations" if scheme.numbers.get("input_activations") else ""
    compared = f"every weight, logits{how}, tokenizer, stop tokens"
    loss = _losses(answer.tensors[LOGITS], trained)
    facts = {"rounded": len(names), **made.facts, **facts, **loss, "loaded": loaded(request), **reloaded(answer)}
    return Verified(compared, facts, merged_with=plan.merged_with)


def _compare_weights(folder: Path, plan: ModelPlan, rounded: _Rounded, further: Mapping[str, TensorFile]) -> list[str]:
    """Problems of the files, tensor by tensor: compared with what the adapter's own file says, without PEFT.

    ``further``: Tensors that are not the model's own.
    """
    scheme, merged = rounded.scheme, rounded.merged
    try:
        files = tensor_files(folder)
        for stored in merged.base.stored:
            further = {**further, **(dict(zip(stored.keys, stored.files, strict=True)) if not stored.names else {})}
        of_key = {key: scheme.parts(merged.base.shape(name)) for key, name in rounded.names.items()}
        parts = {_part_key(key, leaf) for key, parts in of_key.items() for leaf in parts}
        problems = unlike_names(files, {*rounded.others, *parts, *further}, "is not the model's")
        if problems:
            return shortened(problems)
        for key, name in rounded.names.items():
            held = {leaf: files[_part_key(key, leaf)].read(_part_key(key, leaf)) for leaf in of_key[key]}
            wanted, given = rounded.wanted(name).float(), rounded.made.given.get(name)
            problem = _misshapen(held, of_key[key]) or scheme.unlike(held, wanted, given)
            problems += [f"{key} {problem}"] if problem else []
        for key, file in further.items():
            pieces = zip_longest(files[key].pieces(key), file.pieces(key))
            problems += [] if all(one == other for one, other in pieces) else [f"{key} differs from the base model's"]
        for key, name in rounded.others.items():
            exact = name not in merged.changes or merged.changes[name].whole is not None
            dtype = plan.rounding.of(name, merged.base.of(name))
            problem = difference(files[key].read(key), rounded.wanted(name), dtype, exact=exact)
            problems += [f"{key} {problem}"] if problem else []
    except (OSError, SafetensorError) as error:
        return [f"its weights cannot be read: {first_line(error)}"]
    return shortened(problems)


def _misshapen(held: Mapping[str, Tensor], parts: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> str | None:
    for leaf, (shape, dtype) in parts.items():
        if held[leaf].dtype != dtype or tuple(held[leaf].shape) != shape:
            return f"is {held[leaf].dtype} {tuple(held[leaf].shape)} in {leaf}"
    return None


def _losses(found: Tensor, trained: Tensor) -> dict[str, float]:
    """The loss in nats on what the trained model says next at each place of the probe, before and after rounding."""
    says = trained.log_softmax(-1)
    before, after = (-(says.exp() * each).sum(-1).mean() for each in (says, found.log_softmax(-1)))
    return {"loss": float(after), "loss_unrounded": float(before)}
