"""What importing all of ftcli changes outside it; asked in drill_server.py, which imports it all in any case."""

from __future__ import annotations

import logging
import os
import pkgutil
import random
import signal
import sys
import warnings
from importlib import import_module
from typing import Any

LIBRARIES = ("torch", "triton", "transformers", "peft", "trl", "accelerate", "datasets", "numpy")
#: What a run loads of them.
LOADED = (
    *("accelerate", "datasets", "peft", "torch", "transformers", "trl"),
    *("transformers.models.gemma2.modeling_gemma2", "transformers.models.llama.modeling_llama"),
)


def changed_by_imports() -> dict[str, Any]:
    """Imports the libraries and then every module of ours.

    Returns: ``changed`` and ``lost``, attributes of the libraries; ``settings`` with what they were and are, where
    that differs; the numbers of our ``modules`` and of the ``attributes`` that were compared.
    """
    for name in LOADED:
        import_module(name)
    from trl import GRPOTrainer, SFTTrainer  # noqa: F401 - which trl loads when it is asked for them

    before, settings_before = _attributes(), _settings()
    modules = [
        found.name
        for root in ("ftcli", "ftkernels")
        for found in pkgutil.walk_packages(import_module(root).__path__, f"{root}.")
        if not found.name.endswith("__main__")
    ]
    for name in modules:
        import_module(name)
    after, settings = _attributes(), _settings()
    changed = [key for key, value in before.items() if key in after and after[key] is not value]
    return {
        "changed": [".".join(key) for key in changed if not key[-1].startswith("__")],
        "lost": [".".join(key) for key in before.keys() - after.keys()],
        "settings": {key: repr((was, settings[key])) for key, was in settings_before.items() if was != settings[key]},
        "modules": len(modules),
        "attributes": len(before),
    }


def _attributes() -> dict[tuple[str, ...], Any]:
    found: dict[tuple[str, ...], Any] = {}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] not in LIBRARIES or module is None:
            continue
        for key, value in list(vars(module).items()):
            found[name, key] = value
            if isinstance(value, type):
                found |= {(name, key, each): member for each, member in list(vars(value).items()) if callable(member)}
    return found


def _settings() -> dict[str, Any]:
    import torch
    import transformers

    return {
        "environment": dict(os.environ),
        "signals": {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)},
        "logging": [logging.root.level, list(logging.root.handlers), logging.getLogger("transformers").level],
        "warnings": list(warnings.filters),
        "excepthook": sys.excepthook,
        "random": random.getstate(),
        "torch": [
            *(torch.get_default_dtype(), torch.get_num_threads(), torch.is_grad_enabled(), torch.initial_seed()),
            *(torch.backends.cuda.matmul.allow_tf32, torch.get_float32_matmul_precision(), torch.get_default_device()),
        ],
        "attention": sorted(transformers.AttentionInterface().valid_keys()),
    }
