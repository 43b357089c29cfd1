#!/usr/bin/env bash
# Runs TVM's own tests of its paged KV cache on the functions of this package: every cache that they
# make has ours in each slot, and a test that calls none of them fails.
# Usage: run.sh TESTS [pytest arguments]
#   TESTS  tests/python/relax of a TVM checkout, of the version that Python imports
# SUITES names the files, of "cpu tir flashinfer mla_flashinfer mla_tir"; all but the first need a
# GPU. tvm_suites_plugin.py says what else the environment may set.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
tests=$(cd "$1" && pwd)
shift
files=()
for suite in ${SUITES:-cpu tir flashinfer mla_flashinfer mla_tir}; do
  files+=("$tests/test_runtime_builtin_paged_attention_kv_cache_$suite.py")
done
export PYTHONPATH="$here:$here/../..${PYTHONPATH:+:$PYTHONPATH}"
cd "$here"
exec "${PYTHON:-python3}" -m pytest -p tvm_suites_plugin -p no:cacheprovider --rootdir="$here" \
  --import-mode=importlib -W ignore::pytest.PytestUnknownMarkWarning -q --tb=short -ra "$@" "${files[@]}"
