"""The slots of TVM's cache that are called without a plan: ours and TVM's TIR kernels, in one run.

    python benchmarks/slots.py [--row NAME] [--json FILE]

Both sides get the same tensors. Ours is checked against float64 over the first and the last request
(attention), or to the bit or within rounding of TVM's (the others), after outputs were filled with
NaN; TVM's outputs are compared with ours. Times are those of `harness.seconds_of_calls`.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tvm
import tvm_ffi
from harness import cuda_device, cuda_target, seconds_of_calls, write_results
from tvm.relax.frontend.nn.llm import kv_cache as tvm_kv_cache
from tvm.s_tir import dlight as dl

import tvm_flashinfer

_TESTS = Path(__file__).parent.parent / "tests"
sys.path[:0] = [str(_TESTS), str(_TESTS / "ops")]

from cache_calls import CacheBatch, CacheSpec, make_cache_batch  # noqa: E402
from cache_oracle import assert_request, random_tree  # noqa: E402
from calls import passed  # noqa: E402
from device_tensors import poisoned, to_device  # noqa: E402

tree_attn = importlib.import_module("tvm.relax.frontend.nn.llm.tree_attn")

HQ, HKV, D, PAGE_SIZE, DTYPE = 32, 8, 128, 16, "float16"
WINDOW = 1024


class _Repeated:
    """A generator whose normal values repeat: batches of a gigabyte are made in seconds."""

    def __init__(self) -> None:
        self._rng = np.random.default_rng(0)
        self._block = self._rng.standard_normal((1 << 22) + 3, np.float32)

    def standard_normal(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        """Values of a block, again and again."""
        return np.resize(self._block, shape)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rng, name)


@dataclass
class Row:
    """Two sides, how many bytes or operations a call is, and what checks it."""

    name: str
    ours: Callable[[], None]
    theirs: Callable[[], None]
    check: Callable[[], None]
    bytes: int


def attention_specs() -> dict[str, tuple[CacheSpec, str, dict[str, Any]]]:
    """Name, shape, TVM's kernel and its settings, of each attention row."""
    rng = np.random.default_rng(1)
    trees = lambda count: [random_tree(rng, 64) for _ in range(count)]  # noqa: E731
    slides = [(37, 4)] * 32
    common: dict[str, Any] = dict(heads=(HQ, HKV), head_dim=D, page_size=PAGE_SIZE, dtype=DTYPE)
    decode = dict(common, kv_lens=[2048] * 32, sliding=slides)
    prefill = dict(common, kv_lens=[2048] * 8, qo_lens=[256] * 8, sliding=[(5, 0)] * 8)
    return {
        "decode-window": (CacheSpec("decode_paged", **decode), "decode", {"sliding": True}),
        "decode-window-rope": (
            CacheSpec("decode_paged", **decode, rotary_mode=1), "decode", {"sliding": True},
        ),
        "prefill-paged": (
            CacheSpec("prefill_paged", **{**prefill, "sliding": None}),
            "prefill",
            {"sliding": False},
        ),
        "prefill-window": (
            CacheSpec("prefill_paged", **prefill, causal=1, options={"layer_window": WINDOW}),
            "prefill",
            {"sliding": True, "window": WINDOW},
        ),
        "prefill-window-rope": (
            CacheSpec("prefill_paged", **{**prefill, "sliding": [(37, 4)] * 8}, rotary_mode=1),
            "prefill",
            {"sliding": True},
        ),
        "tree-paged": (
            CacheSpec(
                "tree_paged", **common, kv_lens=[2048] * 16, qo_lens=[64] * 16, trees=trees(16)
            ),
            "tree_paged",
            {},
        ),
        "tree-ragged": (
            CacheSpec(
                "tree_ragged", **common, kv_lens=[64] * 64, qo_lens=[64] * 64, trees=trees(64)
            ),
            "tree_ragged",
            {},
        ),
    }  # fmt: skip


def compiled(function: Any, target: tvm.target.Target) -> Callable[..., None]:
    """Build one of TVM's kernels as its cache does."""
    module = tvm.IRModule({"main": function.with_attr("global_symbol", "main")})
    with target:
        module = dl.ApplyDefaultSchedule(dl.gpu.Fallback())(module)
    return tvm.compile(module, target=target)["main"]


def tir_attention(kind: str, target: tvm.target.Target, sliding: bool = False, window: int = 1024):
    """TVM's own attention kernel."""
    kernels = tvm_kv_cache
    if kind == "decode":
        function = kernels._attention_decode(HKV, HQ, D, DTYPE, sliding, {}, target)
    elif kind == "prefill":
        function = kernels._attention_prefill(
            HKV, HQ, D, DTYPE, sliding, {}, target, sliding_window_size=window
        )
    elif kind == "tree_paged":
        function = tree_attn.tree_attn_with_paged_kv_cache(HKV, HQ, D, DTYPE, {}, target)
    else:
        function = tree_attn.tree_attn(HKV, HQ, D, DTYPE, {}, target)
    return compiled(function, target)


def attention_row(name: str, device: Any, target: tvm.target.Target) -> Row:
    """Tensors and sides of an attention slot."""
    spec, kind, settings = attention_specs()[name]
    batch = make_cache_batch(_Repeated(), device, spec)
    if "pages" in batch.args:  # TVM multiplies what lies in unused slots by 0.
        batch.args["pages"] = to_device(np.nan_to_num(batch.args["pages"].numpy()), device)
    bound = tvm_ffi.get_global_func(f"flashinfer.bind_attention_{spec.slot}")(
        json.dumps(spec.options)
    )
    kernel = tir_attention(kind, target, **settings)
    arguments = passed(batch.args, {})

    def check() -> None:
        ours, theirs = (_outputs(batch, side) for side in (bound, kernel))
        rows = np.concatenate([[0], np.cumsum(spec.rows)])
        for b in {0, len(spec.kv_lens) - 1}:
            part = slice(rows[b], rows[b + 1])
            q, k, v = batch.q[part], batch.keys[b], batch.values[b]
            what = f"{name}, request {b}"
            assert_request(ours[0][part], ours[1][part], q, k, v, batch.extras(b), spec.scale, what)
        seen = np.isfinite(ours[1])
        worst = np.abs(ours[0].astype(np.float64) - theirs[0].astype(np.float64))[seen].max()
        # TVM's kernels round angles of thousands of radians to float.
        if not worst < (3e-2 if spec.rotary_mode else 4e-3):
            raise AssertionError(f"{name}: TVM's output differs from ours by {worst:.1e}")

    keys = sum(spec.kv_lens) * HKV * D * 2 * 2
    return Row(
        name,
        lambda: bound(*arguments),
        lambda: kernel(*arguments),
        check,
        keys + sum(spec.rows) * HQ * D * 2 * 2,
    )


def _outputs(batch: CacheBatch, side: Callable[..., None]) -> tuple[np.ndarray, np.ndarray]:
    """Output and LSE of a side, written over NaN."""
    fresh = {
        name: poisoned(batch.args[name].layout.shape, dtype, batch.device)
        for name, dtype in (("o", DTYPE), ("lse", "float32"))
    }
    side(*passed(batch.args, fresh))
    batch.device.sync()
    return fresh["o"].numpy(), fresh["lse"].numpy()


def memory_row(name: str, device: Any, target: tvm.target.Target) -> Row:
    """Tensors and sides of a slot that moves or merges rows."""
    rng = _Repeated()
    op = lambda name: tvm_ffi.get_global_func(f"flashinfer.{name}")  # noqa: E731
    on = lambda array: to_device(array, device)  # noqa: E731
    halves = lambda *shape: rng.standard_normal(shape, np.float32).astype(DTYPE)  # noqa: E731
    kind, rows = name.rsplit("-", 1)
    n = int(rows)
    if kind == "merge":

        def inputs() -> list[Any]:
            lse = lambda: on(np.abs(rng.standard_normal((n, HQ), np.float32)))  # noqa: E731
            return [on(halves(n, HQ, D)), lse(), on(halves(n, HQ, D)[::-1].copy()), lse()]

        ours = op("merge_state_in_place")
        theirs = compiled(tvm_kv_cache._merge_state_inplace(HQ, D, DTYPE, target), target)
        written, moved = (0, 1), 3 * n * HQ * (D * 2 + 4)
    elif kind == "rotary":
        positions = on(np.arange(n, dtype=np.int32))
        qkv = on(halves(n, HQ + 2 * HKV, D))

        def inputs() -> list[Any]:
            out = [poisoned((n, heads, D), DTYPE, device) for heads in (HQ, HKV, HKV)]
            return [qkv, positions, *out, 1]

        ours = op("bind_split_qkv_rotary")(1e4, 1.0, D, "{}")
        rope = tvm_kv_cache.llama_rope_with_position_map(1e4, 1.0, D, HQ, HKV, DTYPE, {}, D)
        theirs = compiled(rope, target)
        written, moved = (2, 3, 4), 2 * n * (HQ + 2 * HKV) * D * 2
    else:
        num_pages = 2 * n if kind == "copy_page" else max(2 * n // PAGE_SIZE, 2048)
        pool = halves(num_pages, 2, HKV, PAGE_SIZE, D)
        slots = np.random.default_rng(2).permutation(num_pages * PAGE_SIZE).astype(np.int32)
        if kind == "append":
            k, v = on(halves(n, HKV, D)), on(halves(n, HKV, D)[::-1].copy())
            where = on(slots[:n].copy())
            inputs = lambda: [on(pool), k, v, where]  # noqa: E731
            ours = op("append_paged_kv_cache")
            theirs = compiled(tvm_kv_cache._kv_cache_transpose_append(HKV, D, DTYPE), target)
            moved = 2 * n * 2 * HKV * D * 2
        elif kind == "compact":
            each = n // 16
            indptr, pairs = (
                on(np.arange(17, dtype=np.int32) * each),
                on(slots[: 2 * n].reshape(2, n)),
            )
            inputs = lambda: [on(pool), indptr, pairs, 16]  # noqa: E731
            ours = op("compact_kv_copy")
            theirs = compiled(tvm_kv_cache._compact_kv_copy(HKV, D, DTYPE, target), target)
            moved = 2 * n * 2 * HKV * D * 2
        else:
            inputs = lambda: [on(pool), 0, 1, PAGE_SIZE]  # noqa: E731
            ours = op("copy_single_page")
            theirs = compiled(
                tvm_kv_cache._copy_single_page(HKV, PAGE_SIZE, D, DTYPE, target), target
            )
            moved = 2 * PAGE_SIZE * 2 * HKV * D * 2
        written = (0,)

    def tensors(arguments: list[Any]) -> list[Any]:
        return [x if isinstance(x, int) else x.tensor for x in arguments]

    def check() -> None:
        sides = []
        for side in (ours, theirs):
            arguments = inputs()
            side(*tensors(arguments))
            device.sync()
            sides.append([arguments[i].numpy().astype(np.float64) for i in written])
        for mine, other in zip(*sides, strict=True):
            # TVM rounds rotary angles of thousands of radians to float.
            bound = {"merge": 4e-3, "rotary": 2e-2}.get(kind, 0)
            np.testing.assert_allclose(mine, other, 4e-3 if bound else 0, bound, err_msg=name)

    arguments = tensors(inputs())
    return Row(name, lambda: ours(*arguments), lambda: theirs(*arguments), check, moved)


MEMORY_ROWS = [
    "merge-64", "merge-8192", "rotary-64", "rotary-8192", "append-64", "append-8192",
    "copy_page-1", "compact-1024",
]  # fmt: skip


def main() -> None:
    """Run the rows and print a table."""
    names = [*attention_specs(), *MEMORY_ROWS]
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--row", action="append", choices=names)
    parser.add_argument("--json", type=Path, help="write the results here too")
    arguments = parser.parse_args()
    device = cuda_device()
    target = cuda_target(device)
    print(
        f"{device.device_name}, TVM {tvm.__version__}, tvm_flashinfer {tvm_flashinfer.__version__}"
    )
    print(f"{'row':24} {'ours us':>9} {'TIR us':>9} {'ratio':>6}  ours")
    results = []
    for name in arguments.row or names:
        make = memory_row if name in MEMORY_ROWS else attention_row
        row = make(name, device, target)
        row.check()
        seconds = seconds_of_calls({"ours": row.ours, "tir": row.theirs}, device)
        ours, theirs = seconds["ours"], seconds["tir"]
        rate = f"{row.bytes / ours / 1e12:.2f} TB/s"
        print(f"{name:24} {ours * 1e6:9.1f} {theirs * 1e6:9.1f} {theirs / ours:6.1f}  {rate}")
        results.append({"row": name, "ours_us": ours * 1e6, "tir_us": theirs * 1e6, "rate": rate})
    if arguments.json:
        rows = [f"--row {name}" for name in arguments.row or ()]
        command = " ".join(["python benchmarks/slots.py", *rows])
        write_results(arguments.json, device, command, results)


if __name__ == "__main__":
    main()
