"""What a compile ended in, as data: the rows, their JSON, and finding it in a library's file.

Nothing here needs TVM itself, so a report can be read where only the file is.
"""

from __future__ import annotations

import json
import mmap
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import tvm_ffi

NATIVE = "native"
FALLBACK = "fallback"

#: The first key of a report in JSON. A library holds the text as it is, so that it is found by it.
FORMAT = "tvm_flashinfer report 1"
_BEGIN = b'{"format": "' + FORMAT.encode() + b'"'

#: A longer report is none: a model has some dozens of rows, of a few hundred characters each.
_MAX_BYTES = 4 << 20

#: A library has one; several that were linked together have as many.
_MAX_REPORTS = 64

#: How files begin that may hold compiled models: ELF, archives, Mach-O, WebAssembly, Windows.
_MAGIC = (b"\x7fELF", b"!<arch>\n", b"\xcf\xfa\xed\xfe", b"\xca\xfe\xba\xbe", b"\0asm", b"MZ")
_TAR_MAGIC = (257, b"ustar")


class ReportError(ValueError):
    """A file is no library, or has no report that can be read."""


@dataclass(frozen=True)
class ReportRow:
    """One attention site or KV-cache slot.

    Parameters
    ----------
    site : str
        Function of the model in which it is.
    slot : str
        What is computed there, such as ``"prefill_paged"``.
    status : str
        `NATIVE`: one of our kernels. `FALLBACK`: TVM's own.
    kernel : str
        Name of the function that is called.
    arch : str
        Architectures it is compiled for, such as ``"sm_80,sm_90a"``, or ``"cpu"``.
    reasons : tuple of str
        Why it is a fallback; for a native one, what there is to know about it.
    """

    site: str
    slot: str
    status: str
    kernel: str
    arch: str
    reasons: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "reasons", tuple(self.reasons))
        if self.status not in (NATIVE, FALLBACK):
            raise ValueError(f"status is {self.status!r}, expected {NATIVE!r} or {FALLBACK!r}")


@dataclass
class CompileReport:
    """The rows of a compile.

    Parameters
    ----------
    target : str
        Kind of target that the model was compiled for.
    ship : str
        Where the kernels are: ``"self-contained"`` in the model's library, ``"shared"`` in ours.
    rows : list of ReportRow
    tuning : str
        The file of tuning that the library carries, by its GPU; empty without one.
    """

    target: str
    ship: str
    rows: list[ReportRow] = field(default_factory=list)
    tuning: str = ""

    @property
    def fallbacks(self) -> list[ReportRow]:
        """The rows that no kernel of ours serves."""
        return [row for row in self.rows if row.status == FALLBACK]

    def extended(self, rows: Iterable[ReportRow], tuning: str = "") -> CompileReport:
        """Return the report with more rows; a row for the same site and slot is replaced."""
        merged = {(row.site, row.slot): row for row in [*self.rows, *rows]}
        return CompileReport(self.target, self.ship, list(merged.values()), tuning or self.tuning)

    def to_json(self) -> str:
        """Return the report as JSON, which `from_json` reads."""
        return json.dumps({"format": FORMAT, **asdict(self)})

    @classmethod
    def from_json(cls, text: str) -> CompileReport:
        """Return the report that `to_json` wrote.

        Raises
        ------
        ValueError
            When the text is not such a report.
        """
        try:
            return cls._from_data(json.loads(text))
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise ValueError(
                f"got {text[:80]!r}, expected the JSON of a report: {type(error).__name__} {error}"
            ) from error

    @classmethod
    def _from_data(cls, data: Mapping[str, Any]) -> CompileReport:
        rows = [ReportRow(**row) for row in data["rows"]]
        tuning = data.get("tuning", "")
        texts = [data["target"], data["ship"], tuning]
        for row in rows:
            texts += [row.site, row.slot, row.kernel, row.arch, *row.reasons]
        for text in texts:
            if not isinstance(text, str):
                raise TypeError(f"expected text, got {text!r}")
        return cls(data["target"], data["ship"], rows, tuning)

    @property
    def summary(self) -> str:
        """How many rows are native, and where the kernels are."""
        native = len(self.rows) - len(self.fallbacks)
        tuned = f", tuned for {self.tuning}" if self.tuning else ""
        return printable(f"{native} of {len(self.rows)} native ({self.target}, {self.ship}{tuned})")

    def __str__(self) -> str:
        lines = [self.summary]
        columns = zip(*self._cells(), strict=True)
        widths = [max(len(cell) for cell in column) for column in columns]
        for row, cells in zip(self.rows, self._cells(), strict=True):
            line = "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
            lines += [f"  {line.rstrip()}", *(f"      {reason}" for reason in row.reasons)]
        return printable("\n".join(lines))

    def _cells(self) -> list[tuple[str, ...]]:
        return [(row.site, row.slot, row.status, row.kernel, row.arch) for row in self.rows]


def printable(text: str) -> str:
    """Return a text whose control characters, but for line ends, are spelt out."""
    return "".join(
        char if char.isprintable() or char == "\n" else ascii(char)[1:-1] for char in text
    )


def report_of_file(path: str | Path) -> CompileReport:
    """Return the report that lies in the file of a compiled model.

    The file is searched for the text of the report. It is not loaded, so nothing of it runs, and a
    library for another machine or with functions that this process lacks can be asked too.

    Parameters
    ----------
    path : str or Path
        What ``export_library`` wrote.

    Raises
    ------
    ReportError
        The file is no library, or holds no report.
    OSError
        It cannot be read.
    """
    with open(path, "rb") as file:
        head = file.read(512)
        start, magic = _TAR_MAGIC
        if not head.startswith(_MAGIC) and head[start : start + len(magic)] != magic:
            raise ReportError(
                f"{path} is no library: it begins with {head[:8]!r}. Give the file that MLC LLM "
                "or export_library wrote, such as model.so"
            )
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            reports = list(_reports(content))
    if not reports:
        raise ReportError(
            f"{path} holds no report: the model was not compiled through tvm_flashinfer, or by a "
            "version before 0.1.0. Its attention is TVM's own"
        )
    report, *others = reports
    for other in others:
        report = report.extended(other.rows, other.tuning)
    return report


def requirement_of_file(path: str | Path) -> str | None:
    """Return the command that installs what a library needs, or None when it needs nothing.

    Parameters
    ----------
    path : str or Path
        What `report_of_file` takes.
    """
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        found = re.search(rb"pip install 'tvm-flashinfer>=[0-9.]{1,32}'", content)
        return found[0].decode() if found else None


def is_satisfied(requirement: str) -> bool:
    """Return whether this process can load libraries that need what a command installs."""
    name = f"ffi.Module.load_from_bytes.{requirement}"
    return tvm_ffi.get_global_func(name, allow_missing=True) is not None


def _reports(content: mmap.mmap) -> Iterator[CompileReport]:
    """Yield the reports that begin somewhere in a file and can be read to their end."""
    decoder = json.JSONDecoder()
    for match in islice(re.finditer(re.escape(_BEGIN), content), _MAX_REPORTS):
        text = content[match.start() : match.start() + _MAX_BYTES].decode("latin-1")
        try:
            yield CompileReport._from_data(decoder.raw_decode(text)[0])
        except (KeyError, TypeError, ValueError, RecursionError):
            continue  # such as this module's own text, in an archive of everything
