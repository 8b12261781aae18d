"""Thousands of sequences of a few dozen tokens on CUDA tensors, dense: tiles of 32 x 32.

Their backward pass makes dQ, and the gradient of a bias that is not shared, by blocks of queries.
"""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest
import torch
from helpers import (
    DEVICE,
    IN_PLACE,
    columns_first,
    dense,
    every_mask,
    launches,
    needs_short_tiles,
    odd_rows,
    put,
    ragged,
    results,
    with_packed_bias,
)
from short import (
    FEW,
    MANY,
    NEEDS,
    OPTIONS,
    check_only,
    check_short,
    either_width,
    every_dim,
    every_length,
    every_option,
    planned,
    short,
    short_ragged,
)
from test_bias import LAYOUTS, broadcast, full, transposed, with_bias
from test_deterministic import noise

import oracle
from oracle import Case, same_bits

pytestmark = needs_short_tiles

# Dense batches without a bias.

LENGTHS = [(1, 1), (7, 7), (16, 16), (17, 17), (31, 31), (32, 32), (1, 32), (32, 1), (17, 9)]
LENGTHS += [(9, 31), (32, 16), (15, 24), (0, 7), (7, 0)]


@every_mask
@pytest.mark.parametrize("n, m", LENGTHS)
def test_lengths(n, m, causal, dtype):
    for d in (16, 64):
        check_short(short(n, m, d=d, dtype=dtype, options={"causal": causal}))


@every_dim
def test_head_dims(d, dv, dtype):
    for n, m in ((32, 32), (31, 17)):
        check_short(short(n, m, d=d, dv=dv, dtype=dtype, options={"causal": True}))


@pytest.mark.parametrize("hq, hk", [(1, 1), (3, 3), (8, 2), (6, 2), (8, 1), (80, 40)])
def test_grouped_queries(hq, hk, dtype):
    for n, m in ((17, 31), (1, 20)):  # one query: the heads of a group are rows
        check_short(short(n, m, hq=hq, hk=hk, d=32, dtype=dtype, options={"causal": True}))


@pytest.mark.parametrize("layout", [*IN_PLACE, odd_rows, columns_first], ids=lambda f: f.__name__)
def test_strides(layout, dtype):
    case = short(17, 31, hq=4, hk=2, d=32, dtype=dtype, options={"causal": True})
    want = check_short(case)
    names = ("q", "k", "v", "grad_out")
    for some in (("q",), ("k",), names):
        moved = replace(case, **{name: layout(getattr(case, name)) for name in some})
        planned(moved)
        got = results(moved)
        assert all(same_bits(got[name], want[name]) for name in want), some


def test_several_leading_dimensions(dtype):
    """That no single stride steps through."""
    case = dense(17, 31, lead=(8, 40), hq=2, hk=2, d=32, dtype=dtype)
    case = with_bias(case, full(case))
    want = check_short(case)

    def swapped(x):
        return x.transpose(0, 1).contiguous().transpose(0, 1)

    for names in (("q", "bias"), ("k", "grad_out"), ("v", "grad_lse")):
        got = results(replace(case, **{name: swapped(getattr(case, name)) for name in names}))
        assert all(same_bits(got[name], want[name]) for name in want), names


# Masks and other options, with and without a bias. 31 queries over 17 keys have rows that see none.


@every_option
def test_options(option, dtype):
    for n, m in ((32, 32), (31, 17), (13, 31)):
        case = short(n, m, d=32, dtype=dtype, options=OPTIONS[option])
        check_short(case)
        check_short(with_bias(case, full(case)))


@pytest.mark.parametrize("option", ["plain", "causal", "window", "right only", "all of them"])
def test_key_lengths(option, dtype):
    options = OPTIONS.get(option, {})
    for n, m, integer in ((32, 32, torch.int32), (9, 31, torch.int64), (31, 8, torch.int32)):
        case = every_length(short(n, m, d=32, dtype=dtype, options=options), integer)
        got = check_short(case)
        empty = case.key_lengths == 0
        assert got["out"][empty].eq(0).all() and got["lse"][empty].eq(-inf).all()
        assert all(got[name][empty].eq(0).all() for name in ("dq", "dk", "dv"))
        check_short(with_bias(case, full(case)))


# A dense bias. One that is not shared has its gradient from the blocks of queries.


def check_own_bias(case: Case, wide=None, layout=None) -> dict[str, torch.Tensor]:
    case = with_bias(case, full(case), wide, layout)
    names = launches(planned(case)[1])
    assert "bwd_bias_dq" in names[-1] and not any("bias_sum" in name for name in names)
    return check_short(case)


@either_width
@pytest.mark.parametrize("n, m", LENGTHS)
def test_own_bias_lengths(n, m, wide, dtype):
    check_own_bias(short(n, m, d=32, dtype=dtype), wide)


@every_dim
def test_own_bias_head_dims(d, dv, dtype):
    for n, m in ((32, 32), (31, 17)):
        check_own_bias(short(n, m, d=d, dv=dv, dtype=dtype, options={"causal": True}))


@pytest.mark.parametrize("hq, hk", [(1, 1), (8, 2), (6, 2), (8, 1)])
def test_own_bias_of_grouped_queries(hq, hk, dtype):
    for n, m in ((32, 32), (17, 31), (1, 24)):
        check_own_bias(short(n, m, hq=hq, hk=hk, d=32, dtype=dtype, options={"causal": True}))


@either_width
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__)
def test_own_bias_strides(layout, wide, dtype):
    for n, m in ((32, 32), (17, 24), (32, 31), (9, 32)):
        check_own_bias(short(n, m, d=32, dtype=dtype), wide, layout)


def test_expanded_bias(dtype):
    """One that its owner expanded has a gradient for every element."""
    case = with_bias(c := short(17, 32, d=32, dtype=dtype), (17, 32))
    case = replace(case, bias=case.bias.expand(full(c)))
    assert check_short(case)["dbias"].shape == full(c)


SHARED = {
    "batch": (0, 1, 1, 1),
    "heads": (1, 0, 1, 1),
    "batch and heads": (0, 0, 1, 1),
    "rows": (1, 1, 0, 1),
    "keys": (1, 1, 1, 0),
    "all but keys": (0, 0, 0, 1),
}


@pytest.mark.parametrize("own", SHARED.values(), ids=SHARED)
def test_shared_bias(own, dtype):
    """Summed by a kernel of its own, from the terms of all heads."""
    for n, m, wide in ((32, 32, None), (17, 31, None), (31, 24, torch.float32)):
        case = short(n, m, hq=4, hk=2, d=32, dtype=dtype, options={"causal": True})
        case = with_bias(case, broadcast(case, own), wide)
        names = launches(planned(case)[1])
        assert "bias_sum" in names[-1] and "bwd_bias_dq" in names[-2]
        check_short(case)


def test_rows_of_pairs(dtype):
    """(B, N, H, S, D) with a bias (B, 1, H, S, S) that all rows of a batch share."""
    for n in (32, 21):
        case = dense(n, lead=(10, 32), hq=2, hk=2, d=32, dtype=dtype)
        lengths = torch.arange(32, device=DEVICE).int() % (n + 1)
        for one in (case, replace(case, key_lengths=lengths)):
            check_short(with_bias(one, (10, 1, 2, n, n)))


@either_width
def test_minus_infinity_is_a_mask(wide, dtype):
    for n, m in ((32, 32), (17, 31)):
        for layout in (None, transposed):
            case = with_bias(c := short(n, m, d=32, dtype=dtype), full(c), wide)
            hidden = torch.rand(case.bias.shape, device=DEVICE) < 0.3
            hidden[..., 5, :] = True  # rows that see no key
            hidden[..., 11] = True  # a key that no row sees
            hidden[7] = hidden[9, 1] = True  # nothing of a sequence, and of a head
            bias = case.bias.masked_fill(hidden, -inf)
            got = check_short(replace(case, bias=layout(bias) if layout else bias))
            assert got["dbias"].masked_fill(~hidden, 0).eq(0).all()
            assert got["dq"][..., 5, :].eq(0).all() and got["dk"][..., 11, :].eq(0).all()
    case = with_bias(c := short(17, 31, d=32, dtype=dtype), broadcast(c, (0, 1, 1, 1)), wide)
    check_short(replace(case, bias=put(case.bias, (..., slice(3, 5), slice(2, None)), -inf)))


@pytest.mark.parametrize("needs", NEEDS)
def test_only_what_is_wanted(needs, dtype):
    case = short(17, 31, hq=4, hk=2, d=32, dtype=dtype, options={"causal": True})
    for own in ((1, 1, 1, 1), (0, 1, 1, 1)):
        check_only(with_bias(case, broadcast(case, own)), needs)
    check_only(with_bias(case, full(case), torch.float32), needs)
    if "b" not in needs:
        check_only(case, needs)


def test_a_loss_of_lse_alone(dtype):
    """There is no dO then."""
    for case in (short(17, 31, d=32, dtype=dtype), short_ragged(FEW, d=32, dtype=dtype)):
        case = replace(case, use_out=False, grad_out=torch.zeros_like(case.grad_out))
        check_short(case)
        own = with_packed_bias(case, 2) if case.cu_q is not None else with_bias(case, full(case))
        check_short(own)


# The same bits in every run: nothing is added in memory.

KINDS = {
    "dense": lambda **kw: short(29, 31, hq=4, hk=2, **kw),
    "own bias": lambda **kw: with_bias(c := short(29, 31, hq=4, hk=2, **kw), full(c)),
    "shared bias": lambda **kw: with_bias(short(29, 31, hq=4, hk=2, **kw), (4, 29, 31)),
    "ragged": lambda **kw: short_ragged(hq=8, hk=4, rest=(3, 4), **kw),
    "packed bias": lambda **kw: with_packed_bias(short_ragged(hq=8, hk=4, rest=(3, 4), **kw), 8),
    "packed for all": lambda **kw: with_packed_bias(short_ragged(hq=8, hk=4, **kw), 1),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_bits_always(kind, dtype):
    """Whether they are asked for or not."""
    case = KINDS[kind](d=32, dtype=dtype, options={"causal": True})
    planned(case)
    want = results(replace(case, deterministic=True))
    for deterministic in (False, True, False, False):
        noise()
        got = oracle.ours(replace(case, deterministic=deterministic))
        for name in want:
            assert same_bits(got[name], want[name]), name
    check_short(replace(case, deterministic=False))


def test_one_long_sequence_beside_short_ones(dtype):
    """The mean decides, so a sequence may have as many blocks as it likes."""
    lengths = (*((3, 5) for _ in range(MANY // 4)), (700, 900), (0, 0), (1, 1500), (8, 8))
    for options in ({}, {"causal": True}):
        case = ragged(lengths, hq=8, hk=4, d=32, dtype=dtype, options=options)
        check_short(case)
        check_short(with_packed_bias(case, 8))
