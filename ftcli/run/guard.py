"""Cuts the connections between GPUs when a rank is lost that holds weights the others wait for.

A GPU that waits for another one waits for ever, and once enough work is queued behind it, so does the host. With its
connections cut, the GPU works through the queue, whose results are not used, and the host finds out what has happened.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

_LOOK_SECONDS = 1.0
#: The host is given so long to find out by itself.
_GRACE_SECONDS = 5.0


class ConnectionGuard(threading.Thread):
    """Looks every second.

    Args:
        gone: Whether a rank is gone.
        cut: Cuts the connections.
    """

    def __init__(self, gone: Callable[[], bool], cut: Callable[[], None]) -> None:
        super().__init__(daemon=True, name="guard of connections")
        self._gone, self._cut = gone, cut
        self._over = threading.Event()

    def run(self) -> None:
        """Until a rank is gone, or nobody is to be waited for any more."""
        while not self._over.wait(_LOOK_SECONDS):
            if self._gone():
                if not self._over.wait(_GRACE_SECONDS):
                    self._cut()
                return

    def stop(self) -> None:
        """The connections are needed no more."""
        self._over.set()
