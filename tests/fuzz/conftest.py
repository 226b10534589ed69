"""How long fuzzing takes: a few fixed examples of each property in `make test`, FUZZ_SECONDS in all by `make fuzz`."""

from __future__ import annotations

import time

import pytest
from hypothesis import HealthCheck, settings

from tests.fuzz.budget import SECONDS

_UNHURRIED = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
settings.register_profile("short", derandomize=True, database=None, deadline=None, suppress_health_check=_UNHURRIED)
settings.register_profile(
    "long", deadline=None, suppress_health_check=_UNHURRIED, print_blob=True, report_multiple_bugs=True
)
settings.load_profile("long" if SECONDS else "short")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Under `make fuzz` a property is held against new examples again and again until its share of the time is up."""
    if not SECONDS or not hasattr(pyfuncitem.obj, "hypothesis"):
        return None
    items = [item for item in pyfuncitem.session.items if hasattr(getattr(item, "obj", None), "hypothesis")]
    until = time.monotonic() + SECONDS / len(items)
    given = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    while time.monotonic() < until:
        pyfuncitem.obj(**given)
    return True
