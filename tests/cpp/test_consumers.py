"""Programs in C++ that use the package: installed and as a subdirectory, static and shared."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tvm_flashinfer.kernels import paths

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "cpp"


def tool(name: str) -> str | None:
    """Return a program of this Python's environment, or one in PATH."""
    return shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)


pytestmark = pytest.mark.skipif(
    None in (tool("cmake"), tool("ninja"), shutil.which("c++")),
    reason="cmake, ninja and a C++ compiler build programs in C++",
)


def run(*command: str | Path, cwd: Path | None = None, environment: dict | None = None) -> str:
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=environment,
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def build(folder: Path, *options: str, source: Path = EXAMPLE, name="flashinfer_example") -> Path:
    """Build a program and return it."""
    command = [tool("cmake"), "-S", source, "-B", folder, "-G", "Ninja"]
    command += [f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}", f"-DPython_EXECUTABLE={sys.executable}"]
    run(*command, *options)
    run(tool("ninja"), "-C", folder)
    return folder / name


def errors(output: str) -> dict[str, float]:
    """Return the largest error of each part, which the program calls right."""
    found = re.findall(r"^(.*): largest error ([\d.]+), ok$", output, re.MULTILINE)
    return {name: float(error) for name, error in found}


def check(output: str) -> None:
    found = errors(output)
    assert set(found) == {"decode", "KV cache"}
    # Results of bfloat16 differ from those of float64: 0 would mean that nothing was compared.
    assert all(1e-4 < error < 0.03 for error in found.values()), found


@pytest.fixture(scope="module")
def package(tmp_path_factory) -> Path:
    """A copy of what an installed package holds, in another place: it may name no path of ours."""
    folder = tmp_path_factory.mktemp("moved") / "tvm_flashinfer"
    shutil.copytree(paths.cmake_dir(), folder / "cmake")
    include = paths.cmake_dir().parent / "include"
    shutil.copytree(include, folder / "include")
    (folder / "lib").mkdir()
    for library in (paths.native_library(), paths.static_library()):
        shutil.copy(library, folder / "lib")
    return folder


@pytest.fixture(scope="module")
def build_dir(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("build")


@pytest.mark.parametrize("shared", ["OFF", "ON"])
def test_find_package(shared: str, package: Path, build_dir: Path) -> None:
    program = build(
        build_dir / "package",
        f"-Dtvm_flashinfer_DIR={package}/cmake",
        f"-DFLASHINFER_SHARED={shared}",
    )
    check(run(program))
    needed = run("readelf", "-d", program)
    assert ("libtvm_flashinfer.so" in needed) == (shared == "ON")


def test_add_subdirectory(build_dir: Path) -> None:
    """Static, then shared. Without the kernels for AVX, which take the most time to compile."""
    options = [f"-DFLASHINFER_SOURCE_DIR={ROOT}"]
    options += [f"-DTVM_FLASHINFER_HAS_X86_64_{level}=OFF" for level in ("v3", "v4")]
    for shared in ("OFF", "ON"):
        program = build(build_dir / "source", *options, f"-DFLASHINFER_SHARED={shared}")
        check(run(program))


def test_without_flashinfer(build_dir: Path) -> None:
    program = build(build_dir / "off", "-DUSE_FLASHINFER=OFF")
    assert "USE_FLASHINFER=OFF; flashinfer.* not registered" in run(program)


def test_the_program_of_the_readme(package: Path, tmp_path: Path) -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for language, name in (("cmake", "CMakeLists.txt"), ("c++", "main.cc")):
        (code,) = re.findall(rf"^```{re.escape(language)}\n(.*?)^```$", text, re.M | re.S)
        (tmp_path / name).write_text(code, encoding="utf-8")
    option = f"-Dtvm_flashinfer_DIR={package}/cmake"
    program = build(tmp_path / "build", option, source=tmp_path, name="my_program")
    # Two states that are equal: the output stays, and log2(2) is added to the LSE.
    assert run(program) == "output 3.0, lse 2.0\n"


def test_wrong_arguments(package: Path, build_dir: Path) -> None:
    program = build(build_dir / "package", f"-Dtvm_flashinfer_DIR={package}/cmake")
    for arguments, message in ((["--device", "tpu"], "usage: "), (["--kernels"], "usage: ")):
        done = subprocess.run([program, *arguments], capture_output=True, text=True, check=False)
        assert done.returncode == 2
        assert message in done.stderr


def test_package_without_its_library_is_not_found(package: Path, tmp_path: Path) -> None:
    shutil.copytree(package / "cmake", tmp_path / "package" / "cmake")
    (tmp_path / "package" / "lib").mkdir()
    (tmp_path / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.20)\nproject(p LANGUAGES CXX)\n"
        "find_package(tvm_flashinfer CONFIG REQUIRED)\n"
    )
    done = subprocess.run(
        [tool("cmake"), "-S", tmp_path, "-B", tmp_path / "build",
         f"-Dtvm_flashinfer_DIR={tmp_path}/package/cmake", f"-DPython_EXECUTABLE={sys.executable}"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode != 0
    assert "libflashinfer_tvm.a is missing" in " ".join(done.stderr.split())


def test_prebuilt_kernels_are_named(package: Path, tmp_path: Path) -> None:
    moved = tmp_path / "package"
    shutil.copytree(package, moved)
    library = moved / "lib" / "kernels" / "prebuilt" / "libtvm_flashinfer_kernels.so"
    (tmp_path / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.20)\nproject(p LANGUAGES CXX)\n"
        'find_package(tvm_flashinfer CONFIG REQUIRED)\nmessage("is ${tvm_flashinfer_KERNELS}.")\n'
    )
    command = [tool("cmake"), "-S", tmp_path, "-B", tmp_path / "build"]
    command += [f"-Dtvm_flashinfer_DIR={moved}/cmake", f"-DPython_EXECUTABLE={sys.executable}"]
    command = [str(part) for part in command]
    for expected in ("tvm_flashinfer_KERNELS-NOTFOUND", str(library)):
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert f"is {expected}.\n" in done.stderr
        library.parent.mkdir(parents=True, exist_ok=True)
        library.touch()


IN_TVM = """
cmake_minimum_required(VERSION 3.20)
project(tvm LANGUAGES CXX)
option(USE_FLASHINFER "FlashInfer's kernels" ON)
# As 3rdparty/tvm-ffi defines it there.
add_library(tvm_ffi_shared SHARED IMPORTED GLOBAL)
set_target_properties(
    tvm_ffi_shared PROPERTIES IMPORTED_LOCATION "${FFI_LIBRARY}"
    INTERFACE_INCLUDE_DIRECTORIES "${FFI_INCLUDE}"
)
file(WRITE runtime.cc "int runtime() { return 0; }")
add_library(tvm_runtime SHARED runtime.cc)
target_link_libraries(tvm_runtime PRIVATE tvm_ffi_shared)
if(USE_FLASHINFER)
    find_package(tvm_flashinfer CONFIG REQUIRED)
    target_link_libraries(tvm_runtime PRIVATE flashinfer_tvm)
endif()
"""

LOAD_RUNTIME = """
import ctypes, sys, tvm_ffi
ctypes.CDLL(sys.argv[1])
print(tvm_ffi.get_global_func("flashinfer.merge_state", allow_missing=True) is not None)
"""


@pytest.mark.parametrize("use", ["ON", "OFF"])
def test_inside_of_a_runtime(use: str, package: Path, tmp_path: Path) -> None:
    """A shared library takes the archive in, as TVM's runtime would, with TVM's own tvm-ffi."""
    import tvm_ffi.libinfo as ffi

    (tmp_path / "CMakeLists.txt").write_text(IN_TVM)
    folders = f"{ffi.find_include_path()};{ffi.find_dlpack_include_path()}"
    options = [f"-DFFI_LIBRARY={ffi.find_libtvm_ffi()}", f"-DFFI_INCLUDE={folders}"]
    options += [f"-Dtvm_flashinfer_DIR={package}/cmake", f"-DUSE_FLASHINFER={use}"]
    library = build(tmp_path / "build", *options, source=tmp_path, name="libtvm_runtime.so")
    assert run(sys.executable, "-c", LOAD_RUNTIME, library, cwd=tmp_path, environment={
        **os.environ, "PYTHONPATH": "",
    }).strip() == str(use == "ON")  # fmt: skip


def test_config_names_no_path_of_the_machine() -> None:
    for path in paths.cmake_dir().glob("*.cmake"):
        assert not re.search(r'["\s](/[a-z]|[A-Z]:)', path.read_text(encoding="utf-8")), path


def _outside(*arguments: str, cwd: Path) -> str:
    """Run Python where the checkout is not on the path, so that the installed package answers."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    return run(sys.executable, *arguments, cwd=cwd, environment=environment).strip()


def test_cmake_dir(tmp_path: Path) -> None:
    """`--cmake-dir` prints the folder that holds the config, of the installed package if any."""
    assert run(sys.executable, "-m", "tvm_flashinfer", "--cmake-dir", cwd=ROOT).strip() == str(
        ROOT / "cmake"
    )
    try:
        importlib.metadata.distribution("tvm-flashinfer")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("tvm-flashinfer runs from the checkout; it is not installed")
    installed = Path(_outside("-m", "tvm_flashinfer", "--cmake-dir", cwd=tmp_path))
    if installed.is_relative_to(ROOT) and not installed.parent.name == "tvm_flashinfer":
        pytest.skip("the checkout itself is installed")
    names = {path.name for path in installed.iterdir()}
    assert {"tvm_flashinfer-config.cmake", "tvm_flashinfer-config-version.cmake"} <= names
    assert (installed.parent / "include" / "tvm_flashinfer" / "functions.h").is_file()
    program = build(tmp_path / "build", f"-Dtvm_flashinfer_DIR={installed}")
    check(run(program))


@pytest.mark.cuda
def test_on_a_gpu(cuda, build_dir: Path) -> None:
    """With kernels compiled for this GPU, as `tvm-flashinfer build` does."""
    from tvm_flashinfer.kernels import attention_specs, build_library, device_arch
    from tvm_flashinfer.kernels.toolchain import find_nvcc

    library = build_library(attention_specs(["bfloat16"], [64], [device_arch(0)]))
    program = build(build_dir / "package", f"-Dtvm_flashinfer_DIR={paths.cmake_dir()}")
    nvcc = find_nvcc()
    # TVM's runtime for CUDA needs libcudart.so.
    folders = [str(nvcc.cudart_static.parent)] if nvcc and nvcc.cudart_static else []
    folders += filter(None, [os.environ.get("LD_LIBRARY_PATH")])
    environment = {**os.environ, "LD_LIBRARY_PATH": os.pathsep.join(folders)}
    arguments = ("--device", "cuda", "--kernels", library)
    check(run(program, *arguments, environment=environment))
