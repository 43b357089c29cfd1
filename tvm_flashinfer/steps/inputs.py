"""The index tensors of a decode function, at addresses that never change."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import tvm
import tvm_ffi

from tvm_flashinfer.steps.page_table import PageTable


class DecodeInputs:
    """One buffer on the device with all index tensors of a batch size, and its image on the host.

    Parameters
    ----------
    batch_size : int
        Rows; those that no sequence uses append nothing and attend to nothing.
    row_pages : int
        Pages of the longest sequence.
    device : tvm.runtime.Device

    Attributes
    ----------
    tensors : list of tvm.runtime.Tensor
        Of int32, in the order of the decode function: tokens (B, 1), positions (B,), slots (B,),
        page_indptr (B + 1,), page_indices (B * row_pages,), last_page_len (B,).
    """

    def __init__(self, batch_size: int, row_pages: int, device: tvm.runtime.Device) -> None:
        # The tokens come first: kernels of TVM take no byte offset. The indices come last, since
        # only those in use are copied.
        shapes = {
            "tokens": (batch_size, 1),
            "positions": (batch_size,),
            "slots": (batch_size,),
            "page_indptr": (batch_size + 1,),
            "last_page_len": (batch_size,),
            "page_indices": (batch_size * row_pages,),
        }
        total = sum(int(np.prod(shape)) for shape in shapes.values())
        self._host = np.zeros(total, np.int32)
        self._host_tensor = tvm_ffi.from_dlpack(self._host)
        self._device = tvm.runtime.empty((total,), "int32", device)
        self._arrays: dict[str, np.ndarray] = {}
        views: dict[str, Any] = {}
        at = 0
        for name, shape in shapes.items():
            size = int(np.prod(shape))
            self._arrays[name] = self._host[at : at + size]
            views[name] = self._device._create_view(shape, "int32", 4 * at)
            at += size
        self._indices_at = at - size
        self.tensors = [
            views[name]
            for name in (
                "tokens", "positions", "slots", "page_indptr", "page_indices", "last_page_len",
            )
        ]  # fmt: skip

    def write(self, table: PageTable, tokens: Mapping[int, int]) -> None:
        """Describe the step that appends a token to each of some sequences, and copy that.

        The copy is from pageable memory, which the driver has read when it returns: the next step
        may be written while this one runs.
        """
        at, n = self._arrays, len(tokens)
        at["tokens"][:n] = list(tokens.values())
        at["tokens"][n:] = 0
        at["positions"][:n] = [table.length(seq_id) - 1 for seq_id in tokens]
        at["positions"][n:] = 0
        count = table.write(tokens, at["page_indptr"], at["page_indices"], at["last_page_len"])
        last_pages = at["page_indices"][at["page_indptr"][1 : n + 1] - 1]
        at["slots"][:n] = last_pages * table.page_size + at["last_page_len"][:n] - 1
        at["slots"][n:] = -1
        used = self._indices_at + count
        source = self._host_tensor._create_view((used,), "int32")
        source.copyto(self._device._create_view((used,), "int32"))
