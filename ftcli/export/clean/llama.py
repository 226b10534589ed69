"""Asks llama.cpp's library (llama-cpp-python) about a GGUF file: tokens, logits, and where it ends a turn.

Nothing is imported here but that package, so that another environment's Python can run it, too
(``docs/tools/llama_oracle.py``).
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: Room for the prompts.
_TOKENS = 256


@dataclass(frozen=True, slots=True)
class LlamaAnswer:
    """The answer of llama.cpp on a file.

    Attributes:
        tokens: The ids of each text, special ones recognised and none put before it.
        with_bos: Those of the first text with what the file says comes before a text.
        logits: For each row, an array (tokens, vocabulary) of float32.
    """

    tokens: list[list[int]]
    with_bos: list[int]
    ends: list[int]
    logits: list[Any]


def ask_llama(
    file: Path, rows: Sequence[Sequence[int]], texts: Sequence[str], *, threads: int = 1, adapter: Path | None = None
) -> LlamaAnswer:
    """Asks llama.cpp about ``texts`` and ``rows`` of ids, each alone, on the CPU and with a cache in float32.

    Args:
        rows: No more than 256 ids each; they are cut where the file's context ends.

    Raises ValueError: it cannot load or compute it; ImportError, OSError, RuntimeError: the library is not there, or
    broken.
    """
    import llama_cpp as library

    with _model(library, file) as model:
        vocabulary = library.llama_model_get_vocab(model)
        size = library.llama_vocab_n_tokens(vocabulary)
        longest = library.llama_model_n_ctx_train(model)
        found = [_logits(library, model, list(row)[:longest], size, threads, adapter) for row in rows]
        return LlamaAnswer(
            [_tokens(library, vocabulary, text, special=False) for text in texts],
            _tokens(library, vocabulary, texts[0], special=True),
            [token for token in range(size) if library.llama_vocab_is_eog(vocabulary, token)],
            found,
        )


@contextmanager
def _model(library: Any, file: Path) -> Iterator[Any]:
    silent = library.llama_log_callback(lambda *_: None)
    library.llama_log_set(silent, ctypes.c_void_p(0))
    library.llama_backend_init()
    parameters = library.llama_model_default_params()
    parameters.n_gpu_layers = 0
    parameters.use_extra_bufts = False  # repacked weights are other sums, made for larger matrices
    model = library.llama_model_load_from_file(str(file).encode(), parameters)
    if not model:
        raise ValueError("llama.cpp cannot load it")
    try:
        yield model
    finally:
        library.llama_model_free(model)


def _tokens(library: Any, vocabulary: Any, text: str, *, special: bool) -> list[int]:
    data = text.encode()
    room = (library.llama_token * (len(data) + 16))()
    count = library.llama_tokenize(vocabulary, data, len(data), room, len(room), special, True)
    return list(room[:count])


def _logits(library: Any, model: Any, ids: Sequence[int], size: int, threads: int, adapter: Path | None) -> Any:
    import numpy as np

    parameters = library.llama_context_default_params()
    parameters.n_ctx, parameters.n_batch, parameters.n_ubatch = _TOKENS, _TOKENS, _TOKENS
    parameters.n_threads, parameters.n_threads_batch = threads, threads
    parameters.flash_attn_type = 0
    parameters.type_k = parameters.type_v = 0  # float32
    context = library.llama_init_from_model(model, parameters)
    if not context:
        raise ValueError("llama.cpp cannot make room for it")
    try:
        if adapter is not None:
            _adapt(library, model, context, adapter)
        batch = library.llama_batch_init(len(ids), 0, 1)
        try:
            batch.n_tokens = len(ids)
            for place, token in enumerate(ids):
                batch.token[place], batch.pos[place], batch.logits[place] = token, place, True
                batch.n_seq_id[place], batch.seq_id[place][0] = 1, 0
            if library.llama_decode(context, batch):
                raise ValueError("llama.cpp cannot compute it")
            each = [library.llama_get_logits_ith(context, place) for place in range(len(ids))]
            return np.stack([np.ctypeslib.as_array(row, (size,)).copy() for row in each])
        finally:
            library.llama_batch_free(batch)
    finally:
        library.llama_free(context)


def _adapt(library: Any, model: Any, context: Any, adapter: Path) -> None:
    loaded = library.llama_adapter_lora_init(model, str(adapter).encode())
    if not loaded:
        raise ValueError("llama.cpp cannot load the adapter")
    if hasattr(library, "llama_set_adapter_lora"):
        library.llama_set_adapter_lora(context, loaded, 1.0)
    else:
        pair = (library.llama_adapter_lora_p_ctypes * 1)(loaded), (ctypes.c_float * 1)(1.0)
        library.llama_set_adapters_lora(context, pair[0], 1, pair[1])
