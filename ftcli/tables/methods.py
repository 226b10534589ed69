"""Training methods: what a recipe's rows teach, and how. One row each.

``train.method`` names the method of `ftcli train`. A method that has a command and a section of the recipe to itself,
such as ``grpo``, is chosen by these.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True, slots=True)
class Method:
    """One training method.

    Attributes:
        name: As in ``train.method``, or of its own section.
        command: The command that trains with it.
        title: Its name in messages.
        help: The help text of its command.
        run: Code: ``(loaded, session) -> result``, the whole command; of one ``on_ranks`` also
            ``(loaded, session, group)``.
        dry: Code: ``(loaded, session) -> result``, what its command does instead with ``--dry-rewards``; None: nothing.
        memory: Code: a function ``RunPlan -> MethodMemory`` (:class:`ftcli.plan.run.MethodMemory`).
        section: The recipe's section that holds its settings; None: ``train`` says it all.
        rules: Code: ``Context -> findings``, rules of its own about the recipe; None: the common ones.
        row_rules: Code: ``(Context, FirstRows) -> findings``, rules of its own about the first rows of each source
            that it trains on (:mod:`ftcli.preflight.checks.data`); None: the common ones.
        survey: Code: ``(RowSurvey, recipe) -> None``, how `ftcli check` looks at its rows; None: as rows that hold
            their answers.
        from_prompts: Its rows are prompts, which the model answers. Rows of other methods hold the answers too.
        scores_tasks: `eval.tasks` are scored before and after training.
        packs: It supports ``data.packing`` and weights of sources.
        on_ranks: Several processes can train with it.
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
    rules: str | None = None
    row_rules: str | None = None
    survey: str | None = None
    from_prompts: bool = False
    scores_tasks: bool = False
    packs: bool = True
    on_ranks: bool = False
    length: str = "data.max_seq_len"
    structural: tuple[str, ...] = ()
    counts_micro_batches: tuple[str, ...] = ()
    told: tuple[str, ...] = ()
    supports: Mapping[str, tuple[Any, ...]] = field(default_factory=lambda: MappingProxyType({}))


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

TABLE: Mapping[str, Method] = MappingProxyType(
    {
        "sft": Method(
            "sft",
            "train",
            "supervised fine-tuning",
            _TRAIN_HELP,
            run="ftcli.methods.sft.train:train_supervised",
            memory="ftcli.methods.sft.memory:memory",
            on_ranks=True,
        ),
        "grpo": Method(
            "grpo",
            "grpo",
            "GRPO",
            _GRPO_HELP,
            run="ftcli.methods.grpo.train:train_grpo",
            memory="ftcli.methods.grpo.memory:memory",
            dry="ftcli.methods.grpo.dry_rewards:dry_rewards",
            on_ranks=True,
            section="grpo",
            rules="ftcli.methods.grpo.checks:check",
            row_rules="ftcli.methods.grpo.checks:check_rows",
            survey="ftcli.methods.grpo.prompts:survey",
            from_prompts=True,
            scores_tasks=True,
            packs=False,
            length="grpo.max_completion_length",
            structural=("grpo.num_generations",),
            counts_micro_batches=("grpo.steps_per_generation",),
            told=("grpo.num_generations", "grpo.beta", "grpo.temperature", "grpo.max_completion_length"),
            supports=MappingProxyType(
                {
                    "model.dtype": ("auto", "bfloat16", "float32"),
                    "quantization.method": ("none", "nf4", "fp8"),
                    # Completions would be sampled under noise as well; rows are grouped by prompt.
                    "train.neftune_noise_alpha": (None,),
                    "train.train_sampling_strategy": ("random",),
                    "launch.engine": ("auto", "single", "ddp"),
                    "launch.dp_replicate_size": ("auto", 1),
                    "launch.context_parallel_size": (1,),
                }
            ),
        ),
    }
)


#: Methods of the field that recipes and data may be meant for, and that are not offered yet.
_NOT_OFFERED: Mapping[str, str] = MappingProxyType(
    {
        **{name: name.upper() for name in ("dpo", "kto", "orpo", "cpo", "ipo", "ppo", "rloo", "prm", "gkd")},
        "simpo": "SimPO",
        "reward": "training of reward models",
        "rm": "training of reward models",
        "reward_model": "training of reward models",
        "distill": "distillation",
        "distillation": "distillation",
    }
)


def not_offered(word: str) -> str | None:
    """What to say of a method of the field by which nothing is trained here; None for every other word."""
    title = _NOT_OFFERED.get(word.lower().replace("-", "_"))
    return None if title is None or word.lower() in TABLE else offered(title)


def offered(title: str) -> str:
    """By which methods ftcli trains, and that the one with this title is none of them."""
    ways = " and ".join(f"{method.title} (`ftcli {method.command}`)" for method in TABLE.values())
    return f"ftcli trains by {ways}; {title} is not offered yet"


def row(name: str) -> Method:
    """The row of a method. Raises KeyError for a name without one."""
    return TABLE[name]


def names() -> tuple[str, ...]:
    """What ``train.method`` may say: the methods without a section of their own."""
    return tuple(name for name, row in TABLE.items() if row.section is None)


def sections() -> tuple[str, ...]:
    """The sections of a recipe that hold the settings of single methods."""
    return tuple(row.section for row in TABLE.values() if row.section is not None)


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
    """The method that ``command`` means for a recipe (:class:`ftcli.config.Recipe`).

    A command that belongs to a method means that one. `check` means the method whose own section the recipe has. In all
    other cases it is ``train.method``.
    """
    for method in TABLE.values():
        if method.section is not None and (
            method.command == command or (command == "check" and getattr(recipe, method.section, None) is not None)
        ):
            return method
    return TABLE[recipe.train.method]
