"""Times the generation engine: decoding by batch, with the first tokens of a new shape.

    python kernels/bench/generation.py --batches 8 32 64 --cases merged unmerged nf4
    python kernels/bench/generation.py --device cpu                 # does it run at all

Weights are random: a step takes the same time whatever it says. Each case is a model of Llama-3.1-8B's shape, or of the
one that ``--model`` names, with an adapter of rank 16 on all linear layers: merged into a copy, unmerged in the graph,
or on an NF4 base (merged into a dequantized copy; ``nf4-unmerged`` without one). ``first`` is seconds to the first
token of every sequence, with all that is set up once; tokens/s count prompts' prefill as time, and ``decoding`` leaves
it out.

``--agree ROWS`` takes so many greedy completions through the model in one pass, as training does: ``agree`` is the
share of tokens that are its likeliest ones as well, ``nats`` the mean difference of their log-probabilities, and
``behind`` how much less likely than the likeliest a token is at most. Random weights have near ties, so a few tokens
differ. ``shaken`` are the first two of that pass against itself with embeddings off by a last place: what rounding
alone does to such weights, which is much where few experts share a token; ``held`` the same with its routing held.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
from common import GIB, Table, parser
from ftkernels.sampling import GREEDY, Sampling, row_seed
from timing import start

from ftcli.assets import asset
from ftcli.config.model import LoraConfig as AdapterConfig
from ftcli.config.model import QuantizationConfig
from ftcli.facts.generation import cache_bytes
from ftcli.generation.decoding import cache_dtype, kept_shape
from ftcli.generation.engine import Engine
from ftcli.generation.generator import open_generator
from ftcli.generation.requests import GenerationRequest
from ftcli.model.backbone import base_of, compute_context, hidden_states
from ftcli.model.fp8 import fp8_linear
from ftcli.model.lora import apply_lora
from ftcli.model.nf4 import nf4_linear
from ftcli.model.patch import patch
from ftcli.model.routing import same_routing
from ftcli.model.selfcheck import rounded_otherwise
from ftcli.plan.precision import DtypePlan

CASES = ("merged", "unmerged", "base", "nf4", "nf4-unmerged", "fp8")


#: Models by the folder of their bundled config.json.
MODELS = {
    "llama3.1-8b": "meta-llama--Llama-3.1-8B", "qwen3-30b-a3b": "Qwen--Qwen3-30B-A3B",
    "gpt-oss-20b": "openai--gpt-oss-20b", "glm-4.7-flash": "zai-org--GLM-4.7-Flash",
    "qwen3.5-9b": "Qwen--Qwen3.5-9B", "qwen3.5-27b": "Qwen--Qwen3.5-27B",
}  # fmt: skip
#: What is small on a CPU, of the keys that a config has.
FEW = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_experts": 8, "num_local_experts": 8,
    "num_experts_per_tok": 2, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 12, "qk_rope_head_dim": 4,
    "v_head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16, "pad_token_id": 0, "eos_token_id": 1,
}  # fmt: skip


def config_of(name: str, *, tiny: bool) -> Any:
    """The config of a model's text, as it ships with ftcli; of four layers in a tiny one."""
    from transformers import AutoConfig

    whole = AutoConfig.from_pretrained(asset("configs", MODELS[name]))
    config = getattr(whole, "text_config", whole)
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # weights are drawn
    if not tiny:
        return config
    for key, value in FEW.items():
        if hasattr(config, key):
            setattr(config, key, value)
    for layers in ("layer_types", "mlp_layer_types"):
        if getattr(config, layers, None):
            setattr(config, layers, getattr(config, layers)[:4])
    config.num_hidden_layers = 4
    if hasattr(config, "kv_lora_rank"):
        config.num_key_value_heads = config.num_attention_heads
    return config


def model_of(config: Any, case: str, device: torch.device, dtype: torch.dtype) -> Any:
    """Random weights, quantized and adapted as the case says, on the kernels."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    with device:
        attention = "eager" if config.model_type == "gpt_oss" else "sdpa"  # sinks are beyond SDPA
        model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
    model.eval().requires_grad_(False)
    if case.startswith("nf4") or case == "fp8":
        make, method = (fp8_linear, "fp8") if case == "fp8" else (nf4_linear, "nf4")
        for name, module in list(model.model.layers.named_modules()):
            if isinstance(module, torch.nn.Linear):
                quantization = QuantizationConfig(method=method)  # type: ignore[arg-type]
                model.model.layers.set_submodule(name, make(module, quantization, name))
    if case != "base" and hasattr(config, "num_experts_per_tok"):
        plan = DtypePlan(str(dtype).removeprefix("torch."), "float32", "float32", autocast=False, reason="a bench")
        model, _ = apply_lora(model, AdapterConfig(r=16, alpha=16), plan, seed=0)
    elif case != "base":
        model = get_peft_model(model, LoraConfig(r=16, lora_alpha=16, target_modules="all-linear"))
    if case != "base":
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.data = torch.randn(parameter.shape, device=device) * 0.01
    patch(model, "auto" if device.type == "cuda" else "reference")
    return model


def timed(engine: Engine, requests: list[GenerationRequest], sampling: Sampling) -> tuple[float, float]:
    """Seconds from the first token to the last, and of all of it."""
    began = time.perf_counter()
    first = last = 0.0
    for _ in engine.run(requests, sampling):
        last = time.perf_counter()
        first = first or last
    return last - first, last - began


def agreement(model: Any, engine: Engine, requests: list[GenerationRequest], plan: DtypePlan) -> dict[str, Any]:
    """What one pass over the prompts and their greedy completions says of these; see the module."""
    same, nats, behind, shaken, held = [], [], [], [], []
    for request, (one,) in zip(requests, engine.complete(requests), strict=True):
        device, chosen = next(model.parameters()).device, torch.tensor(one.tokens)
        ids = torch.tensor([[*request.prompt, *one.tokens]], device=device)
        given = {"input_ids": ids, "document_starts": torch.zeros_like(ids, dtype=torch.int32)}
        answer = slice(len(request.prompt) - 1, -1)
        with torch.no_grad(), compute_context(device, plan.compute, plan.autocast):
            with same_routing(model):
                said = said_of(model, given, answer)
                with rounded_otherwise(model, getattr(torch, plan.compute)):
                    held.append(moved(said, said_of(model, given, answer)))
            with rounded_otherwise(model, getattr(torch, plan.compute)):
                shaken.append(moved(said, said_of(model, given, answer)))
        own = said.gather(1, chosen[:, None])[:, 0]
        same.append((said.argmax(1) == chosen).double().mean())
        nats.append((own - torch.tensor(one.logprobs)).abs().double().mean())
        behind.append((said.amax(1) - own).max())
    return {
        "agree": float(torch.stack(same).mean()),
        "nats": float(torch.stack(nats).mean()),
        "behind": float(torch.stack(behind).max()),
        "shaken": mean_of(shaken),
        "held": mean_of(held),
    }


def said_of(model: Any, given: dict[str, Any], answer: slice) -> torch.Tensor:
    """Log-probabilities (tokens, V) that one pass gives the answer."""
    states = hidden_states(model, given).tensor[0, answer]
    return torch.log_softmax(base_of(model).get_output_embeddings()(states).float(), -1).cpu()


def moved(said: torch.Tensor, again: torch.Tensor) -> tuple[float, float]:
    """The share of likeliest tokens that stay so, and by how many nats they move on average."""
    likeliest = said.argmax(1)
    by = (again - said).gather(1, likeliest[:, None]).abs().double().mean()
    return float((again.argmax(1) == likeliest).double().mean()), float(by)


def mean_of(pairs: list[tuple[float, float]]) -> str:
    """Means of both, as text."""
    share, nats = (sum(column) / len(pairs) for column in zip(*pairs, strict=True))
    return f"{share:.4f}, {nats:.2e}"


def measure(model: Any, case: str, batch: int, options: argparse.Namespace, plan: DtypePlan) -> dict[str, Any]:
    """The row of one case at one batch."""
    generator, device, new = torch.Generator().manual_seed(0), torch.device(options.device), options.new
    prompts = torch.randint(5, model.config.vocab_size, (batch, options.prompt), generator=generator).tolist()
    requests = [GenerationRequest(tuple(prompt), new, (row_seed(row),)) for row, prompt in enumerate(prompts)]
    longest, room = options.prompt + new, None
    if case.endswith("unmerged"):  # room for the cache alone, so that nothing is merged
        room = cache_bytes(kept_shape(model, cache_dtype(model, plan)), batch, longest)
    began = time.perf_counter()
    opened = open_generator(
        model, plan, device, rows=batch, longest=longest, pad=0, own_settings=False, room_bytes=room
    )
    engine = opened.generator
    assert isinstance(engine, Engine), opened.reason
    for token in engine.run(requests, GREEDY):
        if token.completion == 0 and token.request == batch - 1:
            break
    first = time.perf_counter() - began
    for sampling in (GREEDY, Sampling(1.0)):  # both are compiled before they are timed
        timed(engine, requests, sampling)
    decode, whole = timed(engine, requests, GREEDY)
    sampled, _ = timed(engine, requests, Sampling(1.0))
    steps = new - 1
    agreed = agreement(model, engine, requests[: options.agree], plan) if options.agree else {}
    return {
        **agreed,
        "case": case, "batch": batch, "first s": first, "tokens/s": batch * new / whole,
        "decoding": batch * steps / decode, "step ms": 1e3 * decode / steps, "sampled": 1e3 * sampled / steps,
        "peak GiB": torch.cuda.max_memory_allocated() / GIB if device.type == "cuda" else None,
        "merged": engine.layout.merged, "graphs": str(engine.stepper.status.sizes),
    }  # fmt: skip


def main() -> None:
    """A row a case and batch."""
    arguments = parser(__doc__)
    arguments.add_argument("--model", default="llama3.1-8b", choices=list(MODELS))
    arguments.add_argument("--cases", nargs="+", default=["merged"], choices=CASES)
    arguments.add_argument("--batches", type=int, nargs="+", default=[8, 32, 64])
    arguments.add_argument("--prompt", type=int, default=512)
    arguments.add_argument("--new", type=int, default=128)
    arguments.add_argument("--agree", type=int, default=0, metavar="ROWS")
    options = arguments.parse_args()
    device = start(options)
    on_gpu = device.type == "cuda"
    config = config_of(options.model, tiny=not on_gpu)
    if not on_gpu:
        options.prompt, options.new, options.batches = 16, 8, [2]
    compute = "bfloat16" if on_gpu else "float32"
    plan = DtypePlan(compute, "float32", compute, on_gpu, "a benchmark")
    rates = {"first s": ".2f", "tokens/s": ",.0f", "decoding": ",.0f", "step ms": ".2f", "sampled": ".2f"}
    agreed = {"agree": ".4f", "nats": ".2e", "behind": ".2e", "shaken": "", "held": ""} if options.agree else {}
    table = Table({"case": "", "batch": "", **rates, **agreed, "peak GiB": ".2f", "merged": "", "graphs": ""})
    for case in options.cases:
        model = model_of(config, case, device, getattr(torch, compute))
        for batch in options.batches:
            table.add(**measure(model, case, batch, options, plan))
            table.save(options.json)
            if on_gpu:
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
        del model


if __name__ == "__main__":
    main()
