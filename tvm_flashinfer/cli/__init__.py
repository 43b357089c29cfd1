"""The command line, ``tvm-flashinfer``: one file for each command."""

from __future__ import annotations

import click

from tvm_flashinfer.cli.build import build
from tvm_flashinfer.cli.cache import cache
from tvm_flashinfer.cli.doctor import doctor
from tvm_flashinfer.cli.output import guarded
from tvm_flashinfer.cli.report import report
from tvm_flashinfer.cli.support import support
from tvm_flashinfer.cli.tune import tune_command
from tvm_flashinfer.kernels.paths import cmake_dir

__all__ = ["main"]


def _print_cmake_dir(context: click.Context, option: click.Parameter, wanted: bool) -> None:
    if wanted and not context.resilient_parsing:
        click.echo(guarded(cmake_dir))
        context.exit()


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.option(
    "--cmake-dir",
    is_flag=True,
    expose_value=False,
    is_eager=True,
    callback=_print_cmake_dir,
    help="Print the folder for find_package(tvm_flashinfer) of CMake.",
)
def main() -> None:
    """FlashInfer's attention kernels for TVM and MLC LLM.

    Start with `doctor`, which tells what this machine has and lacks. `support` tells what of a
    model would run on the kernels here, before it is compiled, and `report` what a compiled model
    runs on. Kernels are compiled when they are first needed, which takes from ten seconds to a
    minute each; `build` does that beforehand, and `cache` shows and removes what was compiled.
    `tune` measures which kernels are fastest for a model on the GPU of this machine.

    Every command ends with status 0 when all is well, and with 2 when it was used wrongly. What
    other statuses mean is in the help of the commands: tvm-flashinfer COMMAND --help.
    """


for _command in (doctor, support, report, build, cache, tune_command):
    main.add_command(_command)
