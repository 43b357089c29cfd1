"""What a compiled library says of its step functions."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

#: Function of a library that returns its `StepConfig` as JSON.
CONFIG_FUNCTION = "flashinfer_steps"

#: Function that appends the tokens of prompts, and the one of decode steps of a batch size.
PREFILL = "step_prefill"
DECODE = "step_decode_{}"


@dataclass(frozen=True)
class StepConfig:
    """Dimensions of a model that its step functions are compiled for.

    Attributes
    ----------
    num_layers : int
        Calls of attention in a step, each with pages of its own.
    num_qo_heads, num_kv_heads, head_dim : int
        Of attention.
    vocab_size : int
        Logits of a token, which are float32.
    dtype : str
        ``float16`` or ``bfloat16``, on CPU also ``float32``: of queries, keys, values and pages.
    batch_sizes : tuple of int
        The sizes for which there is a decode function; a step takes the first that is large enough,
        and its other rows belong to no sequence.
    page_size : int
        Tokens of a page.
    rope_theta, rope_scale : float
    rotary_dim : int
        Rotated dimensions of a head; 0 for all.
    rope_scaling : dict
        As for ``flashinfer.split_qkv_rotary``.
    """

    num_layers: int
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    dtype: str
    batch_sizes: tuple[int, ...] = (1,)
    page_size: int = 16
    rope_theta: float = 10000.0
    rope_scale: float = 1.0
    rotary_dim: int = 0
    rope_scaling: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        sizes = tuple(sorted(set(self.batch_sizes)))
        if not sizes or sizes[0] < 1:
            raise ValueError(f"got batch sizes {self.batch_sizes}, expected positive ones")
        object.__setattr__(self, "batch_sizes", sizes)
        for name in ("num_layers", "num_qo_heads", "num_kv_heads", "head_dim", "page_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"got {name} {getattr(self, name)}, expected a positive number")
        if self.num_qo_heads % self.num_kv_heads:
            raise ValueError(
                f"got {self.num_qo_heads} query heads, expected a multiple of the "
                f"{self.num_kv_heads} KV heads"
            )

    @classmethod
    def from_json(cls, text: str) -> StepConfig:
        """Read what `to_json` wrote."""
        fields = json.loads(text)
        return cls(**{**fields, "batch_sizes": tuple(fields["batch_sizes"])})

    def to_json(self) -> str:
        """Write all fields."""
        return json.dumps(asdict(self))

    def page_shape(self, num_pages: int) -> tuple[int, ...]:
        """Return the shape of the pages of one layer."""
        return (num_pages, 2, self.num_kv_heads, self.page_size, self.head_dim)
