"""What runs at ``import tvm``: registers ``flashinfer.*`` and puts our paged KV cache into TVM.

TVM calls `_autoload` through the entry-point group ``tvm.backends``. ``TVM_FLASHINFER_DISABLE=1``
turns this hook off, ``TVM_DEVICE_BACKEND_AUTOLOAD=0`` all of TVM's. `enable` is the hand-made way.
"""

from __future__ import annotations

import os
import sys
import warnings
from types import ModuleType

from tvm_flashinfer import mlc
from tvm_flashinfer.contract import check_contract
from tvm_flashinfer.when_imported import HookWarning, forget, when_imported

_KV_CACHE = "tvm.relax.frontend.nn.llm.kv_cache"
_CLASS = "FlashInferPagedKVCache"

#: TVM's own class, while ours is in its place.
_original: type | None = None


def enable() -> None:
    """Register ``flashinfer.*`` and put our paged KV cache into the place of TVM's FlashInfer one.

    A module of TVM that is not imported yet is changed when it is. Doing it twice does nothing.

    Raises
    ------
    UnsupportedTVMError
        When the imported TVM calls the functions of its KV cache in another way.
    """
    from tvm_flashinfer import _native

    check_contract()
    _native.load()
    from tvm import _RUNTIME_ONLY

    if _RUNTIME_ONLY:
        from tvm_flashinfer.runtime_only import load_parts

        load_parts()
        return
    when_imported(_KV_CACHE, _put_ours)
    if mlc.imports_tvm():
        mlc.install()


def disable() -> None:
    """Put TVM's FlashInfer cache back. The functions ``flashinfer.*`` stay registered."""
    global _original
    forget(_KV_CACHE)
    if _original is not None:
        setattr(sys.modules[_KV_CACHE], _CLASS, _original)
        _original = None


def turned_off() -> bool:
    """Return whether ``TVM_FLASHINFER_DISABLE`` turns us off, until `enable` is called.

    Raises
    ------
    ValueError
        It holds something else than 0 and 1.
    """
    value = os.environ.get("TVM_FLASHINFER_DISABLE", "")
    if value not in ("", "0", "1"):
        raise ValueError(
            f"TVM_FLASHINFER_DISABLE is {value!r}, expected 1, which turns tvm_flashinfer off, or 0"
        )
    return value == "1"


def _autoload() -> None:
    try:
        if not turned_off():
            enable()
    except Exception as error:  # `import tvm` must work whatever is wrong with us
        warnings.warn(
            f"tvm_flashinfer is not active: {str(error).rstrip('.')}. "
            "TVM_FLASHINFER_DISABLE=1 turns it off",
            HookWarning,
            stacklevel=2,
        )


def _put_ours(module: ModuleType) -> None:
    global _original
    if _original is not None:
        return
    from tvm_flashinfer.relax.hooked_kv_cache import HookedPagedKVCache

    _original = getattr(module, _CLASS)
    setattr(module, _CLASS, HookedPagedKVCache)
