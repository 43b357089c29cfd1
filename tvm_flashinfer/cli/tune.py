"""``tvm-flashinfer tune``: kernels are measured for a model on the GPU of this machine."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import tvm_ffi

from tvm_flashinfer.cli.output import exit_statuses, guarded
from tvm_flashinfer.kernels.environment import device_arch, driver, gpus
from tvm_flashinfer.kernels.headers import FLASHINFER_VERSION
from tvm_flashinfer.kernels.spec import (
    DTYPES,
    HEAD_DIMS,
    MLA_HEAD_DIMS,
    MLA_RAGGED_HEAD_DIMS,
    KernelSpec,
    attention_specs,
    mla_specs,
    normalize_dtype,
)
from tvm_flashinfer.tuner import Limits, ModelShape, TuningError, grid, tune

if TYPE_CHECKING:
    from tvm_flashinfer.relax.model_config import ModelConfig

#: Of the shell, for a program that was interrupted.
_INTERRUPTED = 130


@exit_statuses(
    {
        0: "the file is written",
        1: "there is no GPU, no kernel, or a file of another machine in the way; it says which",
        2: "the command was used wrongly, or CONFIG cannot be read",
        _INTERRUPTED: "it was interrupted; the same command goes on",
    }
)
@click.command("tune")
@click.argument(
    "config", required=False, type=click.Path(exists=True, dir_okay=False, path_type=Path)
)
@click.option(
    "--output",
    "-o",
    type=click.Path(dir_okay=False, path_type=Path),
    default=Path("tuning.json"),
    show_default=True,
    help="The file to write. Entries of other models that it has are kept.",
)
@click.option("--heads", metavar="Q/KV", help="In place of CONFIG: heads, such as 32/8.")
@click.option("--head-dim", type=int, metavar="N", help="In place of CONFIG: head dimension.")
@click.option("--dtype", metavar="DTYPE", help="Dtype of the cache. Default: that of CONFIG.")
@click.option(
    "--tensor-parallel-shards",
    "shards",
    type=click.IntRange(min=1),
    metavar="N",
    help="GPUs that share the heads. Default: as CONFIG says, or 1.",
)
@click.option("--max-batch", type=click.IntRange(1, 4096), default=128, show_default=True)
@click.option(
    "--max-keys",
    type=click.IntRange(512, 1 << 20),
    default=32768,
    show_default=True,
    help="The longest requests to measure.",
)
@click.option(
    "--memory",
    type=click.FloatRange(min=0.1),
    default=2.0,
    show_default=True,
    metavar="GIB",
    help="Keys and values of a step at most.",
)
@click.option("--device", "device_id", type=click.IntRange(min=0), default=0, show_default=True)
@click.option("--restart", is_flag=True, help="Measure again what the file has already.")
@click.option("--dry-run", is_flag=True, help="List what would be measured.")
def tune_command(
    config: Path | None,
    output: Path,
    heads: str | None,
    head_dim: int | None,
    dtype: str | None,
    shards: int | None,
    max_batch: int,
    max_keys: int,
    memory: float,
    device_id: int,
    restart: bool,
    dry_run: bool,
) -> None:
    """Measure which kernels are fastest for a model, on a GPU of this machine.

    CONFIG is the mlc-chat-config.json or config.json of the model. The result is a file for this
    GPU, driver and version. It is used where TVM_FLASHINFER_TUNING names it: in processes that run
    models, and in those that compile them, which puts it into the model. Give all GPUs that share a
    model the same file.

    Interrupted with Ctrl-C it goes on when it is started again.
    """
    limits = Limits(max_batch, max_keys, max_bytes=int(memory * (1 << 30)))
    grids = {
        shape: grid(shape, limits) for shape in _shapes(config, heads, head_dim, dtype, shards)
    }
    if dry_run:
        for points in grids.values():
            for point in points:
                click.echo(str(point))
        return
    identity = _identity(device_id)
    start = time.monotonic()
    try:
        for shape, points in grids.items():
            measure = guarded(functools.partial(_measurement, shape, identity, device_id, limits))
            tune(output, shape, identity, points, measure, lambda p: click.echo(str(p)), restart)
    except TuningError as error:
        raise click.ClickException(str(error)) from error
    except KeyboardInterrupt:
        click.echo(f"interrupted; what was measured is in {output}.partial", err=True)
        raise SystemExit(_INTERRUPTED) from None
    count = sum(map(len, grids.values()))
    click.echo(f"{count} classes of shapes in {time.monotonic() - start:.0f} s: {output}")


def _shapes(
    config: Path | None,
    heads: str | None,
    head_dim: int | None,
    dtype: str | None,
    shards: int | None,
) -> list[ModelShape]:
    """Return the shapes of attention in a model."""
    if (config is None) != (heads is not None and head_dim is not None):
        raise click.UsageError("give CONFIG, or --heads and --head-dim in its place.")
    if config is not None:
        return _shapes_of_model(config, dtype, shards)
    assert heads is not None
    assert head_dim is not None
    try:
        num_qo_heads, num_kv_heads = (int(number) for number in heads.split("/"))
    except ValueError:
        raise click.UsageError(f"--heads is {heads!r}, expected two numbers as 32/8.") from None
    if shards:
        num_qo_heads, num_kv_heads = num_qo_heads // shards, max(1, num_kv_heads // shards)
    if num_kv_heads < 1 or num_qo_heads < 1 or num_qo_heads % num_kv_heads:
        raise click.UsageError(f"--heads is {heads!r}, expected a multiple as in 32/8.")
    shape = ModelShape(num_qo_heads, num_kv_heads, head_dim, head_dim, dtype or "float16")
    return [_checked(shape)]


def _shapes_of_model(config: Path, dtype: str | None, shards: int | None) -> list[ModelShape]:
    from tvm_flashinfer.cli.support import read_config

    model: ModelConfig = read_config(config, dtype, shards)
    cache = model.cache
    if cache.logits_soft_cap or cache.alibi_slopes:
        raise click.UsageError(
            f"{config}: the scores of this model are capped or have slopes, for which there is one "
            "kernel; there is nothing to choose"
        )
    heads = cache.num_attention_heads
    if cache.is_mla:
        latent = _checked(ModelShape(heads, 1, 512, 512, cache.dtype, is_mla=True))
        dims = (cache.mla_original_qk_head_dim, cache.mla_original_v_head_dim)
        if dims != MLA_RAGGED_HEAD_DIMS:
            return [latent]
        return [
            latent,
            replace(ModelShape(heads, heads, *dims, latent.dtype), only_new_tokens=True),
        ]
    dims = (cache.qk_head_dim, cache.v_head_dim)
    return [_checked(ModelShape(heads, cache.num_key_value_heads, *dims, cache.dtype))]


def _checked(shape: ModelShape) -> ModelShape:
    """Return a shape whose kernels have a plan, and so a choice."""
    shape = replace(shape, dtype=normalize_dtype(shape.dtype))
    if shape.dtype not in DTYPES:
        raise click.UsageError(f"the dtype is {shape.dtype}; kernels have {' and '.join(DTYPES)}.")
    if not shape.is_mla and (
        shape.head_dim_qk not in HEAD_DIMS or shape.head_dim_vo != shape.head_dim_qk
    ):
        raise click.UsageError(
            f"the head dimension is {shape.head_dim_qk}; {', '.join(map(str, HEAD_DIMS))} have "
            f"more kernels than one, besides {MLA_HEAD_DIMS[0]} of MLA."
        )
    return shape


def _identity(device_id: int) -> dict[str, Any]:
    """Return what a file of this machine says of it."""
    from tvm_flashinfer import __version__

    found, here = gpus(), driver()
    if device_id >= len(found) or here is None:
        raise click.ClickException(
            f"the device is cuda:{device_id}; the CUDA driver shows {len(found)} GPUs. Kernels are "
            "measured where they will run"
        )
    gpu = found[device_id]
    major, minor = gpu["capability"]
    return {
        "gpu": {"name": gpu["name"], "arch": 10 * major + minor, "num_sm": gpu["num_sm"]},
        "versions": {
            "tvm_flashinfer": __version__,
            "flashinfer": FLASHINFER_VERSION,
            "cuda_driver": int(here["cuda"].split(".")[0]),
        },
    }


def _measurement(
    shape: ModelShape, identity: dict[str, Any], device_id: int, limits: Limits
) -> Any:
    """Return what measures, with all kernels of the model loaded."""
    import tvm

    from tvm_flashinfer.kernels import load
    from tvm_flashinfer.tuner.measure import Measurement

    archs = (device_arch(device_id),)
    if shape.is_mla or shape.only_new_tokens:
        specs = mla_specs([shape.dtype], archs)
    else:
        specs = attention_specs([shape.dtype], [shape.head_dim_qk], archs)
    tvm_ffi.get_global_func("flashinfer.load_prebuilt_kernels")()
    loaded = tvm_ffi.get_global_func("flashinfer.loaded_kernels")()
    if missing := _missing(specs, [str(name) for name in loaded]):
        load(missing)
    return Measurement(shape, identity, tvm.cuda(device_id), limits)


def _missing(specs: Iterable[KernelSpec], loaded: Iterable[str]) -> list[KernelSpec]:
    """Return the units that are not loaded, by the names of the kernels that are."""
    names = {name.partition("@")[0] for name in loaded}
    short = {"float16": "f16", "bfloat16": "bf16"}
    missing = []
    for spec in specs:
        dims = f"d{spec.head_dim_qk}"
        if spec.head_dim_vo != spec.head_dim_qk:
            dims += f"x{spec.head_dim_vo}"
        name = f"{spec.kind}:{short.get(spec.dtype)}:{dims}"
        if ("batch_prefill_plan" if spec.kind == "common" else name) not in names:
            missing.append(spec)
    return missing
