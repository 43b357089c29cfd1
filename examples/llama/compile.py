"""Compiling the model: one library that holds the model once and a creator for each cache kind."""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import platform
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tvm
from tvm import relax
from tvm.relax.frontend.nn.llm.kv_cache import TIRPagedKVCache
from tvm.relax.transform import FuseTransposeMatmul
from tvm.s_tir import dlight
from tvm.target import Target, codegen

from .model import GENERIC_CREATE
from .progress import Progress
from .schedule import ParallelRows, UseCPUMatmul

# Arguments 13 and up of vm.builtin.paged_attention_kv_cache_create, in TVM 0.27.
_SLOTS_FROM = 13
_SLOTS = (
    "transpose_append",
    "transpose_append_mla",
    "prefill_ragged",
    "prefill_paged",
    "decode_paged",
    "prefill_sliding_window",
    "decode_sliding_window",
    "prefill_tree_mask_paged",
    "prefill_tree_mask",
    "mla_prefill",
    "merge_state",
    "split_rotary",
    "copy_single_page",
    "debug_get_kv",
    "compact_copy",
)


def physical_cores() -> int:
    """Count the cores that this process may use, hardware threads of one core taken together."""
    cores = set()
    for cpu in os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else ():
        siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        if siblings.exists():
            cores.add(siblings.read_text())
    return len(cores) or os.cpu_count() or 1


def default_target(device: str) -> Target:
    """Describe the machine for the compiler.

    Parameters
    ----------
    device : str
        ``cpu`` (this processor) or ``cuda`` (the first GPU, or sm_90a where there is none).
    """
    x86 = platform.machine() in ("x86_64", "AMD64")
    host = {
        "kind": "llvm",
        "mtriple": "x86_64-unknown-linux-gnu" if x86 else codegen.llvm_get_system_triple(),
        "num-cores": physical_cores(),
    }
    processor = codegen.llvm_get_system_cpu()
    if processor not in ("", "generic"):
        host["mcpu"] = processor
    elif x86:
        host["mcpu"] = "x86-64-v3"
    if device == "cpu":
        return Target(host)
    if device != "cuda":
        raise ValueError(f"got device {device!r}, expected 'cpu' or 'cuda'")
    arch = "sm_90"
    if tvm.cuda(0).exist:
        arch = "sm_" + tvm.cuda(0).compute_version.replace(".", "")
    return Target(
        {
            "kind": "cuda",
            # TVM calls an H200 sm_90; only with the suffix do its float16 products compile.
            "arch": arch + "a" if arch in ("sm_90", "sm_100") else arch,
            "max_threads_per_block": 1024,
            "max_shared_memory_per_block": 49152,
            "thread_warp_size": 32,
        },
        host=host,
    )


def default_dtype(target: Target) -> str:
    """Choose the dtype: float32 on CPU; on CUDA float16, or bfloat16 where that cannot compile.

    TVM crashes on a float16 matmul of dynamic shape when the architecture is digits alone.
    """
    if target.kind.name == "llvm":
        return "float32"
    return "float16" if _float16_compiles(target) else "bfloat16"


def _float16_compiles(target: Target) -> bool:
    return target.kind.name == "llvm" or not str(target.attrs["arch"])[-1].isdigit()


def create_tir_cache(
    mod: tvm.IRModule, target: Target, layer_window: int | None = None
) -> tvm.IRModule:
    """Add ``create_tir_paged_kv_cache``: the generic creation, served by TVM's own kernels."""
    generic = mod["create_paged_kv_cache"]
    call = generic.body.blocks[0].bindings[0].value
    assert call.args[0].global_symbol == GENERIC_CREATE
    kind, sizes, partition, *rest = call.args[1:]
    scalars = {
        name: rest[i].value
        for i, name in enumerate(
            (
                "num_hidden_layers",
                "num_attention_heads",
                "num_key_value_heads",
                "qk_head_dim",
                "v_head_dim",
                "mla_original_qk_head_dim",
                "mla_original_v_head_dim",
                "rope_mode",
                "rope_scale",
                "rope_theta",
            )
        )
    }
    rope_scaling, rope_ext_factors, rotary_dim, disaggregation, dtype = rest[len(scalars) :]
    names = [str(param.name) for param in generic.params]
    window = {} if layer_window is None else {"layer_sliding_window_size": layer_window}
    builder = relax.BlockBuilder(mod)
    params = [
        relax.Var(name + "_", relax.ShapeType([size]))
        for name, size in zip(names, sizes.values, strict=True)
    ]
    with builder.function("create_tir_paged_kv_cache", params):
        cache = TIRPagedKVCache(
            attn_kind=(
                [field.value for field in kind.fields]
                if isinstance(kind, relax.Tuple)
                else kind.value
            ),
            **dict(zip(names, sizes.values, strict=True)),
            layer_partition=partition,
            **scalars,
            rope_scaling=json.loads(rope_scaling.value),
            rope_ext_factors=rope_ext_factors,
            rotary_dim=rotary_dim.value,
            enable_disaggregation=bool(disaggregation.value),
            dtype=str(dtype.value),
            target=target,
            **window,
        )
        builder.emit_func_output(cache._expr)
    return builder.finalize()


def create_caches(
    mod: tvm.IRModule, target: Target, kv_caches: Sequence[str], layer_window: int | None = None
) -> tvm.IRModule:
    """Replace the generic cache creation by functions ``create_<kind>_paged_kv_cache``.

    Parameters
    ----------
    kv_caches : sequence of str
        ``tir`` alone, made here, or with ``flashinfer``: then the pass of tvm_flashinfer makes
        both, as it does for MLC LLM.
    layer_window : int, optional
        What layers of kind ``mha_sliding`` see, in tokens; the pass's default without it.
    """
    if unknown := set(kv_caches) - {"flashinfer", "tir"}:
        raise ValueError(f"got KV caches {sorted(unknown)}, expected 'flashinfer' or 'tir'")
    if "flashinfer" in kv_caches:
        from tvm_flashinfer.relax import DispatchKVCacheCreation

        window = {} if layer_window is None else {"layer_sliding_window_size": layer_window}
        return DispatchKVCacheCreation(target, **window)(mod)
    mod = create_tir_cache(mod, target, layer_window)
    del mod["create_paged_kv_cache"]
    return mod


def kv_cache_slots(func: relax.Function) -> dict[str, str]:
    """List which function serves each slot of the cache that a creation function makes.

    Returns
    -------
    slots : dict of str to str
        For each slot the calling convention, if there is one, and the names of its functions.
    """
    for block in func.body.blocks:
        for binding in block.bindings:
            call = binding.value
            if (
                isinstance(call, relax.Call)
                and call.args
                and isinstance(call.args[0], relax.ExternFunc)
                and call.args[0].global_symbol == "vm.builtin.paged_attention_kv_cache_create"
            ):
                args = call.args[1 + _SLOTS_FROM :]
                return {slot: _describe(arg) for slot, arg in zip(_SLOTS, args, strict=True)}
    raise ValueError("got a function that creates no paged KV cache")


def _describe(arg: relax.Expr) -> str:
    if isinstance(arg, relax.Tuple):
        return " ".join(_describe(field) for field in arg.fields) or "-"
    if isinstance(arg, tvm.ir.StringImm):
        return str(arg.value) + ":"
    if isinstance(arg, relax.ExternFunc):
        return str(arg.global_symbol)
    if isinstance(arg, tvm.ir.GlobalVar):
        return str(arg.name_hint)
    return str(arg)


def build_pipeline(target: Target) -> tvm.transform.Pass:
    """Compose the compiler passes for a target."""
    cuda = target.kind.name == "cuda"
    backend = relax.backend.cuda if cuda else relax.backend.cpu_generic
    rules = (
        (
            dlight.gpu.Matmul(),
            dlight.gpu.GEMV(),
            dlight.gpu.Reduction(),
            dlight.gpu.GeneralReduction(),
            dlight.gpu.Fallback(),
        )
        if cuda
        else (ParallelRows(),)
    )
    return tvm.transform.Sequential(
        [
            FuseTransposeMatmul() if cuda else UseCPUMatmul(target),
            relax.transform.DeadCodeElimination(),
            *backend.pipeline.library_dispatch_passes(target),
            relax.transform.LegalizeOps(),
            relax.transform.AnnotateTIROpPattern(),
            relax.transform.FoldConstant(),
            relax.transform.FuseOps(),
            relax.transform.FuseTIR(),
            dlight.ApplyDefaultSchedule(*rules),
            *backend.pipeline.dataflow_lower_passes(target),
            *backend.pipeline.finalize_passes(target),
        ]
    )


def compile_model(
    config: Any,
    target: Target,
    dtype: str,
    build_dir: Path,
    kv_caches: Sequence[str] = ("flashinfer", "tir"),
    progress: Progress | None = None,
) -> Path:
    """Compile a model, or find the library of an earlier, equal compilation.

    Parameters
    ----------
    config : LlamaConfig or Gemma3Config
        Dimensions of the model. What its layers with a window see is ``sliding_window``.
    target : Target
        See `default_target`.
    dtype : str
        ``float32``, ``float16`` or ``bfloat16``, of weights, activations and cache.
    build_dir : Path
        Folder for the library, whose name is made of all that went into it.
    kv_caches : sequence of str
        The kinds of cache that the library shall create, of ``flashinfer`` and ``tir``.
        ``flashinfer`` is left out, with a warning that has the reasons, where it cannot be made.

    Returns
    -------
    library : Path
        A shared object; `library_info` reads what is known about it.

    Raises
    ------
    ValueError
        If TVM cannot compile ``dtype`` for the target.
    """
    if dtype == "float16" and not _float16_compiles(target):
        raise ValueError(
            f"got dtype float16 for {target.attrs['arch']}, where TVM crashes on a float16 matmul "
            "of dynamic shape; use bfloat16"
        )
    progress = progress or Progress(enabled=False)
    key = content_key(config, target, dtype, kv_caches)
    library = build_dir / f"{config.family}-{key}.so"
    if library.exists() and library.with_suffix(".json").exists():
        progress.say(f"using the compiled library {library}")
        return library
    model = config.model()
    model.to(dtype)
    window = getattr(config, "sliding_window", None)
    compile_module(model, target, library, kv_caches, window, progress)
    return library


def compile_module(
    model: Any,
    target: Target,
    library: Path,
    kv_caches: Sequence[str] = ("flashinfer", "tir"),
    layer_window: int | None = None,
    progress: Progress | None = None,
) -> None:
    """Compile a model that has the functions of `causal_lm_spec`.

    Parameters
    ----------
    model : nn.Module
        Converted to its dtype.
    target : Target
        See `default_target`.
    library : Path
        Where the shared object goes, and beside it what `library_info` reads.
    kv_caches : sequence of str
        See `compile_model`.
    layer_window : int, optional
        What layers of kind ``mha_sliding`` see, in tokens.
    progress : Progress, optional
        Told what is done.
    """
    progress = progress or Progress(enabled=False)
    with progress.step("exporting the model to Relax"), target:
        mod, params, _ = model.export_tvm(spec=model.module_spec(), allow_extern=True)
        mod = create_caches(mod, target, kv_caches, layer_window)
    functions = {var.name_hint for var in mod.get_global_vars()}
    info = {
        "dtype": model.dtype,
        "target": str(target),
        "params": [name for name, _ in params],
        "kv_cache_slots": {
            kind: kv_cache_slots(mod[name])
            for kind in kv_caches
            if (name := f"create_{kind}_paged_kv_cache") in functions
        },
    }
    build_library(mod, target, library, info, progress)


def build_library(
    mod: tvm.IRModule,
    target: Target,
    library: Path,
    info: dict[str, Any],
    progress: Progress,
    cuda_graph: bool = False,
) -> None:
    """Compile and link a module.

    Parameters
    ----------
    mod : tvm.IRModule
        Before the passes of `build_pipeline`.
    target : Target
        See `default_target`.
    library : Path
        Where the shared object goes.
    info : dict
        What `library_info` reads.
    progress : Progress
        Told what is done.
    cuda_graph : bool
        Whether TVM captures what it can into CUDA graphs; of no effect on CPU.
    """
    graph = tvm.transform.PassContext(config={"relax.backend.use_cuda_graph": cuda_graph})
    with progress.step(f"compiling for {target.kind.name}"), target, graph:
        executable = tvm.compile(mod, target=target, relax_pipeline=build_pipeline(target))
    with progress.step("linking"):
        library.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=library.parent) as folder:
            built = Path(folder) / library.name
            executable.export_library(str(built))
            built.with_suffix(".json").write_text(json.dumps(info, indent=1))
            os.replace(built.with_suffix(".json"), library.with_suffix(".json"))
            os.replace(built, library)


def library_info(library: Path) -> dict[str, Any]:
    """Read what `compile_model` noted about a library.

    Returns
    -------
    info : dict
        ``params``, the parameter names in the order the functions take them; ``dtype``;
        ``target``; ``kv_cache_slots``, per kind of cache in the library the function serving each
        slot.
    """
    return json.loads(library.with_suffix(".json").read_text())


def content_key(config: Any, target: Target, dtype: str, kinds: Sequence[str]) -> str:
    """Hash what determines a library, the examples' sources included.

    ``kinds`` are those of its caches, and what else is made for it.
    """
    digest = hashlib.sha256()
    for part in (config, target, dtype, tuple(kinds), tvm.__version__):
        digest.update(f"{part}\n".encode())
    names = ("model.py", "schedule.py", "compile.py", "steps.py")
    here = [Path(__file__).with_name(name) for name in names]
    for source in (*here, Path(inspect.getfile(type(config)))):
        digest.update(source.read_bytes())
    if set(kinds) != {"tir"}:
        import tvm_flashinfer

        package = Path(tvm_flashinfer.__file__).parent
        for source in sorted(package.rglob("*.py")):
            digest.update(source.read_bytes())
    return digest.hexdigest()[:16]
