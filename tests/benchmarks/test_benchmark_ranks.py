"""Two ranks of one model: each plans on its own, and both come to the same kernels (case C57).

Nothing is tried and timed, so a plan follows from its arguments and the GPU alone. The ranks here
are processes, of which one has planned and run other work before.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]

SCRIPT = """
import json, sys
from benchmarks import work
from benchmarks.cases import make_case
from benchmarks.machine import open_machine
from benchmarks.sides.ours import PLAN_HEADER, Arguments, build, kernel_of_plan

device, rank = sys.argv[1], int(sys.argv[2])
machine = open_machine(device)
names = {
    "cpu": ["tiny-decode", "tiny-ragged", "tiny-paged", "tiny-mla"],
    "cuda": ["decode-B1-L4096", "decode-B16-L4096", "ragged-B4-S4096", "paged-B8-Q512-L8192"],
}[device]
rows = [work.ROWS[name] for name in names]
if rank:
    for row in rows[::-1]:
        for call in build(make_case(row, machine)).calls:
            call()
    machine.sync()
found = {}
for row in rows:
    case = make_case(row, machine)
    plan = list(Arguments(case).plan())
    # Beside the choice the header holds an address and a hash of all.
    found[row.name] = [kernel_of_plan(case, plan), *plan[PLAN_HEADER:]]
print(json.dumps(found))
"""


def _plans(device: str, rank: int) -> dict[str, list[Any]]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, device, str(rank)],
        capture_output=True, text=True, env=environment, cwd=ROOT, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_ranks_choose_the_same_kernels(device: Any) -> None:
    name = "cpu" if device.dlpack_device_type() == 1 else "cuda"
    if name == "cuda":
        pytest.importorskip("torch")
    first, second = (_plans(name, rank) for rank in range(2))
    assert first == second
    assert len(first) == 4
