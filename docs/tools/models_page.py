"""Writes docs/models.md from the family tables and from what came of small random models.

``python docs/tools/models_page.py`` writes the page anew with the outcomes that it states; ``PYTHONPATH=docs/tools
python -m tests.family_outcomes`` finds all of them out again first. ``make test-families`` compares.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from pathlib import Path

from ftcli.tables.families import MULTIMODAL, family_of

PAGE = Path("docs/models.md")

#: Families by how much they are trained (releases, notebooks, mentions in peers' changes of 2026); all others follow.
RANK = (
    "qwen3_5",
    "gemma4",
    "gemma4_unified",
    "qwen3",
    "qwen3_5_moe",
    "gpt_oss",
    "llama",
    "qwen3_moe",
    "gemma3",
    "gemma3_text",
    "qwen3_vl",
    "qwen3_vl_moe",
    "qwen2_5_vl",
    "qwen2_vl",
    "ministral3",
    "mistral3",
    "qwen2",
    "glm4_moe_lite",
    "glm4_moe",
    "phi3",
    "nemotron_h",
    "muse_glimmer",
    "lfm2",
    "lfm3",
    "mistral",
    "granite",
    "granite_swa",
    "olmo3",
    "smollm3",
)

_HEAD = """# Supported models

ftcli tries every causal language model that transformers builds, and refuses by name what it does not do with a family.
These families are tested (`make test-families`), each as a small random model; those that behave alike share a row.

- **Kernels**: `layers` are computed by ftcli's kernels on a CUDA GPU; `none` trains on transformers' own layers, in
  about 1.5 times the time, and generates through transformers.
- **LoRA** on all linear layers, **QLoRA** on an NF4 base, **full** fine-tuning, **export** of a merged model
  (as GGUF: [families](export.md#gguf)), and **packing** (`data.packing`) each say `yes`, or the [code](errors.md) of
  what refuses it. FT443: a document would see the one before it. Off the kernels (`model.kernels: off`, no GPU) Qwen3.5
  and gpt-oss are refused, too.
- `all-linear` includes every expert, in PEFT's layout; `lora.experts: false` leaves them out. Full fine-tuning trains
  experts and routers, and adds the routers' auxiliary loss as transformers does: with config.json's
  `output_router_logits: true`, or `train.router_aux_loss_coef` (FT318 and FT355 say where it is not added). On a
  quantized base the dense layers beside the experts of Qwen3-Next, GLM-4-MoE, GLM-4.7-Flash, DeepSeek and ERNIE-4.5
  have no adapter; a run says so.
- Latent attention: GLM-4.7-Flash, DeepSeek-V2, Youtu, Moonlight and Kanana-2 (`deepseek_v3`).
- Multimodal checkpoints are trained on text; those of [vision.md](vision.md#models) on images, too. Their other parts
  are frozen, never quantized, and exported as they were.
- Gemma-4 is E2B, E4B, 12B (`gemma4_unified`), 31B and 26B-A4B. The table of layers' own inputs (E2B, E4B) lies in host
  memory under `lean`; `fsdp` gathers it whole.

gpt-oss is read as it is released, experts in MXFP4 ([quantization.md](quantization.md#nf4)), and so are
[fp8 files](quantization.md#released-in-fp8) of any family. Also refused: other packed weights (FT316), other multimodal
checkpoints and encoder-decoders (FT309), dropout on experts (FT333), unknown scaling of the logits (FT335).

| model_type | kernels | LoRA | QLoRA | full | export | packing | trained |
|---|---|---|---|---|---|---|---|
"""


@dataclass(frozen=True, slots=True)
class Outcome:
    """``yes``, or the code of the refusal, for each thing that is done with a family."""

    lora: str
    qlora: str
    full: str
    export: str
    packing: str


def page(outcomes: Mapping[str, Outcome]) -> str:
    """The page's text, of outcomes by ``model_type``."""
    order = [name for name in RANK if name in outcomes] + [name for name in outcomes if name not in RANK]
    alike: dict[tuple[str, ...], list[str]] = {}
    for name in order:
        row = MULTIMODAL.get(name)
        family = family_of(name if row is None else row.text)
        kernels = family.kernels if family is not None else "none"
        trained = "whole" if row is None else f"on text; {row.senses} kept"
        alike.setdefault((kernels, *astuple(outcomes[name]), trained), []).append(f"`{name}`")
    return _HEAD + "".join(f"| {' | '.join((', '.join(names), *cells))} |\n" for cells, names in alike.items())


def stated(text: str) -> dict[str, Outcome]:
    """What a page says, by ``model_type``."""
    lines = (line.split("|") for line in text.splitlines() if line.startswith("| `"))
    return {
        name: Outcome(*(cell.strip() for cell in cells[3:8]))
        for cells in lines
        for name in re.findall(r"`(\w+)`", cells[1])
    }


def main() -> None:
    """Writes docs/models.md anew with the outcomes that it states."""
    PAGE.write_text(page(stated(PAGE.read_text(encoding="utf-8"))), encoding="utf-8")


if __name__ == "__main__":
    main()
