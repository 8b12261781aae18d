"""Few tiles of keys for many SMs: the queries of each shared out, dK and dV put together again."""

from __future__ import annotations

from dataclasses import replace
from math import inf, nan

import helpers
import pytest
import torch
from helpers import (
    IN_PLACE,
    check_case,
    check_containment,
    dense,
    either_way,
    every_mask,
    explained,
    integers,
    needs_query_splits,
    on_a_gpu,
    put,
    ragged,
    results,
)

import flashmoe_science as fm
import oracle
from oracle import same_bits

pytestmark = [on_a_gpu, needs_query_splits, pytest.mark.family("sm90")]

HEAD_DIMS = [32, 64, 96, 128, 192, 256]
MASKS = {"full": {}, "causal": {"causal": True}, "window": {"window": (300, 40)},
         "left": {"window": (500, -1)}, "right": {"window": (-1, 5)}}  # fmt: skip


def splits(case) -> int:
    tensors, options = explained(case)
    return helpers.splits(fm.explain(*tensors, **options, backward=True))


def check_split(case):
    assert splits(case) > 1
    return check_case(case)


def few(n, m=None, *, lead=(1,), hq=4, hk=1, **shape):
    return dense(n, m, lead=lead, hq=hq, hk=hk, **shape)


def test_where_it_pays(dtype):
    """Key heads that fill no SMs, long rows of a causal mask; not where there is enough to do."""
    causal = {"options": {"causal": True}, "dtype": dtype, "d": 128}
    assert splits(few(5003, hq=16, **causal)) > 4
    assert splits(dense(2048, lead=(1,), hq=32, hk=8, **causal)) > 1
    assert splits(dense(4096, lead=(2,), hq=32, hk=8, **causal)) == 1
    assert splits(few(100, d=64, dtype=dtype)) == 1


@either_way
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("d", HEAD_DIMS)
def test_masks(d, mask, deterministic, dtype):
    shape = {"d": d, "dtype": dtype, "deterministic": deterministic, "options": MASKS[mask]}
    check_split(few(1500, **shape))
    check_split(few(1025, 700, **shape))


@pytest.mark.parametrize("n, m", [(700, 1), (900, 127), (1999, 129), (640, 641), (4097, 300)])
@every_mask
def test_lengths(n, m, causal, dtype):
    for d in (64, 128, 256):
        case = few(n, m, d=d, dtype=dtype, options={"causal": causal})
        if m > n or not causal:
            assert splits(case) > 1
        check_case(case)


@either_way
@pytest.mark.parametrize("hq, hk", [(1, 1), (3, 3), (5, 1), (7, 1), (14, 2), (16, 1), (33, 3)])
def test_groups(hq, hk, deterministic, dtype):
    for d in (64, 128, 256) if hq > hk else (128, 256):
        shape = {"d": d, "dtype": dtype, "deterministic": deterministic}
        check_split(dense(1111, lead=(1,), hq=hq, hk=hk, options={"causal": True}, **shape))


@every_mask
def test_several_sequences_and_their_lengths(causal, dtype):
    for d in (64, 128, 256):
        lengths = integers(0, 1, 257, 900)
        options = {"causal": causal}
        check_split(few(900, lead=(4,), d=d, dtype=dtype, options=options))
        check_split(few(900, lead=(4,), d=d, dtype=dtype, options=options, key_lengths=lengths))


def test_wrong_key_lengths_are_nan(dtype):
    for d in (64, 128, 256):
        lengths = integers(900, 901, 37)
        case = few(800, 900, lead=(3,), d=d, dtype=dtype, key_lengths=lengths)
        assert splits(case) > 1
        got = results(case)
        assert all(got[x][1].isnan().all() for x in ("dq", "dk", "dv"))
        assert all(got[x][[0, 2]].isfinite().all() for x in ("dq", "dk", "dv"))


# Tiles of 128 keys that leave most of 132 SMs, or of 66 pairs of these, without work at the end.
REST = {64: (15, 9), 128: (15, 9), 256: (8, 9)}  # heads, tiles of each


@either_way
@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize("d", REST)
def test_the_last_tiles_alone(d, group, deterministic, dtype):
    heads, tiles = REST[d]
    n = 128 * tiles - 41
    shape = {"d": d, "dtype": dtype, "deterministic": deterministic}
    case = dense(n if d > 64 else 2 * n, n, lead=(1,), hq=group * heads, hk=heads, **shape)
    if torch.cuda.get_device_properties(0).multi_processor_count == 132:
        tensors, options = explained(case)
        rest = heads * tiles - (132 if d <= 128 else 66)
        assert f", of {rest} tiles of keys" in fm.explain(*tensors, **options, backward=True)
    check_case(case)


@pytest.mark.parametrize("options", [{"causal": True}, {"window": (2000, 300)}], ids=str)
@pytest.mark.parametrize("d", [96, 128])
def test_sums_that_begin_with_zeros(d, options, dtype):
    check_split(few(4100, hq=2, d=d, dtype=dtype, deterministic=False, options=options))


@pytest.mark.parametrize("needs", ["q", "k", "v", "qk", "kv", "qv"])
def test_only_the_gradients_that_are_wanted(needs, dtype):
    for d in (64, 128, 256):
        case = few(1200, d=d, dtype=dtype, needs=needs, options={"causal": True})
        check_split(case)


@pytest.mark.parametrize("d, dv", [(64, 128), (128, 64), (96, 40), (20, 64), (192, 128), (8, 256)])
def test_value_head_dims(d, dv, dtype):
    check_split(few(1200, d=d, dv=dv, dtype=dtype, options={"causal": True}))


@pytest.mark.parametrize("option", [{"softcap": 2.0}, {"scale": 0.8, "causal": True}], ids=str)
def test_options(option, dtype):
    for d in (64, 128, 256):
        check_split(few(1200, d=d, dtype=dtype, options=option))


@pytest.mark.parametrize("layout", IN_PLACE)
def test_layouts(layout, dtype):
    for d in (64, 128):
        case = few(1200, lead=(2,), d=d, dtype=dtype, options={"causal": True})
        tensors = {x: layout(getattr(case, x)) for x in ("q", "k", "v", "grad_out")}
        check_split(replace(case, **tensors))


RAGGED = {
    "one": ((1500, 1500),),
    "unequal": ((3, 3), (1025, 1025), (2, 2), (700, 900)),
    "empty": ((0, 0), (1300, 1300), (0, 9), (17, 0), (65, 200)),
}


@either_way
@every_mask
@pytest.mark.parametrize("lengths", RAGGED)
def test_ragged_batches(lengths, causal, deterministic, dtype):
    for d in (64, 128, 256):
        shape = {"d": d, "dtype": dtype, "hq": 4, "hk": 1, "deterministic": deterministic}
        options = {"causal": causal}
        check_split(ragged(RAGGED[lengths], options=options, **shape))
        check_split(ragged(RAGGED[lengths], rest=(70, 9), options=options, **shape))


# (A key of infinities takes itself out of some sums, which are other sums then.)
@pytest.mark.parametrize(
    "which, value",
    [(x, nan) for x in ("q", "k", "v", "grad_out")] + [("v", inf), ("grad_out", inf)],
)
def test_what_a_mask_hides_stays_hidden(which, value, dtype):
    for d, hq in ((64, 4), (128, 4), (256, 2)):
        clean = few(400, hq=hq, d=d, dtype=dtype, options={"causal": True})
        assert splits(clean) > 1
        dirty = replace(clean, **{which: put(getattr(clean, which), (0, 0, 311, 3), value)})
        assert check_containment(clean, dirty)


@pytest.mark.parametrize("d", [64, 128, 256])
def test_the_same_bits_with_other_work_beside(d, dtype):
    """dK and dV are added in order whatever dQ is."""
    case = few(3000, hq=8, d=d, dtype=dtype, options={"causal": True}, deterministic=False)
    assert splits(case) > 1
    want = results(case)
    for _ in range(5):
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.randn(1 << 22, device="cuda").sort()
        got = oracle.ours(case)
        for name in ("dk", "dv"):
            assert same_bits(got[name], want[name]), name
