"""Which kernel plans choose, by the rules and by files of tuning. Questions need no GPU."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tuning_texts import A100, H200, HEAD_DIM, HEADS, entry, text_of

import tvm_flashinfer
from tvm_flashinfer import clear_tuning, kernel_choice, load_tuning, tuning_files
from tvm_flashinfer.kernels.headers import FLASHINFER_VERSION
from tvm_flashinfer.tuning import measured_archs, never_measured

L4 = ("NVIDIA L4", 89, 58)


@pytest.fixture(autouse=True)
def without_tuning(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("TVM_FLASHINFER_PREFILL_KERNEL", raising=False)
    clear_tuning()
    yield
    clear_tuning()


@pytest.fixture
def use(tmp_path: Path) -> Any:
    """Writes a file of tuning and uses it."""

    def write(*entries: Any, **changes: Any) -> Path:
        path = tmp_path / "tuning.json"
        path.write_text(text_of(*entries, **changes))
        load_tuning(path)
        return path

    return write


def decode(batch: int, keys: int, gpu: Any = H200, **changes: Any) -> dict[str, Any]:
    return kernel_choice("decode_paged", *HEADS, HEAD_DIM, [keys] * batch, gpu=gpu, **changes)


def prefill(rows: int, gpu: Any = H200, keys: int | None = None, **changes: Any) -> dict[str, Any]:
    lens = [keys or rows] * 4, [rows] * 4
    arguments: dict[str, Any] = {"causal": True, **changes}
    return kernel_choice("prefill_ragged", *HEADS, HEAD_DIM, *lens, gpu=gpu, **arguments)


@pytest.mark.parametrize("gpu", [H200, A100, L4], ids=lambda gpu: gpu[0])
@pytest.mark.parametrize(
    ("heads", "kernel"),
    [((32, 32), "cuda_core"), ((16, 8), "cuda_core"), ((9, 3), "cuda_core"), ((32, 8), "fa2"),
     ((64, 8), "fa2"), ((71, 1), "fa2")],
    ids=str,
)  # fmt: skip
def test_rule_of_decode(gpu, heads, kernel):
    """Tensor cores from four query heads per KV head on, on every architecture."""
    choice = kernel_choice("decode_paged", *heads, 128, [4096] * 8, gpu=gpu)
    assert (choice["kernel"], choice["source"], choice["split_keys"]) == (kernel, "default", 0)
    assert "per KV head" in choice["reason"]


@pytest.mark.parametrize(
    ("gpu", "rows", "kernel"),
    [(H200, 4096, "fa3"), (H200, 1, "fa2"), (A100, 4096, "fa2"), (L4, 4096, "fa2")],
    ids=str,
)
def test_rule_of_prefill(gpu, rows, kernel):
    choice = prefill(rows, gpu)
    assert (choice["kernel"], choice["source"]) == (kernel, "default")


@pytest.mark.parametrize(("rows", "kernel"), [(4096, "fa3_copy"), (128, "fa3")], ids=str)
def test_rule_of_pages(rows, kernel):
    """Pages of long prompts are copied, so that FA3 has ragged keys."""
    lens = [rows] * 4
    choice = kernel_choice("prefill_paged", 32, 8, 128, lens, lens, causal=True, gpu=H200)
    assert (choice["kernel"], choice["source"]) == (kernel, "default")


@pytest.mark.parametrize(("gpu", "kernel"), [(H200, "sm90"), (A100, "fa2"), (L4, "fa2")], ids=str)
def test_rule_of_latent_attention(gpu, kernel):
    assert kernel_choice("mla", 128, 1, 512, [4096] * 8, gpu=gpu)["kernel"] == kernel


def test_rows_before_keys_have_one_kernel(use):
    """Also where a file says otherwise."""
    assert prefill(100, A100, keys=40)["kernel"] == "batch_attention"
    use(entry("prefill_ragged", "fa2", causal=True, batch=4, rows=128, keys=64))
    choice = prefill(100, keys=40)
    assert choice["kernel"] == "batch_attention"
    assert "more rows than keys" in choice["reason"]


def test_architectures_that_were_never_measured_say_so():
    assert decode(8, 1024)["measured"]
    assert "never measured" not in decode(8, 1024)["line"]
    for gpu in (A100, L4):
        choice = decode(8, 1024, gpu)
        assert not choice["measured"]
        assert f"sm_{gpu[1]} was never measured, the rule is that of sm_90" in choice["line"]
    assert measured_archs() == ("90",)
    assert never_measured(["90", "90a"]) is None
    assert "measured on sm_80, sm_89: the rules" in never_measured(["80", "90a", "89", "80"])


def test_line_says_all():
    """What is printed for a choice: the kernel, why, and the class of shapes that it holds for."""
    assert decode(40, 3000)["line"] == (
        "decode_paged on NVIDIA H200 (sm_90, 132 SMs): fa2, default: 4 query heads per KV head "
        "fill the rows of tensor-core tiles; heads 32/8, head_dim 128, batch <= 64, rows <= 1, "
        "keys <= 4096"
    )


def test_file_changes_the_choice(use):
    path = use(entry(kernel="cuda_core"))
    choice = decode(64, 4096)
    assert (choice["kernel"], choice["source"]) == ("cuda_core", "tuned")
    [file] = tuning_files()
    assert file["source"] == str(path)
    assert file["entries"] == 1
    assert re.fullmatch("[0-9a-f]{16}", file["digest"])
    assert f"the fastest by {path}, {file['digest']}" in choice["reason"]
    clear_tuning()
    assert tuning_files() == []
    assert decode(64, 4096)["source"] == "default"


def test_chunks_of_keys(use):
    use(entry(kernel="fa2", split_keys=512))
    choice = decode(64, 4096)
    assert (choice["kernel"], choice["split_keys"]) == ("fa2", 512)
    assert "fa2 in chunks of 512 keys, tuned" in choice["line"]


@pytest.mark.parametrize(
    ("batch", "keys", "found"),
    [(64, 4096, True), (33, 2049, True), (65, 4096, False), (32, 4096, False), (64, 4097, False),
     (64, 2048, False)],
)  # fmt: skip
def test_entries_hold_down_to_the_next_power_of_two(use, batch, keys, found):
    path = use(entry())
    choice = decode(batch, keys)
    assert choice["source"] == ("tuned" if found else "default")
    assert (f"{path} has nothing for this shape" in choice["reason"]) == (not found)


def test_lengths_count_by_their_mean(use):
    use(entry(batch=4, keys=1024))
    lens = [4, 12, 4000, 80]
    assert kernel_choice("decode_paged", *HEADS, 128, lens, gpu=H200)["source"] == "tuned"


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"gpu": ("NVIDIA H200 NVL", 90, 132)}, "another GPU"),
        ({"gpu": ("NVIDIA H200", 90, 66)}, "a part of the GPU"),
        ({"window_left": 1023}, "a window"),
        ({"slot": "prefill_paged"}, "another slot"),
        ({"heads": (16, 4)}, "a shard of the heads"),
        ({"head_dim": 64}, "another head dimension"),
    ],
    ids=str,
)
def test_other_shapes_go_by_the_rules(use, changes, what):
    use(entry())
    changes = {"slot": "decode_paged", "heads": HEADS, "head_dim": 128, "gpu": H200, **changes}
    slot, heads, head_dim = (changes.pop(name) for name in ("slot", "heads", "head_dim"))
    choice = kernel_choice(slot, *heads, head_dim, [4096] * 64, **changes)
    assert choice["source"] == "default", what


def test_causal_matters_for_more_rows_than_one(use):
    use(
        entry("prefill_paged", causal=True),
        entry("prefill_paged", "fa3", causal=True, rows=512),
    )
    ask = lambda rows, causal: kernel_choice(  # noqa: E731
        "prefill_paged", *HEADS, HEAD_DIM, [4096] * 64, [rows] * 64, causal=causal, gpu=H200
    )
    assert [ask(1, causal)["kernel"] for causal in (False, True)] == ["batch_attention"] * 2
    assert ask(512, True)["source"] == "tuned"
    assert ask(512, False)["source"] == "default"


def test_environment_goes_before_files(use, monkeypatch):
    use(entry("prefill_ragged", "batch_attention", causal=True, batch=4, rows=4096))
    assert prefill(4096)["kernel"] == "batch_attention"
    monkeypatch.setenv("TVM_FLASHINFER_PREFILL_KERNEL", "fa2")
    choice = prefill(4096)
    assert (choice["kernel"], choice["source"]) == ("fa2", "environment")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"slot": "tree_paged"}, r"`slot` is \"tree_paged\", expected one of decode_paged, pre"),
        ({"qo_lens": [1]}, "`qo_lens` has 1 requests, `kv_lens` has 2"),
        ({"kv_lens": [-1, 1]}, "`kv_lens` has a length of -1"),
        ({"kv_lens": [2**31 - 1, 1]}, r"less than 2\^31"),
        ({"num_kv_heads": 0}, "`num_kv_heads` is 0"),
        ({"num_kv_heads": 5}, "5"),
        ({"gpu": ("H200", 9, 132)}, "`arch` is 9, expected a 32-bit number from 10 on"),
    ],
    ids=str,
)
def test_questions_that_make_no_sense(changes, message):
    arguments: dict[str, Any] = {
        "slot": "decode_paged", "num_qo_heads": 32, "num_kv_heads": 8, "head_dim": 128,
        "kv_lens": [10, 10], "gpu": H200,
    }  # fmt: skip
    with pytest.raises(ValueError, match=message):
        kernel_choice(**{**arguments, **changes})


def test_versions_of_the_native_library():
    """Files are compared with what the library was built as."""
    text = (Path(__file__).parents[2] / "csrc/ops/versions.h").read_text()
    assert f'kVersion = "{tvm_flashinfer.__version__}"' in text
    assert f'kFlashInferVersion = "{FLASHINFER_VERSION}"' in text


def test_batches_of_nothing(use):
    use(entry())
    for slot in ("decode_paged", "prefill_paged", "prefill_ragged", "mla"):
        heads = (32, 1) if slot == "mla" else HEADS
        assert kernel_choice(slot, *heads, 128, [], gpu=H200)["source"] == "default"
        assert kernel_choice(slot, *heads, 128, [0, 0], [0, 0], gpu=H200)["source"] == "default"
