"""Sizes past what a grid's dimensions, or 32 bits, hold."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from helpers import DEVICE, check, cumulative, dense, judge, normal, poisoned, qkv, results

import flashmoe_science as fm
import oracle


@pytest.mark.parametrize("lead", [(65_535,), (65_536,), (131_071,), (3, 30_000)], ids=str)
def test_more_sequences_than_a_grid_has_room_for(lead, dtype):
    """A grid's third dimension ends at 65,535."""
    check(*qkv(3, 5, lead=lead, hq=2, hk=1, dtype=dtype), causal=True)


@pytest.mark.parametrize("deterministic", [False, True], ids=["atomic", "ordered"])
@pytest.mark.parametrize("lead", [(65_536,), (3, 30_000)], ids=str)
def test_gradients_of_more_sequences_than_a_grid_has_room_for(lead, deterministic, dtype):
    shape = {"lead": lead, "hq": 2, "hk": 1, "d": 16, "dtype": dtype}
    case = dense(3, 5, deterministic=deterministic, options={"causal": True}, **shape)
    oracle.accept(case, results(case))


def test_more_heads_than_a_grid_has_room_for():
    """They are refused or computed, never dropped."""
    q, k, v = qkv(3, 5, lead=(1,), hq=65_541, hk=65_541)
    try:
        check(q, k, v)
    except RuntimeError as refusal:
        assert "65541 heads" in str(refusal)


# Tensors past 2^31 elements: offsets of 32 bits would wrap and read or write something else.


def large(*shape: int, dtype=torch.bfloat16) -> torch.Tensor:
    x = torch.empty(shape, dtype=dtype, device=DEVICE)
    for part in x.view(-1).split(1 << 28):
        part.normal_()
    return x


def all_finite(x: torch.Tensor) -> bool:
    return all(bool(part.isfinite().all()) for part in x.flatten().split(1 << 28))


# lead, heads, queries, keys: one of q and k is past 2^31 elements of head dim 128.
SHAPES = {
    "rows": ((1,), 1, 2**24 + 129, 70),
    "heads": ((2,), 4, 2**21 + 65, 33),
    "keys": ((32,), 64, 1, 2**13 + 1),
}


@pytest.mark.parametrize("which", SHAPES)
def test_forward_past_two_to_the_31_elements(which, roomy):
    roomy(30 << 30)
    lead, heads, n, m = SHAPES[which]
    q, k, v = (large(*lead, heads, length, 128) for length in (n, m, m))
    assert max(q.numel(), k.numel()) > 2**31
    with poisoned():
        out, lse = fm.flash_attention(q, k, v, return_lse=True)
    first, last = slice(0, 1), slice(-1, None)
    rows = min(n, 200)
    for end, part in ((first, slice(0, rows)), (last, slice(n - rows, n))):
        one = [x[(end,) * (len(lead) + 1)] for x in (q, k, v, out, lse)]
        one_q, one_out, one_lse = one[0][..., part, :], one[3][..., part, :], one[4][..., part]
        judge(one_out, one_lse, one_q, one[1], one[2])
    assert all_finite(out) and lse.isfinite().all()


@pytest.mark.parametrize("deterministic", [False, True], ids=["atomic", "ordered"])
@pytest.mark.parametrize("which", ["rows", "keys"])
def test_backward_past_two_to_the_31_elements(which, deterministic, roomy):
    """Judged where a result depends on little: dq on one row, dk and dv on the rows of one head."""
    roomy(70 << 30)
    lead, heads, n, m = SHAPES[which]
    q, k, v = (large(*lead, heads, length, 128) for length in (n, m, m))
    grad_out = large(*q.shape)
    case = oracle.Case(q, k, v, grad_out, deterministic=deterministic)
    got = oracle.ours(case)
    rows = min(n, 200)
    judged = ("out", "lse", "dq") if which == "rows" else ("out", "lse", "dq", "dk", "dv")
    first, last = slice(0, 1), slice(-1, None)
    for end, part in ((first, slice(0, rows)), (last, slice(n - rows, n))):
        ends = (end,) * (len(lead) + 1)
        one = oracle.Case(q[ends][..., part, :], k[ends], v[ends], grad_out[ends][..., part, :])
        found = {name: got[name][ends] for name in judged}
        for name in ("out", "dq"):
            found[name] = found[name][..., part, :]
        found["lse"] = found["lse"][..., part]
        oracle.accept(one, found)
    assert all(all_finite(x) for x in got.values())


@pytest.mark.parametrize("deterministic", [False, True], ids=["atomic", "ordered"])
def test_ragged_past_two_to_the_31_elements(deterministic, roomy):
    """2^20 tokens of 16 heads. The first and the last sequences are judged."""
    roomy(90 << 30)
    length, count, heads, d = 100, 10_500, 16, 128
    q, k, v, grad_out = (large(length * count, heads, d) for _ in range(4))
    assert q.numel() > 2**31
    cu = cumulative([length] * count)
    case = oracle.Case(
        q, k, v, grad_out, cu_q=cu, cu_k=cu, max_q=length, max_k=length, options={"causal": True}
    )
    got = oracle.ours(replace(case, deterministic=deterministic))
    for part in (slice(0, 2 * length), slice(-2 * length, None)):
        one = replace(case, cu_q=cu[:3], cu_k=cu[:3], q=q[part], k=k[part], v=v[part])
        one.grad_out = grad_out[part]
        oracle.accept(one, {name: x[part] for name, x in got.items()})
    assert all(all_finite(x) for x in got.values())


def test_strides_past_two_to_the_31(roomy):
    """Two heads so far apart that only 64 bits hold the distance, and small otherwise."""
    roomy(40 << 30)
    apart = 2**31 + 64

    def far(n: int) -> torch.Tensor:
        store = torch.empty(apart + n * 64, dtype=torch.float16, device=DEVICE)
        return store.as_strided((1, 2, n, 64), (0, apart, 64, 1)).copy_(normal(1, 2, n, 64))

    q, k, v, grad_out = far(130), far(201), far(201), far(130)
    case = oracle.Case(q, k, v, grad_out, options={"causal": True}, deterministic=True)
    want = oracle.ours(
        replace(case, q=q.clone(), k=k.clone(), v=v.clone(), grad_out=grad_out.clone())
    )
    got = oracle.ours(case)
    oracle.accept(case, got)
    assert all(oracle.same_bits(got[name], want[name]) for name in want)
