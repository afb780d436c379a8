"""Layers like those of networks, drawn at random: what cost models are fitted to, and what judges them.

    draw.py --seed 7 --count 200 > layers.txt
    configs.py cuda.implicit_gemm layers.txt --words "f16 nhwc" --json times.json

A line is a problem's words as configs.py takes them, images among them, without dtype and memory order. Half have 32
images. `--depthwise`: of those, else of dense and grouped ones. Keep a second draw, and look at it once.
"""

from __future__ import annotations

import argparse
import random
from typing import Final

from tapwise import registry
from tapwise.errors import InvalidProblem

# Sizes of images, channels and images at a time, as networks have them; those come twice that are met more often.
SIZES: Final = (
    7, 7, 7, 8, 10, 12, 13, 14, 14, 14, 15, 16, 17, 19, 20, 24, 26, 28, 28, 30, 32, 35, 38, 40, 48, 56, 56, 60, 64, 75,
    80, 96, 112, 120, 128, 160,
)  # fmt: skip
CHANNELS: Final = (
    16, 24, 32, 32, 40, 48, 56, 64, 64, 64, 72, 80, 88, 96, 96, 104, 112, 120, 128, 128, 128, 144, 152, 160, 160, 176,
    184, 192, 192, 208, 224, 232, 240, 256, 256, 256, 272, 288, 304, 320, 320, 336, 352, 384, 384, 416, 432, 448, 480,
    512, 512, 576, 608, 640, 672, 704, 728, 768, 832, 896, 960, 1024, 1056, 1152, 1184, 1280, 1392, 1536, 1632, 2048,
    2208,
)  # fmt: skip
ODD: Final = (18, 20, 28, 36, 44, 52, 60, 68, 76, 90, 100, 108, 116, 166, 228, 340)
IMAGES: Final = {1: 12, 2: 3, 4: 5, 8: 8, 16: 8, 32: 52, 64: 12}
EPILOGUES: Final = {"": 74, "bias relu": 15, "bias silu": 5, "bias relu residual": 6}
# Windows with what is around them, and how often they come.
WINDOWS: Final = {
    "r1 s1": 40, "r3 s3 pad1": 28, "r3 s3 stride2 pad1": 8, "r1 s1 stride2": 3, "r1 s7 pad0x3": 2, "r7 s1 pad3x0": 1,
    "r1 s3 pad0x1": 2, "r5 s5 pad2": 3, "r3 s3 pad2 dilation2": 3, "r3 s3 pad6 dilation6": 1, "r2 s2 stride2": 2,
}  # fmt: skip
DEPTHWISE: Final = {
    "r3 s3 pad1": 2, "r5 s5 pad2": 2, "r7 s7 pad3": 1, "r3 s3 stride2 pad1": 1, "r5 s5 stride2 pad2": 1,
    "r1 s7 pad0x3": 1, "r9 s1 pad4x0": 1,
}  # fmt: skip
# Groups of channels, a tenth of all; channels that are no multiple of 8, another twentieth.
GROUPS, GROUP_CHANNELS = (2, 4, 6, 8, 10), (32, 48, 56, 64, 96, 112, 120, 128)
GROUPED, UNALIGNED = 0.05, 0.05
# Bytes and operations at most, and at least.
MOST_BYTES, MOST_FLOPS, LEAST_FLOPS = 350e6, 150e9, 2e7


def layers(seed: int, count: int, depthwise: bool = False) -> list[str]:
    """So many different ones; the same of a seed."""
    rng, found = random.Random(seed), dict[str, None]()
    while len(found) < count:
        text = _depthwise(rng) if depthwise else _dense(rng)
        try:
            problem = registry.parse(f"{text} f16 nhwc")
        except InvalidProblem:
            continue
        least = 0 if depthwise else LEAST_FLOPS
        if problem.bytes <= MOST_BYTES and least <= problem.flops <= MOST_FLOPS:
            found[text] = None
    return list(found)


def _one(rng: random.Random, weights: dict[str, int] | dict[int, int]) -> str:
    return str(rng.choices(list(weights), list(weights.values()))[0])


def _depthwise(rng: random.Random) -> str:
    channels, size = rng.choice(CHANNELS + ODD), rng.choice(SIZES)
    return f"n{_one(rng, IMAGES)} c{channels} h{size} w{size} k{channels} {_one(rng, DEPTHWISE)} groups{channels}"


def _dense(rng: random.Random) -> str:
    size, channels = rng.choice(SIZES), rng.choice(CHANNELS)
    filters = channels if rng.random() < 0.3 else rng.choice(CHANNELS)
    window, kind = _one(rng, WINDOWS), rng.random()
    if kind < GROUPED:
        groups = rng.choice(GROUPS)
        channels = filters = groups * rng.choice(GROUP_CHANNELS)
        window = f"r3 s3 pad1 groups{groups}" + (" stride2" if rng.random() < 0.3 else "")
    elif kind < GROUPED + UNALIGNED:
        channels, window = rng.choice(ODD), "r3 s3 pad1"
        filters = channels if rng.random() < 0.5 else rng.choice(ODD)
    words = f"n{_one(rng, IMAGES)} c{channels} h{size} w{size} k{filters} {window} {_one(rng, EPILOGUES)}"
    return words.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--depthwise", action="store_true")
    given = parser.parse_args()
    print(*layers(given.seed, given.count, given.depthwise), sep="\n")


if __name__ == "__main__":
    main()
