"""``tvm-flashinfer build``: kernels are compiled ahead of time."""

from __future__ import annotations

import time
from collections.abc import Sequence

import click

from tvm_flashinfer.cli.output import exit_statuses, guarded
from tvm_flashinfer.kernels.build import build_library, build_prebuilt, print_progress
from tvm_flashinfer.kernels.environment import default_archs
from tvm_flashinfer.kernels.errors import UnsupportedKernelError
from tvm_flashinfer.kernels.prebuilt import PREBUILT_VARIABLE
from tvm_flashinfer.kernels.spec import (
    DTYPES,
    FLOAT8_DTYPES,
    HEAD_DIMS,
    PRESETS,
    KernelSpec,
    attention_specs,
    check_supported,
    parse_archs,
    preset_specs,
)

_DEFAULT_PRESET = "fp16-d128"


@exit_statuses(
    {
        0: "the kernels are ready",
        1: "they cannot be compiled: a compiler is missing, or failed",
        2: "the command was used wrongly, or there is no such kernel",
    }
)
@click.command()
@click.option(
    "--preset",
    type=click.Choice(list(PRESETS)),
    help=f"A set of kernels. Default: {_DEFAULT_PRESET}, what most models in float16 need.",
)
@click.option(
    "--dtype",
    "dtypes",
    multiple=True,
    metavar="DTYPE",
    help=f"In place of a preset: {' or '.join(DTYPES)}. May be given again. Default: all.",
)
@click.option(
    "--head-dim",
    "head_dims",
    type=int,
    multiple=True,
    metavar="N",
    help=f"In place of a preset: {', '.join(map(str, HEAD_DIMS))}. May be given again. "
    "Default: all.",
)
@click.option(
    "--kv-dtype",
    "kv_dtypes",
    multiple=True,
    metavar="DTYPE",
    help=f"Also kernels without a plan for keys and values in {' or '.join(FLOAT8_DTYPES)}. "
    "May be given again.",
)
@click.option(
    "--arch",
    "archs",
    multiple=True,
    metavar="ARCH",
    help="GPU architecture, such as 80 (A100), 89 (RTX 40, L4) or 90a (H100). May be given again "
    "or as a list with commas. Default: those of this machine's GPUs, or 80,90a without one.",
)
@click.option(
    "--jobs",
    "-j",
    type=click.IntRange(min=1),
    metavar="N",
    help="Compilers to run at once. Default: as many as the processors and the memory allow.",
)
@click.option(
    "--prebuilt",
    "prebuilt",
    is_flag=True,
    help="Put the kernels into the package, or into the folder that the environment variable "
    f"{PREBUILT_VARIABLE} names. Models that need no others are compiled without nvcc then.",
)
@click.option("--dry-run", is_flag=True, help="List the kernels; build nothing.")
def build(
    preset: str | None,
    dtypes: Sequence[str],
    head_dims: Sequence[int],
    kv_dtypes: Sequence[str],
    archs: Sequence[str],
    jobs: int | None,
    prebuilt: bool,
    dry_run: bool,
) -> None:
    """Compile kernels ahead of time.

    Example: all that a model in bfloat16 with head dimension 128 needs on an H100:

        tvm-flashinfer build --dtype bfloat16 --head-dim 128 --arch 90a

    Kernels that were compiled before are not compiled again. What a release ships is made by

        tvm-flashinfer build --preset all --arch 80,90a --prebuilt
    """
    if preset and (dtypes or head_dims or kv_dtypes):
        raise click.UsageError("--preset names dtypes and head dimensions; give one or the other.")
    specs = _choose(preset, dtypes, head_dims, kv_dtypes, parse_archs(archs) or default_archs())
    try:
        check_supported(specs)
    except UnsupportedKernelError as error:
        raise click.UsageError(str(error)) from error
    for spec in specs:
        click.echo(spec.name)
    if dry_run:
        return
    start = time.monotonic()
    make = build_prebuilt if prebuilt else build_library
    made = guarded(lambda: make(specs, jobs, print_progress))
    seconds = time.monotonic() - start
    click.echo(f"{len(specs)} kernels ready in {seconds:.1f} s: {made}")


def _choose(
    preset: str | None,
    dtypes: Sequence[str],
    head_dims: Sequence[int],
    kv_dtypes: Sequence[str],
    archs: Sequence[str],
) -> list[KernelSpec]:
    if dtypes or head_dims or kv_dtypes:
        return attention_specs(dtypes or tuple(DTYPES), head_dims or HEAD_DIMS, archs, kv_dtypes)
    return preset_specs(preset or _DEFAULT_PRESET, archs)
