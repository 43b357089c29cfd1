"""What MLC LLM is given when it imports TVM, seen from a package of its name."""

from __future__ import annotations

import pytest

from tvm_flashinfer import mlc
from tvm_flashinfer.kernels.environment import environment
from tvm_flashinfer.when_imported import HookWarning

IS_SUPPLIED = "import tvm; print(hasattr(tvm.tirx.PrimFunc, 'buffer_map'))"


def test_names(stand_in) -> None:
    """Each does what MLC LLM does with it, under any TVM that is served."""
    checks = """
        import numpy as np
        import tvm, tvm_ffi
        from tvm import relax, tirx
        from tvm.script import tirx as T

        @tvm_ffi.register_object("mlc.serve.Data")
        class Data(tvm_ffi.Object):
            pass

        assert relax.StringImm("mha").value == "mha"
        dtype = relax.DataTypeImm("float16")
        assert str(dtype.value) == "float16"
        zero = relax.Constant(tvm.runtime.tensor(np.zeros((2, 3), "float32")))
        assert tuple(zero.data.shape) == (2, 3)
        assert isinstance(zero, relax.Constant) and isinstance(dtype, relax.DataTypeImm)
        assert isinstance(relax.const(1.0), relax.Constant)
        for other in (relax.prim_value(1), relax.StringImm("mha")):
            assert not isinstance(other, (relax.Constant, relax.DataTypeImm))
        assert not isinstance(zero, relax.DataTypeImm) and not isinstance(dtype, relax.Constant)
        assert tirx.StringImm("x").value == "x"

        n, m = tirx.Var("n", "int64"), tirx.Var("m", "int64")
        assert n.name_hint == "n"
        seen = []
        tirx.stmt_functor.post_order_visit(
            n + m * n, lambda e: seen.append(e) if isinstance(e, tirx.Var) else None
        )
        assert {var.name for var in seen} == {"n", "m"}
        replaced = tirx.stmt_functor.substitute(n + m, {n: tirx.IntImm("int64", 2), m: n})
        tvm.ir.assert_structural_equal(replaced, tirx.IntImm("int64", 2) + n)

        @T.prim_func(s_tir=True)
        def double(x: T.Buffer((4,), "float32"), k: T.int32, y: T.Buffer((4,), "float32")):
            for i in range(4):
                with T.sblock("block"):
                    v = T.axis.spatial(4, i)
                    y[v] = x[v] * T.float32(2)

        shapes = [double.buffer_map[p].shape for p in double.params if p in double.buffer_map]
        assert [list(shape) for shape in shapes] == [[4], [4]]
        assert isinstance(double.body, tirx.SBlockRealize)
        assert isinstance(double.body.block, tirx.SBlock)
    """
    stand_in({"__init__.py": checks})


def test_nobody_else_is_given_anything(stand_in) -> None:
    assert stand_in({"__init__.py": IS_SUPPLIED}) == "True"
    assert stand_in({}, IS_SUPPLIED) == "False"
    assert stand_in({}, "import tvm, mlc_llm") == "False"


def test_switched_off(stand_in) -> None:
    assert stand_in({"__init__.py": IS_SUPPLIED}, TVM_FLASHINFER_DISABLE="1") == "False"


@pytest.mark.parametrize("beside", ["", "sys.modules['flashinfer'] = sys"])
def test_import_of_this_package_before(beside: str, stand_in) -> None:
    """The order changes nothing, nothing is registered twice, and FlashInfer's own is no matter."""
    code = f"""
        import sys
        {beside}
        import tvm_flashinfer
        import mlc_llm
        from tvm_flashinfer import _native
        _native.load()
    """
    assert stand_in({"__init__.py": IS_SUPPLIED}, code) == "True"


def test_change_of_a_module(stand_in) -> None:
    """It is made when the module is imported, and seen by those that import from it."""
    files = {
        "__init__.py": "import tvm",
        "nn/__init__.py": "",
        "nn/rnn_state.py": """
            class RNNState:
                @staticmethod
                def create_get_func(): ...
                @staticmethod
                def create_set_func(): ...
        """,
        "nn/model.py": "from mlc_llm.nn.rnn_state import RNNState",
    }
    code = """
        from mlc_llm.nn import model
        print(model.RNNState.create_get_func.__module__)
        print(model.RNNState().create_set_func.__module__)
    """
    assert stand_in(files, code).splitlines() == ["tvm_flashinfer.relax.mlc_rnn_state"] * 2


def test_module_that_has_changed(stand_in) -> None:
    """Of another version of MLC LLM: a warning names what stays as it is."""
    files = {"__init__.py": "import tvm", "nn/__init__.py": "", "nn/rnn_state.py": ""}
    code = """
        import warnings
        import mlc_llm
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            import mlc_llm.nn.rnn_state
        print(*{str(warning.message) for warning in caught})
    """
    assert stand_in(files, code).startswith("mlc_llm.nn.rnn_state stays as it is:")


def test_change_that_fails(monkeypatch) -> None:
    made = []
    changes = (
        mlc.Change("first", "", lambda: True, lambda: made.append(1 / 0)),
        mlc.Change("second", "", lambda: True, lambda: made.append("second")),
        mlc.Change("third", "", lambda: False, lambda: made.append("third")),
    )
    monkeypatch.setattr(mlc, "CHANGES", changes)
    with pytest.warns(HookWarning, match="first is not supplied: division by zero"):
        mlc.install.__wrapped__()
    assert made == ["second"]


def test_doctor_lists_them() -> None:
    listed = environment()["mlc_llm"]
    assert [change["name"] for change in listed] == [change.name for change in mlc.CHANGES]
    assert len({change["name"] for change in listed}) == len(listed)
    assert all(change["reason"] for change in listed)
    supplied = {change["name"]: change["supplied"] for change in listed}
    assert supplied["tvm.tirx.PrimFunc.buffer_map"]
