"""The kernels of MLC LLM's RNN state, which hybrid models have beside their KV cache.

Its own ones name the slots of a row as scalars, which TVM 0.26 and 0.27 take for buffers that the
rest of the block uses before it has declared them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tvm import tirx
from tvm.script import tirx as T


def get_function(_theirs: Callable[..., Any]) -> staticmethod:
    """Stand in for ``RNNState.create_get_func``."""
    return staticmethod(create_get_func)


def set_function(_theirs: Callable[..., Any]) -> staticmethod:
    """Stand in for ``RNNState.create_set_func``."""
    return staticmethod(create_set_func)


def create_get_func(
    shape: Sequence[Any], dtype: str, max_batch_size: Any, max_history: Any, state_id: int
) -> tirx.PrimFunc:
    """Return the function that reads the current state of each sequence of a batch.

    Parameters
    ----------
    shape : sequence of int
        That of a state.
    dtype : str
    max_batch_size, max_history : int or tirx.Var
        States are stored as ``(max_batch_size, max_history, *shape)``.
    state_id : int
        Gives the function its name.
    """
    shape, axes = tuple(shape), "S" * (len(shape) + 1)
    name = f"rnn_state_get_{state_id}"

    @T.prim_func(s_tir=True)
    def get(
        storage_handle: T.handle,
        sequence_handle: T.handle,
        history_handle: T.handle,
        output_handle: T.handle,
    ):
        rows = T.int32()
        T.func_attr({"global_symbol": name})
        storage = T.match_buffer(storage_handle, (max_batch_size, max_history, *shape), dtype)
        sequences = T.match_buffer(sequence_handle, (rows,), "int32")
        histories = T.match_buffer(history_handle, (rows,), "int32")
        output = T.match_buffer(output_handle, (rows, *shape), dtype)
        for row, *index in T.grid(rows, *shape):
            with T.sblock("copy"):
                v, *w = T.axis.remap(axes, [row, *index])
                T.buffer_store(
                    output, T.BufferLoad(storage, [sequences[v], histories[v], *w]), [v, *w]
                )

    return get


def create_set_func(
    shape: Sequence[Any], dtype: str, max_batch_size: Any, max_history: Any, state_id: int
) -> tirx.PrimFunc:
    """Return the function that writes the next state of each sequence of a batch.

    Parameters
    ----------
    shape, dtype, max_batch_size, max_history, state_id
        As for `create_get_func`. The histories of a sequence are a ring.
    """
    shape, axes = tuple(shape), "S" * (len(shape) + 1)
    name = f"rnn_state_set_{state_id}"

    @T.prim_func(s_tir=True)
    def set_next(
        storage_handle: T.handle,
        sequence_handle: T.handle,
        history_handle: T.handle,
        state_handle: T.handle,
    ):
        rows = T.int32()
        T.func_attr({"global_symbol": name})
        storage = T.match_buffer(storage_handle, (max_batch_size, max_history, *shape), dtype)
        sequences = T.match_buffer(sequence_handle, (rows,), "int32")
        histories = T.match_buffer(history_handle, (rows,), "int32")
        state = T.match_buffer(state_handle, (rows, *shape), dtype)
        for row, *index in T.grid(rows, *shape):
            with T.sblock("copy"):
                v, *w = T.axis.remap(axes, [row, *index])
                T.buffer_store(
                    storage,
                    T.BufferLoad(state, [v, *w]),
                    [sequences[v], (histories[v] + 1) % T.cast(max_history, "int32"), *w],
                )

    return set_next
