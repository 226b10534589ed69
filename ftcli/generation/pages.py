"""Which pages of the key-value cache are free. On the host alone: lengths are known here without asking the device."""

from __future__ import annotations

from collections.abc import Iterable


class PagePool:
    """Pages 1 to ``count - 1``, each in use by any number of sequences. Page 0 is nobody's: empty rows point at it."""

    def __init__(self, count: int) -> None:
        self._free = list(range(count - 1, 0, -1))
        self._users = [0] * count

    @property
    def free(self) -> int:
        """Pages that nobody uses."""
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """Pages for one user. Raises ValueError when there are not so many."""
        if count > len(self._free):
            raise ValueError(f"{count} pages asked for, {len(self._free)} free")
        pages = [self._free.pop() for _ in range(count)]
        self.share(pages)
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """One more user of each page."""
        for page in pages:
            self._users[page] += 1

    def give_back(self, pages: Iterable[int]) -> None:
        """One user less; a page without users is free. Raises ValueError for a page that has none."""
        for page in pages:
            if self._users[page] == 0:
                raise ValueError(f"page {page} is free already")
            self._users[page] -= 1
            if self._users[page] == 0:
                self._free.append(page)
