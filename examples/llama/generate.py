"""Running a compiled model: sequences in a paged KV cache, prefill, decode, greedy text."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from pathlib import Path

import numpy as np
import tvm
from tvm_ffi import Shape

from .compile import library_info, physical_cores


class Model:
    """A compiled library with its weights on a device.

    Parameters
    ----------
    library : Path
        What `compile_model` returned.
    weights : sequence of np.ndarray
        In the order of ``library_info(library)["params"]``.
    device : tvm.runtime.Device
        Where to run.
    """

    def __init__(
        self, library: Path, weights: Sequence[np.ndarray], device: tvm.runtime.Device
    ) -> None:
        # TVM takes half of the processors for hardware threads, which leaves half of the cores idle
        # where they are not. It reads this when it first runs something in parallel.
        os.environ.setdefault("TVM_NUM_THREADS", str(physical_cores()))
        self.device = device
        self.info = library_info(library)
        if "flashinfer" in self.info["kv_cache_slots"]:
            import tvm_flashinfer  # noqa: F401  registers the functions that the library calls
        module = tvm.runtime.load_module(str(library))
        self._vm = tvm.runtime.vm.VirtualMachine(module, device)
        self._weights = [tvm.runtime.tensor(array, device) for array in weights]

    @property
    def params(self) -> dict[str, tvm.runtime.Tensor]:
        """The weights on the device by their names."""
        return dict(zip(self.info["params"], self._weights, strict=True))

    def __getitem__(self, name: str) -> Callable:
        """Look up a function of the library."""
        return self._vm[name]

    def prefill(
        self,
        ids: np.ndarray,
        logit_positions: np.ndarray,
        cache: object,
        function: str = "prefill",
    ) -> np.ndarray:
        """Run ``prefill``: ids (n,), rows (m,) -> logits (m, vocab_size) float32 on the host."""
        ids, rows = self._int32(ids[None]), self._int32(logit_positions)
        return self._vm[function](ids, rows, cache, self._weights).numpy()[0]

    def decode(self, ids: np.ndarray, cache: object) -> np.ndarray:
        """Run ``decode``: ids (batch,) -> logits (batch, vocab_size) float32 on the host."""
        return self._vm["decode"](self._int32(ids[:, None]), cache, self._weights).numpy()[:, 0]

    def _int32(self, array: np.ndarray) -> tvm.runtime.Tensor:
        return tvm.runtime.tensor(np.ascontiguousarray(array, dtype=np.int32), self.device)


class Session:
    """Sequences that share one paged KV cache.

    Parameters
    ----------
    model : Model
        The model to run.
    kv_cache : str
        The kind of cache: ``tir`` or ``flashinfer``, one that the library was compiled with.
    max_batch_size : int
        Sequences in the cache at one time.
    max_total_seq_len : int
        Tokens in the cache, over all sequences.
    prefill_chunk_size : int
        Most tokens of one prefill step; longer prompts take several steps.
    page_size : int
        Tokens of a page. TVM's CPU kernels know only 16.
    """

    def __init__(
        self,
        model: Model,
        kv_cache: str = "tir",
        max_batch_size: int = 4,
        max_total_seq_len: int = 2048,
        prefill_chunk_size: int = 512,
        page_size: int = 16,
    ) -> None:
        kinds = sorted(model.info["kv_cache_slots"])
        if kv_cache not in kinds:
            raise ValueError(
                f"got KV cache {kv_cache!r}, but the library was compiled with {kinds}; "
                "name it in kv_caches of compile_model"
            )
        self.model = model
        self.prefill_chunk_size = prefill_chunk_size
        sizes = (max_batch_size, max_total_seq_len, prefill_chunk_size, page_size)
        no_sliding_window = 0
        self.cache = model[f"create_{kv_cache}_paged_kv_cache"](
            *(Shape([size]) for size in (*sizes, no_sliding_window))
        )
        self.lengths: dict[int, int] = {}

    def add(self, seq_id: int) -> None:
        """Start an empty sequence."""
        _state("add_sequence")(self.cache, seq_id)
        self.lengths[seq_id] = 0

    def fork(self, parent: int, child: int, position: int = -1) -> None:
        """Start a sequence that shares the first ``position`` tokens of another (-1: all)."""
        _state("fork_sequence")(self.cache, parent, child, position)
        self.lengths[child] = self.lengths[parent] if position < 0 else position

    def pop(self, seq_id: int, count: int) -> None:
        """Drop the last ``count`` tokens of a sequence."""
        _state("popn")(self.cache, seq_id, count)
        self.lengths[seq_id] -= count

    def remove(self, seq_id: int) -> None:
        """End a sequence and free its pages."""
        _state("remove_sequence")(self.cache, seq_id)
        del self.lengths[seq_id]

    def prefill(
        self, tokens: Mapping[int, Sequence[int]], all_positions: bool = False
    ) -> dict[int, np.ndarray]:
        """Append tokens to sequences, in steps of at most ``prefill_chunk_size`` tokens.

        Parameters
        ----------
        tokens : mapping of int to sequence of int
            At least one token for each sequence; sequences are batched as they fit.
        all_positions : bool
            Return the logits after each token rather than after the last.

        Returns
        -------
        logits : dict of int to np.ndarray
            (vocab_size,) float32 for each sequence, or (n, vocab_size) with ``all_positions``.
        """
        if empty := [seq_id for seq_id, ids in tokens.items() if len(ids) == 0]:
            raise ValueError(f"got no tokens for sequences {empty}, expected at least one each")
        parts: dict[int, list[np.ndarray]] = {seq_id: [] for seq_id in tokens}
        for step in self._steps(tokens):
            counts = [len(ids) for _, ids in step]
            ends = np.cumsum(counts)
            rows = np.arange(ends[-1]) if all_positions else ends - 1
            with _Forward(self, [seq_id for seq_id, _ in step], counts) as cache:
                logits = self.model.prefill(np.concatenate([ids for _, ids in step]), rows, cache)
            split = np.split(logits, ends[:-1] if all_positions else len(step))
            for (seq_id, _), part in zip(step, split, strict=True):
                parts[seq_id].append(part)
        if all_positions:
            return {seq_id: np.concatenate(part) for seq_id, part in parts.items()}
        return {seq_id: part[-1][-1] for seq_id, part in parts.items()}

    def decode(self, tokens: Mapping[int, int]) -> dict[int, np.ndarray]:
        """Append one token to each sequence and return the logits (vocab_size,) that follow."""
        seq_ids = list(tokens)
        with _Forward(self, seq_ids, [1] * len(seq_ids)) as cache:
            logits = self.model.decode(np.array([tokens[seq_id] for seq_id in seq_ids]), cache)
        return dict(zip(seq_ids, logits, strict=True))

    def _steps(self, tokens: Mapping[int, Sequence[int]]) -> list[list[tuple[int, np.ndarray]]]:
        """Cut the tokens into steps; a sequence occurs in a step once."""
        steps: list[list[tuple[int, np.ndarray]]] = [[]]
        room = self.prefill_chunk_size
        for seq_id, ids in tokens.items():
            rest = np.asarray(ids)
            while len(rest):
                if room == 0:
                    steps.append([])
                    room = self.prefill_chunk_size
                steps[-1].append((seq_id, rest[:room]))
                rest, room = rest[room:], max(room - len(rest), 0)
        return steps


class _Forward:
    """One step on the cache: begin_forward, and end_forward once the logits are on the host.

    Reading the logits waits for the device. TVM's cache reuses its pinned index arrays at the next
    begin_forward, so steps must not overlap.
    """

    def __init__(self, session: Session, seq_ids: Sequence[int], counts: Sequence[int]) -> None:
        self.session, self.seq_ids, self.counts = session, seq_ids, counts

    def __enter__(self) -> object:
        cache = self.session.cache
        _state("begin_forward")(cache, Shape(self.seq_ids), Shape([int(n) for n in self.counts]))
        return cache

    def __exit__(self, *exc: object) -> None:
        _state("end_forward")(self.session.cache)
        for seq_id, count in zip(self.seq_ids, self.counts, strict=True):
            self.session.lengths[seq_id] += int(count)


def _state(name: str) -> Callable:
    return tvm.get_global_func("vm.builtin.kv_state_" + name)


@dataclasses.dataclass
class Generation:
    """Greedy tokens and how long they took, in seconds.

    ``prefill_seconds`` is also the time to the first token.
    """

    tokens: list[int]
    prompt_length: int
    prefill_seconds: float
    decode_steps: int
    decode_seconds: float

    @property
    def prefill_rate(self) -> float:
        """Prompt tokens per second."""
        return self.prompt_length / self.prefill_seconds

    @property
    def decode_rate(self) -> float:
        """Decode steps per second, nan if there was none."""
        return self.decode_steps / self.decode_seconds if self.decode_steps else float("nan")


def greedy(
    session: Session,
    prompt: Sequence[int],
    max_tokens: int,
    stop_ids: Collection[int] = (),
    seq_id: int = 0,
) -> Generator[int, None, Generation]:
    """Continue a prompt with the most likely token each time, in a sequence of its own.

    Parameters
    ----------
    prompt : sequence of int
        Token ids.
    max_tokens : int
        Most tokens to generate.
    stop_ids : collection of int
        Tokens that end the text; the one that did is not part of the result.

    Yields
    ------
    token : int
        Each token as it is made.

    Returns
    -------
    generation : Generation
        All of them, with times.
    """
    session.add(seq_id)
    try:
        start = time.perf_counter()
        token = int(session.prefill({seq_id: prompt})[seq_id].argmax())
        result = Generation([], len(prompt), time.perf_counter() - start, 0, 0.0)
        while token not in stop_ids and len(result.tokens) < max_tokens:
            result.tokens.append(token)
            yield token
            if len(result.tokens) < max_tokens:
                start = time.perf_counter()
                token = int(session.decode({seq_id: token})[seq_id].argmax())
                result.decode_steps += 1
                result.decode_seconds += time.perf_counter() - start
        return result
    finally:
        session.remove(seq_id)
