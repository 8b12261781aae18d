"""Few queries over many keys: the keys of one row split between blocks, and put together again."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import helpers
import pytest
import torch
from helpers import (
    attend,
    check,
    check_case,
    dense,
    integers,
    judge,
    needs_splits,
    on_a_gpu,
    poisoned,
    qkv,
)

import flashmoe_science as fm
from oracle import same_bits

pytestmark = needs_splits

FEW = (1, 2, 4, 17)
GROUPED = {"lead": (1,), "hq": 32, "hk": 8, "d": 128}
SMALL = {"lead": (1,), "hq": 4, "hk": 2, "d": 64}


def splits(*tensors, **options) -> int:
    return helpers.splits(fm.explain(*tensors, **options))


@on_a_gpu
def test_the_keys_are_split(dtype):
    """What the tests below are about: were it not so, they would say nothing."""
    for n in FEW:
        assert splits(*qkv(n, 16384, dtype=dtype, **SMALL)) > 1
    assert splits(*qkv(1, 16384, dtype=dtype, **GROUPED)) > 1
    assert splits(*qkv(2000, 2000, dtype=dtype, **GROUPED)) == 1


@pytest.mark.parametrize("m", [1, 63, 257, 1000, 4096, 4097, 16384, 65536, 131072])
@pytest.mark.parametrize("n", FEW)
def test_lengths(n, m, dtype):
    tensors = qkv(n, m, dtype=dtype, **SMALL)
    for causal in (False, True):
        check(*tensors, causal=causal)


@pytest.mark.parametrize("m", [300, 4097, 16384])
@pytest.mark.parametrize("n", FEW)
def test_grouped_queries(n, m, dtype):
    """The heads of a group read the same keys, and may be taken as rows of one block."""
    check(*qkv(n, m, dtype=dtype, **GROUPED), causal=True)


@pytest.mark.parametrize("hq, hk", [(1, 1), (8, 1), (64, 1), (71, 1), (12, 4)])
def test_heads(hq, hk, dtype):
    for n in (1, 3):
        check(*qkv(n, 5000, lead=(1,), hq=hq, hk=hk, dtype=dtype))


@pytest.mark.parametrize("d, dv", [(8, 8), (16, 48), (20, 20), (64, 128), (96, 96), (256, 256)])
def test_head_dims(d, dv, dtype):
    for n in (1, 17):
        check(*qkv(n, 3001, lead=(1,), d=d, dv=dv, dtype=dtype))


@pytest.mark.parametrize(
    "options",
    [
        {"window": (100, 0)},  # all but the last keys belong to empty splits
        {"window": (0, 0)},
        {"window": (5000, -1)},
        {"window": (-1, 0), "causal": True},
        {"softcap": 5.0},
        {"scale": -0.3, "causal": True},
        {"scale": 0.0},
        {"causal": True, "window": (3000, 3), "softcap": 20.0},
    ],
    ids=str,
)
@pytest.mark.parametrize("n", FEW)
def test_options(n, options, dtype):
    check(*qkv(n, 9001, dtype=dtype, **SMALL), **options)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("n", FEW)
def test_key_lengths(n, causal, dtype):
    """A cache of which each sequence fills a part: splits with no key at all, or one."""
    lengths = integers(0, 1, 64, 65, 2047, 8192)
    shape = {"lead": (6,), "hq": 8, "hk": 2, "d": 64, "dtype": dtype}
    out, lse = check(*qkv(n, 8192, **shape), key_lengths=lengths, causal=causal)
    assert (out[0] == 0).all() and (lse[0] == -inf).all()
    check(*qkv(n, 8192, **shape), key_lengths=lengths, causal=causal, window=(500, 0))


def test_rows_that_see_no_key(dtype):
    """17 rows over 5 keys of a long cache: the first 12 sit before the first key."""
    out, lse = check(*qkv(17, 8192, dtype=dtype, **SMALL), key_lengths=integers(5), causal=True)
    assert (out[..., :12, :] == 0).all() and (lse[..., :12] == -inf).all()
    assert (lse[..., 12:] > -inf).all()


def test_scores_far_apart_between_splits(dtype):
    """Each split has a maximum of its own; only the largest counts in the end."""
    q, k, v = qkv(2, 8192, dtype=dtype, **SMALL)
    k = k * torch.linspace(0.1, 6, 8192, device=k.device)[:, None].to(dtype)
    check(q, k, v)
    check(q, k.flip(-2), v)
    k[..., :4096, :] = -8 * q[..., ::2, :1, :].sign()  # half of the keys weigh nothing
    check(q, k, v)


@on_a_gpu
@pytest.mark.parametrize("n", FEW)
def test_the_same_without_splitting(n, dtype):
    """In a batch large enough to fill the chip each row is one block's; both are right."""
    tensors = qkv(n, 5000, dtype=dtype, **SMALL)
    assert splits(*tensors, causal=True) > 1
    alone = check(*tensors, causal=True)
    # No copies: the batch is one sequence many times over.
    batch = [x.expand(1024, *x.shape[1:]) for x in tensors]
    assert splits(*batch, causal=True) == 1
    with poisoned():
        out, lse = fm.flash_attention(*batch, causal=True, return_lse=True)
    assert same_bits(out, out[:1].expand(out.shape)) and same_bits(lse, lse[:1].expand(lse.shape))
    judge(out[:1], lse[:1], *tensors, causal=True)
    assert (out[0].float() - alone[0][0].float()).abs().max() <= 8 * torch.finfo(dtype).eps


def test_strides(dtype):
    """A cache laid out (B, S, H, D), longer than what is filled of it."""
    q, k, v = qkv(2, 6000, dtype=dtype, **SMALL)
    want = attend(q, k, v, causal=True)
    wide = [torch.full_like(x, float("nan")).repeat(1, 1, 2, 1) for x in (k, v)]
    views = [x.transpose(1, 2).contiguous().transpose(1, 2)[..., 3000:9000, :] for x in wide]
    k, v = (view.copy_(x) for view, x in zip(views, (k, v), strict=True))
    got = attend(q, k, v, causal=True)
    assert all(same_bits(a, b) for a, b in zip(got, want, strict=True))


def test_several_leading_dimensions(dtype):
    shape = {"hq": 4, "hk": 2, "d": 64, "dtype": dtype}
    for lead in ((2, 1), (1, 3), (2, 2)):
        q, k, v = (x.transpose(0, 1) for x in qkv(1, 4097, lead=lead, **shape))
        check(q, k, v)


@pytest.mark.parametrize("m", [1000, 16385])
@pytest.mark.parametrize("n", FEW)
def test_gradients(n, m, dtype):
    for deterministic in (False, True):
        options = {"causal": True}
        check_case(dense(n, m, deterministic=deterministic, options=options, dtype=dtype, **SMALL))


def test_gradients_of_key_lengths(dtype):
    lengths = integers(0, 1, 64, 3000)
    case = dense(2, 3000, lead=(4,), hq=8, hk=2, key_lengths=lengths, dtype=dtype)
    check_case(case)
    check_case(replace(case, options={"window": (100, -1), "softcap": 9.0}))
