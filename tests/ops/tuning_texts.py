"""Texts of files of tuning."""

from __future__ import annotations

import json
from typing import Any

import tvm_flashinfer
from tvm_flashinfer.kernels.environment import driver, gpus
from tvm_flashinfer.kernels.headers import FLASHINFER_VERSION

H200 = ("NVIDIA H200", 90, 132)
A100 = ("NVIDIA A100-SXM4-80GB", 80, 108)

#: Llama-3-8B: heads of queries and keys, and head_dim.
HEADS = (32, 8)
HEAD_DIM = 128


def entry(slot: str = "decode_paged", kernel: str = "batch_attention", **changes: Any) -> Any:
    """An entry for decode of up to 64 requests of up to 4096 keys, with some fields replaced."""
    fields: dict[str, Any] = {
        "slot": slot, "num_qo_heads": HEADS[0], "num_kv_heads": HEADS[1], "head_dim_qk": HEAD_DIM,
        "head_dim_vo": HEAD_DIM, "causal": False, "batch": 64, "rows": 1, "keys": 4096,
        "kernel": kernel, "split_keys": 0,
    }  # fmt: skip
    return {name: value for name, value in {**fields, **changes}.items() if value is not ...}


def tuning(*entries: Any, gpu: tuple[str, int, int] = H200, **changes: Any) -> dict[str, Any]:
    """What a file holds, with some fields of the versions or of the whole replaced."""
    name, arch, num_sm = gpu
    versions = {
        "tvm_flashinfer": tvm_flashinfer.__version__,
        "flashinfer": FLASHINFER_VERSION,
        "cuda_driver": 13,
    }
    whole = {
        "format": "tvm_flashinfer tuning 1",
        "gpu": {"name": name, "arch": arch, "num_sm": num_sm},
        "versions": {name: changes.pop(name, value) for name, value in versions.items()},
        "entries": list(entries),
    }
    return {name: value for name, value in {**whole, **changes}.items() if value is not ...}


def text_of(*entries: Any, **changes: Any) -> str:
    """The same as JSON."""
    return json.dumps(tuning(*entries, **changes))


def identity_of_here() -> dict[str, Any]:
    """What a file says of this machine's first GPU, or of an H200 where there is none."""
    found, here = gpus(), driver()
    if not found or here is None:
        whole = tuning()
    else:
        major, minor = found[0]["capability"]
        gpu = (found[0]["name"], 10 * major + minor, found[0]["num_sm"])
        whole = tuning(gpu=gpu, cuda_driver=int(here["cuda"].split(".")[0]))
    return {"gpu": whole["gpu"], "versions": whole["versions"]}


def text_of_here(*entries: Any) -> str:
    """A file of this machine, or of an H200 where there is no GPU."""
    return json.dumps({**tuning(*entries), **identity_of_here()})
