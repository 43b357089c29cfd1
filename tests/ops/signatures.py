"""The packed functions and their parameters, as the sources of the library list them."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import NamedTuple

_ROOT = Path(__file__).parents[2]


class Signature(NamedTuple):
    """What a function returns, and the names of its parameters."""

    returns: str
    parameters: tuple[str, ...]


@functools.cache
def signatures() -> dict[str, Signature]:
    """Every function of the library by its name without `flashinfer.`."""
    listed = (_ROOT / "include/tvm_flashinfer/function_list.h").read_text()
    names = re.findall(r"X\(([\w.]+), (\w+)\)", listed)
    declared = {}
    for header in ("ops.h", "call_counts.h"):
        text = re.sub(r"//.*|/\*.*?\*/", "", (_ROOT / "csrc/ops" / header).read_text())
        for returns, name, arguments in re.findall(r"([\w:<>, ]+?) (\w+)\(([^()]*)\);", text):
            words = [part.split()[-1] for part in arguments.split(",") if part.strip()]
            declared[name] = Signature(returns.strip(), tuple(words))
    return {name: declared[function] for name, function in names if name != "name"}
