"""A compiled model served through a paged KV cache, with everything that TVM's cache offers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import tvm
from reference import Reference
from tvm_ffi import Shape

from examples.llama.generate import Model


def builtin(name: str) -> Callable[..., Any]:
    """Look up a function of TVM's runtime."""
    return tvm.get_global_func(f"vm.builtin.{name}")


class Served:
    """Sequences of one cache, with the methods of `reference.Reference`.

    Parameters
    ----------
    model : Model
        The compiled model.
    kind : str
        ``flashinfer`` for our cache, ``tir`` for TVM's.
    slides : bool
        Whether sequences may slide as a whole.
    """

    def __init__(
        self,
        model: Model,
        kind: str = "flashinfer",
        *,
        slides: bool = False,
        batch: int = 8,
        total: int = 1024,
        chunk: int = 256,
        page_size: int = 16,
    ) -> None:
        self.model = model
        create = model[f"create_{kind}_paged_kv_cache"]
        self.cache = create(*(Shape([n]) for n in (batch, total, chunk, page_size, int(slides))))

    def add(self, seq: int) -> None:
        """Start an empty sequence."""
        builtin("kv_state_add_sequence")(self.cache, seq)

    def fork(self, parent: int, child: int, at: int = -1) -> None:
        """Start a sequence from the first `at` tokens of another one, or from all of them."""
        builtin("kv_state_fork_sequence")(self.cache, parent, child, at)

    def pop(self, seq: int, count: int) -> None:
        """Take the last tokens from a sequence."""
        builtin("kv_state_popn")(self.cache, seq, count)

    def remove(self, seq: int) -> None:
        """Drop a sequence."""
        builtin("kv_state_remove_sequence")(self.cache, seq)

    def slide(self, seq: int, window: int, sink: int) -> None:
        """Let a sequence slide as a whole."""
        builtin("attention_kv_cache_enable_sliding_window_for_seq")(self.cache, seq, window, sink)

    def commit(self, leaves: Mapping[int, int]) -> None:
        """Keep the way to one node of the last tree of each sequence; -1 keeps no node."""
        commit = builtin("attention_kv_cache_commit_accepted_token_tree_nodes")
        commit(self.cache, Shape(list(leaves)), Shape(list(leaves.values())))

    def step(
        self,
        tokens: Mapping[int, Sequence[int]],
        trees: Mapping[int, Sequence[int]] | None = None,
    ) -> dict[int, np.ndarray]:
        """Append tokens and return the logits after each: (n, vocab_size) for each sequence."""
        counts = [len(ids) for ids in tokens.values()]
        parents = None if trees is None else Shape([p for seq in tokens for p in trees[seq]])
        builtin("kv_state_begin_forward")(self.cache, Shape(list(tokens)), Shape(counts), parents)
        ids = np.concatenate([np.asarray(ids) for ids in tokens.values()])
        if trees is None and set(counts) == {1}:
            logits = self.model.decode(ids, self.cache)
        else:
            function = self.function(tokens)
            logits = self.model.prefill(ids, np.arange(len(ids)), self.cache, function)
        builtin("kv_state_end_forward")(self.cache)
        return dict(zip(tokens, np.split(logits, np.cumsum(counts)[:-1]), strict=True))

    def function(self, seqs: Iterable[int]) -> str:
        """Name the model's function for a step with more than one token of some sequence."""
        return "prefill"


class ServedLatent(Served):
    """The same for a model with MLA, which has a function for steps on top of tokens."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.filled: set[int] = set()

    def fork(self, parent: int, child: int, at: int = -1) -> None:
        """Start a sequence from tokens of another one."""
        super().fork(parent, child, at)
        self.filled.add(child)

    def remove(self, seq: int) -> None:
        """Drop a sequence."""
        super().remove(seq)
        self.filled.discard(seq)

    def step(
        self,
        tokens: Mapping[int, Sequence[int]],
        trees: Mapping[int, Sequence[int]] | None = None,
    ) -> dict[int, np.ndarray]:
        """Append tokens and return the logits after each: (n, vocab_size) for each sequence."""
        logits = super().step(tokens, trees)
        self.filled.update(tokens)
        return logits

    def function(self, seqs: Iterable[int]) -> str:
        """Name the model's function for a step with more than one token of some sequence."""
        return "extend" if self.filled.intersection(seqs) else "prefill"


class Beside:
    """Gives the same steps to a served model and to a reference, and keeps the largest error."""

    def __init__(self, served: Served, reference: Reference) -> None:
        self.served, self.reference = served, reference
        self.error = 0.0

    def __getattr__(self, name: str) -> Callable[..., None]:
        """Edits, which both have: `add`, `fork`, `pop`, `remove`, `slide`."""

        def edit(*args: int) -> None:
            getattr(self.served, name)(*args)
            getattr(self.reference, name)(*args)

        return edit

    def step(
        self,
        tokens: Mapping[int, Sequence[int]],
        trees: Mapping[int, Sequence[int]] | None = None,
    ) -> dict[int, np.ndarray]:
        """Append tokens; return the logits of the reference."""
        got, expected = (side.step(tokens, trees) for side in (self.served, self.reference))
        for seq, logits in expected.items():
            error = np.abs(got[seq] - logits).max()
            self.error = max(self.error, float(np.inf if np.isnan(error) else error))
        return expected
