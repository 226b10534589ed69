"""The command ``ftcli``, and ``python -m ftcli``: starts answering signals in our own words as soon as possible.

This file imports only what Python has imported already, not even ``__future__``: Ctrl-C before :func:`main` begins ends
in Python's own traceback.
"""

import os
import sys

#: ``ftcli.errors.ExitCode.INTERRUPTED``, and FT191; importing them would take as long as what is guarded here.
_INTERRUPTED = 130
_LINE = b"ftcli: note[FT191]: interrupted\n"


def main() -> int:
    """Runs the command line of this process and returns its status; Ctrl-C before anything has begun is 130 as well."""
    try:
        # Built in: `signal` itself would import enum and others before there is a handler.
        import _signal as signal  # type: ignore[import-not-found]

        # Not by an exception: in a callback of the import system it would be printed and forgotten.
        ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # nohup and shells' `&` ignore it
        if ours:
            signal.signal(signal.SIGINT, _leave)
        _without_working_folder()
        from ftcli.cli.app import main as run

        if ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        status = run()
        if ours:  # everything is written: it is too late to interrupt; Python's own end would show a traceback
            signal.signal(signal.SIGINT, lambda *_: os._exit(status))
        from ftcli.cli.environment import leave, place_of

        if place_of(os.environ) is not None:
            leave(status)
        return status
    except KeyboardInterrupt:
        _say()
        return _INTERRUPTED


def _leave(*_: object) -> None:
    _say()
    os._exit(_INTERRUPTED)


def _say() -> None:
    try:
        os.write(2, _LINE)  # no stream may be in the middle of something
    except OSError:
        return


def _without_working_folder() -> None:
    """Takes the folder in which the user works out of the places where packages are looked for.

    ``python -m`` puts it before all others. A folder there that is called `wandb` or `lm_eval`, where somebody's
    results lie, would pass for the package of that name. In a checkout that is not installed, ftcli itself comes from
    there; then it is the last place.
    """
    if not sys.path or sys.flags.safe_path or sys.path[0] not in ("", os.getcwd()):  # noqa: PTH109 - pathlib takes longer
        return
    folder = sys.path.pop(0)
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # noqa: PTH100, PTH120
    if os.path.realpath(package) == os.path.realpath(folder or os.curdir) and package not in sys.path:
        sys.path.append(package)


if __name__ == "__main__":
    sys.exit(main())
