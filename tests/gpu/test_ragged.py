"""Ragged batches on CUDA tensors: (T, H, D) and cumulative lengths."""

from __future__ import annotations

import os
from dataclasses import replace
from math import inf

import pytest
import torch
from helpers import (
    ALL_HEAD_DIMS,
    OPTIONS,
    check_case,
    either_way,
    every_mask,
    every_option,
    ragged,
    results,
    slices,
)

import flashmoe_science as fm
import oracle
from oracle import same_bits

# Empty on either side, one token, the edges of tiles, and long ones beside short ones.
MIXED = ((31, 31), (1, 7), (0, 5), (64, 65), (17, 0), (0, 0), (130, 33), (129, 257), (1, 1))
LENGTHS = {
    "none": (),
    "one empty": ((0, 0),),
    "only keys": ((0, 9),),
    "only queries": ((9, 0),),
    "empty ends": ((0, 0), (5, 5), (0, 0)),
    "single tokens": ((1, 1),) * 9,
    "edges": tuple((n, n) for n in (15, 16, 17, 63, 64, 65, 127, 128, 129, 191, 193)),
    "cross": ((128, 64), (64, 128), (65, 127), (127, 65), (1, 300), (300, 1)),
    "one long": ((3, 3), (1025, 1025), (2, 2)),
    "crystals": tuple((n, n) for n in (4, 8, 2, 12, 31, 46, 6, 97, 5, 20, 28, 16, 3, 7, 64, 40)),
    "decoding": tuple((1, m) for m in (1, 2, 63, 64, 65, 300, 1000, 0, 17)),
    "mixed": MIXED,
}


@either_way
@every_mask
@pytest.mark.parametrize("lengths", LENGTHS)
def test_lengths(lengths, causal, deterministic, dtype):
    shape = {"dtype": dtype, "deterministic": deterministic}
    check_case(ragged(LENGTHS[lengths], options={"causal": causal}, **shape))


@either_way
@every_option
def test_options(option, deterministic, dtype):
    shape = {"dtype": dtype, "deterministic": deterministic, "hq": 2, "hk": 1}
    check_case(ragged(MIXED, options=OPTIONS[option], **shape))


@either_way
@pytest.mark.parametrize("d", ALL_HEAD_DIMS)
def test_head_dims(d, deterministic, dtype):
    shape = {"d": d, "dtype": dtype, "deterministic": deterministic, "hq": 2, "hk": 1}
    check_case(ragged(((31, 31), (129, 70), (0, 3), (1, 65)), options={"causal": True}, **shape))


@pytest.mark.parametrize("d, dv", [(8, 64), (64, 8), (48, 32), (192, 128), (72, 40), (20, 3)])
def test_value_head_dims(d, dv, dtype):
    check_case(ragged(MIXED, d=d, dv=dv, dtype=dtype, options={"causal": True}))


@either_way
@pytest.mark.parametrize("hq, hk", [(1, 1), (3, 3), (8, 2), (6, 2), (8, 1)])
def test_grouped_queries(hq, hk, deterministic, dtype):
    check_case(ragged(MIXED, hq=hq, hk=hk, dtype=dtype, deterministic=deterministic))


@either_way
@pytest.mark.parametrize("rest", [(3, 0), (0, 4), (3, 4), (200, 300)], ids=str)
def test_tokens_of_no_sequence(rest, deterministic, dtype):
    """0, -inf and gradient 0, whatever their numbers."""
    got = check_case(ragged(MIXED, rest=rest, dtype=dtype, deterministic=deterministic))
    q_end, k_end = sum(n for n, _ in MIXED), sum(m for _, m in MIXED)
    assert got["out"][q_end:].eq(0).all() and got["lse"][q_end:].eq(-inf).all()
    assert got["dq"][q_end:].eq(0).all()
    assert got["dk"][k_end:].eq(0).all() and got["dv"][k_end:].eq(0).all()


def test_tokens_without_any_sequence(dtype):
    got = check_case(ragged((), rest=(70, 130), dtype=dtype))
    assert got["out"].eq(0).all() and got["lse"].eq(-inf).all()
    assert all(got[name].eq(0).all() for name in ("dq", "dk", "dv"))


@pytest.mark.parametrize("slack", [1, 100, 100_000])
def test_stated_maxima_may_be_larger(slack, dtype):
    check_case(ragged(MIXED, slack=slack, dtype=dtype, options={"causal": True}))


@pytest.mark.parametrize("integer", [torch.int32, torch.int64], ids=str)
def test_lengths_of_either_integer(integer, dtype):
    case = ragged(MIXED, cu_dtype=integer, dtype=dtype)
    want = check_case(case)
    # Columns of a larger tensor.
    apart = replace(
        case,
        cu_q=torch.stack([case.cu_q, case.cu_q + 1000], 1)[:, 0],
        cu_k=torch.stack([case.cu_k - 5, case.cu_k], 1)[:, 1],
    )
    got = results(apart)
    assert all(same_bits(got[name], want[name]) for name in want)


def test_ragged_is_dense_sequence_by_sequence(dtype):
    """Not bit for bit: the planner may cut the two differently. Both are within the tolerance."""
    case = ragged(MIXED, dtype=dtype, options={"causal": True})
    got = check_case(case)
    q_spans, k_spans = oracle.spans(case.cu_q), oracle.spans(case.cu_k)
    for (q0, q1), (k0, k1) in zip(q_spans, k_spans, strict=True):
        if os.environ["FLASHMOE_FAMILY"] == "sm90" and (q0 == q1 or k0 == k1):
            continue  # a dense call without anything to attend to is left to the next family
        one = [x.transpose(0, 1)[None] for x in (case.q[q0:q1], case.k[k0:k1], case.v[k0:k1])]
        out = fm.flash_attention(*one, causal=True)[0].transpose(0, 1)
        torch.testing.assert_close(got["out"][q0:q1], out, rtol=2e-2, atol=2e-2)


def test_equal_lengths_as_a_dense_batch(dtype):
    """The same problem said in two ways."""
    case = ragged(((70, 91),) * 5, dtype=dtype, options={"causal": True})
    check_case(case)

    def batched(x):
        return x.unflatten(0, (5, -1)).transpose(1, 2)

    parts = {name: batched(getattr(case, name)) for name in ("q", "k", "v", "grad_out")}
    grad_lse = case.grad_lse.unflatten(0, (5, -1)).transpose(1, 2)
    check_case(replace(case, cu_q=None, cu_k=None, max_q=0, max_k=0, grad_lse=grad_lse, **parts))


@pytest.mark.parametrize("many", [1000, 70_000])
def test_many_sequences(many, family):
    """A grid's third dimension ends at 65,535, and a sequence may be an atom.

    Checked as two dense batches: the oracle takes ragged ones one sequence at a time.
    """
    case = ragged(((3, 5),) * (many // 2) + ((2, 1),) * (many // 2), hq=2, hk=1, d=16)
    got = results(case)
    half = many // 2
    for rows, keys, q0, k0 in ((3, 5, 0, 0), (2, 1, 3 * half, 5 * half)):

        def part(x, start, length):
            x = x[start : start + half * length]
            return x.unflatten(0, (half, length)).transpose(1, 2)

        q, grad_out, grad_lse, out, lse, dq = (
            part(x, q0, rows)
            for x in (case.q, case.grad_out, case.grad_lse, got["out"], got["lse"], got["dq"])
        )
        k, v, dk, dv = (part(x, k0, keys) for x in (case.k, case.v, got["dk"], got["dv"]))
        found = {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv}
        oracle.accept(oracle.Case(q, k, v, grad_out, grad_lse=grad_lse), found)


def short_and_long(count: int, seed: int = 0) -> tuple[tuple[int, int], ...]:
    """Sequences of a few tokens, some with none on one side or both, and two long ones."""
    numbers = torch.randint(0, 12, (count, 2), generator=torch.Generator().manual_seed(seed))
    lengths = [tuple(pair) for pair in numbers.tolist()]
    lengths[count // 3], lengths[-2] = (700, 900), (1, 1500)
    return tuple(lengths)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("count", [1023, 1024, 4095, 4096, 4097, 9000])
def test_thousands_of_short_sequences(count, causal, family):
    """Around the number that the kernel which lists their blocks takes at a time.

    The oracle takes some dozens here and there, which ought to be enough: it goes one by one.
    """
    lengths = short_and_long(count)
    case = ragged(lengths, hq=2, hk=1, d=32, rest=(5, 3), options={"causal": causal})
    got = results(case)
    q_spans, k_spans = oracle.spans(case.cu_q), oracle.spans(case.cu_k)
    for first in (0, count // 3 - 20, count // 2, count - 40):
        part = slice(first, first + 40)
        (q0, q1), (k0, k1) = ((s[part][0][0], s[part][-1][1]) for s in (q_spans, k_spans))
        one = replace(
            case,
            q=case.q[q0:q1],
            grad_out=case.grad_out[q0:q1],
            grad_lse=case.grad_lse[q0:q1],
            k=case.k[k0:k1],
            v=case.v[k0:k1],
            cu_q=case.cu_q[part.start : part.stop + 1] - q0,
            cu_k=case.cu_k[part.start : part.stop + 1] - k0,
        )
        here = {"out": (q0, q1), "lse": (q0, q1), "dq": (q0, q1), "dk": (k0, k1), "dv": (k0, k1)}
        oracle.accept(one, {name: got[name][slice(*here[name])] for name in got})
    q_end, k_end = q_spans[-1][1], k_spans[-1][1]
    assert got["out"][q_end:].eq(0).all() and got["lse"][q_end:].eq(-inf).all()
    assert all(got[x][end:].eq(0).all() for x, end in (("dq", q_end), ("dk", k_end), ("dv", k_end)))
    for name, again in results(case).items():
        assert same_bits(got[name], again), name


@either_way
@pytest.mark.parametrize("hq, hk", [(64, 64), (96, 4), (130, 65)])
def test_many_heads(hq, hk, deterministic, dtype):
    """They share a dimension of the grid with the blocks."""
    lengths = ((31, 31), (0, 4), (129, 70), (5, 0), (1, 65))
    shape = {"hq": hq, "hk": hk, "d": 16, "dtype": dtype, "deterministic": deterministic}
    check_case(ragged(lengths, rest=(2, 3), options={"causal": True}, **shape))


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_slices_of_the_heads(causal, dtype):
    """Large enough for several: the bits of one head are those of a call of its own, in one."""
    lengths = ((1500, 1500), (17, 17), (2500, 2500)) * 8
    case = ragged(lengths, hq=8, hk=4, d=64, dtype=dtype, options={"causal": causal})
    text = fm.explain(
        case.q, case.k, case.v, causal=causal, backward=True, deterministic=True,
        cu_seqlens_q=case.cu_q, cu_seqlens_k=case.cu_k,
        max_seqlen_q=case.max_q, max_seqlen_k=case.max_k,
    )  # fmt: skip
    if slices(text) == 1:
        pytest.skip("half of the heads would leave some of this chip idle")
    assert slices(text) in (2, 4)
    got = results(case)
    for head in range(4):
        own, group = slice(head, head + 1), slice(2 * head, 2 * head + 2)
        one = replace(
            case,
            q=case.q[:, group],
            k=case.k[:, own],
            v=case.v[:, own],
            grad_out=case.grad_out[:, group],
            grad_lse=case.grad_lse[:, group],
        )
        heads = {"out": group, "lse": group, "dq": group, "dk": own, "dv": own}
        for name, x in results(one).items():
            assert same_bits(x, got[name][:, heads[name]]), f"{name} of key head {head}"


@pytest.mark.parametrize("needs", ["q", "k", "v", "kv"])
def test_only_the_gradients_that_are_wanted(needs, dtype):
    case = ragged(MIXED, dtype=dtype, rest=(3, 4))
    want, got = results(case), check_case(replace(case, needs=needs))
    assert set(got) == {"out", "lse", *(f"d{name}" for name in needs)}
    assert all(same_bits(got[name], want[name]) for name in got)


@either_way
@pytest.mark.parametrize("loss", ["out", "lse"])
def test_a_loss_of_one_result(loss, deterministic, dtype):
    shape = {"dtype": dtype, "deterministic": deterministic, "rest": (3, 4)}
    case = ragged(MIXED, grad_lse=loss == "lse", options={"causal": True}, **shape)
    if loss == "lse":
        case = replace(case, use_out=False, grad_out=torch.zeros_like(case.grad_out))
    check_case(case)
