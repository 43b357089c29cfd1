"""A CUDA compiler that is a shell script, and what tests ask of a build."""

from __future__ import annotations

import os
from pathlib import Path

# Compiles with g++ and writes a line for each compilation to $FAKE_NVCC_LOG, so that tests need no
# CUDA and can count.
FAKE_NVCC = r"""#!/bin/sh
case "$1" in
  --version) echo "Cuda compilation tools, release 12.8, V${FAKE_NVCC_VERSION:-12.8.93}"; exit 0 ;;
  --list-gpu-code) printf 'sm_80\nsm_90\n'; exit 0 ;;
  --help) echo "--static-global-template-stub {true|false}"; exit 0 ;;
  --dryrun) exit 0 ;;
esac
source= output= defines=
while [ $# -gt 0 ]; do
  case "$1" in
    -c) source=$2; shift ;;
    -o) output=$2; shift ;;
    -D*DTYPE*|-D*DIM*|-D*ARCHS*) defines="$defines '$1'" ;;
  esac
  shift
done
echo "$source" >> "${FAKE_NVCC_LOG:-/dev/null}"
: > scratch.ii
sleep "${FAKE_NVCC_SECONDS:-0}"
eval "exec g++ -fPIC -x c++ $defines -c '$source' -o '$output'"
"""


def compilations(log: Path) -> list[str]:
    """Return the sources that the fake nvcc compiled."""
    return [os.path.basename(line) for line in log.read_text().split()] if log.exists() else []


def files_below(folder: Path) -> list[str]:
    """Return the files below a folder, locks aside."""
    paths = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return sorted(str(path) for path in paths if path.parts[0] != "locks")
