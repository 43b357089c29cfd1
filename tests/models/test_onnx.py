"""Attention of ONNX models, against ONNX's own evaluator.

TVM's frontend converts ``com.microsoft.Attention`` and what exporters decompose attention to;
``MultiHeadAttention`` and ``GroupQueryAttention`` it does not know.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax as rx

onnx = pytest.importorskip("onnx", reason="ONNX is in the extra `test`")
sys.path.insert(0, str(Path(__file__).parents[1] / "relax"))

from attention_modules import called, dispatched, reference  # noqa: E402
from onnx import TensorProto, helper, numpy_helper  # noqa: E402
from onnx.reference import ReferenceEvaluator  # noqa: E402
from tvm.relax.frontend.onnx import from_onnx  # noqa: E402

DENSE = "flashinfer.attention_dense"
MASKED = "flashinfer.attention_dense_masked"
_TYPES = {
    "float32": TensorProto.FLOAT, "bool": TensorProto.BOOL, "int64": TensorProto.INT64
}  # fmt: skip


def model(
    nodes: list[Any],
    inputs: dict[str, np.ndarray],
    constants: dict[str, np.ndarray],
    rank: int = 4,
) -> onnx.ModelProto:
    """A model with the output ``out``."""
    graph = helper.make_graph(
        nodes,
        "attention",
        [
            helper.make_tensor_value_info(name, _TYPES[x.dtype.name], x.shape)
            for name, x in inputs.items()
        ],
        [helper.make_tensor_value_info("out", TensorProto.FLOAT, ["a", "b", "c", "d"][:rank])],
        [numpy_helper.from_array(x, name) for name, x in constants.items()],
    )
    opsets = [helper.make_opsetid("", 13), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)


def run(proto: onnx.ModelProto, inputs: dict[str, np.ndarray], calls: list[str]) -> np.ndarray:
    """Rewrite and run."""
    after = dispatched(from_onnx(proto), strict=True, binary_masks=True)
    assert called(after) == calls
    vm = rx.VirtualMachine(tvm.compile(after, target="llvm"), tvm.cpu())
    out = vm["main"](*(tvm.runtime.tensor(x) for x in inputs.values()))
    return (out if hasattr(out, "numpy") else out[0]).numpy()


def random(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype("float32")


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """A generator seeded by the test's name."""
    return np.random.default_rng(list(request.node.name.encode()))


def node(kind: str, inputs: str, output: str, **attributes: Any) -> Any:
    return helper.make_node(kind, inputs.split(), output.split(), **attributes)


def products(scores: str = "scaled") -> list[Any]:
    """The nodes of attention over (batch, length, heads, head); `scores` goes to the softmax."""
    return [
        node("Transpose", "q", "qt", perm=[0, 2, 1, 3]),
        node("Transpose", "k", "kt", perm=[0, 2, 3, 1]),
        node("Transpose", "v", "vt", perm=[0, 2, 1, 3]),
        node("MatMul", "qt kt", "product"),
        node("Div", "product root", "scaled"),
        node("Softmax", scores, "weights", axis=-1),
        node("MatMul", "weights vt", "heads"),
        node("Transpose", "heads", "out", perm=[0, 2, 1, 3]),
    ]


def qkv(rng: np.random.Generator, rows: int = 6, keys: int = 6) -> dict[str, np.ndarray]:
    shape = (2, keys, 4, 32)
    return {"q": random(rng, 2, rows, 4, 32), "k": random(rng, *shape), "v": random(rng, *shape)}


ROOT = {"root": np.array(32**0.5, "float32")}


def check(proto: onnx.ModelProto, inputs: dict[str, np.ndarray], calls: list[str]) -> None:
    want = ReferenceEvaluator(proto).run(None, inputs)[0]
    np.testing.assert_allclose(run(proto, inputs, calls), want, rtol=2e-5, atol=2e-5)


def test_decomposed(rng: np.random.Generator) -> None:
    inputs = qkv(rng, 3, 9)
    check(model(products(), inputs, ROOT), inputs, [DENSE])


def test_constant_triangle(rng: np.random.Generator) -> None:
    """As exporters of GPT-2 leave it."""
    nodes = products("masked")
    nodes.insert(5, node("Where", "triangle scaled lowest", "masked"))
    constants = {
        **ROOT,
        "triangle": np.tril(np.ones((1, 1, 6, 6), bool)),
        "lowest": np.array(np.finfo("float32").min),
    }
    inputs = qkv(rng)
    check(model(nodes, inputs, constants), inputs, [DENSE])


def test_attention_mask(rng: np.random.Generator) -> None:
    """As exporters of BERT leave it: integers, cast, subtracted from 1 and multiplied."""
    nodes = products("masked")
    nodes[5:5] = [
        node("Unsqueeze", "mask axes", "mask4"),
        node("Cast", "mask4", "seen", to=TensorProto.FLOAT),
        node("Sub", "one seen", "unseen"),
        node("Mul", "unseen lowest", "hidden"),
        node("Add", "scaled hidden", "masked"),
    ]
    constants = {
        **ROOT,
        "axes": np.array([1, 2]),
        "one": np.array(1, "float32"),
        "lowest": np.array(np.finfo("float32").min),
    }
    mask = (np.arange(6)[None] < np.array([[4], [6]])).astype("int64")
    inputs = {**qkv(rng), "mask": mask}
    check(model(nodes, inputs, constants), inputs, [MASKED])


def test_grouped_heads(rng: np.random.Generator) -> None:
    """KV heads expanded to the query heads, as exporters of Llama leave them."""
    nodes = products()
    nodes[1:3] = [
        step
        for x in "kv"
        for step in (
            node("Transpose", x, f"{x}0", perm=[0, 2, 1, 3]),
            node("Unsqueeze", f"{x}0 axis", f"{x}1"),
            node("Expand", f"{x}1 expanded", f"{x}2"),
            node("Reshape", f"{x}2 whole", f"{x}3"),
        )
    ]
    nodes.insert(9, node("Transpose", "k3", "kt", perm=[0, 1, 3, 2]))
    nodes = [node("MatMul", "weights v3", "heads") if n.output[0] == "heads" else n for n in nodes]
    constants = {
        **ROOT,
        "axis": np.array([2]),
        "expanded": np.array([2, 2, 2, 6, 32]),
        "whole": np.array([2, 4, 6, 32]),
    }
    inputs = {**qkv(rng), "k": random(rng, 2, 6, 2, 32), "v": random(rng, 2, 6, 2, 32)}
    check(model(nodes, inputs, constants), inputs, [DENSE])


@pytest.mark.parametrize("masked", [False, True])
def test_microsoft_attention(rng: np.random.Generator, masked: bool) -> None:
    """The fused operator of ONNX Runtime, which TVM makes `nn.attention` of."""
    inputs = {"x": random(rng, 2, 6, 64)}
    constants = {"w": random(rng, 64, 192) / 8, "b": random(rng, 192)}
    names = "x w b"
    seen = np.ones((2, 6), "int32")
    if masked:
        # TVM's frontend takes a mask of two dimensions beside a bias alone.
        seen[0, 4:] = 0
        constants |= {"mask": seen, "bias": np.zeros((2, 2, 6, 6), "float32")}
        names += " mask  bias"
    attention = helper.make_node(
        "Attention", names.split(" "), ["out"], domain="com.microsoft", num_heads=2
    )
    proto = model([attention], inputs, constants, rank=3)
    got = run(proto, inputs, [MASKED if masked else DENSE])
    parts = np.split(inputs["x"] @ constants["w"] + constants["b"], 3, -1)
    q, k, v = (part.reshape(2, 6, 2, 32) for part in parts)
    want = reference(q, k, v, 32**-0.5, seen[:, None, None] > 0).reshape(2, 6, 64)
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)
