"""The register tile: the one inner loop of every matrix-like CPU kernel.

A tile holds M x N vector accumulators. Each step of its loop takes one term kk of gemm_k: N vectors of one operand
and M broadcast elements of the other, M * N fused multiply-adds. The input is read through a table of element
offsets, one for each term (channel x tap), so a convolution is a matrix product whose matrix is never built:

    lanes over pixels     acc[m][n] += w[kk, m] * x[offset[kk] + n * V ...]     m: output channel, n: vector of pixels
    lanes over channels   acc[m][n] += x[offset[kk] + m * step] * w[kk, n * V ...]     m: pixel, n: vector of channels

Blocking: Goto and van de Geijn, "Anatomy of High-Performance Matrix Multiplication", 2008; Van Zee and van de Geijn,
"BLIS", 2015. The table: Dukhan, "The Indirect Convolution Algorithm", 2019.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

from tapwise.cpu.epilogue import Epilogue
from tapwise.cpu.simd import BYTES, I1, INT, Int, Kernel, Ptr, Target

# (M, N) by number of vector registers: M * N accumulators + N vectors + 1 broadcast must fit.
_TILES: Final = {
    16: ((6, 2), (4, 3), (3, 3), (2, 5), (1, 12)),
    32: ((12, 2), (8, 3), (6, 4), (4, 6), (3, 7), (2, 9), (1, 24)),
}

# Terms an iteration: the loop's own instructions cost 10 to 15 % when they come with every term.
UNROLL: Final = 4
# Elements that filters are prefetched ahead; anything from 64 to 1024 measures the same.
PANEL_AHEAD: Final = 128


# Lanes over channels read each of the M pixels through an address of its own: many do not fit the integer registers.
_CHANNEL_TILES: Final = {16: ((6, 2), (4, 3), (3, 3)), 32: ((6, 3), (4, 5), (3, 6))}


def shapes(target: Target, lanes: str = "pixels") -> tuple[tuple[int, int], ...]:
    """Tile shapes (M, N) worth trying on a target, the most balanced first."""
    return (_TILES if lanes == "pixels" else _CHANNEL_TILES)[target.registers]


def emit(k: Kernel, m_most: int, n_most: int, lanes: str) -> None:
    """Emit `block`: a product over one packed block of gemm_k, for any number of rows and vectors.

    block(x, step, offsets, terms, w, out, pitch, rows, vectors, accumulate) computes
      pixels:   out[row * pitch + lane] (+)= sum over kk of w[row, kk] * x[offsets[kk] + lane]
      channels: out[row * pitch + lane] (+)= sum over kk of x[offsets[kk] + row * step] * w[kk, lane]
    over `rows` rows and `vectors` vectors of lanes. Filters are packed in panels: pixels [rows / M][terms][M], the last
    panel as narrow as it is; channels [vectors / N][terms][N * V].
    """
    for m in range(1, m_most + 1):
        for n in range(1, n_most + 1):
            # The narrow tiles of the last rows do little of the work, and would take most of the time to compile.
            _tile(k, m, n, m, lanes, UNROLL if m == m_most else 1)
    if lanes == "pixels":
        # One vector of pixels: the sums of one panel alone would not hide the multiply-add's latency.
        _tile(k, 2 * m_most, 1, m_most, lanes, 1)
    parameters = {"x": k.dtype, "step": INT, "offsets": "i64", "terms": INT, "w": k.dtype, "out": k.dtype, "pitch": INT}
    vector = k.lanes

    for n in range(1, n_most + 1):
        with k.function(f"rows_{n}", **parameters, rows=INT, accumulate=I1) as arguments:
            x, step, offsets, terms, w, out, pitch, rows, accumulate = arguments

            def tile(m: int, row: Int, n: int = n, arguments: list = arguments) -> None:  # type: ignore[type-arg]
                x, step, offsets, terms, w, out, pitch, _, accumulate = arguments
                there, panel = (x, w + row * terms) if lanes == "pixels" else (x + row * step, w)
                k.call(f"tile_{m}_{n}", there, step, offsets, terms, panel, out + row * pitch, pitch, accumulate)

            _all_rows(k, rows, m_most, n == 1 and lanes == "pixels", tile)

    with k.function("block", **parameters, rows=INT, vectors=INT, accumulate=I1) as arguments:
        x, step, offsets, terms, w, out, pitch, rows, vectors, accumulate = arguments

        def columns(n: int, first: Int) -> None:
            """All rows of n vectors from vector `first`."""
            shift = first * vector
            there = x + shift if lanes == "pixels" else x
            panel = w if lanes == "pixels" else w + shift * terms
            k.call(f"rows_{n}", there, step, offsets, terms, panel, out + shift, pitch, rows, accumulate)

        whole = vectors - vectors % n_most
        with k.loop(0, whole, n_most) as first:
            columns(n_most, first)
        for n in range(1, n_most):
            with k.if_((vectors % n_most).eq(n)):
                columns(n, whole)


def _tile(k: Kernel, m_count: int, n_count: int, panel: int, lanes: str, unroll: int) -> None:
    """One register tile over all terms: tile_M_N."""
    with k.function(
        f"tile_{m_count}_{n_count}",
        x=k.dtype, step=INT, offsets="i64", terms=INT, w=k.dtype, out=k.dtype, pitch=INT, accumulate=I1,
    ) as (x, step_length, offsets, terms, w, out, pitch, accumulate):  # fmt: skip
        vector = k.lanes
        cells = [[out + pitch * m + n * vector for n in range(n_count)] for m in range(m_count)]
        sums = [[k.var(k.constant(0.0)) for _ in range(n_count)] for _ in range(m_count)]
        with k.if_(accumulate.value):
            for m in range(m_count):
                for n in range(n_count):
                    sums[m][n].set(k.load(cells[m][n]))

        def step(kk: Int) -> None:
            term = x + k.load_int(offsets + kk)
            if lanes == "pixels":
                vectors, scalars = term, [_factor(w, terms, kk, m, panel) for m in range(m_count)]
            else:
                vectors, scalars = w + kk * (n_count * vector), [term + step_length * m for m in range(m_count)]
            loaded = [k.load(vectors + n * vector) for n in range(n_count)]
            for m in range(m_count):
                scalar = k.broadcast(scalars[m])
                for n in range(n_count):
                    sums[m][n].set(k.fma(scalar, loaded[n], sums[m][n].get()))

        _terms_loop(k, terms, unroll, w, panel if lanes == "pixels" else n_count * vector, step)
        for m in range(m_count):
            for n in range(n_count):
                k.store(cells[m][n], sums[m][n].get())


def _all_rows(k: Kernel, rows: Int, m_most: int, pairs: bool, tile: Callable[[int, Int], None]) -> None:
    """tile(m, row) over all rows: two panels at once with `pairs`, panels of m_most, and the narrow rest."""
    start = k.integer(0)
    if pairs:
        start = rows - rows % (2 * m_most)
        with k.loop(0, start, 2 * m_most) as row:
            tile(2 * m_most, row)
    whole = rows - rows % m_most
    with k.loop(start, whole, m_most) as row:
        tile(m_most, row)
    for m in range(1, m_most):
        with k.if_((rows % m_most).eq(m)):
            tile(m, whole)


def _factor(w: Ptr, terms: Int, kk: Int, m: int, panel: int) -> Ptr:
    """Filter m's element of term kk, in panels `panel` wide."""
    return w + terms * (m // panel * panel) + kk * panel + m % panel


def emit_straight(k: Kernel, m_most: int, n_most: int, epilogue: Epilogue, prefetch: bool) -> None:
    """Emit `run`: a product over one block of gemm_k, whose sums live in registers and in y.

    run(x, offsets, terms, w, bias, residual, y, pitch, filters, length, accumulate, finish) computes for filters f and
    pixels i of a run of at least one vector: y[f * pitch + i] (+)= sum over kk of w[f, kk] * x[offsets[kk] + i], with
    bias, residual and activation when `finish`. The run's last vector overlaps the one before where that does no harm:
    within a tile. Filters as for `block` with lanes over pixels. `prefetch` asks for the next pixels of each term ahead
    of time: for an x that is read where it lies.
    """
    storage, vector = epilogue.storage, k.lanes
    for m in range(1, m_most + 1):
        for n in range(1, n_most + 1):
            _straight_tile(k, m, n, m, epilogue, prefetch, UNROLL if m == m_most else 1)
    # One vector of pixels: the sums of one panel alone would not hide the multiply-add's latency.
    _straight_tile(k, 2 * m_most, 1, m_most, epilogue, prefetch, 1)
    parameters = {
        "offsets": "i64", "terms": INT, "w": k.dtype, "bias": storage, "residual": storage, "y": storage, "pitch": INT,
        "accumulate": I1, "finish": I1, "filters": INT,
    }  # fmt: skip
    for n in range(1, n_most + 1):
        with k.function(f"rows_{n}", x=k.dtype, tail=INT, **parameters) as arguments:
            *_, filters = arguments

            def tile(m: int, f: Int, n: int = n, arguments: list = arguments) -> None:  # type: ignore[type-arg]
                x, tail, offsets, terms, w, bias, residual, y, pitch, accumulate, finish, _ = arguments
                k.call(
                    f"tile_{m}_{n}", x, tail, offsets, terms, w + f * terms, bias + f, residual + f * pitch,
                    y + f * pitch, pitch, accumulate, finish,
                )  # fmt: skip

            _all_rows(k, filters, m_most, n == 1, tile)

    with k.function("run", x=k.dtype, **parameters, length=INT) as arguments:
        x, offsets, terms, w, bias, residual, y, pitch, accumulate, finish, filters, length = arguments

        def columns(n: int, first: Int, tail: Any) -> None:
            """All filters of n vectors from pixel `first`; the last vector `tail` after it."""
            k.call(
                f"rows_{n}", x + first, tail, offsets, terms, w, bias, residual + first, y + first, pitch, accumulate,
                finish, filters,
            )  # fmt: skip

        width = n_most * vector
        rest = length % width
        # Less than a vector is left: the last whole tile gives it one of its vectors.
        short = k.both(rest > 0, rest < vector)
        whole = length - rest - k.select(short, k.integer(width), k.integer(0))
        with k.loop(0, whole, width) as first:
            columns(n_most, first, width - vector)
        with k.if_(short):
            columns(n_most - 1, whole, width - 2 * vector)
            columns(2, length - rest - vector, rest)
        for n in range(1, n_most + 1):
            with k.if_(k.both(rest >= max(vector, (n - 1) * vector + 1), rest <= n * vector)):
                columns(n, whole, rest - vector)


def _straight_tile(
    k: Kernel, m_count: int, n_count: int, panel: int, epilogue: Epilogue, prefetch: bool, unroll: int
) -> None:
    storage = epilogue.storage
    with k.function(
        f"tile_{m_count}_{n_count}",
        x=k.dtype, tail=INT, offsets="i64", terms=INT, w=k.dtype, bias=storage, residual=storage, y=storage, pitch=INT,
        accumulate=I1, finish=I1,
    ) as (x, tail, offsets, terms, w, bias, residual, y, pitch, accumulate, finish):  # fmt: skip
        places = [k.integer(n * k.lanes) for n in range(n_count - 1)] + ([tail] if n_count > 1 else [k.integer(0)])
        sums = [[k.var(k.constant(0.0)) for _ in range(n_count)] for _ in range(m_count)]
        with k.if_(accumulate.value):
            for m in range(m_count):
                for n, place in enumerate(places):
                    sums[m][n].set(k.load(y + pitch * m + place))

        def step(kk: Int) -> None:
            term = x + k.load_int(offsets + kk)
            if prefetch:
                k.prefetch(term + n_count * k.lanes)
            loaded = [k.load(term + place) for place in places]
            for m in range(m_count):
                scalar = k.broadcast(_factor(w, terms, kk, m, panel))
                for n in range(n_count):
                    sums[m][n].set(k.fma(scalar, loaded[n], sums[m][n].get()))

        _terms_loop(k, terms, unroll, w, panel, step)

        def store(last: bool) -> None:
            at = k.integer(0)
            for m in range(m_count):
                for n, place in enumerate(places):
                    value = sums[m][n].get()
                    k.store(y + at + place, epilogue.finish(value, bias + m, residual + at + place) if last else value)
                at = at + pitch

        if epilogue.plain:
            store(False)
        else:
            with k.if_else(finish.value) as (then, otherwise):
                with then:
                    store(True)
                with otherwise:
                    store(False)


def _terms_loop(k: Kernel, terms: Int, unroll: int, w: Ptr, width: int, step: Callable[[Int], None]) -> None:
    """step(kk) for all terms, `unroll` an iteration, each reading `width` elements of the panel w."""
    whole = terms - terms % unroll
    with k.loop(0, whole, unroll) as first:
        if unroll > 1:
            # The panels stream from L2: L1's own prefetcher starts anew with each.
            for ahead in range(0, unroll * width, 64 // BYTES[k.dtype]):
                k.prefetch(w + first * width + (PANEL_AHEAD + ahead), near=True)
        for u in range(unroll):
            step(first + u)
    if unroll > 1:
        with k.loop(whole, terms) as kk:
            step(kk)


def emit_filter_packer(k: Kernel, lanes: str, storage: str, width: int) -> None:
    """Emit `pack_filters`: filters of any strides into panels, as `block` reads them.

    pack_filters(w, w_k, w_c, w_r, w_s, channels, taps_h, taps_w, out, count): `count` filters of such sizes and
    distances into panels of `width` filters, [channel][tap][width]. The last panel is as narrow as it is (pixels), or
    filled up with zeros to whole vectors (channels). Filters side by side are copied as vectors.
    """
    with k.function(
        "pack_filters", w=storage, w_k=INT, w_c=INT, w_r=INT, w_s=INT, channels=INT, taps_h=INT, taps_w=INT,
        out=k.dtype, count=INT,
    ) as (w, w_k, w_c, w_r, w_s, channels, taps_h, taps_w, out, count):  # fmt: skip
        padded = count if lanes == "pixels" else (count + (k.lanes - 1)) // k.lanes * k.lanes
        terms = channels * taps_h * taps_w

        def each_term(panel: Ptr, source: Ptr, across: Int | int, body: Callable[[Ptr, Ptr], None]) -> None:
            with k.loop(0, channels) as c, k.loop(0, taps_h) as r, k.loop(0, taps_w) as s:
                there = panel + ((c * taps_h + r) * taps_w + s) * across
                body(there, source + (c * w_c + r * w_r + s * w_s))

        def beside(there: Ptr, here: Ptr) -> None:
            for step, length in _vectors(k, width):
                k.store(there + step, k.load(here + step, length))

        def apart(there: Ptr, here: Ptr) -> None:
            for step in range(width):
                k.store(there + step, k.load(here + w_k * step, 1))

        with k.loop(0, padded, width) as first:
            across = (padded - first).min(width)
            real = (count - first).min(across)
            source, panel = w + first * w_k, out + first * terms

            def partial(there: Ptr, here: Ptr) -> None:
                with k.loop(0, real) as m:
                    k.store(there + m, k.load(here + m * w_k, 1))
                with k.loop(real, across) as m:
                    k.store(there + m, k.constant(0.0, 1))

            with k.if_else(real.eq(width)) as (whole, narrow):
                with whole, k.if_else(w_k.eq(1)) as (together, lone):
                    with together:
                        each_term(panel, source, width, beside)
                    with lone:
                        each_term(panel, source, width, apart)
                with narrow:
                    each_term(panel, source, across, partial)


def _vectors(k: Kernel, width: int) -> Iterator[tuple[int, int]]:
    """(first, lanes) of the vectors that make so many elements, wide ones first."""
    first = 0
    for lanes in k.widths():
        while width - first >= lanes:
            yield first, lanes
            first += lanes
