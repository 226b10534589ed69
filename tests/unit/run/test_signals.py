"""Stopping on signals."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator

import pytest

from ftcli.errors import ExitCode, FtcliError
from ftcli.run.signals import LeavePhase, StopNow, StopRequest, StopRequested, stoppable


def send(name: str) -> None:
    os.kill(os.getpid(), signal.Signals[name])


@pytest.mark.parametrize(("name", "code"), [("SIGTERM", ExitCode.PREEMPTED), ("SIGINT", ExitCode.INTERRUPTED)])
def test_the_first_signal_is_a_request(name: str, code: ExitCode) -> None:
    with StopRequest() as stop:
        stop.check()
        assert (stop.requested, stop.exit_code) == (None, None)
        send(name)
        assert (stop.requested, stop.exit_code) == (name, code)
        with pytest.raises(StopRequested) as caught:
            stop.check("tokenizing")
    assert caught.value.exit_code is code
    assert caught.value.findings[0].code == "FT728"
    assert "tokenizing" in caught.value.findings[0].message


@pytest.mark.parametrize("first", ["SIGTERM", "SIGINT"])
@pytest.mark.parametrize("second", ["SIGTERM", "SIGINT"])
def test_the_second_signal_stops_at_once(first: str, second: str) -> None:
    before = (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT))
    with StopRequest() as stop:
        send(first)
        with pytest.raises(StopNow) as caught:
            send(second)
        assert not isinstance(caught.value, Exception)
        assert caught.value.signal_name == second
        assert stop.requested == first
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL  # a third one kills
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


@pytest.fixture
def heeded() -> Iterator[None]:
    """SIGHUP as it is in a terminal: the tests themselves may run under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("heeded")
def test_a_terminal_that_goes_away_is_a_request_however_often_it_is_told() -> None:
    with StopRequest() as stop:
        for _ in range(3):
            send("SIGHUP")
        assert (stop.requested, stop.exit_code) == ("SIGHUP", ExitCode.PREEMPTED)
        with pytest.raises(StopNow):
            send("SIGTERM")


def test_nohup_is_respected() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopRequest() as stop:
            send("SIGHUP")
            assert stop.requested is None
    finally:
        signal.signal(signal.SIGHUP, before)


def test_an_interruptible_phase_is_left_at_once() -> None:
    with StopRequest() as stop, pytest.raises(StopRequested, match="loading"), stop.interruptible("loading"):  # noqa: PT012
        send("SIGTERM")
        pytest.fail("went on after the signal")


def test_a_library_that_swallows_the_stop_only_delays_it() -> None:
    reached = False
    with StopRequest() as stop:
        with pytest.raises(StopRequested), stop.interruptible("loading"):  # noqa: PT012
            with contextlib.suppress(BaseException):  # what a destructor does
                send("SIGINT")
            reached = True
        assert reached
        with pytest.raises(StopRequested), stop.interruptible("saving"):
            pytest.fail("a phase began after a stop was requested")


def test_a_library_that_catches_exceptions_does_not_notice_the_stop() -> None:
    with StopRequest() as stop, pytest.raises(StopRequested), stop.interruptible("loading"):  # noqa: PT012
        with contextlib.suppress(Exception):
            send("SIGTERM")
        pytest.fail("the library went on")


@pytest.mark.parametrize("other", [RuntimeError("Failed to import"), FtcliError.single("FT727", "cannot be read")])
def test_a_library_that_makes_another_error_of_the_stop_does_not_hide_it(other: Exception) -> None:
    """As transformers' lazy imports and pydantic's serializers do, and ftcli with the errors of either."""
    with StopRequest() as stop, pytest.raises(StopRequested, match="loading"), stop.interruptible("loading"):  # noqa: PT012
        try:
            send("SIGTERM")
        except BaseException as error:
            raise other from error


def test_a_stop_at_the_very_end_of_a_phase_is_a_stop_all_the_same() -> None:
    """Between the block's last instruction and the first of its end no handler of ours is on the stack."""
    with pytest.raises(StopRequested) as caught, StopRequest() as stop:  # noqa: PT012
        with contextlib.suppress(StopRequested), stop.interruptible("loading"):
            send("SIGTERM")
        raise LeavePhase
    assert caught.value.exit_code is ExitCode.PREEMPTED


@pytest.mark.parametrize(("name", "ends_by"), [("SIGTERM", signal.SIGTERM), ("SIGINT", None)])
def test_a_forked_worker_takes_no_part_in_it(name: str, ends_by: int | None) -> None:
    """torch and multiprocessing end their workers by SIGTERM, and wait for that; Ctrl-C is for the parent to decide."""
    with StopRequest() as stop, stop.interruptible("collating"):
        child = os.fork()
        if child == 0:
            os.kill(os.getpid(), signal.Signals[name])
            os._exit(7)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert status == (7 if ends_by is None else -ends_by)
        assert stop.requested is None


def test_after_an_interruptible_phase_a_signal_is_a_request_again() -> None:
    with StopRequest() as stop:
        with stop.interruptible("loading"):
            pass
        send("SIGTERM")
        assert stop.requested == "SIGTERM"


def test_previous_handlers_come_back_also_after_an_error() -> None:
    before = (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT))
    with pytest.raises(ZeroDivisionError), StopRequest():  # noqa: PT012
        assert signal.getsignal(signal.SIGTERM) != before[0]
        raise ZeroDivisionError
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


def test_sigterm_can_be_left_alone() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with StopRequest(sigterm=False):
        assert signal.getsignal(signal.SIGTERM) is before
        assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler


def test_it_refuses_to_work_outside_of_the_main_thread() -> None:
    raised: list[BaseException] = []

    def work() -> None:
        try:
            with StopRequest():
                pass
        except RuntimeError as error:
            raised.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert "main thread" in str(raised[0])


@pytest.mark.usefixtures("heeded")
def test_a_signal_waits_while_the_end_of_a_run_is_written() -> None:
    written = []

    def write(stop: StopRequest, signals: int) -> None:
        with stop.held(), stop.held():
            for _ in range(signals):
                send("SIGINT")
            written.append("the end")

    with StopRequest() as stop:
        send("SIGINT")
        with pytest.raises(StopNow):
            write(stop, 1)
        assert written == ["the end"]
    with StopRequest() as stop:
        with stop.held():
            send("SIGTERM")
            assert stop.requested is None
        assert stop.requested == "SIGTERM"
    with StopRequest() as stop:
        with pytest.raises(StopNow):
            write(stop, 3)
        assert written == ["the end"], "the third one does not wait"


def test_the_first_signal_says_what_it_does_where_that_takes_a_while() -> None:
    said: list[str] = []
    with StopRequest(say=said.append) as stop:
        with pytest.raises(StopRequested), stop.interruptible("loading"):
            signal.raise_signal(signal.SIGINT)
        assert said == []  # it ends at once, and its error says so
    with StopRequest(say=said.append):
        signal.raise_signal(signal.SIGINT)
    assert len(said) == 1
    assert said[0].startswith("SIGINT: stopping; training first finishes its step and writes a checkpoint.")


def test_a_signal_after_the_end_changes_nothing_and_a_second_one_stops_what_is_still_written() -> None:
    said: list[str] = []
    with StopRequest(say=said.append) as stop:
        stop.over()
        send("SIGINT")
        assert said == []
        with pytest.raises(StopNow):
            send("SIGINT")


@pytest.mark.parametrize("signals", [1, 2])
def test_a_command_without_checkpoints_promises_none(signals: int) -> None:
    def export() -> None:
        with stoppable("exporting"), contextlib.suppress(LeavePhase):
            for _ in range(signals):
                with contextlib.suppress(LeavePhase):
                    send("SIGINT")

    with pytest.raises(FtcliError) as caught:
        export()
    found = caught.value.findings[0]
    assert (found.code, found.help) == ("FT728", "start the same command again")
