"""The rows: which there are, what they move and compute, and how they are chosen."""

from __future__ import annotations

import pytest

from benchmarks import work
from benchmarks.measure import summary
from benchmarks.results import limit_seconds


def test_names_are_unique() -> None:
    sets = (work.HEADLINE, work.OTHER, work.MODELS, work.PARTS, work.TINY)
    names = [row.name for rows in sets for row in rows]
    assert len(names) == len(set(names)) == len(work.ROWS)


@pytest.mark.parametrize(
    "name",
    [
        "decode-B1-L4096", "decode-B1-L32768", "decode-B16-L4096", "decode-B64-L4096",
        "decode-B128-L2048", "decode-B64-L16384", "decode-B64-L1024-H32/32",
        "decode-B64-L8192-H32/4", "decode-B16-L8192-H64/8", "ragged-B16-S1024", "ragged-B4-S4096",
        "ragged-B1-S16384", "paged-B1-S16384", "ragged-B1-S16384-H32/32-d64",
        "ragged-B1-S16384-H8/8-d256", "paged-B8-Q512-L8192", "mla-decode-h128-B128-L4096",
        "rotary-5000", "append-5000", "merge-8192", "copy_page-1", "host-plan-B64", "host-run-B64",
    ],
)  # fmt: skip
def test_work_list(name: str) -> None:
    assert name in work.ROWS


def test_bytes_and_operations() -> None:
    """Decode of 64 requests of 4096 keys takes 253 us at 4.25 TB/s."""
    row = work.ROWS["decode-B64-L4096"]
    limits = {"copy_bytes_per_s": 4.25e12, "flops_per_s": 800e12}
    seconds, kind = limit_seconds(row, limits)
    assert kind == "bytes"
    assert seconds == pytest.approx(253e-6, rel=5e-3)
    assert row.flops == 4 * 64 * 4096 * 32 * 128
    prompt = work.ROWS["ragged-B4-S4096"]
    assert prompt.flops == 4 * 4096 * 4096 * 32 * 256
    assert limit_seconds(prompt, limits)[1] == "flops"
    part = work.ROWS["paged-B8-Q512-L8192"]
    assert part.flops == 8 * (2 * 8192 - 512) * 512 * 32 * 256
    latent = work.ROWS["mla-decode-h128-B128-L4096"]
    assert latent.flops == 2 * 128 * 4096 * 128 * (576 + 512)
    assert work.ROWS["copy_page-1"].bytes == 2 * 16 * 2 * 8 * 128 * 2
    assert limit_seconds(work.ROWS["host-run-B1"], limits) == (0.0, "host")


def test_select() -> None:
    assert work.select() == work.HEADLINE
    assert work.select([], "tiny") == work.TINY
    assert [row.name for row in work.select(["merge-64"])] == ["merge-64"]
    both = work.select(["decode-B1-*", "decode-B1-L4096"])
    assert [row.name for row in both].count("decode-B1-L4096") == 1
    assert {"decode-B1-L32768", "decode-B1-L2048-H9/3-d64"} <= {row.name for row in both}


def test_unknown_rows_and_sets() -> None:
    with pytest.raises(ValueError, match="no row 'decode-B3'"):
        work.select(["decode-B3"])
    with pytest.raises(ValueError, match="no set of rows 'big'"):
        work.select([], "big")


def test_summary() -> None:
    found = summary([3e-6, 1e-6, 2e-6, 100e-6])
    assert found["median"] == pytest.approx(2.5)
    assert (found["min"], found["max"], found["repeats"]) == (
        pytest.approx(1), pytest.approx(100), 4,
    )  # fmt: skip
    assert found["quartile_range"] == pytest.approx(74.5)
    assert summary([5e-6])["quartile_range"] == 0
    with pytest.raises(ValueError, match="no times"):
        summary([])
