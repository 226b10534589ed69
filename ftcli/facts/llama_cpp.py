"""The programs of llama.cpp that exports run, where this machine has them."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

#: The program of llama.cpp that makes K-quants.
LLAMA_QUANTIZE = "llama-quantize"
WITHOUT_QUANTIZER = "install llama.cpp (brew install llama.cpp, or its releases), or use export.gguf.types: [q8_0]"
#: llama.cpp's own converter: as its package installs it, and the script of a checkout. ftcli was tried with that of
#: this commit, whose sources have this digest (``ftcli.export.gguf.convert``).
CONVERTER, CONVERTER_SCRIPT = "llama-convert-hf-to-gguf", "convert_hf_to_gguf.py"
CONVERTER_COMMIT, CONVERTER_DIGEST = "0c1e57098", "78d1d70dbf4186f3"
WITHOUT_CONVERTER = (
    f"git clone https://github.com/ggml-org/llama.cpp && git -C llama.cpp checkout {CONVERTER_COMMIT}; pip install "
    "sentencepiece; then set export.gguf.converter: llama.cpp"
)


def converter(stated: str | None) -> tuple[str, ...] | None:
    """The command of llama.cpp's converter: what `export.gguf.converter` names, else what is on the PATH. None where
    it is not there.
    """
    found = (
        Path(stated).expanduser() if stated else Path(shutil.which(CONVERTER) or shutil.which(CONVERTER_SCRIPT) or "")
    )
    if found.is_dir() and (found / CONVERTER_SCRIPT).is_file():
        found = found / CONVERTER_SCRIPT
    if not found.is_file():
        return None
    return (sys.executable, str(found.resolve())) if found.suffix == ".py" else (str(found),)


def quantizer() -> str | None:
    """The path of ``llama-quantize``; None where it is not on the PATH."""
    return shutil.which(LLAMA_QUANTIZE)
