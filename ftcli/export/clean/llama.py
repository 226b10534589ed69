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


def see_with_llama(file: Path, projector: Path, text: str, picture: Any, *, threads: int = 1) -> tuple[list[int], Any]:
    """Shows llama.cpp a picture (height, width, 3) of bytes where ``text`` has llama.cpp's marker.

    Returns the ids of what it reads, -1 for each token of the picture, and the logits (vocabulary) behind the last.

    Raises ValueError: it cannot load or compute it; ImportError, OSError, RuntimeError: the library is not there, or
    built without its part that sees.
    """
    import llama_cpp as library
    import numpy as np
    from llama_cpp import mtmd_cpp as seeing

    with _model(library, file) as model:
        settings = seeing.mtmd_context_params_default()
        settings.use_gpu, settings.print_timings, settings.warmup = False, False, False
        settings.n_threads, settings.flash_attn_type = threads, 0
        eye = seeing.mtmd_init_from_file(str(projector).encode(), model, settings)
        if not eye:
            raise ValueError("llama.cpp cannot load it")
        height, width = picture.shape[:2]
        pixels = np.ascontiguousarray(picture, np.uint8)
        bitmap = seeing.mtmd_bitmap_init(width, height, pixels.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8)))
        chunks, context = seeing.mtmd_input_chunks_init(), None
        try:
            data = text.encode()
            asked = seeing.mtmd_input_text(data, len(data), False, True)
            shown = (seeing.mtmd_bitmap_p_ctypes * 1)(bitmap)
            if seeing.mtmd_tokenize(eye, chunks, ctypes.byref(asked), shown, 1):
                raise ValueError("llama.cpp cannot read the picture")
            ids = [each for at in range(seeing.mtmd_input_chunks_size(chunks)) for each in _read(seeing, chunks, at)]
            context = _context(library, model, threads, len(ids) + 8)
            past = library.llama_pos(0)
            if seeing.mtmd_helper_eval_chunks(eye, context, chunks, 0, 0, len(ids) + 8, True, ctypes.byref(past)):
                raise ValueError("llama.cpp cannot compute it")
            size = library.llama_vocab_n_tokens(library.llama_model_get_vocab(model))
            return ids, np.ctypeslib.as_array(library.llama_get_logits_ith(context, -1), (size,)).copy()
        finally:
            if context is not None:
                library.llama_free(context)
            seeing.mtmd_input_chunks_free(chunks)
            seeing.mtmd_bitmap_free(bitmap)
            seeing.mtmd_free(eye)


def _read(seeing: Any, chunks: Any, at: int) -> list[int]:
    """The ids of a piece of the text, or -1 for each token of the picture."""
    chunk = seeing.mtmd_input_chunks_get(chunks, at)
    if seeing.mtmd_input_chunk_get_type(chunk) != seeing.MTMD_INPUT_CHUNK_TYPE_TEXT:
        return [-1] * int(seeing.mtmd_input_chunk_get_n_tokens(chunk))
    count = ctypes.c_size_t()
    found = seeing.mtmd_input_chunk_get_tokens_text(chunk, ctypes.byref(count))
    return list(found[: count.value])


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

    context = _context(library, model, threads, _TOKENS)
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


def _context(library: Any, model: Any, threads: int, tokens: int) -> Any:
    parameters = library.llama_context_default_params()
    parameters.n_ctx, parameters.n_batch, parameters.n_ubatch = tokens, tokens, tokens
    parameters.n_threads, parameters.n_threads_batch = threads, threads
    parameters.flash_attn_type = 0
    parameters.type_k = parameters.type_v = 0  # float32
    context = library.llama_init_from_model(model, parameters)
    if not context:
        raise ValueError("llama.cpp cannot make room for it")
    return context


def _adapt(library: Any, model: Any, context: Any, adapter: Path) -> None:
    loaded = library.llama_adapter_lora_init(model, str(adapter).encode())
    if not loaded:
        raise ValueError("llama.cpp cannot load the adapter")
    if hasattr(library, "llama_set_adapter_lora"):
        library.llama_set_adapter_lora(context, loaded, 1.0)
    else:
        pair = (library.llama_adapter_lora_p_ctypes * 1)(loaded), (ctypes.c_float * 1)(1.0)
        library.llama_set_adapters_lora(context, pair[0], 1, pair[1])
