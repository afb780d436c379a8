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

from tapwise.cpu.epilogue import Epilogue, Sums
from tapwise.cpu.filters import Filters
from tapwise.cpu.simd import BYTES, I1, INT, Int, Kernel, Ptr, Target

# (M, N) by number of vector registers: M * N accumulators + N vectors + 1 broadcast must fit.
_TILES: Final = {
    16: ((6, 2), (4, 3), (3, 3), (2, 5), (1, 12)),
    32: ((12, 2), (8, 3), (6, 4), (4, 6), (3, 7), (2, 9), (1, 24)),
}

# Terms an iteration: the loop's own instructions cost 10 to 15 % when they come with every term.
UNROLL: Final = 4
# Elements that filters are prefetched ahead. Filters of tens of megabytes want many (Zen 5: 3x3 of 1024 on 7x7 0.87 of
# the time of 128, by Winograd on 14x14 0.65); of others anything from 64 to 1024 measures the same.
PANEL_AHEAD: Final = 768


# Lanes over channels read each of the M pixels through an address of its own: many do not fit the integer registers.
# Seven leave no rest of images of 7, 14, 28 pixels: on eight layers of a Zen 5 that take them 1.05 times as fast as six
# (1x1 of 2016 filters on 7x7 1.09, a patch of 1536 1.08, 192 channels a group of stride 2 1.13, least 0.99).
_CHANNEL_TILES: Final = {16: ((6, 2), (4, 3), (3, 3)), 32: ((6, 3), (7, 3), (4, 5), (3, 6))}
# Another, where loads across lines cost little (a Zen 5; nobody measured it elsewhere): four vectors divide 64 filters
# (1x1 of 128 on 7x7 1.05, of 2048 channels to 512 1.18, 3x3 of 512 on 7x7 1.3; 18 layers that take it 1.05, one 0.92).
_OF_FOUR_VECTORS: Final = (6, 4)


def shapes(target: Target, lanes: str = "pixels", split_loads: bool = True) -> tuple[tuple[int, int], ...]:
    """Tile shapes (M, N) worth trying on a target, the most balanced first. `split_loads`: of the device."""
    if lanes == "pixels":
        return _TILES[target.registers]
    more = (_OF_FOUR_VECTORS,) if target.registers == 32 and not split_loads else ()
    return _CHANNEL_TILES[target.registers] + more


# Of the terms, those that a tile sums: [first + i * apart, last + i * apart) for each i below `parts`.
RANGES: Final = ("first", "last", "parts", "apart")


def emit(k: Kernel, m_most: int, n_most: int, filters: Filters, pieces: bool = False) -> None:
    """Emit `block`: a product over one packed block of gemm_k, for any number of rows and vectors.

    block(x, step, offsets, terms, w, out, pitch, rows, vectors, accumulate, *filters' own) computes
      pixels:   out[row * pitch + lane] (+)= sum over kk of w[row, kk] * x[offsets[kk] + lane]
      channels: out[row * pitch + lane] (+)= sum over kk of x[offsets[kk] + row * step] * w[kk, lane]
    over `rows` rows and `vectors` vectors of lanes. With `pieces` (lanes over channels) rows come in `rows` pieces, and
    three arguments more stand at the end: pieces, channels and taps_w. Five int64 describe a piece: its first row, how
    many rows, the first of its taps, how many follow each other, and of how many rows of the filter. Terms are in the
    order (tap, channel), and only those of a piece's taps are summed.
    """
    lanes = filters.lanes
    ranges = dict.fromkeys(RANGES, INT) if pieces else {}
    for m in range(1, m_most + 1):
        for n in range(1, n_most + 1):
            # The narrow tiles of the last rows do little of the work, and would take most of the time to compile.
            _tile(k, m, n, m, filters, UNROLL if m == m_most else 1, pieces)
    # One vector: the sums of one panel alone, or of so few pixels, would not hide the multiply-add's latency.
    _tile(k, 2 * m_most, 1, m_most, filters, 1, pieces)
    parameters = {"x": k.dtype, "step": INT, "offsets": "i64", "terms": INT, "w": k.dtype, "out": k.dtype, "pitch": INT}
    vector = k.lanes

    for n in range(1, n_most + 1):
        own_parameters = filters.parameters | ranges
        with k.function(f"rows_{n}", **parameters, rows=INT, accumulate=I1, **own_parameters) as arguments:
            rows = arguments[7]

            def tile(m: int, row: Int, n: int = n, arguments: list = arguments) -> None:  # type: ignore[type-arg]
                x, step, offsets, terms, w, out, pitch, _, accumulate, *own = arguments
                there, first = (x, filters.at(w, row, terms, own)) if lanes == "pixels" else (x + row * step, w)
                k.call(f"tile_{m}_{n}", there, step, offsets, terms, first, out + row * pitch, pitch, accumulate, *own)

            _all_rows(k, rows, m_most, n == 1, tile)

    own_parameters = {"pieces": "i64", "channels": INT, "taps_w": INT} if pieces else filters.parameters
    with k.function("block", **parameters, rows=INT, vectors=INT, accumulate=I1, **own_parameters) as arguments:
        x, step, offsets, terms, w, out, pitch, rows, vectors, accumulate, *own = arguments

        def columns(n: int, first: Int) -> None:
            """All rows of n vectors from vector `first`."""
            shift = first * vector
            there = x + shift if lanes == "pixels" else x
            here = w if lanes == "pixels" else filters.at(w, shift, terms, own)
            if pieces:
                table, channels, taps_w = own
                with k.loop(0, rows) as i:
                    row, count, tap, taps, parts = (k.load_int(table + (i * 5 + field)) for field in range(5))
                    k.call(
                        f"rows_{n}", x + row * step, step, offsets, terms, here, out + row * pitch + shift, pitch,
                        count, accumulate, tap * channels, (tap + taps) * channels, parts, taps_w * channels,
                    )  # fmt: skip
                return
            k.call(f"rows_{n}", there, step, offsets, terms, here, out + shift, pitch, rows, accumulate, *own)

        whole = vectors - vectors % n_most
        with k.loop(0, whole, n_most) as first:
            columns(n_most, first)
        for n in range(1, n_most):
            with k.if_((vectors % n_most).eq(n)):
                columns(n, whole)


def _tile(k: Kernel, m_count: int, n_count: int, panel: int, filters: Filters, unroll: int, ranged: bool) -> None:
    """One register tile over all terms, or some ranges of them: tile_M_N."""
    with k.function(
        f"tile_{m_count}_{n_count}",
        x=k.dtype, step=INT, offsets="i64", terms=INT, w=k.dtype, out=k.dtype, pitch=INT, accumulate=I1,
        **filters.parameters, **(dict.fromkeys(RANGES, INT) if ranged else {}),
    ) as (x, step_length, offsets, terms, w, out, pitch, accumulate, *own):  # fmt: skip
        vector = k.lanes
        cells = [[out + pitch * m + n * vector for n in range(n_count)] for m in range(m_count)]
        sums = [[k.var(k.constant(0.0)) for _ in range(n_count)] for _ in range(m_count)]
        with k.if_(accumulate.value):
            for m in range(m_count):
                for n in range(n_count):
                    sums[m][n].set(k.load(cells[m][n]))

        first, last, parts, apart = own if ranged else (k.integer(0), terms, None, None)
        own = filters.reach(own, m_count)

        def step(kk: Int) -> None:
            term = x + k.load_int(offsets + kk)
            if filters.lanes == "pixels":
                vectors, scalars = term, filters.factors(w, kk, terms, m_count, panel, own)
            else:
                vectors = filters.vectors(w, kk, n_count, own)
                scalars = [term + step_length * m for m in range(m_count)]
            loaded = [k.load(vectors + n * vector) for n in range(n_count)]
            for m in range(m_count):
                scalar = k.broadcast(scalars[m])
                for n in range(n_count):
                    sums[m][n].set(k.multiply_add(scalar, loaded[n], sums[m][n].get()))

        width = panel if filters.lanes == "pixels" else n_count * vector
        panel_at = None if filters.in_place else w
        if ranged:
            with k.loop(0, parts) as part:
                _terms_loop(k, first + part * apart, last + part * apart, unroll, panel_at, width, step)
        else:
            _terms_loop(k, first, last, unroll, panel_at, width, step)
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


def emit_straight(
    k: Kernel, m_most: int, n_most: int, filters: Filters, epilogue: Epilogue, fetch_x: bool, fetch_y: bool
) -> None:
    """Emit `run`: a product over one block of gemm_k, whose sums live in registers and in y.

    run(x, offsets, terms, w, bias, residual, y, pitch, accumulate, finish, count, length, *filters' own) computes for
    `count` filters f and pixels i of a run of at least one vector: y[f * pitch + i] (+)= sum over kk of
    w[f, kk] * x[offsets[kk] + i], with bias, residual and activation when `finish`. The run's last vector overlaps the
    one before where that does no harm: within a tile. `fetch_x` asks for each term's next pixels ahead of time, of an x
    that is read where it lies: the tiles of a column share the lines of the next. `fetch_y` asks for a tile's lines of
    y and of the residual as it begins: where no cache holds them, and rows lie too far apart for the machine's own
    prefetcher.
    """
    storage, vector = epilogue.storage, k.lanes
    for m in range(1, m_most + 1):
        for n in range(1, n_most + 1):
            _straight_tile(k, m, n, m, filters, epilogue, fetch_x, fetch_y, UNROLL if m == m_most else 1)
    # One vector of pixels: the sums of one panel alone would not hide the multiply-add's latency.
    _straight_tile(k, 2 * m_most, 1, m_most, filters, epilogue, fetch_x, fetch_y, 1)
    parameters = {
        "offsets": "i64", "terms": INT, "w": k.dtype, "bias": storage, "residual": storage, "y": storage, "pitch": INT,
        "accumulate": I1, "finish": I1, "count": INT,
    }  # fmt: skip
    for n in range(1, n_most + 1):
        with k.function(f"rows_{n}", x=k.dtype, tail=INT, **parameters, **filters.parameters) as arguments:
            count = arguments[2 + list(parameters).index("count")]

            def tile(m: int, f: Int, n: int = n, arguments: list = arguments) -> None:  # type: ignore[type-arg]
                x, tail, offsets, terms, w, bias, residual, y, pitch, accumulate, finish, _, *own = arguments
                # The last pixel of the next columns' first vector, second, and so on: another for each tile in turn.
                ahead = x + ((f // m_most % n + (n + 1)) * vector - 1)
                k.call(
                    f"tile_{m}_{n}", x, ahead, tail, offsets, terms, filters.at(w, f, terms, own), bias + f,
                    residual + f * pitch, y + f * pitch, pitch, accumulate, finish, *own,
                )  # fmt: skip

            _all_rows(k, count, m_most, n == 1, tile)

    with k.function("run", x=k.dtype, **parameters, length=INT, **filters.parameters) as arguments:
        x, offsets, terms, w, bias, residual, y, pitch, accumulate, finish, count, length, *own = arguments

        def columns(n: int, first: Int, tail: Any) -> None:
            """All filters of n vectors from pixel `first`; the last vector `tail` after it."""
            k.call(
                f"rows_{n}", x + first, tail, offsets, terms, w, bias, residual + first, y + first, pitch, accumulate,
                finish, count, *own,
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
    k: Kernel, m_count: int, n_count: int, panel: int, filters: Filters, epilogue: Epilogue, fetch_x: bool,
    fetch_y: bool, unroll: int,
) -> None:  # fmt: skip
    storage = epilogue.storage
    with k.function(
        f"tile_{m_count}_{n_count}",
        x=k.dtype, ahead=k.dtype, tail=INT, offsets="i64", terms=INT, w=k.dtype, bias=storage, residual=storage,
        y=storage, pitch=INT, accumulate=I1, finish=I1, **filters.parameters,
    ) as (x, ahead, tail, offsets, terms, w, bias, residual, y, pitch, accumulate, finish, *own):  # fmt: skip
        places = [k.integer(n * k.lanes) for n in range(n_count - 1)] + ([tail] if n_count > 1 else [k.integer(0)])
        sums = [[k.var(k.constant(0.0)) for _ in range(n_count)] for _ in range(m_count)]
        with k.if_(accumulate.value):
            for m in range(m_count):
                for n, place in enumerate(places):
                    sums[m][n].set(k.load(y + pitch * m + place))
        if fetch_y:
            at = k.integer(0)
            for _ in range(m_count):
                for place in places:
                    k.prefetch(y + at + place, near=True, write=True)
                    if epilogue.residual:
                        k.prefetch(residual + at + place, near=True)
                at = at + pitch

        own = filters.reach(own, m_count)

        def step(kk: Int) -> None:
            at = k.load_int(offsets + kk)
            term = x + at
            if fetch_x:
                k.prefetch(ahead + at)
            loaded = [k.load(term + place) for place in places]
            for m, factor in enumerate(filters.factors(w, kk, terms, m_count, panel, own)):
                scalar = k.broadcast(factor)
                for n in range(n_count):
                    sums[m][n].set(k.multiply_add(scalar, loaded[n], sums[m][n].get()))

        _terms_loop(k, k.integer(0), terms, unroll, None if filters.in_place else w, panel, step)

        def found() -> Iterator[Sums]:
            at = k.integer(0)
            for m in range(m_count):
                for n, place in enumerate(places):
                    yield Sums(sums[m][n].get(), bias + m, residual + at + place, y + at + place)
                at = at + pitch

        def store() -> None:
            for one in found():
                k.store(one.y, one.value)

        if epilogue.plain:
            store()
        else:
            with k.if_else(finish.value) as (then, otherwise):
                with then:
                    epilogue.store(found())
                with otherwise:
                    store()


def _terms_loop(
    k: Kernel, begin: Int, end: Int, unroll: int, w: Ptr | None, width: int, step: Callable[[Int], None]
) -> None:
    """step(kk) for terms [begin, end), `unroll` an iteration, each reading `width` elements of the panel w, if there is
    one."""
    whole = end - (end - begin) % unroll
    with k.loop(begin, whole, unroll) as first:
        if unroll > 1 and w is not None:
            # The panels stream from L2: L1's own prefetcher starts anew with each.
            for ahead in range(0, unroll * width, 64 // BYTES[k.dtype]):
                k.prefetch(w + first * width + (PANEL_AHEAD + ahead), near=True)
        for u in range(unroll):
            step(first + u)
            if w is None:
                # LLVM would load ahead, beyond the registers there are.
                k.fence()
    if unroll > 1:
        with k.loop(whole, end) as kk:
            step(kk)
