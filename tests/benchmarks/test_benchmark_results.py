"""Files of results: written after each row, checked, continued, and copied into the README."""

from __future__ import annotations

import copy
import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from benchmarks import __main__ as program
from benchmarks import readme, results, work

ROOT = Path(__file__).resolve().parents[2]
RUN = ["run", "--device", "cpu", "--repeats", "2"]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Results of two rows."""
    path = tmp_path_factory.mktemp("results") / "cpu.json"
    rows = ["--row", "tiny-append", "--row", "tiny-merge"]
    sides = ["--side", "ours", "--side", "tir", "--side", "triton"]
    assert program.main([*RUN, *rows, *sides, "--json", str(path)]) == 0
    return path


@pytest.fixture
def found(path: Path) -> dict[str, Any]:
    return results.read(path)


def test_what_is_in_a_file(found: dict[str, Any]) -> None:
    assert [row["row"] for row in found["rows"]] == ["tiny-append", "tiny-merge"]
    assert found["machine"]["device"] == "cpu"
    assert found["software"]["apache-tvm"]
    assert found["limits"]["copy_bytes_per_s"] > 0
    assert found["method"]["repeats"] == 2
    merge = found["rows"][1]
    assert merge["bytes"] == work.ROWS["tiny-merge"].bytes
    assert merge["shape"]["heads"] == [4, 2]
    assert merge["sides"]["tir"]["us"]["repeats"] == 2
    assert "Triton" in merge["sides"]["triton"]["absent"]


def test_command_of_a_row_repeats_it(path: Path, found: dict[str, Any], tmp_path: Path) -> None:
    command = shlex.split(found["rows"][1]["command"])
    assert command[:3] == ["python", "-m", "benchmarks"]
    again = tmp_path / "again.json"
    assert program.main([*command[3:], "--repeats", "2", "--json", str(again)]) == 0
    (row,) = results.read(again)["rows"]
    assert set(row["sides"]) == set(found["rows"][1]["sides"])
    assert row["command"] == found["rows"][1]["command"]
    assert "--json" not in results.read(again)["command"]


def test_one_row_alone_keeps_the_others(path: Path, found: dict[str, Any], tmp_path: Path) -> None:
    mine = tmp_path / "mine.json"
    mine.write_text(path.read_text(encoding="utf-8"), encoding="utf-8")
    row = ["--row", "tiny-merge", "--side", "ours"]
    assert program.main([*RUN, *row, "--json", str(mine), "--update"]) == 0
    after = results.read(mine)["rows"]
    assert after[0] == found["rows"][0]
    assert set(after[1]["sides"]) == {"ours"}


def test_rows_of_another_machine_are_not_kept(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    other = json.loads(path.read_text(encoding="utf-8"))
    other["machine"]["name"] = "another"
    mine = tmp_path / "mine.json"
    mine.write_text(json.dumps(other), encoding="utf-8")
    with pytest.raises(SystemExit, match="2"):
        program.main([*RUN, "--row", "tiny-merge", "--json", str(mine), "--update"])
    assert "another machine (name differ)" in capsys.readouterr().err


def test_cut_run_keeps_its_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import cases

    make = cases.make_case

    def cut(row: Any, machine: Any) -> Any:
        if row.name == "tiny-merge":
            raise KeyboardInterrupt
        return make(row, machine)

    monkeypatch.setattr(cases, "make_case", cut)
    mine = tmp_path / "cut.json"
    rows = ["--row", "tiny-append", "--row", "tiny-merge", "--side", "ours"]
    with pytest.raises(KeyboardInterrupt):
        program.main([*RUN, *rows, "--json", str(mine)])
    assert [row["row"] for row in results.read(mine)["rows"]] == ["tiny-append"]


def test_no_row_after_the_seconds(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    mine = tmp_path / "none.json"
    assert program.main([*RUN, "--set", "tiny", "--seconds", "1e-9", "--json", str(mine)]) == 1
    assert "not timed, since --seconds were over: tiny-decode" in capsys.readouterr().out


def test_refused_side_is_an_exit_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    from benchmarks.cases import Attention

    right = Attention.expect
    monkeypatch.setattr(Attention, "expect", lambda self, i: right(self, i) + 1)
    mine = tmp_path / "refused.json"
    row = ["--row", "tiny-decode", "--side", "ours"]
    assert program.main([*RUN, *row, "--json", str(mine)]) == 1
    assert "REFUSED: wrong output" in capsys.readouterr().out
    assert "refused" in results.read(mine)["rows"][0]["sides"]["ours"]


def _without(found: dict[str, Any], *place: Any) -> dict[str, Any]:
    found = copy.deepcopy(found)
    part = found
    for key in place[:-1]:
        part = part[key]
    del part[place[-1]]
    return found


@pytest.mark.parametrize(
    "place",
    [
        ("limits",),
        ("rows", 0, "command"),
        ("rows", 0, "sides", "ours", "largest_error"),
        ("rows", 0, "sides", "ours", "us", "quartile_range"),
    ],
)
def test_files_that_lack_something(found: dict[str, Any], place: tuple[Any, ...]) -> None:
    with pytest.raises(ValueError, match=f"lacks? .*{place[-1]}"):
        results.check(_without(found, *place))


def test_files_that_are_wrong(found: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="schema 0, expected 1"):
        results.check({**found, "schema": 0})
    spoiled = copy.deepcopy(found)
    spoiled["rows"][0]["sides"]["ours"]["us"]["median"] = -1.0
    with pytest.raises(ValueError, match="no summary of times"):
        results.check(spoiled)
    spoiled["rows"][0]["sides"]["ours"] = {"refused": "stale", "us": {"median": 1.0}}
    with pytest.raises(ValueError, match="has no figures, and more than the reason"):
        results.check(spoiled)


def test_unknown_names(capsys: pytest.CaptureFixture) -> None:
    for arguments in (["--row", "nothing"], ["--row", "tiny-merge", "--side", "cutlass"]):
        with pytest.raises(SystemExit, match="2"):
            program.main([*RUN, *arguments])
    assert "no side 'cutlass'; there are ours" in capsys.readouterr().err


def test_readme_has_rows_where_ours_loses(path: Path, tmp_path: Path) -> None:
    found = results.read(path)
    for row in found["rows"]:
        row["sides"]["ours"]["us"] |= {"min": 20.0, "median": 20.0, "max": 20.0}
        row["sides"]["tir"]["us"] |= {"min": 15.0, "median": 15.0, "max": 15.0}
    results.write(tmp_path / "made.json", found)
    text = tmp_path / "README.md"
    text.write_text(f"before\n{readme.BEGIN}\nold\n{readme.END}\nafter\n", encoding="utf-8")
    assert program.main(["readme", str(tmp_path / "made.json"), "--readme", str(text)]) == 0
    written = text.read_text(encoding="utf-8")
    assert written.startswith("before\n")
    assert written.endswith("after\n")
    assert "old" not in written
    assert "[made.json](made.json)" in written
    (line,) = (line for line in written.splitlines() if line.startswith("| `tiny-merge`"))
    assert [cell.strip() for cell in line.strip("|").split("|")][1:3] == ["20.0", "15.0"]
    assert line.endswith("| 0.75 |")
    assert "Not timed: triton: the benchmark's Triton kernels serve ragged prompts" in written


@pytest.mark.parametrize("text", ["", "{begin}", "{end}{begin}", "{begin}{begin}{end}"])
def test_readme_needs_its_markers(text: str, path: Path, tmp_path: Path) -> None:
    file = tmp_path / "README.md"
    file.write_text(text.format(begin=readme.BEGIN, end=readme.END), encoding="utf-8")
    with pytest.raises(ValueError, match="needs the lines"):
        readme.write_tables(file, [path])


def test_pictures(path: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason='pip install "tvm-flashinfer[bench]"')
    texts = []
    for folder in (tmp_path / "one", tmp_path / "two"):
        assert program.main(["plot", str(path), "--folder", str(folder)]) == 0
        texts.append([x.read_text(encoding="utf-8") for x in sorted(folder.glob("*.svg"))])
    assert len(texts[0]) == 2
    assert all("<svg" in text for text in texts[0])
    assert texts[0] == texts[1]


def test_list(capsys: pytest.CaptureFixture) -> None:
    assert program.main(["list", "--row", "decode-B64-L4096"]) == 0
    assert "1074.8 MB" in capsys.readouterr().out
