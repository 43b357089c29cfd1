"""``tvm-flashinfer support``: what of a model would run on the kernels here."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tvm_flashinfer.cli.output import (
    console,
    echo_json,
    echo_rows,
    echo_table,
    exit_statuses,
    json_option,
)
from tvm_flashinfer.kernels.build import find_objects
from tvm_flashinfer.kernels.environment import default_archs
from tvm_flashinfer.kernels.errors import KernelError
from tvm_flashinfer.kernels.prebuilt import prebuilt_dir
from tvm_flashinfer.kernels.spec import KernelSpec, parse_archs
from tvm_flashinfer.report import FALLBACK, ReportRow, printable
from tvm_flashinfer.tuning import never_measured

if TYPE_CHECKING:
    from tvm_flashinfer.relax.model_config import ModelConfig

_FALLS_BACK = 1
_CPU = "cpu"

#: What MLC LLM compiles for besides the target.
_MORE_ARCHS = "MLC_MULTI_ARCH"


@exit_statuses(
    {
        0: "every slot is native on every architecture",
        1: "the cache falls back to TVM's own kernels; the reasons are printed",
        2: "the command was used wrongly, or CONFIG cannot be read; it says which field",
    }
)
@click.command()
@click.argument("config", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--arch",
    "archs",
    multiple=True,
    metavar="ARCH",
    help="GPU architecture, such as 80 (A100), 89 (RTX 40, L4) or 90a (H100), or cpu. May be given "
    "again or as a list with commas. Default: MLC_MULTI_ARCH, else those of this machine's GPUs, "
    "or 80,90a without one.",
)
@click.option("--dtype", metavar="DTYPE", help="Dtype of the cache. Default: as CONFIG says.")
@click.option(
    "--tensor-parallel-shards",
    "shards",
    type=click.IntRange(min=1),
    metavar="N",
    help="GPUs that share the heads. Default: as CONFIG says, or 1.",
)
@json_option
def support(
    config: Path, archs: Sequence[str], dtype: str | None, shards: int | None, as_json: bool
) -> None:
    """Tell what of a model would run on the kernels here, before it is compiled.

    CONFIG is the mlc-chat-config.json that MLC LLM made for the model, or the config.json that the
    model comes with. Listed are the functions that fill each slot of its KV cache, and the CUDA
    kernels they need: those that are prebuilt or compiled already, and those that a compile of the
    model would compile.
    """
    model = read_config(config, dtype, shards)
    named = parse_archs([*archs] or os.environ.get(_MORE_ARCHS, "")) or default_archs()
    os.environ.pop(_MORE_ARCHS, None)  # each architecture is looked at by itself
    found = {arch: _Support(model, arch) for arch in named}
    if as_json:
        data = {arch: answer.to_data() for arch, answer in found.items()}
        echo_json(
            {
                "config": str(config),
                "model": _model_data(model),
                "archs": data,
                "never_measured": _never_measured(named),
            }
        )
    else:
        console().print(printable(model.summary), style="bold")
        for note in model.notes:
            console().print(f"note: {printable(note)}")
        _print(found.values())
        if note := _never_measured(named):
            console().print(f"note: {note}")
    if any(row.status == FALLBACK for answer in found.values() for row in answer.rows):
        raise SystemExit(_FALLS_BACK)


def read_config(config: Path, dtype: str | None, shards: int | None) -> ModelConfig:
    """Return what a file says of a model's cache, or end with what is wrong with it."""
    try:
        from tvm_flashinfer.relax.model_config import ModelConfigError, read_model_config
    except ModuleNotFoundError as error:
        raise click.ClickException(str(error)) from error
    try:
        return read_model_config(config, dtype, shards)
    except (ModelConfigError, OSError) as error:
        raise click.UsageError(str(error)) from error


def _never_measured(archs: Iterable[str]) -> str | None:
    """Return what there is to say of architectures that no kernel was measured on."""
    return never_measured(arch for arch in archs if arch != _CPU)


class _Support:
    """What a model is served with on one architecture."""

    def __init__(self, model: ModelConfig, arch: str) -> None:
        from tvm.target import Target

        from tvm_flashinfer.relax.slots import fallback_rows, native_rows
        from tvm_flashinfer.relax.support import kernel_specs, unsupported_reasons

        self.arch = arch
        target = Target("llvm" if arch == _CPU else {"kind": "cuda", "arch": f"sm_{arch}"})
        reasons = unsupported_reasons(model.cache, target)
        self.rows = (
            fallback_rows(reasons, target, "kv_cache")
            if reasons
            else native_rows(model.cache, target, "kv_cache")
        )
        wanted = [] if reasons or arch == _CPU else kernel_specs(model.cache, target)
        self.kernels, self.problem = _kernel_states(wanted)

    def to_data(self) -> dict[str, Any]:
        """Return what JSON can hold."""
        return {
            "native": all(row.status != FALLBACK for row in self.rows),
            "rows": [asdict(row) for row in self.rows],
            "kernels": self.kernels,
            "problem": self.problem,
        }


def _kernel_states(specs: Sequence[KernelSpec]) -> tuple[dict[str, str], str | None]:
    """Return where each kernel is, and what keeps those that are nowhere from being compiled."""
    if not specs:
        return {}, None
    try:
        ready = find_objects(specs)
    except KernelError as error:
        return {spec.name: "cannot be compiled here" for spec in specs}, str(error)
    return {spec.name: _state(ready.get(spec)) for spec in specs}, None


def _state(path: Path | None) -> str:
    if path is None:
        return "to compile"
    return "prebuilt" if path.is_relative_to(prebuilt_dir()) else "compiled"


def _model_data(model: ModelConfig) -> dict[str, Any]:
    cache = model.cache
    names = (
        "attn_kind", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
        "qk_head_dim", "v_head_dim", "rope_mode", "rope_theta", "rope_scaling", "rotary_dim",
        "dtype", "layer_sliding_window_size",
    )  # fmt: skip
    fields = {name: getattr(cache, name) for name in names}
    return {"model_type": model.model_type, "notes": model.notes, **fields}


def _print(found: Iterable[_Support]) -> None:
    """Print one table for all architectures that are served alike."""
    alike: dict[tuple[ReportRow, ...], list[_Support]] = {}
    for answer in found:
        alike.setdefault(tuple(replace(row, arch="") for row in answer.rows), []).append(answer)
    for rows, answers in alike.items():
        archs = ",".join(answer.rows[0].arch for answer in answers)
        native = sum(row.status != FALLBACK for row in rows)
        click.echo()
        click.echo(f"{archs}: {native} of {len(rows)} native")
        echo_rows(replace(row, arch=archs) for row in rows)
        kernels = [item for answer in answers for item in answer.kernels.items()]
        if kernels:
            click.echo()
            echo_table(kernels, ("CUDA kernel", "state"))
        for problem in dict.fromkeys(answer.problem for answer in answers if answer.problem):
            console().print(f"problem: {problem}", style="bold red")
