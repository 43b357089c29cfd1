"""Computations that are compiled with a model, beside the packed functions that are called."""

from __future__ import annotations

from tvm_flashinfer.tir.calls import Written, packed_call, packed_prim_func
from tvm_flashinfer.tir.layouts import cut_head_dim, heads_swapped, padded_head_dim
from tvm_flashinfer.tir.masks import mask_indptr, packed_mask, packed_mask_bytes
from tvm_flashinfer.tir.quantize import dequantized, quantized
from tvm_flashinfer.tir.rotary import split_rotary
from tvm_flashinfer.tir.schedules import prim_func

__all__ = [
    "Written",
    "cut_head_dim",
    "dequantized",
    "heads_swapped",
    "mask_indptr",
    "packed_call",
    "packed_mask",
    "packed_mask_bytes",
    "packed_prim_func",
    "padded_head_dim",
    "prim_func",
    "quantized",
    "split_rotary",
]
