"""TVM parses its kernels anew for every cache, which takes a second; here it does so once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from tvm.relax.frontend.nn.llm import kv_cache as tvm_kv_cache


@contextmanager
def kernels_parsed_once() -> Iterator[None]:
    """Make TVM's attention kernels come from a cache while the context lasts."""
    # Not those that copy pages: they close over the page size of one module.
    factories = ("_attention_", "tree_attn", "_kv_cache_", "_compact_", "_merge_")
    names = [
        *(name for name in vars(tvm_kv_cache) if name.startswith(factories)),
        "llama_rope_with_position_map",
    ]
    parsed: dict[str, Any] = {}

    def once(name: str, make: Callable[..., Any]) -> Callable[..., Any]:
        def cached(*args: Any, **kwargs: Any) -> Any:
            key = repr((name, [str(arg) for arg in args], sorted(kwargs.items())))
            if key not in parsed:
                parsed[key] = make(*args, **kwargs)
            return parsed[key]

        return cached

    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            patch.setattr(tvm_kv_cache, name, once(name, getattr(tvm_kv_cache, name)))
        yield
