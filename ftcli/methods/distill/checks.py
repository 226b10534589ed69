"""Rules of the section `distill`, its teacher, and the memory of a step."""

from __future__ import annotations

from ftkernels.limits import divergence_bytes

from ftcli.config.model import ModelConfig, QuantizationConfig
from ftcli.config.recipe import Recipe
from ftcli.errors import Finding, Origin
from ftcli.facts.generation import MOST_ROWS
from ftcli.methods.distill.settings import DistillConfig
from ftcli.plan.memory.shards import LAYERS_AT_ONCE
from ftcli.plan.run import Generation, MethodMemory, OtherModel, RunPlan
from ftcli.preflight.checks.context import Context, Findings
from ftcli.preflight.checks.data import FirstRows

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
