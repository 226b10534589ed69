"""Training methods: what a recipe's rows teach, and how. One row each.

``train.method`` names the method of `ftcli train`. A method with a command and a section of the recipe of its own
(``grpo``) is chosen by these.
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
        title: In a few words, for messages.
        run: Code: ``(loaded, session) -> result``, the whole command.
        memory: Code: a function ``Setup -> MethodMemory`` (:mod:`ftcli.preflight.memory.methods`).
        section: The recipe's section that holds its settings; None: ``train`` says it all.
        rules: Code: ``Context -> findings``, rules of its own; None: the common ones.
        from_prompts: Its rows are prompts, and the answers are the model's. Else they hold the answers.
        pads_left: Its batches are padded on the left and come with a padding mask.
        on_kernels: Its steps run on ftcli's layers; else on transformers' own.
        scores_tasks: `eval.tasks` are scored before and after training.
        takes_quantized: It trains adapters on quantised bases.
        packs: ``data.packing`` and weights of sources have a meaning for it.
        example: A shipped recipe.
        length: The recipe key that is lowered where rows are too long.
        supports: Of recipe keys that some values do not work with: those that do.
    """

    name: str
    command: str
    title: str
    run: str
    memory: str
    section: str | None = None
    rules: str | None = None
    from_prompts: bool = False
    pads_left: bool = False
    on_kernels: bool = True
    scores_tasks: bool = False
    takes_quantized: bool = True
    packs: bool = True
    length: str = "data.max_seq_len"
    example: str = "smoke"
    supports: Mapping[str, tuple[Any, ...]] = field(default_factory=lambda: MappingProxyType({}))


TABLE: Mapping[str, Method] = MappingProxyType(
    {
        "sft": Method(
            "sft",
            "train",
            "supervised fine-tuning",
            run="ftcli.pipeline.training:train",
            memory="ftcli.preflight.memory.methods:supervised",
        ),
        "grpo": Method(
            "grpo",
            "grpo",
            "GRPO",
            run="ftcli.pipeline.reinforcement:train",
            memory="ftcli.preflight.memory.methods:grpo",
            section="grpo",
            rules="ftcli.preflight.checks.grpo:check",
            from_prompts=True,
            pads_left=True,
            on_kernels=False,
            scores_tasks=True,
            takes_quantized=False,
            packs=False,
            length="grpo.max_completion_length",
            example="mistral-7b-grpo",
            supports=MappingProxyType(
                {
                    "model.dtype": ("auto", "bfloat16", "float32"),
                    "model.kernels": ("auto", "off"),
                    # TRL switches checkpointing off for generation, and back on in transformers' form.
                    "train.gradient_checkpointing": ("auto", True, False),
                }
            ),
        ),
    }
)


def row(name: str) -> Method:
    """The row of a method. Raises KeyError for a name without one."""
    return TABLE[name]


def names() -> tuple[str, ...]:
    """What ``train.method`` may say: the methods without a section of their own."""
    return tuple(name for name, row in TABLE.items() if row.section is None)


def commands() -> tuple[str, ...]:
    """The commands that train."""
    return tuple(dict.fromkeys(row.command for row in TABLE.values()))


def method_of(recipe: Any, command: str) -> Method:
    """The method that ``command`` comes to on a recipe (:class:`ftcli.config.Recipe`).

    A command with a method of its own means that one; `check` looks at what the recipe is for, a section of its own
    first; everything else goes by ``train.method``.
    """
    for method in TABLE.values():
        if method.section is not None and (
            method.command == command or (command == "check" and getattr(recipe, method.section, None) is not None)
        ):
            return method
    return TABLE[recipe.train.method]
