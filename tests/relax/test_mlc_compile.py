"""What a compile of MLC LLM does with our cache, on modules as its models export them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import tvm
from tvm import relax as rx
from tvm.relax.frontend import nn
from tvm.relax.frontend.nn.llm.kv_cache import RopeMode

from tvm_flashinfer.relax import FallbackWarning, KVCacheCallError, StrictModeError, mlc_compile
from tvm_flashinfer.relax._compat import HAS_LAYER_WINDOW
from tvm_flashinfer.relax.mlc_sites import attention_sites
from tvm_flashinfer.report import CompileReport

OURS = "create_flashinfer_paged_kv_cache"
TVMS = "create_tir_paged_kv_cache"
METADATA = {"kv_state_kind": "kv_cache", "sliding_window_size": -1}


@pytest.fixture(autouse=True)
def shared(monkeypatch) -> None:
    monkeypatch.setenv("TVM_FLASHINFER_SHIP", "shared")


class Mlc:
    """Stands in for the functions of MLC LLM that are wrapped."""

    def __init__(self) -> None:
        self.passes: list[tuple[Any, ...]] = []

    def theirs(self, *arguments: Any) -> Callable[[tvm.IRModule], tvm.IRModule]:
        """Their pass, which changes nothing and is remembered."""
        self.passes.append(arguments)
        return lambda mod: mod

    def compile(
        self,
        mod: tvm.IRModule,
        target: tvm.target.Target,
        *,
        flashinfer: bool = True,
        asked_for: bool | None = None,
        config: Any = None,
        **metadata: Any,
    ) -> tvm.IRModule:
        """Run the pass as a compile of a model does."""
        result = []

        def compile_(args: Any, model_config: Any) -> None:
            make = mlc_compile.dispatch_pass(self.theirs)
            self.metadata = {**METADATA, **metadata}
            result.append(make(target, flashinfer, self.metadata)(mod))

        opt = SimpleNamespace()
        setattr(opt, mlc_compile._ASKED_FOR, flashinfer if asked_for is None else asked_for)
        mlc_compile.compile_model(compile_)(SimpleNamespace(opt=opt), config)
        return result[0]


@pytest.fixture
def mlc() -> Mlc:
    return Mlc()


def names(mod: tvm.IRModule) -> set[str]:
    return {var.name_hint for var in mod.get_global_vars()}


def creates_ours(mod: tvm.IRModule, name: str) -> bool:
    return "flashinfer.cache_slot" in set(externs(mod[name]))


def externs(function: rx.Function) -> Iterator[str]:
    for block in function.body.blocks:
        for binding in block.bindings:
            if isinstance(binding.value, rx.Call) and isinstance(
                binding.value.args[0], rx.ExternFunc
            ):
                yield binding.value.args[0].global_symbol


def report_of(mod: tvm.IRModule) -> CompileReport:
    return CompileReport.from_json(mod["flashinfer_report"].body.body.value)


def test_a_line_for_each_slot(mlc, generic_module, cuda, capsys) -> None:
    mod = mlc.compile(generic_module(), cuda)
    rx.analysis.well_formed(mod)
    assert creates_ours(mod, OURS)
    assert not creates_ours(mod, TVMS)
    assert report_of(mod).fallbacks == []
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 13
    assert (
        f"tvm-flashinfer: {OURS} prefill_paged: native (flashinfer.batch_prefill_paged_run, sm_90a)"
        in lines
    )
    assert mlc.passes == []


def test_metadata_of_the_cache(mlc, generic_module, cuda) -> None:
    """MLC LLM's runtime reads it."""
    mlc.compile(generic_module(num_hidden_layers=2), cuda)
    assert mlc.metadata["kv_cache"] == {
        "num_hidden_layers": 2,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
    }


def test_cache_that_slides_is_ours_in_both(mlc, generic_module, cuda) -> None:
    """MLC LLM's runtime takes TVM's function there."""
    mod = mlc.compile(generic_module(), cuda, sliding_window_size=4096)
    assert creates_ours(mod, OURS)
    assert creates_ours(mod, TVMS)
    assert {row.site for row in report_of(mod).rows} == {OURS, TVMS}


def test_hybrid_model(mlc, generic_module, cuda) -> None:
    """MLC LLM's runtime makes its RNN state only where one function is absent."""
    mod = mlc.compile(generic_module(), cuda, kv_state_kind="hybrid")
    assert OURS not in names(mod)
    assert creates_ours(mod, TVMS)
    assert {row.site for row in report_of(mod).rows} == {TVMS}


def test_without_flashinfer_their_pass_runs(mlc, generic_module, cuda, llvm, capsys) -> None:
    before = generic_module()
    for target, asked_for in ((cuda, False), (llvm, True)):
        assert mlc.compile(before, target, flashinfer=False, asked_for=asked_for).same_as(before)
    assert [arguments[1] for arguments in mlc.passes] == [False, False]
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("arch", ["sm_70", "sm_75"])
def test_target_that_turns_it_off(arch, mlc, generic_module, capsys, monkeypatch) -> None:
    """MLC LLM asks for none on GPUs before Ampere, which is told, and strict mode refuses."""
    target = tvm.target.Target({"kind": "cuda", "arch": arch})
    before = generic_module()
    mod = mlc.compile(before, target, flashinfer=False, asked_for=True)
    (row,) = report_of(mod).rows
    assert row.status == "fallback"
    assert f"'{arch[3:]}'; the kernels need 8.0 (Ampere)" in row.reasons[0]
    assert f"{TVMS} all: fallback: the GPU architecture is" in capsys.readouterr().err
    monkeypatch.setenv("TVM_FLASHINFER_STRICT", "1")
    with pytest.raises(StrictModeError, match="Ampere"):
        mlc.compile(before, target, flashinfer=False, asked_for=True)


def test_architecture_without_kernels(mlc, generic_module) -> None:
    """One that MLC LLM takes for served."""
    target = tvm.target.Target({"kind": "cuda", "arch": "sm_87"})
    with pytest.warns(FallbackWarning, match="'87'; there are kernels for 80, 86"):
        mod = mlc.compile(generic_module(), target)
    assert OURS not in names(mod)
    assert [row.status for row in report_of(mod).rows] == ["fallback"]


@pytest.mark.parametrize("arch", ["sm_90", "sm_90a", "sm_120"])
def test_architectures_with_kernels(arch, mlc, generic_module) -> None:
    """Those that there are."""
    target = tvm.target.Target({"kind": "cuda", "arch": arch})
    assert {row.arch for row in report_of(mlc.compile(generic_module(), target)).rows} == {arch}


@pytest.mark.filterwarnings("ignore::tvm_flashinfer.relax.FallbackWarning")
def test_strict_mode(mlc, generic_module, cuda, monkeypatch, capsys) -> None:
    """The error names the cause, and so do the lines at the end."""
    monkeypatch.setenv("TVM_FLASHINFER_STRICT", "1")
    mlc.compile(generic_module(), cuda)
    capsys.readouterr()
    with pytest.raises(StrictModeError, match="dtype is float32"):
        mlc.compile(generic_module(dtype="float32"), cuda)
    assert "all: fallback: the dtype is float32" in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore::tvm_flashinfer.relax.FallbackWarning")
@pytest.mark.parametrize("strict", [False, True])
def test_kernels_that_cannot_be_built(strict, mlc, generic_module, cuda, monkeypatch) -> None:
    """A warning and the report name the cause; in strict mode an error does."""
    from tvm_flashinfer import kernels
    from tvm_flashinfer.kernels.errors import ToolchainError

    def fail(specs: list[Any]) -> None:
        raise ToolchainError(["nvcc is missing: install the CUDA toolkit"])

    monkeypatch.setattr(kernels, "build_model_object", fail)
    monkeypatch.setenv("TVM_FLASHINFER_SHIP", "self-contained")
    if strict:
        monkeypatch.setenv("TVM_FLASHINFER_STRICT", "1")
        with pytest.raises(StrictModeError, match="nvcc is missing"):
            mlc.compile(generic_module(), cuda)
        return
    with pytest.warns(FallbackWarning, match="nvcc is missing"):
        mod = mlc.compile(generic_module(), cuda)
    assert OURS not in names(mod)
    (row,) = report_of(mod).rows
    assert "nvcc is missing: install the CUDA toolkit" in row.reasons[0]
    assert "external_mods" not in mod.attrs


def test_folder_that_cannot_be_written(mlc, generic_module, cuda, monkeypatch, tmp_path) -> None:
    """The build as it is, on a machine that may have no compiler: a fallback that says why."""
    file = tmp_path / "file"
    file.write_text("no folder")
    monkeypatch.setenv("TVM_FLASHINFER_CACHE_DIR", str(file / "cache"))
    monkeypatch.setenv("TVM_FLASHINFER_SHIP", "self-contained")
    with pytest.warns(FallbackWarning):
        mod = mlc.compile(generic_module(), cuda)
    (row,) = report_of(mod).rows
    assert re.search("TVM_FLASHINFER_CACHE_DIR|is missing", row.reasons[0])
    assert file.read_text() == "no folder"


def test_call_of_17_arguments(mlc, generic_module, cuda) -> None:
    """Of another version of MLC LLM."""
    mod = generic_module(edit=lambda args: args[:16] + args[17:])
    with pytest.raises(KVCacheCallError, match=r"called with 17 arguments.*Expected 18"):
        mlc.compile(mod, cuda)


GEMMA3 = SimpleNamespace(text_config=SimpleNamespace(sliding_window_size=512))


@pytest.mark.parametrize(
    ("config", "window"),
    [
        (GEMMA3, 512),
        (SimpleNamespace(sliding_window=256), 256),
        (SimpleNamespace(text_config=None, sliding_window_size=-1, sliding_window=None), None),
        (None, None),
    ],
)
def test_window_of_a_configuration(config, window) -> None:
    assert mlc_compile.layer_window(config) == window


def test_window_of_layers(mlc, generic_module, cuda) -> None:
    """The call has none; TVM's default would be 1024."""
    mod = generic_module(attn_kind=["mha_sliding", "mha"], num_hidden_layers=2)
    if not HAS_LAYER_WINDOW:
        with pytest.warns(FallbackWarning, match="is 512; this TVM fixes it at 1024"):
            mlc.compile(mod, cuda, config=GEMMA3)
        return
    mod = mlc.compile(mod, cuda, config=GEMMA3, sliding_window_size=512)
    for name in (OURS, TVMS):
        options = [
            json.loads(binding.value.args[2].value)
            for block in mod[name].body.blocks
            for binding in block.bindings
            if isinstance(binding.value, rx.Call)
            and "flashinfer.cache_slot" == getattr(binding.value.args[0], "global_symbol", "")
        ]
        assert [option.get("layer_window") for option in options].count(512) == 5


def test_window_without_layers_that_slide(mlc, generic_module, cuda) -> None:
    """Gemma 2 and Mistral name one too; under TVM 0.26 it must not keep the cache from us."""
    config = SimpleNamespace(sliding_window=4096)
    assert report_of(mlc.compile(generic_module(), cuda, config=config)).fallbacks == []


LONGROPE = {
    "rope_scaling": {
        "rope_type": "longrope",
        "max_position_embeddings": 131072,
        "original_max_position_embeddings": 4096,
    },
    "rope_ext_factors": [1.0] * 128,
}


#: What MLC LLM's models ask of a cache besides, by the names of their configurations.
CACHES: dict[str, dict[str, Any]] = {
    "llama 2 7b": {"num_key_value_heads": 32, "rope_theta": 10000},
    "llama 3 8b": {},
    "llama 3 8b, 4 shards": {"num_attention_heads": 8, "num_key_value_heads": 2},
    "qwen 2 7b": {"num_attention_heads": 28, "num_key_value_heads": 4, "dtype": "bfloat16"},
    "gemma 2 9b": {
        "num_attention_heads": 16, "num_key_value_heads": 8, "qk_head_dim": 256, "v_head_dim": 256,
        "rotary_dim": 256,
    },
    "phi 3 mini": {
        "num_key_value_heads": 32, "qk_head_dim": 96, "v_head_dim": 96, "rotary_dim": 96,
    },
    "phi 3 128k": LONGROPE,
    "gpt 2": {
        "num_attention_heads": 12, "num_key_value_heads": 12, "qk_head_dim": 64, "v_head_dim": 64,
        "rope_mode": int(RopeMode.NONE), "rope_scale": -1, "rope_theta": -1, "rotary_dim": 64,
    },
    "deepseek v2": {
        "attn_kind": "mla", "num_attention_heads": 16, "num_key_value_heads": 1,
        "qk_head_dim": 576, "v_head_dim": 512, "mla_original_qk_head_dim": 192,
        "mla_original_v_head_dim": 128, "rope_mode": int(RopeMode.NONE),
    },
    "stages": {"num_hidden_layers": 4},
}  # fmt: skip


@pytest.mark.parametrize("model", CACHES)
def test_caches_of_models(model, mlc, generic_module, cuda) -> None:
    mod = mlc.compile(generic_module(**{"num_hidden_layers": 2, **CACHES[model]}), cuda)
    rx.analysis.well_formed(mod)
    rows = report_of(mod).rows
    assert {row.status for row in rows} == {"native"}
    assert len(rows) == (6 if "deepseek" in model else 13)
    assert (TVMS in names(mod)) == (model != "phi 3 128k")


class Attention(nn.Module):
    """`op.attention` of MLC LLM, where it takes FlashInfer, and where it does not."""

    def prefill(self, q: nn.Tensor, k: nn.Tensor, v: nn.Tensor) -> nn.Tensor:
        """Several rows."""
        scratch = nn.op.empty([8192 * 1024], dtype="float32")
        out = nn.Tensor.placeholder((1, q.shape[1], q.shape[2] * q.shape[3]), "float16")
        arguments = [q, k, v, scratch, 1, 0, 0, 1, 1.0, 0.0]
        return nn.op.extern("flashinfer.single_prefill", arguments, out)

    def decode(self, q: nn.Tensor, k: nn.Tensor, v: nn.Tensor) -> nn.Tensor:
        """One row."""
        scratch = nn.op.empty([8192 * 1024], dtype="float32")
        out = nn.Tensor.placeholder((1, 1, q.shape[2] * q.shape[3]), "float16")
        arguments = [q, k, v, scratch, 0, 0, 1.0, 0.0]
        return nn.op.extern("flashinfer.single_decode", arguments, out)

    def encode(self, q: nn.Tensor, k: nn.Tensor, v: nn.Tensor) -> nn.Tensor:
        """TVM's kernel."""
        from tvm.relax.frontend.nn.llm.kv_cache import _attention_sequence_prefill

        heads, dim = (int(size) for size in q.shape[2:])
        target = tvm.target.Target("cuda")
        kernel = _attention_sequence_prefill(heads, heads, dim, "float16", target, sm_scale=0.125)
        out = [nn.Tensor.placeholder(q.shape, q.dtype)]
        out.append(nn.Tensor.placeholder(q.shape[:3], q.dtype))
        return nn.op.tensor_ir_op(kernel, "sequence_prefill", [q, k, v], out)[0]


def attention_module(**functions: int) -> tvm.IRModule:
    """Some methods of `Attention`, with a head_dim each."""

    def spec(name: str, dim: int) -> dict[str, Any]:
        q = nn.spec.Tensor([1, 1 if name == "decode" else "n", 8, dim], "float16")
        kv = nn.spec.Tensor([1, "n", 8, dim], "float16")
        return {"q": q, "k": kv, "v": kv, "$": {"param_mode": "none", "effect_mode": "none"}}

    module = Attention()
    specs = {name: spec(name, dim) for name, dim in functions.items()}
    return module.export_tvm(nn.spec.ModuleSpec.from_raw(specs, module), allow_extern=True)[0]


def test_sites_of_ours(mlc, cuda, capsys) -> None:
    mod = attention_module(prefill=128, decode=128)
    sites = attention_sites(mod)
    assert [(site.function, site.kernel, site.dtype, site.head_dim) for site in sites] == [
        ("decode", "flashinfer.single_decode", "float16", 128),
        ("prefill", "flashinfer.single_prefill", "float16", 128),
    ]
    rows = {row.site: row for row in report_of(mlc.compile(mod, cuda)).rows}
    assert {row.status for row in rows.values()} == {"native"}
    assert rows["decode"].reasons == ()
    assert "no mask of the model" in rows["prefill"].reasons[0]
    line = "tvm-flashinfer: prefill single_prefill: native (flashinfer.single_prefill, sm_90a)"
    assert line in capsys.readouterr().err.splitlines()


def test_sites_bring_their_kernels(mlc, cuda, monkeypatch, tmp_path) -> None:
    """A model that has no cache is self-contained too."""
    from tvm_flashinfer import kernels

    builds = []

    def build(specs: list[Any]) -> Any:
        builds.append([spec.name for spec in specs])
        path = tmp_path / "kernels.o"
        path.write_bytes(b"")
        return path

    monkeypatch.setattr(kernels, "build_model_object", build)
    monkeypatch.setenv("TVM_FLASHINFER_SHIP", "self-contained")
    mod = mlc.compile(attention_module(prefill=128), cuda)
    assert builds == [["common_sm90a", "batch_attention_f16_d128_sm90a"]]
    assert len(mod.attrs["external_mods"]) == 1


def test_site_of_tvms(mlc, cuda, monkeypatch) -> None:
    """What MLC LLM does not give to FlashInfer is a fallback, and strict mode refuses it."""
    mod = attention_module(encode=64)
    (row,) = report_of(mlc.compile(mod, cuda)).rows
    assert (row.site, row.slot, row.status) == ("encode", "sequence_prefill", "fallback")
    assert "here the dtype is float16 and head_dim 64" in row.reasons[0]
    monkeypatch.setenv("TVM_FLASHINFER_STRICT", "1")
    with pytest.raises(StrictModeError, match="head_dim 64"):
        mlc.compile(mod, cuda)


def test_model_without_attention(mlc, module_builder, cuda, capsys) -> None:
    builder = rx.BlockBuilder()
    module_builder[1](builder)
    assert names(mlc.compile(builder.get(), cuda)) == {"embed"}
    assert capsys.readouterr().err == ""


class Flags:
    """MLC LLM's, of which a target turns some off."""

    def __init__(self) -> None:
        self.flashinfer = self.cublas_gemm = self.cutlass = self.cudagraph = True
        self.ipc_allreduce_strategy = 3

    def update(self, target: Any, quantization: Any) -> None:
        """As for a target without FlashInfer."""
        self.flashinfer = False


def test_flags(monkeypatch, cuda, capsys) -> None:
    """What this TVM lacks is turned off, and that FlashInfer was asked for is remembered."""
    known = {"relax.ext.cublas": "there"}
    monkeypatch.setattr(tvm, "get_global_func", lambda name, allow_missing=False: known.get(name))
    flags = Flags()
    mlc_compile.update_flags(Flags.update)(flags, cuda, None)
    assert getattr(flags, mlc_compile._ASKED_FOR)
    assert (flags.cublas_gemm, flags.cutlass, flags.cudagraph) == (True, False, True)
    assert flags.ipc_allreduce_strategy == 0
    assert "cutlass is turned off: this TVM is built without CUTLASS" in capsys.readouterr().err
