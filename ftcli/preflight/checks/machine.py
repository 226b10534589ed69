"""Rules that need the device: dtype, attention and kernels against what the GPU has; and those of the section `launch`:
rows that ranks share, and copies of sharded weights. Pure: the facts are given.
"""

from __future__ import annotations

from ftkernels.limits import capability_text

from ftcli.facts.device import BFLOAT16_CAPABILITY, INSTEAD, DeviceFacts, most_processes
from ftcli.plan.execution import Execution, why_no_kernels, why_not_sharded, why_rows_stay_whole
from ftcli.plan.precision import DtypePlan
from ftcli.plan.quantization import why_dequantized
from ftcli.plan.run import RunPlan
from ftcli.preflight.checks.context import Context, Findings, Found, NotMade
from ftcli.tables import code_of, engines, optimizers, quantizations
from ftcli.tables.packing import why_documents_leak
from ftcli.units import gib

_BUSY_SHARE = 0.9


def check(context: Context, device: DeviceFacts, dtypes: DtypePlan) -> Found:
    """FT275 parameters in bfloat16, FT501 dtype, FT504 memory in use by others, FT505 bfloat16 on a CPU, FT508
    quantized products, FT509 paged optimizers, FT516 more processes than this machine starts, FT519 a GPU that
    is not used.
    """
    yield from _processes(context, device)
    if device.unused is not None:
        help = "a machine with an NVIDIA GPU runs the kernels; `ftcli check --as h100` answers for one"
        yield context.note("FT519", "", f"{device.unused} is not used: {INSTEAD}", help=help)
    if dtypes.compute == "bfloat16" and not device.has_bfloat16:
        needed, found = capability_text(BFLOAT16_CAPABILITY), capability_text(device.capability or (0, 0))
        message = f"{device.name} has no bfloat16: it needs compute capability {needed}, this GPU has {found}"
        help = (
            "use model.dtype: float16 (the loss is then scaled) or float32 (twice the memory; auto takes it "
            "here); or a GPU from Ampere on (a10, l4, a100, ...)"
        )
        yield context.error("FT501", "model.dtype", message, help=help)
    full = context.work == "train" and context.recipe.lora is None
    for name, what in (("pure_bf16", "holds parameters in"), ("bf16_gradients", "rounds gradients to")):
        if full and getattr(context.recipe.train, name) and dtypes.compute == "float32":
            message = f"train.{name} {what} bfloat16, and {device.name} computes in float32"
            help = f"set model.dtype: bfloat16 where the machine has it, or leave train.{name} out"
            yield context.error("FT275", f"train.{name}", message, help=help)
    yield from _occupied(context, device)
    yield from _stored_products(context, device, dtypes)
    optim = context.recipe.train.optim
    if context.work == "train" and device.kind != "cuda" and optimizers.row(optim).paged:
        message = (
            f"train.optim: {optim} pages its state between a GPU and the host, and {device.name} is not a CUDA GPU"
        )
        plain = optim.removeprefix("paged_")
        help = f"nothing is paged here; {plain if plain in optimizers.names() else 'adamw_torch'} does the same"
        yield context.warning("FT509", "train.optim", message, help=help)
    if device.kind == "cpu" and dtypes.compute == "bfloat16":
        help = "use model.dtype: auto"
        yield context.warning("FT505", "model.dtype", "bfloat16 on a CPU is slower than float32", help=help)


def check_layers(context: Context, device: DeviceFacts, execution: Execution) -> Findings:
    """FT503: ``model.kernels: triton`` allows no exception, and the layers are left to transformers."""
    if context.recipe.model.kernels != "triton" or context.work == "export" or execution.on_kernels:
        return
    reason = why_no_kernels(device) or execution.layers.reason
    instead = "auto or reference" if why_no_kernels(device) else "auto, which leaves such layers as they are"
    help = f"use model.kernels: {instead}"
    yield context.error("FT503", "model.kernels", f"model.kernels: triton, but {reason}", help=help)


def check_documents(context: Context, plan: RunPlan) -> Found:
    """FT443: documents of a row would see each other in a family that is known for it."""
    key = "data.packing" if context.recipe.data.packing else "data.padding_free"
    together = context.recipe.data.packing or plan.execution.batches.layout == "unpadded"
    facts = plan.facts
    if plan.execution.on_kernels or not together or context.work == "export":
        return
    reason = why_documents_leak(facts.text_type)
    if reason is None and facts.shape is None and plan.measured.recurrent is not None:
        reason = f"its {plan.measured.recurrent} carries state from token to token"
    if reason is not None:
        message = f"{key}: documents of a row would see each other in a {facts.text_type}: {reason}"
        yield context.error("FT443", key, message, help="train with data.packing: false and data.padding_free: false")
    elif context.command == "check" and facts.shape is None:
        tried = "whether this model keeps them apart is tried before training (FT443)"
        yield NotMade("documents that share a row", tried)


def check_sharded(context: Context, plan: RunPlan) -> Findings:
    """FT518: what does not go with weights that are sharded over GPUs."""
    reason = why_not_sharded(context.recipe, plan.facts, plan.execution)
    if context.work != "train" or not context.recipe.launch.is_sharded or reason is None:
        return
    key, _, said = reason.partition(": ")
    message = f"launch.engine: {context.recipe.launch.engine} does not go with {key}: {said}"
    help = f"change it, or use launch.engine: {engines.by_auto(shards=False)} where the model fits each GPU"
    yield context.error("FT518", key, message, help=help)


def _stored_products(context: Context, device: DeviceFacts, dtypes: DtypePlan) -> Found:
    """Refuses a GPU that cannot multiply the weights as they are stored, which is what the method is for. On a CPU, and
    in another compute dtype, they are dequantized for each product: correct, but slow.
    """
    path, quantization = "quantization.method", context.recipe.quantization
    products = quantizations.row(quantization.method).products
    if products is None:
        return
    needed = code_of(products.capability)
    dequantized = why_dequantized(quantization, dtypes, device)
    if device.capability is not None and device.capability < needed:
        found = capability_text(device.capability)
        missing = f"it needs compute capability {capability_text(needed)}, {device.name} has {found}"
        others = " or ".join(name for name in quantizations.names() if quantizations.row(name).products is None)
        yield context.error("FT508", path, f"{path} {quantization.method}: {missing}", help=f"use {path}: {others}")
    elif dequantized is not None and not products.exact:
        message = (
            f"{path} {quantization.method}: {dequantized}; here the weights are dequantized to {dtypes.compute} first"
        )
        help = "use it here to try a recipe out; training without `quantization` is faster"
        yield context.warning("FT508", path, message, help=help)
    if products.tried is not None and not device.probed and device.kind == "cuda":
        tried = "they are tried on the machine itself, before a run begins"
        yield NotMade(f"products of {quantization.method} weights", tried)


def _processes(context: Context, device: DeviceFacts) -> Findings:
    """FT516 of `ftcli check` alone: what starts processes says it first, and torchrun may start them elsewhere."""
    asked, most = context.recipe.launch.num_processes, most_processes(device.multiprocessors)
    if context.command == "check" and device.probed and device.kind == "cpu" and asked > most:
        message = f"launch.num_processes {asked:,}: there is no GPU here, and {device.multiprocessors} CPU cores"
        help = "use at most as many processes as there are cores; or name the GPUs that are meant with --as"
        yield context.error("FT516", "launch.num_processes", message, help=help)


def _occupied(context: Context, device: DeviceFacts) -> Findings:
    free, total = device.free_bytes, device.memory_bytes
    if device.kind != "cuda" or free is None or total is None or free >= _BUSY_SHARE * total:
        return
    message = f"other processes hold {gib(total - free)} of {gib(total)} GiB on {device.name}"
    yield context.warning("FT504", "", message, help="nvidia-smi lists them")


_KEY = "launch.context_parallel_size"
_COPIES = "launch.dp_replicate_size"


def check_shared_rows(context: Context) -> Findings:
    """FT286 for ``launch.context_parallel_size``."""
    launch, train = context.recipe.launch, context.recipe.train
    parts, processes = launch.context_parallel_size, launch.num_processes
    if parts == 1 or context.work != "train":
        return
    if processes % parts:
        fitting = [str(n) for n in range(2, processes + 1) if processes % n == 0]
        message = f"{_KEY} {parts} does not divide launch.num_processes {processes}"
        help = f"use {_KEY}: {' or '.join(fitting)}" if fitting else f"start {parts} processes: --gpus {parts}"
        yield context.error("FT286", _KEY, message, help=help)
    if engines.row(launch.engine).processes == 1:
        message = f"{_KEY} {parts} is not supported with launch.engine: {launch.engine}"
        yield context.error("FT286", _KEY, message, help=f"use {' or '.join(engines.of_several())}")
    if train.neftune_noise_alpha is not None:
        message = f"train.neftune_noise_alpha needs whole rows, which {_KEY} {parts} splits"
        yield context.error("FT286", "train.neftune_noise_alpha", message, help="remove one of the two")


def check_model(context: Context, plan: RunPlan) -> Findings:
    """FT345: the model or what computes it does not allow it."""
    parts = plan.shares
    if parts == 1:
        return
    reason = why_rows_stay_whole(plan.facts, plan.execution, parts)
    if reason is not None:
        message = f"{_KEY} {parts}: this model does not support context parallelism: {reason}"
        help = f"remove {_KEY}; a longer row fits with train.gradient_checkpointing: offload"
        yield context.error("FT345", _KEY, message, help=help)


def check_copies(context: Context) -> Findings:
    """FT287 for ``launch.dp_replicate_size``."""
    launch = context.recipe.launch
    copies, processes = launch.copies, launch.num_processes
    if copies == 1 or context.work != "train":
        return
    if launch.engine != engines.AUTO and not engines.row(launch.engine).shards:
        message = f"{_COPIES} {copies}: under launch.engine: {launch.engine} every process has a copy of the model"
        help = f"use launch.engine: {engines.by_auto(shards=True)}, or remove {_COPIES}"
        yield context.error("FT287", _COPIES, message, help=help)
    fitting = [str(n) for n in range(2, processes // 2 + 1) if processes % n == 0]
    if str(copies) not in fitting:
        message = (
            f"{_COPIES} {copies} needs launch.num_processes divisible by {copies} and at least {2 * copies}; it is "
            f"{processes}"
        )
        help = f"use {_COPIES}: {' or '.join(fitting)}" if fitting else f"start at least {2 * copies} processes"
        yield context.error("FT287", _COPIES, message, help=help)
