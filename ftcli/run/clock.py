"""Time as it is written into files."""

from __future__ import annotations

from datetime import UTC, datetime


def utc_now() -> str:
    """Now, as ISO 8601 in UTC to the second: ``2026-11-21T03:30:00Z``."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
