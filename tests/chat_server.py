"""A stand-in for an address that speaks OpenAI's chat completions: what it answers is the test's."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

#: A status, headers, and the body: text is made a completion of the protocol.
Answer = tuple[int, dict[str, str], "str | bytes"]


@dataclass
class ChatServer:
    """The requests that came, with their headers and the most at a time."""

    url: str = ""
    requests: list[tuple[str, dict[str, str], dict[str, Any]]] = field(default_factory=list)
    at_a_time: int = 0
    _now: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def came(self, path: str, headers: dict[str, str], body: dict[str, Any]) -> int:
        """Notes a request; returns its number, from 0."""
        with self._lock:
            self.requests.append((path, headers, body))
            self._now += 1
            self.at_a_time = max(self.at_a_time, self._now)
            return len(self.requests) - 1

    def left(self) -> None:
        with self._lock:
            self._now -= 1


@contextmanager
def chat_server(answer: Callable[[int, dict[str, Any]], Answer]) -> Iterator[ChatServer]:
    """Serves on this machine while the block runs."""
    said = ChatServer()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            number = said.came(self.path, dict(self.headers), body)
            try:
                status, headers, text = answer(number, body)
            finally:
                said.left()  # before the reply is sent, after which the other side may ask again
            if isinstance(text, str):
                text = json.dumps({"choices": [{"message": {"role": "assistant", "content": text}}]}).encode()
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: Any) -> None:
            return

    with served(Handler) as said.url:
        yield said


@contextmanager
def served(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """The address, with ``/v1``, of a server of this machine that answers by ``handler``."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/v1"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextmanager
def raw_server(begin: bytes, again: bytes = b"") -> Iterator[str]:
    """The address of one that answers every request with ``begin``, and then ``again`` every twentieth of a second, for
    five seconds at most; without ``again`` it hangs up.
    """
    over = threading.Event()

    def serve(client: socket.socket) -> None:
        with client, suppress(OSError):
            client.recv(1 << 16)
            client.sendall(begin)
            for _ in range(100):
                if not again or over.wait(0.05):
                    break
                client.sendall(again)
            client.shutdown(socket.SHUT_WR)
            while client.recv(1 << 16):  # closed before all of the request is read, it would take the answer back
                pass

    with socket.create_server(("127.0.0.1", 0)) as listening:

        def accept() -> None:
            with suppress(OSError):
                while True:
                    threading.Thread(target=serve, args=(listening.accept()[0],), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}/v1"
        finally:
            over.set()
