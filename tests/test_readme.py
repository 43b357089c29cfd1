"""What the README and the other documents say is so: code runs, tables and links are right."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
DOCUMENTS = [README, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("**/*.md"))]

_PYTHON_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_COMMAND = re.compile(r"^    (tvm-flashinfer [^#\n]+)", re.MULTILINE)
_VARIABLE = re.compile(r"TVM_FLASHINFER_[A-Z_]+")


def _python_blocks(document: Path) -> list[str]:
    return _PYTHON_BLOCK.findall(document.read_text(encoding="utf-8"))


def _run(command: list[str], folder: Path = ROOT) -> str:
    """Run a command as a user in the checkout does, and return what it prints."""
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def _row_of(line: str) -> list[str]:
    return [cell.strip().strip("`") for cell in line.strip("|").split("|")]


@pytest.mark.parametrize("document", ["README.md", "docs/support.md"])
def test_support_table_is_that_of_the_code(document: str) -> None:
    from tvm_flashinfer.relax.support_table import BEGIN, END, support_table

    text = (ROOT / document).read_text(encoding="utf-8")
    written = text.partition(BEGIN + "\n")[2].partition("\n" + END)[0]
    assert written == support_table(), (
        f"the tables are out of date; run python -m tvm_flashinfer.relax.support_table {document}"
    )


def test_support_table_is_written_between_the_markers(tmp_path: Path) -> None:
    from tvm_flashinfer.relax.support_table import BEGIN, END, support_table, write_table

    path = tmp_path / "text.md"
    path.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n", encoding="utf-8")
    assert write_table(path)
    assert path.read_text(encoding="utf-8") == f"before\n{BEGIN}\n{support_table()}\n{END}\nafter\n"
    assert not write_table(path)


@pytest.mark.parametrize("order", ["", "{begin}", "{end}{begin}", "{begin}{begin}{end}"])
def test_support_table_needs_the_markers(order: str, tmp_path: Path) -> None:
    from tvm_flashinfer.relax.support_table import BEGIN, END, write_table

    path = tmp_path / "text.md"
    text = order.format(begin=BEGIN, end=END)
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match="support table"):
        write_table(path)
    assert path.read_text(encoding="utf-8") == text


def test_readme_has_an_example_of_each_use() -> None:
    code = "\n".join(_python_blocks(README))
    for name in (
        "flashinfer.batch_decode_run",
        "DispatchKVCacheCreation",
        "FlashInferPagedKVCache",
    ):
        assert name in code


@pytest.mark.parametrize(
    "document", [path for path in DOCUMENTS if _python_blocks(path)], ids=lambda path: path.name
)
def test_python_blocks_run(document: Path, tmp_path: Path) -> None:
    """In order and in one namespace: later blocks use names of earlier ones."""
    import tvm

    if not hasattr(tvm.ir, "StringImm"):
        pytest.skip("the model of examples/llama needs apache-tvm 0.27")
    script = tmp_path / "blocks.py"
    script.write_text("\n".join(_python_blocks(document)), encoding="utf-8")
    _run([sys.executable, "-W", "error::UserWarning", str(script)], tmp_path)


def test_decode_example_is_right() -> None:
    """Its output is attention over the keys of each request."""
    import numpy as np

    names: dict = {}
    exec(compile(_python_blocks(README)[0], str(README), "exec"), names)
    pages, dim = names["pages"].astype(np.float64), names["dim"]
    group = names["heads"] // names["kv_heads"]
    for request, (first, last) in enumerate(((0, 3), (3, 5))):
        used = pages[names["indices"][first:last]]
        length = (last - first - 1) * names["page_size"] + names["last_page_len"][request]
        keys, values = (
            np.concatenate(list(used[:, part]), axis=1)[:, :length].repeat(group, axis=0)
            for part in range(2)
        )
        scores = np.einsum("hd,hmd->hm", names["q"][request], keys) * dim**-0.5
        weights = np.exp(scores)
        expected = np.einsum("hm,hmd->hd", weights / weights.sum(-1, keepdims=True), values)
        np.testing.assert_allclose(names["out"][request], expected, atol=1e-5)
        np.testing.assert_allclose(names["lse"][request], np.log2(weights.sum(-1)), atol=1e-5)


def _commands() -> list[str]:
    found = (_COMMAND.findall(document.read_text(encoding="utf-8")) for document in DOCUMENTS)
    return list(dict.fromkeys(command.strip() for commands in found for command in commands))


def test_readme_names_commands() -> None:
    assert {"doctor", "support", "report", "build"} <= {
        shlex.split(command)[1] for command in _commands()
    }


#: What commands of the documents read: the files of a small model.
CONFIG = {
    "model_type": "llama", "hidden_size": 512, "num_attention_heads": 8, "num_hidden_layers": 2,
    "num_key_value_heads": 2, "torch_dtype": "float16",
}  # fmt: skip


@pytest.mark.parametrize("command", ["tvm-flashinfer --help", *_commands()])
def test_commands_of_the_documents_run(command: str, tmp_path: Path) -> None:
    """Through ``python -m``, so that the checkout is what runs. Builds and tuning only list."""
    from tvm_flashinfer.report import CompileReport

    for name in ("config.json", "mlc-chat-config.json"):
        (tmp_path / name).write_text(json.dumps(CONFIG))
    report = CompileReport("cuda", "self-contained").to_json()
    (tmp_path / "model.so").write_bytes(b"\x7fELF" + report.encode())
    arguments = shlex.split(command)[1:]
    if arguments[0] in ("build", "tune"):
        arguments.append("--dry-run")
    assert _run([sys.executable, "-m", "tvm_flashinfer", *arguments], tmp_path)


def test_installed_command_is_the_command_line() -> None:
    """An installed ``tvm-flashinfer`` starts what ``python -m tvm_flashinfer`` does."""
    try:
        points = importlib.metadata.distribution("tvm-flashinfer").entry_points
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("tvm-flashinfer runs from the checkout; it is not installed")
    (point,) = (p for p in points if p.group == "console_scripts" and p.name == "tvm-flashinfer")
    assert point.value == "tvm_flashinfer.cli:main"
    script = Path(sys.executable).with_name("tvm-flashinfer")
    assert "doctor" in _run([str(script), "--help"])


def test_make_targets_and_their_variables_exist() -> None:
    text = README.read_text(encoding="utf-8")
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"(?:^    |`)make ([a-z0-9-]+)", text, re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    (options,) = re.findall(r"\(`make demo [^)]*\)", text)
    for name in re.findall(r"\b[A-Z_]{5,}\b", options):
        assert re.search(rf"^{name} \?=", makefile, re.MULTILINE), name


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_relative_links_exist(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    relative = [link for link in _LINK.findall(prose) if not re.match(r"[a-z]+:|#", link)]
    missing = [link for link in relative if not (document.parent / link.split("#")[0]).exists()]
    assert not missing, f"{document.name} links to {missing}, which do not exist"


def test_paths_named_in_the_readme_exist() -> None:
    for command in re.findall(r"python ([\w/]+\.py)", README.read_text(encoding="utf-8")):
        assert (ROOT / command).is_file()


def test_figures_are_those_of_the_results(tmp_path: Path) -> None:
    """The tables between the markers are what the command writes from the recorded files."""
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))
    from benchmarks.readme import recorded, write_tables

    shutil.copytree(ROOT / "benchmarks/results", tmp_path / "benchmarks/results")
    copy = tmp_path / "README.md"
    copy.write_text(README.read_text(encoding="utf-8"), encoding="utf-8")
    write_tables(copy)
    assert copy.read_text(encoding="utf-8") == README.read_text(encoding="utf-8"), (
        "the tables are not those of benchmarks/results; run python -m benchmarks readme"
    )
    for path in recorded(ROOT / "benchmarks/results"):
        assert f"]({path.relative_to(ROOT)})" in README.read_text(encoding="utf-8")


def test_older_figures_are_the_measured_ones() -> None:
    path = ROOT / "benchmarks/results/h200_mla.json"
    results = json.loads(path.read_text(encoding="utf-8"))
    text = README.read_text(encoding="utf-8")
    for key in ("gpu", "driver", "cuda", "tvm"):
        assert results[key] in text
    rows = [
        [
            row["row"],
            f"{row['ours_us']:.1f}",
            f"{row['tir_us']:.1f}",
            f"{row['tir_us'] / row['ours_us']:.1f}",
            row["rate"],
        ]
        for row in results["rows"]
    ]
    names = {row[0] for row in rows}
    older = text.partition("<!-- measured figures: end -->")[2]
    lines = [_row_of(line) for line in older.splitlines() if line.startswith("| `")]
    assert [line for line in lines if line[0] in names] == rows


def _variables_of_the_code() -> set[str]:
    from tvm_flashinfer.kernels.spec import KernelSpec

    definitions = set(KernelSpec("batch_decode", "float16", 128).definitions)
    names: set[str] = set()
    for path in (ROOT / "tvm_flashinfer").rglob("*.py"):
        names |= set(re.findall(rf'"({_VARIABLE.pattern})"', path.read_text(encoding="utf-8")))
    for path in (*(ROOT / "csrc").rglob("*.cc"), *(ROOT / "csrc").rglob("*.h")):
        read = rf'(?:getenv|Environment)\("({_VARIABLE.pattern})"\)'
        names |= set(re.findall(read, path.read_text(encoding="utf-8")))
    return names - definitions


def test_environment_variables_are_those_of_the_code() -> None:
    rows = [line for line in README.read_text(encoding="utf-8").splitlines() if line[:3] == "| `"]
    named = {name for line in rows for name in _VARIABLE.findall(_row_of(line)[0])}
    assert named == _variables_of_the_code()
