"""Our packed functions."""

from __future__ import annotations

import contextlib
import functools
import json
import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tvm
import tvm_ffi

import tvm_flashinfer

from ..cases import Case
from ..moves import THETA
from ..rows import EPS
from ..work import CKV, GATES, NORMS, WINDOW
from . import Absent, Side
from .host_loop import load_loop

#: The kernel of a plan, by the first value behind the header (`PlanKind` and `PlanHeader` in csrc).
PLAN_KERNELS = {1: "fa2", 2: "decode", 3: "mla", 4: "fa3", 5: "batch_attention", 6: "fa3_copy"}
PLAN_HEADER = 17
#: Where the part of latent attention says whether it is for Hopper (`MLAPlanPart`).
MLA_PLACE = 2
VARIABLE = "TVM_FLASHINFER_PREFILL_KERNEL"
WORKSPACE_BYTES = (256 << 20, 16 << 20, 16 << 20)


def op(name: str) -> Any:
    """One of our functions."""
    return tvm_ffi.get_global_func(f"flashinfer.{name}")


def kernel_of_plan(case: Case, plan: Any) -> str:
    """What a plan says its run starts."""
    values = list(plan)
    if case.machine.kind == "cpu":
        return "cpu"
    if case.row.kind == "mla":
        return "sm90" if values[PLAN_HEADER + MLA_PLACE] else "fa2"
    return PLAN_KERNELS.get(values[PLAN_HEADER], f"kind {values[PLAN_HEADER]}")


def counted(case: Case, name: str) -> Callable[[], int]:
    """How often a function ended without an error on the device of a case."""
    return lambda: tvm_flashinfer.call_counts()[case.machine.kind].get(name, 0)


@contextlib.contextmanager
def prefill_kernel(name: str | None) -> Iterator[None]:
    """Let plans be made for this kernel."""
    before = os.environ.get(VARIABLE)
    if name:
        os.environ[VARIABLE] = name
    try:
        yield
    finally:
        if name and before is None:
            del os.environ[VARIABLE]
        elif name:
            os.environ[VARIABLE] = before or ""


class Arguments:
    """Tensors of a case as TVM has them, and workspaces of its own."""

    def __init__(self, case: Case) -> None:
        self.case, self.row = case, case.row
        self.shared = {name: case.machine.tvm(x) for name, x in case.shared.items()}

    @functools.cached_property
    def spaces(self) -> list[Any]:
        """The workspaces of a plan and its runs."""
        device = self.case.machine.tvm_device
        small = 4 if self.case.machine.kind == "cpu" else 0
        return [
            tvm.runtime.empty((size >> small,), "uint8", where)
            for size, where in zip(WORKSPACE_BYTES, (device, device, tvm.cpu()), strict=True)
        ]

    def host(self, name: str) -> Any:
        """An index array on the host, as plans read it."""
        return tvm.runtime.tensor(self.case.host[name], tvm.cpu())

    def of(self, i: int, *names: str) -> list[Any]:
        """Tensors of a buffer."""
        return [self.case.machine.tvm(self.case.buffers[i][name]) for name in names]

    def of_column(self, name: str) -> Any:
        """An index tensor with one number a row, as (n, 1)."""
        return self.case.machine.tvm(self.case.shared[name].reshape(-1, 1))

    def pages(self, i: int) -> list[Any]:
        """Strided views of keys and values, as TVM's cache passes them."""
        pages = self.case.buffers[i]["pages"]
        if self.row.kind == "mla":
            parts = (pages[..., :CKV], pages[..., CKV:])
        else:
            parts = (pages[:, 0], pages[:, 1])
        return [self.case.machine.tvm(part) for part in parts]

    def plan(self) -> Any:
        """A plan of the row."""
        function, arguments = self.planner()
        return function(*arguments)

    def planner(self) -> tuple[Any, tuple[Any, ...]]:
        """The function that makes the plan of the row, and its arguments."""
        row, (qo, kv), d = self.row, self.row.heads, self.row.head_dim
        if row.kind in ("decode", "host_plan", "host_run"):
            q = self.of(0, "q")[0]
            function, arguments = op("batch_decode_plan"), (
                self.host("kv_indptr"), row.batch, qo, kv, row.page_size, False, -1, 0.0, d, d, q,
                q,
            )  # fmt: skip
        elif row.kind == "mla":
            function, arguments = op("batch_mla_plan"), (
                self.host("qo_indptr"), self.host("kv_indptr"), self.host("kv_len"), qo, CKV,
                False,
            )  # fmt: skip
        else:
            page_size = 1 if row.kind == "ragged" else row.page_size
            function, arguments = op("batch_prefill_plan"), (
                self.host("qo_indptr"), self.host("kv_indptr"), self.host("kv_len"), row.rows,
                row.batch, qo, kv, page_size, False, d, d, row.causal, -1, -1, False, 0,
            )  # fmt: skip
        return function, (*self.spaces, *arguments)


def _planned(case: Case, kernel: str | None) -> tuple[list[tuple[Any, tuple]], str, str]:
    """Function and arguments of each buffer, the function's name, and its kernel."""
    given, row = Arguments(case), case.row
    with prefill_kernel(kernel):
        plan = given.plan()
    spaces, shared = (*given.spaces[:2], plan), given.shared
    table = [shared[x] for x in ("kv_indptr", "page_indices", "last") if x in shared]
    tail = (-1, False, row.sm_scale, 1.0, 1.0)
    names = {"decode": "batch_decode_run", "host_run": "batch_decode_run", "mla": "batch_mla_run"}
    name = names.get(row.kind, f"batch_prefill_{row.kind}_run")
    function, calls = op(name), []
    for i in range(len(case.buffers)):
        q, *outputs = given.of(i, "q", "o", "lse")
        if name == "batch_decode_run":
            arguments = (q, *given.pages(i), *table, *outputs, 1, *tail)
        elif row.kind == "mla":
            wide = case.buffers[i]["q"]
            queries = [case.machine.tvm(x) for x in (wide[..., :CKV], wide[..., CKV:])]
            arguments = (
                *queries, *given.pages(i), shared["page_indices"], *outputs, 0, row.heads[0],
                row.page_size, row.sm_scale, False,
            )  # fmt: skip
        elif row.kind == "paged":
            rows = shared["qo_indptr"]
            arguments = (q, *given.pages(i), rows, *table, *outputs, 1, 1, *tail)
        else:
            keys, rows = given.of(i, "k", "v"), shared["qo_indptr"]
            arguments = (q, *keys, rows, shared["kv_indptr"], *outputs, 1, 0, *tail)
        calls.append((function, (*spaces, *arguments)))
    return calls, name, kernel_of_plan(case, plan)


def cache_arguments(case: Case, i: int) -> tuple[Any, ...]:
    """What TVM's kernel of the slot takes, and so does ours without a plan."""
    given, row = Arguments(case), case.row
    shared = given.shared
    q, o, lse = given.of(i, "q", "o", "lse")
    tail = (0, 1.0, THETA, row.sm_scale)
    rows, zeros = shared["qo_indptr"], shared["zeros"]
    if row.kind == "ragged":
        k, v = given.of(i, "k", "v")
        keys = shared["kv_indptr"]
        return (q, rows, k, v, keys, shared["positions"], zeros, o, lse, 1, *tail)
    (pages,) = given.of(i, "pages")
    table = (pages, shared["kv_indptr"], shared["page_indices"], shared["last"])
    if row.kind == "mla":
        return (q, rows, *table, o, lse, 0, row.sm_scale)
    if row.kind == "paged":
        return (q, rows, *table, zeros, shared["positions"], o, lse, 1, *tail)
    return (q, *table, zeros, zeros, o, lse, *tail)


def _slot(case: Any) -> tuple[list[tuple[Any, tuple]], str, str]:
    """A slot of TVM's cache, bound with what the cache does not pass."""
    name = {"decode": "decode_paged", "prefill": "prefill_paged"}
    short = case.row.kind.removeprefix("slot_")
    name = f"attention_{name.get(short, short)}"
    options = {"layer_window": WINDOW} if case.windowed else {}
    function = op(f"bind_{name}")(json.dumps(options))
    calls = [(function, case.arguments(i)) for i in range(len(case.buffers))]
    return calls, name, "cpu" if case.machine.kind == "cpu" else "batch_attention"


def _unplanned(case: Case) -> tuple[list[tuple[Any, tuple]], str, str]:
    slot = {"decode": "decode_paged", "ragged": "prefill_ragged", "paged": "prefill_paged"}
    name = slot[case.row.kind]
    function = op("bind_attention")(name, "{}", None, None)
    calls = [(function, cache_arguments(case, i)) for i in range(len(case.buffers))]
    kernel = "cpu" if case.machine.kind == "cpu" else "batch_attention"
    return calls, f"attention_{name}", kernel


#: Kinds of rows that are moved, merged or computed one by one.
MOVES = (
    "rotary", "append", "merge", "copy_page", "compact", "rotary_append", "rope", "softmax",
    *NORMS, *GATES,
)  # fmt: skip


def move_arguments(case: Case, i: int) -> tuple[Any, ...]:
    """What functions that move or merge rows take, TVM's and ours alike."""
    given, kind = Arguments(case), case.row.kind
    shared = given.shared
    if kind == "rotary":
        return (*given.of(i, "qkv"), shared["positions"], *given.of(i, "q", "k", "v"), 1)
    if kind == "append":
        return (*given.of(i, "o", "k", "v"), shared["slots"])
    if kind == "rotary_append":
        rope = (THETA, 1.0, case.row.head_dim, "{}")
        return (
            *given.of(i, "qkv"), shared["positions"], shared["slots"], *rope, *given.of(i, "o", "q")
        )  # fmt: skip
    if kind == "rope":
        rope = (THETA, 1.0, case.row.head_dim, "{}")
        return (
            *given.of(i, "q", "k"), shared["positions"], *rope, *given.of(i, "q_out", "k_out")
        )  # fmt: skip
    if kind == "softmax":
        return (*given.of(i, "x"), shared["temperature"], case.row.kv_len, *given.of(i, "o"))
    if kind in NORMS and "add" not in kind:
        return (*given.of(i, "x"), shared["weight"], EPS, *given.of(i, "o"))
    if kind in NORMS:
        return (*given.of(i, "x", "residual"), shared["weight"], EPS, *given.of(i, "o", "sum"))
    if kind in GATES:
        return tuple(given.of(i, "x", "o"))
    if kind == "merge":
        return tuple(given.of(i, "v", "s", "v_other", "s_other"))
    if kind == "copy_page":
        pages = (case.buffers[i][name] for name in ("source", "target"))
        return (*given.of(i, "pool"), *pages, case.row.page_size)
    return (*given.of(i, "o"), shared["indptr"], shared["pairs"], case.sequences)


def _moves(case: Case) -> tuple[list[tuple[Any, tuple]], str, str]:
    row = case.row
    name = {
        "rotary": "split_qkv_rotary", "append": "append_paged_kv_cache",
        "merge": "merge_state_in_place", "copy_page": "copy_single_page",
        "compact": "compact_kv_copy", "rotary_append": "split_qkv_rotary_append",
        "rope": "apply_rope", "softmax": "sampling.softmax",
        "rmsnorm": "rmsnorm", "add_rmsnorm": "fused_add_rmsnorm",
        "gemma_rmsnorm": "gemma_rmsnorm", "gemma_add_rmsnorm": "gemma_fused_add_rmsnorm",
        **{kind: f"{kind}_and_mul" for kind in GATES},
    }[row.kind]  # fmt: skip
    if row.kind == "rotary":
        function = op("bind_split_qkv_rotary")(THETA, 1.0, row.head_dim, "{}")
    else:
        function = op(name)
    return [(function, move_arguments(case, i)) for i in range(len(case.buffers))], name, name


def functions(case: Case, kernel: str | None = None) -> tuple[list[tuple[Any, tuple]], str, str]:
    """Function and arguments of each buffer, the name that calls count under, and the kernel."""
    if case.row.kind in MOVES:
        return _moves(case)
    if case.row.kind.startswith("slot"):
        return _slot(case)
    if not case.row.planned:
        return _unplanned(case)
    return _planned(case, kernel)


def _side(name: str, case: Case, kernel: str | None = None) -> Side:
    pairs, counts_as, found = functions(case, kernel)
    calls = [lambda f=function, a=arguments: f(*a) for function, arguments in pairs]
    return Side(name, calls, found, counted(case, counts_as))


def build(case: Case) -> Side:
    """Ours, with the kernel that its plan chooses."""
    if case.row.kind == "model":
        from ..models import counted as calls_of_models

        return whole_model("ours", case, calls_of_models)
    if case.row.kind == "host_plan":
        function, arguments = Arguments(case).planner()
        return _makes_plans("ours", case, lambda: function(*arguments), 1)
    return _side("ours", case)


def build_fa2(case: Case) -> Side:
    """Ours on FA2, where the plan would choose FA3."""
    if case.row.kind not in ("ragged", "paged") or not case.row.planned:
        raise Absent("only planned prompts have the choice of FA2 and FA3")
    if case.machine.kind == "cpu":
        raise Absent("a processor has one kernel")
    side = _side("ours-fa2", case, "fa2")
    if side.kernel != "fa2":
        raise Absent(f"the plan was made for {side.kernel}")
    return side


def whole_model(name: str, case: Any, done: Callable[[], int] | None) -> Side:
    """A model that returns its output; one that counts calls is compiled by our pipeline."""
    run, outputs = case.compiled(case.row.dtype, ours=done is not None), {}

    def call() -> None:
        outputs[0] = run()

    def forget(i: int) -> None:
        if i in outputs:
            # No token is -1.
            is_float = "float" in str(outputs[i].dtype)
            nothing = np.nan if is_float else -1
            outputs[i].copyfrom(np.full(outputs[i].shape, nothing, str(outputs[i].dtype)))

    return Side(name, [call], "model", done, returned=outputs.get, forget=forget)


def _makes_plans(name: str, case: Any, make: Callable[[], Any], inner: int) -> Side:
    """Calls of the plan itself."""

    def call() -> None:
        case.made = make()

    count = counted(case, "batch_decode_plan")
    return Side(name, [call], kernel_of_plan(case, make()), count, inner=inner)


def build_loop(case: Case) -> Side:
    """Ours called from a loop in C++, as TVM's virtual machine calls: host rows alone."""
    if not case.row.kind.startswith("host"):
        raise Absent("only rows of the host's time are called from a loop in C++")
    loop, inner = load_loop(), 50
    if case.row.kind == "host_plan":
        function, arguments = Arguments(case).planner()
        return _makes_plans(
            "ours-loop", case, lambda: loop(function, list(arguments), inner), inner
        )
    ((function, arguments),), counts_as, kernel = functions(case)
    call = lambda: loop(function, list(arguments), inner)  # noqa: E731
    return Side("ours-loop", [call], kernel, counted(case, counts_as), inner=inner)
