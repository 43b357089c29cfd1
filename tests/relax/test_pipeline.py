"""The pipeline ``"flashinfer"``, and `DispatchAttention` among TVM's own passes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tvm
from attention_modules import called, dispatched, module, rows, tensors
from tvm import relax as rx
from tvm import tirx
from tvm.relax.backend.cpu_generic import pipeline as cpu_pipeline
from tvm.relax.backend.cuda import pipeline as cuda_pipeline

from tvm_flashinfer.relax import DispatchAttention, DispatchSampling

tvm_pipelines = {"llvm": cpu_pipeline, "cuda": cuda_pipeline}
op = rx.op
DENSE = "flashinfer.attention_dense"
SHAPES = {"x": ("b", "n", 128), "w": (128, 384)}


def block(emit: Any, x: rx.Expr, w: rx.Expr) -> rx.Expr:
    """Self-attention with a projection, a triangle and a residual, in two forms."""
    b, n, _ = list(x.ty.shape)
    parts = emit(op.split(emit(op.matmul(x, w)), 3, axis=-1))
    q, k, v = (emit(op.reshape(emit(rx.TupleGetItem(parts, i)), [b, n, 2, 64])) for i in range(3))
    first = emit(op.nn.attention(q, k, v, causal_mask="TopLeft"))
    q, k, v = (emit(op.permute_dims(y, [0, 2, 1, 3])) for y in (first, k, v))
    scores = emit(op.matmul(q, emit(op.permute_dims(k, [0, 1, 3, 2]))))
    o = emit(op.permute_dims(emit(op.matmul(emit(op.nn.softmax(scores)), v)), [0, 2, 1, 3]))
    return op.add(emit(op.reshape(o, [b, n, 128])), x)


def make(dtype: str = "float32") -> tvm.IRModule:
    return module(tensors(SHAPES, dtype), block)


def inputs(rng: np.random.Generator) -> list[np.ndarray]:
    x, w = rng.standard_normal((2, 9, 128)), rng.standard_normal((128, 384)) / 12
    return [x.astype("float32"), w.astype("float32")]


def run(pipeline: Any, arrays: list[np.ndarray], mod: tvm.IRModule) -> np.ndarray:
    executable = tvm.compile(mod, target="llvm", relax_pipeline=pipeline)
    vm = rx.VirtualMachine(executable, tvm.cpu())
    return vm["main"](*(tvm.runtime.tensor(x) for x in arrays)).numpy()


def test_numbers_are_those_of_the_default_pipeline(rng: np.random.Generator) -> None:
    arrays = inputs(rng)
    want = run("default", arrays, make())
    got = run("flashinfer", arrays, make())
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)


def test_cache_and_attention(module_builder: Any, llvm: Any) -> None:
    """Both passes are in it, and the report has both."""
    builder = rx.BlockBuilder(make())
    module_builder[0](
        builder, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        qk_head_dim=16, v_head_dim=16, rotary_dim=16, dtype="float32",
    )  # fmt: skip
    pipeline = rx.get_pipeline("flashinfer", target=llvm, strict=True)
    reported = {row.site for row in rows(pipeline(builder.get()))}
    assert reported == {"main", "create_flashinfer_paged_kv_cache"}


@pytest.mark.parametrize("use_cuda_graph", [False, True])
def test_cuda_to_the_end(cuda: Any, use_cuda_graph: bool) -> None:
    """Down to calls of the virtual machine; with CUDA graphs our calls are in the captured part."""
    shapes = {"x": (2, 9, 128), "w": (128, 384)}
    mod = module(tensors(shapes, "float16"), block)
    with tvm.transform.PassContext(config={"relax.backend.use_cuda_graph": use_cuda_graph}):
        lowered = rx.get_pipeline("flashinfer", target=cuda, ship="shared")(mod)
    by_name = {var.name_hint: fn for var, fn in lowered.functions_items()}
    names = [name for name in by_name if name.endswith("cuda_graph_capture")]
    assert bool(names) == use_cuda_graph
    holders = [by_name[name] for name in names or ["main"]]
    text = "".join(function.script() for function in holders)
    assert text.count(f'"{DENSE}"') == 2


_BEFORE = {
    "canonical": rx.transform.CanonicalizeBindings(),
    "constants": rx.transform.FoldConstant(),
    "expressions": rx.transform.EliminateCommonSubexpr(),
    "non-dataflow": rx.transform.ToNonDataflow(),
    "dataflow": rx.transform.ConvertToDataflow(),
    "dead code": rx.transform.DeadCodeElimination(),
    "parallel products": rx.transform.CombineParallelMatmul(),
    "fusion": tvm.transform.Sequential(
        [rx.transform.AnnotateTIROpPattern(), rx.transform.FuseOps()]
    ),
    "memory": rx.transform.StaticPlanBlockMemory(),
    "local functions": rx.transform.LambdaLift(),
}


@pytest.mark.parametrize("name", _BEFORE)
def test_order_of_passes(name: str) -> None:
    """Each of TVM's passes leaves what ours finds, and takes what ours makes."""
    other, ours = _BEFORE[name], DispatchAttention(tvm.target.Target("llvm"))
    for order in ([other, ours], [ours, other]):
        after = tvm.transform.Sequential(order)(make())
        rx.analysis.well_formed(after)
        assert called(after) == [DENSE, DENSE]


def test_mixed_precision_goes_first() -> None:
    """TVM's pass for it takes no call of a packed function; the casts it makes are read through."""
    mixed = rx.transform.ToMixedPrecision()(make())
    assert called(dispatched(mixed, strict=True)) == [DENSE, DENSE]


@pytest.mark.parametrize("kind", ["llvm", "cuda"])
def test_every_place_in_the_pipeline(kind: str, cuda: Any, llvm: Any) -> None:
    """Ours finds all before operators become TIR, nothing after it, and breaks no pass behind it.

    On CUDA with graphs, whose rewriting and memory planning come last.
    """
    target = cuda if kind == "cuda" else llvm
    backend = tvm_pipelines[kind]
    ours = [DispatchAttention(target, ship="shared"), DispatchSampling(target)]
    mod = make()
    if kind == "cuda":
        mod = module(tensors({"x": (2, 9, 128), "w": (128, 384)}, "float16"), block)
    with target, tvm.transform.PassContext(config={"relax.backend.use_cuda_graph": True}):
        dispatch = backend.library_dispatch_passes(target)
        lowering = [
            *backend.legalize_passes(target),
            *backend.dataflow_lower_passes(target),
            *backend.finalize_passes(target),
        ]
        passes = [*dispatch, *lowering]
        for place in range(len(passes) + 1):
            after = tvm.transform.Sequential(ours)(mod)
            rx.analysis.well_formed(after)
            if place > len(dispatch):
                assert after.same_as(mod)
            else:
                lowered = tvm.transform.Sequential(passes[place:])(after)
                functions = [f for f in lowered.functions.values() if isinstance(f, rx.Function)]
                assert "".join(f.script() for f in functions).count(DENSE) == 4  # 2 in the report
            if place < len(passes):
                mod = passes[place](mod)


def test_after_legalization_there_is_nothing() -> None:
    legal = rx.transform.LegalizeOps()(make())
    assert DispatchAttention(tvm.target.Target("llvm"))(legal).same_as(legal)


def test_target() -> None:
    """It must be known, and one that there are kernels for."""
    with pytest.raises(ValueError, match="target is not known"):
        rx.get_pipeline("flashinfer")(make())
    with pytest.raises(ValueError, match=r"'vulkan'.*cuda and llvm"):
        rx.get_pipeline("flashinfer", target=tvm.target.Target("vulkan"))(make())


def test_symbols_of_the_report() -> None:
    """The symbolic sizes of a rewritten function are still parameters."""
    after = dispatched(make())
    found = rx.analysis.free_symbolic_vars(after["main"])
    assert not list(found)
    assert isinstance(after["main"].params[0].ty.shape[0], tirx.Var)
