#!/usr/bin/env bash
# Run small problems of every operator, and tests, as NEON code on an emulated arm64 machine.
#
# tools/arm64_check.sh [ROOT]     (default ROOT: build/arm64, made when it is not there; about 400 MB)
#
# Needs Debian or Ubuntu, root, and the packages debootstrap and qemu-user-static. The root is filled without its second
# stage, which would need binfmt: packages are unpacked, and Python is run by name under the emulator. There is one
# process only, so tests that start others are left out.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
root=${1:-build/arm64}
python=3.11 # Debian bookworm's

for tool in debootstrap qemu-aarch64-static dpkg; do
    command -v "$tool" >/dev/null || {
        echo "arm64_check: $tool is missing; apt-get install debootstrap qemu-user-static" >&2
        exit 1
    }
done

if [ ! -e "$root/.made" ]; then
    mkdir -p "$root"
    # libgomp1: the threads of Numba's omp layer.
    debootstrap --foreign --arch=arm64 --variant=minbase --include=python3,libgomp1 bookworm "$root"
    for package in "$root"/var/cache/apt/archives/*.deb; do
        dpkg -x "$package" "$root"
    done
    cp "$(command -v qemu-aarch64-static)" "$root/usr/bin/"
    "${PYTHON:-python3}" -m pip install --quiet --disable-pip-version-check --target "$root/opt/packages" \
        --python-version "$python" --implementation cp --only-binary=:all: \
        --platform manylinux_2_28_aarch64 --platform manylinux_2_27_aarch64 --platform manylinux_2_17_aarch64 \
        --platform manylinux2014_aarch64 \
        array-api-compat filelock hypothesis llvmlite ml_dtypes numba numpy platformdirs pytest rich typer
    touch "$root/.made"
fi

rm -rf "$root/tapwise"
mkdir -p "$root/tapwise" "$root/tmp" "$root/proc"
: >"$root/proc/cpuinfo" # numba asks for it
cp -r src tests tools pyproject.toml "$root/tapwise/"


# env cannot start Python, as there is no binfmt: the variables are given to the emulator instead.
python() {
    chroot "$root" /usr/bin/qemu-aarch64-static -E PYTHONPATH=/opt/packages:/tapwise/src -E HOME=/tmp -E COLUMNS=100 \
        -E LC_ALL=C.UTF-8 -E TAPWISE_CACHE_DIR=/tmp/tapwise-cache -E TAPWISE_NUM_THREADS=2 \
        /usr/bin/python3 "$@"
}

python -c "import platform, numpy, numba; print(platform.machine(), 'Python', platform.python_version(), 'NumPy', numpy.__version__, 'Numba', numba.__version__)"
echo "== instructions"
python /tapwise/tools/neon_instructions.py
echo "== every algorithm on small problems of every operator"
python -m tapwise verify small
echo "== tests"
# PyTorch is not there, and a folder of its name would hide that.
rm -r "$root/tapwise/tests/torch"
python -m pytest -q -p no:cacheprovider -c /tapwise/pyproject.toml --rootdir /tapwise \
    /tapwise/tests/cpu/test_simd.py /tapwise/tests/ops/patches/test_patches.py /tapwise/tests/ops/pool/test_pool.py \
    /tapwise/tests/ops/reduce/test_reduce.py /tapwise/tests/ops/softmax/test_softmax.py /tapwise/tests/test_algorithms.py
