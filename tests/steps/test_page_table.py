"""The page table of the step runner beside a dictionary of lists."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from fuzzing import budget
from hypothesis import given
from hypothesis import strategies as st

from tvm_flashinfer.steps import OutOfPagesError, PageTable

STEPS = st.lists(
    st.tuples(
        st.sampled_from(["add", "append", "pop", "remove"]),
        st.integers(0, 3),
        st.integers(0, 40),
    ),
    max_size=60,
)


def state(table: PageTable) -> dict[int, tuple[int, list[int]]]:
    """All that sequences have."""
    return {seq: (n, table.pages(seq).tolist()) for seq, n in table.lengths.items()}


@budget(60)
@given(steps=STEPS, page_size=st.integers(1, 9))
def test_random_steps(steps: list[tuple[str, int, int]], page_size: int) -> None:
    """No page has two owners, none is lost, tokens stay where they are, refusals change nothing."""
    table = PageTable(20, page_size, 60)
    slots: dict[int, list[int]] = {}
    for what, seq, count in steps:
        before = state(table)
        try:
            if what == "add":
                table.add(seq)
                slots[seq] = []
            elif what == "append":
                table.append({seq: count})
                slots[seq] += table.slots(seq, count).tolist()
            elif what == "pop":
                table.pop(seq, count)
                slots[seq] = slots[seq][: len(slots[seq]) - count]
            else:
                table.remove(seq)
                del slots[seq]
        except (ValueError, OutOfPagesError):
            assert state(table) == before
        for one, held in slots.items():
            assert table.slots(one, table.length(one)).tolist() == held
        owned = [page for _, pages in state(table).values() for page in pages]
        assert len(set(owned)) == len(owned) == 20 - table.num_free
        assert set(owned) <= set(range(20))
        used = [slot for held in slots.values() for slot in held]
        assert len(set(used)) == len(used)


def test_written_table() -> None:
    """Sequences in the order asked for; rows after them have no pages."""
    table = PageTable(20, 4, 20)
    for seq, count in ((7, 9), (3, 0), (5, 4)):
        table.add(seq)
        table.append({seq: count})
    indptr, indices, last = (np.full(n, -9, np.int32) for n in (6, 9, 5))
    assert table.write([5, 3, 7], indptr, indices, last) == 4
    assert indptr.tolist() == [0, 1, 1, 4, 4, 4]
    assert last.tolist() == [4, 0, 1, 0, 0]
    assert indices[:4].tolist() == [*table.pages(5), *table.pages(7)]
    assert indices[4:].tolist() == [-9] * 5


def test_all_or_none() -> None:
    """A step that one sequence has no room for gives no page to the others."""
    table = PageTable(4, 4, 100)
    table.add(0)
    table.add(1)
    table.append({0: 8, 1: 4})
    before = state(table)
    with pytest.raises(OutOfPagesError) as caught:
        table.append({0: 1, 1: 1})
    assert (caught.value.needed, caught.value.free) == (2, 1)
    assert state(table) == before
    table.append({0: 1})
    table.remove(1)
    table.append({0: 4})


def test_kept_on_error() -> None:
    """What a failed step appended is dropped, and the error goes on."""
    table = PageTable(4, 4, 100)
    table.add(0)
    table.append({0: 3})
    before = state(table)

    def step() -> None:
        with table.kept_on_error([0]):
            table.append({0: 6})
            raise KeyError("a failed call")

    with pytest.raises(KeyError, match="a failed call"):
        step()
    assert state(table) == before
    assert table.num_free == 3


REFUSALS: list[tuple[Callable[[PageTable], Any], str]] = [
    (lambda t: t.add(0), "sequence 0 is there already"),
    (lambda t: t.remove(9), r"there is no sequence 9; there are \[0\]"),
    (lambda t: t.append({9: 1}), "there is no sequence 9"),
    (lambda t: t.append({0: 8}), "has 3 tokens and would have 11; a row .* room for 10.*max_seq"),
    (lambda t: t.pop(0, 4), "cannot drop 4 tokens of sequence 0, which has 3"),
    (lambda t: t.pop(0, -1), "cannot drop -1 tokens"),
    (lambda _: PageTable(0, 4, 10), "got num_pages 0"),
    (lambda _: PageTable(4, 4, 0), "got max_seq_len 0"),
]


@pytest.mark.parametrize(("call", "says"), REFUSALS, ids=[says[:24] for _, says in REFUSALS])
def test_refusals(call: Callable[[PageTable], Any], says: str) -> None:
    table = PageTable(9, 4, 10)
    table.add(0)
    table.append({0: 3})
    with pytest.raises(ValueError, match=says):
        call(table)


def test_out_of_pages_says_what_to_do() -> None:
    table = PageTable(2, 4, 100)
    table.add(0)
    with pytest.raises(OutOfPagesError, match=r"3 pages more, and 2 of 2 are free; remove a seq"):
        table.append({0: 9})
