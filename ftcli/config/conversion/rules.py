"""What to make of each setting of another tool's recipe: the rows of its table, and the rules that tools share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from ftcli.config.conversion.draft import Draft, truth
from ftcli.config.conversion.source import ForeignSetting
from ftcli.config.dialects import foreign
from ftcli.plain import JsonMap

#: What becomes of one setting.
Rule = Callable[[Draft, ForeignSetting], None]
#: Names of one tool, apart by blanks, and what becomes of each. `x.*` is all of the section x.
Rows = Sequence[tuple[str, Rule]]
#: Tools that pass settings on to transformers' trainer, by a name of its own in the tables of names.
_TRAINER = "transformers"


def _nothing() -> Mapping[str, Any]:
    return MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Rules:
    """A tool's recipes.

    Attributes:
        rows: By the setting's dotted name, or its section; what is not here goes by the tables of names.
        before: What has to be known first: the training method, adapters.
        after: What follows from several settings, and from what is not there.
        defaults: Values of ours that the tool has where the file says nothing, and ftcli has not.
        nulls: Settings whose null says something.
        flatten: Its sections only group settings: their names say nothing.
        trainer: It hands what it does not know to transformers' trainer.
    """

    rows: Rows
    before: Callable[[Draft], None]
    after: Callable[[Draft], None]
    defaults: JsonMap = field(default_factory=_nothing)
    nulls: Mapping[str, Rule] = field(default_factory=_nothing)
    flatten: bool = False
    trainer: bool = True


def apply(rules: Rules, draft: Draft) -> None:
    """Drafts everything that the file says. Of what it does not know nothing is passed over."""
    rows = {name: rule for names, rule in rules.rows for name in names.split()}
    rules.before(draft)
    for given in draft.given.values():
        rule = rows.get(given.name) or rows.get(f"{given.outermost}.*")
        (rule or _by_name(draft, given, trainer=rules.trainer))(draft, given)
    for given in draft.blank.values():
        rule = rows.get(given.name) or rows.get(f"{given.outermost}.*")
        if given.name in rules.nulls:
            rules.nulls[given.name](draft, given)
        elif rule is None and _by_name(draft, given, trainer=rules.trainer) is _unknown:
            draft.lost(given, "ftcli does not know it; it has no value there", harmless=True)
    for key, value in rules.defaults.items():
        draft.default(key, value)
    rules.after(draft)


def _by_name(draft: Draft, given: ForeignSetting, *, trainer: bool) -> Rule:
    """By the tables of names: our key of that name, the key that it is called here, or none."""
    if given.section:
        return _unknown
    homes = [f"{section}.{given.name}" for section in ("train", "lora", "data", "eval", "logging")]
    ours = next((key for key in homes if key in draft.keys), None)
    if ours is not None:
        return to(ours)
    known = foreign("", given.name)
    if known is None or not (draft.tool in known.tools or (trainer and _TRAINER in known.tools)):
        return _unknown
    key, _, value = (known.target or "").partition(": ")
    if key not in draft.keys or "[]" in key or (known.note and not value):
        return lost(known.note or f"here that is `{known.target}`")
    return switch(key, {"true": True, "false": False}.get(value, value)) if value else to(key)


def _unknown(draft: Draft, given: ForeignSetting) -> None:
    draft.lost(given, "ftcli does not know it: see docs/recipes.md for what there is")


# -- rules that dialects share ------------------------------------------------------------------------------------


def read(_draft: Draft, _given: ForeignSetting) -> None:
    """Another rule has read it, or it only concerns the other tool's process."""


def to(key: str) -> Rule:
    """The setting is our key."""
    return lambda draft, given: draft.take(given, key)


def switch(key: str, value: Any) -> Rule:
    """Switched on, it is our key with this value."""
    return lambda draft, given: None if is_off(given.value) else draft.put(key, value, given)


def words(text: str) -> frozenset[str]:
    """The words of a text."""
    return frozenset(text.split())


def is_off(value: object) -> bool:
    """Whether a value switches its setting off."""
    return truth(value) is False or value in (None, "", 0, "none", "None", "null", [], {})


def note(why: str) -> Rule:
    """No counterpart, and nothing that is learnt depends on it."""
    return lambda draft, given: None if is_off(given.value) else draft.lost(given, why, harmless=True)


def lost(why: str, *, default: object = None) -> Rule:
    """No counterpart, and it matters where it is neither off nor the tool's ``default``; of ``True`` off does."""

    def rule(draft: Draft, given: ForeignSetting) -> None:
        value = given.value
        names = default if isinstance(default, tuple) else (default,)
        usual = truth(value) if default is True else is_off(value) or (value in names and value is not True)
        if not usual:
            draft.lost(given, why)

    return rule


def steps(key: str, what: str) -> Rule:
    """A number of steps; shares and strategies are counted otherwise here."""

    def rule(draft: Draft, given: ForeignSetting) -> None:
        value = given.value
        number = float(value) if isinstance(value, int | float) and not isinstance(value, bool) else 0.0
        if number >= 1 and number == int(number):
            draft.put(key, int(number), given)
        else:
            said = f"`{given.name}: {value}` is not a number of steps"
            draft.unusable(given, said, f"{what} count optimizer steps: {key}")

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


def attention(draft: Draft, given: ForeignSetting) -> None:
    """Implementations of attention: ftcli chooses, but for those that every device has."""
    word = str(given.value).lower()
    if word in ("eager", "sdpa"):
        draft.put("model.attention", word, given)
    elif word != "auto":
        note("attention is chosen by ftcli from the model and the GPU (model.attention: auto)")(draft, given)


def checkpointing(draft: Draft, given: ForeignSetting) -> None:
    """Activation checkpointing. Off is left to `auto`: every policy gives the same numbers."""
    key = "train.gradient_checkpointing"
    if str(given.value).lower() in ("unsloth", "offload", "offload_disk"):
        draft.put(key, "offload", given, f"{draft.tool}: {given.value}; `auto` may be faster")
    elif not is_off(given.value) and draft.get(key) != "offload":
        draft.put(key, True, given)


def switched_by(key: str, word: str) -> Rule:
    """`bf16: true` and its like: the dtype."""

    def rule(draft: Draft, given: ForeignSetting) -> None:
        if str(given.value).lower() == "auto":
            draft.put(key, "auto", given)
        elif truth(given.value) or str(given.value).lower() == "full":
            draft.put(key, word, given)

    return rule


def half(*others: str) -> Rule:
    """`bf16`, which is on unless it is switched off and none of the ``others`` names a dtype."""

    def rule(draft: Draft, given: ForeignSetting) -> None:
        if truth(given.value) is False and all(is_off(draft.said(name)) for name in others):
            draft.put("model.dtype", "float32", given)
        switched_by("model.dtype", "bfloat16")(draft, given)

    return rule


def max_steps(draft: Draft, given: ForeignSetting) -> None:
    """`max_steps`, where 0 and -1 mean that epochs count."""
    if isinstance(given.value, int) and given.value > 0:
        draft.put("train.max_steps", given.value, given)


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
    known = [key for key in draft.schema.properties(draft.schema.at(("logging",)) or {}) if key != "every_steps"]
    for name in map(str, names):
        if name in known and not draft.get(f"logging.{name}"):
            draft.put(f"logging.{name}", True, given)
        elif name not in (*known, "none", "None", "all"):
            draft.lost(given, f"trackers are {', '.join(known)}", harmless=True)


def wandb(draft: Draft, given: ForeignSetting, *names: str) -> None:
    """Weights & Biases, with what the settings of these names say of project, entity and group."""
    said = {part: str(draft.said(name)) for part, name in zip(("project", "entity", "group"), names, strict=False)}
    where = {part: value for part, value in said.items() if value != "None"}
    draft.put("logging.wandb", where or True, given)


def clipping(draft: Draft, given: ForeignSetting) -> None:
    """The greatest norm of a gradient; 0 and null clip nothing, which here takes a bound that is never met."""
    if is_off(given.value):
        draft.put("train.max_grad_norm", UNCLIPPED, given, f"{draft.tool} clips nothing here; 1.0 is usual")
    else:
        draft.take(given, "train.max_grad_norm")


UNCLIPPED = 1e9


def ratio(draft: Draft, given: ForeignSetting) -> None:
    """A share of all steps to warm up in, which transformers takes where no number of steps is given."""
    if is_off(draft.said("warmup_steps")):
        draft.take(given, "train.warmup_steps")


def warmup(draft: Draft, given: ForeignSetting) -> None:
    """A number of steps to warm up in; 0 leaves the share of all steps its say."""
    if not (is_off(given.value) and "warmup_ratio" in draft.given):
        draft.take(given, "train.warmup_steps")


def full_in_bf16(draft: Draft) -> None:
    """Tells of tools that hold all that full fine-tuning trains in bf16."""
    if draft.full and not draft.get("train.pure_bf16"):
        help = "that takes 16 bytes a parameter for AdamW, there 8; train.pure_bf16: true or a lora section take less"
        draft.remark(f"{draft.tool} keeps weights and optimizer in bf16, ftcli in float32", help)


def _best(draft: Draft, given: ForeignSetting) -> None:
    if truth(given.value):
        draft.put("checkpoint.keep_best", True, given)
        help = "ftcli export --checkpoint best"
        draft.differs(given, "the best checkpoint is kept, the last weights are the result", help)


def _optimizer_arguments(draft: Draft, given: ForeignSetting) -> None:
    draft.unusable(
        given, "further arguments of the optimizer", "train.adam_beta1, adam_beta2 and adam_epsilon are here"
    )


SEVERAL_GPUS = lost(
    "with `--gpus N`, of as many GPUs as it was meant for, a step has the same rows, and launch.engine: fsdp shards "
    "the weights; on fewer GPUs multiply train.gradient_accumulation_steps",
    default=1,
)
KERNELS = note("ftcli has its own fused kernels, and uses each where it applies (model.kernels: auto)")
EIGHT_BIT = lost("the base keeps its dtype, which takes twice the memory; quantization.method: nf4 takes half")
OUTPUT = to("run.output_dir")
NO_SPLIT = lost("nothing is split off: write held-out rows into a file, and name it in data.eval")
NO_COPIES = "rows are read as they are: prepare the file so"
HUB = note("`ftcli export --push-to-hub ID` uploads what was trained")
TOKENS = lost("tokens are those of the tokenizer: save one that has them, name it in model.tokenizer")
SHUFFLED = "training rows are always shuffled, by run.seed"
OF_ITS_PROCESS = note("it concerns the other tool's process")

#: What tools that pass settings on to transformers' trainer have in common.
OF_TRANSFORMERS: Rows = (
    ("bf16", switched_by("model.dtype", "bfloat16")),
    ("fp16", switched_by("model.dtype", "float16")),
    ("load_in_8bit", EIGHT_BIT),
    ("gradient_checkpointing", checkpointing),
    ("gradient_checkpointing_kwargs", note("ftcli recomputes layers in its own way")),
    ("activation_offloading", switch("train.gradient_checkpointing", "offload")),
    ("attn_implementation", attention),
    ("max_steps", max_steps),
    ("output_dir", OUTPUT),
    ("run_name", run_name),
    ("seed", seed),
    ("data_seed", note("run.seed decides the order of rows")),
    ("report_to", trackers),
    ("save_steps", steps("checkpoint.every_steps", "checkpoints")),
    ("eval_steps", steps("eval.every_steps", "evaluations")),
    ("logging_steps", steps("logging.every_steps", "lines of metrics")),
    ("save_strategy", strategy("checkpoint.every_steps", best="checkpoint.keep_best")),
    ("eval_strategy evaluation_strategy", strategy("eval.every_steps")),
    ("logging_strategy", strategy("logging.every_steps")),
    ("load_best_model_at_end", _best),
    ("metric_for_best_model greater_is_better", note("the best checkpoint is that of the lowest held-out loss")),
    ("warmup_ratio", ratio),
    ("warmup_steps", warmup),
    ("max_grad_norm", clipping),
    ("optim_args", _optimizer_arguments),
    ("label_smoothing_factor", lost("label smoothing is not offered: labels are as they stand")),
    ("rope_scaling rope_theta", lost("the rotary settings are those of the model's config.json: change them there")),
    ("trust_remote_code", lost("ftcli runs no code from a model's repository; most models need none")),
    ("deepspeed fsdp fsdp_config fsdp_transformer_layer_cls_to_wrap fsdp_version dp_shard_size", SEVERAL_GPUS),
    ("dp_replicate_size", lost("under `fsdp` it is launch.dp_replicate_size, with --gpus N", default=1)),
    (
        "context_parallel_size sequence_parallel_degree",
        lost("it is launch.context_parallel_size, which divides launch.num_processes (--gpus N)", default=1),
    ),
    (
        "tensor_parallel_size expert_parallel_size",
        lost("one layer is not split over GPUs; launch.engine: fsdp shards the weights (--gpus N)", default=1),
    ),
    ("ddp_timeout", note("a rank that is silent for 60 s ends the run, a collective that hangs after 10 minutes")),
    ("ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers", note("ranks are connected by ftcli")),
    ("push_to_hub hub_model_id", HUB),
    ("use_liger_kernel torch_compile torch_compile_backend torch_compile_mode", KERNELS),
    ("liger_kernel_config use_kernels", KERNELS),
    ("tf32", note("matmul precision is not a setting")),
    ("device_map use_cpu low_cpu_mem_usage", note("the GPU is taken when there is one")),
    ("auto_find_batch_size", lost("`ftcli check` says whether a batch size fits")),
    ("do_train do_eval do_predict", read),
    ("overwrite_output_dir", note("`ftcli train --resume never` starts over, and keeps the old run")),
    ("save_safetensors save_only_model", note("checkpoints are safetensors, and hold what resuming needs")),
    ("resume_from_checkpoint", lost("a run goes on by itself; --resume PATH takes a checkpoint of ftcli")),
    ("average_tokens_across_devices", note("the loss is weighted by token over all ranks")),
    (
        "remove_unused_columns include_tokens_per_second include_num_input_tokens_seen log_level disable_tqdm "
        "hub_strategy hub_private_repo logging_first_step logging_dir dataloader_num_workers dataloader_pin_memory "
        "dataloader_prefetch_factor dataloader_persistent_workers torch_empty_cache_steps local_rank debug",
        read,
    ),
    ("dataloader_drop_last", lost("the last batch of an epoch is trained, however small")),
)
#: What null says to transformers' trainer, where a tool hands it on.
NULLS: Mapping[str, Rule] = MappingProxyType({"max_grad_norm": clipping})
#: What transformers' trainer does where recipes that pass settings on to it (TRL, LLaMA-Factory) say nothing.
TRAINER_DEFAULTS: JsonMap = MappingProxyType(
    {"train.num_train_epochs": 3.0, "train.per_device_train_batch_size": 8, "train.optim": "adamw_torch_fused"}
)
