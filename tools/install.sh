#!/usr/bin/env bash
# Installs this package with some of its extras, in the pinned versions; Dockerfile.triton runs it.
# Usage: [PYTHON=python3] tools/install.sh EXTRA[,EXTRA...], for example `serving` for the Python inside tritonserver.
# PYTHON must then match the server's stub: in an NGC image it is python3.
set -euo pipefail

extras=${1:?usage: tools/install.sh EXTRA[,EXTRA...]}
root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-python3}

"$python" -m pip --version >/dev/null || { echo "error: $python has no pip: set PYTHON to one that has pip" >&2; exit 1; }
# setuptools builds inside the source tree, and would also install what an older build/lib contains. Other tools keep
# in build/ what took them minutes.
trap 'rm -rf -- "$root"/build/lib "$root"/build/bdist.*' EXIT
rm -rf -- "$root/build/lib"
"$python" -m pip install --no-cache-dir --constraint "$root/constraints.txt" "${root}[$extras]"
# Run from another folder, so that the installed package is imported and not the source tree.
cd / && "$python" -c '
import numpy, safetensors, tokenizers, torch, transformers, rlhf_triton.wire.contract
print(*(f"{m.__name__} {m.__version__}" for m in (numpy, safetensors, tokenizers, torch, transformers)), sep=", ")
print("torch is built for CUDA", torch.version.cuda)
'
