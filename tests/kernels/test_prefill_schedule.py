"""The schedule of prefill on Hopper, and the choice between it and FA2, without a GPU."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from tvm_flashinfer.kernels.paths import csrc_dir
from tvm_flashinfer.kernels.toolchain import find_cxx

NUM_SM = 132


class Schedule(NamedTuple):
    """What the program prints: works are block, head, request, tile, rows and keys of it."""

    prefers_hopper: bool
    prefers_copy: bool
    num_groups: int
    works: list[tuple[int, ...]]


Run = Callable[..., Schedule]


@pytest.fixture(scope="module")
def schedule(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Schedules batches of (rows, keys)."""
    found = find_cxx()
    if found is None:
        pytest.skip("there is no C++ compiler to compile the schedule with")
    program = tmp_path_factory.mktemp("schedule") / "prefill_schedule"
    source = Path(__file__).with_name("prefill_schedule.cc")
    command = [found[0], "-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", f"-I{csrc_dir()}"]
    subprocess.run([*map(str, command), str(source), "-o", str(program)], check=True)

    def run(
        batch: Sequence[tuple[int, int]],
        heads: tuple[int, int] = (32, 8),
        head_dim: int = 128,
        causal: bool = True,
        window_left: int = -1,
        num_sm: int = NUM_SM,
    ) -> Schedule:
        numbers = [num_sm, *heads, head_dim, int(causal), window_left, len(batch)]
        numbers += [number for request in batch for number in request]
        text = " ".join(map(str, numbers))
        done = subprocess.run([program], input=text, capture_output=True, text=True, check=True)
        first, *lines = done.stdout.splitlines()
        prefers, copies, num_groups = map(int, first.split())
        return Schedule(
            bool(prefers), bool(copies), num_groups, [tuple(map(int, x.split())) for x in lines]
        )

    return run


@pytest.mark.parametrize("heads", [(32, 8), (9, 3), (71, 1), (1, 1)], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_every_tile_of_every_head_has_one_work(schedule, heads, head_dim):
    batch = [(300, 300), (0, 50), (1, 4000), (7, 0), (128, 130), (193, 64)]
    found = schedule(batch, heads, head_dim)
    rows_of_tile = 192 if head_dim == 64 else 128
    starts = np.cumsum([0, *(rows for rows, _ in batch)])
    pages = np.cumsum([0, *(keys for _, keys in batch)])
    expected = sorted(
        (head, b, tile, starts[b], rows, pages[b], keys)
        for b, (rows, keys) in enumerate(batch)
        for tile in range(-(-rows // rows_of_tile))
        for head in range(heads[0])
    )
    assert sorted(work[1:] for work in found.works) == expected
    assert all(work[0] < NUM_SM for work in found.works)


@pytest.mark.parametrize("num_sm", [132, 114, 78, 1])
@pytest.mark.parametrize("batch", [[(4096, 4096)] * 4, [(1024, 1024)] * 16, [(16384, 16384)]])
def test_blocks_get_equal_shares_of_the_keys(schedule, batch, num_sm):
    """No block has a tenth more keys to work on than the mean."""
    found = schedule(batch, num_sm=num_sm)
    loads = np.zeros(num_sm)
    for block, _, _, tile, _, rows, _, keys in found.works:
        loads[block] += 256 + min(keys, (tile + 1) * 128 + keys - rows)
    assert loads.max() <= 1.1 * loads.mean()


@pytest.mark.parametrize("heads", [(32, 32), (32, 8)], ids=str)
def test_tiles_of_a_request_and_head_come_together(schedule, heads):
    """They find its keys in L2: of many requests the keys of one head do not fit there."""
    num_requests, tile = 128, 256 + 1024
    found = schedule([(1024, 1024)] * num_requests, heads)
    clock = np.zeros(NUM_SM)
    starts: dict[tuple[int, int], list[float]] = {}
    for block, head, request, at, _, rows, _, keys in found.works:
        starts.setdefault((head, request), []).append(clock[block])
        clock[block] += 256 + min(keys, (at + 1) * 128 + keys - rows)
    spread = [
        max(times) - min(times) for times in starts.values() if max(times) < 0.9 * clock.min()
    ]
    assert len(spread) > 0.8 * num_requests * heads[0]
    assert max(spread) <= 2 * tile


@pytest.mark.parametrize(
    ("batch", "prefers_hopper"),
    [
        ([(1024, 1024)] * 16, True),
        ([(4096, 4096)] * 4, True),
        ([(16384, 16384)], True),
        ([(512, 8192)] * 8, True),
        ([(1024, 1024)], True),
        # Decode through the prefill slot: FA2 packs heads and splits keys.
        ([(1, 4096)] * 64, False),
        ([(1, 4096)], False),
        ([(4, 2048)] * 256, False),
        ([(16, 16)] * 100, False),
        # Few rows over many keys: only FA2's split fills the GPU.
        ([(128, 65536)], False),
        # Rows without any key, and none at all.
        ([(512, 0)] * 8, True),
        ([(0, 64)], False),
        ([], False),
    ],
)
def test_choice(schedule, batch, prefers_hopper):
    assert schedule(batch).prefers_hopper == prefers_hopper


@pytest.mark.parametrize(
    ("batch", "options", "prefers_copy"),
    [
        ([(1024, 1024)] * 16, {}, True),
        ([(4096, 4096)] * 4, {}, True),
        ([(16384, 16384)], {}, True),
        # Four times the keys to copy for the same products.
        ([(1024, 1024)] * 16, {"heads": (32, 32)}, False),
        # Few products for each key: few rows, or few keys of those that are seen.
        ([(512, 8192)] * 8, {"heads": (16, 8)}, False),
        ([(4096, 4096)] * 4, {"window_left": 64}, False),
        # What a copy takes at least.
        ([(64, 64)] * 4, {}, False),
        ([(0, 64)], {}, False),
        ([], {}, False),
    ],
)
def test_choice_of_a_copy(schedule, batch, options, prefers_copy):
    """Pages are copied where rows and heads are many for the keys that they see."""
    assert schedule(batch, **options).prefers_copy == prefers_copy


def test_choice_of_a_batch_that_is_mostly_prefill(schedule):
    """A few decoding requests beside long prompts do not change the choice; many do."""
    assert schedule([(2048, 2048)] * 8 + [(1, 1000)] * 4).prefers_hopper
    assert not schedule([(2048, 2048)] + [(1, 4000)] * 64).prefers_hopper
