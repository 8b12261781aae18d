"""Dropout on CUDA tensors: the pairs that the CPU drops, both passes, every kernel that has it."""

from __future__ import annotations

from dataclasses import replace
from math import inf, nan

import pytest
import torch
from helpers import (
    ALL_HEAD_DIMS,
    DEVICE,
    OPTIONS,
    check_case,
    check_containment,
    dense,
    either_way,
    every_option,
    integers,
    needs_dropout,
    normal,
    on_a_gpu,
    put,
    ragged,
    with_packed_bias,
    with_sinks,
)

import flashmoe_science as fm
from dropped import kept, with_dropout
from oracle import same_bits

pytestmark = needs_dropout

LENGTHS = ((70, 91), (130, 33), (5, 200), (40, 0), (0, 9), (64, 64))


def with_bias(case, shape, dtype=None, **options):
    bias = normal(*shape, dtype=dtype or case.q.dtype)
    return replace(case, bias=bias, needs=case.needs + "b", options={**case.options, **options})


# Which pairs.


def eye(m: int, d: int, first: int, dtype) -> torch.Tensor:
    """Rows of the identity from `first` on, as the values of m keys: out shows what was kept."""
    v = torch.zeros(m, d, dtype=dtype, device=DEVICE)
    rows = torch.arange(first, min(first + d, m), device=DEVICE)
    v[rows, rows - first] = 1
    return v


@pytest.mark.parametrize("d", [16, 64, 128, 256])
@pytest.mark.parametrize("n, m", [(1, 1), (15, 33), (17, 31), (129, 70), (200, 257)])
def test_the_pairs_are_those_of_philox(n, m, d, dtype):
    """With equal scores, out is 0 just where a pair was dropped."""
    q, k = (torch.zeros(2, 3, h, x, d, dtype=dtype, device=DEVICE) for h, x in ((2, n), (1, m)))
    for seed in (0, -1, 2**40 + 3):
        want = kept(seed, 0.4, 6, 2, n, m, DEVICE).view(2, 3, 2, n, m) != 0
        for first in range(0, m, d):
            v = eye(m, d, first, dtype).expand(2, 3, 1, m, d)
            out = fm.flash_attention(q, k, v, dropout_p=0.4, seed=seed)
            there = min(d, m - first)
            assert torch.equal(out[..., :there] != 0, want[..., first : first + there]), first


@pytest.mark.parametrize("options", [{"causal": True}, {"window": (40, 3)}, {"window": (0, 100)}])
def test_masks_do_not_move_the_pairs(options, dtype):
    n = 150
    q, want = torch.zeros(1, 1, n, 64, dtype=dtype, device=DEVICE), kept(9, 0.4, 1, 1, n, n, DEVICE)
    for first in range(0, n, 64):
        v = eye(n, 64, first, dtype)[None, None]
        out = fm.flash_attention(q, q, v, **options, dropout_p=0.4, seed=9)
        whole = fm.flash_attention(q, q, v, **options)
        pairs = want[..., first : first + 64] != 0
        assert torch.equal(
            out[..., : pairs.shape[-1]] != 0, (whole[..., : pairs.shape[-1]] != 0) & pairs
        )


@on_a_gpu
def test_a_cpu_run_repeats_a_gpu_run(dtype):
    case = dense(70, 91, dtype=dtype)
    call = {"dropout_p": 0.5, "seed": 77, "causal": True}
    got = fm.flash_attention(case.q, case.k, case.v, **call)
    want = fm.flash_attention(case.q.cpu(), case.k.cpu(), case.v.cpu(), **call)
    torch.testing.assert_close(got.cpu(), want, atol=2e-2, rtol=2e-2)


# Against the oracle.


@either_way
@every_option
def test_options(option, deterministic, dtype):
    case = dense(131, 136, dtype=dtype, deterministic=deterministic, options=OPTIONS[option])
    check_case(with_dropout(case))


@pytest.mark.parametrize("p", [0.1, 0.9, 1.0, 1e-9])
@pytest.mark.parametrize("d", ALL_HEAD_DIMS)
def test_head_dims(d, p, dtype):
    for n, m in ((70, 104), (200, 131)):
        check_case(with_dropout(dense(n, m, d=d, dtype=dtype), p))


@pytest.mark.parametrize("n", [0, 1, 2, 17, 63, 65, 129])
def test_lengths(n, dtype):
    for m in (0, 1, 16, 64, 127, 257):
        check_case(with_dropout(dense(n, m, dtype=dtype, options={"causal": True})))


@either_way
@pytest.mark.parametrize("d", [16, 64, 96, 200])
def test_a_bias_that_nobody_shares(d, deterministic, dtype):
    for n, m in ((66, 88), (131, 67)):
        case = dense(n, m, d=d, dtype=dtype, deterministic=deterministic)
        check_case(with_dropout(with_bias(case, (2, 4, n, m))))
        check_case(with_dropout(with_bias(case, (2, 4, n, m), torch.float32, causal=True)))
        check_case(with_dropout(with_bias(case, (2, 4, n, m), softcap=3.0)))


SHARED = ((4, 66, 88), (2, 1, 66, 88), (66, 88), (4, 66, 1), (2, 4, 1, 88), (1,))


@pytest.mark.parametrize("shape", SHARED, ids=str)
@pytest.mark.parametrize("d", [32, 64, 128, 256])
def test_the_sum_of_a_shared_bias(d, shape, dtype):
    case = dense(66, 88, d=d, dtype=dtype)
    check_case(with_dropout(with_bias(case, shape)))
    check_case(with_dropout(with_bias(case, shape, torch.float32, causal=True)))


def test_the_sum_in_parts(dtype):
    """Few tiles of a gradient that many share."""
    case = dense(40, 72, lead=(24,), d=32, dtype=dtype)
    check_case(with_dropout(with_bias(case, (40, 72))))


@pytest.mark.parametrize("d", [32, 64, 128])
def test_a_mask(d, dtype):
    case = dense(131, 136, d=d, dtype=dtype)
    mask = torch.rand(4, 131, 136, device=DEVICE) < 0.6
    for bias in (mask, mask[:, :1], mask[..., :67].repeat_interleave(3, -1)[..., :136]):
        check_case(with_dropout(replace(case, bias=bias)))


@pytest.mark.parametrize("heads", [None, 1, 4])
@pytest.mark.parametrize("d", [20, 64, 128])
def test_ragged(d, heads, dtype):
    for options in ({}, {"causal": True}):
        case = ragged(LENGTHS, d=d, dtype=dtype, rest=(3, 5), options=options)
        check_case(with_dropout(case if heads is None else with_packed_bias(case, heads)))


def test_leading_dimensions_and_lengths(dtype):
    lengths = integers(0, 30, 91, 64, 1, 77).view(3, 2)
    check_case(with_dropout(dense(70, 91, lead=(3, 2), dtype=dtype, key_lengths=lengths)))


def test_few_queries_over_many_keys(dtype):
    """Split, and the heads of one query are no rows of a tile."""
    for n, hq in ((1, 8), (1, 2), (3, 4)):
        check_case(with_dropout(dense(n, 3001, lead=(1,), hq=hq, hk=2, dtype=dtype)))


def test_sinks(dtype):
    check_case(with_dropout(with_sinks(dense(131, 60, dtype=dtype, options={"causal": True}))))


def test_wrong_lengths(dtype):
    case = dense(66, 88, lead=(3,), dtype=dtype, key_lengths=integers(7, 89, 88))
    out = fm.flash_attention(
        case.q, case.k, case.v, key_lengths=case.key_lengths, dropout_p=0.2, seed=1
    )
    if DEVICE != "cpu":
        assert out[1].isnan().all() and out[0].isfinite().all() and out[2].isfinite().all()


# NaN stays where it was dropped.


@pytest.mark.parametrize("poison", [nan, inf], ids=str)
@pytest.mark.parametrize("d", [32, 64, 128])
def test_a_dropped_value_may_hold_anything(d, poison, dtype):
    clean = with_dropout(dense(131, 136, d=d, dtype=dtype), 0.5)
    dirty = replace(clean, v=put(clean.v, (..., 77, 3), poison))
    assert check_containment(clean, dirty) > 0


@pytest.mark.parametrize("d", [32, 64, 128])
def test_a_gradient_reaches_the_values_that_were_kept(d, dtype):
    clean = with_dropout(dense(131, 136, d=d, dtype=dtype), 0.5)
    dirty = replace(clean, grad_out=put(clean.grad_out, (..., 50, 3), nan))
    assert check_containment(clean, dirty) > 0


# Seeds.


def test_seeds(dtype):
    """An int, a tensor, and torch's generator of the device."""
    q, k, v = (normal(2, 4, 70, 64, dtype=dtype) for _ in range(3))
    call = lambda seed=None: fm.flash_attention(q, k, v, dropout_p=0.3, seed=seed)  # noqa: E731
    number = torch.tensor(7, device=DEVICE)
    assert same_bits(call(7), call(number)) and same_bits(call(7), call(number.view(1, 1)))
    assert not same_bits(call(7), call(8))
    runs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        runs += [call(), call()]
    assert same_bits(runs[0], runs[2]) and same_bits(runs[1], runs[3])
    assert not same_bits(runs[0], runs[1]) and not same_bits(runs[0], runs[4])


@on_a_gpu
def test_a_replay_of_a_graph_draws_anew(dtype):
    """As SDPA does: torch's generator is the graph's. The backward pass drops what the forward
    pass dropped: out is linear in v."""
    q, k, v = (normal(2, 4, 130, 64, dtype=dtype).requires_grad_() for _ in range(3))
    grad = normal(2, 4, 130, 64, dtype=dtype)

    def both():
        out = fm.flash_attention(q, k, v, dropout_p=0.3)
        return out, *torch.autograd.grad(out, (q, k, v), grad)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        both()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = both()
    seen = []
    for _ in range(3):
        graph.replay()
        out, *_, dv = (x.double() for x in captured)
        torch.testing.assert_close((dv * v).sum(), (out * grad).sum(), rtol=0.05, atol=5.0)
        assert not any(same_bits(out, other) for other in seen)
        seen.append(out)


@on_a_gpu
def test_a_graph_reads_its_seed_from_the_device(dtype):
    q, k, v = (normal(2, 4, 70, 64, dtype=dtype) for _ in range(3))
    seed = torch.tensor(3, device=DEVICE)
    call = lambda seed: fm.flash_attention(q, k, v, dropout_p=0.3, seed=seed)  # noqa: E731
    call(seed)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call(seed)
    for number in (3, 4, -5):
        seed.fill_(number)
        graph.replay()
        assert same_bits(captured, call(number))


@on_a_gpu
def test_another_device_is_refused(dtype):
    q = normal(1, 2, 20, 64, dtype=dtype)
    with pytest.raises(RuntimeError, match="seed is on"):
        fm.flash_attention(q, q, q, dropout_p=0.1, seed=torch.tensor(1))
