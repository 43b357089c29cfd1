"""Names, spellings and support of kernel specs."""

from __future__ import annotations

import pytest

from tvm_flashinfer.kernels import (
    KernelSpec,
    UnsupportedKernelError,
    attention_specs,
    preset_specs,
    unsupported_reasons,
)
from tvm_flashinfer.kernels.spec import (
    arch_for_capability,
    check_supported,
    normalize_arch,
    parse_archs,
)


@pytest.mark.parametrize(
    ("spec", "name"),
    [
        (
            KernelSpec("batch_prefill_paged", "float16", 128, archs=("90a",)),
            "batch_prefill_paged_f16_d128_sm90a",
        ),
        (KernelSpec("batch_decode", "bfloat16", 64), "batch_decode_bf16_d64_sm80_sm90a"),
        (
            KernelSpec("batch_prefill_ragged", "float16", 192, 128, archs=("80",)),
            "batch_prefill_ragged_f16_d192x128_sm80",
        ),
        (
            KernelSpec("batch_attention", "half", 64, archs=("80",), kv_dtype="e5m2"),
            "batch_attention_f16_e5m2_d64_sm80",
        ),
        (KernelSpec("common", archs=("80",)), "common_sm80"),
    ],
)
def test_name(spec, name):
    assert spec.name == name


@pytest.mark.parametrize("spelling", ["90a", "sm_90a", "SM90a", "9.0a", "compute_90a", " 90a "])
def test_arch_spellings(spelling):
    assert normalize_arch(spelling) == "90a"


def test_spellings_give_equal_specs():
    one = KernelSpec("batch_decode", "fp16", 128, archs="sm_90a,8.0")
    assert one == KernelSpec("batch_decode", "float16", 128, 128, ("80", "90a"))
    assert hash(one) == hash(KernelSpec("batch_decode", "half", 128, archs=["90a", "80", "80"]))


def test_archs_are_in_numeric_order():
    assert parse_archs(["120,80", "90a"]) == ("80", "90a", "120")


def test_definitions():
    spec = KernelSpec("batch_decode", "bf16", 64, archs="80,90a")
    assert spec.source == "kernels/cuda/units/batch_decode.cu"
    assert spec.definitions == {
        "TVM_FLASHINFER_ARCHS": '"80,90a"',
        "TVM_FLASHINFER_DTYPE": "nv_bfloat16",
        "TVM_FLASHINFER_KV_DTYPE": "nv_bfloat16",
        "TVM_FLASHINFER_HEAD_DIM_QK": "64",
        "TVM_FLASHINFER_HEAD_DIM_VO": "64",
    }
    spec = KernelSpec("batch_attention", "fp16", 64, kv_dtype="e4m3")
    assert spec.definitions["TVM_FLASHINFER_KV_DTYPE"] == "__nv_fp8_e4m3"
    assert KernelSpec("common", archs="80").definitions == {"TVM_FLASHINFER_ARCHS": '"80"'}


def test_every_preset_is_supported():
    counts = {
        "common": 1, "ops": 5, "fp16-d128": 7, "bf16-d128": 7, "fp16-mla": 6, "bf16-mla": 6,
        "all": 51,
    }  # fmt: skip
    for preset, count in counts.items():
        specs = preset_specs(preset)
        assert len(specs) == count
        assert [unsupported_reasons(spec) for spec in specs] == [[]] * count


@pytest.mark.parametrize(
    ("spec", "got", "expected"),
    [
        (KernelSpec("batch_decode", "float16", 128, archs="75"), "'75'", "8.0 (Ampere) or newer"),
        (KernelSpec("batch_decode", "float16", 128, archs="87"), "'87'", "80, 86, 89, 90, 90a"),
        (KernelSpec("batch_decode", "float16", 128, archs="hopper"), "'hopper'", "80, 86"),
        (KernelSpec("batch_decode", "float16", 128, archs=()), "no GPU", "80, 86"),
        (KernelSpec("batch_decode", "float32", 128), "float32", "float16 and bfloat16"),
        (KernelSpec("batch_decode", None, 128), "None", "float16 and bfloat16"),
        (KernelSpec("batch_decode", "float16", 96), "96", "64, 128, 256"),
        (KernelSpec("batch_decode", "float16", 128, 64), "64 for values", "equal ones"),
        (
            KernelSpec("batch_decode", "float16", 128, kv_dtype="float8_e4m3fn"),
            "float8_e4m3fn",
            "batch_attention has keys of 8 bits",
        ),
        (
            KernelSpec("batch_attention", "float16", 128, kv_dtype="bfloat16"),
            "bfloat16",
            "float8_e4m3fn and float8_e5m2",
        ),
        (KernelSpec("common", kv_dtype="float8_e5m2"), "no dtype", "leave it out"),
        (KernelSpec("batch_mla", "float16", 576, 576), "576 for values", "576 and 512"),
        (KernelSpec("batch_mla_sm90", "float16", 576, 512, ("80", "90a")), "80, 90a", "90a alone"),
        (KernelSpec("batch_prefill_paged_sm90", "float16", 64, archs=("90",)), "90", "90a alone"),
        (KernelSpec("single_decode", "float16", 128), "'single_decode'", "batch_decode"),
        (KernelSpec("common", "float16"), "no dtype", "leave it out"),
        (KernelSpec("common", None, 128), "no head_dim", "leave it out"),
        (KernelSpec("norm", "float16"), "'norm' has no dtype", "leave it out"),
    ],
)
def test_reasons_say_what_was_got_and_what_there_is(spec, got, expected):
    (reason,) = unsupported_reasons(spec)
    assert got in reason
    assert expected in reason


@pytest.mark.parametrize(
    ("archs", "hopper"), [("80", False), ("80,90", True), ("90a", True), ("100a", False)]
)
def test_units_for_hopper_stand_beside_the_others(archs, hopper):
    """Prefill and MLA have a kernel for Hopper, compiled as 90a however Hopper is spelt."""
    specs = attention_specs(["bfloat16"], [64], [archs])
    found = [spec.name for spec in specs if "sm90_" in spec.name]
    wanted = ["batch_prefill_paged_sm90", "batch_prefill_ragged_sm90"] if hopper else []
    assert found == [f"{kind}_bf16_d64_sm90a" for kind in wanted]
    assert [spec for spec in specs if unsupported_reasons(spec)] == []


def test_check_reports_each_reason_once():
    with pytest.raises(UnsupportedKernelError) as caught:
        check_supported(attention_specs(["float16"], [100], ["75"]))
    assert len(caught.value.reasons) == 2


def test_unknown_preset():
    with pytest.raises(UnsupportedKernelError, match="'llama'; there are common, ops, fp16-d128"):
        preset_specs("llama")


@pytest.mark.parametrize(
    ("capability", "arch"),
    [((8, 0), "80"), ((8, 6), "86"), ((8, 7), "80"), ((9, 0), "90a"), ((12, 0), "120"),
     ((7, 5), None), ((11, 0), None)],
)  # fmt: skip
def test_arch_for_capability(capability, arch):
    assert arch_for_capability(*capability) == arch
