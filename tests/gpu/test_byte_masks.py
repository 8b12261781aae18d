"""Boolean masks on CUDA tensors: bytes, read where they lie, as good as a bias of 0 and -inf."""

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
    needs_bias,
    on_a_gpu,
    put,
    ragged,
)

import flashmoe_science as fm
import oracle
from oracle import same_bits

pytestmark = needs_bias

LENGTHS = ((70, 91), (130, 33), (5, 200), (40, 0), (0, 9), (64, 64))
SHORT = tuple((1 + i % 37, 1 + i % 31) for i in range(300))


def mask(*shape: int, share: float = 0.6) -> torch.Tensor:
    """With a row that sees nothing."""
    allowed = torch.rand(shape, device=DEVICE) < share
    if len(shape) > 1 and shape[-2] > 1:
        allowed[..., shape[-2] // 2, :] = False
    return allowed


def pairs_of(case) -> int:
    spans = zip(oracle.spans(case.cu_q), oracle.spans(case.cu_k), strict=True)
    return sum((q1 - q0) * (k1 - k0) for (q0, q1), (k0, k1) in spans)


@either_way
@every_option
def test_options(option, deterministic, dtype):
    case = dense(131, 136, dtype=dtype, deterministic=deterministic, options=OPTIONS[option])
    check_case(replace(case, bias=mask(2, 4, 131, 136)))


@pytest.mark.parametrize("d", ALL_HEAD_DIMS)
def test_head_dims(d, dtype):
    for n, m in ((70, 104), (200, 131)):
        check_case(replace(dense(n, m, d=d, dtype=dtype), bias=mask(2, 4, n, m)))


@pytest.mark.parametrize("n", [0, 1, 2, 17, 65, 129])
def test_lengths(n, dtype):
    """Rows that begin anywhere: words of four bytes hold parts of them."""
    for m in (0, 1, 3, 7, 16, 63, 64, 65, 66, 67, 127, 257):
        check_case(replace(dense(n, m, dtype=dtype), bias=mask(4, n, m)))


SHAPES = (
    (4, 66, 91),
    (2, 1, 66, 91),
    (66, 91),
    (2, 4, 1, 91),
    (91,),
    (4, 66, 1),
    (2, 1, 1, 91),
    (1,),
)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_broadcast(shape, dtype):
    case = dense(66, 91, dtype=dtype, options={"causal": True})
    check_case(replace(case, bias=mask(*shape)))
    check_case(replace(case, bias=mask(*shape).expand(2, 4, 66, 91)))


def sliced(x):
    """Begins at an odd address, with rows further apart than they are long."""
    wide = torch.zeros(*x.shape[:-1], x.shape[-1] + 5, dtype=x.dtype, device=x.device)
    return wide[..., 3 : 3 + x.shape[-1]].copy_(x)


LAYOUTS = {
    "transposed": lambda x: x.mT.contiguous().mT,
    "sliced": sliced,
    "every other key": lambda x: x.repeat_interleave(2, -1)[..., ::2],
    "rows first": lambda x: x.transpose(-3, -2).contiguous().transpose(-3, -2),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout, dtype):
    for n, m in ((131, 136), (66, 67)):
        case = dense(n, m, dtype=dtype)
        check_case(replace(case, bias=LAYOUTS[layout](mask(2, 4, n, m))))


def test_any_byte_but_zero_is_true(dtype):
    case = dense(66, 91, dtype=dtype, needs="")
    allowed = mask(66, 91)
    odd = (allowed * torch.randint(1, 256, (66, 91), device=DEVICE)).to(torch.uint8)
    got = [fm.flash_attention(case.q, case.k, case.v, m) for m in (allowed, odd.view(torch.bool))]
    assert same_bits(*got)


@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("lengths", [LENGTHS, SHORT], ids=["few", "short"])
def test_packed(lengths, heads, dtype):
    for d in (20, 64):
        case = ragged(lengths, d=d, dtype=dtype, rest=(3, 5), options={"causal": heads == 4})
        check_case(replace(case, bias=mask(pairs_of(case), heads)))


def test_many_short_sequences(dtype):
    case = dense(31, 17, lead=(270,), hq=2, hk=2, dtype=dtype)
    check_case(replace(case, bias=mask(270, 2, 31, 17)))


def test_key_lengths_and_few_queries(dtype):
    lengths = integers(0, 30, 91)
    case = dense(70, 91, lead=(3,), dtype=dtype, key_lengths=lengths)
    check_case(replace(case, bias=mask(3, 1, 70, 91)))
    case = dense(1, 3001, lead=(1,), hq=8, dtype=dtype)
    check_case(replace(case, bias=mask(1, 8, 1, 3001)))


@pytest.mark.parametrize("poison", [nan, inf], ids=str)
def test_what_it_hides_may_hold_anything(poison, dtype):
    """A key that no row sees, and rows that see none."""
    allowed = mask(131, 136)
    allowed[:, 77], allowed[20:23] = False, False
    clean = replace(dense(131, 136, dtype=dtype), bias=allowed)
    for name in ("k", "v"):
        dirty = put(getattr(clean, name), (..., 77, slice(None)), poison)
        assert check_containment(clean, replace(clean, **{name: dirty})) == 0
    for name in ("q", "grad_out"):
        dirty = put(getattr(clean, name), (..., 21, slice(None)), poison)
        assert check_containment(clean, replace(clean, **{name: dirty})) == 0


@on_a_gpu
def test_it_takes_no_memory(dtype):
    """Of its own: what the same call without it takes, and not a byte for each pair."""
    q, k, v = (x.requires_grad_() for x in (dense(1024, dtype=dtype, hq=2).q,) * 3)
    allowed = mask(2, 2, 1024, 1024)

    def peak(bias) -> int:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        out = fm.flash_attention(q, k, v, bias)
        out.sum().backward()
        return torch.cuda.max_memory_allocated() - before

    peak(allowed), peak(None)
    assert peak(allowed) < peak(None) + allowed.numel() // 2
