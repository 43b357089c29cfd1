"""The hook at ``import tvm``, and the cache that it puts into TVM."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tvm
from tvm import relax as rx
from tvm import tirx
from tvm.relax.frontend.nn.llm import kv_cache as tvm_kv_cache
from tvm.relax.frontend.nn.llm.kv_cache import RopeMode

import tvm_flashinfer
from tvm_flashinfer import contract, hooks
from tvm_flashinfer.relax import (
    FallbackWarning,
    FlashInferPagedKVCache,
    UnsupportedConfigError,
    last_report,
    set_strict_mode,
    strict,
)
from tvm_flashinfer.relax.hooked_kv_cache import HookedPagedKVCache, StrictFallback
from tvm_flashinfer.relax.report import CompileReport

KV_CACHE = "tvm.relax.frontend.nn.llm.kv_cache"


@pytest.fixture(autouse=True)
def hook_state(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Start without the hook, and leave it as it was, whatever a test patched in TVM."""
    was_active = tvm_kv_cache.FlashInferPagedKVCache is HookedPagedKVCache
    hooks.disable()
    yield
    monkeypatch.undo()
    hooks.disable()
    if was_active:
        hooks.enable()


def run(code: str, **environment: str) -> str:
    """Run code in a new Python that finds this package; return what it prints."""
    path = [str(Path(tvm_flashinfer.__file__).parent.parent), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path), **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_enable_and_disable() -> None:
    original = tvm_kv_cache.FlashInferPagedKVCache
    hooks.enable()
    hooks.enable()
    assert tvm_kv_cache.FlashInferPagedKVCache is HookedPagedKVCache
    hooks.disable()
    assert tvm_kv_cache.FlashInferPagedKVCache is original
    hooks.disable()
    assert tvm_kv_cache.FlashInferPagedKVCache is original


def test_module_that_is_imported_later() -> None:
    code = f"""
import sys, tvm
from tvm_flashinfer import contract, hooks
hooks._autoload()
heavy = [name for name in ("{KV_CACHE}", "torch", "mlc_llm", "tvm_flashinfer.relax")
         if name in sys.modules]
from tvm.relax.frontend.nn.llm import kv_cache
left = [finder for finder in sys.meta_path if type(finder).__module__ == hooks.__name__]
print(heavy, kv_cache.FlashInferPagedKVCache.__name__, left)
hooks.disable()
print(kv_cache.FlashInferPagedKVCache.__module__)
"""
    assert run(code).splitlines() == ["[] HookedPagedKVCache []", KV_CACHE]


def test_module_that_is_never_imported() -> None:
    code = """
import sys, tvm
from tvm_flashinfer import contract, hooks
hooks.enable()
hooks.disable()
from tvm.relax.frontend.nn.llm import kv_cache
print(kv_cache.FlashInferPagedKVCache.__module__)
"""
    assert run(code) == KV_CACHE


def test_runtime_only() -> None:
    code = """
import tvm, tvm_ffi
from tvm_flashinfer import contract, hooks
hooks._autoload()
print(tvm._RUNTIME_ONLY, tvm_ffi.get_global_func("flashinfer.merge_state") is not None)
"""
    assert run(code, TVM_USE_RUNTIME_LIB="1") == "True True"


def test_switched_off(monkeypatch) -> None:
    monkeypatch.setenv("TVM_FLASHINFER_DISABLE", "1")
    original = tvm_kv_cache.FlashInferPagedKVCache
    hooks._autoload()
    assert tvm_kv_cache.FlashInferPagedKVCache is original


def test_switch_that_is_neither(monkeypatch) -> None:
    """Someone wanted something: nothing is replaced, and it is told why."""
    monkeypatch.setenv("TVM_FLASHINFER_DISABLE", "off")
    original = tvm_kv_cache.FlashInferPagedKVCache
    with pytest.warns(hooks.HookWarning, match="TVM_FLASHINFER_DISABLE is 'off', expected 1"):
        hooks._autoload()
    assert tvm_kv_cache.FlashInferPagedKVCache is original


def test_contract_asked_before_tvm_is_imported(tmp_path) -> None:
    """The import calls the hook, which asks the same while the first is not done."""
    code = """
import sys, warnings
from tvm_flashinfer import contract, hooks
warnings.simplefilter("error", hooks.HookWarning)
real = __import__
def importing(name, *args, **kwargs):
    first = name == "tvm" and "tvm" not in sys.modules
    module = real(name, *args, **kwargs)
    if first:
        hooks._autoload()
    return module
__builtins__.__import__ = importing
print(contract.try_contract())
"""
    nothing_is_remembered = str(tmp_path / "cache")
    assert run(code, TVM_FLASHINFER_CACHE_DIR=nothing_is_remembered) == "()"


def test_tvm_that_is_not_served(monkeypatch) -> None:
    """What it calls otherwise is named, and nothing of it is replaced."""
    problem = "append is called with 5 arguments"
    monkeypatch.setattr(contract, "contract_problems", lambda: (problem,))
    original = tvm_kv_cache.FlashInferPagedKVCache
    with pytest.warns(hooks.HookWarning, match=f"not active: TVM .*\n  - {problem}"):
        hooks._autoload()
    assert tvm_kv_cache.FlashInferPagedKVCache is original
    with pytest.raises(contract.UnsupportedTVMError, match=f"{problem}\nInstall apache-tvm 0"):
        hooks.enable()


def create(target: tvm.target.Target, **changes: Any) -> tuple[tvm.IRModule, list[Exception]]:
    """Make a module as MLC LLM's pass does: TVM's cache, then FlashInfer's.

    Errors are swallowed, as there, and returned with the module.
    """
    arguments = {
        "attn_kind": "mha",
        "layer_partition": rx.ShapeExpr([0, 2]),
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "qk_head_dim": 64,
        "v_head_dim": 64,
        "mla_original_qk_head_dim": 0,
        "mla_original_v_head_dim": 0,
        "rope_mode": RopeMode.NORMAL,
        "rope_scale": 1,
        "rope_theta": 10000,
        "rope_scaling": {},
        "rope_ext_factors": rx.prim_value(0),
        "rotary_dim": 64,
        "enable_disaggregation": False,
        "dtype": "float16",
        **changes,
    }
    names = (
        "max_batch_size",
        "max_total_seq_len",
        "prefill_chunk_size",
        "page_size",
        "support_sliding_window",
    )
    builder, errors = rx.BlockBuilder(), []
    for name, kind in (
        ("create_tir_paged_kv_cache", tvm_kv_cache.TIRPagedKVCache),
        ("create_flashinfer_paged_kv_cache", tvm_kv_cache.FlashInferPagedKVCache),
    ):
        sizes = {size: tirx.Var(size, "int64") for size in names}
        params = [rx.Var(f"{size}_", rx.ShapeType([var])) for size, var in sizes.items()]
        try:
            with builder.function(name, params):
                cache = kind(**arguments, **sizes, target=target)
                builder.emit_func_output(cache._expr)
        except Exception as error:
            errors.append(error)
    return builder.finalize(), errors


def report_of(mod: tvm.IRModule) -> CompileReport:
    return CompileReport.from_json(mod["flashinfer_report"].body.body.value)


def test_hooked_cache_reports(llvm) -> None:
    hooks.enable()
    mod, errors = create(llvm)
    assert errors == []
    rx.analysis.well_formed(mod)
    assert report_of(mod) == last_report()
    status = {row.slot: row.status for row in last_report().rows}
    assert set(status.values()) == {"native"}
    assert {"prefill_paged", "prefill_sliding_window", "tree_paged"} <= set(status)
    symbols = {var.name_hint for var in mod.get_global_vars()}
    assert {"create_flashinfer_paged_kv_cache", "create_tir_paged_kv_cache"} <= symbols


def test_hooked_cache_takes_caps_and_slopes(llvm, monkeypatch) -> None:
    """As keywords, which TVM's class does not have; sinks are refused with what to do."""
    hooks.enable()
    kind = tvm_kv_cache.FlashInferPagedKVCache
    extra = {"logits_soft_cap": 30.0, "alibi_slopes": [0.5] * 8}
    monkeypatch.setattr(
        tvm_kv_cache, "FlashInferPagedKVCache", lambda **kwargs: kind(**kwargs, **extra)
    )
    mod, errors = create(llvm)
    assert errors == []
    (row,) = [row for row in report_of(mod).rows if row.slot == "decode_paged"]
    assert row.reasons == ("scores are capped at 30.0", "ALiBi by positions")
    extra["attention_sinks"] = [1.0] * 8
    with pytest.warns(FallbackWarning, match="attention_with_sinks"):
        create(llvm)


def test_fallback_is_warned_of_before_it_is_swallowed(llvm) -> None:
    hooks.enable()
    with pytest.warns(FallbackWarning, match="enable_disaggregation is set"):
        mod, (error,) = create(llvm, enable_disaggregation=True)
    assert isinstance(error, UnsupportedConfigError)
    assert "create_flashinfer_paged_kv_cache" not in {v.name_hint for v in mod.get_global_vars()}
    (row,) = report_of(mod).rows
    assert row.status == "fallback"
    assert "enable_disaggregation is set" in row.reasons[0]


def test_failed_build_is_a_fallback_too(cuda, monkeypatch) -> None:
    from tvm_flashinfer import kernels

    def fail(specs: list[Any]) -> None:
        raise RuntimeError("nvcc is missing")

    monkeypatch.setattr(kernels, "build_model_object", fail)
    hooks.enable()
    with pytest.warns(FallbackWarning, match="nvcc is missing"):
        mod, _ = create(cuda)
    (row,) = report_of(mod).rows
    assert row.reasons == ("RuntimeError: nvcc is missing",)


@pytest.mark.parametrize("how", ["environment", "switch"])
def test_strict_mode_is_not_swallowed(how, llvm, monkeypatch) -> None:
    if how == "environment":
        monkeypatch.setenv("TVM_FLASHINFER_STRICT", "1")
    else:
        monkeypatch.setattr(strict, "_strict", None)
        set_strict_mode(True)
    hooks.enable()
    with pytest.raises(StrictFallback, match=r"strict mode is on(?s:.*)enable_disaggregation"):
        create(llvm, enable_disaggregation=True)
    create(llvm)


def test_switch_goes_before_the_environment(monkeypatch) -> None:
    monkeypatch.setenv("TVM_FLASHINFER_STRICT", "1")
    monkeypatch.setattr(strict, "_strict", None)
    assert strict.strict_mode()
    set_strict_mode(False)
    assert not strict.strict_mode()
    assert strict.strict_mode(True)
    set_strict_mode(None)
    assert strict.strict_mode()


def test_self_contained_kernels_are_handed_over(cuda, monkeypatch, tmp_path) -> None:
    """MLC LLM takes them from the attribute `extern_mods`."""
    from tvm_flashinfer import kernels

    path = tmp_path / "kernels.o"
    path.write_bytes(b"")
    monkeypatch.setattr(kernels, "build_model_object", lambda specs: path)
    hooks.enable()
    made = []
    init = HookedPagedKVCache.__init__

    def remember(self: HookedPagedKVCache, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        made.append(self)

    monkeypatch.setattr(HookedPagedKVCache, "__init__", remember)
    create(cuda)
    assert len(made[0].extern_mods) == 1


def test_cache_outside_of_a_function(llvm) -> None:
    with pytest.raises(RuntimeError, match=r"no relax\.BlockBuilder is building"):
        FlashInferPagedKVCache(
            *("mha", *[tirx.Var("n", "int64")] * 5, rx.ShapeExpr([0, 2]), 2, 8, 2, 64, 64, 0, 0),
            *(RopeMode.NORMAL, 1, 10000, {}, rx.prim_value(0), 64, False, "float16", llvm),
        )


def test_our_passes_may_be_what_imports_tvms_module_first() -> None:
    """The hook then runs in the middle of the import of our own package."""
    shown = run(
        "import warnings; warnings.simplefilter('error')\n"
        "import tvm, tvm_flashinfer; tvm_flashinfer.enable()\n"
        "from tvm_flashinfer.relax.config import PagedKVCacheConfig\n"
        "from tvm.relax.frontend.nn.llm import kv_cache\n"
        "print(kv_cache.FlashInferPagedKVCache.__module__)"
    )
    assert shown == "tvm_flashinfer.relax.hooked_kv_cache"
