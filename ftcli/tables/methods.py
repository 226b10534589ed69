"""Training methods: what a recipe's rows teach, and how. One row each.

``train.method`` names the method of `ftcli train`. A method that has a command and a section of the recipe to itself,
such as ``grpo``, is chosen by these.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ftcli.tables import code_of, layouts


@dataclass(frozen=True, slots=True)
class Method:
    """One training method.

    Attributes:
        run: Code: ``(loaded, session) -> result``, the whole command; of one ``on_ranks`` also
            ``(loaded, session, group)``.
        dry: Code: ``(loaded, session) -> result``, what its command does instead with ``--dry-rewards``; None: nothing.
        memory: Code: a function ``RunPlan -> MethodMemory`` (:class:`ftcli.plan.run.MethodMemory`).
        section: The recipe's section that holds its settings; None: ``train`` says it all. Methods may share one.
        defaults: Values that its recipes have where they say nothing, by dotted key.
        full_defaults: Those of full fine-tuning, over ``defaults``.
        unit: Rows of a unit: what is drawn, counted and split as one; 2 for pairs.
        charts: Code: the report's charts of its runs (:class:`ftcli.run.report.curves.Chart`); None: those of a loss.
        scores: Code: rows of ``(name, label, more is better, is a share)`` for what it measures beside the loss.
        trains: Code: a :class:`ftcli.train.on_rows.RowMethod`, of a method whose rows hold their answers.
        rules: Code: ``Context -> findings``, rules of its own about the recipe; None: the common ones.
        reward_rules: Code: ``Context -> findings``, rules about the rewards of its section, by which `ftcli sample`
            judges; None: it has none.
        asks: Code: ``Recipe -> OtherModel | None`` (:class:`ftcli.plan.run.OtherModel`), a model that is asked before
            the trained one is loaded; None: none is.
        row_rules: Code: ``(Context, FirstRows) -> findings``, rules of its own about the first rows of each source
            that it trains on (:mod:`ftcli.preflight.checks.data`); None: the common ones.
        survey: Code: ``(RowSurvey, recipe) -> None``, how `ftcli check` looks at its rows; None: as rows that hold
            their answers.
        from_prompts: Its rows are prompts, which the model answers. Rows of other methods hold the answers too.
        classifier: What it trains is a sequence classifier with one number (:mod:`ftcli.model.score_head`).
        scores_tasks: `eval.tasks` are scored before and after training.
        goes_on: It can go on from an adapter; a reference is the adapter as it was loaded.
        sees: Its rows may have images.
        timed: `ftcli bench` times its own steps; else those of supervised fine-tuning at the same batch.
        length: The recipe key that is lowered where rows are too long.
        structural: Recipe keys that the tensors of its checkpoints depend on, beside the common ones.
        counts_micro_batches: Recipe keys that say how many micro-batches something takes: they rise where a micro-batch
            is given fewer rows.
        told: Recipe keys of its section that a result's card names, changed or not.
        supports: Recipe keys of which it supports only some values, with these values.
    """

    name: str
    command: str
    title: str
    help: str
    run: str
    memory: str
    dry: str | None = None
    section: str | None = None
    defaults: Mapping[str, float | str] = field(default_factory=dict)
    full_defaults: Mapping[str, float | str] = field(default_factory=dict)
    unit: int = 1
    trains: str | None = None
    charts: str | None = None
    scores: str | None = None
    rules: str | None = None
    reward_rules: str | None = None
    asks: str | None = None
    row_rules: str | None = None
    survey: str | None = None
    from_prompts: bool = False
    classifier: bool = False
    scores_tasks: bool = False
    packs: bool = True
    mixes: bool = True
    repeats: bool = False
    goes_on: bool = False
    sees: bool = False
    on_ranks: bool = False
    timed: bool = False
    length: str = "data.max_seq_len"
    structural: tuple[str, ...] = ()
    counts_micro_batches: tuple[str, ...] = ()
    told: tuple[str, ...] = ()
    supports: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)


_TRAIN_HELP = """Fine-tune a model.

Trains LoRA adapters, or all weights when the recipe has no lora section. Writes a run directory with checkpoints,
metrics, a report and the result, which plain transformers and peft load.

\b
Examples:
  ftcli train recipes/smoke.yaml
  ftcli train recipes/gemma2-9b.yaml --set train.learning_rate=1e-4 --set data.max_seq_len=4096
  ftcli train recipes/gemma2-9b.yaml --set model.init=random --set model.tokenizer=bytes --max-steps 5
"""

_GRPO_HELP = """Fine-tune by rewards (GRPO).

The rewards are those of the recipe's grpo section: built-in ones, or Python functions of yours.

\b
Examples:
  ftcli grpo recipes/smoke-grpo.yaml
  ftcli grpo recipes/mistral-7b-grpo.yaml --set grpo.num_generations=4 --max-steps 20
  ftcli grpo recipes/mistral-7b-grpo.yaml --dry-rewards
"""


#: Values that methods on pairs support.
_OF_PAIRS: Mapping[str, tuple[Any, ...]] = {
    "data.format": layouts.formats(unit=2)[1:],
    "data.packing": (False,),
    "data.streaming": (False,),
    "model.dtype": ("auto", "bfloat16", "float32"),
    "train.neftune_noise_alpha": (None,),
    "train.train_sampling_strategy": ("random",),
}


#: Of methods whose model answers prompts itself.
_OF_PROMPTS: Mapping[str, tuple[Any, ...]] = {
    "data.format": layouts.formats(unit=1),
    "data.streaming": (False,),
    "model.dtype": ("auto", "bfloat16", "float32"),
    "quantization.method": ("none", "nf4", "fp8"),
    # Completions would be sampled under noise as well; rows are grouped by prompt.
    "train.neftune_noise_alpha": (None,),
    "train.train_sampling_strategy": ("random",),
    "launch.context_parallel_size": (1,),
}


def _preference(name: str, title: str) -> Method:
    """Methods that learn from pairs differ in their loss, and in the values that recipes have where they say nothing.

    Learning rates are those that published recipes of adapters and of full fine-tuning lie around (docs/preference.md).
    """
    rate = 1e-5 if name == "dpo" else 5e-6
    return Method(
        name,
        "train",
        title,
        _TRAIN_HELP,
        run="ftcli.train.on_rows:train_on_rows",
        trains="ftcli.methods.preference.train:Preference",
        charts="ftcli.methods.preference.charts:CHARTS_OF_PAIRS",
        scores="ftcli.methods.preference.charts:SCORES_OF_PAIRS",
        memory="ftcli.methods.preference.checks:memory",
        rules="ftcli.methods.preference.checks:check",
        asks="ftcli.methods.preference.checks:other_model",
        sees=True,
        section="preference",
        defaults={"data.format": "preference", "train.learning_rate": rate, "train.warmup_steps": 0.1},
        full_defaults={"train.learning_rate": 5e-7},
        unit=2,
        goes_on=True,
        packs=False,
        on_ranks=True,
        timed=True,
        told=("preference.loss", "preference.beta"),
        supports=_OF_PAIRS,
    )


def _labelled() -> Method:
    """KTO shares the section, the defaults and the limits of DPO; its rows are single answers."""
    pairs = _preference("dpo", "DPO")
    return replace(
        pairs,
        name="kto",
        title="KTO",
        trains="ftcli.methods.kto.train:Labelled",
        charts="ftcli.methods.preference.charts:CHARTS_OF_LABELLED",
        scores="ftcli.methods.preference.charts:SCORES_OF_LABELLED",
        memory="ftcli.methods.kto.checks:memory",
        rules="ftcli.methods.kto.checks:check",
        defaults={**pairs.defaults, "data.format": "labelled"},
        unit=1,
        sees=False,
        timed=False,
        told=(*pairs.told, "preference.desirable_weight", "preference.undesirable_weight"),
        supports={**pairs.supports, "data.format": ("labelled",)},
    )


#: The value of ``train.method`` in a recipe that says nothing.
DEFAULT = "sft"
TABLE: Mapping[str, Method] = {
    "sft": Method(
        "sft",
        "train",
        "supervised fine-tuning",
        _TRAIN_HELP,
        run="ftcli.train.on_rows:train_on_rows",
        trains="ftcli.methods.sft.train:Supervised",
        memory="ftcli.plan.run:memory_of_rows",
        repeats=True,
        goes_on=True,
        sees=True,
        on_ranks=True,
        timed=True,
        supports={"data.format": layouts.formats(unit=1)},
    ),
    **{name: _preference(name, title) for name, title in (("dpo", "DPO"), ("orpo", "ORPO"), ("simpo", "SimPO"))},
    "reward": Method(
        "reward",
        "train",
        "reward modelling",
        _TRAIN_HELP,
        run="ftcli.train.on_rows:train_on_rows",
        trains="ftcli.methods.reward.train:RewardModelling",
        charts="ftcli.methods.preference.charts:CHARTS_OF_SCORED",
        scores="ftcli.methods.preference.charts:SCORES_OF_SCORED",
        memory="ftcli.plan.run:memory_of_rows",
        section="reward",
        # Learning rates: LLaMA-Factory's and TRL's for adapters, OpenRLHF's for full fine-tuning.
        defaults={"data.format": "preference", "train.learning_rate": 1e-4, "train.warmup_steps": 0.1},
        full_defaults={"train.learning_rate": 9e-6},
        unit=2,
        classifier=True,
        packs=False,
        on_ranks=True,
        timed=True,
        structural=("train.method",),
        supports={**_OF_PAIRS, "eval.tasks": ((),), "eval.lm_eval": ((),)},
    ),
    "kto": _labelled(),
    "distill": Method(
        "distill",
        "train",
        "distillation",
        _TRAIN_HELP,
        run="ftcli.methods.distill.train:train_distill",
        memory="ftcli.methods.distill.checks:memory",
        section="distill",
        # Learning rates: TRL's for full fine-tuning; adapters take ten times as much and more.
        defaults={"train.learning_rate": 5e-5},
        full_defaults={"train.learning_rate": 1e-6},
        rules="ftcli.methods.distill.checks:check",
        row_rules="ftcli.methods.distill.checks:check_rows",
        asks="ftcli.methods.distill.checks:other_model",
        survey="ftcli.methods.distill.train:survey",
        from_prompts=True,
        scores_tasks=True,
        packs=False,
        mixes=False,
        on_ranks=True,
        length="distill.max_completion_length",
        told=("distill.teacher", "distill.beta", "distill.temperature", "distill.max_completion_length"),
        supports=_OF_PROMPTS,
    ),
    "distill_offline": Method(
        "distill_offline",
        "train",
        "offline distillation",
        _TRAIN_HELP,
        run="ftcli.train.on_rows:train_on_rows",
        trains="ftcli.methods.distill.offline:Offline",
        memory="ftcli.methods.distill.checks:memory_of_stored",
        section="distill",
        defaults={"train.learning_rate": 5e-5},
        full_defaults={"train.learning_rate": 1e-6},
        rules="ftcli.methods.distill.checks:check_offline",
        asks="ftcli.methods.distill.checks:other_model",
        repeats=True,
        goes_on=True,
        on_ranks=True,
        told=("distill.teacher", "distill.teacher_top_k", "distill.beta", "distill.temperature"),
        supports={
            "data.format": layouts.formats(unit=1),
            "data.streaming": (False,),
            "train.neftune_noise_alpha": (None,),
            "launch.context_parallel_size": (1,),
        },
    ),
    "grpo": Method(
        "grpo",
        "grpo",
        "GRPO",
        _GRPO_HELP,
        run="ftcli.methods.grpo.train:train_grpo",
        memory="ftcli.methods.grpo.checks:memory",
        dry="ftcli.methods.grpo.train:dry_rewards",
        on_ranks=True,
        section="grpo",
        rules="ftcli.methods.grpo.checks:check",
        reward_rules="ftcli.methods.grpo.checks:check_rewards",
        row_rules="ftcli.methods.grpo.checks:check_rows",
        asks="ftcli.methods.grpo.checks:other_model",
        survey="ftcli.methods.grpo.train:survey",
        sees=True,
        from_prompts=True,
        scores_tasks=True,
        packs=False,
        mixes=False,
        length="grpo.max_completion_length",
        structural=("grpo.num_generations",),
        counts_micro_batches=("grpo.steps_per_generation",),
        told=("grpo.num_generations", "grpo.beta", "grpo.temperature", "grpo.max_completion_length"),
        supports=_OF_PROMPTS,
    ),
}


#: Methods of the field by other names, and those that are not offered yet.
_NOT_OFFERED: Mapping[str, str] = {
    **{name: name.upper() for name in ("cpo", "ppo", "prm")},
    "gkd": "distillation",
    **dict.fromkeys(("kd", "offline_distill", "offline_distillation"), "offline distillation"),
    **dict.fromkeys(("rm", "reward_model", "reward_modeling", "reward_modelling"), "reward modelling"),
}


def not_offered(word: str) -> str | None:
    """Help for a method of the field in the place of a command or a key; None for every other word."""
    name = word.lower().replace("-", "_")
    own = TABLE.get(name)
    if own is not None:
        return offered(own.title) if own.command == "train" and own.section is not None else None
    title = _NOT_OFFERED.get(name)
    return None if title is None else offered(title)


#: Words for learning by rewards, which has a command of its own.
_BY_REWARDS = frozenset(("rl", "rlhf", "rlvr", "rft", "dr_grpo", "dapo", "gspo", "gdpo", "rloo", "reinforce"))


def no_value(word: str) -> str | None:
    """Help for a word in the place of a method that ``train.method`` does not have; None where nothing is known."""
    name = word.lower().replace("-", "_")
    own = TABLE.get("grpo" if name in _BY_REWARDS else name)
    if own is not None and own.command != "train":
        return f"{own.title} is `ftcli {own.command}`, with the section `{own.section}`; leave train.method out"
    return not_offered(word)


def measures(method: Method, recipe: Any) -> dict[str, bool]:
    """The measures of held-out rows while a recipe trains, by name: whether more of each is better."""
    tasks = {task.label: True for task in recipe.eval.tasks}
    if method.from_prompts:
        return tasks
    also = {} if recipe.eval.tasks_every_steps is None else tasks
    if method.scores is None:
        return {"loss": False, "perplexity": False, "token_accuracy": True, **also}
    return {"loss": False, **{name: more for name, _, more, _ in code_of(method.scores)}, **also}


def offered(title: str) -> str:
    """Tells how to ask for the method with this title, or names the methods of ftcli if it is none of them."""
    own = next((method for method in TABLE.values() if method.title == title), None)
    if own is not None:
        return f"{title} is `train.method: {own.name}` of `ftcli train`, with the section `{own.section}`"
    ways = (
        f"{', '.join(method.title for method in TABLE.values() if method.command == command)} (`ftcli {command}`)"
        for command in commands()
    )
    return f"ftcli trains by {', and by '.join(ways)}; {title} is not offered yet"


def row(name: str) -> Method:
    """The row of a method. Raises KeyError for a name without one."""
    return TABLE[name]


def names() -> tuple[str, ...]:
    """Values of ``train.method``: all but the methods that a command and a section of their own name."""
    return tuple(name for name, row in TABLE.items() if row.section is None or row.command == "train")


def sections() -> tuple[str, ...]:
    """The sections of a recipe that hold the settings of single methods."""
    return tuple(dict.fromkeys(row.section for row in TABLE.values() if row.section is not None))


def commands() -> tuple[str, ...]:
    """The commands that train."""
    return tuple(of_commands())


def of_commands() -> dict[str, Method]:
    """Each command that trains, with the method that speaks for it: the first of its rows."""
    found: dict[str, Method] = {}
    for method in TABLE.values():
        found.setdefault(method.command, method)
    return found


def method_of(recipe: Any, command: str) -> Method:
    """The method that ``command`` means for a recipe (:class:`ftcli.config.recipe.Recipe`).

    A command that belongs to a method means that one. `check` and `sample` mean the method whose own section the
    recipe has. In all other cases it is ``train.method``.
    """
    for method in TABLE.values():
        if method.command == "train":
            continue
        has_section = method.section is not None and getattr(recipe, method.section, None) is not None
        if method.command == command or (command in ("check", "sample") and has_section):
            return method
    return TABLE[recipe.train.method]
