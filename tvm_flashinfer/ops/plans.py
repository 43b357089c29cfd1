"""Attention after a plan on the host, which on CUDA runs on FlashInfer's own kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from tvm_flashinfer.ops._tensors import (
    Tensor,
    empty,
    function,
    layout_code,
    scale_or_default,
    state,
    window_left,
)


@dataclass(frozen=True)
class Workspaces:
    """Memory that plans and runs share.

    Parameters
    ----------
    float_workspace, int_workspace : tensor
        uint8 on the device of the queries.
    pinned_int_workspace : tensor
        uint8 on the host, as large as `int_workspace`.
    """

    float_workspace: Tensor
    int_workspace: Tensor
    pinned_int_workspace: Tensor

    @classmethod
    def allocate(
        cls, like: Tensor, float_bytes: int = 128 << 20, int_bytes: int = 8 << 20
    ) -> Workspaces:
        """Return workspaces on the device of a tensor.

        Parameters
        ----------
        like : tensor
            A NumPy array or a tensor of TVM.
        float_bytes, int_bytes : int
            Their sizes. A plan for which they are too small raises and says what it needs.
        """
        pinned = np.empty(int_bytes, np.uint8)
        return cls(empty(like, (float_bytes,), "uint8"), empty(like, (int_bytes,), "uint8"), pinned)


class _Planned:
    """Workspaces, and the plan that was made with them."""

    def __init__(self, workspaces: Workspaces) -> None:
        self.workspaces = workspaces
        self._plan: Any = None

    def _planned(self) -> Any:
        if self._plan is None:
            raise ValueError("there is no plan; call `plan` before a run")
        return self._plan


class BatchPrefill(_Planned):
    """Prefill of a batch over pages or ragged keys.

    A plan is made for the lengths of a step, on the host, and used by the runs of all layers.

    Parameters
    ----------
    workspaces : Workspaces

    Examples
    --------
    >>> prefill = BatchPrefill(Workspaces.allocate(q))
    >>> prefill.plan(qo_indptr, page_indptr, kv_len, 32, 8, 128, page_size=16, causal=True)
    >>> out, lse = prefill.run_paged(q, k_pages, v_pages, qo_indptr, page_indptr, indices, last)
    """

    def __init__(self, workspaces: Workspaces) -> None:
        super().__init__(workspaces)
        self._mask: tuple[int, int] = (0, -1)

    def plan(
        self,
        qo_indptr: Tensor,
        kv_indptr: Tensor,
        kv_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        *,
        head_dim_vo: int | None = None,
        page_size: int = 1,
        causal: bool = False,
        window: int | None = None,
    ) -> None:
        """Plan a step; ``flashinfer.batch_prefill_plan``.

        Parameters
        ----------
        qo_indptr : tensor
            (batch_size + 1,), int32, on the host: where the rows of a request start.
        kv_indptr : tensor
            (batch_size + 1,), int32, on the host: where its pages start, or with page size 1 its
            keys.
        kv_len : tensor
            (batch_size,), int32, on the host: how many keys it has.
        num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo : int
            `head_dim_vo` is `head_dim_qk` when it is left out.
        page_size : int
            1 for `run_ragged`.
        causal : bool
            Row i sees keys up to ``i + kv_len - qo_len``.
        window : int, optional
            How many keys up to the diagonal a row sees.

        Raises
        ------
        ValueError
            For lengths that contradict one another, and workspaces that are too small.
        """
        rows = int(_on_host(qo_indptr)[-1])
        vo = head_dim_qk if head_dim_vo is None else head_dim_vo
        self._mask = int(causal), window_left(window)
        spaces = self.workspaces
        self._plan = function("batch_prefill_plan")(
            spaces.float_workspace, spaces.int_workspace, spaces.pinned_int_workspace,
            qo_indptr, kv_indptr, kv_len, rows, len(kv_len), num_qo_heads, num_kv_heads,
            page_size, False, head_dim_qk, vo, causal, self._mask[1], -1, False, 0,
        )  # fmt: skip

    def run_paged(
        self,
        q: Tensor,
        k_pages: Tensor,
        v_pages: Tensor,
        qo_indptr: Tensor,
        page_indptr: Tensor,
        page_indices: Tensor,
        last_page_len: Tensor,
        *,
        layout: str = "HND",
        sm_scale: float | None = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Attend over pages; ``flashinfer.batch_prefill_paged_run``.

        Parameters
        ----------
        q : tensor
            (n, num_qo_heads, head_dim).
        k_pages, v_pages : tensor
            (num_pages, num_kv_heads, page_size, head_dim) in HND, (num_pages, page_size,
            num_kv_heads, head_dim) in NHD; strided views are fine.
        qo_indptr, page_indptr, page_indices, last_page_len : tensor
            int32 on the device of q.
        layout : str
            Of the pages.
        sm_scale : float, optional
            ``head_dim ** -0.5`` when it is left out.
        out, lse : tensor, optional
            (n, num_qo_heads, head_dim), and (n, num_qo_heads) of float32, in base 2.

        Returns
        -------
        out, lse : tensor
        """
        out, lse = state(q, out, lse)
        mask_mode, left = self._mask
        function("batch_prefill_paged_run")(
            self.workspaces.float_workspace, self.workspaces.int_workspace, self._planned(),
            q, k_pages, v_pages, qo_indptr, page_indptr, page_indices, last_page_len, out, lse,
            mask_mode, layout_code(layout), left, False,
            scale_or_default(sm_scale, q.shape[-1]), 1.0, 1.0,
        )  # fmt: skip
        return out, lse

    def run_ragged(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        qo_indptr: Tensor,
        kv_indptr: Tensor,
        *,
        layout: str = "NHD",
        sm_scale: float | None = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Attend over ragged keys; ``flashinfer.batch_prefill_ragged_run``.

        Parameters
        ----------
        q : tensor
            (n, num_qo_heads, head_dim_qk).
        k, v : tensor
            (m, num_kv_heads, head_dim) in NHD, (num_kv_heads, m, head_dim) in HND.
        qo_indptr, kv_indptr : tensor
            int32 on the device of q.
        layout, sm_scale, out, lse
            See `run_paged`.

        Returns
        -------
        out, lse : tensor
        """
        out, lse = state(q, out, lse, v.shape[-1])
        mask_mode, left = self._mask
        function("batch_prefill_ragged_run")(
            self.workspaces.float_workspace, self.workspaces.int_workspace, self._planned(),
            q, k, v, qo_indptr, kv_indptr, out, lse, mask_mode, layout_code(layout), left, False,
            scale_or_default(sm_scale, q.shape[-1]), 1.0, 1.0,
        )  # fmt: skip
        return out, lse


class BatchDecode(_Planned):
    """Decode of a batch over pages, one row for each request.

    Parameters
    ----------
    workspaces : Workspaces
    """

    def __init__(self, workspaces: Workspaces) -> None:
        super().__init__(workspaces)
        self._window_left = -1

    def plan(
        self,
        page_indptr: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        page_size: int,
        q_dtype: str,
        window: int | None = None,
    ) -> None:
        """Plan a step; ``flashinfer.batch_decode_plan``.

        Parameters
        ----------
        page_indptr : tensor
            (batch_size + 1,), int32, on the host.
        num_qo_heads, num_kv_heads, head_dim, page_size : int
        q_dtype : str
            Dtype of queries and pages.
        window : int, optional
            How many of the last keys a row sees.
        """
        self._window_left = window_left(window)
        spaces = self.workspaces
        # Tensors without elements, which carry the dtypes.
        dtypes = empty(spaces.float_workspace, (0,), q_dtype)
        self._plan = function("batch_decode_plan")(
            spaces.float_workspace, spaces.int_workspace, spaces.pinned_int_workspace,
            page_indptr, len(page_indptr) - 1, num_qo_heads, num_kv_heads, page_size, False,
            self._window_left, 0.0, head_dim, head_dim, dtypes, dtypes,
        )  # fmt: skip

    def run(
        self,
        q: Tensor,
        k_pages: Tensor,
        v_pages: Tensor,
        page_indptr: Tensor,
        page_indices: Tensor,
        last_page_len: Tensor,
        *,
        layout: str = "HND",
        sm_scale: float | None = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Attend over pages; ``flashinfer.batch_decode_run``.

        Parameters
        ----------
        q : tensor
            (batch_size, num_qo_heads, head_dim).
        k_pages, v_pages, page_indptr, page_indices, last_page_len, layout, sm_scale, out, lse
            See `BatchPrefill.run_paged`.

        Returns
        -------
        out, lse : tensor
        """
        out, lse = state(q, out, lse)
        function("batch_decode_run")(
            self.workspaces.float_workspace, self.workspaces.int_workspace, self._planned(),
            q, k_pages, v_pages, page_indptr, page_indices, last_page_len, out, lse,
            layout_code(layout), self._window_left, False,
            scale_or_default(sm_scale, q.shape[-1]), 1.0, 1.0,
        )  # fmt: skip
        return out, lse


def _on_host(tensor: Tensor) -> np.ndarray:
    return tensor if isinstance(tensor, np.ndarray) else tensor.numpy()
