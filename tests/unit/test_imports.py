"""Importing all of ftcli changes nothing outside it: no patched library, setting, handler or environment variable."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import logging, os, pkgutil, random, signal, sys, warnings
import accelerate, datasets, peft, torch, transformers, trl
from importlib import import_module
from trl import GRPOTrainer, SFTTrainer
from transformers.models.gemma2 import modeling_gemma2
from transformers.models.llama import modeling_llama

LIBRARIES = ("torch", "triton", "transformers", "peft", "trl", "accelerate", "datasets", "numpy")


def attributes():
    found = {}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] not in LIBRARIES or module is None:
            continue
        for key, value in list(vars(module).items()):
            found[name, key] = value
            if isinstance(value, type):
                for inner, member in list(vars(value).items()):
                    if callable(member):
                        found[name, key, inner] = member
    return found


def settings():
    return {
        "environment": dict(os.environ),
        "signals": {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)},
        "logging": [logging.root.level, list(logging.root.handlers), logging.getLogger("transformers").level],
        "warnings": list(warnings.filters),
        "excepthook": sys.excepthook,
        "random": random.getstate(),
        "torch": [
            torch.get_default_dtype(), torch.get_num_threads(), torch.is_grad_enabled(), torch.initial_seed(),
            torch.backends.cuda.matmul.allow_tf32, torch.get_float32_matmul_precision(), torch.get_default_device(),
        ],
        "attention": sorted(transformers.AttentionInterface().valid_keys()),
    }


before, settings_before = attributes(), settings()
count = 0
for root in ("ftcli", "ftkernels"):
    for found in pkgutil.walk_packages(import_module(root).__path__, f"{root}."):
        if not found.name.endswith("__main__"):
            import_module(found.name)
            count += 1
after = attributes()
changed = [".".join(k) for k, v in before.items() if k in after and after[k] is not v and not k[-1].startswith("__")]
assert not changed, changed[:10]
assert not (set(before) - set(after)), sorted(set(before) - set(after))[:10]
now = settings()
assert now == settings_before, {k: (v, now[k]) for k, v in settings_before.items() if now[k] != v}
print(count, len(before))
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_importing_everything_changes_nothing_outside() -> None:
    ran = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    modules, attributes = map(int, ran.stdout.split())
    assert modules > 120
    assert attributes > 10_000
