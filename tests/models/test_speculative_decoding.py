"""Decoding with drafts: a second model proposes trees of tokens, which the model checks in a step.

The text must be that of plain greedy decoding, whatever the drafts are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from reference import LlamaReference
from serving import Served

NUM_TOKENS = 48

#: Sequence in which the draft model follows a second branch.
BRANCH = 7


@dataclass
class Tree:
    """Tokens that may come next, and the node that each of them follows; -1 is the text."""

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)

    def add(self, token: int, parent: int) -> int:
        """Add a node and return its number."""
        self.tokens.append(token)
        self.parents.append(parent)
        return len(self.tokens) - 1


class Draft:
    """A model like the one that is served, but for some noise in its weights."""

    def __init__(self, tiny: Any, noise: float) -> None:
        rng = np.random.default_rng(11)
        weights = {
            name: array + noise * array.std() * rng.standard_normal(array.shape)
            for name, array in tiny.weights.items()
        }
        self.served = Served(tiny.with_weights(weights))
        self.after: dict[int, np.ndarray] = {}

    def add(self, seq: int, prompt: Sequence[int]) -> None:
        """Start a sequence."""
        self.served.add(seq)
        self.follow(seq, prompt)

    def follow(self, seq: int, tokens: Sequence[int]) -> None:
        """Take in tokens that were accepted."""
        self.after[seq] = self.served.step({seq: tokens})[seq][-1]

    def _chain(self, seq: int, tree: Tree, token: int, parent: int, length: int) -> None:
        """Add the greedy tokens that follow `token`, itself included."""
        for i in range(length):
            parent = tree.add(token, parent)
            if i + 1 < length:
                token = int(self.served.step({seq: [token]})[seq][-1].argmax())

    def chain(self, seq: int) -> Tree:
        """Four tokens, one after the other."""
        tree = Tree()
        self._chain(seq, tree, int(self.after[seq].argmax()), -1, 4)
        self.served.pop(seq, 3)
        return tree

    def forest(self, seq: int) -> Tree:
        """The three most likely tokens; the first two are followed by others."""
        tree = Tree()
        first, second, third = (int(token) for token in self.after[seq].argsort()[:-4:-1])
        self.served.fork(seq, BRANCH)
        self._chain(seq, tree, first, -1, 3)
        self._chain(BRANCH, tree, second, -1, 2)
        tree.add(third, -1)
        self.served.pop(seq, 2)
        self.served.remove(BRANCH)
        return tree

    def bush(self, seq: int) -> Tree:
        """One token, two that may follow it, and two that may follow each of those."""
        tree = Tree()
        root = int(self.after[seq].argmax())
        node = tree.add(root, -1)
        after = self.served.step({seq: [root]})[seq][-1]
        for token in after.argsort()[:-3:-1]:
            child = tree.add(int(token), node)
            below = self.served.step({seq: [int(token)]})[seq][-1]
            for leaf in below.argsort()[:-3:-1]:
                tree.add(int(leaf), child)
            self.served.pop(seq, 1)
        self.served.pop(seq, 1)
        return tree


@dataclass
class Text:
    """A sequence as it is written: its tokens, the logits after the last one, what was accepted."""

    after: np.ndarray
    tokens: list[int] = field(default_factory=list)
    logits: list[np.ndarray] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)

    def take(self, token: int, after: np.ndarray) -> None:
        """Write a token; `after` are the logits that follow it."""
        self.tokens.append(token)
        self.logits.append(self.after)
        self.after = after


class Speculation:
    """The loop of a serving engine: draft, verify, commit, for several sequences at a time.

    Parameters
    ----------
    choose : callable
        Gives the next token from a sequence, the number of the token, and the logits before it.
    """

    def __init__(
        self, tiny: Any, noise: float, choose: Callable[[int, int, np.ndarray], int]
    ) -> None:
        self.served, self.draft, self.choose = Served(tiny.model), Draft(tiny, noise), choose
        self.texts: dict[int, Text] = {}
        self.moved = 0  # commits of nodes that do not lie one behind the other

    def add(self, seq: int, prompt: Sequence[int]) -> None:
        """Start a text."""
        self.served.add(seq)
        self.texts[seq] = Text(self.served.step({seq: prompt})[seq][-1])
        self.draft.add(seq, prompt)

    def step(self, shapes: dict[int, str]) -> None:
        """Write at least one token of each sequence named, with a draft of that shape."""
        trees = {seq: getattr(self.draft, shape)(seq) for seq, shape in shapes.items()}
        logits = self.served.step(
            {seq: tree.tokens for seq, tree in trees.items()},
            {seq: tree.parents for seq, tree in trees.items()},
        )
        paths = {seq: self._walk(seq, tree, logits[seq]) for seq, tree in trees.items()}
        self.moved += sum(path != list(range(len(path))) for path in paths.values())
        self.served.commit({seq: path[-1] if path else -1 for seq, path in paths.items()})
        # The model knows one token more than the draft had right; it is written as in plain decode.
        following = {
            seq: self.choose(seq, len(self.texts[seq].tokens), self.texts[seq].after)
            for seq in trees
        }
        decoded = self.served.step({seq: [token] for seq, token in following.items()})
        for seq, token in following.items():
            text = self.texts[seq]
            text.take(token, decoded[seq][-1])
            count = len(paths[seq])
            text.accepted.append(count)
            self.draft.follow(seq, text.tokens[-count - 1 :])

    def _walk(self, seq: int, tree: Tree, logits: np.ndarray) -> list[int]:
        """Follow the tokens that the model itself would write, as far as the tree has them."""
        text, node, path = self.texts[seq], -1, []
        while True:
            wanted = self.choose(seq, len(text.tokens), text.after)
            candidates = zip(tree.tokens, tree.parents, strict=True)
            node = next((i for i, (t, p) in enumerate(candidates) if t == wanted and p == node), -1)
            if node < 0:
                return path
            path.append(node)
            text.take(wanted, logits[node])


@pytest.fixture(scope="module")
def prompts() -> dict[int, np.ndarray]:
    """They end inside a page, at the end of one, and behind several."""
    rng = np.random.default_rng(5)
    return {seq: rng.integers(0, 96, n) for seq, n in enumerate((7, 16, 45))}


def plain_greedy(
    tiny: Any, prompts: dict[int, np.ndarray], count: int
) -> dict[int, tuple[list[int], list[np.ndarray]]]:
    """Tokens and the logits before each, without drafts, one sequence at a time."""
    found = {}
    for seq, prompt in prompts.items():
        served = Served(tiny.model)
        served.add(0)
        logits = [served.step({0: prompt})[0][-1]]
        tokens = [int(logits[0].argmax())]
        while len(tokens) < count:
            logits.append(served.step({0: tokens[-1:]})[0][-1])
            tokens.append(int(logits[-1].argmax()))
        found[seq] = tokens, logits
    return found


@pytest.mark.parametrize("noise", [0.03, 0.3])
def test_text_is_that_of_plain_decoding(tiny, prompts: dict[int, np.ndarray], noise: float) -> None:
    """Three sequences in a batch, with drafts that are mostly right, and mostly wrong."""
    plain = plain_greedy(tiny, prompts, NUM_TOKENS + 8)

    def choose(seq: int, number: int, logits: np.ndarray) -> int:
        tokens, _ = plain[seq]
        if number >= len(tokens):
            return int(logits.argmax())
        best, next_best = np.sort(logits)[:-3:-1]
        # On CUDA the two best may be too close for float16, and then the other text is followed.
        tied = tiny.dtype != "float32" and best - next_best < tiny.tolerance
        return tokens[number] if tied else int(logits.argmax())

    loop = Speculation(tiny, noise, choose)
    for seq, prompt in prompts.items():
        loop.add(seq, prompt)
    rounds = [
        {0: "chain", 1: "chain", 2: "chain"},
        # TVM's cache compacts no tree of a batch whose last one is a chain.
        {1: "chain", 2: "forest", 0: "bush"},
        {0: "forest", 1: "forest"},
        {1: "bush", 2: "bush", 0: "bush"},
        {2: "chain"},
    ]
    number = 0
    while min(len(text.tokens) for text in loop.texts.values()) < NUM_TOKENS:
        loop.step(rounds[number % len(rounds)])
        number += 1
    accepted = [count for text in loop.texts.values() for count in text.accepted]
    assert max(accepted) >= 3
    # In bfloat16 small noise changes hardly a token.
    if tiny.dtype != "bfloat16" or noise > 0.1:
        assert 0 in accepted
        assert loop.moved >= 3
    for seq, (tokens, logits) in plain.items():
        text = loop.texts[seq]
        assert text.tokens[:NUM_TOKENS] == tokens[:NUM_TOKENS]
        got, expected = np.array(text.logits[:NUM_TOKENS]), np.array(logits[:NUM_TOKENS])
        np.testing.assert_allclose(got, expected, rtol=0, atol=2 * tiny.tolerance)


def test_plain_decoding_is_that_of_the_reference(tiny, prompts: dict[int, np.ndarray]) -> None:
    """So the text is right, and not only the same twice."""
    for seq, (tokens, logits) in plain_greedy(tiny, prompts, NUM_TOKENS).items():
        reference = LlamaReference(tiny.config, tiny.weights)
        reference.add(0)
        ids = [*prompts[seq], *tokens[:-1]]
        expected = reference.step({0: ids})[0][-NUM_TOKENS:]
        np.testing.assert_allclose(np.array(logits), expected, rtol=0, atol=tiny.tolerance)
        if tiny.dtype == "float32":
            assert list(expected.argmax(-1)) == tokens
