"""PyTorch's scaled_dot_product_attention on FA2 and on cuDNN."""

from __future__ import annotations

import importlib.util
from typing import Any

from ..cases import Case
from . import Absent, Side


def build_flash(case: Case) -> Side:
    """On FlashAttention 2."""
    return _build("torch-flash", "FLASH_ATTENTION", case)


def build_cudnn(case: Case) -> Side:
    """On cuDNN."""
    return _build("torch-cudnn", "CUDNN_ATTENTION", case)


def _build(name: str, backend_name: str, case: Case) -> Side:
    if case.row.kind != "ragged":
        raise Absent("PyTorch's attention takes requests of one length, not pages")
    if importlib.util.find_spec("torch") is None:
        raise Absent("PyTorch is not installed")
    if case.machine.kind == "cpu":
        raise Absent("FA2 and cuDNN need a GPU")
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    row, backend = case.row, getattr(SDPBackend, backend_name)
    attend = torch.nn.functional.scaled_dot_product_attention
    outputs: list[Any] = [None] * len(case.buffers)

    def call_of(i: int) -> Any:
        q, k, v = (
            case.buffers[i][x].view(row.batch, row.kv_len, -1, row.head_dim).transpose(1, 2)
            for x in "qkv"
        )

        def call() -> None:
            with sdpa_kernel(backend):
                outputs[i] = attend(q, k, v, is_causal=True, scale=row.sm_scale, enable_gqa=True)

        return call

    def returned(i: int) -> Any:
        if outputs[i] is None:
            return None
        return outputs[i].transpose(1, 2).reshape(row.rows, row.heads[0], row.head_dim)

    def forget(i: int) -> None:
        # The memory is given out again: a kernel that writes nothing leaves the NaN there.
        if outputs[i] is not None:
            outputs[i].fill_(float("nan"))

    return Side(
        name, [call_of(i) for i in range(len(case.buffers))], backend_name.lower(),
        returned=returned, forget=forget,
    )  # fmt: skip
