"""How long fuzzing takes: a few fixed examples of each property in `make test`, FUZZ_SECONDS in all by `make fuzz`."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

from tests.fuzz.budget import SECONDS

if TYPE_CHECKING:
    from torch import Tensor

    from ftcli.export.clean.process import CleanProcess
    from ftcli.export.clean.request import ReloadAnswer, ReloadRequest

_UNHURRIED = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
settings.register_profile("short", derandomize=True, database=None, deadline=None, suppress_health_check=_UNHURRIED)
settings.register_profile(
    "long", deadline=None, suppress_health_check=_UNHURRIED, print_blob=True, report_multiple_bugs=True
)
settings.load_profile("long" if SECONDS else "short")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Under `make fuzz` a property is tried on new examples again and again until its share of the time is up."""
    if not SECONDS or not hasattr(pyfuncitem.obj, "hypothesis"):
        return None
    items = [item for item in pyfuncitem.session.items if hasattr(getattr(item, "obj", None), "hypothesis")]
    until = time.monotonic() + SECONDS / len(items)
    given = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    while time.monotonic() < until:
        pyfuncitem.obj(**given)
    return True


@dataclass(frozen=True)
class _FromAnywhere:
    """A process that loads exports again, for commands in another folder than the one it was started in."""

    process: CleanProcess

    def start(self) -> None:
        self.process.start()

    def ask(self, request: ReloadRequest, sent: Mapping[str, Tensor]) -> ReloadAnswer:
        config = request.config and str(Path(request.config).absolute())
        return self.process.ask(replace(request, folder=str(Path(request.folder).absolute()), config=config), sent)


@pytest.fixture(scope="module")
def shared_reload(clean_process: CleanProcess) -> Iterator[None]:
    """Exports of all examples ask the process of all tests, and leave it running: it has imported everything once."""
    clean_process.start()  # here, and not within the bounds of a fuzzed command
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ftcli.export.writing.CleanProcess", lambda: nullcontext(_FromAnywhere(clean_process)))
        yield
