"""The memory estimate against what a GPU really allocates: plain transformers and PEFT, real widths, fewer layers."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ftcli.config.load import load_recipe
from ftcli.config.model import LoraConfig
from ftcli.facts.config_file import ConfigSource, bundled_configs
from ftcli.facts.device import GPUS
from ftcli.facts.model import facts_of
from ftcli.model.gradient_checkpointing import use_checkpointing
from ftcli.model.lora import apply_lora
from ftcli.plan.memory.checkpointing import Offloaded
from ftcli.plan.memory.estimate import MemoryEstimate
from ftcli.plan.precision import DtypePlan
from ftcli.tables.policies import PolicyName
from tests.estimates import estimate_of, plan_of

pytestmark = [pytest.mark.gpu, pytest.mark.whole_card]

GIB = 2**30
#: Estimates may be this much too high or too low; too low is worse, so it is the narrower side.
TOO_HIGH, TOO_LOW = 1.10, 0.97


@dataclass(frozen=True)
class Case:
    model: str
    layers: int
    lora: bool
    rows: int
    seq_len: int
    checkpointing: PolicyName
    kernels: str = "off"
    offloaded: Offloaded = "halves"

    def __str__(self) -> str:
        kind = "lora" if self.lora else "full"
        checkpointing = {True: "ckpt", False: "none"}.get(self.checkpointing, str(self.checkpointing))
        checkpointing += "-layers" if self.offloaded == "layers" else ""
        return f"{self.model.split('/')[1]}-{kind}-{self.rows}x{self.seq_len}-{checkpointing}-{self.kernels}"


CASES = [
    Case("meta-llama/Llama-3.1-8B", 6, True, 2, 4096, False),
    Case("meta-llama/Llama-3.1-8B", 12, True, 2, 4096, True),
    Case("meta-llama/Llama-3.1-8B", 4, True, 1, 8192, False),
    Case("meta-llama/Llama-3.1-8B", 3, False, 1, 4096, False),
    Case("meta-llama/Llama-3.1-8B", 6, False, 2, 2048, True),
    Case("google/gemma-2-9b", 6, True, 2, 2048, False),
    Case("google/gemma-2-9b", 12, True, 2, 2048, True),
    Case("google/gemma-2-9b", 4, True, 1, 4096, True),
    Case("Qwen/Qwen3-8B", 6, True, 2, 2048, False),
    Case("meta-llama/Llama-3.1-8B", 8, True, 2, 4096, False, "auto"),
    Case("meta-llama/Llama-3.1-8B", 12, True, 2, 4096, True, "auto"),
    Case("meta-llama/Llama-3.1-8B", 12, True, 2, 4096, "selective", "auto"),
    Case("meta-llama/Llama-3.1-8B", 12, True, 2, 4096, "offload", "auto"),
    Case("meta-llama/Llama-3.1-8B", 12, True, 2, 4096, "offload", "auto", "layers"),
    Case("google/gemma-2-9b", 12, True, 2, 4096, "offload", "auto", "layers"),
    Case("google/gemma-2-9b", 8, True, 2, 4096, False, "auto"),
    Case("google/gemma-2-9b", 12, True, 2, 4096, True, "auto"),
    Case("google/gemma-2-9b", 12, True, 2, 4096, "offload", "auto"),
    Case("meta-llama/Llama-3.1-8B", 12, True, 2, 4096, "offload"),
    Case("Qwen/Qwen3-8B", 8, True, 2, 2048, False, "auto"),
    Case("mistralai/Mistral-7B-v0.1", 8, True, 1, 8192, False, "auto"),
    Case("Qwen/Qwen3.5-9B", 8, True, 2, 4096, False, "auto"),
    Case("Qwen/Qwen3.5-9B", 8, True, 2, 4096, "selective", "auto"),
    Case("Qwen/Qwen3.5-9B", 8, True, 2, 4096, True, "auto"),
    Case("Qwen/Qwen3.5-9B", 8, True, 2, 4096, "offload", "auto"),
    *(Case("Qwen/Qwen3-30B-A3B", 6, True, 2, 4096, policy, "auto") for policy in (False, "selective", True)),
]


def prepared(case: Case, folder: Path) -> tuple[dict[str, Any], MemoryEstimate, DtypePlan, str]:
    """Config values with fewer layers, the estimate, the plan and the attention backend."""
    path = folder / "recipe.yaml"
    path.write_text(
        f"version: 1\nmodel: {{name_or_path: {case.model}, kernels: {case.kernels}}}\n"
        + ("lora: {r: 16}\n" if case.lora else "")
        + f"data: {{train: [a.jsonl], eval: [b.jsonl], max_seq_len: {case.seq_len}}}\n"
        + f"train: {{per_device_train_batch_size: {case.rows}, gradient_accumulation_steps: 2, "
        # The layers run one by one here; what graphs keep to themselves is counted in tests/gpu/test_graphs.py.
        + f"gradient_checkpointing: {str(case.checkpointing).lower()}, cuda_graphs: false}}\n"
        + f"eval: {{per_device_eval_batch_size: {case.rows}}}\n",
        encoding="utf-8",
    )
    loaded = load_recipe(path)
    config_folder, _ = bundled_configs()[case.model]

    raw = json.loads((config_folder / "config.json").read_text())
    raw = {**raw.get("text_config", raw), "num_hidden_layers": case.layers}
    if "layer_types" in raw:
        raw["layer_types"] = raw["layer_types"][: case.layers]
    facts = facts_of(ConfigSource("bundled config", config_folder, raw), loaded.recipe.model, loaded.origins)
    gpu = GPUS["h100"] if case.offloaded == "halves" else replace(GPUS["h100"], host_free_bytes=0)
    plan = plan_of(loaded.recipe, facts, gpu)
    plain = plan.changed({"model.kernels": "off"}).execution.attention
    return raw, estimate_of(loaded.recipe, facts, gpu), plan.dtypes, plain


def build(raw: dict[str, Any], plan: DtypePlan, attention: str, case: Case) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    values = {key: value for key, value in raw.items() if key not in ("model_type", "dtype", "architectures")}
    config = AutoConfig.for_model(raw["model_type"], **values)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(
            config, dtype=getattr(torch, plan.parameter), attn_implementation=attention
        )
    if case.lora:
        model, _ = apply_lora(model, LoraConfig(r=16), plan, seed=0)
    if case.checkpointing is True:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if case.lora:
            model.enable_input_require_grads()
    model.train()
    if case.kernels != "off":
        from ftcli.model.patch import patch

        assert not patch(model, "auto").off
    use_checkpointing(model, case.checkpointing, offloaded=case.offloaded)
    return model


@pytest.fixture
def held_before() -> Iterator[int]:
    """Bytes that tests before this one have left allocated in this process: 2 GiB were seen."""
    gc.collect()
    torch.cuda.empty_cache()
    yield torch.cuda.memory_allocated()
    gc.collect()
    torch.cuda.empty_cache()


def measured(model: Any, case: Case) -> dict[str, int]:
    """Peak allocated bytes of each phase of a second step, when the optimizer's state exists."""
    from ftcli.model.loss import forward_loss

    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-5)
    ids = torch.randint(3, 1000, (case.rows, case.seq_len), device="cuda")
    mask = torch.ones_like(ids)
    if case.rows > 1:
        mask[0, -7:] = 0
    batch = {"input_ids": ids, "attention_mask": mask, "labels": ids.clone()}

    peaks: dict[str, int] = {}

    def phase(name: str, work: Callable[[], Any]) -> Any:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        result = work()
        torch.cuda.synchronize()
        peaks[name] = torch.cuda.max_memory_allocated()
        return result

    def forward() -> Any:
        with torch.autocast("cuda", torch.bfloat16):
            return forward_loss(model, batch, num_items=ids.numel()).loss

    for _ in range(2):  # gradients of the first micro-batch are there in the second, as under accumulation
        loss = phase("forward", forward)
        phase("backward", loss.backward)
        del loss
        phase("optimizer step", optimizer.step)
    optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        phase("evaluation", forward)
    return peaks


@pytest.mark.parametrize("case", CASES, ids=str)
def test_each_phase_is_estimated_within_the_stated_margin(
    case: Case, tmp_path: Path, held_before: int, record_property: Callable[[str, object], None]
) -> None:
    torch.manual_seed(0)
    raw, estimate, plan, attention = prepared(case, tmp_path)
    peaks = {name: peak - held_before for name, peak in measured(build(raw, plan, attention, case), case).items()}
    lines = []
    for name, peak in peaks.items():
        predicted = estimate.phase_bytes(name) - estimate.parts["runtime"]
        lines.append(f"{name}: predicted {predicted / GIB:.2f} measured {peak / GIB:.2f} = {predicted / peak:.2f}")
    record_property(str(case), "; ".join(lines))
    largest = max(peaks, key=lambda name: peaks[name])
    ratio = (estimate.phase_bytes(largest) - estimate.parts["runtime"]) / peaks[largest]
    assert TOO_LOW <= ratio <= TOO_HIGH, lines
