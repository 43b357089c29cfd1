"""Whole models with head dimensions that kernels with plans do not have: 96 (Phi-3), and 100."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from conftest import small_llama
from reference import LlamaReference
from serving import Beside, Served

from examples.llama.compile import create_caches, default_target
from tvm_flashinfer.relax import (
    DispatchKVCacheCreation,
    FallbackWarning,
    StrictModeError,
    dispatch_kv_cache_creation,
    last_report,
)

#: 32 heads for queries as for keys and values, as Phi-3 mini and OpenLLaMA 3B have.
HEADS = {"num_attention_heads": 32, "num_key_value_heads": 32}


def serve(sides: Beside) -> None:
    """Prefill, decode, a chunk on top, a fork inside a page and a token tree."""
    rng = np.random.default_rng(9)
    sides.add(0)
    sides.add(1)
    sides.step({0: rng.integers(0, 96, 35), 1: rng.integers(0, 96, 4)})
    for token in range(3):
        sides.step({1: [token], 0: [token + 1]})
    sides.fork(0, 2, 21)
    sides.step({1: rng.integers(0, 96, 20), 2: [7, 8]})
    sides.step({0: [1], 1: [2], 2: [3]})
    sides.step({0: [5, 6, 7], 2: [8, 9]}, {0: [-1, 0, 0], 2: [-1, -1]})


@pytest.mark.parametrize("head_dim", [96, 100])
def test_logits(head_dim: int, place: tuple[str, str], load_random: Callable[..., Any]) -> None:
    """Every logit of every token, against float64."""
    if place[0] == "cuda" and head_dim == 100:
        pytest.skip("refused on CUDA, which needs no GPU to be seen: see the test below")
    model = load_random(small_llama(head_dim=head_dim, **HEADS), place)
    sides = Beside(Served(model.model), LlamaReference(model.config, model.weights))
    serve(sides)
    assert sides.error <= model.tolerance


def exported(head_dim: int, target: Any) -> Any:
    """The module of a model with its generic cache creation."""
    model = small_llama(head_dim=head_dim, **HEADS).model()
    model.to("float16")
    with target:
        return model.export_tvm(spec=model.module_spec(), allow_extern=True)[0]


@pytest.fixture
def nothing_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the build of kernels an error."""

    def build(*_: Any) -> None:
        pytest.fail("kernels of a cache that is refused were asked for")

    monkeypatch.setattr(dispatch_kv_cache_creation, "link_kernels", build)


@pytest.mark.usefixtures("tvm_027", "nothing_is_built")
def test_a_head_dim_of_100_is_refused_on_cuda() -> None:
    """By name, before anything is built: an error when strict, else TVM's cache and a warning."""
    target = default_target("cuda")
    mod = exported(100, target)
    with pytest.raises(StrictModeError, match="head_dim is 100; there are kernels for 16, 32"):
        DispatchKVCacheCreation(target, strict=True)(mod)
    with pytest.warns(FallbackWarning, match="head_dim is 100; there are kernels for 16, 32"):
        created = create_caches(mod, target, ("flashinfer", "tir"))
    names = {var.name_hint for var in created.get_global_vars()}
    assert "create_tir_paged_kv_cache" in names
    assert "create_flashinfer_paged_kv_cache" not in names
    assert "head_dim is 100" in str(last_report())


@pytest.mark.usefixtures("tvm_027")
def test_a_head_dim_of_96_is_served_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """By kernels without a plan, and the report says why."""
    monkeypatch.setattr(dispatch_kv_cache_creation, "link_kernels", lambda mod, *_: mod)
    target = default_target("cuda")
    with warnings.catch_warnings():
        warnings.simplefilter("error", FallbackWarning)
        DispatchKVCacheCreation(target, strict=True)(exported(96, target))
    assert "head_dim is 96; kernels with a plan have 64, 128, 256" in str(last_report())
