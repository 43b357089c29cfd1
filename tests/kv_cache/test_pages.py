"""Pages of the cache: none is lost, whatever the order of edits; all of them can be filled."""

from __future__ import annotations

import itertools

import pytest


def test_pages_are_given_back(drive_on) -> None:
    driver = drive_on("group1")
    free = driver.pages
    driver.add(0)
    driver.step([0], [40])
    assert driver.pages == free - 3
    driver.fork(0, 1)
    driver.remove(0)
    driver.remove(1)
    assert driver.pages == free


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))), ids=str)
def test_removal_in_any_order(order, drive_on) -> None:
    """Forks at the end of a page, inside of one, and of a fork; parents leave before children."""
    driver = drive_on("group1")
    free = driver.pages
    driver.add(0)
    driver.step([0], [40])
    driver.fork(0, 1, 16)
    driver.fork(0, 2, 21)
    driver.step([1], [20])
    driver.fork(1, 3)
    driver.step([3, 0, 2, 1], [16, 1, 3, 1])
    left = [0, 1, 2, 3]
    for seq in order:
        driver.remove(seq)
        left.remove(seq)
        if left:
            driver.step(left, [1] * len(left))
        for other in left:
            driver.check_contents(other)
    assert driver.error <= driver.tolerance
    assert driver.pages == free


@pytest.mark.parametrize("page_size", [16, 5])
def test_pop_of_whole_pages(page_size, drive_on) -> None:
    """The last page, full or not, then all that a fork has of its own, then a whole sequence."""
    driver = drive_on("group4", page_size=page_size)
    free = driver.pages
    driver.add(0)
    driver.step([0], [3 * page_size])
    assert driver.pages == free - 3
    driver.pop(0, page_size)
    assert driver.pages == free - 2
    driver.step([0], [1])
    driver.pop(0, 1)
    assert driver.pages == free - 2
    driver.fork(0, 1, page_size)
    driver.step([1, 0], [page_size + 2, 1])
    driver.pop(1, page_size + 2)
    driver.step([0, 1], [1, 1])
    driver.check_contents(0)
    driver.check_contents(1)
    driver.pop(1, 1)
    driver.remove(1)
    driver.pop(0, 2 * page_size + 2)
    driver.step([0], [4])
    driver.check_contents(0)
    driver.remove(0)
    assert driver.pages == free
    assert driver.error <= driver.tolerance


def test_filled_to_the_last_page(drive_on) -> None:
    """Three sequences take every page and every slot, by chunks and by decode; then once more."""
    driver = drive_on("group8", total=128, batch=3)
    free = driver.pages
    for _ in range(2):
        driver.add(0, 1, 2)
        driver.step([0, 1], [31, 17])
        driver.step([1, 2], [15, 16])
        driver.step([0], [1])
        assert driver.pages == free - 5
        while driver.pages > 0:
            driver.step([0], [16])
        assert driver.pages == 0
        driver.pop(2, 3)
        for _ in range(3):
            driver.step([2], [1])  # the last slots of the last page
        for seq in (0, 1, 2):
            driver.check_contents(seq)
        for seq in (1, 0, 2):
            driver.remove(seq)
        assert driver.pages == free
    assert driver.error < 1e-2  # float16


def test_more_than_all_pages(drive_on) -> None:
    """TVM says so."""
    driver = drive_on("group1", total=64)
    driver.add(0)
    driver.step([0], [16 * driver.pages])
    with pytest.raises(Exception, match="KV cache is full"):
        driver.step([0], [1])
