"""The report of a run that is going on: rewritten now and then, at little cost, and never at the cost of the run."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from ftcli.errors import FtcliError
from ftcli.run.directory import RunDirectory
from ftcli.run.report.page import LiveProgress, write_report

#: At most this often, and at most this share of the time.
_SECONDS_BETWEEN = 4.0
_SHARE = 0.02
#: What drawing strange data can raise; the picture waits then, the run does not.
_UNDRAWABLE = (FtcliError, ValueError, TypeError, LookupError, ArithmeticError, AttributeError)


@dataclass(slots=True)
class LiveReport:
    """Rewrites report.html while its run goes on."""

    run: RunDirectory
    clock: Callable[[], float] = time.monotonic
    _due: float = 0.0

    def update(self, live: LiveProgress, *, urgent: bool = False) -> bool:
        """Writes the page when it is due, or when ``urgent``; says whether it did.

        A page that cannot be written or drawn is left as it was: the one at the run's end tells why.
        """
        began = self.clock()
        if began < self._due and not urgent:
            return False
        try:
            write_report(self.run, live)
        except _UNDRAWABLE:
            self._due = began + 10 * _SECONDS_BETWEEN
            return False
        now = self.clock()
        self._due = now + max(_SECONDS_BETWEEN, (now - began) / _SHARE)
        return True
