"""Sections that say what is trained: the model, its quantization, its adapters."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from ftcli.config.base import Count, Fraction, Items, PathText, Section, Word
from ftcli.tables import engines, quantizations
from ftcli.tables.images import LANGUAGE, TrainedPart

Dtype = Literal["auto", "bfloat16", "float16", "float32"]
Attention = Literal["auto", "eager", "sdpa", "flash_attention_2", "flex_attention", "triton"]
Kernels = Literal["auto", "triton", "reference", "off"]

#: Of the attention backends those that this version has.
SUPPORTED_ATTENTION: tuple[Attention, ...] = ("auto", "eager", "sdpa")


class ModelConfig(Section):
    """The base model and how it is held."""

    name_or_path: PathText = Field(
        description="Hub id, local folder, or `bundled:NAME` for a model that ships with ftcli.",
        examples=["google/gemma-2-9b", "./my-model", "bundled:tiny-gemma2"],
    )
    revision: str | None = Field(default=None, description="Branch, tag or commit on the Hub.")
    tokenizer: PathText | None = Field(
        default=None,
        description="Hub id, folder, or `bytes`: the bundled byte-level one with a chat template. The model's own "
        "when absent.",
    )
    add_tokens: Items[Annotated[str, Field(min_length=1)]] = Field(
        default=(),
        description="New tokens. With `lora` their rows of embedding and head alone are trained beside the adapters.",
    )
    dtype: Dtype = Field(
        default="auto",
        description="Compute dtype. `auto` takes bfloat16 where the GPU has it (capability 8.0 or more), else float32.",
    )
    attention: Attention = Field(
        default="auto", description="Attention backend. `auto` chooses from the model, the mask and the GPU."
    )
    kernels: Kernels = Field(
        default="auto",
        description="ftcli's kernels: `auto` uses each where it applies, `triton` makes one that is off an error, "
        "`reference` runs the plain torch versions, `off` leaves transformers' layers.",
    )
    init: Literal["pretrained", "random"] = Field(
        default="pretrained", description="`random` builds the weights from config.json alone; nothing is downloaded."
    )
    train: Annotated[Items[TrainedPart], Field(min_length=1)] = Field(
        default=LANGUAGE,
        description="Parts of a model that sees that are trained, by adapters or whole: `language`, `projector` (what "
        "brings the tower's output to the language model) and `vision` (the tower).",
    )
    trust_remote_code: bool = Field(
        default=False, description="Always false: ftcli runs no code from a model repository."
    )


class QuantizationConfig(Section):
    """Storage format of the base weights or, by a method that trains them, their rounding."""

    method: Annotated[str, Word(quantizations.names)] = Field(default="none", description="Storage format.")
    double_quant: bool = Field(default=True, description="NF4: quantize the scales as well.")
    keep_dequantized: bool | Literal["auto"] = Field(
        default=False,
        description="NF4: keep dequantized weights, for a bf16 model's memory and speed; `auto`: of as many layers as"
        " leave ample room.",
    )
    lambda_warmup_steps: Annotated[int, Field(ge=0)] = Field(
        default=0,
        description="BitNet: steps from exact to quantized values, in equal parts; about 1000 for a model trained in "
        "bf16, 0 for one quantized before or from scratch.",
    )
    use_rms_norm: bool = Field(
        default=False,
        description="BitNet conversion: a trained RMSNorm on the input of every rounded layer. Models saved with such"
        " norms have them anyway.",
    )


Initialisation = Annotated[str, Field(pattern=r"^(gaussian|orthogonal|olora|pissa|pissa_niter_[1-9][0-9]{0,2})$")]


class LoraConfig(Section):
    """Low-rank adapters (PEFT). Leave the section out for full fine-tuning."""

    r: Annotated[int, Field(ge=1, le=4096)] = Field(default=16, description="Rank.")
    alpha: Annotated[float, Field(gt=0)] = Field(
        default=32.0, description="Scale: adapters add `alpha / r` (or `alpha / sqrt(r)`) times their output."
    )
    dropout: Fraction = Field(default=0.0, description="Dropout on the adapters' input.")
    target_modules: Literal["all-linear"] | Items[str] = Field(
        default="all-linear",
        description="Modules to adapt; `all-linear`: every linear layer of the language model's decoder layers, "
        "experts included, without routers and head.",
    )
    experts: bool = Field(
        default=True,
        description="`all-linear` means every expert as well. `false`: attention and shared experts alone.",
    )
    modules_to_save: Items[str] = Field(
        default=(),
        description="Modules trained whole and saved with the adapter, by the ends of their paths.",
    )
    use_rslora: bool = Field(default=False, description="Scale by `alpha / sqrt(r)` instead of `alpha / r`.")
    use_dora: bool = Field(
        default=False,
        description="DoRA: train the norm of each row of the adapted weight apart from its direction. Runs on PEFT's "
        "layers, slower than LoRA on the kernels.",
    )
    init_lora_weights: Literal[True] | Initialisation = Field(
        default=True,
        description="`true`, `gaussian` and `orthogonal` change nothing at first; `pissa` (`pissa_niter_4` is faster)"
        " and `olora` begin with singular vectors or a QR decomposition, and are saved as adapters of twice the rank.",
    )
    start_from: PathText | None = Field(
        default=None,
        description="A PEFT adapter to go on from, of ftcli or another tool: its folder, or a run's. `r`, `alpha` and"
        " `target_modules` have to be its own.",
    )
    layers_to_transform: Annotated[Items[Annotated[int, Field(ge=0)]], Field(min_length=1)] | None = Field(
        default=None, description="Numbers of the layers that have adapters; all when absent."
    )
    layers_pattern: Items[Annotated[str, Field(min_length=1)]] = Field(
        default=(), description="Names before a layer's number, where the first number in a path is not it."
    )
    exclude_modules: Annotated[str, Field(min_length=1)] | Items[Annotated[str, Field(min_length=1)]] = Field(
        default=(),
        description="Modules without an adapter: ends of paths, or one regular expression for whole paths.",
    )
    rank_pattern: dict[str, Annotated[int, Field(ge=1, le=4096)]] = Field(
        default_factory=dict,
        description="Ranks of single modules, by ends of paths or regular expressions.",
    )
    alpha_pattern: dict[str, Annotated[float, Field(gt=0)]] = Field(
        default_factory=dict, description="Likewise for `alpha`."
    )

    @property
    def changes_base(self) -> bool:
        """True if adapters take over a part of the base weights, so that these are others in training."""
        return self.init_lora_weights == "olora" or str(self.init_lora_weights).startswith("pissa")


class LaunchConfig(Section):
    """Number of processes, and how they divide the work."""

    engine: Annotated[str, Word(engines.names)] = Field(
        default="auto",
        description="`ddp`: each process has the whole model; `fsdp`: weights are sharded. `auto`: `fsdp` for full "
        "fine-tuning and models larger than one GPU, else `ddp`.",
    )
    num_processes: Count = Field(default=1, description="Processes, one for each GPU.")
    dp_replicate_size: Count | Literal["auto"] = Field(
        default="auto",
        description="Under `fsdp`: replicas of the model, each sharded over `num_processes` / `dp_replicate_size` "
        "processes (HSDP). `auto`: one a host where the model fits there.",
    )
    context_parallel_size: Count = Field(
        default=1,
        description="Processes that share each row, for rows that are too long for one GPU. Divides `num_processes`.",
    )

    @property
    def copies(self) -> int:
        """Copies of a model that is sharded; 1 where that is not decided."""
        return 1 if self.dp_replicate_size == "auto" else self.dp_replicate_size

    @property
    def shard_size(self) -> int:
        """Processes that one copy of the model is sharded over, where it is."""
        return max(1, self.num_processes // self.copies)

    @property
    def is_sharded(self) -> bool:
        """True if the engine shards weights over several processes."""
        return self.num_processes > 1 and engines.row(self.engine).shards

    @property
    def row_shares(self) -> int:
        """Processes, or teams of them, that train on rows of their own."""
        return max(1, self.num_processes // self.context_parallel_size)
