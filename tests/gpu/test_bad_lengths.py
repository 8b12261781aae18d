"""Lengths that only the device knows cannot raise without waiting for it.

Where they contradict the tensors, the results of the sequences concerned are NaN, the others are
right, and nothing outside the tensors is touched. (On the CPU all of this is an error.)
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from helpers import DEVICE, dense, either_way, every_mask, integers, on_a_gpu, ragged

import flashmoe_science as fm
import oracle
from oracle import same_bits

pytestmark = on_a_gpu

N, M = 130, 200


def results(case: oracle.Case) -> dict[str, torch.Tensor]:
    """In memory that held finite numbers: NaN that nobody wrote would prove nothing here."""
    tensors = (case.grad_out, case.q, case.k, case.v, case.q[..., 0].float())
    blocks = [torch.full_like(x, 3.0) for x in tensors for _ in range(3)]
    del blocks
    return oracle.ours(case)


@either_way
@every_mask
@pytest.mark.parametrize("bad", [M + 1, M + 64, 2**30, 2**31 - 1, -1, -64, -(2**31)])
def test_key_lengths(bad, causal, deterministic, dtype):
    case = dense(
        N,
        M,
        lead=(4,),
        dtype=dtype,
        key_lengths=integers(100, bad, M, bad),
        deterministic=deterministic,
        options={"causal": causal},
    )
    got = results(case)
    for i in (1, 3):
        assert all(x[i].isnan().all() for x in got.values())
    right = replace(
        case,
        key_lengths=case.key_lengths[::2],
        **{name: getattr(case, name)[::2] for name in ("q", "k", "v", "grad_out", "grad_lse")},
    )
    oracle.accept(right, {name: x[::2] for name, x in got.items()})


@pytest.mark.parametrize("bad", [2**31, 2**32, 2**32 + 5, 2**40, -(2**31) - 1, -(2**40)])
def test_key_lengths_past_32_bits(bad, dtype):
    """Cut to 32 bits some of them would be legal."""
    lengths = torch.tensor([bad, 7], device=DEVICE)
    got = results(dense(N, M, dtype=dtype, key_lengths=lengths))
    assert all(x[0].isnan().all() and not x[1].isnan().any() for x in got.values())


@pytest.mark.parametrize("n", [1, 2, 17])
def test_key_lengths_of_few_queries(n, dtype):
    """Where the keys are split between blocks."""
    lengths = integers(4000, 4001, -1, 0)
    got = results(dense(n, 4000, lead=(4,), hq=8, hk=2, dtype=dtype, key_lengths=lengths))
    for name, x in got.items():
        assert x[1].isnan().all() and x[2].isnan().all(), name
        assert not x[0].isnan().any() and not x[3].isnan().any(), name


# Ragged. Sequences 0 to 3 with these lengths; some tokens behind them.

LENGTHS = ((70, 91), (130, 33), (5, 200), (64, 64))
REST = (9, 11)


def judge_ragged(case, broken, right: list[int], wrong: list[int]) -> dict[str, torch.Tensor]:
    """`case` is sound, `broken` the same with lengths that are not; which sequences are which."""
    got = results(broken)
    want = oracle.reference(case)
    spans = {"q": oracle.spans(case.cu_q), "k": oracle.spans(case.cu_k)}
    sides = {"out": "q", "lse": "q", "dq": "q", "dk": "k", "dv": "k"}
    for name, x in got.items():
        for i in wrong:
            part = slice(*spans[sides[name]][i])
            assert x[part].isnan().all(), f"{name} of sequence {i}"
        for i in right:
            part = slice(*spans[sides[name]][i])
            error = (x[part].double() - want[name][part]).abs()
            limit = 0.05 * (1 + want[name][part].abs().max())
            assert (error <= limit).all(), f"{name} of sequence {i}"  # also for NaN
    return got


@either_way
@pytest.mark.parametrize("side", ["q", "k"])
def test_a_sequence_longer_than_stated(side, deterministic, dtype):
    case = ragged(LENGTHS, rest=REST, dtype=dtype, deterministic=deterministic)
    if side == "q":
        judge_ragged(case, replace(case, max_q=129), [0, 2, 3], [1])
        judge_ragged(case, replace(case, max_q=69), [2, 3], [0, 1])
    else:
        judge_ragged(case, replace(case, max_k=199), [0, 1, 3], [2])
        judge_ragged(case, replace(case, max_k=1), [], [0, 1, 2, 3])


@either_way
@pytest.mark.parametrize("side", ["cu_q", "cu_k"])
@pytest.mark.parametrize("excess", [1, 64, 2**30])
def test_a_sequence_past_the_last_token(excess, side, deterministic, dtype):
    """The tokens it does have are its own, and NaN."""
    case = ragged(LENGTHS, dtype=dtype, slack=100, deterministic=deterministic)
    cu = getattr(case, side).clone()
    cu[-1] += excess
    judge_ragged(case, replace(case, **{side: cu}), [0, 1, 2], [3])


@either_way
@pytest.mark.parametrize("side", ["cu_q", "cu_k"])
def test_lengths_that_fall(side, deterministic, dtype):
    """A sequence of negative length. Those that end before it are right."""
    case = ragged(LENGTHS, dtype=dtype, deterministic=deterministic)
    cu = getattr(case, side).clone()
    cu[3] = cu[2] - 1  # sequence 2 has length -1, and sequence 3 begins with the last of sequence 1
    judge_ragged(case, replace(case, **{side: cu}), [0], [])


@pytest.mark.parametrize("side", ["cu_q", "cu_k"])
@pytest.mark.parametrize("start", [-1, -1000, 3])
def test_lengths_that_do_not_start_at_zero(start, side, dtype):
    case = ragged(LENGTHS, dtype=dtype)
    cu = getattr(case, side).clone()
    cu[0] = start
    got = judge_ragged(case, replace(case, **{side: cu}), [1, 2, 3], [])
    assert got["out"][3:70].isnan().all() and got["lse"][3:70].isnan().all()


@pytest.mark.parametrize("side", ["cu_q", "cu_k"])
def test_lengths_of_garbage(side, dtype):
    """Whatever they say, nothing outside the tensors is touched and the device lives."""
    case = ragged(LENGTHS, dtype=dtype)
    for values in ([2**31 - 1] * 5, [-(2**31)] * 5, [0, -5, 2**31 - 1, 7, -(2**31)]):
        results(replace(case, **{side: integers(*values)}))
        torch.cuda.synchronize()
    judge_ragged(case, case, [0, 1, 2, 3], [])


def test_memory_beside_the_results_is_left_alone():
    """Gradients into guarded memory: the tensors of a sound call lie next to those of a bad one."""
    case = ragged(LENGTHS, dtype=torch.float16)
    beside = [torch.full((1 << 16,), 7.0, device=DEVICE) for _ in range(64)]
    cu = case.cu_q.clone()
    cu[-1] += 4096
    results(replace(case, cu_q=cu, max_q=5000))
    torch.cuda.synchronize()
    assert all(x.eq(7).all() for x in beside)


def test_nothing_waits_for_the_lengths():
    """A call that read them back would wait for the work before it."""
    q, k, v = (x.transpose(0, 1)[None] for x in (ragged(LENGTHS).q,) * 3)
    lengths = integers(50)
    fm.flash_attention(q, k, v, key_lengths=lengths)
    torch.cuda.synchronize()
    done = torch.cuda.Event()
    torch.cuda._sleep(600_000_000)
    out = fm.flash_attention(q, k, v, key_lengths=lengths)
    done.record()
    waited = done.query()
    torch.cuda.synchronize()
    assert not waited, "the call came back only when the work before it was done"
    assert same_bits(out, fm.flash_attention(q, k, v, key_lengths=lengths))
