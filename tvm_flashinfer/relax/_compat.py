"""The few things that TVM 0.26 and 0.27 spell differently."""

from __future__ import annotations

import inspect
from typing import Any

import tvm
from tvm import relax as rx
from tvm.relax.frontend.nn.llm import kv_cache as tvm_kv_cache

if hasattr(tvm.ir, "StringImm"):
    StringImm = tvm.ir.StringImm
else:
    StringImm = rx.StringImm

#: Whether rules for kernels take a product that was fused with what is written in place.
FUSES_IN_PLACE = hasattr(tvm.ir, "StringImm")

#: Proves facts of sizes.
Analyzer = (tvm.sym if hasattr(tvm, "sym") else tvm.arith).Analyzer

#: Whether the cache takes the window of ``mha_sliding`` layers; TVM 0.26 fixes it at 1024. The TIR
#: cache is asked, because the hook puts our class in the place of the other one.
HAS_LAYER_WINDOW = (
    "layer_sliding_window_size"
    in inspect.signature(tvm_kv_cache.TIRPagedKVCache.__init__).parameters
)

#: The window of ``mha_sliding`` layers when a model names none.
DEFAULT_LAYER_WINDOW = 1024


def undefined_vars(size: Any) -> list[Any]:
    """Return the symbols in a size."""
    return [] if isinstance(size, int) else list(tvm.tirx.analysis.undefined_vars(size))


def constant_array(expr: Any) -> Any:
    """Return the values of a constant tensor as a NumPy array, or None for another expression."""
    if hasattr(rx, "Constant"):
        return expr.data.numpy() if isinstance(expr, rx.Constant) else None
    is_tensor = isinstance(expr, tvm.ir.GenericConst) and isinstance(expr.ty, rx.TensorType)
    return expr.value.numpy() if is_tensor else None
