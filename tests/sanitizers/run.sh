#!/usr/bin/env bash
# The native tests, then tests of the ops under pytest, with a library that has sanitizers built in:
#
#   tests/sanitizers/run.sh address,undefined [what pytest takes; none: the native tests alone]
#   tests/sanitizers/run.sh thread tests/ops/test_threads.py
#
# PYTHON names the Python with tvm-ffi, pytest, cmake and ninja.
set -euo pipefail
cd "$(dirname "$0")/../.."
sanitizers=$1
shift
python=$(command -v "${PYTHON:-python3}")
tools=$(dirname "$python")
build=$PWD/build/sanitize-${sanitizers%%,*}
suppressions=$PWD/tests/sanitizers

"$tools/cmake" -S . -B "$build" -G Ninja -DCMAKE_MAKE_PROGRAM="$tools/ninja" \
  -DPython_EXECUTABLE="$python" -DCMAKE_INSTALL_PREFIX="$build/site" \
  -DTVM_FLASHINFER_SANITIZE="$sanitizers" -DTVM_FLASHINFER_BUILD_TESTS=ON
"$tools/cmake" --build "$build"

# Exit statuses make a test fail that catches errors, or a child process that nobody asks.
export UBSAN_OPTIONS=print_stacktrace=1
export TSAN_OPTIONS=suppressions=$suppressions/tsan.txt:exitcode=66
export ASAN_OPTIONS=detect_stack_use_after_return=1
"$tools/ctest" --test-dir "$build" --label-regex cpu --output-on-failure
[ $# -gt 0 ] || exit 0

# Python is not built with sanitizers, so it must be started with their library. It keeps memory to its
# end, and so do the stacks that lead to ours: leaks are looked for in the native tests.
library=libasan.so
[ "$sanitizers" = thread ] && library=libtsan.so
"$tools/cmake" --install "$build" > "$build/install.log"
tar -c --exclude=lib tvm_flashinfer | tar -x -C "$build/site"
export ASAN_OPTIONS=$ASAN_OPTIONS:detect_leaks=0
export TSAN_OPTIONS=$TSAN_OPTIONS:ignore_noninstrumented_modules=1
export PYTHONPATH=$build/site
export LD_PRELOAD="$(g++ -print-file-name=$library) $(g++ -print-file-name=libstdc++.so)"
# Not `python -m pytest`, which would find the package of the checkout first.
exec "$python" "$tools/pytest" -m "not cuda" -p no:cacheprovider "$@"
