"""Proof that what is saved is what was trained: every tensor by name, and bit for bit.

PEFT and transformers decide which tensors go into a file. They find them by walking over the model's modules, so a
module that stands where they do not look is left out without a word. A run asks here before the first step whether all
that it trains would be saved, and at its end whether it was.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ftcli.errors import ExitCode, FtcliError
from ftcli.facts.weights import FURTHER_WEIGHTS, MODEL_CARD
from ftcli.model.initial_adapters import initial_of, load_over, trained_by_file_name
from ftcli.model.pretrained import first_few
from ftcli.model.score_head import SCORE, has_score_head, without_head, write_classifier_config
from ftcli.model.shards import load_shards

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel


def require_saveable(model: PreTrainedModel | PeftModel) -> None:
    """Holds what PEFT would save against what is trained. Does nothing for a model without adapters.

    Raises:
        FtcliError: FT706 (exit 1) when a trained tensor would be left out of the adapter, or another one saved.
    """
    if not hasattr(model, "peft_config"):
        return
    from peft import get_peft_model_state_dict

    problems = _names_that_differ(
        set(get_peft_model_state_dict(model, save_embedding_layers=False)), set(_trained(model))
    )
    if problems:
        raise _differs("the adapter would not hold what is trained", problems)


def save_weights(model: Any, folder: Path, whole: dict[str, Tensor] | None = None) -> None:
    """Writes an adapter in PEFT's layout or a model in transformers', safetensors in either case.

    Args:
        whole: All weights of a model that has only a part of them.
    """
    if not hasattr(model, "peft_config"):
        if has_score_head(model):
            model.save_pretrained(str(folder), state_dict=_weights(model, whole))
            write_classifier_config(model, folder)
        else:
            model.save_pretrained(str(folder), state_dict=None if whole is None else dict(whole))
        return
    # PEFT writes a card of placeholders that names the base's folder. To one that is there it adds a few lines, which
    # takes a tenth of what a new one out of its template does.
    card = folder / MODEL_CARD
    folder.mkdir(parents=True, exist_ok=True)
    card.write_text("---\nlibrary_name: peft\n---\n", encoding="utf-8")  # of an empty head one is warned
    # "auto" asks the Hub whether the vocabulary has grown; ftcli never resizes it.
    model.save_pretrained(str(folder), save_embedding_layers=False)
    card.unlink(missing_ok=True)
    initial = initial_of(model)
    if initial is not None:
        initial.rewrite(folder)


@torch.no_grad()
def load_weights(model: Any, folder: Path, *, sharded: bool = False) -> None:
    """Loads what :func:`save_weights` wrote: every trained tensor of an adapter, every weight of a model.

    Args:
        sharded: The model's weights are sharded over ranks; each takes its own shards.

    Raises:
        KeyError, ValueError: a tensor is missing or has another shape.
        OSError: a file cannot be read.
    """
    initial = initial_of(model)
    if initial is not None:
        load_over(model, initial, folder)
        return
    adapted = hasattr(model, "peft_config")
    wanted = trained_by_file_name(model) if adapted else _weights(model)
    if not adapted and set(_saved_names(folder)) != set(wanted) and not sharded:
        # transformers stores some families' weights under other names, or one file tensor for each expert.
        wanted, found = _by_own_names(model), dict(_loaded_again(model, folder))
    else:
        found = dict(stored_weights(folder))
    if sharded:
        every = dict(model.named_parameters())
        load_shards(
            model, found, kept=every.keys() - without_head(model, every).keys() if has_score_head(model) else ()
        )
        return
    for name, tensor in wanted.items():
        if found[name].shape != tensor.shape:
            raise ValueError(f"{name} is stored with shape {tuple(found[name].shape)}, not {tuple(tensor.shape)}")
        tensor.copy_(found[name])


def check_saved(model: PreTrainedModel | PeftModel, folder: Path, whole: dict[str, Tensor] | None = None) -> None:
    """Reads ``folder`` again and compares it with the model: the adapter with all that was trained, a full fine-tune
    with every weight. ``whole``: as :func:`save_weights` takes it.

    Raises:
        FtcliError: FT706 (exit 1) when a tensor is missing, is there unasked, or differs in a bit.
        OSError: a file cannot be read.
    """
    if hasattr(model, "peft_config"):
        wanted = _saved_form(model)
    else:
        wanted = whole if whole and not has_score_head(model) else _weights(model, whole)
    names = set(_saved_names(folder))
    if not hasattr(model, "peft_config") and names != set(wanted):
        # transformers stores some families' weights under other names, or one file tensor for each expert.
        wanted, found = _by_own_names(model, whole), _loaded_again(model, folder)
    else:
        found = stored_weights(folder)
    seen: set[str] = set()
    problems: list[str] = []
    for name, tensor in found:
        seen.add(name)
        if name in wanted and not _equal(tensor, wanted[name]):
            problems.append(f"{name} differs")
    problems += _names_that_differ(seen, set(wanted))
    if problems:
        raise _differs(f"what was written to {folder} is not what was trained", problems)


def _trained(model: Any) -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter in trained_by_file_name(model).items()}


def _saved_form(model: Any) -> dict[str, Tensor]:
    """Trained tensors in the form that is saved."""
    initial, trained = initial_of(model), _trained(model)
    return trained if initial is None else initial.as_plain(trained)


def _weights(model: PreTrainedModel, whole: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """The model's weights, or ``whole``, without those that are tied to another one, which is stored in their place."""
    tied = set(getattr(model, "all_tied_weights_keys", None) or {})
    stored = model.state_dict() if whole is None else whole
    found = {name: tensor for name, tensor in stored.items() if name not in tied}
    return without_head(model, found) if has_score_head(model) else found


def _by_own_names(model: PreTrainedModel, whole: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """The model's weights, or ``whole``, with tied ones, and without the unused head of a model with a score."""
    stored = dict(whole or model.state_dict())
    return without_head(model, stored) if has_score_head(model) else stored


def _saved_names(folder: Path) -> Iterator[str]:
    from safetensors import safe_open

    for path in _saved_files(folder):
        with safe_open(path, framework="pt") as file:
            yield from file.keys()


def stored_weights(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Name and value of every stored tensor of the model, one in memory at a time."""
    from safetensors import safe_open

    for path in _saved_files(folder):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  # no dict
                yield name, file.get_tensor(name)


def _saved_files(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.glob("*.safetensors")) if path.name != FURTHER_WEIGHTS]


def _loaded_again(model: PreTrainedModel, folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Loads the folder with transformers, on the CPU; yields all tensors but those it would have to make up."""
    again, loading_info = type(model).from_pretrained(
        str(folder), dtype="auto", local_files_only=True, trust_remote_code=False, output_loading_info=True
    )
    made_up, weights = set(loading_info["missing_keys"]), again.state_dict()
    if has_score_head(model):  # the language model's class has no place for it, and makes its head up
        weights = without_head(again, weights)
        yield from ((name, tensor) for name, tensor in stored_weights(folder) if name.rpartition(".")[0] == SCORE)
    for name, tensor in weights.items():
        if name not in made_up:
            yield name, tensor


def _equal(found: Tensor, wanted: Tensor) -> bool:
    """Bit for bit, on the device where ``wanted`` is. NaN equals itself: it was saved as it was."""
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        return False
    found = found.to(wanted.device)
    return bool(torch.equal(found, wanted)) or bool(torch.equal(found.nan_to_num(), wanted.nan_to_num()))


def _names_that_differ(found: set[str], wanted: set[str]) -> list[str]:
    problems = [f"{name} is trained and not saved" for name in sorted(wanted - found)]
    return problems + [f"{name} is saved and not part of what is trained" for name in sorted(found - wanted)]


def _differs(what: str, problems: list[str]) -> FtcliError:
    return FtcliError.single(
        "FT706",
        f"{what}: {first_few(problems)}",
        exit_code=ExitCode.BUG,
        help="train with model.kernels: off, and report this with the run's manifest.json",
    )
