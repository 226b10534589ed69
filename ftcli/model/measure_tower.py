"""Measures what training a vision tower takes: its trained weights, and the bytes a patch that its layers keep.

The values are :class:`ftcli.plan.measured.MeasuredTower`. transformers' own tower, with PEFT's adapters as a run has
them, sees images of a few patches at its true widths with one layer and with two; what each further layer and each
further patch takes is the same.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ftcli.config.model import LoraConfig
from ftcli.empty_weights import Undrawn
from ftcli.model.backbone import base_of
from ftcli.model.load import config_of
from ftcli.model.lora import apply_lora
from ftcli.model.lora_targets import freeze_other_parts
from ftcli.model.measure import LiveBytes
from ftcli.model.pretrained import hollow
from ftcli.model.vision import TowerOf, attend_in_tower
from ftcli.plain import JsonObject
from ftcli.plan.measured import MeasuredTower, Question, TowerBytes, config_in
from ftcli.plan.precision import DtypePlan
from ftcli.plan.trained import TrainedMatrices, TrainedParameters
from ftcli.tables import code_of
from ftcli.tables.images import TABLE

#: vision_config's names for the number of layers.
_DEPTHS = ("depth", "num_hidden_layers")
#: Patches of the side of an image that is seen: any number that towers merge divides it.
_SIDE = 6
#: What backward of a layer allocates, as a share of what the layer keeps.
_OF_BACKWARD = 0.3


def measured_tower(question: Question) -> MeasuredTower:
    """Bytes of the tower and the projector of ``question.parts``; measured once.

    Raises FtcliError as :func:`ftcli.plan.measured.measured_model`.
    """
    anywhere = replace(question, attention="", longest=0, window=None, documents=False, stores=False)
    return _measured(anywhere)


@lru_cache(maxsize=8)
def _measured(question: Question) -> MeasuredTower:
    raw = config_in(question)
    vision = raw["vision_config"] = config_of(raw).vision_config.to_dict()  # as transformers completes it
    depth = next(int(vision[name]) for name in _DEPTHS if name in vision)
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of PEFT and transformers, which a run says again
        one, two = (_kept(question, raw, layers) for layers in (1, 2))
        whole = _built(question, raw)
    layer = two - one
    outer = max(0.0, one - layer)
    stream = int(vision["hidden_size"]) * getattr(torch, question.parameter).itemsize
    return MeasuredTower(
        _trained(whole),
        whole=TowerBytes(outer + depth * layer, _OF_BACKWARD * layer),
        again=TowerBytes(outer + depth * stream, (1 + _OF_BACKWARD) * layer),
    )


def _kept(question: Question, raw: JsonObject, layers: int) -> float:
    """Bytes a patch that a tower of so many layers keeps."""
    changed = copy.deepcopy(raw)
    vision = changed["vision_config"]
    vision |= {name: layers for name in _DEPTHS if name in vision}
    vision |= {name: [0] for name in ("deepstack_visual_indexes", "fullatt_block_indexes") if vision.get(name)}
    if (tokens := changed.get("mm_tokens_per_image")) is not None:
        pooled = vision["image_size"] // vision["patch_size"] // math.isqrt(tokens)
        changed["mm_tokens_per_image"] = max(1, _SIDE // pooled) ** 2
    if "image_size" in vision:
        vision["image_size"] = _SIDE * vision["patch_size"]
    model = _built(question, changed)
    kind, base = TABLE[str(raw["model_type"])], base_of(model)
    for path in {path.partition(".")[0] for path in (*kind.vision, *kind.projector)}:
        base.model.get_submodule(path).to_empty(device="cpu")
    own = [tensor for tensor in (*model.parameters(), *model.buffers()) if tensor.device.type == "cpu"]
    with torch.no_grad():
        for tensor in own:
            tensor.zero_()
    tower: TowerOf = code_of(kind.tower)
    found = []
    for images in (1, 2):
        given: Mapping[str, Tensor] = code_of(kind.example)(base.config, images, _SIDE)
        live = LiveBytes([*own, *given.values()])
        with live, torch.autocast("cpu", dtype=getattr(torch, question.compute), enabled=question.autocast):
            seen = tower(base.model, given)
            found.append(live.now)
        del seen
    return max(0.0, (found[1] - found[0]) / _SIDE**2)


def _built(question: Question, raw: JsonObject) -> Any:
    """The model without memory, with one decoder layer, its parts trained as the recipe says."""
    config = config_of(raw, 1)
    model = hollow(config, dtype=getattr(torch, question.parameter))
    attend_in_tower(model)
    parts = question.parts
    if question.lora is None:
        freeze_other_parts(model, parts)
        return model.train()
    lora = LoraConfig.model_validate_json(question.lora)
    settings = lora.model_copy(update={"init_lora_weights": True, "modules_to_save": ()})
    dtypes = DtypePlan(question.parameter, question.adapter, question.compute, question.autocast, "")
    with torch.device("meta"), Undrawn():
        adapted, _ = apply_lora(model, settings, dtypes, seed=0, parts=parts)
    return adapted.train()


def _trained(model: Any) -> TrainedParameters:
    """Parameters that are trained beside the language model."""
    kind = TABLE[base_of(model).config.model_type]
    named = [(name, p) for name, p in base_of(model).named_parameters() if p.requires_grad]
    sizes: Sequence[torch.Size] = [p.shape for name, p in named if kind.part_of(name) in ("projector", "vision")]
    found = Counter((shape[0], shape.numel() // shape[0]) for shape in sizes if len(shape) > 1)
    matrices = tuple(TrainedMatrices(rows, columns, count) for (rows, columns), count in found.items())
    return TrainedParameters(sum(shape.numel() for shape in sizes), matrices)
