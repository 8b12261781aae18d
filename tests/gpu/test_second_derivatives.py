"""Forward mode and second derivatives on CUDA tensors, against autograd over the plain formula.

What is asked is what tests/python/test_second.py asks of the CPU, through the same two calls of
torch.autograd.grad.
"""

from __future__ import annotations

import os
from dataclasses import replace
from math import inf, nan

import pytest
import torch
from families import FAMILIES
from helpers import (
    ALL_HEAD_DIMS,
    COPIED,
    DEVICE,
    IN_PLACE,
    OPTIONS,
    VALUE_HEAD_DIMS,
    dense,
    every_option,
    integers,
    normal,
    on_a_gpu,
    poisoned,
    put,
    ragged,
    with_packed_bias,
    with_sinks,
)
from test_random_problems import draw
from torch.autograd import forward_ad

import flashmoe_science as fm
import second_oracle
from oracle import Case, same_bits
from problems import build
from second_oracle import call_ours, differentiate_twice

DTYPE_NAMES = ("fp16", "bf16", "fp32")

SEQUENCES = ((70, 91), (130, 33), (5, 200), (40, 0), (0, 9), (64, 64), (1, 1))
CASES = int(os.environ.get("FLASHMOE_RANDOM_CASES", 200)) // 2
CHUNK = 25


def tangents_of(case: Case, seed=1) -> dict[str, torch.Tensor]:
    on_cpu = replace(case, bias=None if case.bias is None else case.bias.cpu())
    return {name: x.to(DEVICE) for name, x in second_oracle.tangents_of(on_cpu, seed).items()}


def twice(case: Case, tangents) -> dict[str, torch.Tensor]:
    """All derivatives, made in poisoned memory, and again with the same bits."""
    like = (case.grad_out, *case.inputs().values())
    with poisoned(*((x.shape, x.dtype) for x in like), (case.q.shape[:-1], torch.float32)):
        got = differentiate_twice(case, tangents, call_ours)
    again = differentiate_twice(case, tangents, call_ours)
    for name, x in got.items():
        assert same_bits(x, again[name]), f"{name} differs between two runs"
    return got


def check_twice(case: Case, tangents=None) -> dict[str, torch.Tensor]:
    tangents = tangents_of(case) if tangents is None else tangents
    got = twice(case, tangents)
    complaints = second_oracle.compare(case, tangents, got)
    assert not complaints, "\n".join(complaints)
    return got


def with_bias(case: Case, own="bhqk", dtype=None, masked=False) -> Case:
    """A bias that has the named dimensions for itself."""
    lead, (hq, n), m = case.q.shape[:-3], case.q.shape[-3:-1], case.k.shape[-2]
    sizes = [*lead, hq, n, m]
    for i, name in enumerate("bhqk"):
        if name not in own:
            sizes[i - 4] = 1
    bias = normal(*sizes, dtype=dtype or case.q.dtype)
    if masked:
        bias = bias.masked_fill(torch.rand(bias.shape, device=DEVICE) < 0.2, -inf)
    return replace(case, bias=bias, needs=case.needs + "b")


@every_option
def test_options(option, dtype):
    check_twice(dense(70, 97, dtype=dtype, options=OPTIONS[option]))
    check_twice(with_bias(dense(70, 97, dtype=dtype, options=OPTIONS[option]), masked=True))


@pytest.mark.parametrize("n", [0, 1, 2, 17, 31, 32, 33, 65, 129])
def test_lengths(n, dtype):
    for m in (0, 1, 16, 31, 32, 33, 97):
        check_twice(dense(n, m, dtype=dtype))
        check_twice(with_bias(dense(n, m, dtype=dtype, options={"causal": True})))


@pytest.mark.parametrize("d", ALL_HEAD_DIMS)
def test_head_dims(d, dtype):
    check_twice(dense(40, 70, lead=(1,), d=d, dtype=dtype))


@pytest.mark.parametrize("d, dv", VALUE_HEAD_DIMS)
def test_value_head_dims(d, dv, dtype):
    check_twice(dense(40, 70, lead=(1,), d=d, dv=dv, dtype=dtype, options={"softcap": 3.0}))


@pytest.mark.parametrize("hq, hk", [(1, 1), (6, 2), (8, 1)])
def test_heads(hq, hk, dtype):
    check_twice(with_bias(dense(66, 45, hq=hq, hk=hk, dtype=dtype), "hqk"))


@pytest.mark.parametrize("own", ["bhqk", "hqk", "bqk", "qk", "hk", "bq", "bk", "k", "q", ""])
def test_broadcast_biases(own, dtype):
    for wide in (dtype, torch.float32):
        case = dense(45, 70, lead=(3,), d=32, dtype=dtype, options={"causal": own == "hqk"})
        check_twice(with_bias(case, own, wide))


def test_few_tiles_of_a_bias_that_many_share(dtype):
    """Several blocks sum each, and their sums are added up."""
    case = with_bias(dense(40, 33, lead=(24,), d=16, dtype=dtype), "qk")
    check_twice(case)


def test_key_lengths(dtype):
    lengths = integers(0, 1, 33, 70)
    for own in ("bhqk", "hqk"):
        case = dense(45, 70, lead=(4,), d=32, dtype=dtype, key_lengths=lengths)
        check_twice(with_bias(case, own))


@pytest.mark.parametrize("heads", [None, 1, 4])
def test_ragged(heads, dtype):
    for options in ({}, {"causal": True}, {"window": (20, 3), "softcap": 5.0}):
        case = ragged(SEQUENCES, d=40, dtype=dtype, rest=(3, 7), slack=50, options=options)
        check_twice(case if heads is None else with_packed_bias(case, heads))


@pytest.mark.parametrize("sinks", [torch.float32, None])
def test_sinks(sinks, dtype):
    case = dense(90, 31, d=32, dtype=dtype, options={"causal": True})  # some rows see no key
    check_twice(with_sinks(case, sinks or dtype))
    check_twice(with_sinks(ragged(SEQUENCES, d=16, dtype=dtype), sinks or dtype))


@pytest.mark.parametrize("needs", ["q", "k", "v", "qk", "b", "s", "qkvbs"])
def test_some_of_the_inputs(needs, dtype):
    """Only these have tangents, and gradients by all; and the other way round."""
    case = with_sinks(with_bias(dense(45, 38, d=24, dtype=dtype)))
    check_twice(replace(case, needs=needs))
    check_twice(replace(case, needs=needs, grad_lse=None))
    some = {name: x for name, x in tangents_of(case).items() if name[0] in needs}
    check_twice(case, some)


@pytest.mark.parametrize("layout", IN_PLACE + COPIED, ids=lambda layout: layout.__name__)
def test_layouts(layout, dtype):
    case = dense(66, 40, dtype=dtype)
    moved = {name: layout(getattr(case, name)) for name in ("q", "k", "v", "grad_out")}
    tangents = {name: layout(x) for name, x in tangents_of(case).items()}
    check_twice(replace(case, **moved), tangents)


def test_forward_mode_is_the_same_numbers(dtype):
    """out' and lse' through dual numbers have the bits that a second gradient has."""
    case = with_bias(dense(70, 45, d=48, dtype=dtype, options={"causal": True}), "hqk")
    tangents = tangents_of(case)
    want = twice(case, tangents)
    with forward_ad.dual_level():
        duals = {n: forward_ad.make_dual(x, tangents[n]) for n, x in case.inputs().items()}
        results = call_ours(case, duals)
        moved = [forward_ad.unpack_dual(x).tangent for x in results]
    for name, x in zip(("out'", "lse'"), moved, strict=True):
        assert same_bits(x, want[name]), name


# What is not finite.


def hidden_key(case: Case, key: int) -> Case:
    return replace(case, bias=put(case.bias, (..., key), -inf))


@pytest.mark.parametrize("poison", [nan, inf])
@pytest.mark.parametrize("where", ["k", "v"])
def test_nan_behind_a_mask_stays_there(where, poison, dtype):
    """In a key that nobody sees, and in how it moves: all results are as without it."""
    case = hidden_key(with_bias(dense(45, 70, d=40, dtype=dtype)), 33)
    tangents = tangents_of(case)
    row = (..., 33, slice(None))
    dirty = replace(case, **{where: put(getattr(case, where), row, poison)})
    moves = {**tangents, where: put(tangents[where], row, poison)}
    complaints = second_oracle.compare(case, tangents, twice(dirty, moves))
    assert not complaints, "\n".join(complaints)


def test_nan_in_a_query_stays_in_its_row(dtype):
    """Causal: keys after it are not reached, nor other rows."""
    case = dense(70, 70, lead=(1,), hq=1, hk=1, d=32, dtype=dtype, options={"causal": True})
    tangents = tangents_of(case)
    got = twice(replace(case, q=put(case.q, (0, 0, 40, 5), nan)), tangents)
    for name in ("out'", "ddq"):
        bad = got[name].isnan().any(-1)[0, 0]
        assert bad[40] and bad.sum() == 1, name
    for name in ("ddk", "ddv"):
        bad = got[name].isnan().any(-1)[0, 0]
        assert bad[:41].all() and not bad[41:].any(), name


@on_a_gpu
def test_lengths_that_only_the_device_knows(dtype):
    """A batch entry whose length is wrong is NaN, and the others are as before."""
    good = dense(45, 70, lead=(3,), d=32, dtype=dtype, key_lengths=integers(70, 5, 33))
    good = with_bias(good)
    tangents = tangents_of(good)
    want = twice(good, tangents)
    got = twice(replace(good, key_lengths=integers(70, 71, 33)), tangents)
    for name, x in got.items():
        assert x[1].isnan().all(), name
        assert same_bits(x[::2], want[name][::2]), name


@on_a_gpu
def test_sequences_that_only_the_device_knows(dtype):
    case = with_packed_bias(ragged(((20, 30), (33, 33), (5, 7)), d=16, dtype=dtype), 4)
    tangents = tangents_of(case)
    want = twice(case, tangents)
    got = twice(replace(case, max_q=32), tangents)  # the second sequence is longer
    for name in ("out'", "lse'", "ddq"):
        assert got[name][20:53].isnan().all(), name
        assert same_bits(got[name][:20], want[name][:20]), name
        assert same_bits(got[name][53:], want[name][53:]), name
    for name in ("ddk", "ddv"):
        assert got[name][30:63].isnan().all() and same_bits(got[name][:30], want[name][:30]), name
    pairs = 20 * 30
    assert got["ddbias"][pairs : pairs + 33 * 33].isnan().all()
    assert same_bits(got["ddbias"][:pairs], want["ddbias"][:pairs])


# What it costs, and what is refused.


@on_a_gpu
def test_memory_is_linear_in_the_length(dtype, roomy):
    roomy(2 << 30)
    peaks = []
    for n in (2048, 4096):
        case = dense(n, lead=(1,), hq=2, hk=2, dtype=dtype)
        tangents = tangents_of(case)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        differentiate_twice(case, tangents, call_ours)
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert peaks[1] < 2.2 * peaks[0] and peaks[1] < 4096 * 4096 * dtype.itemsize


@on_a_gpu
def test_third_derivatives_are_refused(dtype):
    leaves = [normal(1, 1, 9, 16, dtype=dtype).requires_grad_() for _ in "qkv"]
    first = torch.autograd.grad(fm.flash_attention(*leaves).sum(), leaves, create_graph=True)
    second = torch.autograd.grad(sum(x.sum() for x in first), leaves, create_graph=True)
    with pytest.raises(RuntimeError, match="third derivative"):
        sum(x.sum() for x in second).backward()


@pytest.mark.parametrize("seeds", [range(i, i + CHUNK) for i in range(0, CASES, CHUNK)], ids=str)
def test_random_problems(seeds, family):
    failures = []
    for seed in seeds:
        case = second_oracle.differentiable(
            build(draw(900_000 + seed, (*FAMILIES[family], "fp32")), DEVICE)
        )
        tangents = tangents_of(case, seed)
        try:
            check_twice(case, tangents)
        except (RuntimeError, AssertionError) as error:
            failures.append(f"{family}, seed {900_000 + seed}: {error}")
    assert not failures, "\n".join(failures[:5])
