"""TVM's paged KV cache on our functions, driven by a state machine beside a float64 oracle.

What TVM refuses or gets wrong itself is left out; each such place says why.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from fuzzing import budget
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tvm_flashinfer.relax._compat import HAS_LAYER_WINDOW

MAX_SEQS = 6
MAX_CHUNK = 96


class CacheMachine(RuleBasedStateMachine):
    """Sequences that come, fork, grow, shrink and go.

    Parameters
    ----------
    make : callable
        Gives a driver for the name of a model.
    model : str
        Which model.
    slides : bool
        Whether sequences may slide as a whole.
    """

    def __init__(self, make: Callable[..., Any], model: str, *, slides: bool = False) -> None:
        super().__init__()
        self.make, self.model, self.slides = make, model, slides
        self.driver: Any = None
        self.live: list[int] = []
        # How many leading tokens of a sequence may lie in blocks that it shares, or shared.
        self.shared: dict[int, int] = {}

    @initialize(page_size=st.integers(1, 16), pages=st.integers(4, 40))
    def make_cache(self, page_size: int, pages: int) -> None:
        """Make a cache of few pages."""
        self.page_size = page_size
        self.driver = self.make(
            self.model,
            page_size=page_size,
            total=pages * page_size,
            batch=MAX_SEQS,
            chunk=MAX_CHUNK,
            support_sliding_window=int(self.slides),
        )
        self.pages = self.driver.pages
        # Windows of layers go by the last block of a sequence alone in TVM, so forks are wrong.
        self.forks = isinstance(self.driver.model.attn_kind, str)
        # TVM refuses trees where sequences slide.
        self.trees = not self.slides
        self.has_lse = self.forks and not self.driver.oracle.inline

    def length(self, seq: int) -> int:
        """Tokens of a sequence."""
        return self.driver.length(seq)

    def unused(self) -> int:
        """A number that no sequence has."""
        return min(set(range(MAX_SEQS)) - set(self.live))

    def is_sliding(self, seq: int) -> bool:
        """Whether a sequence slides."""
        return seq in self.driver.oracle.slides

    @precondition(lambda self: len(self.live) < MAX_SEQS and self.driver.pages > 0)
    @rule(n=st.integers(0, 24))
    def add(self, n: int) -> None:
        """A sequence without tokens, or with its prompt."""
        seq = self.unused()
        self.driver.add(seq)
        self.live.append(seq)
        self.shared[seq] = 0
        n = min(n, self.driver.pages * self.page_size)
        if n > 0:
            self.driver.step([seq], [n])

    @precondition(lambda self: len(self.live) > 1)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        """Drop a sequence."""
        seq = data.draw(st.sampled_from(self.live), "seq")
        self.driver.remove(seq)
        self.live.remove(seq)

    # A fork inside of a page takes one; where there is none TVM raises with its blocks half linked.
    @precondition(
        lambda self: self.forks and 0 < len(self.live) < MAX_SEQS and self.driver.pages > 0
    )
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        """Start a sequence from the first tokens of another one."""
        parent = data.draw(st.sampled_from(self.live), "parent")
        length, child = self.length(parent), self.unused()
        at = data.draw(st.integers(-1, length), "at")
        if self.is_sliding(parent):
            # TVM forks inside the sink alone. It loses count of the sink when the parent has slid
            # before, or is forked at its end.
            slide = self.driver.oracle.slides[parent]
            if not (0 <= at <= slide.sink and at < length < slide.window):
                return
        self.driver.fork(parent, child, at)
        self.live.append(child)
        at = length if at < 0 else at
        self.shared[child] = at
        self.shared[parent] = max(self.shared[parent], at)

    # As for forks: TVM forks a sequence to take tokens from what it shares.
    @precondition(lambda self: self.live and self.driver.pages > 0)
    @rule(data=st.data())
    def pop(self, data: st.DataObject) -> None:
        """Take the last tokens from a sequence."""
        # TVM does not count the offset of the window when it gives back pages.
        seq = data.draw(st.sampled_from(self.live), "seq")
        if self.is_sliding(seq):
            return
        n = data.draw(st.integers(0, self.length(seq)), "n")
        self.driver.pop(seq, n)

    @precondition(lambda self: self.slides and self.live)
    @rule(data=st.data())
    def slide(self, data: st.DataObject) -> None:
        """Let a sequence slide."""
        seq = data.draw(st.sampled_from(self.live), "seq")
        if self.is_sliding(seq):
            return
        # What is shared cannot slide: TVM takes it as part of the sink, whatever the sink is.
        sink = data.draw(st.integers(self.shared[seq], self.shared[seq] + 12), "sink")
        window = data.draw(st.integers(sink + 1, sink + 30), "window")
        self.driver.slide(seq, window, sink)

    def chosen(self, data: st.DataObject, most: int) -> tuple[list[int], list[int]]:
        """Some sequences in some order, and how many tokens they get, as the free pages allow."""
        order = data.draw(st.permutations(self.live), "order")
        seqs, lens = [], []
        free, room = self.driver.pages, MAX_CHUNK
        for seq in order[: data.draw(st.integers(1, len(order)), "batch")]:
            n = data.draw(st.integers(1, most), "n")
            n = min(n, free * self.page_size, room)
            if n > 0:
                free -= -(-n // self.page_size)
                room -= n
                seqs.append(seq)
                lens.append(n)
        return seqs, lens

    @precondition(lambda self: self.live and self.driver.pages > 0)
    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        """Prompts, and chunks on what is there."""
        self.driver.step(*self.chosen(data, 24), with_lse=self.has_lse)

    @precondition(lambda self: self.live and self.driver.pages > 0)
    @rule(data=st.data())
    def decode(self, data: st.DataObject) -> None:
        """One token for each of some sequences, a few times."""
        seqs, lens = self.chosen(data, 1)
        for _ in range(data.draw(st.integers(1, 4), "steps")):
            if self.driver.pages >= len(seqs):
                self.driver.step(seqs, lens, with_lse=self.has_lse)

    @precondition(lambda self: self.trees and self.live and self.driver.pages > 0)
    @rule(data=st.data())
    def tree(self, data: st.DataObject) -> None:
        """A tree for each of some sequences, of which a way to a leaf, or nothing, is kept.

        TVM commits the trees of one step alone, so none grows here.
        """
        # There is no window inside a tree, and on CPU a way that is longer is refused.
        seqs, lens = self.chosen(data, min(9, self.driver.model.layer_window))
        trees = [[data.draw(st.integers(-1, i - 1), "parent") for i in range(n)] for n in lens]
        # TVM moves no tokens at all when the tree of the last sequence is a chain.
        order = sorted(range(len(seqs)), key=lambda i: trees[i] != list(range(-1, lens[i] - 1)))
        seqs, lens, trees = ([x[i] for i in order] for x in (seqs, lens, trees))
        self.driver.step(seqs, lens, trees)
        leaves = [data.draw(st.integers(-1, n - 1), "leaf") for n in lens]
        self.driver.commit_all(seqs, leaves, trees)

    @precondition(lambda self: self.live and 0 < self.driver.pages < 10)
    @rule(data=st.data())
    def fill(self, data: st.DataObject) -> None:
        """Take the last pages."""
        seq = data.draw(st.sampled_from(self.live), "seq")
        while self.driver.pages and not self.is_sliding(seq):
            self.driver.step([seq], [min(self.driver.pages * self.page_size, MAX_CHUNK)])

    @precondition(lambda self: self.live and self.driver.pages == 0)
    @rule(data=st.data())
    def overfill(self, data: st.DataObject) -> None:
        """TVM says so, and has changed lengths by then: the cache is of use when it is cleared."""
        seq = data.draw(st.sampled_from(self.live), "seq")
        if self.is_sliding(seq):
            return
        with pytest.raises(Exception, match="KV cache is full"):
            self.driver.step([seq], [self.page_size + 1])
        self.clear()

    @precondition(lambda self: self.live)
    @rule(chance=st.integers(0, 9))
    def clear_now_and_then(self, chance: int) -> None:
        """Drop all sequences in one of ten cases."""
        if chance == 9:
            self.clear()

    def clear(self) -> None:
        """Drop all sequences, which gives back all pages."""
        self.driver.clear()
        self.live.clear()
        assert self.driver.pages == self.pages

    @precondition(lambda self: self.forks and self.live)  # TVM reads no layer that slides
    @rule(data=st.data())
    def contents(self, data: st.DataObject) -> None:
        """Read a sequence back."""
        seq = data.draw(st.sampled_from(self.live), "seq")
        if self.length(seq) > 0:
            self.driver.check_contents(seq)

    @invariant()
    def is_right(self) -> None:
        """Every output was, and no token was lost."""
        if self.driver is not None:
            assert self.driver.error <= self.driver.tolerance
            assert self.driver.total_length == sum(map(self.length, self.live))

    def teardown(self) -> None:
        """Read all sequences back and drop them; then no page is missing."""
        if self.driver is None:
            return
        for seq in list(self.live):
            if self.forks and self.length(seq) > 0:
                self.driver.check_contents(seq)
            self.driver.remove(seq)
        assert self.driver.error <= self.driver.tolerance
        assert self.driver.pages == self.pages
        assert self.driver.is_empty


def run(examples: int, *args: Any, **kwargs: Any) -> None:
    run_state_machine_as_test(
        lambda: CacheMachine(*args, **kwargs), settings=budget(examples, stateful_step_count=40)
    )


@pytest.mark.parametrize("model", ["group1", "group3", "group4", "head64", "head64_group4"])
def test_sequences(model: str, drive_on) -> None:
    run(10, drive_on, model)


@pytest.mark.parametrize("model", ["group1", "group4", "inline_rope"])
def test_sequences_that_slide(model: str, drive_on) -> None:
    run(10, drive_on, model, slides=True)


@pytest.mark.skipif(not HAS_LAYER_WINDOW, reason="TVM 0.26 fixes the window of layers at 1024")
@pytest.mark.parametrize("model", ["window24", "window7_group4"])
def test_layers_that_slide(model: str, drive_on) -> None:
    run(10, drive_on, model)
