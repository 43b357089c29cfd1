"""The command line, ``tvm-flashinfer``."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from typing import Any

import click

from tvm_flashinfer.kernels.build import build_library, print_progress
from tvm_flashinfer.kernels.cache import CACHE_VARIABLE, KernelCache
from tvm_flashinfer.kernels.environment import default_archs, environment
from tvm_flashinfer.kernels.errors import KernelError, UnsupportedKernelError
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
_DAYS = 30.0


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
def main() -> None:
    """FlashInfer's CUDA kernels for TVM.

    Kernels are compiled when they are first needed, which takes from ten seconds to a minute each.
    `build` does that beforehand, `cache` shows and removes what was compiled, and `doctor` tells
    what this machine has and lacks.
    """


@main.command()
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
@click.option("--dry-run", is_flag=True, help="List the kernels; build nothing.")
def build(
    preset: str | None,
    dtypes: Sequence[str],
    head_dims: Sequence[int],
    kv_dtypes: Sequence[str],
    archs: Sequence[str],
    jobs: int | None,
    dry_run: bool,
) -> None:
    """Compile kernels ahead of time.

    Example: all that a model in bfloat16 with head dimension 128 needs on an H100:

        tvm-flashinfer build --dtype bfloat16 --head-dim 128 --arch 90a

    Kernels that were compiled before are not compiled again.
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
    library = _guarded(lambda: build_library(specs, jobs, print_progress))
    seconds = time.monotonic() - start
    click.echo(f"{len(specs)} kernels ready in {seconds:.1f} s: {library}")


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


@main.group()
def cache() -> None:
    """Show and remove compiled kernels."""


@cache.command("dir")
def cache_dir() -> None:
    """Print the folder of compiled kernels."""
    click.echo(_guarded(lambda: KernelCache().root))


cache_dir.help = f"{cache_dir.help} The environment variable {CACHE_VARIABLE} changes it."


@cache.command("list")
def cache_list() -> None:
    """List compiled kernels, libraries and model objects, with their sizes."""
    entries = _guarded(lambda: KernelCache().entries())
    for entry in entries:
        click.echo(f"{entry.size / 1e6:8.2f} MB  {entry.name:<45}  {entry.path}")
    total = sum(entry.size for entry in entries)
    click.echo(f"{total / 1e6:8.2f} MB  in {len(entries)} files")


@cache.command("prune")
@click.option(
    "--older-than",
    "days",
    type=click.FloatRange(min=0),
    default=_DAYS,
    show_default=True,
    metavar="DAYS",
    help="Remove what was not used for that many days.",
)
@click.option("--all", "everything", is_flag=True, help="Remove everything.")
def cache_prune(days: float, everything: bool) -> None:
    """Remove compiled kernels that were not used for some time.

    They are compiled again when they are needed. The headers of FlashInfer are kept.
    """
    count, size = _guarded(lambda: KernelCache().prune(0 if everything else days, print_progress))
    click.echo(f"removed {count} files, {size / 1e6:.2f} MB")


@main.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def doctor(as_json: bool) -> None:
    """Tell what this machine has for building and running kernels.

    It also makes a small KV cache and compares how the installed TVM calls the functions of it with
    what those here take. Paste the output into bug reports. The exit status is 1 when TVM calls
    otherwise, and 0 else, even when something is missing.
    """
    found = environment()
    contract = found["tvm_contract"]
    if as_json:
        click.echo(json.dumps(found, indent=2))
    else:
        _print_environment(found)
    if contract is not None and not contract["fits"]:
        raise SystemExit(1)


def _print_environment(found: dict[str, Any]) -> None:
    contract = found["tvm_contract"]
    for name, value in found.items():
        if name not in ("problems", "tvm_contract"):
            click.echo(f"{name.replace('_', ' '):<20} {_describe(value)}")
    if contract is not None and contract["fits"]:
        click.echo("TVM's KV cache calls the functions here as they take it")
    for difference in contract["differences"] if contract is not None else ():
        click.echo(f"problem: TVM's KV cache calls the functions here otherwise: {difference}")
    for problem in found["problems"]:
        click.echo(f"problem: {problem}")
    if not found["problems"]:
        click.echo("kernels can be built on this machine")


def _describe(value: Any) -> str:
    if value is None:
        return "not found"
    if isinstance(value, dict):
        return ", ".join(f"{key} {_describe(part)}" for key, part in value.items())
    if isinstance(value, list):
        return "; ".join(_describe(part) for part in value) if value else "none"
    return str(value)


def _guarded(call: Callable[[], Any]) -> Any:
    """Return what `call` returns, or end with its message and exit status 1."""
    try:
        return call()
    except KernelError as error:
        raise click.ClickException(str(error)) from error
