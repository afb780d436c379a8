"""Problems: strings and problems are inverse, sizes are those of torch, bad words and sizes are named."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tapwise.activation import ACTIVATIONS
from tapwise.errors import InvalidProblem
from tapwise.ops.conv.problem import DIRECTIONS, MATHS, ConvProblem
from tapwise.problem import LAYOUTS

SIZES = st.integers(1, 9)


@st.composite
def problems(draw: st.DrawFn) -> ConvProblem:
    """Any valid problem."""
    axes = draw(st.integers(1, 3))

    def each(values: st.SearchStrategy[int]) -> tuple[int, ...]:
        return tuple(draw(values) for _ in range(axes))

    kernel, dilation = each(SIZES), each(st.integers(1, 3))
    padding = tuple((draw(st.integers(0, 4)), draw(st.integers(0, 4))) for _ in range(axes))
    reach = tuple((r - 1) * d + 1 for r, d in zip(kernel, dilation, strict=True))
    extra = each(st.integers(0, 9))
    spatial = tuple(max(0, length + more - sum(pad)) for length, more, pad in zip(reach, extra, padding, strict=True))
    groups = draw(st.integers(1, 4))
    dtype = draw(st.sampled_from(["f32", "f64", "f16", "bf16"]))
    slopes = st.tuples(st.just("leaky_relu"), st.floats(-3e38, 3e38) | st.integers(-9, 9))
    activations = st.sampled_from([None, *ACTIVATIONS]) | slopes
    direction = draw(st.sampled_from(DIRECTIONS))
    # What a direction fuses.
    behind, residual = direction != "wgrad", direction == "fprop"
    return ConvProblem(
        n=draw(st.integers(0, 5)), c=groups * draw(st.integers(0, 5)), spatial=spatial, k=groups * draw(SIZES),
        kernel=kernel, stride=each(st.integers(1, 4)), padding=padding, dilation=dilation, groups=groups,
        direction=direction, dtype=dtype,
        math=draw(st.sampled_from(MATHS)) if dtype == "f32" else "ieee", layout=draw(st.sampled_from(LAYOUTS)),
        bias=behind and draw(st.booleans()), activation=draw(activations) if behind else None,
        residual=residual and draw(st.booleans()),
    )  # fmt: skip


@given(problems(), st.randoms())
def test_parse_and_str_are_inverse(problem: ConvProblem, random: object) -> None:
    text = str(problem)
    assert ConvProblem.parse(text) == problem
    words = text.split()
    random.shuffle(words)  # type: ignore[attr-defined]
    shuffled = ConvProblem.parse(" ".join(words))
    assert shuffled == problem
    assert hash(shuffled) == hash(problem)
    assert str(shuffled) == text


@pytest.mark.parametrize(
    "text",
    [
        "c64 h56 w56 k64 r3 s3 stride2 pad1 dilation1 groups1",
        "n3 c6 h11 w7 k4 r3 s5 stride2x1 pad0:1x2:0 dilation1x1 groups2",
        "c1 w31 k2 s4 stride3 pad2 dilation2",
        "n2 c2 d5 h6 w7 k3 t2 r3 s1 pad1x0x2",
    ],
)
def test_output_size_is_that_of_torch(text: str) -> None:
    problem = ConvProblem.parse(text)
    convolve = [torch.conv1d, torch.conv2d, torch.conv3d][len(problem.spatial) - 1]
    x = torch.zeros(problem.x_shape)
    sides = [side for pair in reversed(problem.padding) for side in pair]
    y = convolve(
        torch.nn.functional.pad(x, sides),
        torch.zeros(problem.w_shape),
        None,
        problem.stride,
        0,
        problem.dilation,
        problem.groups,
    )
    assert problem.y_shape == tuple(y.shape)


def test_sizes_and_work() -> None:
    problem = ConvProblem.parse("n2 c6 h5 w7 k8 r3 s1 stride2 pad1:0x0 groups2 f16")
    assert problem.reach == (3, 1)
    assert problem.output == (2, 4)
    assert (problem.group_c, problem.group_k) == (3, 4)
    assert (problem.gemm_m, problem.gemm_n, problem.gemm_k) == (4, 16, 9)
    assert problem.flops == 2 * 2 * 8 * 8 * 9
    assert problem.bytes == 2 * (2 * 6 * 35 + 8 * 3 * 3 + 2 * 8 * 8)
    assert problem.replace(residual=True).bytes == problem.bytes + 2 * 2 * 8 * 8
    assert not problem.depthwise
    assert ConvProblem.parse("c4 h5 w5 k8 r3 s3 groups4").depthwise


@pytest.mark.parametrize(
    ("given", "word"),
    [
        ("leaky_relu0.010", "leaky_relu"), ("leaky_relu1e-5", "leaky_relu1e-05"), ("leaky_relu-0.0", "leaky_relu0"),
        (("leaky_relu", 0.01), "leaky_relu"), (("leaky_relu", 0.2), "leaky_relu0.2"),
        (("leaky_relu", -3), "leaky_relu-3"), (("leaky_relu", np.float16(0.5)), "leaky_relu0.5"),
    ],
)  # fmt: skip
def test_a_slope_is_part_of_the_activations_word(given: Any, word: str) -> None:
    plain = ConvProblem.parse("c3 h8 w9 k5 r3 s3")
    problem = plain.replace(activation=given)
    assert problem.activation == word
    assert problem.activation_name == "leaky_relu"
    assert str(problem).split()[-1] == word
    assert problem == ConvProblem.parse(f"{plain} {given}" if isinstance(given, str) else str(problem))


@pytest.mark.parametrize(
    "activation",
    [
        ("leaky_relu", math.nan), ("leaky_relu", math.inf), ("leaky_relu", 1e39), ("leaky_relu", "0.2"),
        ("leaky_relu", True), ("leaky_relu", 0.1, 0.2), ("leaky_relu",), ("relu", 0.2), ["leaky_relu", 0.2],
        "leaky_relunan", "leaky_relu0x1", "leaky_relu_1", "leaky_relu1e39", "leaky_relu 1", "gelu_tanh1",
    ],
)  # fmt: skip
def test_bad_slopes_are_named(activation: Any) -> None:
    with pytest.raises(InvalidProblem, match="activation="):
        ConvProblem.parse("c3 h8 w9 k5 r3 s3").replace(activation=activation)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("c64 h56 w56 k64 r3 s3 padd1", "padd1"),
        ("c64 h56 w56 k64 r3 s3 stride2x2x2", "stride2x2x2"),
        ("c64 h56 w56 k64 r3 s3 pad1:2:3", "pad1:2:3"),
        ("c64 h56 w56 k64 r3 s3 stride1:2", "stride"),
        ("c64 h56 w56 k64 r3 s3 c32", "c32"),
        ("c64 h56 w56 k64 r3 s3 f16 tf32", "tf32"),
        ("c64 h56 w56 k64 r3 s3 leaky_relu0.1 relu", "relu"),
        ("c64 h56 w56 k64 r3 s3 leaky_relu1e39", "leaky_relu1e39"),
        ("c64 h56 w56 k64 r3", "no word gives s"),
        ("h56 w56 k64 r3 s3", "no word gives c"),
        ("c64 h56 w56 k64 r3 s3 stride0", "stride"),
        ("c64 h56 w56 k64 r3 s3 groups3", "groups=3"),
        ("c64 h2 w56 k64 r3 s3", "height"),
        ("", "no word gives c"),
    ],
)
def test_bad_string_says_which_word(text: str, word: str) -> None:
    with pytest.raises(InvalidProblem) as error:
        ConvProblem.parse(text)
    assert repr(text) in str(error.value)
    assert word in str(error.value).replace(repr(text), "")


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"n": -1}, "n=-1"),
        ({"stride": (0, 1)}, "stride"),
        ({"dilation": (1, 0)}, "dilation"),
        ({"kernel": (0, 3)}, "kernel"),
        ({"kernel": (3,)}, "kernel"),
        ({"padding": ((0, -1), (0, 0))}, "padding"),
        ({"groups": 0}, "groups"),
        ({"groups": 2}, "groups"),
        ({"dtype": "i8"}, "dtype='i8'"),
        ({"layout": "nwhc"}, "layout"),
        ({"activation": "swish"}, "activation='swish'"),
        ({"math": "fast"}, "math='fast'"),
        ({"math": "tf32", "dtype": "f64"}, "math='tf32'"),
        ({"dilation": (4, 1)}, "spans 9 in height"),
        ({"spatial": (1, 2, 3, 4)}, "1, 2 or 3 axes"),
    ],
)
def test_bad_value_is_named(change: dict[str, object], name: str) -> None:
    problem = ConvProblem.parse("c3 h8 w9 k5 r3 s3")
    with pytest.raises(InvalidProblem, match=name.replace("(", r"\(")):
        problem.replace(**change)
    assert issubclass(InvalidProblem, ValueError)


def test_many_random_numbers_do_not_repeat_along_an_axis() -> None:
    """They are drawn once for a prime number of places: no row, channel or image is another's."""
    problem = ConvProblem.parse("n2 c128 h256 w129 k1 r1 s1 f16 groups1")
    x = problem.random(np.random.default_rng(0), problem.x_shape)
    assert x.shape == problem.x_shape and x.dtype == np.float16 and x.size > 8_388_593
    assert np.array_equal(x.ravel()[8_388_593:], x.ravel()[: x.size - 8_388_593])
    for axis in range(4):
        first, second = (x.take(at, axis) for at in (0, 1))
        assert np.mean(first == second) < 0.01
    assert problem.random(np.random.default_rng(0), ()).shape == ()
    assert problem.random(np.random.default_rng(0), (0, 3)).shape == (0, 3)
