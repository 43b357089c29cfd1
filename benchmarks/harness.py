"""What the benchmarks share: the target, the clock, and the file of results."""

from __future__ import annotations

import datetime
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tvm

from tvm_flashinfer.kernels.toolchain import find_nvcc


def cuda_device() -> Any:
    """The first GPU; ends the program where there is none."""
    device = tvm.cuda(0)
    if not device.exist:
        sys.exit("no CUDA device: this benchmark times GPU kernels")
    return device


def cuda_target(device: Any) -> tvm.target.Target:
    """The target of a device, with the features of its architecture alone on Hopper."""
    target = tvm.target.Target.from_device(device)
    if device.compute_version == "9.0":
        target = tvm.target.Target({**dict(target.attrs), "kind": "cuda", "arch": "sm_90a"})
    return target


def seconds_of_call(side: Callable[[], object], device: Any) -> float:
    """Median over repeats of the mean over a batch of calls, issued together and waited for once.

    The host does not show unless a kernel takes less time than a call does.
    """
    return seconds_of_calls({"side": side}, device)["side"]


def seconds_of_calls(sides: dict[str, Callable[[], object]], device: Any) -> dict[str, float]:
    """The same of several sides, whose repeats take turns: what drifts meets all of them."""
    calls = {name: _calls_of_a_batch(side, device) for name, side in sides.items()}
    means: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(7):
        for name, side in sides.items():
            start = time.perf_counter()
            for _ in range(calls[name]):
                side()
            device.sync()
            means[name].append((time.perf_counter() - start) / calls[name])
    return {name: statistics.median(values) for name, values in means.items()}


def _calls_of_a_batch(side: Callable[[], object], device: Any) -> int:
    side()
    device.sync()
    start = time.perf_counter()
    side()
    device.sync()
    return max(1, min(200, int(0.05 / (time.perf_counter() - start))))


def write_results(path: Path, device: Any, command: str, rows: list[dict[str, Any]]) -> None:
    """Write rows with the machine and the command that they come from."""
    nvcc = find_nvcc()
    header = {
        "date": datetime.date.today().isoformat(),
        "gpu": device.device_name,
        "driver": _nvidia_smi("driver_version"),
        "cuda": nvcc.release if nvcc else None,
        "tvm": f"apache-tvm {tvm.__version__}",
        "command": command,
    }
    path.write_text(json.dumps({**header, "rows": rows}, indent=1) + "\n", encoding="utf-8")


def _nvidia_smi(field: str) -> str | None:
    """What nvidia-smi says of the first GPU, or None where it is missing."""
    try:
        command = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader", "--id=0"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
