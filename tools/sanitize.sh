#!/usr/bin/env bash
# Every CUDA kernel under compute-sanitizer: memory, races, reads of what nobody wrote, barriers. Needs a GPU.
#
# tools/sanitize.sh [PYTHON [WORD]], the word as in tools/sanitize.py
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${1:-python3}
for tool in memcheck racecheck initcheck synccheck; do
    echo "== $tool"
    # Libraries ask the driver for what it may not have, and go on: such refusals are no errors of ours.
    more=()
    [ "$tool" = memcheck ] && more=(--report-api-errors no)
    compute-sanitizer --tool "$tool" "${more[@]}" --error-exitcode 1 --kernel-name kns=kernel "$python" tools/sanitize.py "${@:2}"
done
