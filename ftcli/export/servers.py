"""Whether vLLM and llama.cpp take an adapter, judged by its tensors' names and its config, without running them.

vLLM's rules are those of ``PEFTHelper`` and ``parse_fine_tuned_lora_name`` in its ``vllm/lora``, llama.cpp's those of
``convert_lora_to_gguf.py``; both read in 2026. What they ignore silently is the worst: another scale.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from ftcli.errors import Finding
from ftcli.plain import JsonMap

_PAIR = re.compile(r"base_model\.model\.(.+)\.lora_[AB]\.weight")
#: What vLLM's ``--max-lora-rank`` may be, and what it is where nobody says.
_VLLM_RANKS, _VLLM_RANK = (8, 16, 32, 64, 128, 256, 320, 512), 16


@dataclass(frozen=True, slots=True)
class Server:
    """What a program makes of an adapter.

    Attributes:
        name: The program's.
        problems: Why it refuses the adapter, or computes something else.
        options: What it has to be told.
    """

    name: str
    problems: tuple[str, ...]
    options: str = ""

    @property
    def said(self) -> str:
        """For the record: what the rules say, and that they were not tried."""
        told = f"does not take it: {'; '.join(self.problems)}" if self.problems else "takes it"
        return f"{told}{f' with {self.options}' if self.options else ''} (by names and config; not run)"

    @property
    def warning(self) -> tuple[Finding, ...]:
        """FT757 where the adapter is not what it takes."""
        if not self.problems:
            return ()
        message = f"{self.name} does not take this adapter as it is: {'; '.join(self.problems)}"
        return (Finding("FT757", message, help="serve the merged model instead", severity="warning"),)


def vllm(config: JsonMap, names: Iterable[str]) -> Server:
    """vLLM's ``--lora-modules``."""
    problems = _beside_pairs(config, names)
    if config.get("rank_pattern") or config.get("alpha_pattern"):
        problems.append("it has one scale for all layers, and alpha_pattern or rank_pattern say several")
    rank = max((int(config["r"]), *(config.get("rank_pattern") or {}).values()))
    allowed = next((size for size in _VLLM_RANKS if size >= rank), None)
    if allowed is None:
        problems.append(f"its ranks end at {_VLLM_RANKS[-1]}, and this is {rank}")
        return Server("vLLM", tuple(problems))
    return Server("vLLM", tuple(problems), f"--max-lora-rank {allowed}" if allowed > _VLLM_RANK else "")


def llama_cpp_server(config: JsonMap, names: Iterable[str]) -> Server:
    """llama.cpp's ``convert_lora_to_gguf.py``; ftcli's own file (``export.gguf.lora_adapter``) has the right scales."""
    problems = _beside_pairs(config, names)
    if config.get("use_rslora") or config.get("alpha_pattern"):
        problems.append("its converter knows one scale, alpha / rank (export.gguf.lora_adapter writes the right one)")
    return Server("llama.cpp", tuple(problems))


def _beside_pairs(config: JsonMap, names: Iterable[str]) -> list[str]:
    problems = ["it has DoRA's lengths"] if config.get("use_dora") else []
    other = [name for name in names if not _PAIR.fullmatch(name) and not name.endswith("lora_magnitude_vector")]
    if config.get("modules_to_save"):
        problems.append(f"modules were trained whole ({', '.join(config['modules_to_save'])})")
    elif other:
        problems.append(f"{other[0]} is not the pair of matrices of a linear layer")
    if config.get("target_parameters"):
        problems.append("experts are adapted as stacks")
    return problems
