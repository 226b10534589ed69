"""Recipes that learn from preferences: methods and losses of other tools as ``preference`` and ``reward`` have them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ftcli.config.conversion import rules as r
from ftcli.config.conversion import sources
from ftcli.config.conversion.draft import Draft, is_off, truth
from ftcli.config.conversion.source import ForeignSetting
from ftcli.errors import Finding
from ftcli.tables import layouts, methods, preference_losses

#: Settings by which a recipe of TRL's trainers of preferences is told from one of its SFT trainer.
_SIGNS = (
    "loss_weights", "beta", "simpo_gamma", "cpo_alpha", "rpo_alpha", "ld_alpha", "ref_model", "ref_model_name_or_path",
    "precompute_ref_log_probs", "reference_free", "f_divergence_type", "max_prompt_length", "max_completion_length",
    "desirable_weight", "undesirable_weight",
)  # fmt: skip
#: Settings that only its trainer of CPO and SimPO has.
_OF_CPO = ("cpo_alpha", "simpo_gamma")
#: Settings that only its trainer of KTO has.
_OF_KTO = ("desirable_weight", "undesirable_weight")
#: What `trl` and classes say of the trainer.
_COMMANDS = {
    **{name: name for name in ("sft", "dpo", "kto", "orpo", "cpo", "reward")}, "SFTTrainer": "sft",
    "UnslothTrainer": "sft", "DPOTrainer": "dpo", "KTOTrainer": "kto", "ORPOTrainer": "orpo", "CPOTrainer": "cpo",
    "RewardTrainer": "reward",
}  # fmt: skip
#: What folders, files and runs of such recipes are called, and whether that trainer is converted.
_TRAINERS: Mapping[str, str] = {
    **{name: name for name in ("dpo", "kto", "orpo", "cpo")},
    "simpo": "cpo",
    "reward": "reward",
    "rm": "reward",
    "grpo": "",
    "ppo": "",
    "rloo": "",
}
_SETTINGS_OF_PAIRS = tuple(f"preference.{name}" for name in ("label_smoothing", "gamma", "ld_alpha"))
_SETTINGS_OF_LABELS = tuple(f"preference.{name}" for name in ("desirable_weight", "undesirable_weight"))
#: Losses of the CPO trainer, as they are called here.
_CPO_LOSSES = {"sigmoid": "cpo", "simpo": "simpo", "alphapo": "simpo"}
#: The setting that only trainers of reward models have, and the layer that they train whole.
_OF_SCORES = "center_rewards_coefficient"
_SCORE = ("score", "classifier", "v_head")
_CHATS = "prompt as a list of messages with role and content, {answers} or as such lists"


def wanted(draft: Draft) -> bool:
    """True if the recipe learns from pairs."""
    return draft.get("train.method") in methods.names() and _section(draft) in ("preference", "reward")


def scored(draft: Draft) -> bool:
    """True if it teaches a reward model."""
    return bool(draft.get("train.method") == "reward")


def labelled(draft: Draft) -> bool:
    """True if it learns from single answers with a label."""
    return bool(draft.get("train.method") == "kto")


def _rows(draft: Draft) -> str:
    return "labelled answers" if labelled(draft) else "pairs"


def _section(draft: Draft) -> str | None:
    return methods.row(draft.get("train.method")).section


def losses_of(draft: Draft) -> list[str]:
    """The losses drafted so far; the one that the method is named after where there are none."""
    drafted = draft.get("preference.loss")
    if isinstance(drafted, list):
        return [str(each["name"]) for each in drafted]
    method = str(draft.get("train.method"))
    return [str(drafted or (method if method in preference_losses.names() else "sigmoid"))]


def choose(draft: Draft, given: ForeignSetting | None, names: Sequence[object], weights: object = None) -> None:
    """Drafts losses by the names that TRL has for them, of which `sft` is a weight of its own here.

    Raises FtcliError FT163 for losses that are not offered: each of them teaches something else.
    """
    weighed = weights if isinstance(weights, list) and len(weights) == len(names) else [1.0] * len(names)
    if weighed != weights or not all(map(_is_weight, weighed)):
        weighed = [1.0] * len(names)
        if weights is not None and given is not None:
            help = "each loss has one weight; write them into preference.loss: [{name: …, weight: …}]"
            draft.unusable(given, f"the weights {weights} of {len(names)} losses", help)
    pairs = [(str(name), weight) for name, weight in zip(names, weighed, strict=True) if weight]
    known = preference_losses.names(paired=not labelled(draft))
    for name, _ in pairs:
        if name not in (*known, "sft"):
            raise draft.refuse(given, f"the loss `{name}` is not offered", f"preference.loss is {', '.join(known)}")
    compared = [{"name": name, "weight": weight} for name, weight in pairs if name != "sft"]
    if not compared:
        raise draft.refuse(given, "no loss compares the two answers", "supervised fine-tuning is train.method: sft")
    for name, weight in pairs:
        if name == "sft":
            draft.put("preference.sft_weight", weight, given)
    single = len(compared) == 1 and compared[0]["weight"] == 1
    draft.put("preference.loss", compared[0]["name"] if single else compared, given)


def _is_weight(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1e6


def finish(draft: Draft, beta: float = 0.1, *, drops: bool = True, prompts: bool = True) -> None:
    """Drafts what follows from the losses, and leaves out what preference methods do not offer. ``beta`` is the tool's
    default; under ``drops`` it switches dropout off unless `disable_dropout` says otherwise, and under ``prompts`` its
    ORPO trains the prompt's tokens as well.
    """
    _of_one_section(draft)
    if not wanted(draft):
        return
    draft.default("train.warmup_steps", 0)
    if scored(draft):
        _score_alone(draft)
    else:
        names = losses_of(draft)
        if any(preference_losses.row(name).beta != beta for name in names):
            draft.default("preference.beta", beta)
        _of_one_kind(draft)
        _tell_of_losses(draft, names, prompts=prompts)
    if drops and truth(draft.said("disable_dropout")) is not False:
        _no_dropout(draft)
    _leave_out(draft)


def _of_one_section(draft: Draft) -> None:
    """Leaves out settings of methods that are not the recipe's."""
    own = _section(draft) if draft.get("train.method") in methods.names() else None
    for key in [key for key in draft.values if key.startswith(("preference.", "reward.")) and key.split(".")[0] != own]:
        readers = [name for name in methods.names() if methods.row(name).section == key.split(".")[0]]
        draft.leave_out(key, "FT160", f"`{key}` is left out", f"it is read by train.method {', '.join(readers)}")


def _score_alone(draft: Draft) -> None:
    """Takes the score off the modules that are trained whole: here it always is."""
    drafted = draft.values.get("lora.modules_to_save")
    if drafted is not None and isinstance(drafted.value, list):
        rest = [name for name in drafted.value if name not in _SCORE]
        del draft.values["lora.modules_to_save"]
        if rest:
            draft.values["lora.modules_to_save"] = replace(drafted, value=rest)


def _of_one_kind(draft: Draft) -> None:
    """Leaves out settings of labelled answers under pairs, and of pairs under these; tells what KTO means here."""
    others = _SETTINGS_OF_PAIRS if labelled(draft) else _SETTINGS_OF_LABELS
    for key in (key for key in others if key in draft.values):
        method = methods.row(draft.get("train.method"))
        draft.leave_out(key, "FT160", f"`{key}` is left out: {method.title} does not read it")
    if labelled(draft) and preference_losses.row(losses_of(draft)[0]).estimates_kl:
        help = "so no split into micro-batches and processes changes the loss; preference.kl_rows makes it cheaper"
        draft.remark(f"{draft.tool} estimates KTO's KL in each micro-batch; here it is that of the whole step", help)


def _no_dropout(draft: Draft) -> None:
    drafted = draft.values.pop("lora.dropout", None)
    if drafted is not None and drafted.origin is not None and not is_off(drafted.value):
        draft.put("lora.dropout", 0.0, comment=f"{draft.tool} switches dropout off for {_rows(draft)}")
        help = "set lora.dropout where you want it: the policy has it then, and the reference has not"
        what = f"{draft.tool} switches dropout off for {_rows(draft)}, that of adapters too: lora.dropout is 0"
        draft.findings.append(Finding("FT161", what, drafted.origin, help, "warning"))


def _tell_of_losses(draft: Draft, names: Sequence[str], *, prompts: bool) -> None:
    beta = draft.get("preference.beta")
    if "ipo" in names and isinstance(beta, int | float) and beta > 0:
        help = "recipes of before 2024 meant nats of whole answers; 0.5 or more is usual for nats a token"
        draft.remark(f"ipo compares nats a token: preference.beta {beta:g} asks for {1 / (2 * beta):g} of them", help)
    if "orpo" in names and prompts:
        help = "the weight of prompts cannot be set; answers are compared as there"
        draft.remark(f"{draft.tool}'s ORPO trains the prompt's tokens, too; here it trains the chosen answer's", help)


def _leave_out(draft: Draft) -> None:
    """Leaves out what preference methods do not offer, and says so of what the file says."""
    method = methods.row(draft.get("train.method"))
    loss_on = layouts.row(str(method.defaults["data.format"])).loss_on
    offered = {**method.supports, "data.loss_on": ("auto", *loss_on)}
    for key, values in offered.items():
        drafted = draft.values.get(key)
        if drafted is None or drafted.value in values:
            continue
        if drafted.origin is None:
            del draft.values[key]
        else:
            help = f"choose from {', '.join(map(str, values))}" if None not in values else "remove it"
            what = f"`{key}: {drafted.value}` is not offered with {method.title}: it is left out"
            draft.leave_out(key, "FT162", what, help)


# -- settings -----------------------------------------------------------------------------------------------------


def smoothing(draft: Draft, given: ForeignSetting) -> None:
    """Label smoothing is cDPO's, or robust's."""
    names = losses_of(draft)
    if is_off(given.value):
        return
    if not any(preference_losses.row(name).smooths for name in names):
        help = f"there it is for {', '.join(name for name in preference_losses.names() if _smooths(name))}"
        draft.unusable(given, f"`{given.name}: {given.value}` has no meaning for {', '.join(names)} here", help)
        return
    draft.take(given, "preference.label_smoothing")


def _smooths(name: str) -> bool:
    return preference_losses.row(name).smooths


def _smoothing_of_trl(draft: Draft, given: ForeignSetting) -> None:
    """TRL's, which its DPO trainer has ignored with most losses since it was written anew; the CPO trainer has not."""
    names = losses_of(draft)
    if is_off(given.value) or {"robust", "cpo"} & set(names) or not any(map(_smooths, names)):
        smoothing(draft, given)
        return
    help = f"preference.label_smoothing: {given.value} is conservative DPO, which TRL had before 0.28"
    draft.unusable(given, f"TRL 1.16 ignores `{given.name}: {given.value}` with {', '.join(names)}", help)


def told_smoothing(draft: Draft, given: ForeignSetting) -> None:
    """Label smoothing of tools that mean conservative DPO by it, and may get something else from their TRL."""
    smoothing(draft, given)
    if "preference.label_smoothing" in draft.values:
        help = "that is preference.label_smoothing with sigmoid; `loss: robust` is the unbiased form"
        draft.differs(given, f"`{given.name}: {given.value}` is conservative DPO (cDPO) here", help)


def gamma(draft: Draft, given: ForeignSetting) -> None:
    """SimPO's margin."""
    if "simpo" in losses_of(draft):
        draft.take(given, "preference.gamma")
    else:
        draft.lost(given, "simpo alone has a margin", harmless=True)


#: The weight of the chosen answers' cross-entropy; 0 is ours where nothing is said.
cross_entropy = r.unless_off("preference.sft_weight")


def _cpo_alpha(draft: Draft, given: ForeignSetting) -> None:
    if {"cpo", "simpo"} & set(losses_of(draft)) and draft.said("loss_type") != "alphapo":
        cross_entropy(draft, given)
    else:
        draft.lost(given, "it is read by the trainer of CPO and SimPO", harmless=True)


def continued(draft: Draft, given: ForeignSetting, base: object = None) -> None:
    """An adapter that training goes on from. It is compared with itself as it was loaded, or with ``base``, where the
    tool takes the model without any adapter.
    """
    if not isinstance(given.value, str) or "," in given.value or truth(draft.said("create_new_adapter")):
        draft.lost(given, "several adapters, or a new one beside them: merge them into the model and name that")
        return
    draft.take(given, "lora.start_from")
    help = "lora.r, alpha and target_modules have to be the adapter's own: `ftcli check` compares them"
    if draft.said("ref_model") or not wanted(draft) or scored(draft) or not _compared(draft):
        draft.differs(given, f"training goes on from the adapter in `{given.value}`", help)
    elif base is None:
        draft.differs(given, "the reference is the adapter as it was loaded", help)
    else:
        draft.put("preference.reference", base)
        what = f"{draft.tool} compares a continued adapter with the raw base, which preference.reference names"
        draft.differs(given, what, f"remove that to compare with the adapter as it was loaded; {help}")


def reference(draft: Draft, given: ForeignSetting) -> None:
    """A reference model of the recipe's own; the model that is trained is the one as training begins."""
    same = given.value == draft.said("model_name_or_path")
    if is_off(given.value) or (same and draft.said("ref_model_revision") in (None, draft.said("model_revision"))):
        return
    if scored(draft):
        draft.lost(given, "a reward model is compared with no reference", harmless=True)
        return
    if not _compared(draft):
        draft.lost(given, f"{', '.join(losses_of(draft))} compares with no reference", harmless=True)
        return
    if "/" not in str(given.value):
        what = f"`{given.name}: {given.value}` is no OWNER/NAME and no path"
        draft.unusable(given, what, "write the model into preference.reference, a folder as ./NAME")
        return
    draft.put("preference.reference", given.value, given)


def _revision(draft: Draft, given: ForeignSetting) -> None:
    """The revision of a reference; that of the trained model stands elsewhere."""
    named = draft.said("ref_model_name_or_path") or draft.said("ref_model")
    if is_off(given.value) or (
        named == draft.said("model_name_or_path") and given.value == draft.said("model_revision")
    ):
        return
    if named is None:
        draft.lost(given, "it is of a reference, and none is named", harmless=True)
    elif "/" in str(named) and not scored(draft) and _compared(draft):
        draft.put("preference.reference_revision", given.value, given)


def _compared(draft: Draft) -> bool:
    return any(preference_losses.row(name).reference for name in losses_of(draft))


def _reference_free(draft: Draft, given: ForeignSetting) -> None:
    """DPO against nothing is CPO without its cross-entropy."""
    if is_off(given.value):
        return
    if losses_of(draft) != ["sigmoid"]:
        names = ", ".join(losses_of(draft))
        help = "reference-free losses are simpo, cpo and orpo"
        raise draft.refuse(given, f"{names} compares with a reference, and `{given.name}` takes it away", help)
    draft.put("preference.loss", "cpo", draft.given.get("loss_type"), "sigmoid without a reference")
    draft.put("preference.reference", "none", given)
    help = "that is preference.loss: cpo without sft_weight; simpo compares nats a token"
    draft.differs(given, "sigmoid without a reference became preference.loss: cpo", help)


def _loss_type(draft: Draft, given: ForeignSetting) -> None:
    if not wanted(draft) and str(given.value) not in ("nll", "chunked_nll"):
        draft.lost(given, "the loss is the negative log-likelihood of each token")


#: What TRL's trainers of preferences read.
OF_TRL: Mapping[str, r.Rule] = {
    "beta": r.to("preference.beta"),
    "ld_alpha": r.to("preference.ld_alpha"),
    "use_weighting": r.to("preference.use_weighting"),
    "label_smoothing": _smoothing_of_trl,
    "loss_type": _loss_type,
    "loss_weights": r.read,
    "simpo_gamma": gamma,
    "cpo_alpha": _cpo_alpha,
    "rpo_alpha": cross_entropy,
    "ref_model": reference,
    "ref_model_name_or_path": reference,
    "ref_model_revision": _revision,
    "reference_free": _reference_free,
    _OF_SCORES: r.unless_off("reward.center_rewards_coefficient"),
    "disable_dropout": r.read,
}


# -- TRL's trainers -----------------------------------------------------------------------------------------------


def of_trl(draft: Draft) -> None:
    """Finds out which of TRL's trainers the settings are for, and drafts method and losses of one that takes pairs."""
    trainer, said = _trainer(draft)
    if trainer is None:
        return
    given = draft.given.get("loss_type")
    names = sources.listed(draft.said("loss_type"))
    if trainer == "cpo":
        _cpo(draft, given, names)
    else:
        draft.put("train.method", trainer, said)
        if trainer == "reward":
            _drops_long_pairs(draft)
        elif trainer in ("dpo", "kto") and names:
            choose(draft, given, names, draft.said("loss_weights"))


def _drops_long_pairs(draft: Draft) -> None:
    """Drafts TRL's own ways with reward models: long pairs are dropped, and a margin is subtracted."""
    draft.default("data.overlong", "drop")
    help = "reward.margin: true reads the column `margin`; data.columns maps another name"
    draft.remark("TRL subtracts a margin wherever rows have the column; here it is read on request", help)


def _cpo(draft: Draft, given: ForeignSetting | None, names: Sequence[object]) -> None:
    theirs = str(names[0]) if names else "sigmoid"
    ours = _CPO_LOSSES.get(theirs)
    if ours is None or len(names) > 1:
        help = "its losses are converted where they are sigmoid (cpo here) or simpo"
        raise draft.refuse(given, f"CPO with the loss `{theirs}` is not offered", help)
    if theirs == "alphapo" and not is_off(draft.said("alpha")):
        raise draft.refuse(given, "AlphaPO is not offered", "simpo is its form with alpha: 0")
    draft.put("train.method", "simpo" if ours == "simpo" else "dpo", given or draft.given.get("command"))
    if ours == "cpo":
        draft.put("preference.loss", "cpo", given, "CPO compares with no reference")
    if theirs != "alphapo":
        default_cross_entropy(draft)


def default_cross_entropy(draft: Draft) -> None:
    """Drafts the term that TRL's trainer of CPO and SimPO adds to the loss by default."""
    if "cpo_alpha" not in draft.given:
        draft.default("preference.sft_weight", 1.0, "TRL")
        help = "cpo_alpha is 1.0 there; preference.sft_weight: 0 is the loss of SimPO's paper"
        draft.remark("TRL adds the chosen answers' cross-entropy to CPO and SimPO alike: preference.sft_weight", help)


def _trainer(draft: Draft) -> tuple[str | None, ForeignSetting | None]:
    """dpo, kto, orpo, cpo or reward; None for SFT. Raises FtcliError FT163 where a name says it is another."""
    command = draft.given.get("command") or draft.given.get("trainer")
    known = None if command is None else _COMMANDS.get(str(command.value))
    if known is not None:
        return (None if known == "sft" else known), command
    if _OF_SCORES in draft.given:
        return "reward", draft.given[_OF_SCORES]
    said = next((draft.given[name] for name in _SIGNS if name in draft.given), None)
    losses = {str(name) for name in sources.listed(draft.said("loss_type"))}
    if losses & {"simpo", "alphapo"} or any(name in draft.given for name in _OF_CPO):
        return "cpo", None
    if losses & set(preference_losses.names(paired=False)) or any(name in draft.given for name in _OF_KTO):
        return "kto", None
    if losses & set(preference_losses.names(paired=True)):
        return "dpo", None
    by_file = _named([draft.file.parent.name]) or _named(_parts(draft.file.stem))
    if said is None and not by_file:
        return None, None
    texts = [str(draft.said(name) or "") for name in ("run_name", "hub_model_id", "output_dir")]
    name = by_file or _named([part for text in texts for part in _parts(Path(text).name)]) or "dpo"
    if not _TRAINERS[name]:
        help = "there are dpo, kto, orpo, simpo and reward; for rewards begin with `ftcli recipes copy smoke-grpo`"
        raise draft.refuse(said, f"a recipe of {name.upper()}, by its name, is not converted", help)
    help = (
        "change train.method where it is another; or write `command: dpo` (kto, orpo, cpo, reward, sft) into the file"
    )
    draft.remark(f"the settings do not say which trainer of TRL reads them: taken for {name.upper()}", help)
    return _TRAINERS[name], None


def _parts(name: str) -> list[str]:
    return re.split(r"[^a-z0-9]+", name.lower())


def _named(words: Sequence[str]) -> str | None:
    return next((word for word in words if word in _TRAINERS), None)


# -- rows ---------------------------------------------------------------------------------------------------------


def plain_texts(draft: Draft, given: ForeignSetting, what: str) -> None:
    """Tells of rows of strings, which other tools write as turns of a chat."""
    message = f"{what}: rows of strings become turns in {draft.tool}; here they are plain text, without a chat template"
    draft.differs(given, message, f"prepare the file: {_chats(draft)}")


def odd_messages(draft: Draft, given: ForeignSetting, what: str) -> None:
    """Tells of messages that rows cannot hold here."""
    draft.unusable(given, what, f"rows of {_rows(draft)} have {_chats(draft)}; prepare the file so")


def _chats(draft: Draft) -> str:
    answers = "completion as it is" if labelled(draft) else "chosen and rejected as they are"
    return _CHATS.format(answers=answers)
