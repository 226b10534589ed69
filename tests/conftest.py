"""Settings of the whole test run that must be made before any test module is imported."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Generator, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.tiers import thin_grids

if TYPE_CHECKING:
    from ftcli.export.clean.process import CleanProcess
    from tests.clean_fork import Fork
    from tests.e2e.drill import Server

# Without a GPU, tests/ops runs the Triton kernels in Triton's interpreter, which Triton decides at its import.
# Nothing else changes by it: ftkernels takes the interpreter only where a test asks for backend="triton".
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# A run flushes what it writes to the disk some 35 times and waits for it: the folders of tests are in memory where
# there is room for them. That of a test that passes goes with the test (tmp_path_retention_policy).
_MEMORY = Path("/dev/shm")
_ROOM = 4 << 30
#: Objects that are new since the last search for garbage.
_WORTH_A_SEARCH = 5_000
if _MEMORY.is_dir() and os.access(_MEMORY, os.W_OK | os.X_OK):
    _state = os.statvfs(_MEMORY)
    if _state.f_bavail * _state.f_frsize >= _ROOM and not _state.f_flag & os.ST_NOEXEC:
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(_MEMORY))


_FORK: pytest.StashKey[Fork] = pytest.StashKey()


def pytest_sessionstart(session: pytest.Session) -> None:
    """A worker of several, which will import everything, forks the process that loads exports again before it does.

    Where single folders were asked for, their conftest.py may have imported more than that process may have.
    """
    if hasattr(session.config, "workerinput") and not [name for name in sys.modules if name.startswith("ftcli.")]:
        from tests import clean_fork

        session.config.stash[_FORK] = clean_fork.Fork()
        session.config.add_cleanup(session.config.stash[_FORK].close)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """The libraries, a million objects, are not searched for garbage while they are imported, nor from then on."""
    gc.disable()
    result = yield
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)  # within a test there is seldom garbage worth a search: after each there is one
    gc.enable()
    return result


@pytest.hookimpl(tryfirst=True)  # before those that are deselected by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What shares the server of drills stays together, so that one worker of two starts it; then what takes longest."""
    thin_grids(items)
    items.sort(key=lambda item: ("drill_server" not in getattr(item, "fixturenames", ()), "slow" not in item.keywords))


@pytest.hookimpl(trylast=True)
def pytest_runtest_logfinish() -> None:
    """What is there after a test is searched once, not in every collection from then on.

    That would take 0.3 s each, and transformers' trainer asks for several in each run. Most tests leave too little.
    """
    young, *older = gc.get_count()
    if young > _WORTH_A_SEARCH or any(older):
        _settle()


def _settle() -> None:
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def _tokens_stay_in_the_tests(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Tokenized data of the commands under test goes into a folder of this test run, not into the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FTCLI_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(autouse=True, scope="session")
def _nothing_waits() -> Iterator[None]:
    from tests.quick import without_waiting

    with pytest.MonkeyPatch.context() as patch:
        without_waiting(patch)
        yield


@pytest.fixture(autouse=True, scope="session")
def quick_interpreter() -> Iterator[pytest.MonkeyPatch | None]:
    """Where any test that was collected can run a kernel."""
    if os.environ.get("TRITON_INTERPRET") != "1" or "triton.runtime.interpreter" not in sys.modules:
        yield None
        return
    from tests.interpreter import quickened

    with quickened() as patch:
        yield patch


@pytest.fixture(autouse=True)
def _turn_on_the_gpu(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Workers share one GPU: a test that needs the whole card has it alone, and none keeps memory that it freed.

    Who wants the card alone holds the gate while the others finish, so that no new one comes before it.
    """
    if request.node.get_closest_marker("gpu") is None or not Path("/dev/nvidiactl").exists():
        yield
        return
    import fcntl

    import torch

    folder = tmp_path_factory.getbasetemp()
    folder = folder.parent if hasattr(request.config, "workerinput") else folder
    alone = request.node.get_closest_marker("whole_card") is not None
    with (folder / "gate.lock").open("w") as gate, (folder / "card.lock").open("w") as card:
        fcntl.flock(gate, fcntl.LOCK_EX)
        fcntl.flock(card, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        fcntl.flock(gate, fcntl.LOCK_UN)
        yield
        gc.collect()
        torch.cuda.empty_cache()


@pytest.fixture(scope="session")
def clean_process(pytestconfig: pytest.Config) -> Iterator[CleanProcess]:
    """A process that loads exports again, for all tests of this run: it has imported everything once."""
    from ftcli.export.clean.process import CleanProcess
    from tests.clean_fork import adopt

    with CleanProcess() as process:
        if _FORK in pytestconfig.stash:
            adopt(process, pytestconfig.stash[_FORK])
        yield process


@pytest.fixture
def shared_clean(clean_process: CleanProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exports in this process ask that one, and leave it running."""
    monkeypatch.setattr("ftcli.export.writing.CleanProcess", lambda: nullcontext(clean_process))


@pytest.fixture(scope="session")
def drill_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Starts real processes quickly."""
    from tests.e2e.drill import Server

    server = Server(tmp_path_factory.mktemp("drills"))
    yield server
    server.close()
