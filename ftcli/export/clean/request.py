"""Request and answer of the process that loads exports again. Plain values, as JSON has them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from ftcli.plain import JsonMap

#: What a line on stdout begins with that is an answer: a machine's own start-up files may print there, too.
ANSWER = "ftcli: "
#: Names of what a request sends beside it: the probe, (rows, tokens) both, padded on the right.
INPUT_IDS, ATTENTION_MASK = "input_ids", "attention_mask"
#: A prompt (1, tokens) that is gone on with.
PROMPT = "prompt"
#: Names of what comes back: float32 (positions, vocabulary) of all that is not padding, of a
#: sequence classifier (rows, 1); (tokens,).
LOGITS, GREEDY = "logits", "greedy"
#: Before the name of a linear layer: what it makes of :func:`rows_for`; before that of an adapter's tensor: itself.
LAYER, TENSOR = "layer:", "tensor:"
#: Before the name of each argument of a row with an image that is sent along; what comes back for it: float32 (tokens,
#: vocabulary).
IMAGE, SEEN = "image:", "seen"
#: The picture (height, width, 3) that llama.cpp is shown, and the ids of what it reads, -1 where it sees.
PICTURE, READ = "picture", "read"
#: Modules of ftcli's that compute with models, or change them: none of them is imported there.
OURS = ("ftkernels", "ftcli.model", "ftcli.train", "ftcli.methods", "ftcli.generation", "ftcli.pipeline")


def rows_for(features: int) -> Tensor:
    """The input of single layers: (4, features), the same every time."""
    return torch.randn((4, features), generator=torch.Generator().manual_seed(0))


@dataclass(frozen=True, slots=True)
class ReloadRequest:
    """The export to load, and the questions about it.

    Attributes:
        kind: ``model``: a folder of transformers' layout. ``adapter``: of PEFT's. ``gguf``: a file. ``llama``: a file
            that llama.cpp's library is asked about.
        config: A folder with the config.json of the base, for ``adapter`` and ``gguf``.
        dtype: ``stored``: loaded as it is stored and computed in float32; ``float32``: loaded in float32.
        from_disk: Weights are read layer by layer in each pass, for memory that does not hold them.
        new_tokens: How many tokens PROMPT is continued by, greedily.
        texts: What the tokenizer cuts, rendered as a user's message.
        layers: Linear layers that are asked alone, and how many features they take.
        names: The name in the file, or files, of each tensor of the model; of a folder only where its weights are
            rounded and it is read layer by layer.
        embeddings: The adapter brings those of a vocabulary of its own.
        projector: The file of the tower, for ``llama``: it is shown PICTURE at the marker in the first text.
        threads: How many threads sums are taken by, so that they are taken alike.
    """

    kind: Literal["model", "adapter", "gguf", "llama"]
    folder: str
    config: str = ""
    dtype: Literal["stored", "float32"] = "stored"
    from_disk: bool = False
    new_tokens: int = 0
    texts: tuple[str, ...] = ()
    layers: Mapping[str, int] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    heads: Mapping[str, int] = field(default_factory=dict)
    embeddings: bool = False
    threads: int = 1
    projector: str = ""


@dataclass(frozen=True, slots=True)
class ReloadAnswer:
    """The answer of the other process.

    Attributes:
        problems: Why it could not be loaded, or what is not whole; empty where nothing is wrong.
        tokenizer: ``eos_token_id``, ``chat_template`` and the like, ``tokens`` (how many) and ``rendered`` (the ids
            of each of the request's texts); empty where there is none.
        unavailable: Why a library that was to be asked is none that can be.
    """

    problems: tuple[str, ...] = ()
    tokenizer: JsonMap = field(default_factory=dict)
    stops: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    peak_bytes: int = 0
    libraries: str = ""
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    unavailable: str = ""
