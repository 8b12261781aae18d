"""Backward passes of few queries and keys, where a cluster has all of a head: the sm90 family's
kernel for them, which the planner takes by itself. test_sm90.py has its kernels for tiles of keys.

Every case asks explain() whether it has that kernel: another choice of the planner must not leave
it untested.
"""

from __future__ import annotations

import re
from dataclasses import replace
from math import inf, nan

import pytest
import torch
from helpers import (
    COPIED,
    DEVICE,
    IN_PLACE,
    OPTIONS,
    check_case,
    check_containment,
    dense,
    every_mask,
    explained,
    integers,
    launches,
    on_a_gpu,
    put,
    results,
    rows_first,
    same,
    with_sinks,
)

import flashmoe_science as fm
import oracle

pytestmark = pytest.mark.family("sm90")
CHIP = None if DEVICE == "cuda" else "sm_90"  # for which a rehearsal plans

# Around a warpgroup's 64 keys, a CTA's 128 and a cluster's 256; tiles of queries have 128.
LENGTHS = (1, 2, 63, 64, 65, 127, 128, 129, 191, 255, 256)
PAIRS = [(n, n) for n in LENGTHS]
PAIRS += [(n, LENGTHS[(7 * i + 3) % len(LENGTHS)]) for i, n in enumerate(LENGTHS)]
PAIRS += [(LENGTHS[(3 * i + 5) % len(LENGTHS)], m) for i, m in enumerate(LENGTHS)]
PAIRS = sorted(set(PAIRS))
MASKS = {"full": {}, "causal": {"causal": True}, "window": {"window": (70, 13)},
         "left": {"window": (100, -1)}, "right": {"window": (-1, 5)},
         "late keys": {"window": (0, 200)}}  # fmt: skip
every_kind_of_mask = pytest.mark.parametrize("mask", MASKS)
either_bucket = pytest.mark.parametrize("d", [32, 64])


def is_whole(case: oracle.Case) -> oracle.Case:
    """The case, which one launch serves, in one order always."""
    tensors, options = explained(case)
    text = fm.explain(*tensors, **options, backward=True, device=CHIP)
    bucket = 32 if max(case.q.shape[-1], case.v.shape[-1]) <= 32 else 64
    kernel = rf"kernel +sm90_attention_bwd_whole_\w+_d{bucket}_128x256$"
    assert re.search(kernel, text, re.M) and not launches(text), text
    assert "\n  bitwise reproducible\n" in text
    return case


def whole(n, m=None, *, lead=(2,), heads=2, **shape) -> oracle.Case:
    """`shape` as for dense()."""
    return is_whole(dense(n, m, lead=lead, hq=heads, hk=heads, **shape))


def check_whole(case: oracle.Case) -> dict[str, torch.Tensor]:
    """Numbers, and the same bits in every run, asked for or not."""
    got = check_case(replace(case, deterministic=True))
    free = results(replace(case, deterministic=False))
    assert free.keys() == got.keys() and all(same([free[x]], [got[x]]) for x in got)
    return got


@either_bucket
@every_kind_of_mask
def test_lengths(mask, d, dtype):
    for n, m in PAIRS:
        check_whole(whole(n, m, d=d, dtype=dtype, options=MASKS[mask]))


HEAD_DIMS = [(d, d) for d in (1, 8, 16, 20, 24, 32, 33, 40, 48, 56, 63, 64)]
HEAD_DIMS += [(8, 64), (64, 8), (16, 32), (33, 40), (40, 33), (20, 64), (1, 3)]


@pytest.mark.parametrize("d, dv", HEAD_DIMS)
def test_head_dims(d, dv, dtype):
    for n, m in ((130, 200), (70, 65), (256, 256)):
        check_whole(whole(n, m, d=d, dv=dv, dtype=dtype, options={"causal": True}))


@either_bucket
@pytest.mark.parametrize(
    "option",
    [name for name, x in OPTIONS.items() if "softcap" not in x and x.get("scale", 1) > 0],
)
def test_options(option, d, dtype):
    for n, m in ((200, 200), (130, 256), (256, 130), (1, 200), (67, 1)):
        check_whole(whole(n, m, d=d, dtype=dtype, options=OPTIONS[option]))


@pytest.mark.parametrize(
    "window", [(0, 0), (0, -1), (63, 64), (64, 63), (127, 0), (0, 129), (128, 128)], ids=str
)
@every_mask
def test_windows(window, causal, dtype):
    options = {"window": window, "causal": causal}
    for n, m in ((256, 256), (129, 255), (255, 129), (3, 200)):
        check_whole(whole(n, m, dtype=dtype, options=options))


@either_bucket
@every_kind_of_mask
@pytest.mark.parametrize("n, m", [(1, 256), (130, 200), (256, 256), (200, 128), (256, 65)])
def test_key_lengths(n, m, mask, d, dtype):
    """Some leave the second CTA without keys, some both."""
    lengths = integers(0, 1, 2, 63, 64, min(m, 129), m // 2, m - 1, m)
    shape = {"lead": (9,), "d": d, "dtype": dtype, "options": MASKS[mask]}
    got = check_whole(whole(n, m, key_lengths=lengths, **shape))
    assert got["dq"][0].eq(0).all()
    for name in ("dk", "dv"):
        behind = torch.arange(m, device=DEVICE) >= lengths[:, None, None]
        assert got[name][behind.expand(-1, 2, -1)].eq(0).all(), name


@on_a_gpu
@every_mask
@pytest.mark.parametrize("n, m", [(1, 1), (130, 100), (200, 256), (256, 129)])
def test_wrong_key_lengths_are_nan(n, m, causal, dtype):
    """In memory that held finite numbers: NaN that nobody wrote would prove nothing."""
    options = {"causal": causal}
    lengths = integers(m, m + 1, 1, -1, 2**30)
    case = whole(n, m, lead=(5,), dtype=dtype, key_lengths=lengths, options=options)
    tensors = (case.q, case.k, case.v, case.grad_out, case.grad_lse)
    blocks = [torch.full_like(x, 3.0) for x in tensors for _ in range(3)]
    del blocks
    got = oracle.ours(case)
    right = [0, 2]
    for i in (1, 3, 4):
        assert all(x[i].isnan().all() for x in got.values()), i
    names = ("q", "k", "v", "grad_out", "grad_lse", "key_lengths")
    part = replace(case, **{name: getattr(case, name)[right] for name in names})
    oracle.accept(part, {name: x[right] for name, x in got.items()})


@either_bucket
@pytest.mark.parametrize("n, m", [(100, 100), (200, 256)])
def test_what_is_not_wanted_changes_nothing(n, m, d, dtype):
    case = whole(n, m, d=d, dtype=dtype, options={"causal": True})
    want = check_whole(case)
    for needs in ("q", "k", "v", "qk", "qv", "kv"):
        got = check_whole(replace(case, needs=needs))
        assert set(got) == {"out", "lse", *(f"d{name}" for name in needs)}
        assert all(same([got[name]], [want[name]]) for name in got)


@either_bucket
@pytest.mark.parametrize("n, m", [(65, 128), (256, 200)])
def test_one_of_the_upstream_gradients_alone(n, m, d, dtype):
    case = whole(n, m, d=d, dtype=dtype, options={"window": (90, 30)})
    check_whole(replace(case, grad_lse=None))
    check_whole(replace(case, use_out=False, grad_out=torch.zeros_like(case.grad_out)))


def test_sinks_whose_gradient_nobody_wants(dtype):
    for options in ({}, {"causal": True}):  # some rows see a sink alone
        case = whole(256, 150, dtype=dtype, options=options)
        check_whole(replace(with_sinks(case), needs="qkv"))


# Where the two halves of a CTA's keys, the two CTAs and the two tiles of queries begin and end.
ROWS = (0, 63, 64, 127, 128, 191, 199)


@either_bucket
@pytest.mark.parametrize("which", ["q", "k", "v", "grad_out", "grad_lse"])
@every_kind_of_mask
def test_nan_reaches_what_depends_on_it(mask, which, d, dtype):
    clean = whole(200, lead=(1,), d=d, dtype=dtype, options=MASKS[mask])
    reached = 0
    for row in ROWS:
        at = (0, 1, row) if which == "grad_lse" else (0, 1, row, d - 5)
        for value in (nan, inf) if which in ("v", "grad_out") else (nan,):
            dirty = replace(clean, **{which: put(getattr(clean, which), at, value)})
            reached += check_containment(clean, dirty)
    assert reached, "no place was seen by anything: the test says nothing"


@either_bucket
@every_mask
@pytest.mark.parametrize("n", [1, 130, 256])
def test_keys_behind_the_length_are_never_looked_at(n, causal, d, dtype):
    lengths = integers(0, 1, 64, 127, 128, 129, 200)
    shape = {"lead": (7,), "d": d, "dtype": dtype, "options": {"causal": causal}}
    clean = whole(n, 200, key_lengths=lengths, **shape)
    padding = torch.arange(200, device=DEVICE)[:, None] >= lengths[:, None, None, None]
    dirty = replace(clean, k=clean.k.masked_fill(padding, nan), v=clean.v.masked_fill(padding, inf))
    assert check_containment(clean, dirty) == 0


@pytest.mark.parametrize("layout", [*IN_PLACE, *COPIED], ids=lambda layout: layout.__name__)
@pytest.mark.parametrize("d", [24, 40, 64])
def test_strides(layout, d, dtype):
    for n, m in ((130, 100), (200, 256)):
        case = whole(n, m, lead=(3,), heads=3, d=d, dtype=dtype, options={"causal": True})
        want = check_whole(case)
        tensors = {x: layout(getattr(case, x)) for x in ("q", "k", "v", "grad_out")}
        got = check_whole(is_whole(replace(case, **tensors)))
        assert all(same([got[name]], [want[name]]) for name in want)


def test_several_leading_dimensions(dtype):
    check_whole(whole(130, 200, lead=(2, 3), dtype=dtype))
    check_whole(whole(100, 70, lead=(3, 1, 2), heads=1, dtype=dtype, options={"causal": True}))


@on_a_gpu
@either_bucket
@every_mask
@pytest.mark.parametrize("n, m", [(130, 200), (256, 256), (200, 128)])
def test_several_rounds_of_sms(n, m, causal, d, dtype, monkeypatch):
    """More heads than the planner leaves to it; each has the bits that it has with few beside."""
    monkeypatch.setenv("FLASHMOE_TILE", f"128x{64 if d == 32 else 128},128x256")
    shape = {"lead": (30,), "heads": 20, "d": d, "dtype": dtype, "options": {"causal": causal}}
    case = whole(n, m, **shape)
    beside = {x: rows_first(getattr(case, x)) for x in ("q", "k", "v", "grad_out")}
    got = check_whole(replace(case, **beside))
    names = ("q", "k", "v", "grad_out", "grad_lse")
    for i in (0, 13, 29):
        rows = slice(i, i + 1)
        alone = results(replace(case, **{name: getattr(case, name)[rows] for name in names}))
        assert all(same([got[name][rows]], [alone[name]]) for name in alone), i


@on_a_gpu
def test_not_a_number_in_a_head_stays_there(dtype):
    """Heads with something not finite, behind a mask or not, beside heads without."""
    clean = whole(200, 256, lead=(8,), heads=16, dtype=dtype, options={"causal": True})
    hit = torch.zeros(8, 16, dtype=torch.bool)
    dirty = clean
    for name, index in (
        ("k", (slice(0, 8, 5), slice(0, 16, 3), 250, 1)),
        ("v", (slice(1, 8, 3), slice(0, 16, 2), 100, 7)),
        ("q", (3, slice(1, 16, 4), 130, 5)),
    ):
        dirty = replace(dirty, **{name: put(getattr(dirty, name), index, nan)})
        hit[index[:2]] = True
    want, got = results(clean), results(dirty)
    for name in ("dq", "dk", "dv"):
        assert same([got[name][~hit]], [want[name][~hit]]), name
    assert got["dq"][hit].isnan().flatten(1).any(1).all()
