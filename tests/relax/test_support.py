"""The reasons why a cache cannot be served."""

from __future__ import annotations

from dataclasses import replace

import pytest
import tvm
from tvm.relax.frontend.nn.llm.kv_cache import RopeMode

from tvm_flashinfer.contract import tvm_name
from tvm_flashinfer.relax import parse_generic_call, support, unsupported_reasons
from tvm_flashinfer.relax._compat import HAS_LAYER_WINDOW
from tvm_flashinfer.relax.config import PagedKVCacheConfig
from tvm_flashinfer.relax.slots import native_rows

YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 8192,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
LONGROPE = {
    "rope_type": "longrope",
    "max_position_embeddings": 131072,
    "original_max_position_embeddings": 4096,
}
INLINE = int(RopeMode.INLINE)
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
MLA = {
    "attn_kind": "mla",
    "qk_head_dim": 576,
    "v_head_dim": 512,
    "mla_original_qk_head_dim": 192,
    "mla_original_v_head_dim": 128,
    "num_key_value_heads": 1,
}


def reasons_of(mod, target, window: int = 1024) -> list[str]:
    call = mod["create_paged_kv_cache"].body.blocks[0].bindings[0].value
    return unsupported_reasons(parse_generic_call(call, layer_sliding_window_size=window), target)


@pytest.mark.parametrize("kind", ["cuda", "llvm"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        MLA,
        {"dtype": "bfloat16"},
        {"qk_head_dim": 64, "v_head_dim": 64, "rotary_dim": 64},
        {"qk_head_dim": 256, "v_head_dim": 256, "rotary_dim": 64},
        {"rope_scaling": LLAMA3},
        {"rope_scaling": {"rope_type": "gptj"}},
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        {"rope_scaling": {"rope_type": "default"}},
        {"rope_scaling": YARN},
        {"rope_scaling": LONGROPE, "rope_ext_factors": [1.0] * 128},
        {"qk_head_dim": 80, "v_head_dim": 80, "rotary_dim": 80},
        {"qk_head_dim": 192, "v_head_dim": 192, "rotary_dim": 192},
        {"rope_mode": INLINE},
        {"rope_mode": INLINE, "rope_scaling": LLAMA3, "rotary_dim": 64},
        # As in TVM, a scaling without "rope_type" is none.
        {"rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}},
        {"num_attention_heads": 24},
        {"attn_kind": ["mha_sliding", "mha"], "num_hidden_layers": 2},
        # Models without RoPE leave values in its arguments that mean nothing.
        {"rope_mode": int(RopeMode.NONE), "rope_theta": -1, "rope_scale": -1},
    ],
)
def test_supported(changes, kind, generic_module, request) -> None:
    assert reasons_of(generic_module(**changes), request.getfixturevalue(kind)) == []


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"num_attention_heads": 31}, "num_attention_heads is 31"),
        ({"v_head_dim": 64}, "v_head_dim is 64 and qk_head_dim is 128"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "'yarn' lacks factor"),
        ({"rope_scaling": YARN, "rope_theta": 1.0}, "yarn needs one above 1"),
        ({"rope_scaling": LONGROPE}, "rope_ext_factors are not given"),
        (
            {"rope_scaling": LONGROPE, "rope_ext_factors": [1.0] * 128, "rope_mode": INLINE},
            "normal mode only",
        ),
        (
            {"rope_mode": INLINE, "attn_kind": ["mha_sliding", "mha"], "num_hidden_layers": 2},
            "some layers slide",
        ),
        ({"rope_scaling": {"rope_type": "llama4"}}, "'llama4'"),
        ({"rope_scaling": {"rope_type": "linear"}}, "lacks factor"),
        ({"rope_theta": 0.0}, "rope_theta is 0.0"),
        ({"rotary_dim": 63}, "rotary_dim is 63"),
        ({"rotary_dim": 130}, "rotary_dim is 130"),
        ({"rope_ext_factors": [1.0]}, "the RoPE scaling is 'default'"),
        ({"enable_disaggregation": True}, "enable_disaggregation is set"),
        ({"dtype": "float8_e4m3fn"}, "8-bit pages are served by flashinfer.bind_attention"),
    ],
)
@pytest.mark.parametrize("kind", ["cuda", "llvm"])
def test_one_reason(changes, expected, kind, generic_module, request) -> None:
    (reason,) = reasons_of(generic_module(**changes), request.getfixturevalue(kind))
    assert expected in reason


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"dtype": "float32"}, "the dtype is float32"),
        ({"qk_head_dim": 72, "v_head_dim": 72, "rotary_dim": 72}, "head_dim is 72"),
        ({**MLA, "qk_head_dim": 320, "v_head_dim": 256}, "head_dim is 320"),
    ],
)
def test_only_the_cpu_serves(changes, expected, generic_module, cuda, llvm) -> None:
    mod = generic_module(**changes)
    assert reasons_of(mod, llvm) == []
    (reason,) = reasons_of(mod, cuda)
    assert expected in reason


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"attn_kind": ["mla", "mha"], "num_hidden_layers": 2}, "beside other kinds"),
        ({"v_head_dim": 640}, "v_head_dim is 640 and qk_head_dim is 576"),
        ({"mla_original_v_head_dim": 0}, "mla_original_v_head_dim is 0"),
    ],
)
def test_mla_that_is_none(changes, expected, generic_module, llvm) -> None:
    (reason,) = reasons_of(generic_module(**{**MLA, **changes}), llvm)
    assert expected in reason


def test_several_reasons(generic_module, cuda) -> None:
    mod = generic_module(dtype="float32", rotary_dim=7, enable_disaggregation=True)
    assert len(reasons_of(mod, cuda)) == 3


def test_tvm_that_calls_otherwise(monkeypatch, generic_module, llvm) -> None:
    monkeypatch.setattr(support, "contract_problems", lambda: ("append is never called",))
    (reason,) = reasons_of(generic_module(), llvm)
    assert reason == f"{tvm_name()}: append is never called"
    assert tvm.__version__ in reason


@pytest.mark.parametrize("arch", ["sm_75", "sm_70"])
def test_old_gpu(arch, generic_module) -> None:
    (reason,) = reasons_of(generic_module(), tvm.target.Target({"kind": "cuda", "arch": arch}))
    assert "Ampere" in reason


def test_old_gpu_among_several(generic_module, cuda, monkeypatch) -> None:
    monkeypatch.setenv("MLC_MULTI_ARCH", "75,80,90a")
    (reason,) = reasons_of(generic_module(), cuda)
    assert "'75'" in reason


@pytest.mark.parametrize("kind", ["vulkan", "metal", "opencl"])
def test_other_targets(kind, generic_module) -> None:
    (reason,) = reasons_of(generic_module(), tvm.target.Target({"kind": kind}))
    assert reason.startswith(f"the target is '{kind}'")


def config_of(mod, **changes) -> PagedKVCacheConfig:
    call = mod["create_paged_kv_cache"].body.blocks[0].bindings[0].value
    return replace(parse_generic_call(call), **changes)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"logits_soft_cap": -1.0}, "logits_soft_cap is -1.0"),
        ({"logits_soft_cap": float("nan")}, "logits_soft_cap is nan"),
        ({"alibi_slopes": (0.5,)}, "1 values; there must be one for each of the 32 query heads"),
        ({"alibi_slopes": (float("inf"),) * 32}, "not finite"),
        (
            {"attention_sinks": [0.0] * 32},
            "call tvm_flashinfer.relax.attention_with_sinks in the place",
        ),
    ],
)
@pytest.mark.parametrize("kind", ["cuda", "llvm"])
def test_wrong_changes_of_scores(changes, expected, kind, generic_module, request) -> None:
    config = config_of(generic_module(), **changes)
    (reason,) = unsupported_reasons(config, request.getfixturevalue(kind))
    assert expected in reason


def test_mla_has_no_slopes(generic_module, llvm) -> None:
    config = config_of(generic_module(**MLA), alibi_slopes=(0.5,) * 32)
    (reason,) = unsupported_reasons(config, llvm)
    assert "'mla' has no ALiBi" in reason


@pytest.mark.parametrize(
    ("changes", "note"),
    [({"logits_soft_cap": 30}, "capped at 30.0"), ({"alibi_slopes": (0.5,) * 32}, "by positions")],
)
def test_changes_of_scores(changes, note, generic_module, cuda, llvm) -> None:
    """Both targets serve them without plans, and the report says so."""
    config = config_of(generic_module(), **changes)
    for target in (cuda, llvm):
        assert unsupported_reasons(config, target) == []
        for row in native_rows(config, target, "create"):
            attends = "bind_attention" in row.kernel
            assert any(note in reason for reason in row.reasons) == attends
            assert "_run" not in row.kernel
    (reason,) = support.unplanned_reasons(config, cuda, "prefill_paged")
    assert next(iter(changes)) in reason
    kinds = {spec.kind for spec in support.kernel_specs(config, cuda)}
    assert kinds == {"common", "batch_attention"}


def test_window_of_layers(generic_module, llvm) -> None:
    mod = generic_module(attn_kind=["mha_sliding", "mha"], num_hidden_layers=2)
    (reason,) = reasons_of(mod, llvm, window=0)
    assert "must be positive" in reason
    reasons = reasons_of(mod, llvm, window=512)
    assert reasons == [] if HAS_LAYER_WINDOW else "fixes it at 1024" in reasons[0]
