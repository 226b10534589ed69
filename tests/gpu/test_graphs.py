"""Decoder layers as CUDA graphs: the bits of a run without them, for every policy, base and kind of mask.

Attention runs on ftcli's own kernels where the last bit is compared (a window, capped scores, or documents): cuDNN's
backward adds up the gradient of queries in no fixed order.
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
import transformers

from ftcli.config.model import QuantizationConfig
from ftcli.model.backbone import base_of, decoder_layers
from ftcli.model.cuda_graphs import GraphRunner
from ftcli.model.fused import DecoderStack, stack_of
from ftcli.model.gradient_checkpointing import use_checkpointing
from ftcli.model.loss import forward_loss
from ftcli.model.offload import HostEmbedding, use_host_embedding, why_not_on_host
from ftcli.model.patch import patch
from ftcli.model.quantized import quantize_linear
from ftcli.model.score_head import add_score_head
from ftcli.reporting import SilentReporter

pytestmark = pytest.mark.gpu

SIZES: dict[str, Any] = {
    "vocab_size": 8000,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
}
WINDOWED = {"mistral", "gemma2"}
CONFIGS = {
    "mistral": transformers.MistralConfig,
    "gemma2": transformers.Gemma2Config,
    "qwen3": transformers.Qwen3Config,
    "gemma3_text": transformers.Gemma3TextConfig,
    "qwen3_5_text": transformers.Qwen3_5TextConfig,
    "gemma4_text": transformers.Gemma4TextConfig,
    "youtu": transformers.YoutuConfig,
}
FURTHER: dict[str, dict[str, Any]] = {
    **{name: {"sliding_window": 128} for name in WINDOWED},
    "qwen3_5_text": {"linear_num_key_heads": 4, "linear_num_value_heads": 8, "full_attention_interval": 2},
    "gemma4_text": {
        "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 64,
        "vocab_size_per_layer_input": 8000,
    },
    "youtu": {
        "num_key_value_heads": 8,
        "head_dim": 32,
        "q_lora_rank": 256,
        "kv_lora_rank": 128,
        "qk_nope_head_dim": 96,
        "qk_rope_head_dim": 32,
        "v_head_dim": 96,
    },
}
RECIPES = Path(__file__).parents[2] / "recipes"
#: (rows, tokens) of micro-batches, two in each step; shapes come back after others.
SHAPES = [(1, 512), (2, 256), (1, 512), (1, 384), (2, 256), (1, 512)]


@pytest.fixture(autouse=True)
def clean_gpu() -> Iterator[None]:
    yield
    torch.cuda.empty_cache()


def adapted(name: str, base: str = "none", *, patched: bool = True, scores: bool = False) -> Any:
    """A model with trained adapters, on the kernels or on transformers' layers; ``scores``: with a score head."""
    config = CONFIGS[name](**{**SIZES, **FURTHER.get(name, {})})
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="eager")
    if base != "none":
        for layer in decoder_layers(model):
            for path, module in list(layer.named_modules()):
                if isinstance(module, torch.nn.Linear):
                    layer.set_submodule(path, quantize_linear(module, QuantizationConfig(method=base), path))
    linear: Any = [f"{part}_proj" for part in ("q", "k", "v", "o", "gate", "up", "down")]
    if name == "youtu":
        linear = "all-linear"
    if scores:
        add_score_head(model, seed=0)
    task = "SEQ_CLS" if scores else "CAUSAL_LM"
    model = peft.get_peft_model(model, peft.LoraConfig(r=16, target_modules=linear, task_type=task))
    generator = torch.Generator(device="cuda").manual_seed(1)
    for parameter_name, parameter in model.named_parameters():
        if "lora_" in parameter_name:
            parameter.data = parameter.data.float()
        if "lora_B" in parameter_name:
            parameter.data.normal_(std=0.05, generator=generator)
    if patched:
        patch(model, "auto")
    return model.train()


def set_policy(model: Any, policy: Any) -> None:
    if policy is True:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    else:
        use_checkpointing(model, policy, uncheckpointed_layers=1 if policy == "selective" else 0)
    if policy == "lean" and why_not_on_host(model) is None:
        use_host_embedding(model, SilentReporter())
        assert isinstance(base_of(model).get_input_embeddings(), HostEmbedding)


def graphed(model: Any, tokens: int = 1024, pool_bytes: int = 0) -> GraphRunner:
    stack = stack_of(model, torch.bfloat16)
    assert isinstance(stack, DecoderStack)
    reporter: Any = SimpleNamespace(info=print)
    stack.runner = GraphRunner(stack, tokens, reporter, pool_bytes=pool_bytes)
    return stack.runner


def train(model: Any, *, documents: bool, accumulated: int = 2) -> list[torch.Tensor]:
    """Losses and gradients of some steps of AdamW, and the weights after them."""
    torch.manual_seed(3)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3)
    stack, found = base_of(model).model.layers[0].stack, []
    for step, (rows, tokens) in enumerate(SHAPES):
        for _ in range(accumulated):
            ids = torch.randint(3, 8000, (rows, tokens), device="cuda")
            batch = {"input_ids": ids, "labels": ids.clone()}
            if documents:
                cuts = [0, 60 + step, 200, tokens]
                positions = torch.cat([torch.arange(b - a) for a, b in pairwise(cuts)])
                batch["position_ids"] = positions[None].expand(rows, -1).cuda()
            with torch.autocast("cuda", torch.bfloat16):
                loss = forward_loss(model, batch, num_items=accumulated * ids.numel(), stack=stack).loss
            loss.backward()
            found.append(loss.detach().clone())
        found += [p.grad.clone() for p in trained]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return [*found, *(p.detach().clone() for p in trained)]


@pytest.mark.parametrize("base", ["none", "nf4", "fp8"])
@pytest.mark.parametrize("policy", [False, "selective", True, "lean"])
@pytest.mark.parametrize(
    ("name", "documents"),
    [
        ("mistral", True),
        ("gemma2", False),
        ("qwen3", True),
        ("gemma3_text", True),
        ("qwen3_5_text", True),
        ("gemma4_text", True),
        ("youtu", True),
    ],
)
def test_the_bits_are_those_without_graphs(name: str, documents: bool, policy: Any, base: str) -> None:
    wanted = None
    for graphs in (False, True):
        model = adapted(name, base)
        set_policy(model, policy)
        runner = graphed(model) if graphs else None
        found = train(model, documents=documents)
        wanted = wanted or found
        assert len(found) == len(wanted) > 100
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
        if runner is not None:
            assert set(runner.status.shapes) == set(SHAPES)
            assert (runner.status.without, runner.status.replays) == (1, 2 * len(SHAPES) - 1)  # all but the first
        del model, runner
        torch.cuda.empty_cache()


def test_graphs_and_an_embedding_on_the_host_give_the_bits_of_neither() -> None:
    """``lean`` with graphs against ``false`` without them: what the first layer reads comes over the bus."""
    wanted = train(adapted("mistral", "nf4"), documents=True)
    model = adapted("mistral", "nf4")
    set_policy(model, "lean")
    graphed(model)
    found = train(model, documents=True)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_larger_micro_batches_run_without_graphs() -> None:
    """Rows of all lengths: what is above the limit runs as usual, in the same steps."""
    wanted = train(adapted("mistral"), documents=True)
    model = adapted("mistral")
    runner = graphed(model, tokens=400)
    found = train(model, documents=True)
    assert runner.status.shapes == [(1, 384)]
    assert runner.status.replays == 1
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_single_micro_batches_and_a_saved_module() -> None:
    """Without accumulation a weight's gradient is the graph's own tensor; a norm is trained besides the adapters."""
    wanted = None
    for graphs in (False, True):
        model = adapted("mistral")
        for layer in decoder_layers(base_of(model)):
            layer.input_layernorm.weight.requires_grad_(True)
        if graphs:
            graphed(model)
        found = train(model, documents=False, accumulated=1)
        wanted = wanted or found
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_graphs_share_their_memory_and_it_is_counted() -> None:
    model = adapted("mistral")
    runner = graphed(model)
    train(model, documents=True)
    first = runner.status.pool_bytes
    assert first > 0
    assert 0 <= runner.status.pool_counted_bytes < first
    assert runner.status.peak_bytes >= torch.cuda.memory_allocated() + first - runner.status.pool_counted_bytes
    train(model, documents=True)  # every shape is there: nothing is captured, nothing grows
    assert runner.status.pool_bytes == first
    assert len(runner.status.shapes) == len(set(SHAPES))


def test_many_shapes_need_the_memory_of_the_largest() -> None:
    """Shapes come in any order, mostly a larger one after a smaller. All are wide enough for no tensor of a layer to be
    among those below 1 MiB, which the allocator keeps apart.
    """

    def pool(widths: list[int], expected: int) -> int:
        model = adapted("mistral")
        runner = graphed(model, max(widths), expected)
        for width in [width for width in widths for _ in range(2)]:
            ids = torch.randint(3, 8000, (1, width), device="cuda")
            with torch.autocast("cuda", torch.bfloat16):
                batch = {"input_ids": ids, "labels": ids.clone()}
                forward_loss(model, batch, num_items=width, stack=base_of(model).model.layers[0].stack).loss.backward()
        assert runner.status.shapes == [(1, width) for width in widths]
        return runner.status.pool_bytes

    widths = [128 * n for n in (21, 19, 24, 23, 26, 20, 28, 25, 29, 22, 30, 27, 32, 31)]
    largest = pool([max(widths)], 0)
    assert pool(widths, largest) <= 1.15 * largest + 2**25
    assert pool(widths, 0) > 1.5 * largest  # what this is about


def test_where_memory_runs_out_training_goes_on_without(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = train(adapted("mistral"), documents=True)
    model = adapted("mistral")
    runner = graphed(model)

    def capture(call: Any, pool: Any) -> Any:
        raise torch.OutOfMemoryError("no")

    monkeypatch.setattr(runner, "_capture", capture)
    found = train(model, documents=True)
    assert runner.status.stopped is not None
    assert runner.status.replays == 0
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def leave(room: int) -> None:
    """This process may have so many bytes of the GPU from now on."""
    torch.cuda.set_per_process_memory_fraction(room / torch.cuda.get_device_properties(0).total_memory)


def filled_gaps() -> list[torch.Tensor]:
    """Tensors in all the room that is free between those of tests before, down to pieces of 1 MiB."""
    leave(torch.cuda.memory_reserved())
    found, size = [], 2**30
    while size >= 2**20:
        try:
            found.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
        except torch.OutOfMemoryError:
            size //= 2
    return found


@pytest.mark.parametrize("expected", [0, 2**42])
def test_where_memory_really_runs_out(expected: int) -> None:
    """In the middle of a capture, with work on two streams; and where the pool is taken."""
    model = adapted("mistral")
    runner = graphed(model, pool_bytes=expected)
    ids = torch.randint(3, 8000, (1, 1024), device="cuda")

    def gradients() -> list[torch.Tensor]:
        model.zero_grad(set_to_none=True)
        batch = {"input_ids": ids, "labels": ids.clone()}
        with torch.autocast("cuda", torch.bfloat16):
            forward_loss(model, batch, num_items=1024, stack=base_of(model).model.layers[0].stack).loss.backward()
        return [p.grad.clone() for p in model.parameters() if p.requires_grad]

    wanted = gradients()
    gc.collect()  # what earlier tests left would be counted as in use, and given back later
    torch.cuda.empty_cache()
    gaps = filled_gaps()
    # Room for the buffers and for some layers of a capture. What runs as usual after it has no more.
    leave(torch.cuda.memory_reserved() + 48 * 2**20)
    try:
        with pytest.raises(torch.OutOfMemoryError):
            gradients()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        del gaps
    assert runner.status.stopped == "no memory was left for another CUDA graph"
    assert all(torch.equal(a, b) for a, b in zip(gradients(), wanted, strict=True))


def test_weights_that_have_moved_are_not_trained_in_silence() -> None:
    model = adapted("mistral")
    runner = graphed(model)
    train(model, documents=True)
    weight = next(p for p in model.parameters() if p.requires_grad)
    weight.data = weight.data.clone()
    with pytest.raises(RuntimeError, match="moved"):
        train(model, documents=True)
    assert runner.status.stopped is None


def test_a_run_that_goes_on_from_a_checkpoint_ends_with_the_same_bits(tmp_path: Path) -> None:
    """Through the command. Documents are packed, so that attention is ftcli's own."""

    def run(name: str, *options: str, graphs: str = "on") -> Path:
        out = tmp_path / name
        command = [sys.executable, "-m", "ftcli", "train", "smoke.yaml", "--output-dir", str(out), "--max-steps", "12"]
        settings = ["data.packing=true", "checkpoint.every_steps=6", "eval.every_steps=null", "model.dtype=bfloat16"]
        sets = [part for setting in settings for part in ("--set", setting)]
        subprocess.run([*command, *sets, *options], check=True, cwd=RECIPES, timeout=300)
        assert json.loads((out / "manifest.json").read_text())["cuda_graphs"] == graphs
        return out

    whole = run("whole")
    resumed = run("resumed", "--resume", str(whole / "checkpoints" / "step-00000006"))
    without = run("without", "--set", "train.cuda_graphs=false", graphs="train.cuda_graphs: false")
    weights = [(out / "adapter" / "adapter_model.safetensors").read_bytes() for out in (whole, resumed, without)]
    assert weights[0] == weights[1] == weights[2]
