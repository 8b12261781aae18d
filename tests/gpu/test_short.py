"""Thousands of sequences of a few dozen tokens on CUDA tensors: tiles of 32 x 32.

Their backward pass makes dQ, and the gradient of a bias that is not shared, by blocks of queries;
the packed bias of a ragged batch is copied first, a part of its heads at a time. Every case asks
explain() whether it has these tiles: another choice of the planner must not leave them untested.
"""

from __future__ import annotations

import re
from dataclasses import replace
from math import inf, nan

import pytest
import torch
from helpers import (
    DEVICE,
    IN_PLACE,
    check_case,
    check_containment,
    columns_first,
    dense,
    every_mask,
    filled,
    gaps,
    odd_rows,
    put,
    ragged,
    results,
    unsteady,
    with_packed_bias,
)
from test_bias import LAYOUTS, broadcast, full, transposed, with_bias
from test_deterministic import noise
from test_ragged_bias import LAYOUTS as PACKED_LAYOUTS
from test_ragged_bias import heads_first, heads_first_between_nan

import flashmoe_science as fm
import oracle
from oracle import Case, same_bits

MANY = 640  # (sequence, key head): 4 for each SM of a chip that has up to 160
CHIP = None if DEVICE == "cuda" else "sm_90"  # for which a rehearsal plans


def launches(text: str) -> list[str]:
    """What explain() names besides the kernel itself."""
    return re.findall(r"^ +(?:before|after) +(\S+)$", text, re.M)


def rounds(text: str) -> int:
    found = re.search(r"^ +rounds +(\d+), each for a part of the heads$", text, re.M)
    return int(found[1]) if found else 1


def planned(case: Case) -> tuple[str, str]:
    """What explain() says of the two passes, after a look at their tiles."""
    tensors = {"bias": case.bias, "key_lengths": case.key_lengths}
    if case.cu_q is not None:
        tensors |= {"cu_seqlens_q": case.cu_q, "cu_seqlens_k": case.cu_k}
        tensors |= {"max_seqlen_q": case.max_q, "max_seqlen_k": case.max_k}
    forward, backward = (
        fm.explain(case.q, case.k, case.v, **tensors, **case.options, backward=it, device=CHIP)
        for it in (False, True)
    )
    for text in (forward, backward):
        assert re.search(r"^ +tile +32 queries x 32 keys$", text, re.M), text
    return forward, backward


def check_short(case: Case) -> dict[str, torch.Tensor]:
    """Forward and backward: tiles, numbers, bits of a second run, inputs untouched."""
    planned(case)
    return check_case(case) if case.cu_q is None else check_ragged(case)


def short(n, m=None, *, hq=2, hk=2, **shape) -> Case:
    """A dense case of enough sequences; `shape` as for dense()."""
    return dense(n, m, lead=(-(-MANY // hk),), hq=hq, hk=hk, **shape)


def batch_of(case: Case) -> torch.Tensor:
    return torch.arange(case.q.shape[0], device=DEVICE)


def every_length(case: Case, dtype=torch.int32) -> Case:
    """Key lengths from none to all."""
    return replace(case, key_lengths=(batch_of(case) % (case.k.shape[-2] + 1)).to(dtype))


# Ragged batches. Some sequences have several blocks, some nothing on one side or both; there are
# enough of them that are shorter for 48 tokens or less on average.

MIXED = ((31, 31), (1, 7), (0, 5), (33, 34), (17, 0), (150, 97), (1, 1), (0, 0), (40, 100), (5, 33))
MIXED += ((32, 32), (64, 64), (2, 3))
FEW = ((31, 31), (70, 40), (0, 3), (9, 65))


def short_ragged(lengths=MIXED, *, hq=2, hk=2, last=(), **shape) -> Case:
    """The lengths in turn, as often as it takes, and then the last; `shape` as for ragged()."""
    many = [lengths[i % len(lengths)] for i in range(-(-MANY // hk))]
    return ragged((*many, *last), hq=hq, hk=hk, **shape)


Span = tuple[int, int]


def spans(case: Case) -> list[tuple[Span, Span, Span]]:
    """Of each sequence: its queries, keys and pairs."""
    found, pair = [], 0
    for (q0, q1), (k0, k1) in zip(oracle.spans(case.cu_q), oracle.spans(case.cu_k), strict=True):
        end = pair + (q1 - q0) * (k1 - k0)
        found.append(((q0, q1), (k0, k1), (pair, end)))
        pair = end
    return found


def dense_part(case: Case, got, n, m, starts) -> tuple[Case, dict[str, torch.Tensor]]:
    """Sequences of n queries and m keys as a dense case, and their results as its results."""
    firsts = torch.tensor(starts, device=DEVICE).T[..., None]
    rows, keys, pairs = (
        first + torch.arange(size, device=DEVICE)
        for first, size in zip(firsts, (n, m, n * m), strict=True)
    )

    def batched(x, at):
        return None if x is None else x[at].transpose(1, 2)

    def matrices(x):
        if x is None:
            return None
        return x[pairs].reshape(len(starts), n, m, x.shape[1]).permute(0, 3, 1, 2)

    tensors = {name: batched(getattr(case, name), rows) for name in ("q", "grad_out", "grad_lse")}
    tensors |= {name: batched(getattr(case, name), keys) for name in ("k", "v")}
    part = replace(case, cu_q=None, cu_k=None, bias=matrices(case.bias), **tensors)
    at = {"dk": keys, "dv": keys}
    found = {name: batched(x, at.get(name, rows)) for name, x in got.items() if name != "dbias"}
    return part, found | ({"dbias": matrices(got["dbias"])} if "dbias" in got else {})


def check_ragged(case: Case) -> dict[str, torch.Tensor]:
    """As check_case(). The oracle takes one sequence at a time, so it is given those of the same
    lengths as a dense batch."""
    inputs = {**case.inputs(), "grad_out": case.grad_out}
    before = {name: x.clone() for name, x in inputs.items()}
    got = results(case)
    assert not unsteady(case, got), "two runs differ"
    for name, x in inputs.items():
        assert same_bits(x, before[name]), f"{name} was changed"
    groups: dict[Span, list] = {}
    for (q0, q1), (k0, k1), (pair, _) in spans(case):
        groups.setdefault((q1 - q0, k1 - k0), []).append((q0, k0, pair))
    for (n, m), starts in groups.items():
        part, found = dense_part(case, got, n, m, starts)
        complaints = oracle.compare(part, found)
        assert not complaints, "\n  ".join([f"sequences of {n} x {m}:", *complaints])
    # Tokens of no sequence.
    (_, q_end), (_, k_end), _ = spans(case)[-1]
    assert got["out"][q_end:].eq(0).all() and got["lse"][q_end:].eq(-inf).all()
    for name, end in (("dq", q_end), ("dk", k_end), ("dv", k_end)):
        assert name not in got or got[name][end:].eq(0).all(), name
    return got


# Dense batches without a bias.

LENGTHS = [(1, 1), (7, 7), (16, 16), (17, 17), (31, 31), (32, 32), (1, 32), (32, 1), (17, 9)]
LENGTHS += [(9, 31), (32, 16), (15, 24), (0, 7), (7, 0)]
HEAD_DIMS = [(8, 8), (16, 16), (20, 20), (32, 32), (33, 33), (48, 48), (64, 64)]
HEAD_DIMS += [(8, 64), (64, 8), (16, 48), (48, 33), (20, 64), (1, 3)]
every_dim = pytest.mark.parametrize("d, dv", HEAD_DIMS)


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

OPTIONS = {
    "causal": {"causal": True},
    "window": {"window": (5, 3)},
    "left only": {"window": (9, -1)},
    "right only": {"window": (-1, 0)},
    "one key": {"window": (0, 0)},
    "causal window": {"window": (12, 4), "causal": True},
    "softcap": {"softcap": 2.0},
    "softcap causal": {"softcap": 20.0, "causal": True},
    "softcap far past saturation": {"softcap": 0.5, "scale": 50.0},
    "negative scale": {"scale": -0.3},
    "negative scale causal": {"scale": -0.3, "causal": True},
    "tiny scale": {"scale": 1e-7},
    "zero scale": {"scale": 0.0},
    "zero scale softcap": {"scale": 0.0, "softcap": 3.0, "causal": True},
    "all of them": {"causal": True, "window": (20, 7), "softcap": 7.0, "scale": -0.4},
}
every_option = pytest.mark.parametrize("option", OPTIONS)


@every_option
def test_options(option, dtype):
    for n, m in ((32, 32), (31, 17), (13, 31)):
        case = short(n, m, d=32, dtype=dtype, options=OPTIONS[option])
        check_short(case)
        check_short(with_bias(case, full(case)))


@every_option
def test_ragged_options(option, dtype):
    case = short_ragged(FEW, hq=8, hk=4, d=32, dtype=dtype, options=OPTIONS[option])
    check_short(case)
    check_short(with_packed_bias(case, 8))


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

either_width = pytest.mark.parametrize("wide", [None, torch.float32], ids=["narrow", "fp32"])


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


NEEDS = ("b", "q", "k", "v", "kv", "qb", "kb", "qkv")


def check_only(case: Case, needs: str) -> None:
    """What is not wanted changes nothing of what is."""
    want, got = results(case), check_short(replace(case, needs=needs))
    names = {"b": "dbias", **{name: f"d{name}" for name in "qkv"}}
    assert set(got) == {"out", "lse", *(names[name] for name in needs)}
    assert all(same_bits(got[name], want[name]) for name in got)


@pytest.mark.parametrize("needs", NEEDS)
def test_only_what_is_wanted(needs, dtype):
    case = short(17, 31, hq=4, hk=2, d=32, dtype=dtype, options={"causal": True})
    for own in ((1, 1, 1, 1), (0, 1, 1, 1)):
        check_only(with_bias(case, broadcast(case, own)), needs)
    check_only(with_bias(case, full(case), torch.float32), needs)
    if "b" not in needs:
        check_only(case, needs)


@pytest.mark.parametrize("needs", NEEDS)
def test_only_what_is_wanted_of_a_ragged_batch(needs, dtype):
    case = short_ragged(FEW, hq=8, hk=4, d=32, dtype=dtype, rest=(3, 4), options={"causal": True})
    for heads in (8, 1):
        check_only(with_packed_bias(case, heads), needs)
    if "b" not in needs:
        check_only(case, needs)


def test_a_loss_of_lse_alone(dtype):
    """There is no dO then."""
    for case in (short(17, 31, d=32, dtype=dtype), short_ragged(FEW, d=32, dtype=dtype)):
        case = replace(case, use_out=False, grad_out=torch.zeros_like(case.grad_out))
        check_short(case)
        own = with_packed_bias(case, 2) if case.cu_q is not None else with_bias(case, full(case))
        check_short(own)


# Ragged batches and their packed bias, (pairs, heads).

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
def test_rounds_over_the_heads(hq, hk, dtype):
    """Both passes of a bias that is large beside the rest."""
    lengths = tuple(MIXED[i % len(MIXED)] for i in range(MANY // 2))
    for options in ({}, {"causal": True}):
        case = ragged(lengths, hq=hq, hk=hk, d=16, dtype=dtype, rest=(2, 3), options=options)
        case = with_packed_bias(case, hq)
        assert all(rounds(text) > 1 for text in planned(case))
        check_short(case)


# What is hidden is not there, whatever it holds; what is not reaches what the oracle says.

HIDING = {
    "nothing": {},
    "causal": {"causal": True},
    "window": {"window": (5, 3)},
    "softcap": {"causal": True, "softcap": 5.0},
    "key lengths": {},
    "all of them": {"causal": True, "window": (20, -1)},
}
every_hiding = pytest.mark.parametrize("hiding", HIDING)
every_poison = pytest.mark.parametrize("poison", [nan, inf, -inf], ids=str)


def behind(hiding: str, n, m, **shape) -> Case:
    case = short(n, m, options=HIDING[hiding], **shape)
    return every_length(case) if hiding in ("key lengths", "all of them") else case


def poisoned_places(case: Case, names, value: float) -> Case:
    """Some places of each tensor, all in different sequences: none hides what another does."""
    sequence, changed = 0, {}
    for name in names:
        x = getattr(case, name).clone()
        for place in (0, 15, 16, x.shape[2] - 1):
            sequence += 5
            at = (sequence, sequence % x.shape[1], place)
            x[at if x.dim() == 3 else (*at, -1 - sequence % 3)] = value
        changed[name] = x
    return replace(case, **changed)


@every_hiding
@pytest.mark.parametrize("m", [32, 29])
def test_nan_reaches_what_depends_on_it(m, hiding, dtype):
    names = ("q", "k", "v", "grad_out", "grad_lse")
    clean = behind(hiding, 29, m, d=16, dtype=dtype)
    planned(clean)
    assert check_containment(clean, poisoned_places(clean, names, nan))
    for wide in (None, torch.float32):
        own = with_bias(clean, full(clean), wide)
        mask = torch.rand(own.bias.shape, device=DEVICE) < 0.3
        own = replace(own, bias=own.bias.masked_fill(mask, -inf))
        planned(own)
        assert check_containment(own, poisoned_places(own, (*names, "bias"), nan))


@pytest.mark.parametrize("d, dv, hq", [(8, 8, 4), (20, 36, 2), (48, 64, 2), (64, 33, 2)])
def test_nan_in_other_head_dims(d, dv, hq, dtype):
    """In the last columns too: beside them lies what pads the dims of a tile."""
    names = ("q", "k", "v", "grad_out")
    clean = short(20, 31, hq=hq, hk=2, d=d, dv=dv, dtype=dtype, options={"causal": True})
    for case in (clean, with_bias(clean, full(clean))):
        planned(case)
        assert check_containment(case, poisoned_places(case, names, nan))


@every_hiding
def test_infinity_reaches_what_depends_on_it(hiding, dtype):
    """In q and k it would make scores of either infinity; these two are linear in it."""
    clean = behind(hiding, 29, 31, d=16, dtype=dtype)
    own = with_bias(clean, full(clean))
    own = replace(own, bias=put(own.bias, (..., slice(4, 12), slice(10, None)), -inf))
    for case in (clean, own):
        planned(case)
        for value in (inf, -inf):
            assert check_containment(case, poisoned_places(case, ("v", "grad_out"), value))


def test_nan_with_a_shared_bias(dtype):
    """Reaches its row of the gradient, which all sequences share, and nothing of the others."""
    clean = short(29, 31, d=16, dtype=dtype, options={"causal": True})
    clean = with_bias(clean, broadcast(clean, (0, 1, 1, 1)))
    planned(clean)
    for name in ("q", "grad_out", "grad_lse"):
        bad = getattr(clean, name)
        at = (9, 1, 17) if bad.dim() == 3 else (9, 1, 17, 2)
        assert check_containment(clean, replace(clean, **{name: put(bad, at, nan)}))


@every_poison
def test_keys_that_nobody_sees_may_hold_anything(poison, dtype):
    """Because of their length, of a window, and of a bias."""
    key = torch.arange(31, device=DEVICE)[:, None]
    by_length = every_length(short(20, 31, d=16, dtype=dtype, options={"causal": True}))
    past = key >= by_length.key_lengths[:, None, None, None]
    own = with_bias(by_length, full(by_length))
    by_window = short(9, 31, d=16, dtype=dtype, options={"window": (4, 0)})
    before = key < 31 - 9 - 4
    by_bias = with_bias(c := short(20, 31, d=16, dtype=dtype), full(c))
    by_bias = replace(by_bias, bias=put(by_bias.bias, (..., slice(12, 15)), -inf))
    some = (key >= 12) & (key < 15)
    for case, unseen in ((by_length, past), (own, past), (by_window, before), (by_bias, some)):
        planned(case)
        bad = {name: getattr(case, name).masked_fill(unseen, poison) for name in "kv"}
        assert check_containment(case, replace(case, **bad)) == 0


@every_poison
def test_rows_that_see_nothing_may_hold_anything(poison, dtype):
    """Before the first key of a causal call, and where a bias hides them all."""
    causal = short(31, 20, d=16, dtype=dtype, options={"causal": True})
    row = torch.arange(31, device=DEVICE)[:, None]
    by_bias = with_bias(c := short(31, 20, d=16, dtype=dtype), full(c))
    by_bias = replace(by_bias, bias=put(by_bias.bias, (..., slice(15, 18), slice(None)), -inf))
    some = (row >= 15) & (row < 18)
    own = with_bias(causal, full(causal))
    for case, blind in ((causal, row < 11), (own, row < 11), (by_bias, some)):
        planned(case)
        bad = {name: getattr(case, name).masked_fill(blind, poison) for name in ("q", "grad_out")}
        bad["grad_lse"] = case.grad_lse.masked_fill(blind[:, 0], poison)
        dirty = replace(case, **bad)
        assert check_containment(case, dirty) == 0
        got = results(dirty)
        for name in ("out", "dq", "dbias") if case.bias is not None else ("out", "dq"):
            assert got[name].masked_fill(~blind, 0).eq(0).all(), name


@either_width
@pytest.mark.parametrize("poison", [nan, inf], ids=str)
@pytest.mark.parametrize("hiding", ["causal", "window", "key lengths", "all of them"])
def test_a_bias_behind_another_mask_may_hold_anything(hiding, poison, wide, dtype):
    """And its gradient is 0, not only small."""
    for n, m in ((32, 32), (29, 19), (9, 31)):
        case = with_bias(c := behind(hiding, n, m, d=16, dtype=dtype), full(c), wide)
        planned(case)
        lengths = torch.tensor(m, device=DEVICE) if case.key_lengths is None else case.key_lengths
        lengths = lengths.expand(len(case.q))[:, None, None, None]
        mask = {"causal": False, "window": None} | case.options
        seen = oracle.allowed_keys(n, m, lengths, mask["causal"], mask["window"])
        assert not seen.all()
        dirty = replace(case, bias=case.bias.where(seen, poison))
        assert check_containment(case, dirty) == 0
        assert results(dirty)["dbias"].masked_fill(seen, 0).eq(0).all()


# The same of ragged batches, of few sequences with many heads: the oracle takes one at a time.


def seen_pairs(case: Case) -> torch.Tensor:
    """(pairs, 1) truth."""
    mask = {"causal": False, "window": None} | case.options
    seen = [
        oracle.allowed_keys(
            q1 - q0, k1 - k0, torch.tensor(k1 - k0), mask["causal"], mask["window"]
        ).flatten()
        for (q0, q1), (k0, k1), _ in spans(case)
    ]
    return torch.cat(seen).to(DEVICE)[:, None]


def poisoned_tokens(case: Case, names, value: float) -> Case:
    """A token or pair in the middle of one sequence and the last of another, for each tensor."""
    places = iter([one for one in spans(case) if one[2][1] > one[2][0]])
    side = {"k": 1, "v": 1, "bias": 2}
    changed = {}
    for name in names:
        x = getattr(case, name).clone()
        for part in (0.6, 1):
            start, end = next(places)[side.get(name, 0)]
            token = start + int(part * (end - start - 1))
            x[token, token % x.shape[1]] = value
        changed[name] = x
    return replace(case, **changed)


RAGGED_HIDING = {
    "nothing": {},
    "causal": {"causal": True},
    "window": {"window": (40, 3)},
    "softcap": {"causal": True, "softcap": 5.0},
}


@pytest.mark.parametrize("heads", [0, 32, 1], ids=["no bias", "each head", "all heads"])
@pytest.mark.parametrize("hiding", RAGGED_HIDING)
def test_nan_stays_in_its_sequence(hiding, heads, dtype):
    names = ("q", "k", "v", "grad_out", "grad_lse")
    clean = short_ragged(hq=32, hk=32, d=16, dtype=dtype, options=RAGGED_HIDING[hiding])
    if heads:
        clean = with_packed_bias(clean, heads)
        mask = torch.rand(clean.bias.shape, device=DEVICE) < 0.3
        clean = replace(clean, bias=clean.bias.masked_fill(mask, -inf))
        names += ("bias",)
    planned(clean)
    assert check_containment(clean, poisoned_tokens(clean, names, nan))


@pytest.mark.parametrize("heads", [0, 32], ids=["no bias", "each head"])
def test_infinity_stays_in_its_sequence(heads, dtype):
    clean = short_ragged(hq=32, hk=32, d=16, dtype=dtype, options={"causal": True})
    clean = with_packed_bias(clean, heads) if heads else clean
    planned(clean)
    assert check_containment(clean, poisoned_tokens(clean, ("v", "grad_out"), inf))


@pytest.mark.parametrize("poison", [nan, inf], ids=str)
@pytest.mark.parametrize("options", [{"causal": True}, {"window": (7, 3)}], ids=str)
def test_a_packed_bias_behind_another_mask_may_hold_anything(options, poison, dtype):
    """Also in blocks of keys that a block of queries does not go through."""
    for wide in (None, torch.float32):
        case = short_ragged(hq=32, hk=32, d=16, dtype=dtype, options=options)
        case = with_packed_bias(case, 32, wide)
        seen = seen_pairs(case)
        assert not seen.all()
        dirty = replace(case, bias=case.bias.where(seen, poison))
        planned(dirty)
        assert check_containment(case, dirty) == 0
        assert results(dirty)["dbias"].masked_fill(seen, 0).eq(0).all()


@every_poison
def test_what_a_packed_bias_hides_may_hold_anything(poison, dtype):
    """Keys that no row sees, and rows that see no key."""
    case = with_packed_bias(short_ragged(hq=32, hk=32, d=16, dtype=dtype), 32)
    bias, rows, keys = case.bias.clone(), [], []
    for (q0, q1), (k0, k1), (start, end) in spans(case):
        n, m = q1 - q0, k1 - k0
        matrix = bias[start:end].view(n, m, 32)
        if n > 33:  # in several blocks
            rows += [q0, q0 + 33]
            matrix[[0, 33]] = -inf
        if m > 33:
            keys += [k0 + 31, k1 - 1]
            matrix[:, [31, m - 1]] = -inf
    assert rows and keys
    clean = replace(case, bias=bias)
    planned(clean)
    bad = {name: put(getattr(case, name), (keys,), poison) for name in "kv"}
    names = ("q", "grad_out", "grad_lse")
    bad |= {name: put(getattr(case, name), (rows,), poison) for name in names}
    assert check_containment(clean, replace(clean, **bad)) == 0


def test_neighbours_full_of_nan(dtype):
    """The bits of a sequence do not change with those beside it, in memory or in time."""
    case = with_bias(c := short(17, 31, d=32, dtype=dtype, options={"causal": True}), full(c))
    planned(case)
    odd = (batch_of(case) % 2 == 1)[:, None, None]
    names = ("q", "k", "v", "grad_out", "grad_lse", "bias")
    dirty = {}
    for name in names:
        x = getattr(case, name)
        dirty[name] = x.masked_fill(odd if x.dim() == 3 else odd[..., None], nan)
    want, got = results(case), results(replace(case, **dirty))
    assert all(same_bits(got[name][::2], want[name][::2]) for name in want)
    assert all(got[name][1::2].isnan().any() for name in want)


@pytest.mark.parametrize("heads", [16, 6])
def test_ragged_neighbours_full_of_nan(heads, dtype):
    shape = {"hq": heads, "hk": heads, "d": 32, "dtype": dtype, "rest": (40, 50)}
    case = with_packed_bias(short_ragged(options={"causal": True}, **shape), heads)
    planned(case)
    sides = {"q": 0, "dq": 0, "out": 0, "lse": 0, "grad_out": 0, "grad_lse": 0}
    sides |= {"k": 1, "v": 1, "dk": 1, "dv": 1, "bias": 2, "dbias": 2}
    names = ("q", "k", "v", "grad_out", "grad_lse", "bias")
    sizes = (len(case.q), len(case.k), len(case.bias))
    clean = [torch.zeros(size, dtype=torch.bool, device=DEVICE) for size in sizes]
    for one in spans(case)[::2]:
        for side, (start, end) in zip(clean, one, strict=True):
            side[start:end] = True
    dirty = {name: put(getattr(case, name), (~clean[sides[name]],), nan) for name in names}
    want, got = results(case), results(replace(case, **dirty))
    for name in want:
        mine = clean[sides[name]]
        assert same_bits(got[name][mine], want[name][mine]), name
        assert got[name][~mine].isnan().any(), name
    # Nobody looks at the tokens after the last sequence.
    assert got["out"][-40:].eq(0).all() and got["lse"][-40:].eq(-inf).all()
    assert got["dq"][-40:].eq(0).all() and got["dk"][-50:].eq(0).all()


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
