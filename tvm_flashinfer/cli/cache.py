"""``tvm-flashinfer cache``: what was compiled is shown and removed."""

from __future__ import annotations

from dataclasses import asdict

import click

from tvm_flashinfer.cli.output import echo_json, echo_table, guarded, json_option
from tvm_flashinfer.kernels.build import print_progress
from tvm_flashinfer.kernels.cache import CACHE_VARIABLE, KernelCache
from tvm_flashinfer.kernels.prebuilt import find_prebuilt

_DAYS = 30.0


@click.group()
def cache() -> None:
    """Show and remove compiled kernels.

    Exit status 1 of its commands: the folder of kernels cannot be used.
    """


@cache.command("dir")
def cache_dir() -> None:
    """Print the folder of compiled kernels."""
    click.echo(guarded(lambda: KernelCache().root))


cache_dir.help = f"{cache_dir.help} The environment variable {CACHE_VARIABLE} changes it."


@cache.command("list")
@json_option
def cache_list(as_json: bool) -> None:
    """List compiled kernels, libraries and model objects, with their sizes.

    In JSON sizes are bytes, and `used` is when a file was last asked for, in seconds since 1970.
    """
    entries = guarded(lambda: KernelCache().entries())
    if as_json:
        echo_json([{**asdict(entry), "path": str(entry.path)} for entry in entries])
        return
    if entries:
        echo_table([(f"{e.size / 1e6:8.2f} MB", e.name, str(e.path)) for e in entries])
    total = sum(entry.size for entry in entries)
    click.echo(f"{total / 1e6:8.2f} MB in {len(entries)} files")
    prebuilt, _ = guarded(find_prebuilt)
    if prebuilt:
        kernels = f"{len(prebuilt.kernels)} prebuilt kernels"
        click.echo(f"{prebuilt.size / 1e6:8.2f} MB of {kernels} in {prebuilt.root}, never pruned")


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
    count, size = guarded(lambda: KernelCache().prune(0 if everything else days, print_progress))
    click.echo(f"removed {count} files, {size / 1e6:.2f} MB")
