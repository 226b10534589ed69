"""Windows of streamed sources in training: each is a small data set, with an order and a ledger, and follows the last.

One process of each machine makes them, a window ahead; the other ranks of the machine are told where they lie.
"""

from __future__ import annotations

import shutil
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ftcli.config.data import StreamPlace
from ftcli.data.ledger import DatasetLedger, merged
from ftcli.data.order import Epochs
from ftcli.data.prepare import PreparedData, accounts
from ftcli.data.tokens import TokenStore, TokenTable
from ftcli.data.windows import MadeWindow, WindowMaker, WindowProcess, WindowStart
from ftcli.errors import FtcliError
from ftcli.job import Job
from ftcli.paths import scratch
from ftcli.plain import JsonObject, plain_fields
from ftcli.train.data import epochs_over

if TYPE_CHECKING:
    from ftcli.run.process_group import RankGroup


class WindowStream:
    """The windows of a run, from the first one or from that of a checkpoint's ``state`` on.

    Attributes:
        number, first_step, passes: As :class:`ftcli.data.order.Stream`.
        ledgers: What became of the rows of each source so far, those of this window included.
        told: Is told the ledgers when a window follows.
    """

    def __init__(self, job: Job, group: RankGroup | None, state: JsonObject | None = None) -> None:
        self._job, self._group = job, group
        self._start, self.first_step, self._held_to = WindowStart(), 0, ""
        self.ledgers: list[DatasetLedger] = []
        self._lengths: list[Counter[int]] = []
        if state is not None:
            places = tuple(StreamPlace(**place) for place in state["places"])
            self._start = WindowStart(state["number"], places, tuple(state["layouts"]))
            self.first_step, self._held_to = state["first_step"], state["sha256"]
            self.ledgers = [DatasetLedger(**ledger) for ledger in state["ledgers"]]
            self._lengths = [Counter(dict(lengths)) for lengths in state["lengths"]]
        self._state: JsonObject = {}
        self._folder: Path | None = None
        self._process: WindowProcess | None = None
        self.told: Callable[[Sequence[DatasetLedger]], None] = lambda _: None
        if group is None or group.rank == group.place.local_leader:
            stack = ExitStack()
            folder = stack.enter_context(scratch("stream")).path
            data, offline = job.recipe.data, job.session.offline
            maker = WindowMaker(data, job.tokenizer, job.stops, job.vision, self._start, offline=offline)
            self._process = WindowProcess(maker, folder, beside=data.num_proc != 1)
            stack.callback(self._process.end)
            weakref.finalize(self, stack.close)

    @property
    def number(self) -> int:
        return self._start.number

    @property
    def passes(self) -> int:
        return min((place.over for place in self._start.places), default=0)

    def begin(self) -> PreparedData:
        """The window that training begins, or goes on, with.

        Raises FtcliError FT731 (exit 2) where it has other tokens than before the run was stopped.
        """
        found = self._next()
        if self._held_to not in ("", self._state["sha256"]):
            shards = [place.shard for place in self._start.places if place.shard is not None]
            begins = f", which begins in {shards[0]}," if shards else ""
            message = f"window {self.number + 1:,} of data.train{begins} has other rows or tokens than before the stop"
            help = "restore the files and library versions to continue; or start over with --resume never"
            raise FtcliError.single("FT731", message, help=help)
        return found

    def following(self, step: int) -> Epochs:
        """The next window, which begins after ``step`` finished steps."""
        gone, found = self._folder, self._next()
        self.first_step = self._state["first_step"] = step
        if self._process is not None and gone is not None:
            shutil.rmtree(gone, ignore_errors=True)
        for finding in found.findings:
            self._job.reporter.finding(finding)
        self.told(self.ledgers)
        return replace(epochs_over(self._job.recipe, found.sequences), stream=found.stream)

    def state(self) -> JsonObject:
        """Where this window began, and the account of what came before it."""
        return self._state

    def _next(self) -> PreparedData:
        made, data = self._made(), self._job.recipe.data
        stores = [TokenStore(made.folder / str(number)) for number in range(len(data.train))]
        table = TokenTable(stores)
        self._state = {
            "number": made.start.number,
            "first_step": self.first_step,
            "places": [plain_fields(place) for place in made.start.places],
            "layouts": [store.facts["ledger"]["layout"] for store in stores],
            "ledgers": [plain_fields(ledger) for ledger in self.ledgers],
            "lengths": [list(lengths.items()) for lengths in self._lengths],
            "sha256": table.digest(),
        }
        named = [(source.path, store) for source, store in zip(data.train, stores, strict=True)]
        ledgers, findings = accounts(named, data)
        lengths = [Counter[int](dict(store.facts["lengths"])) for store in stores]
        self._lengths = [a + b for a, b in zip(self._lengths or [Counter()] * len(lengths), lengths, strict=True)]
        of_all = zip(self.ledgers or ledgers, ledgers, self._lengths, strict=True)
        self.ledgers = [merged(a, b, c) for a, b, c in of_all] if self.ledgers else ledgers
        self._start, self._folder = made.start, made.folder
        return PreparedData(table, self.ledgers, tuple(findings), (False,) * len(ledgers), stream=self)

    def _made(self) -> MadeWindow:
        """The next window: made by this process' own, or by that of the first rank of this machine."""
        number = self._start.number + (self._folder is not None)
        if self._process is not None:
            made = self._process.next()
            if self._group is not None:
                self._group.publish(self._key(number), {"folder": str(made.folder), **plain_fields(made.start)})
            return made
        assert self._group is not None  # else there is a process
        told = self._group.awaited(self._key(number))
        places = tuple(StreamPlace(**place) for place in told["places"])
        return MadeWindow(Path(told["folder"]), WindowStart(told["number"], places, tuple(told["layouts"])))

    def _key(self, number: int) -> str:
        assert self._group is not None
        return f"window/{number}/{self._group.place.local_leader}"
