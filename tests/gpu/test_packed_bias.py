"""A packed bias and its gradient in the packed kernels of the sm90 family: test_packed.py has what
these are otherwise about, test_ragged_bias.py a packed bias of any kind.
"""

from __future__ import annotations

from dataclasses import replace
from math import inf, nan

import pytest
import torch
from helpers import (
    check_case,
    check_containment,
    launches,
    on_a_gpu,
    put,
    ragged,
    same_bits,
    tile,
    with_packed_bias,
    with_sinks,
)
from packed import BACKWARD, FORWARD, explain, packed_tiles  # noqa: F401
from test_packed import SEQUENCES

import oracle

pytestmark = [on_a_gpu, pytest.mark.family("sm90")]

# Head dim, value head dim, heads: boxes that are full and that are not.
SHAPES = [(16, 16, 8), (16, 16, 6), (16, 16, 1), (32, 32, 4), (32, 32, 3), (64, 64, 2)]
SHAPES += [(48, 48, 3), (40, 64, 2), (64, 8, 2)]


def case_of(lengths, shape=(64, 64, 2), layout=None, **more) -> oracle.Case:
    d, dv, heads = shape
    case = ragged(lengths, d=d, dv=dv, hq=heads, hk=heads, **more)
    case = with_packed_bias(case, heads, layout=layout)
    for backward, shape in ((False, FORWARD), (True, BACKWARD)):
        text = explain(case, backward=backward)
        assert tile(text) == shape and "_packed_bias_" in text and "bitwise reproducible" in text
    return case


@pytest.mark.parametrize("lengths", SEQUENCES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_lengths(shape, lengths, dtype):
    check_case(case_of(SEQUENCES[lengths], shape, dtype=dtype))


@pytest.mark.parametrize("scale", [1e-5, 0.8, 30.0])
def test_scales(scale, dtype):
    for shape in ((16, 16, 4), (64, 64, 2)):
        check_case(case_of(SEQUENCES["edges"], shape, dtype=dtype, options={"scale": scale}))


def by_head(x):
    """One head after the other."""
    return x.T.contiguous().T


def apart(x):
    """Room between the pairs."""
    return torch.cat([x, x], 1)[:, : x.shape[1]]


def unaligned(x):
    """Heads that lie side by side, but not in one word."""
    return torch.cat([x[:, :1], x], 1)[:, 1:]


@pytest.mark.parametrize("layout", [by_head, apart, unaligned])
def test_layouts(layout, dtype):
    for shape in ((16, 16, 6), (16, 16, 8), (32, 32, 4), (64, 64, 3)):
        case = ragged(SEQUENCES["edges"], d=shape[0], hq=shape[2], hk=shape[2], dtype=dtype)
        case = with_packed_bias(case, shape[2], layout=layout)
        assert not any("bias_transpose" in name for name in launches(explain(case)))
        check_case(replace(case, needs="qkv"))
        check_case(case)


def test_what_is_not_wanted_changes_nothing(dtype):
    for shape in ((16, 16, 6), (64, 64, 2)):
        case = case_of(SEQUENCES["cross"], shape, dtype=dtype)
        want = check_case(case)
        for needs in ("b", "q", "k", "qb", "kvb", "qkv"):
            got = check_case(replace(case, needs=needs))
            names = {"b": "dbias"}
            assert set(got) == {"out", "lse", *(names.get(n, f"d{n}") for n in needs)}
            assert all(same_bits(got[name], want[name]) for name in got)


@pytest.mark.parametrize("value", [-inf, inf, nan], ids=str)
def test_numbers_that_are_not_finite(value, dtype):
    """-inf hides a pair, and whatever is behind it; others reach their row."""
    for shape in ((16, 16, 4), (64, 64, 2)):
        clean = case_of(((70, 70), (31, 31), (60, 90), (1, 1)), shape, dtype=dtype)
        for pair in (0, 69, 70, 4899, 4900, 4900 + 961, len(clean.bias) - 1):
            dirty = replace(clean, bias=put(clean.bias, (pair, 0), value))
            if value == -inf:
                check_case(dirty)
            else:
                check_containment(clean, dirty)


def test_nan_behind_a_bias_of_minus_infinity(dtype):
    for shape in ((16, 16, 4), (64, 64, 2)):
        case = case_of(((40, 40), (31, 31)), shape, dtype=dtype)
        bias = case.bias.clone()
        bias[:1600].view(40, 40, -1)[:, 7] = -inf  # key 7 is nobody's
        clean = replace(case, bias=bias)
        for name in "kv":
            dirty = replace(clean, **{name: put(getattr(clean, name), (7, 0, 3), nan)})
            assert check_containment(clean, dirty) == 0


def test_rows_without_keys(dtype):
    """All of a row's pairs are hidden."""
    case = case_of(((40, 40), (31, 31)), (64, 64, 2), dtype=dtype)
    bias = case.bias.clone()
    bias[:1600].view(40, 40, -1)[5] = -inf
    got = check_case(replace(case, bias=bias))
    assert got["out"][5].eq(0).all() and got["lse"][5].eq(-inf).all()


@pytest.mark.parametrize("value", [nan, inf], ids=str)
def test_nan_reaches_what_depends_on_it(value, dtype):
    for shape in ((16, 16, 4), (64, 64, 2)):
        clean = case_of(((70, 70), (31, 31), (60, 90), (2, 2), (17, 0)), shape, dtype=dtype)
        for name in ("v", "grad_out") if value == inf else (*"qkv", "grad_out"):
            for place in (0, 15, 69, 70, 100, 101, 127, 128):
                x = put(getattr(clean, name), (place, 0, -1), value)
                check_containment(clean, replace(clean, **{name: x}))


def test_sinks(dtype):
    for shape in ((16, 16, 6), (64, 64, 3)):
        check_case(with_sinks(case_of(SEQUENCES["edges"], shape, dtype=dtype)))


def test_thousands_of_sequences(dtype):
    lengths = tuple((1 + i * 7 % 40, 1 + i * 7 % 40) for i in range(3000))
    case = case_of(lengths, (16, 16, 4), dtype=dtype)
    want = check_case(case)
    start = sum(n for n, _ in lengths[:2000])
    here = slice(start, start + lengths[2000][0])
    pair = sum(n * m for n, m in lengths[:2000])
    pairs = slice(pair, pair + lengths[2000][0] ** 2)
    one = replace(
        case,
        **{x: getattr(case, x)[here] for x in (*"qkv", "grad_out")},
        grad_lse=None if case.grad_lse is None else case.grad_lse[here],
        bias=case.bias[pairs],
        cu_q=torch.tensor([0, lengths[2000][0]], dtype=case.cu_q.dtype, device=case.q.device),
        cu_k=torch.tensor([0, lengths[2000][0]], dtype=case.cu_k.dtype, device=case.q.device),
    )
    for name, x in check_case(one).items():
        assert same_bits(want[name][pairs if name == "dbias" else here], x), name
