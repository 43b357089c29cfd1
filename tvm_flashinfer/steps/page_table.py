"""Which pages a sequence has: the part of a paged KV cache that is on the host."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager

import numpy as np


class OutOfPagesError(RuntimeError):
    """A step needs more pages than are free. Nothing was changed: remove sequences and try again.

    Attributes
    ----------
    needed, free : int
        Pages.
    """

    def __init__(self, needed: int, free: int, num_pages: int) -> None:
        super().__init__(
            f"the step needs {needed} pages more, and {free} of {num_pages} are free; remove a "
            "sequence, or make the runner with a larger num_pages"
        )
        self.needed, self.free = needed, free


class PageTable:
    """Sequences and their pages.

    Parameters
    ----------
    num_pages : int
        Pages in the pool of each layer; all layers use the same ones.
    page_size : int
        Tokens of a page.
    max_seq_len : int
        Most tokens of a sequence: what a row of the table has room for.
    """

    def __init__(self, num_pages: int, page_size: int, max_seq_len: int) -> None:
        for name, value in (("num_pages", num_pages), ("max_seq_len", max_seq_len)):
            if value < 1:
                raise ValueError(f"got {name} {value}, expected a positive number")
        self.num_pages, self.page_size = num_pages, page_size
        self.max_seq_len = max_seq_len
        self.row_pages = -(-max_seq_len // page_size)
        self._free = list(range(num_pages - 1, -1, -1))
        self._rows: dict[int, np.ndarray] = {}
        self._lengths: dict[int, int] = {}

    @property
    def num_free(self) -> int:
        """Pages that belong to no sequence."""
        return len(self._free)

    @property
    def lengths(self) -> Mapping[int, int]:
        """Tokens of each sequence."""
        return self._lengths

    def add(self, seq_id: int) -> None:
        """Start an empty sequence."""
        if seq_id in self._lengths:
            raise ValueError(f"sequence {seq_id} is there already; remove it first")
        self._lengths[seq_id] = 0
        self._rows[seq_id] = np.empty(self.row_pages, np.int32)

    def remove(self, seq_id: int) -> None:
        """End a sequence; its pages are free again."""
        self.pop(seq_id, self.length(seq_id))
        del self._lengths[seq_id], self._rows[seq_id]

    def length(self, seq_id: int) -> int:
        """Return the tokens of a sequence."""
        if seq_id not in self._lengths:
            raise ValueError(f"there is no sequence {seq_id}; there are {sorted(self._lengths)}")
        return self._lengths[seq_id]

    def check(self, counts: Mapping[int, int]) -> dict[int, int]:
        """Return the pages that sequences need for so many tokens more.

        Raises
        ------
        ValueError
            For a sequence that is not there, and one that would be longer than a row.
        OutOfPagesError
            When the pool has too few free pages.
        """
        missing = {seq_id: self._missing(seq_id, count) for seq_id, count in counts.items()}
        needed = sum(missing.values())
        if needed > self.num_free:
            raise OutOfPagesError(needed, self.num_free, self.num_pages)
        return missing

    def append(self, counts: Mapping[int, int]) -> None:
        """Make room for tokens at the ends of sequences: for all, or for none, as `check` says."""
        missing = self.check(counts)
        for seq_id, count in counts.items():
            at = self._num_pages(self._lengths[seq_id])
            for i in range(missing[seq_id]):
                self._rows[seq_id][at + i] = self._free.pop()
            self._lengths[seq_id] += count

    def pop(self, seq_id: int, count: int) -> None:
        """Drop the last tokens of a sequence; pages without tokens are free again."""
        length = self.length(seq_id)
        if not 0 <= count <= length:
            raise ValueError(
                f"cannot drop {count} tokens of sequence {seq_id}, which has {length}; expected 0 "
                f"to {length}"
            )
        kept = self._num_pages(length - count)
        self._free += self._rows[seq_id][kept : self._num_pages(length)][::-1].tolist()
        self._lengths[seq_id] = length - count

    @contextmanager
    def kept_on_error(self, seq_ids: Collection[int]) -> Iterator[None]:
        """Drop what the block appends to sequences when it raises."""
        before = {seq_id: self.length(seq_id) for seq_id in seq_ids}
        try:
            yield
        except BaseException:
            for seq_id, length in before.items():
                self.pop(seq_id, self.length(seq_id) - length)
            raise

    def pages(self, seq_id: int) -> np.ndarray:
        """Return the pages of a sequence, int32."""
        return self._rows[seq_id][: self._num_pages(self.length(seq_id))]

    def last_page_len(self, seq_id: int) -> int:
        """Return the tokens in the last page of a sequence, 0 for an empty one."""
        length = self.length(seq_id)
        return length and (length - 1) % self.page_size + 1

    def slots(self, seq_id: int, count: int) -> np.ndarray:
        """Return where the last tokens of a sequence lie, ``page * page_size + offset``, int32."""
        length = self.length(seq_id)
        at = np.arange(length - count, length, dtype=np.int32)
        return self._rows[seq_id][at // self.page_size] * self.page_size + at % self.page_size

    def write(
        self,
        seq_ids: Collection[int],
        indptr: np.ndarray,
        indices: np.ndarray,
        last_page_len: np.ndarray,
    ) -> int:
        """Write the table of some sequences; rows after theirs have no pages.

        Parameters
        ----------
        seq_ids : collection of int
            Not more than rows.
        indptr, indices, last_page_len : numpy.ndarray
            (B + 1,), (any,) and (B,) of int32.

        Returns
        -------
        count : int
            How many indices were written.
        """
        rows = [self.pages(seq_id) for seq_id in seq_ids]
        n = len(rows)
        indptr[0] = 0
        np.cumsum([len(row) for row in rows], out=indptr[1 : n + 1])
        count = int(indptr[n])
        indptr[n + 1 :] = count
        if rows:
            np.concatenate(rows, out=indices[:count])
        last_page_len[:n] = [self.last_page_len(seq_id) for seq_id in seq_ids]
        last_page_len[n:] = 0
        return count

    def _num_pages(self, length: int) -> int:
        return -(-length // self.page_size)

    def _missing(self, seq_id: int, count: int) -> int:
        """Return the pages that a sequence needs for tokens more."""
        length = self.length(seq_id)
        if length + count > self.max_seq_len:
            raise ValueError(
                f"sequence {seq_id} has {length} tokens and would have {length + count}; a row of "
                f"the page table has room for {self.max_seq_len}. Make the runner with a larger "
                "max_seq_len"
            )
        return self._num_pages(length + count) - self._num_pages(length)
