"""Pages are used by whom they were given to, and free when nobody uses them."""

from __future__ import annotations

import pytest

from ftcli.generation.cache import PagePool


def test_a_page_is_free_when_its_last_user_has_given_it_back() -> None:
    pool = PagePool(6)
    mine = pool.take(3)
    pool.share(mine[:2])
    assert len({*mine}) == 3
    assert 0 not in mine
    assert pool.free == 2
    pool.give_back(mine)
    assert pool.free == 3
    pool.give_back(mine[:2])
    assert pool.free == 5
    with pytest.raises(ValueError, match="free already"):
        pool.give_back(mine[:1])
    with pytest.raises(ValueError, match="6 pages asked for, 5 free"):
        pool.take(6)
