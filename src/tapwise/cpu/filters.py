"""Filters as register tiles read them: from panels packed for the tiles, or from where they lie."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from tapwise.cpu.copies import interleave
from tapwise.cpu.simd import INT, Int, Kernel, Ptr

# Filters read where they lie that share a register: an address is a register and up to twice (x86) another. Twelve
# addresses in registers of their own would not fit.
ADDRESSED: Final = 3


@dataclass(frozen=True)
class Filters:
    """Panels [filters / width][terms][width], the last one as narrow as it is; over channels in whole vectors.

    `in_place`: a tile takes two arguments more (`own`), the distance of each term's element from the first, and that of
    neighbouring filters, which is 1 for lanes over channels.
    """

    k: Kernel
    lanes: str
    width: int
    in_place: bool = False

    @property
    def parameters(self) -> dict[str, Any]:
        return {"term_steps": "i64", "filter_step": INT} if self.in_place else {}

    def at(self, w: Ptr, first: Int, terms: Int, own: Sequence[Any]) -> Ptr:
        """Where filters from `first` on begin: a panel's first."""
        return w + first * (own[1] if self.in_place else terms)

    def reach(self, own: Sequence[Any], count: int) -> list[Any]:
        """`own`, and behind it distances that LLVM is not to see through: from the first filter to every third."""
        if not self.in_place:
            return []
        return [*own, *(self.k.opaque(own[1] * m) for m in range(0, count, ADDRESSED))]

    def factors(self, w: Ptr, kk: Int, terms: Int, count: int, panel: int, own: Sequence[Any]) -> list[Ptr]:
        """Elements of term kk of `count` filters, in panels `panel` wide; lanes over pixels. `own`: of `reach`."""
        if self.in_place:
            here, (_, step, _, *thirds) = w + self.k.load_int(own[0] + kk), own
            starts = [here, *(here + third for third in thirds)]
            return [starts[m // ADDRESSED] + step * (m % ADDRESSED) for m in range(count)]
        return [w + terms * (m // panel * panel) + kk * panel + m % panel for m in range(count)]

    def vectors(self, w: Ptr, kk: Int, count: int, own: Sequence[Any]) -> Ptr:
        """Elements of term kk of `count` vectors of filters; lanes over channels."""
        if self.in_place:
            return w + self.k.load_int(own[0] + kk)
        return w + kk * (count * self.k.lanes)


def emit_term_steps(k: Kernel) -> None:
    """Emit term_steps(out, w_c, w_r, w_s, channels, taps_h, taps_w): each term's distance, channel by channel."""
    with k.function(
        "term_steps", out="i64", w_c=INT, w_r=INT, w_s=INT, channels=INT, taps_h=INT, taps_w=INT
    ) as (out, w_c, w_r, w_s, channels, taps_h, taps_w):  # fmt: skip
        with k.loop(0, channels) as c, k.loop(0, taps_h) as r, k.loop(0, taps_w) as s:
            k.store_int(out + ((c * taps_h + r) * taps_w + s), c * w_c + r * w_r + s * w_s)


def emit_filter_packer(filters: Filters, storage: str) -> None:
    """Emit `pack_filters`: filters of any strides into panels.

    pack_filters(w, w_k, w_c, w_r, w_s, channels, taps_h, taps_w, out, count): `count` filters of such sizes and
    distances into panels of `width` filters, [channel][tap][width]. The last panel is as narrow as it is (pixels), or
    filled up with zeros to whole vectors (channels). Filters side by side are copied as vectors; of lanes over channels
    whole vectors of filters whose terms, rows of terms or channels follow each other are transposed in registers.
    """
    k, lanes, width = filters.k, filters.lanes, filters.width
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

        def transposed(panel: Ptr, source: Ptr, length: Int, step: Int) -> None:
            """`length` elements that follow each other in each filter, to places `step` apart in the panel."""
            whole = length - length % k.lanes
            with k.loop(0, width, k.lanes) as shift:
                rows = [source + (shift + m) * w_k for m in range(k.lanes)]
                with k.loop(0, whole, k.lanes) as t:
                    for at, vector in enumerate(interleave(k, [k.load(row + t) for row in rows])):
                        k.store(panel + ((t + at) * step + shift), vector)
                with k.loop(whole, length) as t:
                    k.store(panel + (t * step + shift), k.gather([row + t for row in rows]))

        taps = taps_h * taps_w
        # Terms follow each other as they are packed; else channels may, for each tap.
        in_order = k.both(k.both(w_s.eq(1), w_r.eq(taps_w)), w_c.eq(taps))
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
                        if lanes == "pixels":
                            each_term(panel, source, width, apart)
                        else:
                            with k.if_else(in_order) as (ordered, other):
                                with ordered:
                                    transposed(panel, source, terms, k.integer(width))
                                with other, k.if_else(w_c.eq(1)) as (last, scattered):
                                    with last, k.loop(0, taps_h) as r, k.loop(0, taps_w) as s:
                                        here = source + (r * w_r + s * w_s)
                                        transposed(panel + (r * taps_w + s) * width, here, channels, taps * width)
                                    with scattered, k.if_else(w_s.eq(1)) as (rows, lone_terms):
                                        with rows, k.loop(0, channels) as c, k.loop(0, taps_h) as r:
                                            there = panel + (c * taps + r * taps_w) * width
                                            here = source + (c * w_c + r * w_r)
                                            transposed(there, here, taps_w, k.integer(width))
                                        with lone_terms:
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
