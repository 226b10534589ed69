"""A score in place of the language model's head: one number for a row, from the hidden state of its last token.

The layer is called ``score``, as in transformers' sequence classifiers, which load what is saved here. A model that is
trained keeps its language model's head, frozen and unused: kernels, checks and quantization are those of every model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ftcli.errors import FtcliError
from ftcli.model.backbone import base_of, hidden_states, root_of

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PretrainedConfig, PreTrainedModel

#: The layer's name in the model and in files.
SCORE = "score"
#: PEFT's name for what is trained.
TASK_TYPE = "SEQ_CLS"
_SEED = 0x5C07E


def add_score_head(model: PreTrainedModel, seed: int) -> None:
    """Adds a (1, hidden_size) layer without bias, float32, drawn as transformers draws one; freezes the model's head.

    Raises:
        FtcliError: FT351 (exit 3) for a family of which transformers has no sequence classifier.
    """
    classifier_name(model.config)
    weight = model.get_input_embeddings().weight
    layer = nn.Linear(model.config.get_text_config().hidden_size, 1, bias=False, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed ^ _SEED)
    with torch.no_grad():
        deviation = float(getattr(model.config.get_text_config(), "initializer_range", 0.02))
        layer.weight.normal_(0.0, deviation, generator=generator)
    model.add_module(SCORE, layer.to(weight.device))
    head = model.get_output_embeddings()
    if head is not None and head.weight is not weight:
        head.requires_grad_(False)


def has_score_head(model: PreTrainedModel | PeftModel) -> bool:
    """True if :func:`add_score_head` was called."""
    return SCORE in dict(base_of(model).named_children())


def scores(model: PreTrainedModel | PeftModel, states: Tensor) -> Tensor:
    """(rows, hidden_size) hidden states -> (rows,) float32. The product is in float32 under autocast, too."""
    layer: Any = base_of(model).get_submodule(SCORE)
    with torch.autocast(states.device.type, enabled=False):
        if root_of(model) is not None:  # sharded weights that are trained are all-gathered in the compute dtype
            return F.linear(states.float(), layer.weight.float()).squeeze(-1)
        found: Tensor = layer(states.float())
    return found.squeeze(-1)


def row_scores(model: PreTrainedModel | PeftModel, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
    """The score of each row (rows, tokens), padded on the right, and the hidden state that it is of."""
    states = hidden_states(model, {"input_ids": input_ids, "attention_mask": attention_mask}).tensor
    ends = states[torch.arange(len(states)), attention_mask.sum(1) - 1]
    return scores(model, ends), ends


def classifier_name(config: PretrainedConfig) -> str:
    """The class of transformers that loads a model of ``config`` with a score.

    Raises:
        FtcliError: FT351 (exit 3) where there is none.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES as NAMES

    name = NAMES.get(config.model_type)
    if name is None or config.get_text_config() is not config:
        raise FtcliError.single(
            "FT351",
            f"transformers has no sequence classifier of {config.model_type}, so no reward model of it could be saved",
            help="choose another base model for train.method: reward",
        )
    return str(name)


def as_classifier(config: PretrainedConfig) -> PretrainedConfig:
    """``config``, changed to that of a sequence classifier with one number. Raises as :func:`classifier_name`."""
    config.architectures = [classifier_name(config)]
    config.num_labels = 1
    return config


def without_head(model: PreTrainedModel, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """``weights`` of a model with a score as they are saved: its unused head is left out."""
    head = model.get_output_embeddings()
    unused = {name for name, module in model.named_modules() if module is head}
    return {name: tensor for name, tensor in weights.items() if name.rpartition(".")[0] not in unused}


def write_classifier_config(model: PreTrainedModel, folder: Path) -> None:
    """Makes the config.json in ``folder`` that of a sequence classifier with one number."""
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config |= {
        "architectures": [classifier_name(model.config)],
        "id2label": {"0": "LABEL_0"},
        "label2id": {"LABEL_0": 0},
    }
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
