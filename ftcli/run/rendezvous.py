"""Where the ranks of a run find each other, before they are connected."""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from torch._C._distributed_c10d import TCPStore

from ftcli.errors import ExitCode, FtcliError, first_line
from ftcli.ranks import ENDED_NAME, PORT_NAME, Place, lost_name

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

#: How long the first attempt to reach rank 0 may take.
_FIRST_SECONDS = 2.0


def meeting_point(place: Place, seconds: float, *, client: bool = False) -> Store:
    """The store through which ranks find each other. Raises FtcliError FT712 when there is none within ``seconds``."""
    timeout = timedelta(seconds=min(seconds, 60.0))
    serves = place.leads and not place.hosted and not client
    try:
        if place.port is not None:
            return TCPStore(place.address, place.port, None, serves, timeout, wait_for_workers=False)
        assert place.folder is not None
        told = place.folder / PORT_NAME
        if serves:
            store = TCPStore(place.address, 0, None, True, timeout, wait_for_workers=False)
            aside = told.with_suffix(".new")
            aside.write_text(str(store.port), encoding="utf-8")
            aside.rename(told)
        else:
            store = _joined(place, told, seconds)
        store.set_timeout(timedelta(seconds=min(seconds, 10.0)))
        return store
    except (RuntimeError, TimeoutError, OSError) as error:
        raise FtcliError.single(
            "FT712",
            f"rank {place.rank} of {place.size} finds no other rank at {place.address}:{place.port}: "
            f"{first_line(error)[:200]}",
            exit_code=ExitCode.PREFLIGHT,
            help="start all ranks at once, with torchrun or `ftcli train --gpus N`; or unset RANK, WORLD_SIZE and "
            "MASTER_ADDR if they were left in the environment",
        ) from error


def _joined(place: Place, told: Path, seconds: float) -> TCPStore:
    """The store of rank 0, which says its port in the file ``told``. Raises TimeoutError when there will be none.

    torch tries to reach a rank 0 that has ended for as long as it may, so that an attempt is short at first; the next
    has twice as long, on a machine that is slow.
    """
    deadline, attempt = time.monotonic() + seconds, _FIRST_SECONDS
    why = "rank 0 has not said where it is"
    while time.monotonic() < deadline:
        if any((place.folder / name).exists() for name in (ENDED_NAME, lost_name(0)) if place.folder is not None):
            raise TimeoutError("rank 0 has ended")
        if told.exists():
            port = int(told.read_text(encoding="utf-8"))
            try:
                return TCPStore(place.address, port, None, False, timedelta(seconds=attempt), wait_for_workers=False)
            except RuntimeError as error:
                why, attempt = first_line(error), 2 * attempt
        time.sleep(0.02)
    raise TimeoutError(why)
