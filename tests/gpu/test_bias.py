"""A learned bias and its gradient on CUDA tensors: broadcasts, strides, dtypes, masks."""

from __future__ import annotations

from dataclasses import replace
from math import inf, nan

import pytest
import torch
from helpers import (
    DEVICE,
    OPTIONS,
    check_case,
    check_containment,
    dense,
    either_way,
    every_option,
    filled,
    gaps,
    integers,
    needs_bias,
    on_a_gpu,
    put,
    qkv,
    refused,
    results,
)

import flashmoe_science as fm
from oracle import same_bits

pytestmark = needs_bias


def with_bias(case, shape, dtype=None, layout=None):
    """The case with a bias of that shape, wanted with its gradient."""
    dtype = case.q.dtype if dtype is None else dtype
    bias = torch.randn(shape, device=DEVICE).to(dtype)
    return replace(case, bias=layout(bias) if layout else bias, needs=case.needs + "b")


def full(case) -> tuple[int, ...]:
    return (*case.q.shape[:-1], case.k.shape[-2])


# Which of (batch, heads, rows, keys) the bias has for itself.
BROADCASTS = {
    "full": (1, 1, 1, 1),
    "heads": (0, 1, 1, 1),
    "batch": (1, 0, 1, 1),
    "rows and keys": (0, 0, 1, 1),
    "a row": (1, 1, 0, 1),
    "a column": (1, 1, 1, 0),
    "keys": (0, 0, 0, 1),
    "queries of a head": (0, 1, 1, 0),
    "one of each head": (0, 1, 0, 0),
    "one": (0, 0, 0, 0),
}
every_broadcast = pytest.mark.parametrize("own", BROADCASTS.values(), ids=BROADCASTS)


def broadcast(case, own):
    return tuple(size if kept else 1 for size, kept in zip(full(case), own, strict=True))


# Layouts of a bias. Memory that belongs to no element is NaN.


def transposed(x):
    return x.mT.contiguous().mT


def rows_apart(x):
    """Rows and keys in the middle of something larger, rows 16-byte aligned."""
    wide = gaps(*x.shape[:-2], x.shape[-2] + 3, (x.shape[-1] + 31) // 8 * 8, dtype=x.dtype)
    return filled(wide[..., 1 : 1 + x.shape[-2], 8 : 8 + x.shape[-1]], x)


def odd_rows(x):
    wide = gaps(*x.shape[:-1], (x.shape[-1] + 4) // 2 * 2 + 1, dtype=x.dtype)
    return filled(wide[..., 1 : 1 + x.shape[-1]], x)


def every_second_key(x):
    wide = gaps(*x.shape[:-1], 2 * x.shape[-1], dtype=x.dtype)
    return filled(wide[..., ::2], x)


def heads_last(x):
    """As a linear layer over pairs leaves it: (B, Sq, Sk, H) in memory."""
    return x.movedim(-3, -1).contiguous().movedim(-1, -3)


LAYOUTS = [transposed, rows_apart, odd_rows, every_second_key, heads_last]


@every_broadcast
@pytest.mark.parametrize("d", [32, 64, 128], ids=lambda d: f"d{d}")
def test_broadcasts(own, d, dtype):
    for n, m in ((64, 64), (130, 72), (65, 131)):
        case = dense(n, m, d=d, dtype=dtype, hq=4, hk=2)
        check_case(with_bias(case, broadcast(case, own)))


@pytest.mark.parametrize("d", [8, 16, 20, 24, 40, 48, 80, 96, 160, 192, 256])
def test_head_dims(d, dtype):
    for own in ((1, 1, 1, 1), (0, 1, 1, 1)):
        case = dense(70, 104, d=d, dtype=dtype)
        check_case(with_bias(case, broadcast(case, own)))


@pytest.mark.parametrize("n, m", [(1, 1), (1, 8), (8, 1), (15, 16), (17, 33), (63, 64), (64, 65)])
@pytest.mark.parametrize("d", [16, 64], ids=lambda d: f"d{d}")
def test_lengths(n, m, d, dtype):
    for own in ((1, 1, 1, 1), (0, 0, 1, 1)):
        case = dense(n, m, d=d, dtype=dtype)
        check_case(with_bias(case, broadcast(case, own)))


@either_way
@every_option
def test_options(option, deterministic, dtype):
    for own in ((1, 1, 1, 1), (0, 1, 1, 1)):
        case = dense(131, 136, d=64, dtype=dtype, deterministic=deterministic)
        check_case(with_bias(replace(case, options=OPTIONS[option]), broadcast(case, own)))


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__)
def test_strides(layout, dtype):
    for wide in (None, torch.float32):
        for n, m in ((65, 80), (40, 129)):
            case = dense(n, m, d=32, dtype=dtype)
            check_case(with_bias(case, full(case), wide, layout))
            check_case(with_bias(case, broadcast(case, (0, 1, 1, 1)), wide, layout))


@every_broadcast
def test_fp32_bias(own, dtype):
    case = dense(66, 88, d=64, dtype=dtype)
    check_case(with_bias(case, broadcast(case, own), torch.float32))


# Rows that begin anywhere: Hopper's kernels copy them chunk by chunk and read them from where they
# begin, in both dtypes.

either_width = pytest.mark.parametrize("wide", [None, torch.float32], ids=["16 bits", "fp32"])
# Queries and keys, of which all remainders of 8 and the ends of tiles are there.
ODD_SIZES = ((65, 129), (130, 130), (191, 131), (66, 260), (129, 133), (200, 134), (67, 135))
ODD_SIZES += ((257, 255), (128, 127), (64, 65), (1, 200), (3, 193))


@either_width
@pytest.mark.parametrize("d", [16, 32, 48, 64, 96, 128], ids=lambda d: f"d{d}")
def test_rows_that_begin_anywhere(d, wide, dtype):
    for n, m in ODD_SIZES:
        case = dense(n, m, d=d, dtype=dtype, hq=4, hk=2)
        check_case(with_bias(case, full(case), wide))


@either_width
@either_way
@every_option
def test_rows_that_begin_anywhere_with_options(option, deterministic, wide, dtype):
    for own in ((1, 1, 1, 1), (0, 1, 1, 1)):  # by itself, or shared by two
        case = dense(197, 331, d=64, dtype=dtype, deterministic=deterministic)
        case = replace(case, options=OPTIONS[option])
        check_case(with_bias(case, broadcast(case, own), wide))


@either_width
@pytest.mark.parametrize("d", [32, 64, 128], ids=lambda d: f"d{d}")
def test_rows_that_begin_anywhere_with_key_lengths(d, wide, dtype):
    lengths = integers(0, 1, 65, 129, 70)
    for causal in (False, True):
        case = dense(70, 129, lead=(5,), d=d, dtype=dtype, key_lengths=lengths)
        case = replace(case, options={"causal": causal})
        check_case(with_bias(case, full(case), wide))


@either_width
def test_more_rows_that_begin_anywhere_than_sms(wide, dtype):
    """Several tasks for each CTA, and heads that share their keys."""
    for d, hk in ((32, 2), (64, 4), (128, 1)):
        case = dense(515, 517, lead=(3, 4), hq=4, hk=hk, d=d, dtype=dtype)
        check_case(with_bias(case, full(case), wide))


@either_width
@pytest.mark.parametrize("d", [32, 64, 128], ids=lambda d: f"d{d}")
def test_rows_that_begin_anywhere_among_nan(d, wide, dtype):
    """What lies before, between and after them is not theirs."""
    for n, m in ((65, 131), (130, 257)):
        case = dense(n, m, d=d, dtype=dtype)
        for gap in (1, 2, 5, 8):
            memory = gaps(*full(case)[:-1], m + gap, dtype=wide or dtype)
            bias = filled(memory[..., :m], torch.randn(full(case), device=DEVICE))
            check_case(replace(case, bias=bias, needs="qkvb"))


@either_width
def test_hidden_keys_of_rows_that_begin_anywhere(wide, dtype):
    for d in (32, 64, 128):
        case = with_bias(c := dense(130, 197, d=d, dtype=dtype), full(c), wide)
        hidden = torch.rand(case.bias.shape, device=DEVICE) < 0.3
        hidden[..., 5, :] = True  # rows that see no key
        hidden[..., 70:130, 64:128] = True  # and most of a tile
        case = replace(case, bias=case.bias.masked_fill(hidden, -inf))
        check_case(case)
        for name in ("q", "k", "v", "grad_out"):
            bias = case.bias.clone()
            if name in ("q", "grad_out"):
                bias[1, 0, 7, 10:] = -inf
            else:
                bias[1, :, 20:, 7] = -inf
            clean = replace(case, bias=bias)
            dirty = put(getattr(case, name), (1, 0, 7, 3), nan)
            assert check_containment(clean, replace(clean, **{name: dirty}))


@on_a_gpu
def test_rows_that_begin_anywhere_take_no_memory(dtype):
    """What is made beside inputs and results: a tenth of these at most, with or without a bias."""
    for wide in (dtype, torch.float32):
        q, k, v = (x.requires_grad_() for x in qkv(1023, lead=(2,), hq=16, hk=16, dtype=dtype))
        bias = torch.randn(2, 16, 1023, 1023, device=DEVICE).to(wide).requires_grad_()
        if refused(q, k, v, bias=bias, backward=True):
            continue
        grad_out = torch.randn_like(q)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        out = fm.flash_attention(q, k, v, bias=bias)
        grads = torch.autograd.grad(out, (q, k, v, bias), grad_out)
        made = [out, *grads]
        taken = torch.cuda.max_memory_allocated() - before - sum(x.nbytes for x in made)
        assert taken < 0.1 * sum(x.nbytes for x in (q, k, v, bias, grad_out, *made))


def test_key_lengths(dtype):
    lengths = integers(0, 1, 65, 129, 70)
    for own in ((1, 1, 1, 1), (0, 1, 1, 1), (1, 1, 0, 1)):
        for causal in (False, True):
            case = dense(70, 129, lead=(5,), d=32, dtype=dtype, key_lengths=lengths)
            case = replace(case, options={"causal": causal})
            check_case(with_bias(case, broadcast(case, own)))


def test_triangle_attention(dtype):
    """(B, N, H, S, D) with a bias (B, 1, H, S, S) that all rows of a batch share."""
    for n in (32, 41):
        case = dense(n, lead=(2, n), hq=4, hk=4, d=32, dtype=dtype)
        check_case(with_bias(case, (2, 1, 4, n, n)))
        check_case(with_bias(case, (2, n, 1, 1, n)))


@pytest.mark.parametrize("d", [32, 64, 128], ids=lambda d: f"d{d}")
def test_few_tiles_shared_by_many(d, dtype):
    """Where one block for each tile of the gradient would leave the device idle."""
    lengths = torch.arange(70, device=DEVICE).int()
    case = dense(40, 72, lead=(70,), d=d, dtype=dtype, key_lengths=lengths, deterministic=False)
    for shape in ((40, 72), (4, 40, 72), (70, 1, 1, 1), (1,)):
        check_case(with_bias(case, shape))
    check_case(with_bias(dense(300, 1000, lead=(1,), d=d, dtype=dtype), (1, 1)))


@pytest.mark.parametrize("length", [63, 64, 65, 130, 257, 381])
def test_triangle_lengths(length, dtype):
    """Few rows share a bias whose last tile is cut anywhere."""
    for wide in (None, torch.float32):
        case = dense(length, lead=(1, 3), hq=2, hk=2, d=32, dtype=dtype)
        check_case(with_bias(case, (1, 1, 2, length, length), wide))


def test_triangle_with_padding(dtype):
    """A bias of pairs with lengths of rows, and a mask of their padding: as models have them."""
    n, lengths = 65, integers(65, 33, 1)
    case = dense(n, lead=(2, 3), hq=2, hk=2, d=32, dtype=dtype, key_lengths=lengths)
    check_case(with_bias(case, (2, 1, 2, n, n)))
    padding = torch.arange(n, device=DEVICE) >= lengths[:, None, None, None]
    mask = torch.zeros(3, 1, 1, n, device=DEVICE, dtype=dtype).masked_fill(padding, -inf)
    check_case(replace(case, key_lengths=None, bias=mask, needs="qkvb"))


def test_expanded_bias(dtype):
    """One that its owner expanded has a gradient for every element."""
    case = dense(66, 72, d=64, dtype=dtype)
    bias = torch.randn(1, 1, 66, 72, device=DEVICE).to(dtype).expand(full(case))
    check_case(replace(case, bias=bias, needs="qkvb"))


def test_minus_infinity_is_a_mask(dtype):
    for own in ((1, 1, 1, 1), (0, 0, 1, 1)):
        case = with_bias(c := dense(130, 136, d=64, dtype=dtype), broadcast(c, own))
        hidden = torch.rand(case.bias.shape, device=DEVICE) < 0.3
        hidden[..., 5, :] = True  # rows that see no key
        hidden[..., 70:130, 64:128] = True  # and most of a tile
        check_case(replace(case, bias=case.bias.masked_fill(hidden, -inf)))


# What -inf hides is not there, whatever it holds. 72 keys come in chunks of 16 bytes, 71 do not.

hidden_widths = pytest.mark.parametrize("m", [72, 71])
hidden_dims = pytest.mark.parametrize("d", [16, 64, 128, 256], ids=lambda d: f"d{d}")


@hidden_widths
@hidden_dims
@pytest.mark.parametrize("tensor", ["q", "k", "v", "grad_out"])
def test_nan_behind_a_mask_stays_there(tensor, d, m, dtype):
    case = with_bias(c := dense(65, m, d=d, dtype=dtype), full(c))
    bias = case.bias.clone()
    index = (1, 0, 7, 3)
    if tensor in ("q", "grad_out"):
        bias[1, 0, 7, 10:] = -inf
    else:
        bias[1, :, 20:, 7] = -inf
    clean = replace(case, bias=bias)
    assert check_containment(
        clean, replace(clean, **{tensor: put(getattr(case, tensor), index, nan)})
    )


@hidden_widths
@pytest.mark.parametrize("tensor", ["v", "grad_out"])
def test_infinity_behind_a_mask_stays_there(tensor, m, dtype):
    """In q and k it would make scores of either infinity; these two are linear in it."""
    case = with_bias(c := dense(65, m, d=32, dtype=dtype), full(c))
    bias = case.bias.clone()
    bias[1, 0, 7, 10:] = bias[1, :, 20:, 7] = -inf
    clean = replace(case, bias=bias)
    for value in (inf, -inf):
        dirty = put(getattr(case, tensor), (1, 0, 7, 3), value)
        assert check_containment(clean, replace(clean, **{tensor: dirty}))


@hidden_widths
@pytest.mark.parametrize("own", [(1, 1, 1, 1), (0, 0, 1, 1)], ids=["full", "shared"])
@pytest.mark.parametrize("poison", [nan, inf, -inf], ids=str)
def test_keys_that_nobody_sees_may_hold_anything(poison, own, m, dtype):
    for wide in (None, torch.float32):
        case = with_bias(c := dense(65, m, d=32, dtype=dtype), broadcast(c, own), wide)
        clean = replace(case, bias=put(case.bias, (..., slice(40, 43)), -inf))
        bad = {name: put(getattr(case, name), (..., 41, slice(None)), poison) for name in "kv"}
        for dirty in ({"k": bad["k"]}, {"v": bad["v"]}, bad):
            assert check_containment(clean, replace(clean, **dirty)) == 0


@hidden_widths
@pytest.mark.parametrize("own", [(1, 1, 1, 1), (0, 0, 1, 1)], ids=["full", "shared"])
@pytest.mark.parametrize("poison", [nan, inf, -inf], ids=str)
def test_rows_that_see_nothing_may_hold_anything(poison, own, m, dtype):
    """Their out is 0, their lse -inf, and they give nothing to any gradient."""
    for wide in (None, torch.float32):
        case = with_bias(c := dense(65, m, d=32, dtype=dtype), broadcast(c, own), wide)
        clean = replace(case, bias=put(case.bias, (..., slice(20, 23), slice(None)), -inf))
        bad = {
            name: put(getattr(case, name), (..., 21, slice(None)), poison)
            for name in ("q", "grad_out")
        }
        bad["grad_lse"] = put(case.grad_lse, (..., 21), poison)
        for dirty in (*({name: x} for name, x in bad.items()), bad):
            assert check_containment(clean, replace(clean, **dirty)) == 0
        got = results(replace(clean, **bad))
        assert got["out"][..., 20:23, :].eq(0).all() and got["lse"][..., 20:23].eq(-inf).all()
        assert got["dq"][..., 20:23, :].eq(0).all() and got["dbias"][..., 20:23, :].eq(0).all()


@hidden_widths
@pytest.mark.parametrize("poison", [nan, inf], ids=str)
@pytest.mark.parametrize("hiding", ["causal", "window", "key lengths"])
def test_a_bias_behind_another_mask_may_hold_anything(hiding, poison, m, dtype):
    case = with_bias(c := dense(65, m, d=32, dtype=dtype), full(c))
    options = {"causal": {"causal": True}, "window": {"window": (20, 9)}}.get(hiding, {})
    lengths = integers(30, m) if hiding == "key lengths" else None
    case = replace(case, options=options, key_lengths=lengths)
    position = torch.arange(65, device=DEVICE)[:, None] + m - 65
    key = torch.arange(m, device=DEVICE)
    unseen = {
        "causal": key > position,
        "window": (key < position - 20) | (key > position + 9),
        "key lengths": key >= (m if lengths is None else lengths[:, None, None, None]),
    }[hiding]
    assert unseen.any()
    dirty = replace(case, bias=case.bias.masked_fill(unseen, poison))
    assert check_containment(case, dirty) == 0
    assert results(dirty)["dbias"].masked_fill(~unseen, 0).eq(0).all()


def test_nan_in_the_bias_reaches_its_row(dtype):
    case = with_bias(c := dense(65, 72, d=32, dtype=dtype), full(c))
    got = results(replace(case, bias=put(case.bias, (1, 2, 9, 30), nan)))
    bad = ~got["out"].isfinite().all(-1)
    assert bad[1, 2, 9] and bad.sum() == 1


def test_few_queries_over_many_keys(dtype):
    """Split over keys, and the heads of a group as rows."""
    for n in (1, 3):
        case = dense(n, 3000, lead=(1,), hq=8, hk=2, d=128, dtype=dtype, needs="")
        check_case(replace(with_bias(case, full(case)), needs=""))
        case = dense(n, 3001, lead=(1,), hq=8, hk=2, d=128, dtype=dtype, needs="")
        check_case(replace(with_bias(case, broadcast(case, (0, 1, 1, 1))), needs=""))


@pytest.mark.parametrize("needs", ["b", "q", "kv", "qb"])
def test_only_what_is_wanted(needs, dtype):
    case = with_bias(c := dense(66, 72, d=64, dtype=dtype), broadcast(c, (0, 1, 1, 1)))
    check_case(replace(case, needs=needs))
    check_case(replace(with_bias(c, full(c)), needs=needs))


def test_a_gradient_that_nobody_wants_changes_nothing(dtype):
    """A bias of a mask, or of positions: not learned."""
    for own in ((1, 1, 1, 1), (0, 1, 1, 1)):
        case = with_bias(c := dense(130, 136, d=64, dtype=dtype), broadcast(c, own))
        want, got = results(case), check_case(replace(case, needs="qkv"))
        assert set(want) - set(got) == {"dbias"}
        assert all(same_bits(got[name], want[name]) for name in got)


@on_a_gpu
def test_a_gradient_that_nobody_wants_takes_no_memory(dtype):
    for wide in (torch.float32, dtype):
        q, k, v = (x.requires_grad_() for x in qkv(1024, lead=(1,), hq=8, hk=8, dtype=dtype))
        bias = torch.randn(8, 1024, 1024, device=DEVICE).to(wide)
        if refused(q, k, v, bias=bias):
            continue
        out = fm.flash_attention(q, k, v, bias=bias)
        grad_out = torch.randn_like(out)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        torch.autograd.grad(out, (q, k, v), grad_out)
        taken = torch.cuda.max_memory_allocated() - before
        assert taken < bias.numel() * bias.element_size()


@pytest.mark.parametrize("layout", [None, *LAYOUTS], ids=lambda x: x.__name__ if x else "dense")
def test_the_gradient_lies_as_the_bias_does(layout, dtype):
    """The same strides where the bias has no gaps, and the same order of dimensions where it has;
    tests/gpu/test_c_api.py gives strides of its own."""
    case = with_bias(c := dense(40, 48, d=32, dtype=dtype), full(c), layout=layout)
    gradient = results(case)["dbias"]
    assert gradient.shape == case.bias.shape and gradient.dtype == case.bias.dtype
    assert gradient.stride() == torch.empty_like(case.bias).stride()


def test_the_gradient_of_a_bias_has_the_same_bits_always(dtype):
    """Also where the rest of the backward pass may add in any order."""
    for own in ((1, 1, 1, 1), (0, 1, 1, 1), (0, 0, 0, 1)):
        case = with_bias(
            c := dense(300, 264, d=64, dtype=dtype, deterministic=False), broadcast(c, own)
        )
        first = results(case)["dbias"]
        assert all(same_bits(first, results(case)["dbias"]) for _ in range(3))
