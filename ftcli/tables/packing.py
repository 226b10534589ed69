"""Families in which documents that share a row see each other on transformers' own layers: one row a ``model_type``.

Measured: a document's hidden states beside another one are compared with those alone, in float32. A test holds the
table against small models (tests/unit/model/test_leaking.py).
"""

from __future__ import annotations

from collections.abc import Mapping

_STATE = "its layers carry a state from token to token"
_MASK = "transformers masks its attention without regard to documents"

LEAKING: Mapping[str, str] = {
    "bamba": _STATE,
    "bloom": _MASK,
    "falcon": _MASK,
    "falcon_h1": _STATE,
    "falcon_mamba": _STATE,
    "gpt_oss": _MASK,
    "granitemoehybrid": _STATE,
    "jamba": _STATE,
    "lfm2": _STATE,
    "lfm3": _STATE,
    "mamba": _STATE,
    "mamba2": _STATE,
    "minimax": _STATE,
    "mpt": _MASK,
    "nemotron_h": _STATE,
    "olmo_hybrid": _STATE,
    "opt": _MASK,
    "qwen3_5_moe_text": _STATE,
    "qwen3_5_text": _STATE,
    "qwen3_next": _STATE,
    "recurrent_gemma": _STATE,
    "rwkv": _STATE,
    "xglm": _MASK,
    "zamba2": _STATE,
}


def why_documents_leak(text_type: str) -> str | None:
    """The reason why documents of a row see each other in a family, as one clause; None where it is not known of it."""
    return LEAKING.get(text_type)
