"""Computations that are compiled with a model, beside the packed functions that are called."""

from __future__ import annotations

from tvm_flashinfer.tir.calls import packed_call
from tvm_flashinfer.tir.masks import mask_indptr, packed_mask, packed_mask_bytes

__all__ = ["mask_indptr", "packed_call", "packed_mask", "packed_mask_bytes"]
