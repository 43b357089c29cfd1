"""Attention of ``nn`` models over a paged KV cache, beyond what TVM's methods take."""

from __future__ import annotations

from tvm import relax as rx
from tvm.relax.frontend.nn import Tensor
from tvm.relax.frontend.nn.llm.kv_cache import PagedKVCache


def attention_with_sinks(
    cache: PagedKVCache,
    layer_id: int,
    qkv: Tensor,
    num_qo_heads: int,
    sm_scale: float,
    sinks: Tensor,
) -> Tensor:
    """Attend as ``cache.attention_with_fused_qkv`` does, with attention sinks.

    A sink is one more term ``exp(sink)`` in the denominator of the softmax of its head. TVM's cache
    attends to the new tokens and to parts of the past one by one; the sinks are applied once, to
    what these were merged to.

    Parameters
    ----------
    cache : PagedKVCache
        Any of TVM's frontend, when it is created as a `FlashInferPagedKVCache`. On a cache of TVM's
        own kernels the call raises.
    layer_id : int
    qkv : nn.Tensor
        (b, s, num_qo_heads + 2 * num_kv_heads, head_dim).
    num_qo_heads : int
    sm_scale : float
        Factor of the scores.
    sinks : nn.Tensor
        (num_qo_heads,), the sinks of this layer; converted to float32 where they are of another
        dtype.

    Returns
    -------
    out : nn.Tensor
        (b, s, num_qo_heads, head_dim).
    """
    b, s, heads, d = qkv.shape
    if sinks.dtype != "float32":
        sinks = sinks.astype("float32")
    call = rx.call_dps_packed(
        "flashinfer.cache_attention_with_sinks",
        [
            cache._expr,
            rx.prim_value(layer_id),
            rx.prim_value(float(sm_scale)),
            qkv.reshape(b * s, heads, d)._expr,
            sinks._expr,
        ],
        out_ty=rx.TensorType((b * s, num_qo_heads, d), qkv.dtype),
    )
    out = Tensor(_expr=rx.BlockBuilder.current().emit(call, "attention_with_sinks"))
    return out.reshape(b, s, num_qo_heads, d)
