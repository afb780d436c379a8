"""Packing of cpu.direct on pairs of channels (pairs.py) in NCHW: two planes are interleaved into one of pairs."""

from __future__ import annotations

from tapwise.cpu.fields import Fields
from tapwise.cpu.pairs import PairKernel, pair_of_planes
from tapwise.cpu.simd import INT
from tapwise.ops.conv.cpu.packing import Window, emit_pack_plane


def emit_pack_planes(k: PairKernel, names: tuple[str, ...]) -> None:
    """pack_input of cpu.direct for NCHW: each pair of planes into one. a.odd: a group's last pair has but one."""
    with k.function(
        "pack_input", args="i64", packed=k.dtype, image=INT, channel=INT, channels=INT, p0=INT, q0=INT, rows=INT
    ) as (args, packed, image, channel, channels, p0, q0, rows):
        a = Fields(k, args, names)
        window, plane = Window(a, p0, q0, rows), a.h * a.w_in
        size = a.row_phases * a.col_phases * a.plane
        group_c = a.group_c * 2 - a.odd
        with k.loop(0, channels) as c:
            group, pair = (channel + c) // a.group_c, (channel + c) % a.group_c
            first = (image * a.groups + group) * group_c + pair * 2
            source = pair_of_planes(k, a.pointer("x", "bf16") + first * plane, plane, pair * 2 + 1 < group_c)
            emit_pack_plane(k, window, source, packed + c * size)
