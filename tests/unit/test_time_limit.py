"""Only what computes too long is given up, on a machine of any speed."""

from __future__ import annotations

import re
import signal
import time

import pytest

from ftcli.time_limit import TookTooLong, limited_time


def test_time_in_which_others_compute_does_not_count() -> None:
    """A loaded machine took the names of a model's layers for an expression without end (found by fuzz)."""
    with limited_time(0.05):
        time.sleep(0.2)  # as where the system lets others compute


def test_what_never_ends_is_given_up() -> None:
    with pytest.raises(TookTooLong), limited_time(0.05):
        re.fullmatch("(a+)+b", "a" * 64)


def test_an_alarm_that_comes_at_once_is_one_too() -> None:
    """It came before the alarms of others had been asked for."""
    with pytest.raises(TookTooLong), limited_time(1e-6):
        re.fullmatch("(a+)+b", "a" * 64)


def test_handler_and_alarm_are_given_back() -> None:
    handler = signal.getsignal(signal.SIGALRM)
    signal.setitimer(signal.ITIMER_REAL, 600)
    try:
        with limited_time(1.0):
            pass
        assert signal.getsignal(signal.SIGALRM) == handler
        assert 0 < signal.getitimer(signal.ITIMER_REAL)[0] <= 600
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
