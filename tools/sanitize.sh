#!/usr/bin/env bash
# Every CUDA kernel under compute-sanitizer: memory, races, reads of what nobody wrote, barriers. Needs a GPU.
#
# tools/sanitize.sh [PYTHON [WORD]], the word as in tools/sanitize.py; TOOLS and PARTS, processes of each, by environment
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${1:-python3} parts=${PARTS:-4}
"$python" tools/sanitize.py "${@:2}" --compile
for tool in ${TOOLS:-memcheck racecheck initcheck synccheck}; do
    # Libraries ask the driver for what it may not have, and go on: such refusals are no errors of ours.
    more=()
    [ "$tool" = memcheck ] && more=(--report-api-errors no)
    running=()
    for part in $(seq 0 $((parts - 1))); do
        compute-sanitizer --tool "$tool" "${more[@]}" --error-exitcode 1 --kernel-name kns=kernel \
            "$python" tools/sanitize.py "${@:2}" --part "$part/$parts" 2>&1 | sed "s/^/$tool $part: /" &
        running+=($!)
    done
    for one in "${running[@]}"; do wait "$one"; done
done
