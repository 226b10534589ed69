"""What ranks learn of one that was killed."""

from __future__ import annotations

from pathlib import Path

from ftcli.ranks import Place, lost_name
from ftcli.run.heartbeat import killed


def test_a_word_of_the_launcher_counts_once_it_is_whole(tmp_path: Path) -> None:
    """A rank that looks while the file is being written saw an empty one, and said "was killed by :"."""
    place = Place(0, 2, folder=tmp_path)
    assert killed(place) is None
    (tmp_path / lost_name(1)).write_text("")
    assert killed(place) is None
    (tmp_path / lost_name(1)).write_text("was killed by SIGKILL")
    lost = killed(place)
    assert lost is not None
    assert lost.findings[0].message.startswith("rank 1 was killed by SIGKILL")
