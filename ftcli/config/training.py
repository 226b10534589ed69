"""Sections that say how a run proceeds: run, train, checkpoint, logging."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, GetJsonSchemaHandler, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticKnownError

from ftcli.config.base import Count, PathText, Rate, Section, Word
from ftcli.tables import loggers, methods, optimizers, policies, schedules

Scheduler = Annotated[str, Word(schedules.names)]
Beta = Annotated[float, Field(ge=0, lt=1)]
Optimizer = Annotated[str, Word(optimizers.names)]

#: A checkpointing policy as a recipe may say it: a row of :mod:`ftcli.tables.policies`, or ``auto``.
CheckpointingSetting = bool | Annotated[str, Word(policies.names)]


class RunConfig(Section):
    """A run's folder, and how it starts."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")] | None = Field(
        default=None, description="The run's name; the recipe's file name when absent."
    )
    output_dir: PathText | None = Field(default=None, description="The run directory; `runs/<name>` when absent.")
    seed: Annotated[int, Field(ge=0, lt=2**32)] = Field(default=42, description="Seeds weights, data order, dropout.")
    resume: PathText = Field(
        default="auto",
        description="`auto` continues an unfinished run; `never` starts over and keeps the old run; else the path of "
        "a checkpoint.",
    )

    mirror: Annotated[str, Field(min_length=1)] | None = Field(
        default=None,
        description="Where each checkpoint of the run is copied, such as `s3://bucket/runs/name`, and resumed from.",
    )

    @property
    def resumes_elsewhere(self) -> bool:
        """True if a checkpoint is named: the user asks for something else of it than its run did."""
        return names_checkpoint(self.resume)


def names_checkpoint(resume: str) -> bool:
    """True if ``run.resume`` is the path of a checkpoint."""
    return resume not in ("auto", "never")


class EarlyStoppingConfig(Section):
    """Ends training when evaluations no longer get better. Needs `eval.every_steps`."""

    patience: Count = Field(default=3, description="Evaluations in a row without improvement before training ends.")
    min_delta: Rate = Field(default=0.0, description="What counts as an improvement: by more than this.")


class TrainConfig(Section):
    """The optimisation. Leaf names are those of transformers' TrainingArguments."""

    method: Annotated[str, Word(methods.names)] = Field(
        default=methods.DEFAULT, description="`sft` is supervised fine-tuning; the others learn from preferences."
    )
    num_train_epochs: Annotated[float, Field(gt=0, le=1e6)] = Field(default=1.0, description="Passes over the data.")
    max_steps: Count | None = Field(default=None, description="Optimizer steps; overrides `num_train_epochs` when set.")
    per_device_train_batch_size: Count = Field(default=1, description="Rows per forward pass (GRPO: completions).")
    gradient_accumulation_steps: Count = Field(default=1, description="Forward passes per optimizer step.")
    learning_rate: Annotated[float, Field(gt=0, le=10.0)] = Field(
        default=2e-4, description="Peak learning rate; preference methods have their own defaults."
    )
    lr_scheduler_type: Scheduler = Field(default="linear", description="Learning-rate schedule.")
    lr_scheduler_kwargs: dict[str, float | int | str] = Field(
        default_factory=dict, description="Arguments of the schedule; the table of schedules lists them."
    )
    warmup_steps: Rate = Field(default=0.0, description="Warm-up steps; below 1 a fraction of all steps.")
    weight_decay: Rate = Field(default=0.0, description="Decoupled weight decay; never on norms and biases.")
    optim: Optimizer = Field(default="adamw_torch", description="Optimizer.")
    adam_beta1: Beta = Field(default=0.9, description="AdamW's beta1.")
    adam_beta2: Beta = Field(default=0.999, description="AdamW's beta2.")
    adam_epsilon: Annotated[float, Field(gt=0, lt=1)] = Field(default=1e-8, description="AdamW's epsilon.")
    max_grad_norm: Annotated[float, Field(gt=0)] = Field(default=1.0, description="Gradient norm is clipped to this.")
    gradient_checkpointing: CheckpointingSetting = Field(
        default="auto",
        description="What backward recomputes: `false` nothing, `selective` gate and up of the MLP, `true` whole "
        "layers, `offload` the same with inputs in host memory, `lean` as `true` with a frozen embedding "
        "in host memory. `auto`: the fastest that fits.",
    )
    uncheckpointed_layers: Annotated[int, Field(ge=0)] = Field(
        default=0,
        description="Under `selective` and `offload`: so many last layers keep everything. `auto` chooses it.",
    )
    loraplus_lr_ratio: Annotated[float, Field(ge=1, le=1e4)] | None = Field(
        default=None,
        description="LoRA+: the learning rate of B matrices is this many times higher. 4 to 16 are usual, at a "
        "somewhat lower rate.",
    )
    train_sampling_strategy: Literal["random", "group_by_length"] = Field(
        default="random",
        description="`group_by_length` batches rows of similar length, which pads less; random within at most 50 "
        "batches.",
    )
    router_aux_loss_coef: Annotated[float, Field(ge=0, le=100)] | None = Field(
        default=None,
        description="Full fine-tuning of experts: factor of the loss that keeps tokens spread over them. When absent "
        "config.json's under its `output_router_logits: true`, else 0.",
    )
    neftune_noise_alpha: Annotated[float, Field(gt=0, le=1000)] | None = Field(
        default=None,
        description="NEFTune: uniform noise on the embeddings, at most this over the root of sequence length times "
        "width. 5 to 15 are usual.",
    )
    cuda_graphs: bool = Field(
        default=True,
        description="Launch decoder layers as CUDA graphs where a micro-batch has few tokens; the same bits.",
    )
    pure_bf16: bool = Field(
        default=False,
        description="Full fine-tuning: parameters and gradients in bfloat16, half of float32's memory.",
    )
    bf16_gradients: bool = Field(
        default=False,
        description="Full fine-tuning with float32 parameters: gradients of matrices in bfloat16, which saves 2 bytes"
        " a parameter.",
    )
    bf16_stochastic_round: bool = Field(
        default=False,
        description="With `pure_bf16`: round updates stochastically; `false` rounds to nearest and loses most at "
        "usual learning rates.",
    )
    early_stopping: EarlyStoppingConfig | None = Field(
        default=None, description="When training ends because evaluations stop getting better; never when absent."
    )
    metric_for_best_model: Annotated[str, Field(min_length=1, max_length=200)] | None = Field(
        default=None,
        description="What `early_stopping` and `checkpoint.keep_best` look at: `loss`, `token_accuracy`, `accuracy` or "
        "`margin` of pairs, or a task. When absent the held-out loss, or the mean score of the tasks.",
    )
    memory_budget_gib: Annotated[float, Field(gt=0, le=4096)] | None = Field(
        default=None,
        description="Memory that `gradient_checkpointing: auto` plans with; all of the device's when absent.",
    )

    @property
    def checkpointing(self) -> policies.PolicyName:
        """The policy of a recipe that has been through preflight. Raises ValueError while it is ``auto``: only
        preflight knows what fits (:func:`ftcli.plan.checkpointing.choose_checkpointing`).
        """
        if self.gradient_checkpointing == "auto":
            raise ValueError(
                "gradient_checkpointing: auto has not been resolved; use the recipe of the preflight report"
            )
        return self.gradient_checkpointing


class CheckpointConfig(Section):
    """Settings of checkpoints."""

    every_steps: Count | None = Field(default=500, description="Steps between checkpoints; null: only on signals.")
    keep_last: Count = Field(default=2, description="Complete checkpoints kept.")
    keep_best: bool = Field(
        default=False,
        description="Also keep the checkpoint of the best evaluation: the lowest held-out loss, without one the highest"
        " mean score of the tasks, or what `train.metric_for_best_model` says.",
    )
    on_sigterm: bool = Field(default=True, description="On SIGTERM or SIGHUP finish the step, save, exit 75.")


def _logger_name(name: str) -> str:
    if name not in loggers.names():
        raise PydanticKnownError("extra_forbidden")
    return name


class LoggerSettings(Section):
    """A logger's project and names. Absent ones are the logger's own defaults, or come from its environment."""

    project: str | None = Field(
        default=None, min_length=1, description="Project; `WANDB_PROJECT` or `ftcli` if absent."
    )
    entity: str | None = Field(default=None, min_length=1, description="Account or team; your own when absent.")
    group: str | None = Field(default=None, min_length=1, description="Group of runs in the project.")


class LoggingConfig(Section):
    """Metrics loggers besides `metrics.jsonl`."""

    model_config = ConfigDict(extra="allow")

    every_steps: Count = Field(default=10, description="Steps between lines.")
    # Every other key switches on a logger: a row of ftcli.tables.loggers, which is asked each time.
    __pydantic_extra__: dict[Annotated[str, BeforeValidator(_logger_name)], bool | LoggerSettings] = Field(init=False)

    @model_validator(mode="before")
    @classmethod
    def _switched_off(cls, value: Any) -> Any:
        """Loggers that are not mentioned are off; one without settings refuses a section as it does null."""
        if not isinstance(value, dict):
            return value
        plain = [name for name in loggers.names() if not loggers.row(name).settings]
        refused = {name: None for name in plain if isinstance(value.get(name), dict)}
        return {**dict.fromkeys(loggers.names(), False), **value, **refused}

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """The switches are listed as the keys that they are."""
        found = handler.resolve_ref_schema(handler(schema))
        for name in loggers.names():
            row = loggers.row(name)
            about = f"{row.about} Needs `pip install '{row.install}'`."
            found["properties"][name] = {"type": "boolean", "default": False, "description": about}
            if row.settings:
                section = LoggerSettings.model_json_schema()
                found["properties"][name] = {
                    "default": False,
                    "description": about,
                    "anyOf": [{"type": "boolean"}, section],
                }
        found["additionalProperties"] = False
        return found

    @property
    def loggers(self) -> tuple[str, ...]:
        return tuple(name for name, on in (self.__pydantic_extra__ or {}).items() if on)
