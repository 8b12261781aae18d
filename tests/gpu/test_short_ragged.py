"""Ragged batches of thousands of short sequences, and their packed bias, (pairs, heads).

The bias is copied first, a part of its heads at a time.
"""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest
import torch
from helpers import (
    DEVICE,
    every_mask,
    filled,
    gaps,
    launches,
    needs_short_tiles,
    ragged,
    slices,
    with_packed_bias,
)
from short import (
    FEW,
    MANY,
    MIXED,
    NEEDS,
    OPTIONS,
    check_only,
    check_short,
    either_width,
    every_dim,
    every_option,
    planned,
    short_ragged,
    spans,
)
from test_ragged_bias import LAYOUTS as PACKED_LAYOUTS
from test_ragged_bias import heads_first, heads_first_between_nan

pytestmark = needs_short_tiles

RAGGED = {
    "mixed": MIXED,
    "single tokens": ((1, 1),),
    "empty ends": ((0, 0), (5, 8), (33, 40), (0, 0)),
    "edges": tuple((n, n) for n in (15, 16, 17, 31, 32, 33, 63, 64, 65, 95, 97)),
    "cross": ((150, 33), (33, 150), (1, 40), (40, 1), (0, 9), (9, 0), (2, 2), (3, 5)),
    "decoding": tuple((1, m) for m in (1, 2, 31, 32, 33, 64, 130, 0, 17)),
}


@every_mask
@pytest.mark.parametrize("lengths", RAGGED)
def test_ragged_lengths(lengths, causal, dtype):
    shape = {"hq": 8, "hk": 4, "d": 16, "dtype": dtype, "options": {"causal": causal}}
    case = short_ragged(RAGGED[lengths], **shape)
    check_short(case)
    check_short(with_packed_bias(case, 8))


@every_dim
def test_ragged_head_dims(d, dv, dtype):
    case = short_ragged(FEW, hq=8, hk=8, d=d, dv=dv, dtype=dtype, options={"causal": True})
    check_short(case)
    check_short(with_packed_bias(case, 8))


@pytest.mark.parametrize("hq, hk", [(1, 1), (3, 3), (6, 2), (8, 1), (20, 10)])
def test_ragged_grouped_queries(hq, hk, dtype):
    case = short_ragged(FEW, hq=hq, hk=hk, d=32, dtype=dtype, options={"causal": True})
    for heads in {hq, 1}:
        check_short(with_packed_bias(case, heads))


@pytest.mark.parametrize("residue", [0, 1, 3, 6, 7])
@pytest.mark.parametrize("heads", [1, 2, 3, 6, 8, 16])
def test_packed_bias_of_any_alignment(heads, residue, dtype):
    """Rows of pairs begin anywhere, and the last of all is followed by more or less room."""
    lengths, shape = ((5, 7), (33, 3), (9, 65)), {"hq": heads, "hk": heads, "d": 16, "dtype": dtype}
    pairs = spans(short_ragged(lengths, **shape))[-1][2][1]
    last = ((1, (residue - pairs) % 8 or 8),)
    case = with_packed_bias(short_ragged(lengths, last=last, **shape), heads)
    assert case.bias.shape[0] % 8 == residue
    for text, times in zip(planned(case), (1, 2), strict=True):  # and once for the gradient
        copies = sum("attention_bias_transpose" in name for name in launches(text))
        assert copies == (times if heads > 1 else 0)
    check_short(case)


def some_of_the_heads(x):
    """A slice of more of them, where 8 bytes begin."""
    wide = gaps(x.shape[0], x.shape[1] + 8, dtype=x.dtype)
    return filled(wide[:, 4 : 4 + x.shape[1]], x)


def every_second_head(x):
    wide = gaps(x.shape[0], 2 * x.shape[1], dtype=x.dtype)
    return filled(wide[:, 1::2], x)


@pytest.mark.parametrize(
    "layout", [*PACKED_LAYOUTS, some_of_the_heads, every_second_head], ids=lambda f: f.__name__
)
def test_packed_bias_strides(layout, dtype):
    for heads, wide in ((8, None), (6, None), (6, torch.float32)):
        shape = {"hq": heads, "hk": heads, "d": 32, "dtype": dtype, "options": {"causal": True}}
        case = with_packed_bias(short_ragged(FEW, **shape), heads, wide, layout)
        copied = any("attention_bias_transpose" in name for name in launches(planned(case)[0]))
        assert copied == (not wide and layout not in (heads_first, heads_first_between_nan))
        gradient = check_short(case)["dbias"]
        assert gradient.stride() == torch.empty_like(case.bias).stride()


@either_width
@pytest.mark.parametrize("heads", [8, 1], ids=["each head", "all heads"])
def test_packed_bias_mixed(heads, wide, dtype):
    for options in ({"causal": True}, {"window": (40, 3)}):
        case = short_ragged(hq=8, hk=8, d=64, dtype=dtype, options=options)
        check_short(with_packed_bias(case, heads, wide))


@pytest.mark.parametrize("rest, slack", [((3, 0), 0), ((0, 4), 100), ((70, 130), 1)], ids=str)
def test_tokens_of_no_sequence(rest, slack, dtype):
    shape = {"rest": rest, "slack": slack, "hq": 8, "hk": 4, "d": 32, "dtype": dtype}
    check_short(short_ragged(FEW, cu_dtype=torch.int64, **shape))
    for integer in (torch.int32, torch.int64):
        check_short(with_packed_bias(short_ragged(FEW, cu_dtype=integer, **shape), 8))


def test_packed_minus_infinity_is_a_mask(dtype):
    for wide in (None, torch.float32):
        for heads in (8, 1):
            case = short_ragged(FEW, hq=8, hk=8, d=32, dtype=dtype, options={"causal": True})
            case = with_packed_bias(case, heads, wide)
            hidden = torch.rand(case.bias.shape, device=DEVICE) < 0.3
            for (q0, q1), (k0, k1), (start, end) in spans(case):
                if q1 - q0 == 70:  # a row of the third block, and the keys of the second
                    rows = hidden[start:end].view(q1 - q0, k1 - k0, heads)
                    rows[66] = rows[:, 32:] = True
                elif q1 - q0 == 9:  # everything
                    hidden[start:end] = True
            got = check_short(replace(case, bias=case.bias.masked_fill(hidden, -inf)))
            assert got["dbias"].masked_fill(~hidden, 0).eq(0).all()


@pytest.mark.parametrize("hq, hk", [(8, 8), (16, 4)])
def test_slices_of_the_heads(hq, hk, dtype):
    """Both passes of a bias that is large beside the rest."""
    lengths = tuple(MIXED[i % len(MIXED)] for i in range(MANY // 2))
    for options in ({}, {"causal": True}):
        case = ragged(lengths, hq=hq, hk=hk, d=16, dtype=dtype, rest=(2, 3), options=options)
        case = with_packed_bias(case, hq)
        assert all(slices(text) > 1 for text in planned(case))
        check_short(case)


@every_option
def test_ragged_options(option, dtype):
    case = short_ragged(FEW, hq=8, hk=4, d=32, dtype=dtype, options=OPTIONS[option])
    check_short(case)
    check_short(with_packed_bias(case, 8))


@pytest.mark.parametrize("needs", NEEDS)
def test_only_what_is_wanted_of_a_ragged_batch(needs, dtype):
    case = short_ragged(FEW, hq=8, hk=4, d=32, dtype=dtype, rest=(3, 4), options={"causal": True})
    for heads in (8, 1):
        check_only(with_packed_bias(case, heads), needs)
    if "b" not in needs:
        check_only(case, needs)
