"""Small problems of odd sizes through every CUDA algorithm and up to eight of its configs, of every kernel, for
compute-sanitizer.

    sanitize.py [WORD]           those whose problem and algorithm contain the word
    sanitize.py --part 1/4       every fourth of them, from the second on
    sanitize.py --compile        their kernels alone, to the cache on disk, on all cores
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from tapwise import arrays, registry, verify
from tapwise.arrays.device import download, upload
from tapwise.cuda.jit.device import gpu

PROBLEMS = (
    "c6 h40 w75 k6 r6 s6", "n2 c5 h11 w13 k7 r3 s3 pad1 bias residual gelu", "c3 h70 w66 k3 r3 s3 stride2",
    "n3 c4 h9 w10 k6 r3 s3 pad1 groups2 f16",
    "n3 c33 h5 w7 k34 r3 s3 pad1:0x0:2 dilation2 nhwc bias silu", "n2 c48 h6 w6 k40 r1 s1 leaky_relu0.2",
    "n2 c31 h9 w5 k24 r3 s3 pad1 f64 nhwc", "n2 c72 h9 w11 k80 r3 s3 pad1 f16 nhwc bias",
    "n2 c72 h9 w11 k84 r3 s3 pad1 f16 residual", "n3 c72 h8 w10 k40 r1 s1 bf16 bias",
    "n2 c64 h8 w16 k40 r3 s3 pad1 f16 bias", "n2 c64 h7 w9 k24 r3 s3 pad1 bf16 relu",
    "n2 c3 h21 w33 k24 r3 s3 stride2 pad1 f16 bias relu", "n3 c40 h9 w20 k40 r3 s3 pad1 groups40 f16 nhwc wgrad",
    "n3 c38 h13 w17 k38 r5 s5 stride2 pad2 groups38 bf16 nhwc wgrad",
    "n3 c88 h6 w6 k48 r1 s1 f16 residual", "n5 c136 h7 w7 k72 r1 s1 f16 bias", "n2 c72 h9 w15 k40 r1 s1 bf16",
    "n2 c64 h9 w10 k36 r1 s1 stride2 f16", "n2 c64 h9 w11 k20 r3 s3 pad1 groups4 f16",
    "n2 c44 h9 w9 k44 r3 s3 pad1 bf16 nhwc residual relu", "n2 c64 h8 w9 k64 r3 s3 pad1 groups4 tf32 nhwc",
    "n2 c20 h9 w19 k20 r3 s3 pad1 groups20 f16 nhwc bias", "n2 c9 h9 w9 k9 r7 s7 pad3 groups9 bf16 nhwc",
    "n3 c8 h7 w7 k8 r7 s7 pad3 groups8 bf16 nhwc residual", "c8 h14 w14 k8 r13 s13 pad6 groups8 f16 nhwc",
    "n2 c5 h9 w9 k10 r3 s3 pad1 groups5 nhwc", "n3 c24 h9 w19 k24 r3 s3 stride2 pad1 groups6 f16 nhwc bias",
    "n3 c48 h9 w7 k48 r3 s3 pad1 groups3 bf16 nhwc residual relu",
    "n2 c9 h9 w13 k9 r3 s3 stride2 pad1 groups9 f16 bias residual", "n2 c7 h40 w19 k7 r5 s5 pad2 groups7",
    "c4 h12 w12 k4 r9 s9 stride2 pad4 groups4", "n1 c256 h7 w7 k64 r1 s1 3xtf32",
    "n2 c24 h9 w11 k40 r3 s3 stride2 pad1 f16 nhwc bias relu dgrad",
    "n2 c3 h13 w15 k8 r3 s3 stride2 pad1 bias f16 nhwc dgrad",
    "n3 c48 h9 w7 k48 r3 s3 pad1 groups3 bf16 dgrad", "n2 c20 h9 w19 k20 r3 s3 stride2 pad1 groups20 f16 nhwc dgrad",
    "n2 c31 h9 w5 k24 r2 s2 stride2 f64 nhwc dgrad", "n2 c64 h9 w8 k64 r1 s1 stride2 bf16 nhwc dgrad",
    "n2 c72 h9 w11 k80 r3 s3 pad1 f16 nhwc wgrad", "n2 c128 h9 w9 k64 r3 s3 stride2 pad1 groups2 bf16 nhwc wgrad",
    "n2 c33 h5 w7 k34 r3 s3 pad1:0x0:2 nhwc wgrad", "n2 c20 h9 w19 k20 r3 s3 pad1 groups20 f16 nhwc wgrad",
    "n2 c9 h9 w9 k9 r7 s7 pad3 groups9 bf16 nhwc wgrad", "n2 c31 h9 w5 k24 r3 s3 pad1 f64 wgrad",
    "n2 c44 h9 w9 k44 r3 s3 pad1 f16 wgrad", "n3 c24 h9 w11 k40 r3 s3 pad1 tf32 nhwc wgrad",
    "n2 c72 h9 w11 k136 r2 s5 pad1x2 f16 nhwc wgrad",
    "n2 c20 h9 w8 k15 r3 s3 pad1 groups5 tf32 wgrad", "n2 c48 h12 w13 k80 r3 s3 stride2 pad1 groups2 bf16 nhwc dgrad",
    "n2 c20 h9 w24 k20 r3 s3 pad1 f16 nhwc bias relu", "n2 c36 h8 w16 k36 r3 s3 pad1 bf16 nhwc residual",
    "n2 c12 h9 w16 k20 r1 s1 tf32 nhwc",
    "maxpool n2 c3 h13 w17 r3 s3 stride2 pad1 bf16", "maxpool n2 c24 h13 w17 r3 s3 stride1 pad1 f16 nhwc",
    "avgpool n3 c5 h7 w6 r7 s6 f16", "avgpool n2 c7 h35 w35 r3 s3 stride1 pad1 exclude_pad f16",
    "maxpool n2 c3 h12 w14 r2 s2 indices", "maxpool n2 c9 h19 w19 r5 s5 stride1 pad2 f16",
    "avgpool c4 h9 w11 r3 s2 stride1 pad1:0x1:1 exclude_pad nhwc", "reduce sum 5x1000x7 axis1",
    "reduce argmax 9x41 axis1", "reduce logsumexp 41113", "reduce max 300x33 axis0 f64", "softmax 7x33",
    "softmax 64x1000", "softmax 30000", "log_softmax 5x197 f16", "softmax 3x20001", "reduce argmax 300x224 axis1",
    "log_softmax 8x21x37x5 axis1", "softmax 700x8203 f16", "log_softmax 300x41 bf16",
    "im2col n2 c3 h13 w17 r3 s3 stride2 pad1", "im2col n3 c2 h90 w55 r3 s3 pad1", "im2col n3 c2 h90 w55 r3 s3 pad1 f16",
    "col2im n2 c3 h13 w17 r3 s3 stride2 pad1", "squeeze_excitation n3 c72 h9 w11 m5 silu f16 nhwc",
    "squeeze_excitation n2 c37 h9 w11 m40 hardsigmoid bf16", "squeeze_excitation n2 c20 h6 w6 m3 gelu f64",
    "batch_norm n2 c24 h9 w11 f16 nhwc", "batch_norm n20 c264 h13 w12 dgrad gelu f16 nhwc",
    "batch_norm n3 c5 h4 w6 dgrad hardswish bf16",
    "bias_activation n20 c264 h13 w12 dgrad silu f16 nhwc", "bias_activation n3 c5 h4 w6 dgrad bf16",
    "filter gaussian sigma1 h19 w27 c3 u8", "filter correlate h19 w27 r3 s4 constant", "filter maximum size5 h19 w27",
    "filter gaussian sigma2 h90 w300 c3 constant", "filter correlate h70 w301 r5 s11 f16",
    "filter minimum size4 h70 w300 u8", "filter sobel h40 w301 c2 u8 to:i16", "filter laplace h40 w304 i8",
    "filter gaussian sigma1 h60000 w20", "filter correlate h60000 w20 r3 s3 u8",
)  # fmt: skip


def cases(word: str, device: Any) -> Iterator[tuple[str, Any, Any]]:
    """(problem's text, algorithm, config)."""
    kinds = "kernel", "by", "tma", "images", "order", "transposed_pixels", "staged_strips", "cluster", "past"
    for text in PROBLEMS:
        problem = registry.parse(text)
        for algorithm in registry.of_backend("cuda", problem.operator):
            if word not in f"{text} {algorithm.id}" or algorithm.refusal(problem, device):
                continue
            configs = list(algorithm.configs(problem, device))
            plain = [config for config in configs if config.automatic]
            # The RGB report's partitions too, of few threads and of many.
            parts = [config for config in configs if getattr(config, "partition", "run") != "run"][::5]
            kernels: dict[tuple[Any, ...], list[Any]] = {}
            for config in plain:
                kind = type(config), *(getattr(config, name, "") for name in kinds)
                kernels.setdefault(kind, []).append(config)
            most = max(1, 8 // max(1, len(kernels)))
            some = [config for found in kernels.values() for config in found[:: max(1, len(found) // most)]]
            for config in dict.fromkeys([*some, *parts]):
                yield text, algorithm, config


def main() -> None:
    """Raises SystemExit where a result is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("word", nargs="?", default="")
    parser.add_argument("--part", default="0/1")
    parser.add_argument("--compile", action="store_true")
    given = parser.parse_args()
    device, (part, parts) = gpu(), map(int, given.part.split("/"))
    found = list(cases(given.word, device))[part::parts]
    if given.compile:
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda case: case[1].compile(registry.parse(case[0]), case[2], device), found))
        print(f"kernels of {len(found)} compiled")
        return
    for text, algorithm, config in found:
        print(f"{text}, {algorithm.id} {config}", flush=True)
        verdict = verify.check(registry.parse(text), algorithm.id, config, device=device)
        if not verdict:
            raise SystemExit(f"{text}, {algorithm.id} {config}: {verdict.message}")
    # The copy behind arrays that do not lie as a kernel reads them.
    for dtype in (np.float16, np.float32, np.float64):
        array = np.arange(5 * 7 * 9).reshape(5, 7, 9).astype(dtype)
        turned = arrays.dense(upload(array).transpose(2, 0, 1), "nchw")
        if not np.array_equal(download(turned), array.transpose(2, 0, 1)):
            raise SystemExit(f"copy of {array.dtype}")
    print(f"{len(found)} verified")


if __name__ == "__main__":
    main()
