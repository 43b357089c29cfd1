"""What a model asks of its paged KV cache, read from the call that stands for its creation."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import tvm_ffi
from tvm import relax as rx
from tvm import tirx
from tvm.relax.frontend.nn.llm.kv_cache import RopeMode

from tvm_flashinfer.relax._compat import DEFAULT_LAYER_WINDOW

#: The function whose call stands for "create the cache here" until a pass rewrites it.
GENERIC_SYMBOL = "mlc.create_paged_kv_cache_generic"

#: Kinds of attention that a layer may have.
ATTN_KINDS = ("mha", "mla", "mha_sliding")

#: What the call passes, in order. The second argument is a shape of the five run-time sizes.
ARGUMENTS = (
    "attn_kind", "sizes", "layer_partition", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "qk_head_dim", "v_head_dim", "mla_original_qk_head_dim",
    "mla_original_v_head_dim", "rope_mode", "rope_scale", "rope_theta", "rope_scaling",
    "rope_ext_factors", "rotary_dim", "enable_disaggregation", "dtype",
)  # fmt: skip

_SIZES = (
    "max_batch_size", "max_total_seq_len", "prefill_chunk_size", "page_size",
    "support_sliding_window",
)  # fmt: skip


#: Fields that have no argument in every release of TVM.
_OURS = ("layer_sliding_window_size", "logits_soft_cap", "alibi_slopes", "attention_sinks")


@tvm_ffi.register_error
class KVCacheCallError(ValueError):
    """A call that stands for the creation of a cache cannot be read."""


@dataclass(frozen=True, eq=False)
class PagedKVCacheConfig:
    """The arguments of TVM's paged KV-cache builders, without the target.

    Parameters
    ----------
    attn_kind : str or sequence of str
        ``"mha"``, ``"mla"`` or ``"mha_sliding"``, for all layers or for each one.
    max_batch_size, max_total_seq_len, prefill_chunk_size, page_size : PrimExpr
        Sizes known at run time: sequences, tokens, tokens of a step, tokens of a page.
    support_sliding_window : PrimExpr
        Known at run time: 1 for a cache whose sequences slide as a whole, else 0.
    layer_partition : relax.ShapeExpr
        First layer of each pipeline stage, then the number of layers.
    num_hidden_layers, num_attention_heads, num_key_value_heads : int
    qk_head_dim, v_head_dim : int
    mla_original_qk_head_dim, mla_original_v_head_dim : int
        Head dimensions of MLA before compression; 0 otherwise.
    rope_mode : int
        TVM's ``RopeMode``: 0 none, 1 normal, 2 inline.
    rope_scale, rope_theta : float
    rope_scaling : mapping
        Scaling of the frequencies, such as ``{"rope_type": "llama3", "factor": 8.0, ...}``.
    rope_ext_factors : relax.Expr
        A constant tensor for longrope, or the integer 0 for none.
    rotary_dim : int
        How many of the dimensions of a head are rotated.
    enable_disaggregation : bool
    dtype : str
    layer_sliding_window_size : int
        Window, in tokens, of the layers whose kind is ``"mha_sliding"``.
    logits_soft_cap : float
        c > 0: scores become ``c * tanh(score / c)`` in every layer. 0 for none.
    alibi_slopes : sequence of float
        One per query head: ``slope * (position of the key - position of the query)`` is added to a
        score, after the cap. Empty for none.
    attention_sinks : object
        Sinks of attention heads. None for none; others are refused with advice.
    """

    attn_kind: str | tuple[str, ...]
    max_batch_size: Any
    max_total_seq_len: Any
    prefill_chunk_size: Any
    page_size: Any
    support_sliding_window: Any
    layer_partition: rx.ShapeExpr
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    qk_head_dim: int
    v_head_dim: int
    mla_original_qk_head_dim: int
    mla_original_v_head_dim: int
    rope_mode: int
    rope_scale: float
    rope_theta: float
    rope_scaling: Mapping[str, Any]
    rope_ext_factors: Any
    rotary_dim: int
    enable_disaggregation: bool
    dtype: str
    layer_sliding_window_size: int = DEFAULT_LAYER_WINDOW
    logits_soft_cap: float = 0.0
    alibi_slopes: tuple[float, ...] = ()
    attention_sinks: Any = None

    def __post_init__(self) -> None:
        set_field = object.__setattr__
        if not isinstance(self.attn_kind, str):
            set_field(self, "attn_kind", tuple(self.attn_kind))
        set_field(self, "rope_mode", int(self.rope_mode))
        set_field(self, "rope_scaling", dict(self.rope_scaling or {}))
        set_field(self, "dtype", str(self.dtype))
        set_field(self, "logits_soft_cap", float(self.logits_soft_cap))
        set_field(self, "alibi_slopes", tuple(float(slope) for slope in self.alibi_slopes))

    @property
    def layer_kinds(self) -> tuple[str, ...]:
        """The kind of attention of each layer."""
        if isinstance(self.attn_kind, str):
            return (self.attn_kind,) * self.num_hidden_layers
        return self.attn_kind

    @property
    def is_mla(self) -> bool:
        """Whether some layer is multi-head latent attention."""
        return "mla" in self.layer_kinds

    @property
    def has_sliding_layers(self) -> bool:
        """Whether some layer has a window of its own."""
        return "mha_sliding" in self.layer_kinds

    @property
    def rotates(self) -> bool:
        """Whether the cache applies RoPE; models with MLA and models without RoPE do not ask it."""
        return self.rope_mode != RopeMode.NONE and not self.is_mla

    @property
    def rope_type(self) -> str:
        """The type of the scaling of the frequencies, ``"default"`` when there is none.

        As in TVM, a scaling without ``"rope_type"`` is none. Models that rotate by themselves leave
        such ones here, Qwen2.5-VL for one.
        """
        return self.rope_scaling.get("rope_type", "default")

    @property
    def tvm_rope_scaling(self) -> dict[str, Any]:
        """The scaling as TVM's kernels take it; they have no names for these two types."""
        return {} if self.rope_type in ("default", "linear") else dict(self.rope_scaling)

    @property
    def head_ratio(self) -> int:
        """Query heads per KV head, rounded down as TVM's runtime does."""
        return self.num_attention_heads // self.num_key_value_heads

    def builder_arguments(self) -> dict[str, Any]:
        """Return the keyword arguments that TVM's builders take, without target and window.

        They know neither caps nor slopes.
        """
        arguments = {field.name: getattr(self, field.name) for field in fields(self)}
        for name in _OURS:
            del arguments[name]
        arguments["rope_mode"] = RopeMode(self.rope_mode)
        if not isinstance(self.attn_kind, str):
            arguments["attn_kind"] = list(self.attn_kind)
        return arguments


def parse_generic_call(
    call: rx.Call,
    lookup: Callable[[rx.Var], rx.Expr | None] = lambda var: None,
    layer_sliding_window_size: int = DEFAULT_LAYER_WINDOW,
) -> PagedKVCacheConfig:
    """Read the configuration from a call of `GENERIC_SYMBOL`.

    Parameters
    ----------
    call : relax.Call
        ``relax.call_pure_packed("mlc.create_paged_kv_cache_generic", ...)``.
    lookup : callable
        Gives the value bound to a variable, for arguments that a pass has moved into bindings.
    layer_sliding_window_size : int
        The window of ``mha_sliding`` layers, which the call does not carry.

    Returns
    -------
    config : PagedKVCacheConfig

    Raises
    ------
    KVCacheCallError
        When the number of arguments or the kind of one of them is not what MLC LLM emits.
    """
    args = [_resolve(arg, lookup) for arg in call.args[1:]]
    if len(args) != len(ARGUMENTS):
        raise KVCacheCallError(
            f"{GENERIC_SYMBOL} is called with {len(args)} arguments: "
            f"({', '.join(type(arg).__name__ for arg in args)}). Expected {len(ARGUMENTS)}: "
            f"{', '.join(ARGUMENTS)}. The model was exported by a version of MLC LLM with another "
            "calling convention; use mlc-llm of 2026 or newer"
        )
    given = dict(zip(ARGUMENTS, args, strict=True))
    readers: dict[str, Callable[[Any], Any]] = {
        "attn_kind": lambda arg: _attn_kind(arg, lookup),
        "layer_partition": _shape,
        "rope_scale": _number,
        "rope_theta": _number,
        "rope_scaling": lambda arg: json.loads(_string(arg)),
        "rope_ext_factors": lambda arg: arg,
        "enable_disaggregation": lambda arg: bool(_integer(arg)),
        "dtype": _dtype,
    }
    sizes = _read("sizes", given.pop("sizes"), lambda arg: list(_shape(arg).values))
    if len(sizes) != len(_SIZES):
        raise KVCacheCallError(
            f"argument 'sizes' of {GENERIC_SYMBOL} has {len(sizes)} values: {sizes}. "
            f"Expected {len(_SIZES)}: {', '.join(_SIZES)}"
        )
    values = {name: _read(name, arg, readers.get(name, _integer)) for name, arg in given.items()}
    config = PagedKVCacheConfig(
        **values,
        **dict(zip(_SIZES, sizes, strict=True)),
        layer_sliding_window_size=layer_sliding_window_size,
    )
    if len(config.layer_kinds) != config.num_hidden_layers:
        raise KVCacheCallError(
            f"argument 'attn_kind' of {GENERIC_SYMBOL} names {len(config.layer_kinds)} layers, but "
            f"'num_hidden_layers' is {config.num_hidden_layers}"
        )
    return config


def _resolve(arg: rx.Expr, lookup: Callable[[rx.Var], rx.Expr | None]) -> rx.Expr:
    while isinstance(arg, rx.Var):
        value = lookup(arg)
        if value is None:
            break
        arg = value
    return arg


def _read(name: str, arg: Any, reader: Callable[[Any], Any]) -> Any:
    try:
        return reader(arg)
    except (AttributeError, TypeError, ValueError) as error:
        raise KVCacheCallError(
            f"argument {name!r} of {GENERIC_SYMBOL} cannot be read: got {type(arg).__name__} "
            f"{arg}: {error}"
        ) from error


def _attn_kind(arg: Any, lookup: Callable[[rx.Var], rx.Expr | None]) -> str | tuple[str, ...]:
    if isinstance(arg, rx.Tuple):
        return tuple(_one_kind(_resolve(field, lookup)) for field in arg.fields)
    return _one_kind(arg)


def _one_kind(arg: Any) -> str:
    kind = _string(arg)
    if kind not in ATTN_KINDS:
        raise ValueError(f"the kind is {kind!r}, expected one of {', '.join(ATTN_KINDS)}")
    return kind


def _string(arg: Any) -> str:
    if not isinstance(arg.value, str):
        raise TypeError(f"expected a string constant, got one of {type(arg.value).__name__}")
    return str(arg.value)


def _shape(arg: Any) -> rx.ShapeExpr:
    if not isinstance(arg, rx.ShapeExpr):
        raise TypeError("expected a shape")
    return arg


def _number(arg: Any) -> int | float:
    if not isinstance(arg, tirx.IntImm | tirx.FloatImm):
        raise TypeError("expected a number")
    return arg.value


def _integer(arg: Any) -> int:
    if not isinstance(arg, tirx.IntImm):
        raise TypeError("expected an integer")
    return int(arg.value)


def _dtype(arg: Any) -> str:
    # The constant holds TVM's DataType, whose text is the name, as "float16".
    if isinstance(arg, tirx.IntImm | tirx.FloatImm | rx.ShapeExpr | rx.Tuple):
        raise TypeError("expected a dtype")
    return str(arg.value)
