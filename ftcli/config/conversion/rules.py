"""Converts each setting of another tool's recipe: by its row of the table of names, or by a rule that computes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from ftcli.config.conversion.draft import Draft, is_off, truth
from ftcli.config.conversion.source import ForeignSetting
from ftcli.config.dialects import ForeignKey, rows_of
from ftcli.config.yaml import parse_value, plain_tree
from ftcli.plain import JsonMap

#: What becomes of one setting.
Rule = Callable[[Draft, ForeignSetting], None]
#: Tools that pass settings on to transformers' trainer, by the name that it has in the table of names.
_TRAINER = "transformers"
#: Our sections whose keys other tools call the same.
_HOMES = ("train", "lora", "data", "eval", "logging")


@dataclass(frozen=True, slots=True)
class Rules:
    """Rules of a tool beside its rows in :mod:`ftcli.config.dialects`.

    Attributes:
        computed: What takes more than a row, by the setting's dotted name.
        before: What has to be known first: whether all weights are trained, and what is no recipe of ours.
        after: What follows from several settings, and from what is not there.
        defaults: Values of ours that the tool has where the file says nothing, and ftcli has not.
        nulls: Settings whose null says something.
        flatten: Its sections only group settings: their names say nothing.
        trainer: It hands what it does not know to transformers' trainer.
    """

    computed: Mapping[str, Rule]
    before: Callable[[Draft], None] = lambda _: None
    after: Callable[[Draft], None] = lambda _: None
    defaults: JsonMap = field(default_factory=dict)
    nulls: frozenset[str] = frozenset()
    flatten: bool = False
    trainer: bool = True


def apply(rules: Rules, draft: Draft) -> None:
    """Drafts everything that the file says. Of what it does not know nothing is passed over."""
    for given in draft.given.values():
        row = _row(rules, draft, given)
        if row is not None and row.rule == "refuse" and not is_off(given.value):
            said = f"`{given.name}: {given.value}` is not converted"
            raise draft.refuse(given, said, row.note or "see docs/recipes.md for what there is")
    rules.before(draft)
    for given in draft.given.values():
        (_rule(rules, draft, given) or _unknown)(draft, given)
    for given in draft.blank.values():
        rule = _rule(rules, draft, given)
        if rule is None:
            draft.lost(given, "ftcli does not know it; it has no value there", harmless=True)
        elif given.name in rules.nulls:
            rule(draft, given)
    for key, value in rules.defaults.items():
        draft.default(key, value)
    rules.after(draft)


def vocabulary(rules: Rules, tool: str) -> set[str]:
    """Names of the tool's settings that are not transformers', by which its recipes are recognised."""
    return {*rows_of(tool), *rules.computed} - {*rows_of(_TRAINER), *_OF_TRANSFORMERS}


def our_keys(rules: Rules, draft: Draft, name: str) -> set[str]:
    """Our keys that a setting of this name may be."""
    rows = [*rows_of(draft.tool).get(name, ()), *(rows_of(_TRAINER).get(name, ()) if rules.trainer else ())]
    return {*(str(row.key) for row in rows), *(f"{section}.{name}" for section in _HOMES)} & set(draft.keys)


def _rule(rules: Rules, draft: Draft, given: ForeignSetting) -> Rule | None:
    """The rule of the setting; None if it is not known."""
    shared = _OF_TRANSFORMERS if rules.trainer else {}
    computed = rules.computed.get(given.name) or shared.get(given.name)
    if computed is not None:
        return computed
    row = _row(rules, draft, given)
    if row is not None:
        return lambda draft, given: _translate(row, draft, given)
    homes = () if given.section else [f"{section}.{given.name}" for section in _HOMES]
    return next((to(key) for key in homes if key in draft.keys), None)


def _row(rules: Rules, draft: Draft, given: ForeignSetting) -> ForeignKey | None:
    """The first row that is for the value. The tool's own come first, those of a whole section last."""
    tables = [rows_of(draft.tool), rows_of(_TRAINER) if rules.trainer else {}]
    name, outer = given.name, given.name
    rows = [row for table in tables for row in table.get(name, ())]
    while outer and not rows:
        rows = [row for table in tables for row in table.get(f"{outer}.*", ())]
        outer = outer.rpartition(".")[0]
    return next((row for row in rows if given.is_blank or _is_for(row, given.value)), None)


def _is_for(row: ForeignKey, value: object) -> bool:
    """True if the row is for this value. A row that writes a value of its own is for no value that means off."""
    return not row.only or bool(_words(value) & set(row.only)) or (": " in (row.target or "") and is_off(value))


def _words(value: object) -> set[str]:
    """Words for a value in the table."""
    number = int(value) if isinstance(value, float) and value.is_integer() else value
    switch = truth(value)
    return {str(number).lower(), *({"true"} if switch else {"false", "no"} if switch is False else ())}


def _translate(row: ForeignKey, draft: Draft, given: ForeignSetting) -> None:
    """Does what the table of names says of the rule of a row."""
    key, _, value = (row.target or "").partition(": ")
    words = _words(given.value)
    off = is_off(given.value) and not words & set(row.only)
    what, _, help = (row.note or f"here that is `{row.target}`").partition(" -> ")
    if row.rule in ("lost", "note") or not (row.rule or _is_settable(key, draft)):
        if not (words & set(row.usual) or (off and "true" not in row.usual)):
            draft.lost(given, what, harmless=row.rule == "note")
        return
    if row.rule == "differs" and not off:
        draft.differs(given, f"`{given.name}: {given.value}`: {what}", help)
    if row.rule == "steps":
        _steps(draft, given, key)
    elif value and not off:
        draft.put(key, plain_tree(parse_value(value, key).tree), given)
    elif not row.rule and not value:
        draft.take(given, key)


def _is_settable(key: str, draft: Draft) -> bool:
    """True for a key of ours, or one of a map that is one; not for a section, nor for a key of each item of a list."""
    return "[]" not in key and (key in draft.keys or key.rpartition(".")[0] in draft.keys)


def _steps(draft: Draft, given: ForeignSetting, key: str) -> None:
    value = given.value
    number = float(value) if isinstance(value, int | float) and not isinstance(value, bool) else 0.0
    if number >= 1 and number.is_integer():
        draft.put(key, int(number), given)
    else:
        draft.unusable(given, f"`{given.name}: {value}` is not a number of steps", f"write optimizer steps: {key}")


def _unknown(draft: Draft, given: ForeignSetting) -> None:
    draft.lost(given, "ftcli does not know it: see docs/recipes.md for what there is")


# -- rules that tools share ---------------------------------------------------------------------------------------


def read(_draft: Draft, _given: ForeignSetting) -> None:
    """Another rule has read it."""


def to(key: str) -> Rule:
    """The setting is our key."""
    return lambda draft, given: draft.take(given, key)


def unless(excepted: Callable[[Draft, ForeignSetting], bool], rule: Rule) -> Rule:
    """Follows ``rule`` but for settings that say nothing, or that another one counts before."""
    return lambda draft, given: None if excepted(draft, given) else rule(draft, given)


def unless_given(name: str, key: str) -> Rule:
    """The setting is our key, unless the file has another one that counts."""
    return unless(lambda draft, _: name in draft.given, to(key))


def unless_off(key: str) -> Rule:
    """The setting is our key; off is ours where nothing is said."""
    return unless(lambda _, given: is_off(given.value), to(key))


def attention(draft: Draft, given: ForeignSetting) -> None:
    """Implementations of attention: ftcli chooses, but for those that every device has."""
    word = str(given.value).lower()
    if word in ("eager", "sdpa"):
        draft.put("model.attention", word, given)
    elif word != "auto" and not is_off(given.value):
        why = "attention is chosen by ftcli from the model and the GPU (model.attention: auto)"
        draft.lost(given, why, harmless=True)


def checkpointing(draft: Draft, given: ForeignSetting) -> None:
    """Activation checkpointing. Off is left to `auto`: every policy gives the same numbers."""
    key = "train.gradient_checkpointing"
    if str(given.value).lower() in ("unsloth", "offload", "offload_disk"):
        draft.put(key, "offload", given, f"{draft.tool}: {given.value}; `auto` may be faster")
    elif not is_off(given.value) and draft.get(key) != "offload":
        draft.put(key, True, given)


def float32_unless_half(draft: Draft, *others: str) -> None:
    """`bf16: false`, in tools where it is on by itself, unless one of the ``others`` names a dtype."""
    given = draft.given.get("bf16")
    if given is not None and truth(given.value) is False and all(is_off(draft.said(name)) for name in others):
        draft.put("model.dtype", "float32", given)


def run_name(draft: Draft, given: ForeignSetting) -> None:
    """A run's name, in the letters that ours may have."""
    name = "".join(c if (c.isalnum() and c.isascii()) or c in "._-" else "-" for c in str(given.value)).lstrip("._-")
    if name:
        draft.put("run.name", name[:100], given)


def wandb(draft: Draft, given: ForeignSetting, *names: str) -> None:
    """Weights & Biases, with what the settings of these names say of project, entity and group."""
    said = {part: draft.said(name) for part, name in zip(("project", "entity", "group"), names, strict=False)}
    where = {part: str(value) for part, value in said.items() if value is not None}
    draft.put("logging.wandb", where or True, given)


def clipping(draft: Draft, given: ForeignSetting) -> None:
    """The greatest norm of a gradient; 0 and null clip nothing, which here takes a bound that is never met."""
    if is_off(given.value):
        draft.put("train.max_grad_norm", UNCLIPPED, given, f"{draft.tool} clips nothing here; 1.0 is usual")
    else:
        draft.take(given, "train.max_grad_norm")


UNCLIPPED = 1e9


def full_in_bf16(draft: Draft) -> None:
    """Tells of tools that hold all that full fine-tuning trains in bf16."""
    if draft.full and not draft.get("train.pure_bf16"):
        help = "that takes 16 bytes a parameter for AdamW, there 8; train.pure_bf16: true or a lora section take less"
        draft.remark(f"{draft.tool} keeps weights and optimizer in bf16, ftcli in float32", help)


def all_linear(draft: Draft) -> None:
    """Tells of recipes of adapters that name no modules."""
    if not draft.full and draft.get("lora.target_modules") is None:
        draft.remark("no LoRA modules are named: all linear layers are adapted", "list them in lora.target_modules")


def _trackers(draft: Draft, given: ForeignSetting) -> None:
    """`report_to`: the loggers by name."""
    names = given.value if isinstance(given.value, list) else [given.value]
    known = [key for key in draft.schema.properties(draft.schema.at(("logging",)) or {}) if key != "every_steps"]
    for name in map(str, names):
        if name in known and not draft.get(f"logging.{name}"):
            draft.put(f"logging.{name}", True, given)
        elif name not in (*known, "none", "None", "all"):
            draft.lost(given, f"trackers are {', '.join(known)}", harmless=True)


#: What tools that pass settings on to transformers' trainer have in common.
_OF_TRANSFORMERS: Mapping[str, Rule] = {
    "gradient_checkpointing": checkpointing,
    "attn_implementation": attention,
    "run_name": run_name,
    "report_to": _trackers,
    # transformers takes a share of all steps where no number of them is given.
    "warmup_ratio": unless(lambda draft, _: not is_off(draft.said("warmup_steps")), to("train.warmup_steps")),
    "warmup_steps": unless(
        lambda draft, given: is_off(given.value) and "warmup_ratio" in draft.given, to("train.warmup_steps")
    ),
    "max_grad_norm": clipping,
}
#: What transformers' trainer does where recipes that pass settings on to it (TRL, LLaMA-Factory) say nothing.
TRAINER_DEFAULTS: JsonMap = {
    "train.num_train_epochs": 3.0,
    "train.per_device_train_batch_size": 8,
    "train.optim": "adamw_torch_fused",
}
NO_COPIES = "rows are read as they are: prepare the file so"
