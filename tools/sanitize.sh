#!/usr/bin/env bash
# Every CUDA kernel under compute-sanitizer: memory, races, reads of what nobody wrote, barriers. Needs a GPU.
#
# tools/sanitize.sh [PYTHON]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${1:-python3}
export PYTORCH_NO_CUDA_MEMORY_CACHING=1 # so that one tensor's memory is not within another's
for tool in memcheck racecheck initcheck synccheck; do
    echo "== $tool"
    # Libraries ask the driver for what it may not have, and go on: such refusals are no errors of ours.
    more=()
    [ "$tool" = memcheck ] && more=(--report-api-errors no)
    compute-sanitizer --tool "$tool" "${more[@]}" --error-exitcode 1 --kernel-name kns=kernel \
        "$python" -m pytest -q -m cuda tests/test_cuda_gpu.py -k "convolution or patches" -p no:cacheprovider
done
