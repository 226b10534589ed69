"""Rules of the section `distill`, its teacher, and the memory of a step."""

from __future__ import annotations

from typing import Any

from ftkernels.limits import divergence_bytes

from ftcli.config.model import ModelConfig, QuantizationConfig
from ftcli.config.recipe import Recipe
from ftcli.errors import Finding, Origin
from ftcli.facts.generation import MOST_ROWS
from ftcli.methods.distill.settings import DistillConfig
from ftcli.paths import expanded
from ftcli.plain import JsonMap, JsonObject
from ftcli.plan.memory.shards import LAYERS_AT_ONCE
from ftcli.plan.run import Generation, MethodMemory, OtherModel, RunPlan
from ftcli.preflight.checks.context import Context, Findings
from ftcli.preflight.checks.data import FirstRows
from ftcli.run.atomic import read_json_object

#: The file in which a folder of log-probabilities says what they are of.
TOLD = "teacher.json"
#: Bytes of a parameter of a teacher that is held so, scales included; what is not quantized of it is little.
_STORED = {"nf4": 0.6, "fp8": 1.05}


def other_model(recipe: Recipe) -> OtherModel | None:
    """The teacher, where it is another model: held in the trained one's dtype, or as the section says."""
    settings = recipe.distill
    if settings is None or settings.teacher is None:
        return None
    named = {"name_or_path": settings.teacher, "revision": settings.teacher_revision}
    model: ModelConfig = recipe.model.model_copy(update={**named, "init": "pretrained", "tokenizer": None})
    return OtherModel("distill.teacher", model, QuantizationConfig(method=settings.teacher_quantization))


def check(context: Context) -> Findings:
    """FT262, FT274, FT276 and FT288."""
    recipe, settings = context.recipe, context.recipe.distill or DistillConfig()
    if settings.teacher is None and (recipe.lora is None or settings.teacher_column is None):
        message = "distill.teacher is absent, so the model would learn from itself what it knows"
        help = (
            "name a teacher; or train adapters (`lora`), and name a distill.teacher_column that the teacher alone sees"
        )
        yield context.error("FT288", "distill.teacher", message, help=help)
    if settings.teacher is None and recipe.lora is not None and recipe.lora.changes_base:
        message = (
            f"init_lora_weights: {recipe.lora.init_lora_weights} changes the base weights, which are the teacher "
            "without adapters"
        )
        yield context.error("FT274", "lora.init_lora_weights", message, help="use another init_lora_weights")
    for name in ("teacher_logprobs", "teacher_top_k"):
        if context.says(f"distill.{name}"):
            message = f"distill.{name} is not read where a teacher judges the student's own answers"
            help = "write train.method: distill_offline, or remove it"
            yield context.error("FT276", f"distill.{name}", message, help=help)
    for name in ("teacher_revision", "teacher_quantization") if settings.teacher is None else ():
        if context.says(f"distill.{name}"):
            message = f"distill.{name} is not read without distill.teacher"
            yield context.error("FT276", f"distill.{name}", message, help="remove it")
    total = settings.max_prompt_length + settings.max_completion_length
    if total > recipe.data.max_seq_len:
        yield context.error(
            "FT262",
            "distill.max_completion_length",
            f"distill.max_prompt_length {settings.max_prompt_length} + distill.max_completion_length "
            f"{settings.max_completion_length} = {total} exceeds data.max_seq_len {recipe.data.max_seq_len}",
            help=f"use data.max_seq_len: {total}, or shorter prompts and completions",
        )


def check_offline(context: Context) -> Findings:
    """FT254 where nothing says what the teacher thinks, FT276 for settings of sampling."""
    settings = context.recipe.distill or DistillConfig()
    if settings.teacher_logprobs is None:
        help = "name a folder; `distill.teacher` is asked for what it lacks, and may be left out once it is complete"
        message = "distill.teacher_logprobs is absent: offline distillation has no log-probabilities of a teacher"
        yield context.error("FT474", "distill.teacher_logprobs", message, help=help)
    else:
        yield from _stored(context, settings, settings.teacher_logprobs)
    for name in ("teacher_column", "top_p", "top_k", "max_prompt_length", "max_completion_length", "stop_strings"):
        if context.says(f"distill.{name}"):
            message = f"distill.{name} is not read where answers come from the rows"
            yield context.error("FT276", f"distill.{name}", message, help="remove it")


def _stored(context: Context, settings: DistillConfig, folder: str) -> Findings:
    """FT474 where the folder is of something else than the recipe says."""
    path = expanded(folder) / TOLD
    told = read_json_object(path)
    if not told and (settings.teacher is None or path.exists()):
        message = f"{folder} holds no log-probabilities of a teacher"
        help = "name the distill.teacher to be asked"
        if path.exists():
            message, help = (
                f"{path} cannot be read",
                "restore it, or name another folder, for which the teacher is asked",
            )
        yield context.error("FT474", "distill.teacher_logprobs", message, help=help)
    if not told:
        return
    top, size = settings.teacher_top_k, told.get("vocabulary")
    if not isinstance(size, int):
        yield does_not_fit(folder, "vocabulary", size, "a number of tokens")
        return
    top = min(top, size)
    wanted: JsonObject = {"teacher_top_k": top, "temperature": settings.temperature}
    if settings.teacher is not None:
        wanted |= {"teacher": settings.teacher, "revision": settings.teacher_revision}
        wanted |= {"quantization": settings.teacher_quantization}
    for one in differing(told, wanted):
        found = does_not_fit(folder, *one)
        yield context.error(found.code, "distill.teacher_logprobs", found.message, help=found.help)


def differing(told: JsonMap, wanted: JsonMap) -> list[tuple[str, Any, Any]]:
    """Differences of a folder: of each its name, the value there, and the wanted one."""
    return [(name, told.get(name), value) for name, value in wanted.items() if told.get(name) != value]


def does_not_fit(folder: str, name: str, said: Any, wanted: Any) -> Finding:
    """FT474 for a folder that is of another teacher, or that was asked otherwise."""
    message = f"the log-probabilities in {folder} are of another {name}: {said} there, {wanted} here"
    help = f"restore what they were made with (distill.{name}: {said}), or name another folder"
    if name in ("weights", "tokens", "vocabulary", "format"):
        help = "restore the model that they were made with, or name another folder: the teacher is asked again then"
    return Finding("FT474", message, help=help)


def check_rows(context: Context, first: FirstRows) -> Findings:
    """FT453 where a row lacks the column that the teacher alone is to see."""
    column = (context.recipe.distill or DistillConfig()).teacher_column
    without = next((row for row in first.rows if column is not None and column not in row.fields), None)
    if column is not None and without is not None:
        yield no_column(column, without.origin)


def no_column(column: str, origin: Origin) -> Finding:
    """FT453 for a row without ``distill.teacher_column``."""
    message = f"distill.teacher_column names the column {column!r}, which this row does not have"
    return Finding("FT453", message, origin, "add it to all rows, or name another one")


def memory_of_stored(plan: RunPlan) -> MethodMemory:
    """Of the student's logits some rows exist at a time; what is stored of the teacher lies beside them."""
    settings, sizes, element = plan.recipe.distill or DistillConfig(), plan.sizes, plan.dtypes.compute_bytes
    rows = plan.recipe.train.per_device_train_batch_size * plan.recipe.data.max_seq_len
    needed = divergence_bytes(rows, sizes.hidden_size, sizes.vocab_size, element, on_gpu=plan.device.kind == "cuda")
    stored = rows * settings.teacher_top_k * (8 + 4)
    return MethodMemory(plan.recipe.data.max_seq_len, needed + rows * sizes.hidden_size * 3 * element + stored)


def memory(plan: RunPlan) -> MethodMemory:
    """The student's completions of a step are made together; the teacher stays beside it, sharded like it. Of the
    logits of both some rows exist at a time.
    """
    train, settings = plan.recipe.train, plan.recipe.distill or DistillConfig()
    seq_len = settings.max_prompt_length + settings.max_completion_length
    rows = train.per_device_train_batch_size * settings.max_completion_length
    sizes, element = plan.sizes, plan.dtypes.compute_bytes
    needed = divergence_bytes(rows, sizes.hidden_size, sizes.vocab_size, element, on_gpu=plan.device.kind == "cuda")
    teacher = 0
    if plan.other is not None:
        each = _STORED.get(settings.teacher_quantization, float(plan.dtypes.parameter_bytes))
        parameters = plan.other.parameters or 0
        teacher = int(parameters * each) // plan.shard_size
        if plan.shard_size > 1:
            teacher += _gathered(plan, parameters, each)
    completions = train.per_device_train_batch_size * train.gradient_accumulation_steps
    return MethodMemory(
        seq_len=seq_len,
        loss_bytes=needed + rows * sizes.hidden_size * 3 * element,
        reference_bytes=teacher,
        generation=Generation(min(completions, MOST_ROWS), settings.max_prompt_length, seq_len),
    )


def _gathered(plan: RunPlan, parameters: int, each: float) -> int:
    """Bytes of a sharded teacher's weights that are whole while it computes: its tables, and the layers at work."""
    shape = None if plan.other is None else plan.other.shape
    if shape is None:
        return 0
    layer = (parameters - shape.embedding_parameters) // shape.num_layers
    return int(shape.embedding_parameters * plan.dtypes.compute_bytes + LAYERS_AT_ONCE * layer * each)
