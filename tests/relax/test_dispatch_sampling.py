"""`DispatchSampling`: what it rewrites, what it leaves, and numbers against TVM's own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import relax as rx
from tvm import te
from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import op, spec

from tvm_flashinfer.relax import DispatchSampling, FallbackWarning, StrictModeError

PREFIX = "flashinfer.sampling."


class Sampler(nn.Module):
    """The sampling operators of TVM's frontend."""

    def sample(self, p: Any, i: Any, top_p: Any, top_k: Any, u: Any, s: Any) -> nn.Tensor:
        """From sorted rows."""
        return op.sample_top_p_top_k_from_sorted_prob(p, i, top_p, top_k, u, s)

    def renorm(self, p: Any, ordered: Any, top_p: Any, top_k: Any) -> nn.Tensor:
        """By sorted rows."""
        return op.renormalize_top_p_top_k_prob(p, ordered, top_p, top_k)

    def draw(self, p: Any, u: Any, s: Any) -> nn.Tensor:
        """From rows as they are."""
        return op.multinomial_from_uniform(p, u, s, self.dtype)

    dtype = "int32"


def sampler(
    rows: Any = "n", vocab: Any = "v", samples: Any = "m", index: str = "int32", only: str = ""
) -> tvm.IRModule:
    """A module with all of them, or only one; sizes are numbers or names."""

    def one(n: Any, dtype: str) -> Any:
        return spec.Tensor([n, 1], dtype)

    probs = spec.Tensor([rows, vocab], "float32")
    filters = {"top_p": one(rows, "float32"), "top_k": one(rows, "int32")}
    draws = {"u": one(samples, "float32"), "s": one(samples, index)}
    model = Sampler()
    model.dtype = index
    indices = spec.Tensor([rows, vocab], "int32")
    functions = {
        "sample": {"p": probs, "i": indices, **filters, **draws},
        "renorm": {"p": probs, "ordered": probs, **filters},
        "draw": {"p": probs, **draws},
    }
    mod, _ = model.export_tvm(spec={only: functions[only]} if only else functions)
    return mod


def check_well_formed(mod: tvm.IRModule) -> None:
    """TVM 0.26 says whether a module is, 0.27 raises when it is not."""
    assert rx.analysis.well_formed(mod) is not False


def rewritten(mod: tvm.IRModule, target: str = "llvm", **options: Any) -> tvm.IRModule:
    """The module after the pass, which is well formed before and after, and idempotent."""
    check_well_formed(mod)
    run = DispatchSampling(tvm.target.Target(target), **options)
    after = run(mod)
    check_well_formed(after)
    again = run(after)
    assert again.functions.keys() == after.functions.keys()
    for var in after.functions:
        tvm.ir.assert_structural_equal(again[var], after[var])
    for var, function in mod.functions_items():
        if isinstance(function, rx.Function):
            now = after[var.name_hint]
            tvm.ir.assert_structural_equal(now.ty, function.ty, map_free_vars=True)
            assert now.is_pure == function.is_pure
    return after


def calls(mod: tvm.IRModule, name: str) -> list[str]:
    """The packed functions and operators that a function calls, in order."""
    found: list[str] = []

    def visit(expr: Any) -> None:
        if isinstance(expr, rx.Call) and isinstance(expr.op, tvm.ir.Op):
            packed = expr.op.name == "relax.call_dps_packed"
            found.append(expr.args[0].global_symbol if packed else expr.op.name)

    rx.analysis.post_order_visit(mod[name], visit)
    return found


KERNELS = {
    "sample": "sample_from_sorted",
    "renorm": "renorm_from_sorted",
    "draw": "parallel_sampling_from_prob",
}


@pytest.mark.parametrize("sizes", [("n", "v", "m"), (4, 100, 9), ("n", 100, "n")], ids=str)
@pytest.mark.parametrize("index", ["int32", "int64"])
def test_every_site(sizes: Any, index: str) -> None:
    """Symbolic and static sizes, indices of 32 and 64 bits; nothing of TVM's chains is left."""
    mod = sampler(*sizes, index=index)
    after = rewritten(mod)
    assert not any(isinstance(f, tvm.tirx.PrimFunc) for f in after.functions.values())
    for name, kernel in KERNELS.items():
        held = calls(after, name)
        assert held.count(PREFIX + kernel) == 1
        left = {x for x in held if not x.startswith("flashinfer.")}
        assert left <= {"relax.reshape", "relax.astype"}, left
        assert ("relax.astype" in left) == (index == "int64" and name != "renorm")


def inputs(rng: np.random.Generator, index: str) -> dict[str, list[np.ndarray]]:
    """Arguments of every function."""
    probs = rng.dirichlet(np.full(100, 0.2), 4).astype("float32")
    order = np.argsort(-probs, axis=1, kind="stable").astype("int32")
    ordered = np.take_along_axis(probs, order, 1)
    top_p = np.array([[0.3], [0.9], [1.0], [0.0]], "float32")
    top_k = np.array([[100], [7], [100], [3]], "int32")
    uniform = rng.random((9, 1)).astype("float32")
    rows = rng.integers(0, 4, (9, 1)).astype(index)
    return {
        "sample": [ordered, order, top_p, top_k, uniform, rows],
        "renorm": [probs, ordered, top_p, top_k],
        "draw": [probs, uniform, rows],
    }


@pytest.mark.parametrize("index", ["int32", "int64"])
@pytest.mark.parametrize("pipeline", ["pass", "flashinfer", "after legalisation"])
@pytest.mark.parametrize("name", ["sample", "draw"])
def test_numbers_are_those_of_tvm(rng: Any, name: str, pipeline: str, index: str) -> None:
    """On CPU, whatever the order of the passes."""
    mod = sampler(index=index, only=name)
    plain = rx.VirtualMachine(tvm.compile(mod, target="llvm"), tvm.cpu())
    if pipeline == "pass":
        mod = rewritten(mod)
    elif pipeline == "after legalisation":
        with tvm.target.Target("llvm"):
            mod = rx.transform.LegalizeOps()(mod)
        mod = DispatchSampling(tvm.target.Target("llvm"))(mod)
        check_well_formed(mod)
    passes = "flashinfer" if pipeline == "flashinfer" else "default"
    ours = rx.VirtualMachine(tvm.compile(mod, target="llvm", relax_pipeline=passes), tvm.cpu())
    for _ in range(5):
        args = [tvm.runtime.tensor(x) for x in inputs(rng, index)[name]]
        want, got = plain[name](*args).numpy(), ours[name](*args).numpy()
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(got, want)


@pytest.mark.cuda
@pytest.mark.parametrize("ship", ["shared", "self-contained"])
def test_numbers_on_cuda(rng: Any, ship: str) -> None:
    """Against TVM on CPU."""
    cuda = tvm.cuda(0)
    if not cuda.exist:
        pytest.skip("TVM finds no CUDA device")
    target = tvm.target.Target.from_device(cuda)
    for name in ("sample", "draw"):
        mod = sampler(only=name)
        plain = rx.VirtualMachine(tvm.compile(mod, target="llvm"), tvm.cpu())
        pipeline = rx.get_pipeline("flashinfer", target=target, ship=ship)
        vm = rx.VirtualMachine(tvm.compile(mod, target=target, relax_pipeline=pipeline), cuda)
        arrays = inputs(rng, "int32")[name]
        want = plain[name](*map(tvm.runtime.tensor, arrays)).numpy()
        got = vm[name](*(tvm.runtime.tensor(x, cuda) for x in arrays)).numpy()
        np.testing.assert_array_equal(got, want)


class SortingSampler(nn.Module):
    """Renormalisation of rows that are sorted for it."""

    def renorm(self, p: Any, top_p: Any, top_k: Any) -> nn.Tensor:
        """By the rows in descending order."""
        return op.renormalize_top_p_top_k_prob(p, op.sort(p, -1, descending=True), top_p, top_k)


def sorting_sampler() -> tvm.IRModule:
    """A module of it."""
    filters = {"top_p": spec.Tensor(["n", 1], "float32"), "top_k": spec.Tensor(["n", 1], "int32")}
    probs = {"p": spec.Tensor(["n", "v"], "float32")}
    mod, _ = SortingSampler().export_tvm(spec={"renorm": probs | filters})
    return mod


def test_rows_that_are_sorted_for_it_are_not() -> None:
    """The cut-off is a threshold: the sort goes away."""
    held = calls(rewritten(sorting_sampler()), "renorm")
    assert held.count(PREFIX + "top_k_top_p_renorm_probs") == 1
    assert "relax.sort" not in held


@pytest.mark.parametrize("sorts", [False, True])
def test_renormalised_by_sorted_rows(rng: Any, sorts: bool) -> None:
    """Against NumPy: TVM's LLVM code generator refuses its own function."""
    mod = sorting_sampler() if sorts else sampler(only="renorm")
    compiled = tvm.compile(mod, target="llvm", relax_pipeline="flashinfer")
    vm = rx.VirtualMachine(compiled, tvm.cpu())
    for _ in range(5):
        probs, ordered, top_p, top_k = inputs(rng, "int32")["renorm"]
        given = (probs, top_p, top_k) if sorts else (probs, ordered, top_p, top_k)
        got = vm["renorm"](*map(tvm.runtime.tensor, given)).numpy()
        sums = ordered.astype(np.float64).cumsum(1)
        for row in range(len(probs)):
            reached = np.flatnonzero(sums[row] >= top_p[row, 0])
            last = min([*reached[:1], top_k[row, 0] - 1, len(probs[row]) - 1])
            kept = np.where(probs[row] >= ordered[row, last], probs[row], 0)
            # Sums of 1 may be reached a token earlier: one that is no more than a rounding.
            np.testing.assert_allclose(got[row], kept / kept.sum(), rtol=1e-5, atol=1e-6)


def test_report(rng: np.random.Generator) -> None:
    """Each site is a row, with the function that serves it."""
    run = DispatchSampling(tvm.target.Target("llvm"))
    run(sampler())
    rows = {row.site: row for row in run.report.rows}
    assert {name: row.kernel for name, row in rows.items()} == {
        name: PREFIX + kernel for name, kernel in KERNELS.items()
    }
    assert all(row.status == "native" for row in rows.values())
    assert "1e-6" in " ".join(rows["draw"].reasons)


def test_another_dtype_is_left_alone() -> None:
    """Probabilities of 16 bits stay TVM's, with a reason; strict mode raises it."""
    builder = rx.BlockBuilder()
    p = rx.Var("p", rx.TensorType((4, 100), "float16"))
    u = rx.Var("u", rx.TensorType((4, 1), "float32"))
    s = rx.Var("s", rx.TensorType((4, 1), "int64"))
    with builder.function("draw", [p, u, s]):
        drawn = builder.emit(rx.op.multinomial_from_uniform(p, u, s, "int64"))
        builder.emit_func_output(drawn)
    mod = builder.get()
    run = DispatchSampling(tvm.target.Target("llvm"), strict=False)
    with pytest.warns(FallbackWarning, match=r"some sampling.*\n.*p is float16.*takes float32"):
        after = run(mod)
    tvm.ir.assert_structural_equal(after["draw"], mod["draw"])
    with pytest.raises(StrictModeError, match="p is float16"):
        DispatchSampling(tvm.target.Target("llvm"), strict=True)(mod)


@pytest.mark.parametrize(
    ("function", "name"),
    [
        ("get_index_from_sorted", "sample"),
        ("get_renorm_prob", "sample"),
        ("get_renorm_cutoff", "renorm"),
        ("filter_with_top_p_top_k", "renorm"),
    ],
)
def test_a_function_of_another_meaning_is_left_alone(function: str, name: str) -> None:
    """Names prove nothing: a function that computes something else makes another chain."""
    mod = sampler(4, 100, 9)
    x = te.placeholder((4, 100), "float32", name="x")
    other = te.create_prim_func([x, te.compute((4, 100), lambda i, j: x[i, j] + 1.0, name="y")])
    mod.update_func(mod.get_global_var(function), other)
    after = DispatchSampling(tvm.target.Target("llvm"))(mod)
    for site, kernel in KERNELS.items():
        assert (PREFIX + kernel in calls(after, site)) == (site != name), site


def test_nothing_to_do() -> None:
    """A module without sampling is returned as it is, and no target is asked for."""
    builder = rx.BlockBuilder()
    x = rx.Var("x", rx.TensorType((4,), "float32"))
    with builder.function("main", [x]):
        builder.emit_func_output(builder.emit(rx.op.add(x, x)))
    mod = builder.get()
    run = DispatchSampling()
    assert run(mod).same_as(mod) or tvm_ffi.structural_equal(run(mod), mod)
    assert run.report is None
