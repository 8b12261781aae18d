"""out and lse on CUDA tensors: every option against the float64 oracle."""

from __future__ import annotations

import os
import re
from math import inf

import pytest
import torch
from families import DTYPES
from helpers import (
    ALL_HEAD_DIMS,
    DEVICE,
    HEAD_DIMS,
    LENGTHS,
    OPTIONS,
    VALUE_HEAD_DIMS,
    attend,
    check,
    every_head_dim,
    every_mask,
    every_option,
    integers,
    normal,
    on_a_gpu,
    poisoned,
    qkv,
    refused,
    same,
    tiles_there_are,
)

import flashmoe_science as fm
from oracle import same_bits

# Each with itself and two others, both ways round over the whole list.
PAIRS = [(n, n) for n in LENGTHS]
PAIRS += [(n, LENGTHS[(7 * i + 3) % len(LENGTHS)]) for i, n in enumerate(LENGTHS)]
PAIRS += [(n, LENGTHS[(5 * i + 11) % len(LENGTHS)]) for i, n in enumerate(LENGTHS)]
PAIRS += [(4095, 4095), (4096, 4096), (4097, 4097), (1, 4097), (4097, 1), (129, 4096), (4096, 63)]
PAIRS += [(1025, 4095), (4097, 1024)]
PAIRS = sorted(set(PAIRS))

WINDOWS = [(0, 0), (0, -1), (-1, 0), (1, 0), (63, 64), (64, 63), (127, 0), (128, 0), (0, 129)]
WINDOWS += [(200, 100), (5000, 0), (-1, 300), (-1, -1)]


def test_poison_poisons():
    """The other tests lean on it."""
    with poisoned():
        assert torch.empty(1000, device=DEVICE).isnan().all()
        assert torch.empty_like(normal(3, 5)).isnan().all()
        assert (torch.empty(1000, dtype=torch.uint8, device=DEVICE) == 255).all()  # 4 are a NaN


@on_a_gpu
@pytest.mark.parametrize("d", HEAD_DIMS)
def test_the_family_asked_for_runs(d, dtype):
    """If they were not, the tests of one family would be tests of the other."""
    family, name = os.environ["FLASHMOE_FAMILY"], {v: k for k, v in DTYPES.items()}[dtype]
    for backward in (False, True):
        text = fm.explain(*qkv(200, d=d, dtype=dtype), causal=True, backward=backward)
        kernel = f"{family}_attention_{'bwd' if backward else 'fwd'}_{name}_d{d}_"
        assert re.search(rf"kernel +{kernel}", text), text


@every_head_dim
@every_mask
@pytest.mark.parametrize("n, m", PAIRS, ids=lambda size: str(size))
def test_lengths(n, m, causal, d, dtype):
    large = n * m > 1025**2
    shape = {"lead": (1,), "hq": 2, "hk": 1} if large else {"lead": (2,), "hq": 4, "hk": 2}
    check(*qkv(n, m, d=d, dtype=dtype, **shape), causal=causal)


@every_head_dim
@every_mask
@pytest.mark.parametrize("hq, hk", [(1, 1), (3, 3), (4, 2), (8, 2), (16, 2), (6, 2), (8, 1)])
def test_grouped_queries(hq, hk, causal, d, dtype):
    check(*qkv(130, 77, lead=(2,), hq=hq, hk=hk, d=d, dtype=dtype), causal=causal)


@pytest.mark.parametrize(
    "lead", [(1,), (2,), (3,), (4,), (5,), (2, 3), (2, 1, 3), (1, 1, 2, 2)], ids=str
)
def test_leading_dimensions(lead, dtype):
    q, k, v = qkv(67, 130, lead=lead, hq=2, hk=1, dtype=dtype)
    out, lse = check(q, k, v, causal=True)
    flat = [x.flatten(0, -4) for x in (q, k, v)]
    flat_out, flat_lse = fm.flash_attention(*flat, causal=True, return_lse=True)
    assert same((out.flatten(0, -4), lse.flatten(0, -3)), (flat_out, flat_lse))


# Head dims.


@pytest.mark.parametrize("d", ALL_HEAD_DIMS)
def test_head_dims(d, dtype):
    for causal in (False, True):
        check(*qkv(131, 197, d=d, dtype=dtype), causal=causal)
    check(*qkv(70, d=d, dtype=dtype), window=(20, 3), softcap=9.0)


def test_every_head_dim_there_is(family):
    for d in range(1, 257):
        check(*qkv(19, 70, lead=(1,), hq=2, hk=1, d=d), causal=bool(d % 2))


@pytest.mark.parametrize("d, dv", VALUE_HEAD_DIMS, ids=lambda size: str(size))
def test_value_head_dims(d, dv, dtype):
    for causal in (False, True):
        out, _ = check(*qkv(130, 201, d=d, dv=dv, dtype=dtype), causal=causal)
        assert out.shape[-1] == dv


# Options.


@every_head_dim
@every_option
def test_options(option, d, dtype):
    for n, m in ((200, 200), (130, 331), (331, 130), (1, 300), (67, 1)):
        check(*qkv(n, m, d=d, dtype=dtype), **OPTIONS[option])


@every_mask
@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_windows(window, causal, dtype):
    for n, m in ((257, 257), (129, 400), (400, 129), (3, 523)):
        check(*qkv(n, m, lead=(1,), dtype=dtype), window=window, causal=causal)


@every_mask
@pytest.mark.parametrize("window", [None, (40, 3)], ids=["all", "window"])
@pytest.mark.parametrize("n, m", [(130, 200), (1, 200), (200, 130), (64, 128)], ids=str)
def test_key_lengths(n, m, window, causal, dtype):
    lengths = integers(0, 1, 2, 63, 64, 65, m // 2, m - 1, m)
    q, k, v = qkv(n, m, lead=(9,), hq=2, hk=1, dtype=dtype)
    options = {"causal": causal, "window": window}
    out, lse = check(q, k, v, key_lengths=lengths, **options)
    assert (out[0] == 0).all() and (lse[0] == -inf).all()
    for i in (1, 4, 8):  # the same numbers as without what lies behind
        one = [x[i : i + 1] for x in (q, k[..., : lengths[i], :], v[..., : lengths[i], :])]
        check(*one, **options)


@pytest.mark.parametrize("integer", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (2,), (3, 1), (1, 2), (3, 2)], ids=str)
def test_key_lengths_are_broadcast(shape, integer, dtype):
    lengths = torch.randint(0, 71, shape, device=DEVICE).to(integer)
    tensors = qkv(33, 70, lead=(3, 2), dtype=dtype)
    want = check(*tensors, key_lengths=lengths, causal=True)
    apart = torch.stack([lengths, lengths + 1000], -1)[..., 0]
    assert same(attend(*tensors, key_lengths=apart, causal=True), want)


@every_mask
@pytest.mark.parametrize("scale", [1.0, 0.3, -0.2, -1.0, 0.0, 1e-6, 4.0, 0])
def test_scale(scale, causal, dtype):
    check(*qkv(150, 201, dtype=dtype), causal=causal, scale=scale)


@every_mask
@pytest.mark.parametrize("softcap", [0.1, 1.0, 15.0, 50.0, 1e4])
def test_softcap(softcap, causal, dtype):
    q, k, v = qkv(150, 201, dtype=dtype)
    check(q, k, v, causal=causal, softcap=softcap)
    check(q * 4, k, v, causal=causal, softcap=softcap, scale=-0.5)


def test_softcap_of_zero_is_none(dtype):
    tensors = qkv(70, 91, dtype=dtype)
    want = attend(*tensors)
    assert same(attend(*tensors, softcap=0.0), want)
    assert not same(attend(*tensors, softcap=1.0), want)


@every_head_dim
@every_mask
def test_a_peaked_softmax(causal, d, dtype):
    q, k, v = qkv(200, d=d, dtype=dtype)
    check(q * 8, k, v, causal=causal)


@pytest.mark.parametrize("sign", [1, -1])
def test_scores_far_from_zero(sign, dtype):
    """Around +-512 exp overflows, or gives 0 throughout, unless the maximum is taken off first."""
    q, k, v = qkv(100, 300, dtype=dtype)
    q, k = q * 0.1 + 8, k * 0.1 + 8 * sign
    _, lse = check(q, k, v, causal=True)
    assert (lse * sign > 400).all()


def test_equal_values_come_back(dtype):
    """Weights that sum to 1: a property that needs no oracle."""
    q, k, _ = qkv(129, 513, dtype=dtype)
    out, _ = attend(q, k, torch.full_like(k, 0.75), causal=False)
    assert (out.float() - 0.75).abs().max() <= 0.75 * torch.finfo(dtype).eps


def test_without_lse_the_output_is_the_same(dtype):
    q, k, v = qkv(130, dtype=dtype)
    out, _ = attend(q, k, v)
    alone = fm.flash_attention(q, k, v)
    assert isinstance(alone, torch.Tensor) and same_bits(out, alone)


# Nothing to do.


@every_head_dim
@every_mask
@pytest.mark.parametrize("lead, n, m", [((0,), 5, 5), ((2, 0), 5, 5), ((2,), 0, 5), ((2,), 0, 0)])
def test_empty_results(lead, n, m, causal, d, dtype):
    q, k, v = qkv(n, m, lead=lead, d=d, dtype=dtype)
    out, lse = attend(q, k, v, causal=causal)
    assert out.shape == q.shape and out.dtype == dtype and out.device == q.device
    assert lse.shape == q.shape[:-1] and lse.dtype == torch.float32


@every_head_dim
@every_mask
@pytest.mark.parametrize("n", [1, 64, 130])
def test_no_keys(n, causal, d, dtype):
    out, lse = attend(*qkv(n, 0, d=d, dtype=dtype), causal=causal)
    assert (out == 0).all() and (lse == -inf).all()


@every_head_dim
@pytest.mark.parametrize("n, m", [(200, 3), (300, 129), (257, 128), (129, 1)])
def test_rows_that_see_no_key(n, m, d, dtype):
    out, lse = check(*qkv(n, m, d=d, dtype=dtype), causal=True)
    assert (out[..., : n - m, :] == 0).all() and (lse[..., : n - m] == -inf).all()
    assert (lse[..., n - m :] > -inf).all()


@on_a_gpu
@pytest.mark.parametrize("d", [16, 32, 48, 64, 96, 128, 192, 256])
def test_every_tile(d, dtype, monkeypatch):
    """Those too that the planner would not choose for these sizes."""
    monkeypatch.setenv("FLASHMOE_TILE", "1x1")
    for tile in tiles_there_are(lambda: fm.flash_attention(*qkv(70, d=d, dtype=dtype))):
        monkeypatch.setenv("FLASHMOE_TILE", tile)
        block_q, block_k = map(int, tile.split("x"))
        for n, m in ((1, 1), (block_q, block_k), (block_q + 1, 2 * block_k - 1), (300, 257)):
            for options in ({}, {"causal": True}, {"window": (block_k, 1), "softcap": 9.0}):
                tensors = qkv(n, m, d=d, dtype=dtype)
                if not refused(*tensors, **options):  # sm90 has fewer tiles with a softcap
                    check(*tensors, **options)
