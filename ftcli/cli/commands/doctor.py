"""`ftcli doctor`: what is installed, what this machine is, and what it can and cannot run."""

from __future__ import annotations

import platform
from typing import Any

from ftcli import __version__
from ftcli.cli import options
from ftcli.cli.request import Request, Result
from ftcli.reporting import Session

_REQUIRED = (
    "torch", "triton", "transformers", "trl", "peft", "accelerate", "datasets", "safetensors", "pydantic", "PyYAML",
    "rich", "typer", "jinja2",
)  # fmt: skip

#: Package, and the extra of ftcli that installs it, with what it is for.
_OPTIONAL = (
    ("bitsandbytes", "qlora", "quantization.method: nf4"),
    ("gguf", "gguf", "export to GGUF"),
    ("lm-eval", "eval", "public benchmarks"),
    ("wandb", "wandb", "logging.wandb: true"),
    ("vllm", "vllm", "faster GRPO generation"),
)


def doctor(
    json: options.JsonOption = False,
    quiet: options.QuietOption = False,
    offline: options.OfflineOption = False,
    debug: options.DebugOption = False,
) -> Request:
    """Show what this machine can run, and why.

    Versions, the device, and each kernel and extra with the reason why it can run or not.

    \\b
    Examples:
      ftcli doctor
      ftcli doctor --json
    """
    return Request("doctor", options.common(json, quiet, offline, debug), examine)


def examine(session: Session) -> Result:
    """Everything that `ftcli doctor` knows."""
    return {
        "ftcli": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: version(name) or "not installed" for name in _REQUIRED},
        "extras": [_extra(*entry) for entry in _OPTIONAL],
        "environment": dict(session.environment),
    }


def _extra(package: str, extra: str, use: str) -> dict[str, Any]:
    found = version(package)
    remedy = f"pip install 'ftcli[{extra}]'" if found is None else ""
    return {"package": package, "use": use, "version": found, "install": remedy}


def version(package: str) -> str | None:
    """The installed version of `package`, None where it is not installed. Imports nothing."""
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
