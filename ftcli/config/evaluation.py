"""Sections `eval` and `export`: how a model is judged, by whom, and how it leaves."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from ftcli.config.base import Count, Items, PathText, Section, Served, Word
from ftcli.config.data import Dataset
from ftcli.config.model import Dtype
from ftcli.plain import JsonObject
from ftcli.tables import exports, gguf, judges

#: What becomes of completions that could not be judged: an end of the run, no score, or this one.
OnError = Literal["stop", "skip"] | Annotated[float, Field(ge=-1e12, le=1e12)]


class AddressConfig(Section):
    """An address that speaks OpenAI's protocol."""

    url: Annotated[str, Field(pattern=r"^https?://[^\s]+$")] = Field(
        description="The address before `/chat/completions` or `/completions`, such as `https://api.openai.com/v1`."
    )
    api_key_env: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")] | None = Field(
        default=None, description="The environment variable that holds the key; none is sent when absent."
    )
    concurrency: Annotated[int, Field(ge=1, le=1024)] = Field(default=16, description="Requests at a time.")
    retries: Annotated[int, Field(ge=0, le=20)] = Field(
        default=4, description="Further tries where it is busy or out of reach, each after twice as long."
    )
    timeout: Annotated[float, Field(gt=0, le=3600)] = Field(default=60.0, description="Seconds of one request.")


class EndpointConfig(AddressConfig):
    """A model behind an address that speaks OpenAI's chat completions."""

    model: Annotated[str, Field(min_length=1)] = Field(description="The model's name there.")
    prompt: Annotated[str, Field(pattern=r"\{completion\}")] = Field(
        description="What it is asked; `{prompt}`, `{completion}`, `{answer}` and the names of other columns in braces "
        "are filled in."
    )
    request: JsonObject = Field(
        default_factory=dict, description="Further keys of each request, such as `{temperature: 0}`."
    )
    max_requests: Count = Field(
        default=100_000, description="Requests of one command, further tries included; the next one ends it."
    )


class JudgeConfig(Section):
    """A built-in judge (`use`) or a function of yours (`file`), and what it is told."""

    use: Annotated[str, Word(judges.names)] | None = Field(default=None, description="A built-in judge.")
    file: Annotated[str, Field(pattern=r"^.+\.py:[A-Za-z_]\w*$"), Served] | None = Field(
        default=None,
        description="`path.py:function` with `function(completions, prompts, **columns) -> list[float | None]`.",
    )
    extract: str | None = Field(
        default=None,
        description="exact_match: a regular expression whose first group is compared, not all the text. "
        "llm_judge: one whose first group is the number; the reply's last number when absent.",
    )
    pattern: str | None = Field(default=None, description="regex: what a completion must match.")
    endpoint: EndpointConfig | None = Field(default=None, description="llm_judge: the model that judges.")
    model: PathText | None = Field(
        default=None,
        description="reward_model: the folder of a reward model, such as `runs/reward/export/safetensors`.",
    )
    min_chars: Annotated[int, Field(ge=0, le=10_000_000)] | None = Field(
        default=None, description="length: fewest characters that pass; 0 when absent."
    )
    max_chars: Annotated[int, Field(ge=0, le=10_000_000)] | None = Field(
        default=None, description="length: most characters that pass."
    )
    json_schema: PathText | JsonObject | None = Field(
        default=None,
        description="json_valid: the JSON Schema to fit, written here or the path of a JSON file.",
    )
    timeout: Annotated[float, Field(gt=0, le=3600)] | None = Field(
        default=None,
        description="Seconds. python_tests: each program (5); math_verify: each completion (5); your function: each "
        "call, which judges a whole batch (60).",
    )
    memory_mb: Annotated[int, Field(ge=64, le=1_048_576)] | None = Field(
        default=None, description="python_tests: MiB of address space of each program; 512 when absent."
    )
    args: JsonObject = Field(default_factory=dict, description="Further keyword arguments for your function.")
    on_error: OnError | None = Field(
        default=None,
        description="What happens to a completion that cannot be judged: `stop` ends the command, `skip` leaves the "
        "completion out, a number is its score. Absent: `stop` for your functions, `skip` for built-in "
        "judges.",
    )


class RewardConfig(JudgeConfig):
    """One reward: a built-in (`use`) or a function of yours (`file`)."""

    answer: str = Field(
        default="answer",
        description="exact_match, contains, math_verify: the column with the right answer; python_tests: with tests.",
    )
    weight: Annotated[float, Field(ge=-10_000, le=10_000)] = Field(
        default=1.0, description="Weight of this reward in the sum."
    )


GgufType = Annotated[str, Word(gguf.type_names)]
ExportFormat = Annotated[str, Word(exports.names)]


class GenerateConfig(Section):
    """Settings of generation in evaluation."""

    max_new_tokens: Count = Field(default=64, description="Longest completion in tokens.")
    do_sample: bool = Field(default=False, description="Sample instead of taking the likeliest token.")
    temperature: Annotated[float, Field(gt=0, le=10)] = Field(default=1.0, description="Sampling temperature.")
    stop_strings: Items[Annotated[str, Field(min_length=1, max_length=1000)]] = Field(
        default=(),
        description="Texts that end a completion before them, beside the tokens that end a turn.",
    )
    overflow: Literal["end", "sliding"] = Field(
        default="end",
        description="Where prompt and completion reach data.max_seq_len: `end` ends the completion; `sliding` drops "
        "the oldest quarter of the window and goes on.",
    )


class TaskConfig(JudgeConfig):
    """A generation task: the last assistant turn (or the completion) is the reference."""

    use: Annotated[str, Word(judges.names)] | None = Field(
        default=None, description="How a completion is judged; `exact_match` when neither this nor `file` is there."
    )
    file: Annotated[str, Field(pattern=r"^.+\.py:[A-Za-z_]\w*$"), Served] | None = Field(
        default=None,
        description="Judged by `path.py:function` with `function(completions, prompts, **columns) -> "
        "list[float | None]`, as rewards are; `answer` is the reference.",
    )
    name: str | None = Field(default=None, description="Name in the results; `use`, or the function's, when absent.")
    data: Items[Dataset] = Field(default=(), description="Rows of the task; `data.eval` when absent.")
    max_rows: Count | None = Field(default=None, description="Judge the first rows only.")

    @property
    def kind(self) -> str:
        """The built-in judge, or "function"."""
        return "function" if self.file is not None else self.use or judges.DEFAULT

    @property
    def label(self) -> str:
        """Name in the results."""
        return self.name or (self.file.rpartition(":")[2] if self.file is not None else self.kind)


class EvalConfig(Section):
    """Evaluation, during training and by `ftcli eval`."""

    every_steps: Count | None = Field(
        default=None,
        description="Steps between evaluations, the first before training; absent: only at the end.",
    )
    samples: Annotated[int, Field(ge=0, le=1000)] = Field(
        default=4, description="Held-out rows of `data.eval` that `train` answers at each evaluation, for the report."
    )
    per_device_eval_batch_size: Count = Field(default=8, description="Rows per forward pass.")
    tasks: Items[TaskConfig] = Field(
        default=(),
        description="Generation tasks of `ftcli eval` and `ftcli grpo`, and of `ftcli train` by the next key.",
    )
    tasks_every_steps: Count | None = Field(
        default=None,
        description="Steps between scorings of `tasks` in `ftcli train`; a multiple of `every_steps`. Absent: none.",
    )
    generate: GenerateConfig = Field(default_factory=GenerateConfig, description="Generation settings.")
    lm_eval: Items[PathText] = Field(
        default=(),
        description="Tasks of lm-evaluation-harness, by name or path of a task's YAML; needs the extra `eval`.",
    )
    lm_eval_limit: Count | None = Field(default=None, description="Rows of each `lm_eval` task; all when absent.")


class GgufConfig(Section):
    """Files of the format `gguf`."""

    types: Annotated[Items[GgufType], Field(min_length=1)] = Field(
        default=("q8_0",), description="A file for each. K- and I-quants need llama.cpp's `llama-quantize` on the PATH."
    )
    imatrix: bool = Field(
        default=False,
        description="K-quants are rounded by an importance matrix of the rows of `export.calibration`; I-quants always"
        " are.",
    )
    lora_adapter: bool = Field(default=False, description="Also write the adapter alone, for llama.cpp's `--lora`.")
    converter: PathText | None = Field(
        default=None,
        description="llama.cpp's own converter, for families that ftcli has no table of and for projectors of images: "
        "a checkout of llama.cpp, its `convert_hf_to_gguf.py`, or the program; absent: what is on the PATH.",
    )


class CalibrationConfig(Section):
    """Rows of `data.train` that `gptq`, `awq`, `w8a8`, `fp8_static` and `nvfp4` are calibrated with."""

    rows: Count = Field(default=128, description="Rows, drawn by `run.seed`; fewer where the data has fewer.")
    row_tokens: Count = Field(default=512, description="Most tokens of a row: what is longer is cut off at its end.")


class ExportConfig(Section):
    """Settings of `ftcli export`."""

    formats: Annotated[Items[ExportFormat], Field(min_length=1)] = Field(
        default=("adapter", "safetensors"), description="Formats to write."
    )
    dtype: Dtype = Field(
        default="auto",
        description="Of `safetensors`: what all weights are rounded to; `auto` leaves each in the base's dtype.",
    )
    base: Literal["trained", "original"] = Field(
        default="trained",
        description="What an adapter on a quantized base is merged with: the dequantized weights that it was trained "
        "beside, or the weights before quantization.",
    )
    calibration: CalibrationConfig = Field(
        default_factory=CalibrationConfig, description="Rows for formats that are calibrated."
    )
    gguf: GgufConfig = Field(default_factory=GgufConfig, description="Settings of the format `gguf`.")
