"""Who defines and who uses the variables of a function, and what its constants are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tvm
from tvm import relax as rx
from tvm.tirx import FloatImm, IntImm

from tvm_flashinfer.relax._compat import constant_array

#: Operators that change the shape of a tensor, or repeat its elements, and no element.
VIEWS = (
    "relax.permute_dims",
    "relax.reshape",
    "relax.broadcast_to",
    "relax.expand_dims",
    "relax.squeeze",
)


def op_name(value: Any) -> str | None:
    """Return the name of the operator that an expression calls, such as ``"relax.add"``."""
    if isinstance(value, rx.Call) and isinstance(value.op, tvm.ir.Op):
        return str(value.op.name)
    return None


def has_shape(expr: rx.Expr) -> bool:
    """Return whether an expression is a tensor whose sizes are known, symbolic ones too."""
    return isinstance(expr.ty, rx.TensorType) and isinstance(expr.ty.shape, rx.ShapeExpr)


def shape_of(expr: rx.Expr) -> tuple[Any, ...]:
    """Return the sizes of a tensor for which `has_shape` holds."""
    return tuple(expr.ty.shape.values)


def number(expr: Any) -> int | float | None:
    """Return the value of a scalar argument, or None for a symbolic one."""
    if isinstance(expr, int | float):
        return expr
    if isinstance(expr, IntImm | FloatImm):
        return expr.value
    return None


def axes(given: Any, rank: int) -> list[int]:
    """Return axes that an attribute holds, counted from the front."""
    return [int(axis) % rank for axis in given]


class Graph:
    """The bindings of a function.

    Parameters
    ----------
    function : relax.Function
    """

    def __init__(self, function: rx.Function) -> None:
        self.bindings: list[rx.VarBinding] = []
        self._values: dict[rx.Var, rx.Expr] = {}
        self._users: dict[rx.Var, list[rx.Var | None]] = {}
        rx.analysis.post_order_visit(function, self._visit)

    @classmethod
    def of_values(
        cls, values: Mapping[rx.Var, rx.Expr], users: Mapping[rx.Var, Sequence[rx.Var]]
    ) -> Graph:
        """Return the graph of variables whose values and users are known already."""
        graph = cls.__new__(cls)
        graph.bindings = [rx.VarBinding(var, value) for var, value in values.items()]
        graph._values = dict(values)
        graph._users = {var: list(uses) for var, uses in users.items()}
        return graph

    def _visit(self, expr: rx.Expr) -> None:
        if not isinstance(expr, rx.SeqExpr):
            return
        for block in expr.blocks:
            for binding in block.bindings:
                if isinstance(binding, rx.VarBinding):
                    self.bindings.append(binding)
                    self._values[binding.var] = binding.value
                    self._use(binding.value, binding.var)
                    if not isinstance(binding.var, rx.DataflowVar) and isinstance(
                        block, rx.DataflowBlock
                    ):
                        self._users.setdefault(binding.var, []).append(None)
                else:
                    self._use(binding.value, None)
        self._use(expr.body, None)

    def _use(self, value: rx.Expr, user: rx.Var | None) -> None:
        # What is inside of branches and of local functions is visited with their own bindings.
        if isinstance(value, rx.Function):
            return
        if isinstance(value, rx.If):
            value = value.cond

        def visit(expr: rx.Expr) -> None:
            if isinstance(expr, rx.Var) and isinstance(expr.ty, rx.TensorType | rx.TupleType):
                self._users.setdefault(expr, []).append(user)

        rx.analysis.post_order_visit(value, visit)

    def users(self, var: rx.Var) -> list[rx.Var | None]:
        """Return the variables bound to what uses a variable; None for what leaves the function."""
        return self._users.get(var, [])

    def bound(self, var: rx.Var) -> rx.Expr | None:
        """Return what a variable is bound to, which may be another variable."""
        return self._values.get(var)

    def value(self, expr: rx.Expr) -> rx.Expr:
        """Return what a variable is bound to, through other names of it; itself when it is not."""
        while isinstance(expr, rx.Var) and expr in self._values:
            expr = self._values[expr]
        return expr

    def names(self, expr: rx.Expr) -> list[rx.Var]:
        """Return the variables that stand for what `value` returns."""
        found = []
        while isinstance(expr, rx.Var) and expr in self._values:
            found.append(expr)
            expr = self._values[expr]
        return found

    def uniform(self, expr: rx.Expr) -> float | None:
        """Return the value of a tensor whose elements are all one known number, else None."""
        array = self.array(expr)
        if array is not None:
            same = array.size > 0 and bool((array == array.flat[0]).all())
            return float(array.flat[0]) if same else None
        value = self.value(expr)
        name = op_name(value)
        if name in ("relax.full", "relax.full_like"):
            return self.uniform(value.args[1])
        if name in ("relax.zeros", "relax.zeros_like"):
            return 0.0
        if name in ("relax.ones", "relax.ones_like"):
            return 1.0
        if name in VIEWS or name == "relax.astype":
            return self.uniform(value.args[0])
        return None

    def array(self, expr: rx.Expr) -> np.ndarray | None:
        """Return the values of a constant tensor, else None."""
        return constant_array(self.value(expr))
