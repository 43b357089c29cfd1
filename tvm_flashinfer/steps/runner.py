"""Running the step functions of a compiled model: prefill, and decode steps that are replayed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from os import PathLike
from typing import Any, NamedTuple

import numpy as np
import tvm
import tvm_ffi

from tvm_flashinfer.steps.config import CONFIG_FUNCTION, DECODE, PREFILL, StepConfig
from tvm_flashinfer.steps.inputs import DecodeInputs
from tvm_flashinfer.steps.page_table import PageTable


class StepRunner:
    """Sequences over pages at fixed addresses, and the functions that `export_steps` made.

    A decode step writes its index tensors in place and calls one function. On CUDA, compiled with
    ``relax.backend.use_cuda_graph``, the first step of a batch size is captured and all others
    replay it, while sequences grow, come and go. Work is put on the default stream of the device;
    nothing but the caller waits for it.

    Parameters
    ----------
    library : tvm.runtime.Module or path
        Compiled from what `export_steps` returned. The runner makes a virtual machine of its own,
        since a captured graph has the addresses of one runner in it.
    device : tvm.runtime.Device
    weights : sequence of tvm.runtime.Tensor
        On the device, in the order of the names that `export_steps` returned. They must stay where
        they are.
    num_pages : int
        Pages of the pool.
    max_seq_len : int
        Most tokens of a sequence.
    prefill_chunk : int
        Most tokens of a step of `prefill`; longer prompts take several.

    Attributes
    ----------
    config : StepConfig
        What the library is compiled for.
    table : PageTable
        Lengths and pages of the sequences.
    library : tvm.runtime.Module
    pages : list of tvm.runtime.Tensor
        (num_pages, 2, num_kv_heads, page_size, head_dim) for each layer.
    """

    def __init__(
        self,
        library: Any,
        device: tvm.runtime.Device,
        weights: Sequence[tvm.runtime.Tensor],
        *,
        num_pages: int,
        max_seq_len: int,
        prefill_chunk: int = 512,
    ) -> None:
        if prefill_chunk < 1:
            raise ValueError(f"got prefill_chunk {prefill_chunk}, expected a positive number")
        if isinstance(library, str | PathLike):
            library = tvm.runtime.load_module(str(library))
        self.library = library
        self._vm = tvm.runtime.vm.VirtualMachine(library, device)
        self.config = _read_config(self._vm)
        self.device = device
        self.prefill_chunk = prefill_chunk
        config = self.config
        self.table = PageTable(num_pages, config.page_size, max_seq_len)
        shape = config.page_shape(num_pages)
        self.pages = [
            tvm.runtime.empty(shape, config.dtype, device) for _ in range(config.num_layers)
        ]
        # Converted once: a step passes the same tuples.
        self._constants = (tvm_ffi.convert(self.pages), tvm_ffi.convert(list(weights)))
        self._batches: dict[int, _Batch] = {}

    def add(self, seq_id: int) -> None:
        """Start an empty sequence."""
        self.table.add(seq_id)

    def remove(self, seq_id: int) -> None:
        """End a sequence and free its pages."""
        self.table.remove(seq_id)

    def pop(self, seq_id: int, count: int) -> None:
        """Drop the last tokens of a sequence."""
        self.table.pop(seq_id, count)

    def prefill(self, tokens: Mapping[int, Sequence[int]]) -> tvm.runtime.Tensor:
        """Append tokens to sequences, in steps of at most ``prefill_chunk`` tokens.

        Parameters
        ----------
        tokens : mapping of int to sequence of int
            At least one token for each sequence, which may have tokens already.

        Returns
        -------
        logits : tvm.runtime.Tensor
            (number of sequences, vocab_size) float32 on the device: those after the last token of
            each sequence, in the order of the mapping.

        Raises
        ------
        ValueError
            For sequences without tokens, ones that are not there, and ones that would be too long.
        OutOfPagesError
            When pages run out. No sequence has changed then.
        """
        if not tokens:
            raise ValueError("got no sequences, expected at least one")
        arrays = {seq_id: np.asarray(ids, np.int32) for seq_id, ids in tokens.items()}
        if empty := [seq_id for seq_id, ids in arrays.items() if ids.size == 0]:
            raise ValueError(f"got no tokens for sequences {empty}, expected at least one each")
        self.table.check({seq_id: len(ids) for seq_id, ids in arrays.items()})
        shape = (len(tokens), self.config.vocab_size)
        logits = tvm.runtime.empty(shape, "float32", self.device)
        finished = 0
        with self.table.kept_on_error(arrays):
            for step in _steps(arrays, self.prefill_chunk):
                ends = sum(is_end for _, _, is_end in step)
                made = self._prefill_step([(seq_id, ids) for seq_id, ids, _ in step])
                if ends:  # a sequence that goes on in the next step is the last one of its step
                    _rows(made, 0, ends).copyto(_rows(logits, finished, ends))
                finished += ends
        return logits

    def decode(self, tokens: Mapping[int, int]) -> tvm.runtime.Tensor:
        """Append one token to each of some sequences.

        Parameters
        ----------
        tokens : mapping of int to int
            The token of each sequence, at most as many as the largest batch size of the library.

        Returns
        -------
        logits : tvm.runtime.Tensor
            (number of sequences, vocab_size) float32 on the device, in the order of the mapping.
            The next step of the same batch size overwrites them.

        Raises
        ------
        ValueError
            When the batch is empty or too large, for sequences that are not there, and for ones
            that would be too long.
        OutOfPagesError
            When pages run out. No sequence has changed then.
        """
        batch = self._batch(len(tokens))
        with self.table.kept_on_error(tokens):
            self.table.append(dict.fromkeys(tokens, 1))
            batch.inputs.write(self.table, tokens)
            batch.function(*batch.inputs.tensors, batch.logits, *self._constants)
        return _rows(batch.logits, 0, len(tokens))

    def _batch(self, count: int) -> _Batch:
        """Return what serves so many sequences; its tensors are made once."""
        sizes = self.config.batch_sizes
        if count == 0:
            raise ValueError("got no sequences, expected at least one")
        if count > sizes[-1]:
            raise ValueError(
                f"got {count} sequences, and the batch is full with {sizes[-1]}; decode them in "
                "several steps, or export the model with a larger one in batch_sizes"
            )
        size = next(size for size in sizes if size >= count)
        if size not in self._batches:
            self._batches[size] = _Batch(
                self._vm[DECODE.format(size)],
                DecodeInputs(size, self.table.row_pages, self.device),
                tvm.runtime.empty((size, 1, self.config.vocab_size), "float32", self.device),
            )
        return self._batches[size]

    def _prefill_step(self, step: Sequence[tuple[int, np.ndarray]]) -> tvm.runtime.Tensor:
        """Append tokens to sequences in one call: logits (sequences, vocab_size) of the last."""
        counts = {seq_id: len(ids) for seq_id, ids in step}
        self.table.append(counts)
        ends = np.cumsum(list(counts.values()))
        positions = [
            np.arange(self.table.length(seq_id) - count, self.table.length(seq_id))
            for seq_id, count in counts.items()
        ]
        indptr, last = np.empty(len(step) + 1, np.int32), np.empty(len(step), np.int32)
        indices = np.empty(sum(len(self.table.pages(seq_id)) for seq_id in counts), np.int32)
        self.table.write(counts, indptr, indices, last)
        arrays = [
            np.concatenate([ids for _, ids in step])[None],
            ends - 1,
            np.concatenate([[0], ends]),
            np.concatenate(positions),
            np.concatenate([self.table.slots(seq_id, n) for seq_id, n in counts.items()]),
            indptr,
            indices,
            last,
        ]
        tensors = [tvm.runtime.tensor(x.astype(np.int32), self.device) for x in arrays]
        return self._vm[PREFILL](*tensors, *self._constants)


class _Batch(NamedTuple):
    """A decode function and the tensors that it is called with each time."""

    function: Callable[..., Any]
    inputs: DecodeInputs
    logits: tvm.runtime.Tensor


def _read_config(vm: Any) -> StepConfig:
    try:
        function = vm[CONFIG_FUNCTION]
    except (AttributeError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"the library has no function {CONFIG_FUNCTION!r}, so it has no step functions; "
            "compile what tvm_flashinfer.relax.export_steps returns"
        ) from error
    return StepConfig.from_json(str(function()))


def _steps(
    arrays: Mapping[int, np.ndarray], chunk: int
) -> Iterator[list[tuple[int, np.ndarray, bool]]]:
    """Cut tokens into steps: sequences, their tokens, and whether these are the last ones."""
    step: list[tuple[int, np.ndarray, bool]] = []
    room = chunk
    for seq_id, ids in arrays.items():
        rest = ids
        while len(rest):
            step.append((seq_id, rest[:room], len(rest) <= room))
            rest, room = rest[room:], max(room - len(rest), 0)
            if room == 0:
                yield step
                step, room = [], chunk
    if step:
        yield step


def _rows(logits: tvm.runtime.Tensor, first: int, count: int) -> tvm.runtime.Tensor:
    """Return some rows of logits, as (count, vocab_size), without a copy."""
    vocab_size = logits.shape[-1]
    return logits._create_view((count, vocab_size), "float32", 4 * first * vocab_size)
