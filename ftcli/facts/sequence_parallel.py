"""What a model must have for several ranks to share rows: for preflight, and for the exchange of heads itself."""

from __future__ import annotations

import math

from ftcli.facts.execution import Execution
from ftcli.facts.generation import batch_dependent_rope
from ftcli.facts.model import ModelFacts


def exchanged_key_heads(query_heads: int, key_heads: int, parts: int) -> int | None:
    """How many key heads are exchanged, so that each part gets as many, and with them all that its query heads read:
    ``key_heads`` or a multiple of them. None where ``parts`` does not divide the query heads.
    """
    if query_heads % parts:
        return None
    repeated = math.lcm(key_heads, parts)
    return repeated if query_heads % repeated == 0 else query_heads


def why_rows_stay_whole(facts: ModelFacts, execution: Execution, parts: int) -> str | None:
    """Why ranks cannot share rows of this model, as one clause; None where they can."""
    if not execution.on_kernels:
        return f"the layers are transformers' own: {execution.layers.reason}"
    if facts.shape is None:
        return "the model's shape is not known"
    if exchanged_key_heads(facts.shape.num_heads, facts.shape.num_kv_heads, parts) is None:
        return f"its {facts.shape.num_heads} attention heads cannot be shared by {parts}"
    kind = batch_dependent_rope(facts.language)
    return None if kind is None else f"its rotary embeddings of kind {kind} depend on the longest row of a batch"
