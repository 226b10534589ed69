"""Chat templates are programs of others: none takes more than its share of time and memory, and none ends a command."""

from __future__ import annotations

import contextlib
import threading
import time
from pathlib import Path

import pytest

from ftcli.config.model import ModelConfig
from ftcli.data.template import Renderer
from ftcli.errors import ExitCode, FtcliError
from ftcli.model.tokenizer import load_tokenizer
from ftcli.rows import limits
from ftcli.rows.limits import REFUSALS, TemplateStopped, limited_template
from ftcli.rows.row import Row

ROW = Row("rows.jsonl", 1, {})
CHAT = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]

FAILS = {
    "division by zero": "{{ 1 // 0 }}",
    "remainder by zero": "{{ messages | length % 0 }}",
    "huge range": "{% for i in range(999999999) %}{% endfor %}",
    "assertion of a filter": "{{ 'abcdefgh' | truncate(-5) }}",
    "overflow": "{{ 10.0 ** 400 }}",
    "recursion": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "attribute in a format": "{{ '{0.nothing}'.format(1).nothing.more }}",
    "unknown encoding": "{{ 'a'.encode('nothing') }}",
    "index": "{{ 'a'.index('b') }}",
    "huge text": "{{ 'a' * 99999999999 }}",
    "huge text that is not constant": "{{ messages[0].content * 99999999999 }}",
    "huge width": "{{ '%99999999999d' % 1 }}",
    "huge centre": "{{ 'a' | center(99999999999) }}",
    "text that doubles": "{% set n = namespace(t='ab') %}{% for i in range(60) %}{% set n.t = n.t ~ n.t %}{% endfor %}",
    "list that doubles": "{% set n = namespace(t=[1]) %}{% for i in range(60) %}{% set n.t = n.t + n.t %}{% endfor %}",
    "nested too deep": "{{ " + "(" * 400 + "1" + ")" * 400 + " }}",
    "blocks nested too deep": "{% if 1 %}" * 300 + "{% endif %}" * 300,
    "operators nested too deep": "{{ " + "not " * 3000 + "1 }}",
    "no template": "{% for",
}

SLOW = {
    "loops in loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "power of what a row holds": "{% set n = messages | length + 7 %}{{ (n ** 9999999) ** 99 > 0 }}",
}


def _renderer(tmp_path: Path, template: str) -> Renderer:
    path = tmp_path / "t.jinja"
    path.write_text(template, encoding="utf-8")
    tokenizer = load_tokenizer(ModelConfig(name_or_path="bundled:tiny-gemma2"), offline=True)
    return Renderer(tokenizer, str(path))


@pytest.mark.parametrize("name", FAILS)
def test_a_template_that_fails_refuses_the_row(tmp_path: Path, name: str) -> None:
    begun = time.process_time()
    with pytest.raises(FtcliError) as caught:
        _renderer(tmp_path, FAILS[name]).text(CHAT, ROW)
    finding = caught.value.findings[0]
    assert (finding.code, caught.value.exit_code) == ("FT422", ExitCode.DATA)
    assert finding.help
    assert finding.origin == ROW.origin
    assert len(finding.message) < 1000
    assert time.process_time() - begun < 60  # what doubles 60 times ends in no time that there is


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fifth of a second may be wasted instead of three seconds."""
    monkeypatch.setattr(limits, "MAX_SECONDS", 0.2)


@pytest.mark.parametrize("name", SLOW)
def test_a_template_that_does_not_end_is_stopped_once(
    tmp_path: Path, name: str, impatient: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    renderer = _renderer(tmp_path, SLOW[name])
    limited, runs = limits.limited_template, []

    def counted(*given: float) -> contextlib.AbstractContextManager[None]:
        runs.append(given)
        return limited(*given)

    monkeypatch.setattr(limits, "limited_template", counted)
    for number in (1, 2):
        with pytest.raises(FtcliError, match="FT422: the chat template was stopped") as caught:
            renderer.text(CHAT, Row("rows.jsonl", number, {}))
        assert caught.value.exit_code == ExitCode.DATA
    assert len(runs) == 1


def test_a_template_that_is_slow_again_and_again_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """By what it has wasted in all: the last time takes no longer than the first."""
    monkeypatch.setattr(limits, "MAX_SECONDS", 0.5)
    allowance = limits.Allowance()

    def write() -> str:
        begun = time.process_time()
        while time.process_time() - begun < 0.3:
            pass
        return "text"

    assert allowance.run(10, write) == "text"
    with contextlib.suppress(TemplateStopped):
        allowance.run(10, write)
    with pytest.raises(TemplateStopped, match="too slow"):
        allowance.run(10, write)


def test_time_and_memory_are_bounded() -> None:
    with pytest.raises(TemplateStopped, match="far too slow"), limited_template(seconds=0.2):
        _spin()
    with pytest.raises(TemplateStopped, match=r"64.00 MiB of memory"), limited_template(spare=64 * 2**20):
        bytearray(2**31)  # more than the process may have left of what was freed before
    assert len(bytearray(2**28)) == 2**28  # and no longer


def test_code_that_takes_the_signal_for_its_own_error_gets_it_again() -> None:
    seen: list[TemplateStopped] = []

    def stubborn() -> None:
        while len(seen) < 3:
            try:
                _spin()
            except TemplateStopped as error:
                seen.append(error)
        raise seen[-1]

    with pytest.raises(TemplateStopped), limited_template(seconds=0.1):
        stubborn()
    assert len(seen) == 3


def _spin() -> None:
    while True:
        pass


def test_another_thread_changes_no_limit_of_the_process() -> None:
    import resource

    before = resource.getrlimit(resource.RLIMIT_AS)
    found: list[object] = []

    def work() -> None:
        with limited_template(seconds=0.01):
            found.append(resource.getrlimit(resource.RLIMIT_AS))
            time.sleep(0.05)
            found.append("ended")

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [before, "ended"]


def test_nothing_is_left_behind() -> None:
    import resource
    import signal

    before = (signal.getsignal(signal.SIGPROF), resource.getrlimit(resource.RLIMIT_AS))
    for error in (*REFUSALS[:2], KeyboardInterrupt):
        with pytest.raises(error), limited_template():
            raise error("x")
    assert (signal.getsignal(signal.SIGPROF), resource.getrlimit(resource.RLIMIT_AS)) == before
    assert signal.getitimer(signal.ITIMER_PROF) == (0.0, 0.0)
