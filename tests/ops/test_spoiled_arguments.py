"""Each argument of each packed function spoiled in each way.

The list of functions and their parameters come from the sources, so that a new function without an
example fails; the ways to spoil go by what the argument is.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tvm
from calls import passed
from device_tensors import DeviceTensor, to_device
from good_calls import MAKERS, Example, Maker
from refusals import cut, dtype, other_device, refused, sparse_last, strided_copy
from signatures import signatures

NUMBERS = (-1, -5, -(2**31), 2**31, 2**40, 2**63 - 1)


def longer(axis: int) -> Any:
    """Spoil by one element more along an axis."""
    return lambda old, _: to_device(
        np.concatenate([old.numpy(), old.numpy().take([-1], axis)], axis), old.tensor.device
    )


def part(axis: int, which: slice) -> Any:
    """Spoil by a part of an axis, or by its other direction."""
    return cut(lambda a: a[(slice(None),) * axis + (which,)])


def repeated(axis: int) -> Any:
    """Spoil by a stride of 0."""
    first = (slice(None),) * axis + (slice(1),)
    return cut(lambda a: np.broadcast_to(a[first], a.shape))


def tensor_spoils(old: DeviceTensor) -> Iterator[tuple[str, Any]]:
    """Ways to spoil a tensor."""
    rank, kind = old.layout.ndim, old.layout.dtype
    yield "float64", dtype("float64")
    yield "other kind", dtype("int32" if kind.kind not in "iu" else "float32")
    yield "int64", dtype("int64")
    yield "device", other_device
    yield "rank more", cut(lambda a: a[None])
    if rank and len(old.layout):
        yield "rank less", cut(lambda a: a[0])
    for axis in range(rank):
        size = old.layout.shape[axis]
        if size > 0:
            yield f"axis {axis} shorter", part(axis, slice(-1))
            yield f"axis {axis} empty", part(axis, slice(0))
            yield f"axis {axis} longer", longer(axis)
        if size > 1:
            yield f"axis {axis} backwards", part(axis, slice(None, None, -1))
            yield f"axis {axis} repeated", repeated(axis)
    if rank and old.layout.size > 1:
        yield "gaps", strided_copy
        yield "sparse", sparse_last
    if old.layout.size and kind.itemsize > 1:
        yield "a byte off", lambda x, _: to_device(x.numpy(), x.tensor.device, byte_offset=1)
    yield from values(None, 7, "text")


def values(*new: Any) -> Iterator[tuple[str, Any]]:
    """Other values."""
    for x in new:
        yield repr(x), lambda _old, _device, x=x: x


def spoils(old: Any) -> Iterator[tuple[str, Any]]:
    """Ways to spoil an argument whose good value this is."""
    if isinstance(old, DeviceTensor):
        yield from tensor_spoils(old)
    elif isinstance(old, bool):
        yield from values(None, "text", 1.5)
    elif isinstance(old, int):
        yield from values(None, "text", 1.5, *(x for x in NUMBERS if x != old))
    elif isinstance(old, float):
        yield from values(None, "text", math.nan, math.inf, -math.inf, 1e300)
    elif isinstance(old, str):
        yield from values(None, 7, "junk", "[" * 100, '{"nothing": 1}')
    elif isinstance(old, list):
        yield from values(None, 7, [], [1, 2, 3])
        yield "shorter", lambda x, _: x[:-1]
        yield "longer", lambda x, _: [*x, 1]
        for i in range(len(old)):
            yield f"{i} is huge", lambda x, _, i=i: [*x[:i], 2**40, *x[i + 1 :]]
    else:
        assert old is None


#: What is allowed on one of the devices at least: function, argument, way. All else must raise.
ALLOWED = [
    # Strided inputs; a stride of 0 is one.
    (".*", "q|k|v|[kv]_pages|q_nope|q_pe|ckv|kpe|qkv", r"gaps|axis \d repeated"),
    (r".*\(\)|attention_paged.*", "pages", r"gaps|axis \d repeated"),
    (".*rmsnorm|.*_and_mul", "x|residual", r"gaps|axis \d repeated"),
    # One for all of a dimension, or one for each.
    ("attention_dense_biased", "bias", r"gaps|sparse|axis \d repeated|axis 0 longer"),
    # More positions or fewer, and no rotated dimension.
    (".*", "cos_sin_cache", "axis 0 (shorter|longer)|axis 1 empty"),
    # Outputs that may be slices of fused projections.
    ("apply_rope.*", "[qk]_out", "gaps"),
    (".*rmsnorm", "out|sum", "gaps"),
    # Workspaces are of use on CUDA alone; a run takes a larger one for what it computes.
    (".*_plan", ".*workspace", r"axis 0 \w+"),
    (".*_run", "float_workspace", "axis 0 longer"),
    # Only their dtypes are read.
    ("batch_decode_plan", "empty_q|empty_kv", r"device|rank more|axis 1 \w+"),
    # A smaller or larger pool, other page sizes and heads that fit all the same.
    (".*", "pages|kv", r"axis \d (longer|shorter|empty)"),
    # More than index arrays point to.
    (".*", "page_indices|packed_mask|tree_mask|src_dst_pos", r"axis \d longer"),
    ("bind_attention_prefill_paged.*", "length_info", "rank less"),
    ("sampling.*", "probs", r"axis \d (longer|empty)"),
    ("bind_attention_mla.*|apply_attention_sinks", "o", r"axis 2 \w+"),
    # Optional ones.
    (".*", "lse", "None"),
    ("bind_attention", "sinks|alibi_slopes", r"None|device|axis 0 (longer|shorter|empty)"),
    ("cache_slot_with_slopes", "alibi_slopes", r"device|axis 0 (longer|shorter|empty)"),
    # First dimensions of 1.
    ("attention_ragged|single_.*", "[qkvo]", "rank more"),
    ("single_.*", "o", "rank less"),
    # Part of a calling convention, and not read.
    (".*", "rope_rcp_scale|rope_rcp_theta", "nan|-?inf|1e.300"),
    (r"bind_attention.*\(\)|single_.*", "rope_scale|rope_theta", "nan|-?inf|1e.300"),
    (
        "single_.*",
        "scratch",
        r"float64|int64|other kind|device|rank.*|axis 0 \w+|gaps|sparse|a byte.*",
    ),
    # Large, and all the same a number with angles that are finite.
    (".*(split_qkv_rotary|apply_r).*", "rope_theta", "1e.300"),
    # Names, of which any will do.
    ("kernel_choice", "gpu_name", ".*"),
    ("(load|check)_tuning", "source", ".*"),
    # Configurations of models hold more than we read.
    (".*(split_qkv_rotary|apply_rope).*", "rope_scaling", ".*nothing.*"),
]

#: What is said instead of an argument: numbers that its shape gives, and where a text comes from.
DERIVED = r"num_qo_heads|num_kv_heads|head_dim|page_size|last_page_len|request|file of tuning"


def allowed(name: str, argument: str, way: str) -> bool:
    """Whether a spoiled call may succeed."""
    return any(all(map(re.fullmatch, rule, (name, argument, way))) for rule in ALLOWED)


def speakers(name: str) -> str:
    """The names that a function has in its errors: what is bound speaks for what binds it."""
    if name.endswith("()"):
        return re.escape(name[:-2].replace("bind_", ""))
    if name.startswith(("bind_attention", "cache_slot")):
        return f"{name}|cache_slot|bind_attention|attention_[a-z_]+"
    return re.escape(name)


def fault(name: str, argument: str, names: list[str], error: Exception) -> str | None:
    """What is wrong with an error, if anything."""
    text = str(error)
    if type(error) not in (TypeError, ValueError, RuntimeError):
        return f"raises {type(error).__name__}: {text}"
    if not re.search(rf"flashinfer\.({speakers(name)})\b", text):
        return f"does not name the function: {text}"
    if f"argument #{names.index(argument)} " in text or re.search(rf"\b{argument}\b", text):
        return None
    # Two arguments that do not fit: either may be named.
    others = "|".join(names)
    if isinstance(error, ValueError) and re.search(rf"\b({others}|{DERIVED})\b", text):
        return None
    return f"does not name the argument: {text}"


def spoiled_call(example: Example, name: str, argument: str, way: str, new: Any) -> str | None:
    """Call with one argument spoiled. What is wrong with what happens, if anything."""
    held = {**example.tensors, "the spoiled one": new}
    tensors = {k: x for k, x in held.items() if isinstance(x, DeviceTensor)}
    before = {k: x.raw() for k, x in tensors.items()}
    try:
        example.function(*passed(example.args, {argument: new}))
    except Exception as error:
        for key, tensor in tensors.items():
            if not np.array_equal(tensor.raw(), before[key]):
                return f"wrote {key} and raised {error}"
        return fault(name, argument, list(example.args), error)
    for key, tensor in tensors.items():
        tensor.assert_guards_intact(key)
    return None if allowed(name, argument, way) else "is taken"


@pytest.fixture(scope="module")
def makers(ops: Any) -> Any:
    """Examples of a device, whose workspaces are made once."""
    return functools.lru_cache(2)(lambda device: Maker(ops, device))


def test_every_function_has_an_example(ops: Any) -> None:
    """With every parameter; functions that return one have an example of that too."""
    # Of calls of TVM's cache most arguments are TVM's to check; their tests are in tests/kv_cache.
    listed = {name: s for name, s in signatures().items() if "cache" not in s.parameters}
    assert set(listed) == {name for name in MAKERS if not name.endswith("()")}
    make = Maker(ops, tvm.cpu(0))
    for name, (returns, parameters) in listed.items():
        assert tuple(make(name).args) == parameters, name
        assert returns != "Function" or name == "bind_attention" or f"{name}()" in MAKERS, name


@pytest.mark.parametrize("name", [name for name in MAKERS if "call_counts" not in name])
def test_spoiled(name: str, device: Any, makers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is refused says so and writes nothing; after each argument a good call is right."""
    monkeypatch.setenv("TVM_FLASHINFER_CHECK", "1")
    example = makers(device)(name)
    good = example.call()
    faults = []
    for argument, old in example.args.items():
        for way, spoil in spoils(old):
            if way == "device" and len(example.tensors) == 1:
                continue  # then it is the device of the call
            found = spoiled_call(example, name, argument, way, spoil(old, device))
            if found is not None:
                faults.append(f"{argument}, {way}: {found}")
        for bytes_now, bytes_then in zip(example.call(), good, strict=True):
            np.testing.assert_array_equal(bytes_now, bytes_then, err_msg=f"after {argument}")
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize("name", MAKERS)
def test_argument_counts(name: str, ops: Any) -> None:
    """One more, and one less."""
    example = Maker(ops, tvm.cpu(0))(name)
    args = passed(example.args, {})
    for wrong in ([*args, 0], args[:-1]) if args else ([0],):
        with refused(
            TypeError, "Mismatched number of arguments", rf"flashinfer\.({speakers(name)})"
        ):
            example.function(*wrong)
