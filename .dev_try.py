"""On a GPU: checks small problems in every family of configs, then times layers against PyTorch."""

import sys
import time

import torch

from tapwise import registry
from tapwise.cuda.jit.device import gpu
from tapwise.ops.conv.problem import ConvProblem
from tapwise.verify import check

registry.ALGORITHMS.setdefault("wgrad", {})["cuda.implicit_gemm"] = (
    "tapwise.ops.conv.cuda.implicit_gemm_wgrad.wgrad:ImplicitGemmWgrad"
)
START, LIMIT = time.perf_counter(), float(sys.argv[1]) if len(sys.argv) > 1 else 110.0
ALGORITHM, DEVICE = registry.get("cuda.implicit_gemm", "wgrad"), gpu()
SMALL = [
    "n2 c72 h9 w11 k40 r3 s3 pad1 f16 nhwc wgrad",
    "n3 c64 h8 w8 k64 r1 s1 f16 nhwc wgrad",
    "n2 c136 h13 w7 k200 r1 s1 bf16 nhwc wgrad",
    "n5 c64 h17 w15 k128 r3 s3 pad1 stride2 f16 nhwc wgrad",
    "n2 c8 h20 w23 k24 r5 s3 pad2:1x0:2 f16 nhwc wgrad",
    "n3 c256 h14 w14 k256 r3 s3 pad1 bf16 nhwc wgrad",
    "n2 c128 h19 w12 k128 r3 s3 pad2 dilation2 groups2 f16 nhwc wgrad",
    "n4 c16 h33 w31 k520 r7 s7 pad3 stride2 f16 nhwc wgrad",
    "n1 c320 h10 w10 k8 r1 s1 stride2 f16 nhwc wgrad",
    "n2 c64 h60 w70 k64 r3 s3 pad1 f16 nhwc wgrad", "n5 c64 h12 w19 k72 r3 s2 pad2:1x0:1 dilation2x3 bf16 nhwc wgrad",
    "n3 c64 h9 w40 k64 r1 s3 f16 nhwc wgrad",
    "n9 c24 h5 w5 k64 r2 s2 f16 nhwc wgrad",
]
LAYERS = [
    "n32 c64 h56 w56 k64 r3 s3 pad1", "n32 c128 h28 w28 k128 r3 s3 pad1", "n32 c256 h14 w14 k256 r3 s3 pad1",
    "n32 c512 h7 w7 k512 r3 s3 pad1", "n32 c64 h56 w56 k256 r1 s1", "n32 c256 h56 w56 k64 r1 s1",
    "n32 c256 h14 w14 k1024 r1 s1", "n32 c1024 h14 w14 k256 r1 s1", "n32 c512 h28 w28 k128 r1 s1",
    "n32 c2048 h7 w7 k512 r1 s1", "n32 c128 h56 w56 k128 r3 s3 stride2 pad1", "n32 c256 h56 w56 k512 r1 s1 stride2",
    "n32 c512 h64 w64 k512 r3 s3 pad1",
]  # fmt: skip


def family(config):
    return tuple(getattr(config, name) for name in config.__dataclass_fields__ if name not in ("split_k", "stages")) + (
        config.split_k > 1,
    )


def graphed(call, repeats=10):
    """Microseconds of a call in a CUDA graph: the best of a few replays."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(repeats):
                call()
        graph.replay()
        times = []
        for _ in range(4):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1000 / repeats)
    return min(times)


def check_all():
    wrong = checked = 0
    for text in SMALL:
        problem = ConvProblem.parse(text)
        if why := ALGORITHM.refusal(problem, DEVICE):
            print("refused", text, why)
            continue
        seen = set()
        for config in ALGORITHM.configs(problem, DEVICE):
            if family(config) in seen:
                continue
            seen.add(family(config))
            for integers in (False, True):
                verdict = check(problem, "cuda.implicit_gemm", config, device=DEVICE, integers=integers)
                checked += 1
                if not verdict:
                    wrong += 1
                    print(f"WRONG {text} | {config} | {verdict.error:.3g} of {verdict.bound:.3g}: {verdict.message}")
                    break
    print(f"{checked} checks, {wrong} wrong, {time.perf_counter() - START:.0f} s", flush=True)


def time_layer(text):
    problem = ConvProblem.parse(f"{text} f16 nhwc wgrad")

    def image(shape):
        return torch.randn(shape, device="cuda", dtype=torch.float16).contiguous(memory_format=torch.channels_last)

    x, dy = image(problem.x_shape), image(problem.y_shape)
    w = image(problem.w_shape)
    pads = [before for before, _ in problem.padding]

    def vendor():
        return torch.ops.aten.convolution_backward(
            dy, x, w, None, list(problem.stride), pads, list(problem.dilation), False, [0, 0], problem.groups,
            [False, True, False],
        )[1]  # fmt: skip

    expected = vendor().float()
    baseline = graphed(vendor)
    rows = []
    for config in ALGORITHM.configs(problem, DEVICE):
        if time.perf_counter() - START > LIMIT:
            print("out of time")
            break
        predicted = ALGORITHM.predict_us(problem, config, DEVICE)
        plan = ALGORITHM.plan(problem, config, DEVICE)
        dw = torch.full_like(w, float("nan"))
        space = torch.empty(max(plan.workspace_bytes, 16), device="cuda", dtype=torch.uint8)
        addresses = {"x": x.data_ptr(), "w": dy.data_ptr(), "y": dw.data_ptr(), "workspace": space.data_ptr()}
        us = graphed(lambda: plan.enqueue(addresses, torch.cuda.current_stream().cuda_stream))
        error = ((dw.float() - expected).abs().max() / expected.abs().max()).item()
        rows.append((us, predicted, config, error))
    rows.sort(key=lambda row: row[0])
    chosen = min(rows, key=lambda row: row[1])
    flops = problem.flops
    print(f"\n{text}: vendor {baseline:.1f} us, {flops / baseline / 1e6:.0f} TFLOP/s; model's choice {chosen[0]:.1f} us")
    for us, predicted, config, error in rows[:6] + ([] if len(rows) < 7 else [rows[-1]]):
        mark = "" if error < 0.01 else f"  WRONG {error:.3g}"
        print(f"  {us:7.1f} us {flops / us / 1e6:5.0f} TFLOP/s x{baseline / us:5.2f} predicted {predicted:6.1f} {config}{mark}")
    sys.stdout.flush()
    return baseline / rows[0][0]


torch.backends.cudnn.benchmark = True
print(torch.cuda.get_device_name(), torch.__version__, torch.backends.cudnn.version())
check_all()
ratios = []
for layer in LAYERS:
    if time.perf_counter() - START < LIMIT:
        ratios.append(time_layer(layer))
product = 1.0
for ratio in ratios:
    product *= ratio
print(f"\ngeometric mean of vendor / best config: {product ** (1 / max(1, len(ratios))):.2f} over {len(ratios)} layers")
print(f"{time.perf_counter() - START:.0f} s")
