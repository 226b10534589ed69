"""Where the ranks of a run find each other, before they are connected."""

from __future__ import annotations

import socket
import time
from datetime import timedelta
from typing import TYPE_CHECKING

from torch._C._distributed_c10d import TCPStore

from ftcli.errors import ExitCode, FtcliError, first_line
from ftcli.ranks import ENDED_NAME, PORT_NAME, Place, lost_name

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


def meeting_point(place: Place, seconds: float, *, client: bool = False) -> Store:
    """The store through which ranks find each other. Raises FtcliError FT712 when there is none within ``seconds``."""
    timeout = timedelta(seconds=min(seconds, 60.0 if place.folder is None else 10.0))
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
            return store
        deadline = time.monotonic() + seconds
        while not (told.exists() and _answers(place.address, int(told.read_text(encoding="utf-8")))):
            if any((place.folder / name).exists() for name in (ENDED_NAME, lost_name(0))):
                raise TimeoutError("rank 0 has ended")  # torch would try for a minute
            if time.monotonic() > deadline:
                raise TimeoutError("rank 0 has not said where it is")
            time.sleep(0.02)
        port = int(told.read_text(encoding="utf-8"))
        return TCPStore(place.address, port, None, False, timeout, wait_for_workers=False)
    except (RuntimeError, TimeoutError, OSError) as error:
        raise FtcliError.single(
            "FT712",
            f"rank {place.rank} of {place.size} finds no other rank at {place.address}:{place.port}: "
            f"{first_line(error)[:200]}",
            exit_code=ExitCode.PREFLIGHT,
            help="start all ranks at once, with torchrun or `ftcli train --gpus N`; or unset RANK, WORLD_SIZE and "
            "MASTER_ADDR if they were left in the environment",
        ) from error


def _answers(address: str, port: int) -> bool:
    """Whether somebody listens there."""
    try:
        with socket.create_connection((address, port), timeout=2.0):
            return True
    except OSError:
        return False
