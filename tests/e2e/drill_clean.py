"""The process that loads exports again, for drills: a fork of one that has imported plain libraries only."""

from __future__ import annotations

import gc
import os
import select
import signal
import socket
from typing import TYPE_CHECKING, Any

from tests.clean_fork import adopt, import_libraries, serve

if TYPE_CHECKING:
    from ftcli.export.clean.process import CleanProcess


def offer(path: str) -> None:
    """A child of this process makes one for each that connects to the socket, until stdin is closed."""
    import_libraries()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(16)
    gc.freeze()
    if os.fork() > 0:
        listener.close()
        return
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how they ended
    while listener in select.select([0, listener], [], [])[0]:
        connection, _ = listener.accept()
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _, (folder,), _, _ = socket.recv_fds(connection, 1, 1)
            os.fchdir(folder)
            asked = connection.detach()
            serve(asked, os.dup(asked), folder, listener.detach())
        connection.close()
    os._exit(0)


class _Connection:
    """What :class:`CleanProcess` uses of a Popen."""

    def __init__(self, path: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(path)
        folder = os.open(".", os.O_RDONLY)  # paths in questions may begin here
        socket.send_fds(self._socket, [b"."], [folder])
        os.close(folder)
        self.stdin = self._socket.makefile("w", encoding="utf-8")
        self.stdout = self._socket.makefile("r", encoding="utf-8")

    def kill(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)  # it ends when its questions do

    def communicate(self) -> None:
        self._socket.close()


def connect(process: CleanProcess, path: str) -> None:
    """``process`` asks a child of that one until it is closed."""
    connection: Any = _Connection(path)
    adopt(process, connection)
