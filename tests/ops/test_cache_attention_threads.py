"""Results of the slots without a plan do not depend on the number of threads, to the bit."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent.parent


def digests() -> str:
    """Hashes of outputs that take every path: split keys, trees, positions, caps, sinks."""
    import numpy as np
    import tvm
    import tvm_ffi
    from cache_calls import CacheSpec, make_cache_batch
    from cache_oracle import random_tree

    import tvm_flashinfer  # noqa: F401

    class Ops:
        def __getattr__(self, name):
            return tvm_ffi.get_global_func(f"flashinfer.{name}")

    rng = np.random.default_rng(7)
    trees = [random_tree(rng, n) for n in (200, 9)]
    masks = [rng.random((n, m)) < 0.7 for n, m in ((150, 1200), (5, 3000))]
    sinks = np.array([0.5, -1.0, 2.0, 0.0])
    cap = {"logits_soft_cap": 30}
    specs = [
        CacheSpec("prefill_paged", [3000, 70], [3, 5], sliding=[(40, 7), (0, 0)], rotary_mode=1),
        CacheSpec("decode_paged", [5000, 1], rotary_mode=1, options=cap, sinks=sinks),
        CacheSpec("tree_paged", [4000, 20], [200, 9], trees=trees, dtype="float32"),
        CacheSpec("tree_ragged", [200, 9], [200, 9], trees=trees, rotary_mode=1),
        CacheSpec("prefill_paged", [2500], [90], causal=1, options={"layer_window": 1200, **cap}),
        CacheSpec("mask_paged", [1200, 3000], [150, 5], masks=masks),
        CacheSpec("prefill_paged", [3000, 70], [3, 40], kv_dtype="float8_e4m3fn", causal=1),
        CacheSpec("prefill_ragged", [70], [40], kv_dtype="float8_e5m2", dtype="bfloat16"),
    ]
    lines = []
    for spec in specs:
        batch = make_cache_batch(rng, tvm.cpu(0), spec)
        o, lse = batch.run_check(Ops())
        lines.append(hashlib.sha256(o.tobytes() + lse.tobytes()).hexdigest())
    return "\n".join(lines)


@pytest.mark.parametrize("isa", ["baseline", "v3", "v4"])
def test_number_of_threads(isa):
    """One, two and seven threads."""
    found = set()
    for threads in (1, 2, 7):
        env = {
            **os.environ,
            "TVM_FLASHINFER_NUM_THREADS": str(threads),
            "TVM_FLASHINFER_CPU_ISA": isa,
            "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS / "ops"), *sys.path]),
        }
        code = "import test_cache_attention_threads as t; print(t.digests())"
        done = subprocess.run(
            [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        found.add(done.stdout)
    assert len(found) == 1, found
