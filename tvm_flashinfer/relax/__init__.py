"""Relax passes that put ``flashinfer.*`` under a model, the paged KV cache, and the report."""

from __future__ import annotations

try:
    # Before any module of ours: the hook at `import tvm` puts our cache into this one when it is
    # first imported, and needs our modules whole for that.
    import tvm.relax.frontend.nn.llm.kv_cache  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "tvm":
        raise
    raise ModuleNotFoundError(
        "the passes need TVM, which is not installed: pip install 'tvm-flashinfer[tvm]', or the "
        "wheel of TVM that MLC LLM comes with",
        name="tvm",
    ) from error

from tvm_flashinfer.relax.bind_layer_windows import BindLayerWindows
from tvm_flashinfer.relax.cache_attention import attention_with_sinks
from tvm_flashinfer.relax.config import KVCacheCallError, PagedKVCacheConfig, parse_generic_call
from tvm_flashinfer.relax.dispatch_attention import DispatchAttention
from tvm_flashinfer.relax.dispatch_kv_cache_creation import DispatchKVCacheCreation
from tvm_flashinfer.relax.dispatch_sampling import DispatchSampling
from tvm_flashinfer.relax.kv_cache import FlashInferPagedKVCache
from tvm_flashinfer.relax.patterns import attention_patterns, partition_for_flashinfer
from tvm_flashinfer.relax.pipeline import flashinfer_pipeline
from tvm_flashinfer.relax.report import CompileReport, ReportRow, last_report, read_report
from tvm_flashinfer.relax.step_functions import StepCache, export_steps
from tvm_flashinfer.relax.strict import FallbackWarning, StrictModeError, set_strict_mode
from tvm_flashinfer.relax.support import UnsupportedConfigError, unsupported_reasons

__all__ = [
    "BindLayerWindows",
    "CompileReport",
    "DispatchAttention",
    "DispatchKVCacheCreation",
    "DispatchSampling",
    "FallbackWarning",
    "FlashInferPagedKVCache",
    "KVCacheCallError",
    "PagedKVCacheConfig",
    "ReportRow",
    "StepCache",
    "StrictModeError",
    "UnsupportedConfigError",
    "attention_patterns",
    "attention_with_sinks",
    "export_steps",
    "flashinfer_pipeline",
    "last_report",
    "parse_generic_call",
    "partition_for_flashinfer",
    "read_report",
    "set_strict_mode",
    "unsupported_reasons",
]
