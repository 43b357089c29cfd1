"""Attention that a model of MLC LLM calls by itself, outside of a KV cache."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import tvm
from tvm import relax as rx
from tvm.target import Target

from tvm_flashinfer.kernels.spec import KernelSpec
from tvm_flashinfer.relax.slots import arch_text
from tvm_flashinfer.relax.support import target_archs
from tvm_flashinfer.report import FALLBACK, NATIVE, ReportRow

#: The functions of ours that MLC LLM's ``op.attention`` calls, and what is in the name of TVM's
#: kernel that it falls back to.
_OURS = ("flashinfer.single_prefill", "flashinfer.single_decode")
_TVMS = "sequence_prefill"


@dataclass(frozen=True)
class AttentionSite:
    """A call of attention in a function of a model.

    Parameters
    ----------
    function : str
    kernel : str
        What is called.
    dtype : str
    head_dim : int
    """

    function: str
    kernel: str
    dtype: str
    head_dim: int

    @property
    def is_ours(self) -> bool:
        """Whether the call is one of ours."""
        return self.kernel in _OURS

    def specs(self, target: Target) -> list[KernelSpec]:
        """Return the kernels that the call needs."""
        if not self.is_ours:
            return []
        archs = target_archs(target)
        dims = (self.head_dim, self.head_dim)
        return [
            KernelSpec("common", archs=archs),
            KernelSpec("batch_attention", self.dtype, *dims, archs=archs),
        ]

    def row(self, target: Target) -> ReportRow:
        """Return the row of the report."""
        slot = self.kernel.removeprefix("flashinfer.")
        if self.is_ours:
            notes = ("MLC LLM asks for a causal mask and passes no mask of the model",)
            if slot == "single_decode":
                notes = ()
            return ReportRow(self.function, slot, NATIVE, self.kernel, arch_text(target), notes)
        reason = (
            f"MLC LLM calls {_OURS[0]} for float16 with a head_dim of 128 and 1, 4, 6 or 8 query "
            f"heads per KV head; here the dtype is {self.dtype} and head_dim {self.head_dim}"
        )
        return ReportRow(
            self.function, slot, FALLBACK, f"tir_{_TVMS}", arch_text(target), (reason,)
        )


def attention_sites(mod: tvm.IRModule) -> list[AttentionSite]:
    """Return the calls of attention in a module, one for each function and kernel."""
    sites: dict[AttentionSite, None] = {}
    for var, function in mod.functions_items():
        if isinstance(function, rx.Function):
            for call in _calls(function):
                if (kernel := _kernel(call)) is not None:
                    q = call.args[1].fields[0].ty
                    head_dim = int(q.shape[-1])
                    sites[AttentionSite(var.name_hint, kernel, str(q.dtype), head_dim)] = None
    return sorted(sites, key=lambda site: (site.function, site.kernel))


def _calls(function: rx.Function) -> Iterator[rx.Call]:
    for block in function.body.blocks:
        for binding in block.bindings:
            if isinstance(binding, rx.VarBinding) and isinstance(binding.value, rx.Call):
                yield binding.value


def _kernel(call: rx.Call) -> str | None:
    """Return the name of the attention that is called, or None for another call."""
    if call.op == tvm.ir.Op.get("relax.call_dps_packed"):
        callee = call.args[0]
        name = callee.global_symbol if isinstance(callee, rx.ExternFunc) else None
        return name if name in _OURS else None
    if call.op == tvm.ir.Op.get("relax.call_tir"):
        return _TVMS if _TVMS in call.args[0].name_hint else None
    return None
