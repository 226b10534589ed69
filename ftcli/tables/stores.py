"""Storage to read from and to mirror to: what may stand before `://`, one row each. fsspec opens them all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ftcli.tables import Package


@dataclass(frozen=True, slots=True)
class Store:
    """One kind of storage.

    Attributes:
        package: What fsspec needs for it, as it is imported, and how to install that; None: nothing more.
        errors: Code: exceptions of its client that are no OSError.
        mirrors: Checkpoints may be written there.
    """

    title: str
    package: Package | None = None
    errors: tuple[str, ...] = ()
    folders: bool = True
    mirrors: bool = True


_S3 = Store(
    "S3",
    Package("s3fs", "ftcli[remote]", "data and checkpoints in S3"),
    ("botocore.exceptions:BotoCoreError", "botocore.exceptions:ClientError"),
)
_GS = Store(
    "Google Cloud Storage",
    Package("gcsfs", "ftcli[remote]", "data and checkpoints in Google Cloud Storage"),
    ("gcsfs.retry:HttpError", "google.auth.exceptions:GoogleAuthError"),
)
_HTTP = Store(
    "the web", Package("aiohttp", "ftcli[remote]", "data at https://"), ("aiohttp:ClientError",), False, False
)
_HUB = Store("the Hugging Face Hub", None, ("huggingface_hub.errors:HfHubHTTPError",))

TABLE: Mapping[str, Store] = {"s3": _S3, "gs": _GS, "gcs": _GS, "https": _HTTP, "http": _HTTP, "hf": _HUB}


def scheme_of(path: str) -> str | None:
    """The scheme before `://`, where a row has it; None for every other path."""
    scheme, separator, _ = path.partition("://")
    return scheme if separator and scheme in TABLE else None


def of(path: str) -> Store | None:
    """The storage that a path names; None for a path of this machine."""
    scheme = scheme_of(path)
    return None if scheme is None else TABLE[scheme]


def names(*, mirrors: bool = False) -> tuple[str, ...]:
    """Schemes that may stand before `://`; with ``mirrors``, those where checkpoints may be written."""
    return tuple(name for name, row in TABLE.items() if row.mirrors or not mirrors)
