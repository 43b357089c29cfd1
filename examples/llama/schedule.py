"""CPU schedules: matrix products that reach the machine's limits, and row-parallel glue.

Without a schedule TVM runs a matmul on CPU as three scalar loops on one core. ``UseCPUMatmul``
replaces ``matmul(x, permute_dims(w))``, which is what ``nn.Linear`` becomes, by a PrimFunc written
for it. The weights stay as they are, (out_features, in_features). On CUDA, TVM's own dlight rules
do this job.
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm import relax, s_tir, tirx
from tvm.relax.expr_functor import PyExprMutator, mutator
from tvm.s_tir import dlight
from tvm.script import tirx as T
from tvm.target import Target, codegen

_ROWS, _COLUMNS = 2, 4  # of a tile: eight sums, which fit 16 registers with their operands
_ROW_BLOCK = 64  # rows of x that are worked on while a block of w is in the caches
_OPAQUE = 8  # operator pattern of a PrimFunc that is not to be fused


def vector_lanes(target: Target) -> int:
    """Count the float32 numbers in a vector register: 16 with AVX-512, 8 with AVX2, or else 4."""
    with target:
        features = codegen.llvm_cpu_has_features
        return 16 if features("avx512f") else 8 if features("avx2") else 4


def nt_matmul(n: int, k: int, dtype: str, out_dtype: str, lanes: int) -> tirx.PrimFunc | None:
    """Build ``y = x @ w.T`` on CPU for x (m, k), w (n, k) and y (m, n), with dynamic m.

    Rows of x are taken ``_ROWS`` at a time against ``_COLUMNS`` rows of w, with a vector of sums
    for each pair in registers. The rows left over, and so all of a decode step, are dot products
    that read w in the order of memory: only then do the prefetchers reach its bandwidth. Sums are
    in float32.

    Parameters
    ----------
    n, k : int
        Rows of w, and the length of the dot products.
    dtype, out_dtype : str
        Of x and w, and of y.
    lanes : int
        See `vector_lanes`.

    Returns
    -------
    func : tirx.PrimFunc or None
        None if n or k is no multiple of what the loops take.
    """
    rows, columns, row_block = _ROWS, _COLUMNS, _ROW_BLOCK
    block = 64 if n % 64 == 0 and n >= 8192 else 32  # rows of w per task of the thread pool
    if n % block != 0 or k % lanes != 0:
        return None
    chains = next(c for c in (4, 3, 2, 1) if k % (lanes * c) == 0)
    tile_steps, row_steps = k // lanes, k // lanes // chains

    # The sums become registers only if their buffers are small arrays on the stack. TVM makes those
    # of buffers in the default scope below 1024 bytes; all others on CPU, those of scope "local"
    # too, are allocated from a pool, and then every sum is stored in every step.
    @T.prim_func(s_tir=True, private=True)
    def func(x_handle: T.handle, w_handle: T.handle, y_handle: T.handle):
        T.func_attr({"tirx.is_scheduled": True, "tirx.noalias": True, "op_pattern": _OPAQUE})
        m = T.int64()
        x = T.match_buffer(x_handle, (m, k), dtype)
        w = T.match_buffer(w_handle, (n, k), dtype)
        y = T.match_buffer(y_handle, (m, n), out_dtype)
        for wb in T.parallel(n // block):
            for xb in T.serial((m + row_block - 1) // row_block):
                rows_here: T.let = T.min(m - xb * row_block, row_block)
                for wt, xt in T.grid(block // columns, rows_here // rows):
                    with T.sblock("tile"):
                        T.reads()
                        T.writes()
                        acc = T.sblock_alloc_buffer((rows * columns * lanes,))
                        total = T.sblock_alloc_buffer((1,))
                        x0: T.let = xb * row_block + xt * rows
                        w0: T.let = wb * block + wt * columns
                        for i in T.unroll(rows * columns):
                            for lane in T.vectorized(lanes):
                                acc[i * lanes + lane] = T.float32(0)
                        for step in T.serial(tile_steps):
                            for i in T.unroll(rows):
                                for j in T.unroll(columns):
                                    for lane in T.vectorized(lanes):
                                        acc[(i * columns + j) * lanes + lane] += T.cast(
                                            x[x0 + i, step * lanes + lane], "float32"
                                        ) * T.cast(w[w0 + j, step * lanes + lane], "float32")
                        for i in T.unroll(rows):
                            for j in T.unroll(columns):
                                for lane in T.vectorized(lanes // 2):
                                    acc[(i * columns + j) * lanes + lane] += acc[
                                        (i * columns + j) * lanes + lanes // 2 + lane
                                    ]
                                for lane in T.vectorized(lanes // 4):
                                    acc[(i * columns + j) * lanes + lane] += acc[
                                        (i * columns + j) * lanes + lanes // 4 + lane
                                    ]
                                total[0] = T.float32(0)
                                for lane in T.unroll(lanes // 4):
                                    total[0] += acc[(i * columns + j) * lanes + lane]
                                y[x0 + i, w0 + j] = T.cast(total[0], out_dtype)
                for xr, wr in T.grid(rows_here % rows, block):
                    with T.sblock("row"):
                        T.reads()
                        T.writes()
                        acc = T.sblock_alloc_buffer((chains * lanes,))
                        total = T.sblock_alloc_buffer((1,))
                        x0: T.let = xb * row_block + rows_here // rows * rows + xr
                        w0: T.let = wb * block + wr
                        for i in T.unroll(chains):
                            for lane in T.vectorized(lanes):
                                acc[i * lanes + lane] = T.float32(0)
                        for step in T.serial(row_steps):
                            for i in T.unroll(chains):
                                for lane in T.vectorized(lanes):
                                    acc[i * lanes + lane] += T.cast(
                                        x[x0, (step * chains + i) * lanes + lane], "float32"
                                    ) * T.cast(w[w0, (step * chains + i) * lanes + lane], "float32")
                        for i in T.unroll(chains - 1):
                            for lane in T.vectorized(lanes):
                                acc[lane] += acc[(i + 1) * lanes + lane]
                        total[0] = T.float32(0)
                        for lane in T.unroll(lanes):
                            total[0] += acc[lane]
                        y[x0, w0] = T.cast(total[0], out_dtype)

    return func


@tvm.transform.module_pass(opt_level=0, name="UseCPUMatmul")
class UseCPUMatmul:
    """Replace ``matmul(x, permute_dims(w))`` with a static w by a call of ``nt_matmul``.

    Run before LegalizeOps; the transposes that are left without a user go with
    DeadCodeElimination. Products of other forms are left alone.
    """

    def __init__(self, target: Target) -> None:
        self.lanes = vector_lanes(target)

    def transform_module(self, mod: tvm.IRModule, _ctx: tvm.transform.PassContext) -> tvm.IRModule:
        """Rewrite every Relax function of the module."""
        rewriter = _MatmulRewriter(mod, self.lanes)
        for gvar, func in mod.functions_items():
            if isinstance(func, relax.Function):
                rewriter.builder_.update_func(gvar, rewriter.visit_expr(func))
        return rewriter.builder_.get()


@mutator
class _MatmulRewriter(PyExprMutator):
    def __init__(self, mod: tvm.IRModule, lanes: int) -> None:
        super().__init__(mod)
        self.lanes = lanes
        self.built: dict[tuple, tvm.ir.GlobalVar | None] = {}

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        call = super().visit_call_(call)
        if call.op != tvm.ir.Op.get("relax.matmul"):
            return call
        x, weight = call.args[0], self._transposed(call.args[1])
        if weight is None or len(x.ty.shape) != 3:
            return call
        if str(weight.ty.dtype) != str(x.ty.dtype):
            return call
        n, k = (int(dim) for dim in weight.ty.shape)
        gvar = self._product(n, k, str(x.ty.dtype), str(call.ty.dtype))
        if gvar is None:
            return call
        b, s, _ = x.ty.shape
        rows = self.builder_.emit(relax.op.reshape(x, (b * s, k)))
        out_ty = relax.TensorType((b * s, n), call.ty.dtype)
        out = self.builder_.emit(relax.call_tir(gvar, [rows, weight], out_ty=out_ty))
        return relax.op.reshape(out, (b, s, n))

    def _product(self, *key: Any) -> tvm.ir.GlobalVar | None:
        """Add the product of that n, k and dtypes to the module, once."""
        if key not in self.built:
            func = nt_matmul(*key, self.lanes)
            self.built[key] = func and self.builder_.add_func(func, "cpu_nt_matmul")
        return self.built[key]

    def _transposed(self, expr: relax.Expr) -> relax.Expr | None:
        """Give w if ``expr`` is bound to ``permute_dims(w)`` with w a static matrix."""
        value = self.lookup_binding(expr) if isinstance(expr, relax.Var) else None
        if not isinstance(value, relax.Call) or value.op != tvm.ir.Op.get("relax.permute_dims"):
            return None
        weight = value.args[0]
        if len(weight.ty.shape) != 2:
            return None
        return weight if all(isinstance(d, tirx.IntImm) for d in weight.ty.shape) else None


class ParallelRows(dlight.base.ScheduleRule):
    """Spread what is not a matmul over the cores by rows, and vectorise along the row.

    Covers activations (batch, seq, column): elementwise chains, inlined into one loop, and
    normalisations, a reduction along the row and an elementwise use of it. Steps of one token a
    sequence stay on one core: waking the others takes longer than the work. Functions of any other
    form, TVM's cache kernels among them, keep their loops.
    """

    def apply(self, func: tirx.PrimFunc, target: Target, _tunable: bool) -> s_tir.Schedule | None:
        """Schedule ``func``, or return None."""
        sch = s_tir.Schedule(func)
        blocks = dlight.analysis.normalize_prim_func(sch)
        if blocks is None:
            return None
        *reductions, last = dlight.base.try_inline(sch, blocks)
        out_shape = sch.get(last.block_rv).writes[0].source.shape
        # The loops have lost the dimension that is 1, batch in prefill and seq in decode.
        if last.dom_kind() != "SS" or any(block.dom_kind() != "SR" for block in reductions):
            return None
        if len(out_shape) != 3 or not isinstance(out_shape[2], tirx.IntImm):
            return None
        row, column = sch.get_loops(last.block_rv)
        if not _is_one(out_shape[1]):
            sch.parallel(row)
        for block in reductions:
            sch.compute_at(block.block_rv, row, preserve_unit_loops=True)
        lanes = vector_lanes(target)
        if int(out_shape[2]) % lanes == 0:
            sch.vectorize(sch.split(column, [None, lanes])[1])
        return sch


def _is_one(extent: tirx.Expr) -> bool:
    return isinstance(extent, tirx.IntImm) and extent.value == 1
