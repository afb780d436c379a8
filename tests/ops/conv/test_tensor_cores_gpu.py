"""On a GPU: tensor cores against float64, with every way through memory, epilogue, launch and number that is none."""

from __future__ import annotations

from typing import Any

import pytest
from convolutions import CONVOLUTIONS

import tapwise
from tapwise import registry, verify
from tapwise.activation import ACTIVATIONS
from tapwise.baselines.torch_conv import activation as activated
from tapwise.cuda.jit.device import H200, gpu
from tapwise.errors import InvalidProblem
from tapwise.integers import ceil_div
from tapwise.ops.conv.cuda.implicit_gemm.epilogue import MOST_C_SUMS, Epilogue
from tapwise.ops.conv.cuda.implicit_gemm.view import View
from tapwise.ops.conv.problem import ConvProblem

pytestmark = pytest.mark.cuda


# With channels enough for tensor cores, and as copies take them.
DENSE = [
    "n3 c64 h14 w14 k72 r3 s3 pad1 relu bias",
    "n2 c48 h15 w13 k64 r3 s3 stride2 pad1 residual",
    "n2 c256 h7 w9 k96 r1 s1 bias gelu residual",
    "n2 c32 h16 w16 k40 r4 s4 stride4",
    "n2 c112 h9 w9 k112 r3 s3 pad1 groups2 bias",
    "n1 c512 h7 w7 k128 r3 s3 pad2 dilation2 silu",
]
# Windows from an image's own rows: runs that begin in the middle of words, by turns; groups of 4 and 8 channels.
LINES = [
    "n3 c3 h37 w48 k10 r3 s3 stride2 pad1",
    "n2 c3 h17 w19 k40 r3 s3 pad1 bias relu residual",
    "n2 c1 h13 w29 k5 r5 s1 pad2x0 dilation2x1",
    "n2 c5 h21 w18 k33 r2 s4 stride3x1 pad0:1x2:0 silu",
    "n1 c8 h9 w300 k64 r7 s3 pad3 residual",
    "n2 c7 h21 w18 k48 r3 s3 stride1x3 pad1 bias gelu",
    "n2 c2 h5 w4 k96 r3 s3 pad4 stride5",
    "n2 c3 h30 w64 k40 r7 s7 stride2 pad3 bias relu",
    "n3 c4 h32 w160 k130 r4 s4 stride4 residual",
    "n3 c32 h9 w11 k32 r3 s3 pad1 groups8",
    "n2 c48 h9 w11 k96 r3 s3 stride2x1 pad1:0x0:2 groups12 bias relu residual",
    "n2 c64 h13 w9 k64 r3 s2 pad1 dilation2x1 groups8 gelu",
    "n1 c96 h9 w20 k64 r5 s3 pad2 groups4 bias silu",
    "n2 c48 h7 w9 k64 r3 s3 pad1 dilation1x2 groups2 residual",
    "n2 c64 h40 w37 k64 r3 s3 pad1 groups8 bias",
    "n2 c104 h15 w17 k104 r3 s3 pad1 groups13 bias residual",
    "n2 c40 h12 w17 k40 r3 s3 pad1 groups10",
]
TENSOR_CORES = [one.id for one in registry.of_backend("cuda", "conv") if one.tensor_cores]


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("dtype", ["f16", "bf16", "tf32", "3xtf32"])
@pytest.mark.parametrize("text", [*CONVOLUTIONS, *DENSE, *LINES])
@pytest.mark.parametrize("identifier", TENSOR_CORES)
def test_tensor_cores(identifier: str, text: str, dtype: str, layout: str) -> None:
    problem, device = ConvProblem.parse(f"{text} {dtype} {layout}"), gpu()
    algorithm = registry.get(identifier)
    if algorithm.refusal(problem, device):
        return
    for config in tensor_core_configs(algorithm, problem, device):
        for integers in (False, True):
            verdict = verify.check(problem, identifier, config, device=device, integers=integers)
            assert verdict, f"{config}: {verdict.message}"


def tensor_core_configs(algorithm: Any, problem: Any, device: Any) -> list[Any]:
    """The chosen config, and for float16 some others."""
    configs = sorted(algorithm.configs(problem, device), key=lambda one: algorithm.predict_us(problem, one, device))
    rest = [one for one in configs if getattr(one, "split", 1) > 1][:1]
    rest += configs[len(configs) // 2 :: len(configs) // 2 or 1]
    return configs[:1] + (rest if problem.dtype == "f16" else [])


@pytest.mark.parametrize("identifier", TENSOR_CORES)
def test_tensor_cores_under_streams_graphs_and_dependent_launches(identifier: str) -> None:
    """Two layers in a row, each waiting for the one before by itself; two streams at once; the same bits each time."""
    import torch

    maker = torch.Generator("cuda").manual_seed(0)

    def random(*shape: int) -> Any:
        return torch.randn(shape, generator=maker, device="cuda").half()

    def exact(x: Any, *layers: Any) -> Any:
        for w in layers:
            groups = x.shape[1] // w.shape[1]
            x = torch.nn.functional.conv2d(x.float(), w.float(), padding=w.shape[-1] // 2, groups=groups).half()
        return x

    # Channels of a layer and of a group.
    narrow = {"cuda.few_channels": (8, 8), "cuda.narrow_groups": (64, 8), "cuda.implicit_gemm_rows": (64, 8)}
    channels, last = narrow.get(identifier, (96, 96)), 3 if identifier == "cuda.implicit_gemm_rows" else 1
    for n, (c, each), size in ((1, channels, 14), (8, channels, 28)):
        first, second = (random(c, each, r, r) / (r * r * each) ** 0.5 for r in (3, last))
        x = random(n, c, size, size).contiguous(memory_format=torch.channels_last)
        words = f"n{n} c{c} h{size} w{size} k{c} groups{c // each} f16 nhwc"
        layers = [
            tapwise.prepare(f"{words} r{r} s{r} pad{r // 2}", w, algorithm=identifier)
            for r, w in ((3, first), (last, second))
        ]
        expected = exact(x, first, second)

        def run(x: Any = x, layers: Any = layers) -> Any:
            for _ in range(4):
                y = layers[1](layers[0](x))
            return y

        result = run()
        assert torch.allclose(result.float(), expected.float(), atol=4e-3, rtol=4e-3)
        streams = [torch.cuda.Stream() for _ in range(2)]
        torch.cuda.synchronize()
        both = []
        for stream in streams * 3:
            with torch.cuda.stream(stream):
                both.append(run())
        torch.cuda.synchronize()
        assert all(torch.equal(one, result) for one in both)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = run()
        captured.zero_()
        for _ in range(20):
            graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(captured, result)


MANY_TILES = (
    "n32 c24 h56 w56 k144 r1 s1 f16 nhwc",
    "n16 c64 h56 w56 k256 r1 s1 f16 nhwc bias relu residual",
    "n8 c64 h96 w96 k64 r3 s3 pad1 bf16 nhwc bias silu residual",
    "n8 c48 h96 w96 k96 r3 s3 pad1 tf32 nhwc residual",
    "n32 c48 h40 w40 k168 r1 s1 f16 nhwc bias silu residual",
    "n16 c104 h39 w41 k200 r5 s5 stride2x1 pad2 bf16 nhwc bias residual",
    "n8 c30 h80 w80 k36 r3 s3 pad1 f16 nhwc bias",
    "n8 c32 h90 w80 k17 r3 s3 pad1 f16 nhwc bias silu residual",
)


def long_runs(algorithm: Any, problem: Any, device: Any) -> list[Any]:
    """Configs whose blocks have four tiles and more one behind the other: the best of each kind, some of them."""
    kinds: dict[Any, Any] = {}
    for config in sorted(
        algorithm.configs(problem, device), key=lambda one: algorithm.predict_us(problem, one, device)
    ):
        view = View.of(problem, config)
        if config.split_k > 1 or view.tiles < 4 * view.blocks(device):
            continue
        # Tiles of an odd count of rounds of 64 x 64 end in the part of shared memory where the next one begins.
        odd = ceil_div(config.tile_pixels, 64) * ceil_div(config.tile_filters, 64) % 2
        kind = (
            config.kernel,
            config.swap_ab,
            config.warpgroups,
            config.ping_pong,
            config.filter_stationary,
            config.min_blocks_per_sm,
            odd,
        )
        kinds.setdefault(kind, config)
    return list(kinds.values())[::3]


@pytest.mark.parametrize(
    "text",
    [
        "n8 c64 h56 w56 k200 r3 s3 pad1 f16 nhwc bias silu residual",
        "n6 c48 h64 w60 k130 r3 s3 pad1 bf16 nhwc bias",
        "n8 c32 h56 w56 k136 r3 s3 pad1 tf32 nhwc bias sigmoid",
        "n12 c144 h30 w30 k168 r3 s3 pad1 groups3 f16 nhwc bias relu residual",
    ],
)
def test_filters_that_stay_in_several_sets(text: str) -> None:
    """Every block keeps those of its own tiles."""
    problem, device = ConvProblem.parse(text), gpu()
    kinds: dict[Any, Any] = {}
    for config in registry.get("cuda.implicit_gemm").configs(problem, device):
        sets = ceil_div(problem.group_k, config.tile_filters) * problem.groups
        if config.filter_stationary and config.kernel != "im2col" and 1 < sets <= 6:
            kinds.setdefault((config.kernel, config.swap_ab, sets), config)
    assert len(kinds) >= 3
    for config in kinds.values():
        verdict = verify.check(problem, "cuda.implicit_gemm", config, device=device)
        assert verdict, f"{config}: {verdict.message}"


@pytest.mark.parametrize(
    "text",
    ["n8 c80 h33 w30 k96 r3 s3 pad1 f16 nhwc bias relu", "n6 c144 h28 w31 k88 r3 s3 pad1 bf16 nhwc bias silu residual",
     "n8 c96 h1 w1111 k200 r1 s3 pad0x1 groups2 tf32 nhwc residual", "n4 c72 h30 w29 k40 r5 s1 pad2x0 f16 bias",
     "n8 c64 h40 w44 k128 r3 s1 pad1x0 dilation2x1 f16 nhwc residual", "n5 c90 h21 w22 k33 r2 s2 bf16 nhwc"],
)  # fmt: skip
def test_halo_buffers_of_few_taps_and_of_half_chunks(text: str) -> None:
    problem, device = ConvProblem.parse(text), gpu()
    kinds: dict[Any, Any] = {}
    for config in registry.get("cuda.implicit_gemm").configs(problem, device):
        if config.chunk_bytes or config.halo_buffers > 2:
            kind = (config.kernel, config.swap_ab, config.halo_buffers, config.chunk_bytes, config.filter_stationary)
            kinds.setdefault(kind, config)
    assert len(kinds) >= 4
    for config in kinds.values():
        verdict = verify.check(problem, "cuda.implicit_gemm", config, device=device)
        assert verdict, f"{config}: {verdict.message}"


@pytest.mark.parametrize("text", MANY_TILES)
def test_tensor_cores_with_many_tiles_a_block(text: str) -> None:
    """What a tile stages may not overtake what the one before it still writes."""
    problem, device = ConvProblem.parse(text), gpu()
    for config in long_runs(registry.get("cuda.implicit_gemm"), problem, device):
        verdict = verify.check(problem, "cuda.implicit_gemm", config, device=device)
        assert verdict, f"{config}: {verdict.message}"


@pytest.mark.parametrize(
    "text",
    [
        "n16 c64 h56 w56 k64 r3 s3 pad1 f16 nhwc bias relu residual",
        "n8 c32 h60 w61 k72 r3 s3 pad1 tf32 nhwc residual",
        "n8 c64 h40 w44 k128 r1 s3 pad0x1 groups2 bf16 nhwc bias silu residual",
        "n32 c16 h40 w41 k320 r3 s3 pad1 bf16 nhwc residual",
        "n8 c192 h60 w61 k256 r3 s3 pad1 f16 nhwc bias relu residual",
        "n8 c200 h30 w31 k144 r3 s3 pad1 groups2 f16 nhwc residual",
    ],
)
def test_residuals_that_tma_brings(text: str) -> None:
    """Short tiles, whose products end before the other warpgroup's residual is there, and long ones."""
    problem, device = ConvProblem.parse(text), gpu()
    algorithm = registry.get("cuda.implicit_gemm")
    configs = [one for one in algorithm.configs(problem, device) if Epilogue(View.of(problem, one)).tma_residual]
    kinds: dict[Any, list[Any]] = {}
    for one in sorted(configs, key=lambda one: (one.tile_pixels, one.tile_filters)):
        kinds.setdefault(one.swap_ab, []).append(one)
    assert len(configs) > 5
    for same in kinds.values():
        for config in dict.fromkeys([*same[:2], *same[-2:]]):
            for _ in range(5):
                verdict = verify.check(problem, "cuda.implicit_gemm", config, device=device)
                assert verdict, f"{config}: {verdict.message}"


def test_many_sums_that_begin_with_the_residual() -> None:
    """More sums of a thread than leave registers for much else."""
    problem, device = ConvProblem.parse("n16 c64 h60 w60 k320 r3 s3 pad1 bf16 nhwc bias silu residual"), gpu()
    algorithm = registry.get("cuda.implicit_gemm")
    configs = [
        one
        for one in algorithm.configs(problem, device)
        if one.ping_pong
        and Epilogue(View.of(problem, one)).permuted_n
        and one.tile_pixels * one.tile_filters > 128 * MOST_C_SUMS
    ]
    assert configs
    for config in configs:
        verdict = verify.check(problem, "cuda.implicit_gemm", config, device=device)
        assert verdict, f"{config}: {verdict.message}"


FEW_CHANNELS = (
    "n2 c3 h37 w41 k24 r7 s7 stride2 pad3", "n3 c3 h48 w80 k40 r16 s16 stride16", "n2 c1 h19 w23 k8 r5 s3 pad2x1",
    "n2 c5 h21 w18 k16 r3 s4 stride3x2 pad1:0x2:1 dilation1x2 bias silu residual", "n1 c7 h15 w300 k9 r3 s5 pad1x2",
)  # fmt: skip


def unfolding(algorithm: Any, problem: Any, device: Any) -> list[Any]:
    """The best config of each way to pack taps as channels."""
    configs = sorted(algorithm.configs(problem, device), key=lambda one: algorithm.predict_us(problem, one, device))
    return [next(one for one in configs if one.unfold == way) for way in {one.unfold for one in configs} - {0}]


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("dtype", ["f16", "tf32", "3xtf32"])
@pytest.mark.parametrize("text", FEW_CHANNELS)
def test_tensor_cores_with_taps_as_channels(text: str, dtype: str, layout: str) -> None:
    problem, device = ConvProblem.parse(f"{text} {dtype} {layout}"), gpu()
    configs = unfolding(registry.get("cuda.implicit_gemm"), problem, device)
    assert configs
    for config in configs:
        for integers in (False, True):
            verdict = verify.check(problem, "cuda.implicit_gemm", config, device=device, integers=integers)
            assert verdict, f"{config}: {verdict.message}"


@pytest.mark.parametrize("identifier", TENSOR_CORES)
def test_tensor_cores_keep_infinities_in_their_place(identifier: str) -> None:
    """NaN and infinity in one group, one channel or the padding's neighbourhood reach no other output."""
    import torch

    for text in (
        "c48 h9 w9 k48 r3 s3 pad1 groups2", "c20 h9 w9 k24 r3 s3 pad1", "c64 h8 w8 k40 r1 s1 groups4",
        "c3 h9 w9 k16 r3 s3 pad1", "c3 h9 w9 k16 r3 s3 stride2 pad1", "c64 h9 w9 k64 r3 s3 pad1 groups8",
        "c32 h9 w9 k32 r3 s3 pad1 groups8",
    ):  # fmt: skip
        problem = ConvProblem.parse(f"n2 {text} f16 nhwc")
        if registry.get(identifier).refusal(problem, gpu()):
            continue
        x = torch.ones(problem.x_shape, device="cuda", dtype=torch.float16)
        w = torch.ones(problem.w_shape, device="cuda", dtype=torch.float16)
        x[0, 1, 3, 3], x[1, problem.c - 1, 0, 0] = float("nan"), float("inf")
        y = tapwise.prepare(problem, w, algorithm=identifier)(x.contiguous(memory_format=torch.channels_last))
        side = (problem.padding[0][0],) * 2
        expected = torch.nn.functional.conv2d(
            x.float(), w.float(), padding=side, stride=problem.stride, groups=problem.groups
        )
        assert torch.equal(torch.isnan(y), torch.isnan(expected))
        assert torch.equal(torch.isinf(y), torch.isinf(expected))


@pytest.mark.parametrize("identifier", ["cuda.implicit_gemm", "cuda.implicit_gemm_mma"])
def test_prepared_calls_with_a_residual(identifier: str) -> None:
    """What needs no conversion goes another way than what does."""
    import torch

    problem = ConvProblem.parse("n2 c64 h13 w15 k72 r3 s3 pad1 f16 nhwc bias relu residual")
    images, line = torch.channels_last, torch.contiguous_format
    x, w, residual = (
        torch.randn(shape, device="cuda", dtype=torch.float16)
        for shape in (problem.x_shape, problem.w_shape, problem.y_shape)
    )
    bias = torch.randn(problem.k, device="cuda", dtype=torch.float16)
    operator = tapwise.prepare(problem, w, bias, algorithm=identifier)
    quick = operator(x.contiguous(memory_format=images), residual=residual.contiguous(memory_format=images))
    assert quick.is_contiguous(memory_format=images)
    expected = torch.relu(torch.nn.functional.conv2d(x.double(), w.double(), bias.double(), padding=1) + residual)
    assert (quick - expected).abs().max() < 0.05 * expected.abs().max()
    assert torch.equal(
        quick, operator(x.contiguous(memory_format=images), residual=residual.contiguous(memory_format=line))
    )
    out = torch.empty_like(quick)
    assert operator(x, residual=residual, out=out) is out and torch.equal(out, quick)
    with pytest.raises(InvalidProblem, match="residual=None"):
        operator(x.contiguous(memory_format=images))


ACTIVATED = [
    (identifier, text, dtype)
    for identifier, text in (
        ("cuda.implicit_gemm", "c8 h64 w64 k64 r1 s1"), ("cuda.implicit_gemm", "c8 h64 w64 k33 r1 s1"),
        ("cuda.implicit_gemm", "c64 h64 w64 k64 r3 s3 pad1"), ("cuda.implicit_gemm_mma", "c8 h64 w64 k20 r1 s1"),
        ("cuda.few_channels", "c3 h64 w64 k24 r3 s3 pad1"),
        ("cuda.narrow_groups", "c64 h64 w64 k64 r3 s3 pad1 groups8"),
    )
    for dtype in ("f16", "bf16", "tf32", "3xtf32")
    if registry.get(identifier).refusal(ConvProblem.parse(f"n2 {text} {dtype} nhwc"), H200) is None
]  # fmt: skip


@pytest.mark.parametrize("activation", [*ACTIVATIONS, "leaky_relu-2.5"])
@pytest.mark.parametrize(("identifier", "text", "dtype"), ACTIVATED)
def test_activations(identifier: str, text: str, dtype: str, activation: str) -> None:
    """From far below zero to far above, and what is no number: of 16 bits one unit in the last place, of 32 some units
    of the argument, and no neighbour is met.

    One channel of each group passes through, and two filters beside each other get different signs.
    """
    import torch

    kind = {"f16": torch.float16, "bf16": torch.bfloat16}.get(dtype, torch.float32)
    problem, device = ConvProblem.parse(f"n2 {text} {dtype} nhwc {activation}"), gpu()
    algorithm = registry.get(identifier)
    kinds: dict[tuple[object, ...], Any] = {}
    for config in sorted(
        algorithm.configs(problem, device), key=lambda one: algorithm.predict_us(problem, one, device)
    ):
        kinds.setdefault(tuple(getattr(config, name, 0) for name in ("kernel", "rows", "split", "warpgroups")), config)
    x = torch.zeros(problem.x_shape, device="cuda", dtype=kind)
    values = torch.cat([torch.linspace(-100, 100, 4096), torch.linspace(-6, 6, 4096)]).reshape(2, 64, 64)
    values[1, 30, :4] = torch.tensor([0.0, -0.0, 3e4, -3e4])
    if dtype != "3xtf32":
        # What is left of an infinity, when its first bits are taken away, is none.
        values[0, 0, ::4] = float("inf")
        values[0, 8, ::5], values[1, 60, 3:5] = -float("inf"), float("nan")
    values = values.cuda().to(torch.bfloat16 if kind == torch.float32 else kind)
    x[:, :: problem.group_c] = values.to(kind)[:, None]
    w = torch.zeros(problem.w_shape, device="cuda", dtype=kind)
    w[0::2, 0, problem.kernel[0] // 2, problem.kernel[1] // 2] = 1
    w[1::2, 0, problem.kernel[0] // 2, problem.kernel[1] // 2] = -1
    x = x.contiguous(memory_format=torch.channels_last)
    side = problem.padding[0][0]
    sums = torch.nn.functional.conv2d(x.double().cpu(), w.double().cpu(), padding=side, groups=problem.groups)
    expected = activated(activation)(sums).cuda()
    expected[expected.abs() > torch.finfo(kind).max] *= float("inf")
    finite = torch.isfinite(expected)
    assert finite.sum() > expected.numel() // 2 and (dtype == "3xtf32" or not finite.all())
    # Too large is infinite. Half a unit is the rounding; what is subnormal has an absolute bound.
    bound = {
        "f16": 1.5 * 2.0**-11 * expected.abs() + 2.0**-24,
        "bf16": 1.5 * 2.0**-8 * expected.abs() + 2.0**-24,
    }.get(dtype, 8 * 2.0**-24 * torch.maximum(sums.cuda().abs(), expected.abs()))
    for config in kinds.values():
        y = tapwise.prepare(problem, w, algorithm=identifier, config=config)(x)
        assert torch.equal(torch.isnan(y), torch.isnan(expected)), config
        assert torch.equal(torch.isinf(y), torch.isinf(expected.to(kind))), config
        error = (y.double() - expected).abs()
        assert (error <= bound)[finite].all(), f"{config}: {error[finite].max()}"
