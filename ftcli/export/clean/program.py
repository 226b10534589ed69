"""The process that loads exports again: a request a line on stdin, an answer a line on stdout.

Run as a program, by a file path and without the folder it lies in. It ends when its stdin is closed.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import queue
import sys
import threading
from typing import Any

#: What nearly every answer imports: here while whoever asks is still writing.
_LIBRARIES = (
    "transformers.generation.utils",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
)


def serve() -> None:
    """Answers until stdin is closed, and then ends at once, whatever it is doing."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print is no answer
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(lines,), daemon=True).start()
    gc.disable()  # the libraries, a million objects that stay, are not searched for garbage again and again
    from ftcli.export.clean.answering import answered
    from ftcli.export.clean.request import ANSWER

    for name in _LIBRARIES:
        importlib.import_module(name)
    gc.freeze()
    gc.enable()
    while True:
        asked: dict[str, Any] = json.loads(lines.get())
        answers.write(f"{ANSWER}{json.dumps(answered(**asked))}\n")
        answers.flush()


def _read(lines: queue.SimpleQueue[str]) -> None:
    for line in sys.stdin:
        lines.put(line)
    os._exit(0)


if __name__ == "__main__":
    serve()
