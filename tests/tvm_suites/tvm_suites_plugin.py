"""Runs TVM's own paged KV cache suites, unmodified, on the functions of tvm_flashinfer.

`vm.builtin.paged_attention_kv_cache_create` is overridden: whatever functions a test gives it, the
cache is made with ours in every slot, chosen as our cache builder chooses. TVM's kernels, which the
tests compile, are compiled when they are first called, and each of their calls counts.

Environment:
  TVM_SUITES_PLANNED   auto (default): kinds as our builder takes them. 0: no plan for multi-head
                     attention. 1: on CPU too, plans as the builder takes them for sm_90a.
  TVM_SUITES_KEEP_ATTENTION=1  leave TVM's kernels in the attention slots (is a failure theirs?).
  TVM_SUITES_SKIP_FLOAT32_CUDA=1  skip float32 caches on CUDA, whose attention has to stay TVM's.
  TVM_SUITES_FAKE_CUDA=1  "cuda" is the CPU: a dry run of the CUDA files without a GPU.
  TVM_SUITES_OUT=FILE  also write the table there.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import os
import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

PLANNED = os.environ.get("TVM_SUITES_PLANNED", "auto")
KEEP = os.environ.get("TVM_SUITES_KEEP_ATTENTION") == "1"
SKIP_F32 = os.environ.get("TVM_SUITES_SKIP_FLOAT32_CUDA") == "1"
FAKE = os.environ.get("TVM_SUITES_FAKE_CUDA") == "1"
SUITE = "test_runtime_builtin_paged_attention_kv_cache_"
CREATE = "vm.builtin.paged_attention_kv_cache_create"

#: What the current test did.
now = SimpleNamespace(item=None, inside=False)
rows: list[tuple] = []


def reset(item):
    now.item, now.inside = item, False
    now.caches, now.asked, now.tvm_calls, now.kinds, now.direct = [], 0, 0, [], 0


# ---- modules that the machine may lack ----
def stub(name):
    module = ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    sys.modules[name] = module
    return module


def stub_modules():
    if importlib.util.find_spec("scipy") is None:

        def softmax(x, axis=None):
            e = np.exp(x - np.max(x, axis=axis, keepdims=True))
            return e / e.sum(axis=axis, keepdims=True)

        scipy, special = stub("scipy"), stub("scipy.special")
        scipy.special, special.softmax, scipy.__version__ = special, softmax, "0"
    # The FlashInfer files only ask whether these names can be imported.
    flashinfer, jit = stub("flashinfer"), stub("flashinfer.jit")
    flashinfer.jit = jit
    for name in (
        "gen_customize_batch_prefill_module",
        "gen_customize_batch_decode_module",
        "gen_batch_mla_module",
    ):
        setattr(jit, name, lambda *a, **k: pytest.fail("FlashInfer's JIT was called"))


# ---- "cuda" on a machine without one ----
def sm_90a():
    import tvm

    return tvm.target.Target(
        {
            "kind": "cuda",
            "arch": "sm_90a",
            "max_threads_per_block": 1024,
            "max_shared_memory_per_block": 49152,
            "thread_warp_size": 32,
        }
    )


def fake_cuda():
    import tvm
    from tvm.testing import env

    device = tvm.device
    tvm.cuda = lambda *_: tvm.cpu()
    tvm.device = lambda kind, *a: device("cpu" if kind == "cuda" else kind, *a)
    tvm.testing.device_enabled = lambda kind: kind == "cuda"
    for module in (tvm.testing, getattr(tvm.testing, "utils", tvm.testing)):
        module.device_enabled = tvm.testing.device_enabled
    env.has_cuda = env.has_gpu = lambda *a, **k: True
    target = sm_90a()
    from_device = tvm.target.Target.from_device
    tvm.target.Target.from_device = staticmethod(
        lambda d: target if is_cuda_suite() else from_device(d)
    )
    try:
        import torch
    except ImportError:
        return
    real = torch.device

    class Meta(type):
        """Makes the device "cuda" the CPU."""

        def __instancecheck__(cls, x):
            return isinstance(x, real)

        def __call__(cls, *a, **k):
            return real("cpu") if a and str(a[0]).startswith("cuda") else real(*a, **k)

    torch.device = Meta("device", (), {})


def is_cuda_suite():
    return now.item is not None and not now.item.fspath.basename.endswith("_cache_cpu.py")


# ---- TVM's kernels: compiled when called ----
class Lazy:
    """A kernel of TVM that is compiled when it is first called."""

    def __init__(self, build, args, kwargs):
        import tvm_ffi

        self.build = lambda: build(*args, **kwargs)
        self.made = None

        def call(*values):
            if not now.inside:
                now.tvm_calls += 1
            if self.made is None:
                self.made = self.build()
            return self.made.main(*values)

        self.main = tvm_ffi.convert(call)


def patch_kernels():
    import tvm
    import tvm_ffi
    from tvm.relax.backend.cuda import flashinfer as generators
    from tvm.relax.frontend.nn.llm import kv_cache

    build = tvm.tirx.build
    generated: list[tuple] = []

    def make(generator):
        def prefill(*args, **kwargs):
            func = generator(*args, **kwargs)
            if args[4]:  # sliding_window
                generated.append((func, kwargs.get("sliding_window_size", 1024)))
            return func

        return prefill

    for name in ("_attention_prefill", "_attention_prefill_cpu"):
        setattr(kv_cache, name, make(getattr(kv_cache, name)))

    def built(func, *args, **kwargs):
        if SUITE not in sys._getframe(1).f_globals.get("__name__", ""):
            return build(func, *args, **kwargs)
        for known, window in generated:
            # A test that calls the kernel itself; those of a cache are compiled in a fixture.
            if func.same_as(known) and sys._getframe(1).f_code.co_name.startswith("test_"):
                options = json.dumps({"layer_window": window})
                bind = tvm_ffi.get_global_func("flashinfer.bind_attention_prefill_paged")
                ours = bind(options)

                def main(*values, ours=ours):
                    now.direct += 1
                    return ours(*values)

                return SimpleNamespace(main=main)
        return Lazy(build, (func, *args), kwargs)

    tvm.tirx.build = built

    # What these compile is in our library.
    def ours(**_):
        class Functions(dict):
            """Our functions by the names that FlashInfer's modules have."""

            def __missing__(self, name):
                return tvm_ffi.get_global_func(f"flashinfer.{name}")

        return [Functions()]

    for kind in ("prefill", "decode", "mla"):
        setattr(generators, f"gen_flashinfer_{kind}_module", ours)

    # Calls of attention by the tests.
    get = tvm.get_global_func

    def counted(name, *args, **kwargs):
        function = get(name, *args, **kwargs)
        asks = name.startswith("vm.builtin.attention_kv_cache_") and name.endswith(
            ("fused_qkv", "shared_kv", "self_attention", "cross_attention")
        )
        if not asks:
            return function

        def call(*values):
            now.asked += 1
            return function(*values)

        return call

    tvm.get_global_func = counted


# ---- the cache ----
def patch_create():
    import tvm
    import tvm_ffi
    from tvm.relax.frontend.nn.llm.kv_cache import AttnKind

    from tvm_flashinfer.relax import slots
    from tvm_flashinfer.relax.config import PagedKVCacheConfig
    from tvm_flashinfer.relax.support import (
        attention_head_dims,
        kernel_specs,
        unplanned_reasons,
        unsupported_reasons,
    )

    create = tvm_ffi.get_global_func(CREATE)
    names = {int(kind): kind.name.lower() for kind in AttnKind}

    def ours(slot):
        return tvm_ffi.get_global_func(f"flashinfer.{slot.function}")

    def replace(args):
        args = list(args)
        sizes = list(args[0])
        kinds = tuple(names[int(kind)] for kind in args[6])
        on_cuda = args[12].device.dlpack_device_type() == tvm.cpu().dlpack_device_type() + 1
        target = (
            tvm.target.Target.from_device(args[12].device) if on_cuda else tvm.target.Target("llvm")
        )
        module = now.item.module
        latent = "mla" in kinds
        original = (
            (module.qk_nope_head_dim + module.qk_rope_head_dim, module.v_head_dim)
            if latent
            else (0, 0)
        )
        extra = {"layer_sliding_window_size": sizes[5]} if len(sizes) > 5 else {}
        config = PagedKVCacheConfig(
            attn_kind=kinds,
            max_batch_size=sizes[0],
            max_total_seq_len=sizes[1],
            prefill_chunk_size=sizes[2],
            page_size=sizes[3],
            support_sliding_window=sizes[4],
            layer_partition=None,
            num_hidden_layers=len(kinds),
            num_attention_heads=args[2],
            num_key_value_heads=args[3],
            qk_head_dim=args[4],
            v_head_dim=args[5],
            mla_original_qk_head_dim=original[0],
            mla_original_v_head_dim=original[1],
            rope_mode=args[8],
            rope_scale=args[9],
            rope_theta=args[10],
            rope_scaling={},
            rope_ext_factors=None,
            rotary_dim=args[4],
            enable_disaggregation=bool(args[7]),
            dtype=str(args[12].dtype),
            **extra,
        )
        reasons = unsupported_reasons(config, target)
        float32_on_cuda = on_cuda and config.dtype == "float32"
        keep = float32_on_cuda or KEEP
        if reasons and not float32_on_cuda:
            raise RuntimeError(f"our builder refuses this cache: {reasons}")
        common = {"rotary_dim": config.rotary_dim, "rope_scaling": {}} if config.rotates else {}
        window = (
            {"layer_window": config.layer_sliding_window_size} if config.has_sliding_layers else {}
        )
        described = []

        def made(slot, **more):
            options = {**common, **more, **(window if slot in slots.LAYER_WINDOW_SLOTS else {})}
            goal = sm_90a() if PLANNED == "1" else target
            planned = bool(slot.planned) and not unplanned_reasons(config, goal, slot.attention)
            planned = planned and (latent or PLANNED != "0")
            got = tvm_ffi.get_global_func("flashinfer.cache_slot")(
                slot.attention, json.dumps(options, sort_keys=True), planned, sizes[4]
            )
            if got[0] != "tirx":
                described.append(f"{slot.name}={got[0]}")
            return got

        if keep:
            described.append("attention=TVM's" + " (float32 on cuda)" * float32_on_cuda)
        if latent:
            qk, vo = attention_head_dims(config, slots.PREFILL_RAGGED.attention)
            args[13], args[14] = None, ours(slots.APPEND_MLA)
            if not keep:
                ragged = made(slots.PREFILL_RAGGED, head_dim_qk=qk, head_dim_vo=vo)
                args[15:23] = [ragged, *[[]] * 6, made(slots.MLA)]
        else:
            args[13], args[14] = ours(slots.APPEND), None
            if not keep:
                args[15:23] = [*(made(slot) for slot in slots.ATTENTION_SLOTS), []]
        merge = ours(slots.MERGE_STATE)
        args[23] = [merge, merge]
        args[24] = tvm_ffi.get_global_func("flashinfer.bind_split_qkv_rotary")(
            float(config.rope_theta), float(config.rope_scale), config.rotary_dim, "{}"
        )
        args[25] = ours(slots.COPY_PAGE_MLA if latent else slots.COPY_PAGE)
        args[26] = ours(slots.DEBUG_GET_KV_MLA if latent else slots.DEBUG_GET_KV)
        args[27] = ours(slots.COMPACT_COPY)
        specs = kernel_specs(config, target) if on_cuda and not keep else []
        now.caches.append((config, keep, specs))
        now.kinds.append(" ".join(described) or "all tirx")
        return args

    def override(*args):
        if now.item is None or now.inside:  # our probe of TVM's calls makes caches too
            return create(*args)
        now.inside = True
        try:
            args = replace(args)
        finally:
            now.inside = False
        return create(*args)

    tvm.register_global_func(CREATE, override, override=True)


def pytest_configure(config):
    stub_modules()
    import tvm
    import tvm.testing

    import tvm_flashinfer
    from tvm_flashinfer.contract import check_contract

    check_contract()
    reset(None)
    if FAKE:
        fake_cuda()
    patch_kernels()
    patch_create()
    print(f"TVM {tvm.__version__} ({tvm.__path__[0]}), tvm_flashinfer {tvm_flashinfer.__path__[0]}")


def pytest_collection_modifyitems(items):
    for item in items:
        params = str(getattr(item, "callspec", SimpleNamespace(params="")).params)
        if SKIP_F32 and "float32" in params and not item.fspath.basename.endswith("_cache_cpu.py"):
            item.add_marker(pytest.mark.skip(reason="float32 on CUDA: our builder refuses it"))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    import tvm_flashinfer

    reset(item)
    tvm_flashinfer.reset_call_counts()


ATTENTION = (
    "attention_",
    "batch_prefill_paged_run",
    "batch_prefill_ragged_run",
    "batch_decode_run",
    "batch_mla_run",
)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_call(item):
    import tvm_flashinfer

    outcome = yield
    counts = tvm_flashinfer.call_counts()
    device = "cuda" if is_cuda_suite() and not FAKE else "cpu"
    here = counts[device]
    native = sum(here.values())
    attention = sum(n for name, n in here.items() if name.startswith(ATTENTION))
    mixed = any(keep for _, keep, _ in now.caches)
    rows.append(
        (
            item,
            outcome.excinfo,
            now.asked,
            native,
            attention,
            now.tvm_calls,
            mixed,
            here,
            now.caches,
            now.kinds,
        )
    )
    if outcome.excinfo is not None:
        return
    problems = []
    if (now.asked or now.direct) and native == 0:
        problems.append(f"no native call on {device}")
    if not mixed and attention < now.asked + now.direct:
        problems.append(f"{now.asked} attention calls, {attention} of ours on {device}")
    if not mixed and now.tvm_calls:
        problems.append(f"{now.tvm_calls} calls of TVM's kernels")
    if now.asked and not now.caches:
        problems.append("attention on a cache that was not ours")
    if problems:
        outcome.force_exception(pytest.fail.Exception("; ".join(problems)))


def pytest_terminal_summary(terminalreporter):
    lines = ["outcome native attention asked TVM's  test [slots]"]
    total, specs, by_name = 0, {}, {}
    for item, bad, asked, native, attention, tvm_calls, mixed, here, caches, kinds in rows:
        total += native
        for name, n in here.items():
            by_name[name] = by_name.get(name, 0) + n
        for _, _, needed in caches:
            specs.update({spec: None for spec in needed})
        state = "failed" if bad else "ok" if asked or native else "empty"
        if bad and issubclass(bad[0], pytest.skip.Exception):
            state = "skipped"
        name = f"{item.fspath.basename.removeprefix(SUITE)[:-3]}::{item.name}"
        lines.append(
            f"{state:7} {native:6} {attention:6} {asked:6} {tvm_calls:6}  {name}"
            f"{' MIXED' if mixed else ''} [{'; '.join(dict.fromkeys(kinds))}]"
        )
    lines.append(f"native calls in all: {total}; by function:")
    lines += [f"  {n:7} {name}" for name, n in sorted(by_name.items())]
    if specs:
        lines.append("kernels on CUDA: " + ", ".join(sorted(spec.name for spec in specs)))
    empty = sum(not bad and not asked and not native for _, bad, asked, native, *_ in rows)
    lines.append(
        f"{len(rows)} tests ran; {empty} of them return at once, by their own condition; "
        f"{sum(row[6] for row in rows)} mixed (attention TVM's, the rest ours)"
    )
    terminalreporter.section("tvm_flashinfer")
    for line in lines:
        terminalreporter.write_line(line)
    if out := os.environ.get("TVM_SUITES_OUT"):
        with open(out, "w") as file:
            file.write("\n".join(lines) + "\n")
