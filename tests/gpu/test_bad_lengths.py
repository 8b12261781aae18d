"""Lengths that only the device knows cannot raise without waiting for it.

Where they contradict the tensors, the results of the sequences concerned are NaN, the others are
right, and nothing outside the tensors is touched. (On the CPU all of this is an error.)
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from helpers import (
    DEVICE,
    dense,
    either_way,
    every_mask,
    integers,
    needs_bias,
    needs_packed_bias,
    normal,
    on_a_gpu,
    ragged,
    with_packed_bias,
)

import flashmoe_science as fm
import oracle
from oracle import same_bits

pytestmark = on_a_gpu

N, M = 130, 200


def results(case: oracle.Case) -> dict[str, torch.Tensor]:
    """In memory that held finite numbers: NaN that nobody wrote would prove nothing here."""
    tensors = (case.grad_out, *case.inputs().values(), case.q[..., 0].float())
    blocks = [torch.full_like(x, 3.0) for x in tensors for _ in range(3)]
    del blocks
    return oracle.ours(case)


@either_way
@every_mask
@pytest.mark.parametrize("hk", [2, 4], ids=["shared keys", "own keys"])
@pytest.mark.parametrize("bad", [M + 1, M + 64, 2**30, 2**31 - 1, -1, -64, -(2**31)])
def test_key_lengths(bad, hk, causal, deterministic, dtype):
    case = dense(
        N,
        M,
        lead=(4,),
        hk=hk,
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


@needs_bias
@pytest.mark.parametrize("bad", [M + 1, 2**30, -1, -(2**31)])
def test_key_lengths_with_a_bias(bad, dtype):
    """A gradient that batch entries share is a sum, and one NaN is enough for it."""
    lengths = integers(100, bad, M, bad)
    for own in (True, False):
        case = dense(N, M, lead=(4,), d=32, dtype=dtype, key_lengths=lengths, needs="qkvb")
        case = replace(case, bias=normal(4 if own else 1, 4, N, M, dtype=dtype))
        got = results(case)
        right = replace(
            case,
            key_lengths=lengths[::2],
            bias=case.bias[::2],
            needs="qkvb" if own else "qkv",
            **{name: getattr(case, name)[::2] for name in ("q", "k", "v", "grad_out", "grad_lse")},
        )
        if not own:
            assert got.pop("dbias").isnan().all()
        for i in (1, 3):
            assert all(x[i].isnan().all() for x in got.values())
        oracle.accept(right, {name: x[::2] for name, x in got.items()})


# Ragged. Sequences 0 to 3 with these lengths; some tokens behind them.

LENGTHS = ((70, 91), (130, 33), (5, 200), (64, 64))
REST = (9, 11)


def pair_spans(case: oracle.Case) -> list[tuple[int, int]]:
    """Where each sequence's bias lies in a packed one."""
    sizes = case.cu_q.diff() * case.cu_k.diff()
    return oracle.spans(torch.cat([sizes.new_zeros(1), sizes.cumsum(0)]))


def judge_ragged(case, broken, right: list[int], wrong: list[int]) -> dict[str, torch.Tensor]:
    """`case` is sound, `broken` the same with lengths that are not; which sequences are which."""
    got = results(broken)
    want = oracle.reference(case)
    spans = {"q": oracle.spans(case.cu_q), "k": oracle.spans(case.cu_k), "pairs": pair_spans(case)}
    sides = {"out": "q", "lse": "q", "dq": "q", "dk": "k", "dv": "k", "dbias": "pairs"}
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
    got = judge_ragged(case, replace(case, **{side: cu}), [0, 1], [])
    # Sequence 3 is NaN from where sequence 1 ends, and 2 where the other side still has it.
    names = {"q": ("out", "lse", "dq"), "k": ("dk", "dv")}
    for other in "qk":
        ends = (case.cu_q if other == "q" else case.cu_k).tolist()
        for name in names[other]:
            assert got[name][ends[2] :].isnan().all(), name


@either_way
@pytest.mark.parametrize("side", ["cu_q", "cu_k"])
@pytest.mark.parametrize("count", [300, 5000])
def test_overlapping_sequences(count, side, deterministic):
    """Of those that claim the same tokens the first has them, and is right; what is wrong stays
    where it is, also thousands of sequences on, and every run has the same bits."""
    lengths = ((7, 9), (3, 2), (65, 70), (1, 1)) * (count // 4)
    shape = {"hq": 2, "hk": 1, "d": 16, "rest": (4, 4), "deterministic": deterministic}
    case = ragged(lengths, **shape)
    cu = getattr(case, side).clone()
    falls = (5, count // 2, count - 6)
    for at in falls:
        cu[at] -= 1  # sequence at - 1 is a token shorter, and right
        cu[at + 1] = cu[at] - 1  # sequence `at` falls, and the next begins within at - 1
    broken = replace(case, **{side: cu})
    got = results(broken)
    ends_q, ends_k = broken.cu_q.tolist(), broken.cu_k.tolist()
    for at in falls:
        # Both sides of the two are NaN, from where the one before ends to where they end.
        q, k = (slice(ends[at], ends[at + 2]) for ends in (ends_q, ends_k))
        for name, part in {"out": q, "lse": q, "dq": q, "dk": k, "dv": k}.items():
            assert got[name][part].isnan().all(), f"{name} of sequences {at} and {at + 1}"
        # The neighbours are not.
        before_q, before_k = (slice(ends[at - 1], ends[at]) for ends in (ends_q, ends_k))
        next_q, next_k = (slice(ends[at + 2], ends[at + 3]) for ends in (ends_q, ends_k))
        for q, k in ((before_q, before_k), (next_q, next_k)):
            for name, part in {"out": q, "lse": q, "dq": q, "dk": k, "dv": k}.items():
                assert not got[name][part].isnan().any(), f"{name} beside sequence {at}"
    # All others are those of the same sequences with sound lengths.
    want = results(case)
    spans = {"q": oracle.spans(case.cu_q), "k": oracle.spans(case.cu_k)}
    sides = {"out": "q", "lse": "q", "dq": "q", "dk": "k", "dv": "k"}
    changed = [i for at in falls for i in (at - 1, at, at + 1)]
    for name in got:
        same = torch.ones(len(want[name]), dtype=torch.bool, device=DEVICE)
        for i in changed:
            same[slice(*spans[sides[name]][i])] = False
        torch.testing.assert_close(got[name][same], want[name][same], rtol=1e-2, atol=1e-2)
    again = results(broken)
    if deterministic:
        assert all(same_bits(got[name], again[name]) for name in got)


@pytest.mark.parametrize("side", ["cu_q", "cu_k"])
@pytest.mark.parametrize("start", [-1, -1000, 3])
def test_lengths_that_do_not_start_at_zero(start, side, dtype):
    case = ragged(LENGTHS, dtype=dtype)
    cu = getattr(case, side).clone()
    cu[0] = start
    got = judge_ragged(case, replace(case, **{side: cu}), [1, 2, 3], [])
    assert got["out"][:70].isnan().all() and got["lse"][:70].isnan().all()


@pytest.mark.parametrize("side", ["cu_q", "cu_k"])
def test_lengths_of_garbage(side, dtype):
    """Whatever they say, nothing outside the tensors is touched and the device lives."""
    case = ragged(LENGTHS, dtype=dtype)
    for values in ([2**31 - 1] * 5, [-(2**31)] * 5, [0, -5, 2**31 - 1, 7, -(2**31)]):
        results(replace(case, **{side: integers(*values)}))
        torch.cuda.synchronize()
    judge_ragged(case, case, [0, 1, 2, 3], [])


# With a packed bias, which begins where the sequences before have their pairs. What comes after a
# bad length can have begun anywhere, unless only the stated maxima are wrong.

either_head = pytest.mark.parametrize("heads", [4, 1], ids=["each head", "all heads"])


def biased(heads: int, dtype, **shape) -> oracle.Case:
    return with_packed_bias(ragged(LENGTHS, d=32, dtype=dtype, **shape), heads)


@needs_packed_bias
@either_head
@pytest.mark.parametrize("side", ["q", "k"])
def test_a_biased_sequence_longer_than_stated(side, heads, dtype):
    case = biased(heads, dtype, rest=REST)
    if side == "q":
        judge_ragged(case, replace(case, max_q=129), [0, 2, 3], [1])
    else:
        judge_ragged(case, replace(case, max_k=199), [0, 1, 3], [2])
        judge_ragged(case, replace(case, max_k=1), [], [0, 1, 2, 3])


@needs_packed_bias
@either_head
@pytest.mark.parametrize("side", ["cu_q", "cu_k"])
@pytest.mark.parametrize("excess", [1, 64, 2**30])
def test_a_biased_sequence_past_the_last_token(excess, side, heads, dtype):
    """And past the last pair."""
    case = biased(heads, dtype, slack=100)
    cu = getattr(case, side).clone()
    cu[-1] += excess
    judge_ragged(case, replace(case, **{side: cu}), [0, 1, 2], [3])


@needs_packed_bias
@either_head
@pytest.mark.parametrize("side", ["cu_q", "cu_k"])
def test_biased_lengths_that_fall(side, heads, dtype):
    case = biased(heads, dtype)
    cu = getattr(case, side).clone()
    cu[3] = cu[2] - 1
    judge_ragged(case, replace(case, **{side: cu}), [0], [])


@needs_packed_bias
@either_head
def test_a_bias_with_too_few_pairs(heads, dtype):
    """Only the device knows how many there have to be."""
    case = biased(heads, dtype)
    for missing in (1, 64, 64 * 64):
        got = results(replace(case, bias=case.bias[:-missing]))
        want, spans = oracle.reference(case), oracle.spans(case.cu_q)
        for name in ("out", "lse", "dq"):
            assert got[name][slice(*spans[3])].isnan().all(), name
            for i in (0, 1, 2):
                part = slice(*spans[i])
                error = (got[name][part].double() - want[name][part]).abs()
                assert (error <= 0.05 * (1 + want[name][part].abs().max())).all(), name
        assert got["dbias"].shape == (case.bias.shape[0] - missing, heads)
        assert got["dbias"][pair_spans(case)[3][0] :].isnan().all()
        assert got["dbias"][: pair_spans(case)[3][0]].isfinite().all()


@needs_packed_bias
@either_head
def test_a_bias_with_too_many_pairs(heads, dtype):
    """The sequences are right; the gradient of what belongs to none is 0 or NaN, never what lay
    there."""
    case = biased(heads, dtype)
    more = torch.cat([case.bias, case.bias[:100]])
    got = results(replace(case, bias=more))
    gradient = got["dbias"]
    got["dbias"] = gradient[:-100]
    oracle.accept(case, got)
    assert (gradient[-100:].eq(0) | gradient[-100:].isnan()).all()


@needs_packed_bias
@either_head
@pytest.mark.parametrize("side", ["cu_q", "cu_k"])
def test_biased_lengths_of_garbage(side, heads, dtype):
    """Nothing outside the tensors is touched and the device lives; what lies beside stays."""
    case = biased(heads, dtype)
    beside = [torch.full((1 << 16,), 7.0, device=DEVICE) for _ in range(64)]
    for values in (
        [2**31 - 1] * 5,
        [-(2**31)] * 5,
        [0, -5, 2**31 - 1, 7, -(2**31)],
        [0, 269, 0, 269, 0],
    ):
        results(replace(case, **{side: integers(*values)}))
        torch.cuda.synchronize()
    wide = torch.tensor([0, 2**40, 2**62, -(2**62), 2**63 - 1], device=DEVICE)
    sound = {name: getattr(case, name).long() for name in ("cu_q", "cu_k")}
    results(replace(case, **{**sound, side: wide}))
    torch.cuda.synchronize()
    assert all(x.eq(7).all() for x in beside)
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
