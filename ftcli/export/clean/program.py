"""The process that loads exports again: a request a line on stdin, an answer a line on stdout.

Run as a program, by a file path and without the folder it lies in. It ends when its stdin is closed.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
from typing import Any


def serve() -> None:
    """Answers until stdin is closed, and then ends at once, whatever it is doing."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print is no answer
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(lines,), daemon=True).start()
    from ftcli.export.clean.answering import answered
    from ftcli.export.clean.request import ANSWER

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
