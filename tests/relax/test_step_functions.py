"""`export_steps`: what a decode step comes to, and what is refused. No GPU is needed."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import tvm
from tvm import relax as rx
from tvm.relax.backend import cuda
from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import op
from tvm.target import Target

from tvm_flashinfer.relax import StepCache, export_steps
from tvm_flashinfer.relax._compat import FUSES_IN_PLACE
from tvm_flashinfer.steps import StepConfig

SM_90A = {"kind": "cuda", "arch": "sm_90a", "max_threads_per_block": 1024,
          "max_shared_memory_per_block": 49152, "thread_warp_size": 32}  # fmt: skip
HEADS, KV_HEADS, DIM, VOCAB, WIDTH = 4, 2, 64, 32, 256


class Decoder(nn.Module):
    """Layers of attention between two projections of all tokens."""

    def __init__(self, layers: int = 2, heads: int = HEADS) -> None:
        self.layers, self.heads = layers, heads
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.qkv = nn.Linear(WIDTH, (heads + 2 * KV_HEADS) * DIM, bias=False)
        self.out = nn.Linear(heads * DIM, WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False, out_dtype="float32")

    def states(self, tokens: nn.Tensor, cache: Any) -> nn.Tensor:
        """(b, s) int32 -> (b, s, width)."""
        b, s = tokens.shape
        x = op.reshape(self.embed(op.reshape(tokens, (b * s,))), (b, s, WIDTH))
        for layer in range(self.layers):
            qkv = op.reshape(self.qkv(x), (b, s, self.heads + 2 * KV_HEADS, DIM))
            o = cache.attention_with_fused_qkv(layer, qkv, self.heads, sm_scale=0.125)
            x = x + self.out(op.reshape(o, (b, s, self.heads * DIM)))
        return x

    def decode(self, tokens: nn.Tensor, cache: Any) -> nn.Tensor:
        """Logits of each sequence."""
        return self.head(self.states(tokens, cache))

    def prefill(self, tokens: nn.Tensor, rows: nn.Tensor, cache: Any) -> nn.Tensor:
        """Logits of some rows."""
        return self.head(take(self.states(tokens, cache), rows))


def take(x: nn.Tensor, rows: nn.Tensor) -> nn.Tensor:
    """Choose rows of (1, n, width), clipped to those that there are."""
    return op.wrap_nested(rx.op.take(x._expr, rows._expr, 1, mode="clip"), "take")


def config(**changes: Any) -> StepConfig:
    """That of `Decoder`."""
    sizes = {"batch_sizes": (1, 4)} | changes
    return StepConfig(2, HEADS, KV_HEADS, DIM, VOCAB, "float16", **sizes)


def export(model: Decoder, **changes: Any) -> tuple[tvm.IRModule, list[str]]:
    """The module for a GPU, whose kernels are not looked for."""
    model.to("float16")
    return export_steps(model, config(**changes), Target(SM_90A), ship="shared")


def lowered(use_cuda_graph: bool) -> dict[str, rx.Function]:
    """The Relax functions before their memory is bound to registers."""
    target = Target(SM_90A)
    mod, _ = export(Decoder())
    passes = [
        rx.transform.FuseTransposeMatmul(),  # else each step turns the weights round
        *cuda.pipeline.legalize_passes(target),
        *cuda.pipeline.dataflow_lower_passes(target),
        rx.transform.StaticPlanBlockMemory(),
        rx.transform.RewriteCUDAGraph(),
    ]
    graph = tvm.transform.PassContext(config={"relax.backend.use_cuda_graph": use_cuda_graph})
    with target, graph:
        mod = tvm.transform.Sequential(passes)(mod)
    return {var.name_hint: f for var, f in mod.functions_items() if isinstance(f, rx.Function)}


def launches(function: rx.Function) -> list[str]:
    """The names of what a function calls that runs on the GPU."""
    names = []
    for block in function.body.blocks:
        for binding in block.bindings:
            callee = binding.value.op if isinstance(binding.value, rx.Call) else None
            if isinstance(callee, tvm.ir.GlobalVar):
                names.append(callee.name_hint)
            elif isinstance(callee, rx.ExternFunc):
                names.append(str(callee.global_symbol))
    return [name for name in names if not name.startswith("vm.builtin")]


def test_a_decode_step_is_one_graph() -> None:
    """All launches of a decode function are in one capture, and prefill has none."""
    functions = lowered(use_cuda_graph=True)
    plain = lowered(use_cuda_graph=False)
    captures = sorted(name for name in functions if name.endswith("cuda_graph_capture"))
    assert captures == ["step_decode_1_cuda_graph_capture", "step_decode_4_cuda_graph_capture"]
    for size in (1, 4):
        name = f"step_decode_{size}"
        assert launches(functions[name]) == []
        captured = launches(functions[f"{name}_cuda_graph_capture"])
        assert captured == launches(plain[name])
        assert captured.count("flashinfer.attention_paged_decode") == 2
        # The last kernel writes where its logits are wanted; they are not copied.
        assert "store" in captured[-1]
        assert "matmul" in captured[-1] or not FUSES_IN_PLACE
    assert launches(functions["step_prefill"]).count("flashinfer.attention_paged") == 2


def test_compiles_to_the_end() -> None:
    """Down to code of the virtual machine and CUDA, which needs no GPU."""
    target = Target(SM_90A, host="llvm")
    mod, _ = export(Decoder(), batch_sizes=(4,))
    passes = [
        rx.transform.FuseTransposeMatmul(),
        *cuda.pipeline.legalize_passes(target),
        *cuda.pipeline.dataflow_lower_passes(target),
        *cuda.pipeline.finalize_passes(target),
    ]
    graph = tvm.transform.PassContext(config={"relax.backend.use_cuda_graph": True})
    with target, graph:
        built = tvm.compile(mod, target, relax_pipeline=tvm.transform.Sequential(passes))
    assert "run_or_capture" in built.as_text()


def test_the_module_says_what_it_is() -> None:
    """A function returns the configuration, and the report has every call."""
    mod, params = export(Decoder(), rope_scaling={"rope_type": "linear", "factor": 2.0})
    text = mod["flashinfer_steps"].body.body.value
    assert StepConfig.from_json(text) == config(rope_scaling={"rope_type": "linear", "factor": 2.0})
    assert params == ["embed.weight", "qkv.weight", "out.weight", "head.weight"]
    report = mod["flashinfer_report"].body.body.value
    for name in ("step_prefill", "step_decode_1", "step_decode_4"):
        assert name in report


def test_functions_of_other_names() -> None:
    """A model may have its functions under names of its own, or closures."""

    class Renamed(Decoder):
        forward = Decoder.decode
        decode = None

    model = Renamed()
    model.to("float16")
    target = Target(SM_90A)
    mod, _ = export_steps(model, config(), target, decode=model.forward, ship="shared")
    assert "step_decode_4" in {var.name_hint for var in mod.get_global_vars()}


def test_refusals() -> None:
    """Sizes of a layer that are not those of the configuration."""
    with pytest.raises(ValueError, match=r"layer 0 attends with 8 query heads, 12 heads .* 4, 8"):
        export(Decoder(heads=8))
    with pytest.raises(ValueError, match=r"layer 2 attends, .* 2 layers; raise num_layers"):
        export(Decoder(layers=3))
    with pytest.raises(ValueError, match="got batch sizes"):
        config(batch_sizes=(0, 4))
    with pytest.raises(ValueError, match="got 3 query heads, expected a multiple of the 2 KV"):
        StepConfig(1, 3, 2, 64, 32, "float16")
    with pytest.raises(ValueError, match="got head_dim 0"):
        StepConfig(1, 2, 2, 0, 32, "float16")


@pytest.mark.parametrize(
    ("target", "changes", "says"),
    [
        (SM_90A, {"head_dim": 100}, "head dimension|head_dim"),
        (SM_90A, {"dtype": "float32"}, "float32"),
        ("llvm", {"dtype": "float64"}, "the dtype is float64; on CPU there are float16"),
        ("c", {}, "the target is 'c'; there are kernels for cuda and llvm"),
        ("llvm", {"rope_scaling": {"rope_type": "longrope"}}, "the RoPE scaling is longrope"),
    ],
    ids=["head_dim", "dtype", "cpu-dtype", "target", "rope"],
)
def test_what_no_kernel_serves(target: Any, changes: dict[str, Any], says: str) -> None:
    """Refused before anything is exported or built."""
    served = dataclasses.replace(config(), **changes)
    with pytest.raises(ValueError, match=f"cannot be served:\n.*({says})"):
        export_steps(Decoder(), served, Target(target))


def test_other_methods_of_the_cache_say_what_there_is() -> None:
    """A model that asks for more than attention over new tokens and the past."""
    with pytest.raises(AttributeError, match=r"`self_attention`.*attention_with_fused_qkv alone"):
        getattr(StepCache(config(), [], *[None] * 5), "self_attention")  # noqa: B009
