"""The cache: one build for many processes, and nothing half-built or damaged is ever used."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest
from build_sandbox import files_below

from tvm_flashinfer.kernels import CacheError, KernelCache
from tvm_flashinfer.kernels.cache import default_cache_dir

KEY = "0" * 64


def write(text):
    return lambda path: path.write_text(text)


def get(cache, text="built", key=KEY):
    return cache.get_or_build("objects", "unit", key, ".o", write(text))


def test_builds_once(cache_dir):
    path, built = get(KernelCache())
    assert built
    assert path.read_text() == "built"
    assert path.parent == cache_dir / "objects"
    assert get(KernelCache(), "again") == (path, False)
    assert get(KernelCache(), "other", "1" * 64)[1]
    assert (cache_dir.stat().st_mode & 0o777) == 0o700


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_text("wrong"),
        lambda path: path.write_text("built and more"),
        lambda path: path.unlink(),
        lambda path: path.with_name(path.name + ".json").write_text("{"),
        lambda path: path.with_name(path.name + ".json").unlink(),
    ],
    ids=["changed", "longer", "gone", "bad manifest", "no manifest"],
)
def test_damaged_entries_are_built_anew(cache_dir, damage):
    path, _ = get(KernelCache())
    damage(path)
    assert KernelCache().lookup("objects", "unit", KEY, ".o") is None
    assert get(KernelCache()) == (path, True)
    assert path.read_text() == "built"


def test_failed_build_leaves_nothing(cache_dir):
    def fail(path):
        path.write_text("half")
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        KernelCache().get_or_build("objects", "unit", KEY, ".o", fail)
    assert files_below(cache_dir) == []
    assert get(KernelCache())[1]


BUILDER = """
import sys, time
from tvm_flashinfer.kernels import KernelCache

def build(path):
    path.write_text("half")
    print("building", flush=True)
    time.sleep(float(sys.argv[1]))
    path.write_text("built")

print(KernelCache().get_or_build("objects", "unit", "0" * 64, ".o", build, print)[1], flush=True)
"""


def start_builder(seconds):
    return subprocess.Popen(
        [sys.executable, "-c", BUILDER, str(seconds)], stdout=subprocess.PIPE, text=True
    )


def test_two_processes_build_once(cache_dir):
    builders = [start_builder(0.5) for _ in range(2)]
    outputs = [builder.communicate(timeout=60)[0].split("\n") for builder in builders]
    assert sorted(output[-2] for output in outputs) == ["False", "True"]
    assert sum("building" in output for output in outputs) == 1


def test_killed_builder(cache_dir):
    builder = start_builder(60)
    assert builder.stdout.readline() == "building\n"
    os.kill(builder.pid, signal.SIGKILL)
    builder.communicate()
    assert KernelCache().lookup("objects", "unit", KEY, ".o") is None
    start = time.monotonic()
    path, built = get(KernelCache())
    assert built
    assert path.read_text() == "built"
    assert time.monotonic() - start < 10  # its lock went with it
    (left,) = (cache_dir / "tmp").iterdir()
    os.utime(left, (0, 0))
    get(KernelCache(), key="1" * 64)
    assert not left.exists()


def test_unwritable_folder_names_the_variable(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TVM_FLASHINFER_CACHE_DIR", str(tmp_path / "file" / "cache"))
    with pytest.raises(CacheError, match="Set TVM_FLASHINFER_CACHE_DIR to a folder"):
        get(KernelCache())
    monkeypatch.setenv("TVM_FLASHINFER_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(CacheError, match="is not a folder; set TVM_FLASHINFER_CACHE_DIR"):
        KernelCache()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_read_only_folder_serves_what_it_has(cache_dir):
    path, _ = get(KernelCache())
    for folder in (path.parent, cache_dir / "locks", cache_dir / "tmp", cache_dir):
        folder.chmod(0o500)
    try:
        assert get(KernelCache()) == (path, False)
        with pytest.raises(CacheError, match="TVM_FLASHINFER_CACHE_DIR"):
            get(KernelCache(), key="1" * 64)
    finally:
        for folder in (cache_dir, path.parent, cache_dir / "locks", cache_dir / "tmp"):
            folder.chmod(0o700)


def test_folder_that_anyone_may_write_is_refused(cache_dir):
    cache_dir.mkdir()
    cache_dir.chmod(0o777)
    with pytest.raises(CacheError, match=r"anyone may write .* \(mode 777\).*chmod 700"):
        KernelCache()


def test_folder_inside_that_anyone_may_write_is_refused(cache_dir):
    path, _ = get(KernelCache())
    path.parent.chmod(0o777)
    with pytest.raises(CacheError, match=rf"anyone may write .*{path.parent} \(mode 777\)"):
        get(KernelCache())


def test_folder_inside_of_another_user_is_refused(cache_dir):
    if os.geteuid() != 0:
        pytest.skip("only root may give folders away")
    path, _ = get(KernelCache())
    os.chown(path.parent, 12345, -1)
    with pytest.raises(CacheError, match=rf"{path.parent}, belongs to user 12345"):
        KernelCache()


def test_folder_of_another_user_is_refused(cache_dir, monkeypatch):
    cache_dir.mkdir()
    owner = cache_dir.stat().st_uid
    if owner == 0:
        owner = 12345
        os.chown(cache_dir, owner, -1)
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with pytest.raises(CacheError, match=f"belongs to user {owner} and this process"):
        KernelCache()


def test_default_folder(monkeypatch, tmp_path):
    monkeypatch.delenv("TVM_FLASHINFER_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache_dir() == tmp_path / "tvm_flashinfer"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # which the standard says to ignore
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert default_cache_dir() == tmp_path / "home" / ".cache" / "tvm_flashinfer"


def test_prune(cache_dir):
    cache = KernelCache()
    old, _ = get(cache)
    new, _ = get(cache, "longer", "1" * 64)
    week = time.time() - 7 * 24 * 3600
    os.utime(old.with_name(old.name + ".json"), (week, week))
    assert cache.prune(older_than_days=6) == (1, len("built"))
    assert [entry.path for entry in cache.entries()] == [new]
    assert cache.prune() == (1, len("longer"))
    assert files_below(cache_dir) == []


def test_being_asked_for_keeps_an_entry(cache_dir):
    path, _ = get(KernelCache())
    manifest = path.with_name(path.name + ".json")
    os.utime(manifest, (0, 0))
    get(KernelCache())
    assert KernelCache().prune(older_than_days=1) == (0, 0)


def test_prune_of_a_folder_that_is_not_there(cache_dir):
    assert KernelCache().prune() == (0, 0)
    assert not cache_dir.exists()
