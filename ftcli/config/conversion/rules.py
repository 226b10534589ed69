"""What to make of each setting of another tool's recipe."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from ftcli.config.conversion.draft import Draft, truth
from ftcli.config.conversion.source import ForeignSetting
from ftcli.config.dialects import foreign

#: What becomes of one setting.
Rule = Callable[[Draft, ForeignSetting], None]


def _nothing() -> Mapping[str, Any]:
    return MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Rules:
    """A tool's recipes.

    Attributes:
        rules: By the setting's dotted name, or by its last part; what is not here goes by the tables of names.
        before: What has to be known first: the training method, adapters.
        after: What follows from several settings, and from what is not there.
        flatten: Its sections only group settings: their names say nothing.
    """

    rules: Mapping[str, Rule]
    before: Callable[[Draft], None]
    after: Callable[[Draft], None]
    flatten: bool = False
    silent: frozenset[str] = field(default_factory=frozenset)


def apply(rules: Rules, draft: Draft) -> None:
    """Drafts everything that the file says."""
    rules.before(draft)
    for given in draft.given.values():
        rule = rules.rules.get(given.name) or rules.rules.get(given.leaf) or rules.rules.get(f"{given.outermost}.*")
        if rule is not None:
            rule(draft, given)
        elif given.leaf not in rules.silent:
            by_name(draft, given)
    rules.after(draft)


def trainer_defaults(draft: Draft) -> None:
    """What transformers' trainer does where recipes that pass settings on to it (TRL, LLaMA-Factory) say nothing."""
    draft.default("train.num_train_epochs", 3.0)
    draft.default("train.per_device_train_batch_size", 8)
    draft.default("train.optim", "adamw_torch_fused")


# -- rules that dialects share ------------------------------------------------------------------------------------


def by_name(draft: Draft, given: ForeignSetting) -> None:
    """By the tables of names: the same key, the key that it is called here, or none."""
    ours = _our_key(draft, given.leaf)
    if ours is not None:
        draft.take(given, ours)
        return
    known = foreign("", given.leaf)
    if known is None and given.value is False:
        return  # whatever it is, it is switched off
    if known is None:
        draft.lost(given, "ftcli does not know it: see docs/recipes.md for what there is")
    elif known.target is None:
        draft.lost(given, known.note or "remove it", harmless=True)
    else:
        _by_target(draft, given, known.target, known.note)


def _by_target(draft: Draft, given: ForeignSetting, target: str, note: str | None) -> None:
    key, _, value = target.partition(": ")
    if key not in draft.keys or "[]" in key or key in ("lora", "grpo"):
        draft.lost(given, note or f"here that is `{target}`")
    elif not value:
        draft.take(given, key)
    elif truth(given.value):
        draft.put(key, {"true": True, "false": False}.get(value, value), given)


def _our_key(draft: Draft, leaf: str) -> str | None:
    """Our one key of this name. Names that several sections have mean nothing without theirs."""
    homes = [key for key in draft.keys if key.rpartition(".")[2] == leaf and "[]" not in key]
    found = [key for key in homes if key.count(".") == 1 and not key.startswith("grpo.")]
    if len(found) > 1:
        found = [key for key in found if key.startswith("train.")]
    return found[0] if len(found) == 1 else None


def to(key: str) -> Rule:
    """The setting is our key."""
    return lambda draft, given: draft.take(given, key)


def harmless(why: str) -> Rule:
    """No counterpart, and nothing that is learnt depends on it."""
    return lambda draft, given: draft.lost(given, why, harmless=True)


def missing(why: str) -> Rule:
    """No counterpart, and it matters when it is switched on."""

    def rule(draft: Draft, given: ForeignSetting) -> None:
        if truth(given.value) is not False:
            draft.lost(given, why)

    return rule


def ignored(_draft: Draft, _given: ForeignSetting) -> None:
    """Another rule has read it."""


def steps(key: str, what: str) -> Rule:
    """A number of steps; shares and strategies are counted otherwise here."""

    def rule(draft: Draft, given: ForeignSetting) -> None:
        value = given.value
        number = float(value) if isinstance(value, int | float) and not isinstance(value, bool) else 0.0
        if number >= 1 and number == int(number):
            draft.put(key, int(number), given)
        else:
            draft.unusable(
                given, f"`{given.name}: {value}` is not a number of steps", f"{what} count optimizer steps: {key}"
            )

    return rule


def strategy(key: str, best: str | None = None) -> Rule:
    """`steps`, `no`, `epoch` or `best`: when something is done."""

    def rule(draft: Draft, given: ForeignSetting) -> None:
        word = str(given.value).lower()
        if word in ("no", "false") and key == "checkpoint.every_steps":
            draft.put(key, None, given)
        elif word == "best" and best is not None:
            draft.put(best, True, given)
        elif word == "epoch":
            draft.lost(given, f"epochs are not counted: write {key}, in optimizer steps")

    return rule


def no_split(draft: Draft, given: ForeignSetting) -> None:
    """A share of the training rows that is held out."""
    if given.value not in (0, 0.0, None, False):
        draft.lost(given, "nothing is split off: write held-out rows into a file, and name it in data.eval")


def attention(draft: Draft, given: ForeignSetting) -> None:
    """Implementations of attention: ftcli chooses, but for those that every device has."""
    word = str(given.value).lower()
    if word in ("eager", "sdpa"):
        draft.put("model.attention", word, given)
    elif truth(given.value) is not False and word not in ("auto", "none"):
        draft.lost(
            given, "attention is chosen by ftcli from the model and the GPU (model.attention: auto)", harmless=True
        )


def several_gpus(draft: Draft, given: ForeignSetting) -> None:
    """Settings of distributed training."""
    if given.value in (None, False, "", 1):
        return
    draft.lost(
        given, "on one GPU, multiply train.gradient_accumulation_steps by the number of GPUs that it was meant for"
    )


def kernels(draft: Draft, given: ForeignSetting) -> None:
    """Fused kernels of other makers."""
    if truth(given.value) is not False:
        draft.lost(
            given,
            "ftcli has its own fused kernels, and uses each where it applies (model.kernels: auto)",
            harmless=True,
        )


def checkpointing(draft: Draft, given: ForeignSetting) -> None:
    """Activation checkpointing. Off is left to `auto`: every policy gives the same numbers."""
    if truth(given.value) is False or str(given.value).lower() in ("none", ""):
        return
    key = "train.gradient_checkpointing"
    if str(given.value).lower() in ("unsloth", "offload", "offload_disk"):
        draft.put(key, "offload", given, f"{draft.tool}: {given.value}; `auto` may be faster")
    elif draft.get(key) != "offload":
        draft.put(key, True, given)


def offloading(draft: Draft, given: ForeignSetting) -> None:
    """Activations kept in host memory."""
    if truth(given.value) is not False:
        draft.put("train.gradient_checkpointing", "offload", given)


def eight_bit(draft: Draft, given: ForeignSetting) -> None:
    """int8 weights."""
    if truth(given.value):
        help = "the base is kept in its dtype, which takes about twice the memory; quantization.method: nf4 takes half"
        draft.lost(given, help)


def switched_by(key: str, word: str) -> Rule:
    """`bf16: true` and its like: the dtype."""

    def rule(draft: Draft, given: ForeignSetting) -> None:
        if str(given.value).lower() in ("auto", "null", "none"):
            draft.put(key, "auto", given)
        elif truth(given.value) or str(given.value).lower() == "full":
            draft.put(key, word, given)

    return rule


def epochs_or_steps(draft: Draft, given: ForeignSetting) -> None:
    """`max_steps`, where 0 and -1 mean that epochs count."""
    if isinstance(given.value, int) and given.value > 0:
        draft.put("train.max_steps", given.value, given)


def output_dir(draft: Draft, given: ForeignSetting) -> None:
    """Where results go: a run directory of its own here."""
    draft.put("run.output_dir", str(given.value), given)


def run_name(draft: Draft, given: ForeignSetting) -> None:
    """A run's name, in the letters that ours may have."""
    name = "".join(c if (c.isalnum() and c.isascii()) or c in "._-" else "-" for c in str(given.value)).lstrip("._-")
    if name:
        draft.put("run.name", name[:100], given)


def seed(draft: Draft, given: ForeignSetting) -> None:
    """The seed; null means a random one."""
    if isinstance(given.value, int) and not isinstance(given.value, bool) and given.value >= 0:
        draft.put("run.seed", given.value, given)


def trackers(draft: Draft, given: ForeignSetting) -> None:
    """`report_to`: the loggers by name."""
    names = given.value if isinstance(given.value, list) else [given.value]
    known = draft.schema.properties(draft.schema.at(("logging",)) or {})
    for name in map(str, names):
        if name in known and name != "every_steps":
            draft.put(f"logging.{name}", True, given)
        elif name not in ("none", "None", "all"):
            known_names = ", ".join(key for key in known if key != "every_steps")
            draft.lost(given, f"trackers are {known_names}", harmless=True)


def wandb(draft: Draft, given: ForeignSetting) -> None:
    """A project of Weights & Biases means that the run is logged there."""
    draft.put("logging.wandb", True, given, "project and account: `wandb login` and WANDB_PROJECT")


#: What tools that pass settings on to transformers' trainer have in common.
OF_TRANSFORMERS: Mapping[str, Rule] = MappingProxyType(
    {
        "bf16": switched_by("model.dtype", "bfloat16"),
        "fp16": switched_by("model.dtype", "float16"),
        "load_in_8bit": eight_bit,
        "gradient_checkpointing": checkpointing,
        "gradient_checkpointing_kwargs": harmless("ftcli recomputes layers in its own way"),
        "activation_offloading": offloading,
        "attn_implementation": attention,
        "max_steps": epochs_or_steps,
        "output_dir": output_dir,
        "run_name": run_name,
        "seed": seed,
        "report_to": trackers,
        "save_steps": steps("checkpoint.every_steps", "checkpoints"),
        "eval_steps": steps("eval.every_steps", "evaluations"),
        "save_strategy": strategy("checkpoint.every_steps", best="checkpoint.keep_best"),
        "eval_strategy": strategy("eval.every_steps"),
        "evaluation_strategy": strategy("eval.every_steps"),
        "logging_strategy": strategy("logging.every_steps"),
        "remove_unused_columns": ignored,
        "include_tokens_per_second": ignored,
        "logging_steps": steps("logging.every_steps", "lines of metrics"),
        "deepspeed": several_gpus,
        "fsdp": several_gpus,
        "fsdp_config": several_gpus,
        "fsdp_version": several_gpus,
        "tensor_parallel_size": several_gpus,
        "context_parallel_size": several_gpus,
        "sequence_parallel_degree": several_gpus,
        "expert_parallel_size": several_gpus,
        "dp_shard_size": several_gpus,
        "dp_replicate_size": several_gpus,
        "ddp_timeout": harmless("one process trains here"),
        "ddp_find_unused_parameters": harmless("one process trains here"),
        "use_liger_kernel": kernels,
        "torch_compile": kernels,
        "warmup_ratio": to("train.warmup_steps"),
        "trust_remote_code": missing("ftcli runs no code from a model's repository; most models need none"),
        "load_best_model_at_end": lambda draft, given: _best(draft, given),
    }
)


def _best(draft: Draft, given: ForeignSetting) -> None:
    if truth(given.value):
        draft.put("checkpoint.keep_best", True, given)
        draft.differs(
            given, "the best checkpoint is kept, the last weights are the result", "ftcli export --checkpoint best"
        )
