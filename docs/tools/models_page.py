"""Writes docs/models.md from the family tables and the small models of the tests: ``python docs/tools/models_page.py``.

What the page says of a family is what ``tests/unit/model/test_models_page.py`` finds out on a small random model of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ftcli.tables.families import MULTIMODAL, family_of

_HEAD = """# Supported models

Every model that transformers builds for text generation can be tried: what a family needs that ftcli does not do is
refused by name, before anything is trained. The families below are trained, evaluated, sampled and exported in the
tests, each on a small random model: the loss is the model's own, every adapter gets a gradient, what is saved is what
was trained, and a merged export answers as base and adapter did.

- **Kernels**: `layers` are computed by ftcli's kernels on a CUDA GPU; `parts` has norms and attention on them; `none`
  trains on transformers' own layers.
- **Packing** (`data.packing`): `no` where a document would see the one before it; that is FT443, found by trial.
- `all-linear` is every linear layer of the decoder's layers, experts included. Experts are adapted as PEFT does it: the
  adapter is added to the weights in their own dtype. So are the dense layers beside them in Qwen3-Next, GLM-4-MoE and
  DeepSeek-V3, whose names PEFT 0.21 takes for those of experts; on a quantised base those have no adapter, which
  a run and `ftcli check` say.
- Multimodal checkpoints are trained on text. Their other parts are frozen and exported as they were.

Refused by name: other multimodal checkpoints (FT309), encoder-decoders (FT309), checkpoints stored in other packed
formats than NF4 (FT316), dropout on experts (FT333), heads that the loss cannot stand for (FT335).

| model_type | kernels | packing | trained |
|---|---|---|---|
"""


def page(packs: Mapping[str, bool]) -> str:
    """The page's text.

    Args:
        packs: By ``model_type``, whether packed documents stay apart.
    """
    rows = []
    for name, apart in packs.items():
        row = MULTIMODAL.get(name)
        family = family_of(name if row is None else row.text)
        kernels = family.kernels if family is not None else "none"
        trained = "whole" if row is None else f"on text; {row.senses} kept"
        rows.append(f"| `{name}` | {kernels} | {'yes' if apart else 'no'} | {trained} |")
    return _HEAD + "\n".join(rows) + "\n"


def stated(text: str) -> dict[str, bool]:
    """What a page says of packing, by ``model_type``."""
    cells = (line.split("|") for line in text.splitlines() if line.startswith("| `"))
    return {row[1].strip(" `"): row[3].strip() == "yes" for row in cells}


def main() -> None:
    """Writes docs/models.md anew with what it says of packing."""
    path = Path("docs/models.md")
    path.write_text(page(stated(path.read_text(encoding="utf-8"))), encoding="utf-8")


if __name__ == "__main__":
    main()
