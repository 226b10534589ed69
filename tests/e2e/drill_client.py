"""``python -S -E drill_client.py SOCKET WORD...`` runs one command on the server of drills as if it were this process.

It starts some hundred times: what it imports is built into Python, and takes no time.
"""

import _signal
import _socket
import marshal
import os
import resource
import sys


def ask(path: str, request: dict[str, object], descriptors: list[int]) -> tuple[_socket.socket, int]:
    """Starts a command; the socket, which will say how it ends, and the command's pid."""
    connection = _socket.socket(_socket.AF_UNIX)
    connection.connect(path)
    sent = b"".join(descriptor.to_bytes(4, sys.byteorder) for descriptor in descriptors)
    connection.sendmsg([marshal.dumps(request)], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, sent)])
    return connection, number(connection)


def number(connection: _socket.socket) -> int:
    """The next line that the server says."""
    text = b""
    while not text.endswith(b"\n"):
        part = connection.recv(1)
        if not part:
            raise ConnectionError("the server has ended")
        text += part
    return int(text)


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


def run(path: str, words: list[str]) -> int:
    """The command's status; its streams, limits and signals are this process's."""
    environment = dict(os.environ)
    request: dict[str, object] = {"words": words, "script": None, "environment": environment}
    request["folder"] = os.getcwd()  # noqa: PTH109 - nothing is imported
    request["preparations"] = environment.pop("DRILL_PREPARATIONS", "[]")
    closed = [descriptor for descriptor in (0, 1, 2) if not _is_open(descriptor)]
    request["closed"] = closed
    for _ in closed:
        os.open(os.devnull, os.O_RDWR)  # in its place, so that nothing else comes there
    request["limits"] = {which: resource.getrlimit(which) for which in (resource.RLIMIT_FSIZE, resource.RLIMIT_DATA)}
    connection, pid = ask(path, request, [0, 1, 2])
    for each in (_signal.SIGTERM, _signal.SIGINT, _signal.SIGHUP):
        _signal.signal(each, lambda received, _frame: os.kill(pid, received))
    status = number(connection)
    if status < 0:
        if -status != _signal.SIGKILL:
            _signal.signal(-status, _signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    return status


if __name__ == "__main__":
    sys.exit(run(sys.argv[1], sys.argv[2:]))
