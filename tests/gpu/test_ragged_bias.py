"""The packed bias of ragged batches on CUDA tensors, (sum of n_i * m_i, heads), and its gradient.

tests/gpu/test_bad_lengths.py has lengths that contradict it.
"""

from __future__ import annotations

from dataclasses import replace
from math import inf, nan

import pytest
import torch
from helpers import (
    DEVICE,
    OPTIONS,
    check_case,
    check_containment,
    either_way,
    every_mask,
    every_option,
    filled,
    gaps,
    needs_packed_bias,
    put,
    ragged,
    results,
    with_packed_bias,
)

import oracle
from oracle import same_bits

pytestmark = needs_packed_bias

# Empty on either side, one token, the edges of tiles, odd and even numbers of keys.
MIXED = ((31, 31), (1, 7), (0, 5), (64, 65), (17, 0), (0, 0), (70, 40), (1, 1), (65, 129))
LENGTHS = {
    "none": (),
    "one empty": ((0, 0),),
    "only keys": ((0, 9),),
    "only queries": ((9, 0),),
    "empty ends": ((0, 0), (5, 8), (0, 0)),
    "single tokens": ((1, 1),) * 9,
    "whole chunks": ((64, 64), (8, 16), (128, 72)),
    "edges": tuple((n, n) for n in (15, 16, 17, 63, 64, 65, 127, 128, 129)),
    "cross": ((128, 64), (64, 128), (65, 127), (127, 65), (1, 300), (300, 1)),
    "one long": ((3, 3), (521, 523), (2, 2)),
    "crystals": tuple((n, n) for n in (4, 8, 2, 12, 31, 46, 6, 97, 5, 20, 28, 16, 3, 7, 64, 40)),
    "many short": tuple((1 + i % 5, 1 + i * 7 % 11) for i in range(100)),
    "decoding": tuple((1, m) for m in (1, 2, 63, 64, 65, 300, 700, 0, 17)),
    "mixed": MIXED,
}
PAIRS = sum(n * m for n, m in MIXED)
either_head = pytest.mark.parametrize("heads", [4, 1], ids=["each head", "all heads"])


@either_head
@every_mask
@pytest.mark.parametrize("lengths", LENGTHS)
def test_lengths(lengths, causal, heads, dtype):
    case = ragged(LENGTHS[lengths], d=32, dtype=dtype, options={"causal": causal})
    check_case(with_packed_bias(case, heads))


@either_head
@pytest.mark.parametrize("d", [8, 16, 20, 40, 48, 64, 96, 128, 160, 256])
def test_head_dims(d, heads, dtype):
    case = ragged(((31, 31), (70, 40), (0, 3), (1, 65)), d=d, dtype=dtype)
    check_case(with_packed_bias(case, heads))


@either_way
@either_head
@every_option
def test_options(option, heads, deterministic, dtype):
    shape = {"d": 32, "dtype": dtype, "deterministic": deterministic}
    check_case(with_packed_bias(ragged(MIXED, options=OPTIONS[option], **shape), heads))


@pytest.mark.parametrize("hq, hk", [(1, 1), (3, 3), (6, 2), (8, 1)])
def test_grouped_queries(hq, hk, dtype):
    for heads in {hq, 1}:
        check_case(with_packed_bias(ragged(MIXED, hq=hq, hk=hk, d=32, dtype=dtype), heads))


def heads_first(x):
    """Each head's pairs on their own: (H, pairs) in memory."""
    return x.mT.contiguous().mT


def pairs_apart(x):
    """Room before, after and between the pairs."""
    wide = gaps(x.shape[0] + 2, x.shape[1] + 5, dtype=x.dtype)
    return filled(wide[1:-1, 2 : 2 + x.shape[1]], x)


def every_third_pair(x):
    wide = gaps(3 * x.shape[0] + 2, x.shape[1], dtype=x.dtype)
    return filled(wide[2::3][: x.shape[0]], x)


def between_nan(x):
    """Dense, and aligned, with NaN before the first and after the last."""
    return filled(gaps(x.numel() + 64, dtype=x.dtype)[32:-32].view(x.shape), x)


def heads_first_between_nan(x):
    return between_nan(x.mT.contiguous()).mT


LAYOUTS = [heads_first, pairs_apart, every_third_pair, between_nan, heads_first_between_nan]


@either_head
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__)
def test_strides(layout, heads, dtype):
    for wide in (None, torch.float32):
        case = with_packed_bias(ragged(MIXED, d=32, dtype=dtype), heads, wide, layout)
        gradient = check_case(case)["dbias"]
        assert gradient.stride() == torch.empty_like(case.bias).stride()


def test_a_bias_that_its_owner_expanded(dtype):
    """Has a gradient for every head."""
    case = with_packed_bias(ragged(MIXED, d=32, dtype=dtype), 1)
    assert check_case(replace(case, bias=case.bias.expand(-1, 4)))["dbias"].shape == (PAIRS, 4)


@either_head
def test_fp32_bias(heads, dtype):
    for d in (16, 64, 128):
        case = ragged(MIXED, d=d, dtype=dtype, options={"causal": True, "softcap": 5.0})
        check_case(with_packed_bias(case, heads, torch.float32))


@either_head
@pytest.mark.parametrize("rest", [(3, 0), (0, 4), (70, 130)], ids=str)
def test_tokens_of_no_sequence_have_no_bias(rest, heads, dtype):
    for slack in (0, 100):
        case = ragged(MIXED, rest=rest, slack=slack, d=32, dtype=dtype)
        got = check_case(with_packed_bias(case, heads))
        q_end = sum(n for n, _ in MIXED)
        assert got["out"][q_end:].eq(0).all() and got["lse"][q_end:].eq(-inf).all()


@either_head
def test_lengths_of_64_bits(heads, dtype):
    check_case(with_packed_bias(ragged(MIXED, cu_dtype=torch.int64, d=32, dtype=dtype), heads))


def rows_of(sequence: int, row: int) -> slice:
    """The pairs of one row of a sequence."""
    before = sum(n * m for n, m in MIXED[:sequence])
    keys = MIXED[sequence][1]
    return slice(before + row * keys, before + (row + 1) * keys)


@either_head
def test_minus_infinity_is_a_mask(heads, dtype):
    for wide in (None, torch.float32):
        case = with_packed_bias(ragged(MIXED, d=64, dtype=dtype), heads, wide)
        hidden = torch.rand(case.bias.shape, device=DEVICE) < 0.3
        for sequence, row in ((0, 0), (1, 0), (6, 33), (8, 64)):  # that see nothing
            hidden[rows_of(sequence, row)] = True
        check_case(replace(case, bias=case.bias.masked_fill(hidden, -inf)))


@either_head
@pytest.mark.parametrize("poison", [nan, inf], ids=str)
def test_rows_that_see_nothing_may_hold_anything(poison, heads, dtype):
    case = with_packed_bias(ragged(MIXED, d=32, dtype=dtype), heads)
    row = sum(n for n, _ in MIXED[:6]) + 33
    clean = replace(case, bias=put(case.bias, (rows_of(6, 33),), -inf))
    dirty = {name: put(getattr(case, name), (row,), poison) for name in ("q", "grad_out")}
    assert check_containment(clean, replace(clean, **dirty)) == 0
    got = results(replace(clean, **dirty))
    assert got["out"][row].eq(0).all() and got["dq"][row].eq(0).all()
    assert got["dbias"][rows_of(6, 33)].eq(0).all()


@either_head
@pytest.mark.parametrize("poison", [nan, inf], ids=str)
def test_keys_that_nobody_sees_may_hold_anything(poison, heads, dtype):
    case = with_packed_bias(ragged(MIXED, d=32, dtype=dtype), heads)
    bias, key = case.bias.clone(), sum(m for _, m in MIXED[:6]) + 39
    for row in range(MIXED[6][0]):
        bias[rows_of(6, row)][39] = -inf
    clean = replace(case, bias=bias)
    dirty = {name: put(getattr(case, name), (key,), poison) for name in "kv"}
    assert check_containment(clean, replace(clean, **dirty)) == 0


@pytest.mark.parametrize("where", ["q", "k", "v"])
def test_nan_stays_in_its_sequence(where, dtype):
    for token in (0, 30, 31, 32, 95, 100, 120):
        clean = with_packed_bias(ragged(MIXED, d=32, dtype=dtype), 4)
        dirty = replace(clean, **{where: put(getattr(clean, where), (token, 1, 2), nan)})
        alone = where == "q" and 96 <= token < 113  # in the sequence without keys
        assert bool(check_containment(clean, dirty)) != alone


def test_nan_in_the_bias_reaches_its_row(dtype):
    """In the first and the last pair of a sequence: the neighbours are next door."""
    for sequence, row, at in ((0, 30, 30), (3, 0, 0), (3, 63, 64), (8, 64, 128)):
        case = with_packed_bias(ragged(MIXED, d=32, dtype=dtype), 4)
        pair = rows_of(sequence, row).start + at
        bad = ~results(replace(case, bias=put(case.bias, (pair, 2), nan)))["out"].isfinite().all(-1)
        assert bad[sum(n for n, _ in MIXED[:sequence]) + row, 2] and bad.sum() == 1


@pytest.mark.parametrize("needs", ["b", "q", "kv", "qb", "qkv"])
def test_only_what_is_wanted(needs, dtype):
    for heads in (4, 1):
        case = with_packed_bias(ragged(MIXED, d=64, dtype=dtype), heads)
        want, got = results(case), check_case(replace(case, needs=needs))
        assert set(got) == {"out", "lse", *(f"d{name}" for name in needs.replace("b", ""))} | (
            {"dbias"} if "b" in needs else set()
        )
        assert all(same_bits(got[name], want[name]) for name in got)


@either_head
def test_the_gradient_of_a_bias_has_the_same_bits_always(heads, dtype):
    case = with_packed_bias(ragged(MIXED, d=64, dtype=dtype, deterministic=False), heads)
    first = results(case)["dbias"]
    assert all(same_bits(first, results(case)["dbias"]) for _ in range(3))


@either_head
def test_equal_lengths_as_a_dense_batch(heads, dtype):
    """The same problem said in two ways, the bias where it lies: (N, n, m, H) is (N, H, n, m)."""
    case = with_packed_bias(ragged(((70, 91),) * 5, d=32, dtype=dtype), heads)
    check_case(case)

    def batched(x):
        return x.unflatten(0, (5, -1)).transpose(1, 2)

    names = ("q", "k", "v", "grad_out", "grad_lse")
    parts = {name: batched(getattr(case, name)) for name in names}
    bias = case.bias.unflatten(0, (5, 70, 91)).permute(0, 3, 1, 2)
    check_case(replace(case, cu_q=None, cu_k=None, max_q=0, max_k=0, bias=bias, **parts))


@pytest.mark.parametrize("many", [1000, 70_000])
@either_head
def test_many_sequences(heads, many, family):
    """More than a grid's third dimension holds; judged as a dense batch: the oracle takes ragged
    ones one sequence at a time."""
    case = with_packed_bias(ragged(((3, 5),) * many, hq=4, hk=2, d=16), heads)
    got = results(case)

    def batched(x):
        return x.unflatten(0, (many, -1)).transpose(1, 2)

    def pairs(x):
        return x.unflatten(0, (many, 3, 5)).permute(0, 3, 1, 2)

    same = {name: batched(getattr(case, name)) for name in ("q", "k", "v", "grad_out", "grad_lse")}
    found = {name: pairs(x) if name == "dbias" else batched(x) for name, x in got.items()}
    oracle.accept(oracle.Case(**same, bias=pairs(case.bias)), found)
