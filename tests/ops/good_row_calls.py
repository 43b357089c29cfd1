"""Good calls of the functions around attention: rotary embedding, norms, states, sampling."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from batches import normal
from calls import Args
from device_tensors import DeviceTensor, poisoned, to_device

ROPE: Args = {"rope_theta": 1e4, "rope_scale": 1.0, "rotary_dim": 64, "rope_scaling": "{}"}


class RowMaker:
    """Makes the arguments of these functions on one device."""

    def __init__(self, device: Any) -> None:
        self.device = device
        self.rng = np.random.default_rng(0)

    def given(self, *shape: int, dtype: str = "float16") -> DeviceTensor:
        """A random tensor."""
        return to_device(normal(self.rng, shape, dtype), self.device)

    def ints(self, values: Any) -> DeviceTensor:
        """A tensor of int32."""
        return to_device(np.asarray(values, np.int32), self.device)

    def out(self, *shape: int, dtype: str = "float16") -> DeviceTensor:
        """A tensor to be written."""
        return poisoned(shape, dtype, self.device)

    def rotary_append(self) -> Args:
        """Of a fused tensor into pages."""
        return {
            "qkv": self.given(3, 8, 64),
            "positions": self.ints([4, 5, 900]),
            "slots": self.ints([5, 63, -1]),
            **ROPE,
            "pages": self.given(4, 2, 2, 16, 64),
            "q": self.out(3, 4, 64),
        }

    def apply_rope(self, **angles: Any) -> Args:
        """Of queries and keys, into others."""
        heads: Args = {"q": self.given(7, 4, 64), "k": self.given(7, 2, 64)}
        outs: Args = {"q_out": self.out(7, 4, 64), "k_out": self.out(7, 2, 64)}
        return heads | {"positions": self.ints(np.arange(7) * 9), **angles} | outs

    def apply_rope_in_place(self) -> Args:
        """Of two requests."""
        return {
            "q": self.given(7, 4, 64),
            "k": self.given(7, 2, 64),
            "indptr": self.ints([0, 3, 7]),
            "offsets": self.ints([4, 0]),
            "batch_size": 2,
            "num_qo_heads": 4,
            "num_kv_heads": 2,
            "head_dim": 64,
            "rope_scale": 1.0,
            "rope_theta": 1e4,
        }

    def token_slots(self) -> Args:
        """Of two requests."""
        return {
            "qo_indptr": self.ints([0, 3, 4]),
            "page_indptr": self.ints([0, 1, 3]),
            "page_indices": self.ints([2, 0, 1]),
            "last_page_len": self.ints([3, 1]),
            "page_size": 16,
            "positions": self.out(4, dtype="int32"),
            "slots": self.out(4, dtype="int32"),
        }

    def norm(self, adds: bool) -> Args:
        """Five rows, with a residual or without."""
        names = ("x", "residual") if adds else ("x",)
        outs = ("out", "sum") if adds else ("out",)
        inputs: Args = {name: self.given(5, 64) for name in names}
        rest: Args = {"weight": self.given(64), "eps": 1e-6}
        return inputs | rest | {name: self.out(5, 64) for name in outs}

    def many_states(self) -> Args:
        """Three states of each row."""
        return {
            "v": self.given(9, 3, 4, 64),
            "s": self.given(9, 3, 4, dtype="float32"),
            "v_merged": self.out(9, 4, 64),
            "s_merged": self.out(9, 4, dtype="float32"),
        }

    def sampling(self) -> Args:
        """Three rows of probabilities."""
        return {
            "probs": to_device(np.full((3, 8), 0.125, np.float32), self.device),
            "uniform": to_device(np.array([0.1, 0.3, 0.6, 0.9], np.float32), self.device),
            "sample_indices": self.ints([0, 0, 2, 1]),
            "out_ids": self.out(4, dtype="int32"),
        }

    def filtered(self, **filters: Any) -> Args:
        """Draws from what filters leave."""
        args = self.sampling()
        out = args.pop("out_ids")
        return args | filters | {"out_ids": out}

    def probs(self) -> DeviceTensor:
        """Three rows, in descending order."""
        rows = np.sort(self.rng.dirichlet(np.ones(8), 3).astype(np.float32), axis=1)
        return to_device(np.ascontiguousarray(rows[:, ::-1]), self.device)

    def numbers(self, *values: float) -> DeviceTensor:
        """One number for each row."""
        return to_device(np.array(values, np.float32), self.device)

    def sorted_draws(self) -> Args:
        """Draws from sorted rows."""
        args = self.sampling()
        order = np.tile(np.arange(8, dtype=np.int32), (3, 1))
        kept = {"top_p": self.numbers(0.5, 0.9, 1.0), "top_k": self.ints([3, 8, 1])}
        return (
            {"sorted_probs": self.probs(), "sorted_indices": to_device(order, self.device)}
            | kept
            | {name: args[name] for name in ("uniform", "sample_indices", "out_ids")}
        )

    def drafts(self) -> Args:
        """Two chains of three drafts."""
        return {
            "draft_probs": to_device(np.full((2, 3, 8), 0.125, np.float32), self.device),
            "draft_ids": self.ints([[1, 2, 3], [7, 0, 4]]),
            "target_probs": to_device(np.full((2, 4, 8), 0.125, np.float32), self.device),
            "uniform": to_device(np.full((2, 4), 0.5, np.float32), self.device),
            "out_ids": self.out(2, 4, dtype="int32"),
            "num_accepted": self.out(2, dtype="int32"),
        }


ROW_MAKERS: dict[str, Callable[[Any], Args]] = {
    "merge_states": RowMaker.many_states,
    "apply_rope": lambda m: m.apply_rope(**ROPE),
    "apply_rope_cos_sin_cache": lambda m: m.apply_rope(
        cos_sin_cache=m.given(60, 64, dtype="float32"), interleaved=0
    ),
    "batch_qk_apply_rotary_in_place": RowMaker.apply_rope_in_place,
    "split_qkv_rotary_append": RowMaker.rotary_append,
    "token_slots": RowMaker.token_slots,
    "rmsnorm": lambda m: m.norm(False),
    "gemma_rmsnorm": lambda m: m.norm(False),
    "fused_add_rmsnorm": lambda m: m.norm(True),
    "gemma_fused_add_rmsnorm": lambda m: m.norm(True),
    **{
        f"{name}_and_mul": lambda m: {"x": m.given(5, 128), "out": m.out(5, 64)}
        for name in ("silu", "gelu", "gelu_tanh")
    },
    "sampling.parallel_sampling_from_prob": RowMaker.sampling,
    "sampling.top_k_from_probs": lambda m: m.filtered(top_k=m.ints([3, 8, 0])),
    "sampling.top_p_from_probs": lambda m: m.filtered(top_p=m.numbers(0.5, 0.9, 1)),
    "sampling.top_k_top_p_from_probs": lambda m: m.filtered(
        top_k=m.ints([3, 8, 0]), top_p=m.numbers(0.5, 0.9, 1), joint=0
    ),
    "sampling.min_p_from_probs": lambda m: m.filtered(min_p=m.numbers(0.5, 0.1, 0)),
    "sampling.top_k_renorm_probs": lambda m: {
        "probs": m.probs(),
        "top_k": m.ints([3, 8, 0]),
        "out": m.out(3, 8, dtype="float32"),
    },
    "sampling.top_p_renorm_probs": lambda m: {
        "probs": m.probs(),
        "top_p": m.numbers(0.5, 0.9, 1),
        "out": m.out(3, 8, dtype="float32"),
    },
    "sampling.top_k_top_p_renorm_probs": lambda m: {
        "probs": m.probs(),
        "top_k": m.ints([3, 8, 0]),
        "top_p": m.numbers(0.5, 0.9, 1),
        "joint": 1,
        "out": m.out(3, 8, dtype="float32"),
    },
    "sampling.sample_from_sorted": RowMaker.sorted_draws,
    "sampling.renorm_from_sorted": lambda m: {
        "probs": m.probs(),
        "sorted_probs": m.probs(),
        "top_p": m.numbers(0.5, 0.9, 1),
        "top_k": m.ints([3, 8, 1]),
        "out": m.out(3, 8, dtype="float32"),
    },
    "sampling.softmax": lambda m: {
        "logits": m.given(3, 8, dtype="float32"),
        "temperature": m.numbers(0.5, 0, 1),
        "active_vocab_size": 7,
        "out": m.out(3, 8, dtype="float32"),
    },
    "sampling.chain_speculative": RowMaker.drafts,
}
