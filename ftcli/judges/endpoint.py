"""The built-in judge ``llm_judge``: a model behind an address that speaks OpenAI's chat completions says a number.

Answers are kept by the content of what was asked, so that a resumed run gets the same numbers, and nothing is paid for
twice.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import math
import re
import sqlite3
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from email.message import Message
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any

from ftcli.config.evaluation import EndpointConfig
from ftcli.errors import ExitCode, FtcliError, first_line
from ftcli.judges.verdicts import CompletionBatch, FailedJudgement, Verdict
from ftcli.plain import JsonObject, as_unicode

#: What is tried again: a server that is busy, starting, or behind one that is.
_PASSING = frozenset((408, 409, 425, 429, 500, 502, 503, 504))
#: Redirections, which are not followed, and all that is an error.
REFUSED = 300
#: Seconds before the first further try; twice as many before each other one, up to a minute.
_FIRST_WAIT, _LONGEST_WAIT = 0.5, 60.0
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
_NAME = re.compile(r"\{(\w+)\}")
_MOST_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class JudgeAccess:
    """Access of judges to the outside: ``secret`` gives the value of a variable, ``cache`` is a folder for answers."""

    secret: Callable[[str], str | None] = field(default=lambda name: None)
    cache: Path | None = None


class NoRedirect(urllib.request.HTTPRedirectHandler):
    """Follows no redirection: the key is for the address that was named."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


#: What is said of one request, such as one that is too long for the model.
_OF_REQUESTS = frozenset((400, 413, 422))


def answered(
    opener: urllib.request.OpenerDirector, request: urllib.request.Request, seconds: float
) -> tuple[int, Message, bytes]:
    """Status, headers and body of the answer to a request, which has to be whole within ``seconds``: the limit of a
    connection begins anew with each byte, and a server that sends one now and then would never be given up.

    Raises OSError and HTTPException where there is no such answer, ValueError for a request that cannot be sent.
    """
    found: Future[tuple[int, Message, bytes]] = Future()

    def ask() -> None:
        try:
            try:
                answer = opener.open(request, timeout=seconds)
            except urllib.error.HTTPError as error:  # an answer as well
                answer = error
            with closing(answer):
                found.set_result((answer.status, answer.headers, answer.read(_MOST_BYTES)))
        except (OSError, http.client.HTTPException, ValueError) as error:
            found.set_exception(error)

    threading.Thread(target=ask, daemon=True).start()
    try:
        return found.result(seconds)
    except TimeoutError as error:
        raise TimeoutError(f"no whole answer within {seconds:g} s") from error


class _Passing(Exception):
    """No answer yet; ``wait`` seconds were asked for, where the server said so.

    Attributes:
        unusable: It is an error of the address where that has never answered otherwise.
        again: A further try may help.
    """

    def __init__(
        self, reason: str, wait: float | None = None, *, unusable: FtcliError | None = None, again: bool = True
    ) -> None:
        super().__init__(reason)
        self.wait, self.unusable, self.again = wait, unusable, again


class LlmJudge:
    """Asks for a number for each completion, several at a time.

    Args:
        extract: An expression whose first group is the number; absent: the last number of the reply.

    Raises FtcliError FT470 (exit 2) where the variable that has the key is not set.
    """

    def __init__(self, endpoint: EndpointConfig, access: JudgeAccess, extract: str | None = None) -> None:
        self._endpoint, self._extract = endpoint, re.compile(extract, re.DOTALL) if extract else None
        self._opener = urllib.request.build_opener(NoRedirect())
        self._url = endpoint.url.rstrip("/") + "/chat/completions"
        self._headers = {"Content-Type": "application/json"}
        if endpoint.api_key_env is not None:
            key = access.secret(endpoint.api_key_env)
            if not key:
                message = f"the variable {endpoint.api_key_env} is not set, and endpoint.api_key_env names it"
                raise _unusable(message, f"export {endpoint.api_key_env}=…", ExitCode.RECIPE)
            self._headers["Authorization"] = f"Bearer {key}"
        self._cache = None if access.cache is None else _Replies(access.cache / "judges.sqlite")
        self._lock = threading.Lock()
        self._sent, self._has_answered = 0, False
        self._counts = dict.fromkeys(("requests", "cached", "retries"), 0)

    def __call__(self, batch: CompletionBatch) -> list[Verdict]:
        """Raises FtcliError: FT470 (exit 4) where the server refuses, FT471 (exit 4) when the budget is spent."""
        with ThreadPoolExecutor(self._endpoint.concurrency) as threads:
            asked = [threads.submit(self._verdict, self._body(batch, at)) for at in range(len(batch.completions))]
            try:
                return [one.result() for one in asked]
            except BaseException:
                threads.shutdown(wait=False, cancel_futures=True)
                raise

    def measured(self) -> Mapping[str, float]:
        """Requests, answers out of the cache, and further tries, since the last call."""
        with self._lock:
            found = {name: float(count) for name, count in self._counts.items()}
            self._counts = dict.fromkeys(self._counts, 0)
        return found

    def _body(self, batch: CompletionBatch, at: int) -> JsonObject:
        known = {name: str(values[at]) for name, values in batch.columns.items()}
        known |= {"prompt": batch.prompts[at], "completion": batch.completions[at]}
        text = _NAME.sub(lambda name: known.get(name[1], name[0]), self._endpoint.prompt)
        message = {"role": "user", "content": text}
        return {**self._endpoint.request, "model": self._endpoint.model, "messages": [message]}

    def _verdict(self, body: JsonObject) -> Verdict:
        sent = json.dumps(body, sort_keys=True).encode()
        key = hashlib.sha256(self._url.encode() + b"\0" + sent).hexdigest()
        reply = None if self._cache is None else self._cache.get(key)
        if reply is None:
            try:
                reply = self._asked(sent)
            except _Passing as error:
                if error.unusable is not None and not self._has_answered:
                    raise error.unusable from error
                tries = f", and so in {self._endpoint.retries} further tries," if error.again else ","
                return FailedJudgement(f"{error}{tries}")
            if self._cache is not None:
                self._cache.put(key, reply)
        else:
            self._count("cached")
        return self._number(reply)

    def _asked(self, sent: bytes) -> str:
        for attempt in range(self._endpoint.retries + 1):
            self._spend()
            try:
                return self._once(sent)
            except _Passing as error:
                if attempt == self._endpoint.retries or not error.again:
                    raise
                self._count("retries")
                time.sleep(min(error.wait or _FIRST_WAIT * 2**attempt, _LONGEST_WAIT))
        raise AssertionError("unreachable")

    def _once(self, sent: bytes) -> str:
        request = urllib.request.Request(self._url, sent, self._headers)  # noqa: S310 - http(s), by the recipe's schema
        try:
            status, headers, body = answered(self._opener, request, self._endpoint.timeout)
        except (OSError, http.client.HTTPException) as error:  # also what urllib makes of a name that is not known
            raise _Passing(f"could not be reached ({first_line(error)})") from error
        except ValueError as error:  # a key or an address that no request can hold
            raise _unusable(f"{self._url} cannot be asked: {first_line(error)}") from error
        if status in _PASSING:
            raise _Passing(f"answered {status}", _asked_wait(headers.get("Retry-After")))
        if status >= REFUSED:
            reason = f"answered {status}: {first_line(ValueError(body.decode('utf-8', 'replace')))}"
            if status in _OF_REQUESTS:
                raise _Passing(reason, unusable=_unusable(f"{self._url} {reason}"), again=False)
            raise _unusable(f"{self._url} {reason}")
        try:
            reply = as_unicode(str(json.loads(body)["choices"][0]["message"]["content"] or ""))
            self._has_answered = True
            return reply
        except (ValueError, KeyError, IndexError, TypeError, RecursionError) as error:
            reason = "did not answer as OpenAI's chat completions do"
            raise _Passing(reason, unusable=_unusable(f"{self._url} {reason}")) from error

    def _number(self, reply: str) -> Verdict:
        found = _NUMBER.findall(reply)[-1:] if self._extract is None else self._extract.findall(reply)[:1]
        text = found[0] if found and isinstance(found[0], str) else found[0][0] if found else ""
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        return number if abs(number) <= 1e12 else FailedJudgement(f"replied {reply[-200:]!r}, which has no number,")

    def _spend(self) -> None:
        with self._lock:
            if self._sent >= self._endpoint.max_requests:
                raise FtcliError.single(
                    "FT471",
                    f"{self._endpoint.max_requests:,} requests have been sent to {self._url}, which is "
                    "endpoint.max_requests",
                    exit_code=ExitCode.DATA,
                    help="raise max_requests and run the command again: it goes on, and asks nothing twice",
                )
            self._sent += 1
            self._counts["requests"] += 1

    def _count(self, name: str) -> None:
        with self._lock:
            self._counts[name] += 1


class _Replies:
    """Replies by the content of their request, in a file that several processes may use. Each method raises FtcliError
    FT470 (exit 4) for a file that is damaged, or cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        with self._open() as database:
            database.execute("CREATE TABLE IF NOT EXISTS replies (key TEXT PRIMARY KEY, reply TEXT NOT NULL)")

    @contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with closing(sqlite3.connect(self._path, timeout=60)) as database, database:
                yield database
        except (sqlite3.Error, OSError) as error:
            message = f"{self._path}, which keeps replies, cannot be used: {first_line(error)}"
            raise _unusable(
                message, "remove the file, whose replies are asked for again, or free some space"
            ) from error

    def get(self, key: str) -> str | None:
        with self._open() as database:
            found: Sequence[Any] | None = database.execute("SELECT reply FROM replies WHERE key = ?", (key,)).fetchone()
        return None if found is None else str(found[0])

    def put(self, key: str, reply: str) -> None:
        with self._open() as database:
            database.execute("INSERT OR IGNORE INTO replies VALUES (?, ?)", (key, reply))


def _asked_wait(said: str | None) -> float | None:
    """Seconds that a server asks for: a number, or a date."""
    if not said:
        return None
    with suppress(ValueError):
        return max(0.0, float(said))  # in this order, of which NaN is 0
    try:
        return max(parsedate_to_datetime(said).timestamp() - time.time(), 0.0)
    except (ValueError, TypeError):
        return None


def _unusable(message: str, help: str | None = None, exit_code: ExitCode = ExitCode.DATA) -> FtcliError:
    help = help or "check endpoint.url (it ends before /chat/completions), endpoint.model and the key"
    return FtcliError.single("FT470", message, exit_code=exit_code, help=help)
