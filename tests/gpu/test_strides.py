"""Where the numbers lie in memory decides nothing about what becomes of them."""

from __future__ import annotations

from dataclasses import replace
from math import nan

import pytest
import torch
from helpers import (
    COPIED,
    IN_PLACE,
    attend,
    batch_last,
    check,
    check_case,
    columns_first,
    dense,
    every_head_dim,
    heads_in_the_middle,
    normal,
    odd_rows,
    odd_start,
    qkv,
    ragged,
    results,
    rows_apart,
    rows_first,
    same,
)

import flashmoe_science as fm
import oracle
from oracle import same_bits

every_layout = pytest.mark.parametrize("layout", IN_PLACE + COPIED, ids=lambda f: f.__name__)


@every_head_dim
@every_layout
def test_strides(layout, d, dtype):
    """The same numbers wherever they lie: bits like those of contiguous tensors."""
    tensors = qkv(131, 77, lead=(3,), d=d, dtype=dtype)
    want = check(*tensors, causal=True)
    for which in ((0,), (1,), (2,), (0, 1, 2)):
        q, k, v = (layout(x) if i in which else x for i, x in enumerate(tensors))
        out, lse = attend(q, k, v, causal=True)
        assert same((out, lse), want), f"with {['qkv'[i] for i in which]} in that layout"
        if layout in IN_PLACE:
            assert out.stride() == torch.empty_like(q).stride(), "the output follows the query"


@pytest.mark.parametrize("d", [24, 64, 100])
@every_layout
def test_strides_of_gradients(layout, d, dtype):
    """Inputs and upstream gradients of any layout."""
    case = dense(131, 77, lead=(3,), d=d, dtype=dtype, options={"causal": True})
    want = check_case(case)
    for names in (("q",), ("k",), ("v",), ("grad_out",), ("q", "k", "v", "grad_out")):
        moved = replace(case, **{name: layout(getattr(case, name)) for name in names})
        got = results(moved)
        for name in want:
            assert same_bits(got[name], want[name]), f"{name}, with {names} in that layout"


@pytest.mark.parametrize("layout", [rows_first, rows_apart, batch_last, odd_rows])
def test_strides_of_several_leading_dimensions(layout, dtype):
    """Leading dimensions that cannot be seen as one: no single stride steps through them."""
    tensors = qkv(70, 33, lead=(3, 2), hq=2, hk=1, dtype=dtype)
    want = check(*tensors)
    swapped = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in tensors]
    assert same(attend(*swapped), want)
    assert same(attend(*(layout(x) for x in tensors)), want)
    wide = [torch.stack([x, torch.full_like(x, nan)], 1)[:, 0] for x in tensors]
    assert same(attend(*wide), want)


@pytest.mark.parametrize("lead", [(2, 3), (3, 1, 2), (2, 2, 2)], ids=str)
def test_gradients_over_several_leading_dimensions(lead, dtype):
    case = dense(70, 33, lead=lead, hq=2, hk=1, dtype=dtype, options={"causal": True})
    want = check_case(case)

    def swapped(x):
        return x.transpose(0, 1).contiguous().transpose(0, 1)

    for layout in (swapped, rows_first, batch_last, odd_start):
        moved = {name: layout(getattr(case, name)) for name in ("q", "k", "v", "grad_out")}
        got = results(replace(case, grad_lse=swapped(case.grad_lse), **moved))
        assert all(same_bits(got[name], want[name]) for name in want), layout.__name__


@every_head_dim
def test_slices_of_one_packed_tensor(d, dtype):
    n, hq, hk = 150, 6, 2
    packed = normal(2, n, hq + 2 * hk, d, dtype=dtype)
    q, k, v = (x.transpose(1, 2) for x in packed.split((hq, hk, hk), dim=2))
    out, _ = check(q, k, v, causal=True)
    assert out.transpose(1, 2).is_contiguous()


@every_head_dim
def test_the_gradient_of_one_packed_tensor(d, dtype):
    """q, k and v are views of one leaf, whose gradient the three are put together to."""
    n, hq, hk = 150, 6, 2
    packed = normal(2, n, hq + 2 * hk, d, dtype=dtype).requires_grad_()
    parts = [x.transpose(1, 2) for x in packed.split((hq, hk, hk), dim=2)]
    grad_out = normal(2, hq, n, d, dtype=dtype)
    out = fm.flash_attention(*parts, causal=True, deterministic=True)
    (got,) = torch.autograd.grad(out, packed, grad_out)
    case = oracle.Case(*(x.detach() for x in parts), grad_out, options={"causal": True})
    grads = check_case(replace(case, deterministic=True))
    want = torch.cat([grads[f"d{name}"].transpose(1, 2) for name in "qkv"], dim=2)
    assert same_bits(got, want)


@pytest.mark.parametrize("dim", [0, 1, 2, 3])
def test_expanded_inputs(dim, dtype):
    """Stride 0: one key head for all batches, one row for all rows, one number for a whole row."""
    tensors = qkv(66, 130, lead=(3,), hq=2, hk=2, dtype=dtype)
    for which in ((0,), (1,), (2,), (0, 1, 2)):
        q, k, v = (
            x.narrow(dim, 0, 1).contiguous().expand(x.shape) if i in which else x
            for i, x in enumerate(tensors)
        )
        got = check(q, k, v, causal=True)
        assert same(got, attend(*(x.contiguous() for x in (q, k, v)), causal=True))


@pytest.mark.parametrize("dim", [0, 1, 2, 3])
def test_gradients_of_expanded_tensors(dim, dtype):
    case = dense(66, 130, lead=(3,), hq=2, hk=2, dtype=dtype, options={"causal": True})
    for names in (("q", "k", "v"), ("grad_out",)):
        parts = {name: getattr(case, name) for name in names}
        thin = {name: x.narrow(dim, 0, 1).contiguous().expand(x.shape) for name, x in parts.items()}
        got = check_case(replace(case, **thin))
        dense_again = {name: x.contiguous() for name, x in thin.items()}
        want = results(replace(case, **dense_again))
        assert all(same_bits(got[name], want[name]) for name in want)


@pytest.mark.parametrize("kind", ["sum", "transposed", "strided", "one row", "lse sum"])
def test_upstream_gradients_as_losses_make_them(kind, dtype):
    """out.sum() sends an expanded gradient back, a transpose a strided one."""
    q, k, v = (x.requires_grad_() for x in qkv(130, 70, dtype=dtype))
    weight = normal(64, 130, dtype=dtype)

    def loss(out, lse):
        if kind == "transposed":
            return (out.mT * weight).float().sum()
        if kind == "lse sum":
            return lse.sum()
        picked = {"sum": out, "strided": out[..., ::2], "one row": out[..., 5, :]}[kind]
        return picked.sum(dtype=torch.float32)

    out, lse = fm.flash_attention(q, k, v, return_lse=True, deterministic=True)
    got = torch.autograd.grad(loss(out, lse), (q, k, v))
    fresh = [x.detach().requires_grad_() for x in (out, lse)]
    grad_out, grad_lse = torch.autograd.grad(loss(*fresh), fresh, allow_unused=True)
    use_out = grad_out is not None
    case = oracle.Case(
        *(x.detach() for x in (q, k, v)),
        grad_out if use_out else torch.zeros_like(out),
        grad_lse=grad_lse,
        deterministic=True,
        use_out=use_out,
    )
    grads = dict(zip(("dq", "dk", "dv"), got, strict=True))
    oracle.accept(case, {"out": out.detach(), "lse": lse.detach(), **grads})


@pytest.mark.parametrize("layout", [rows_apart, odd_rows, odd_start, columns_first, rows_first])
def test_strides_of_ragged_tensors(layout, dtype):
    lengths = ((31, 31), (1, 77), (130, 65), (0, 5), (17, 0))
    case = ragged(lengths, dtype=dtype, options={"causal": True})
    want = check_case(case)
    moved = {name: layout(getattr(case, name)) for name in ("q", "k", "v", "grad_out")}
    got = results(replace(case, **moved))
    assert all(same_bits(got[name], want[name]) for name in want)


def test_ragged_slices_of_one_packed_tensor(dtype):
    """(T, 3, H, D), as one projection leaves it."""
    lengths = ((31, 31), (129, 129), (1, 1), (64, 64))
    case = ragged(lengths, hq=3, hk=3, dtype=dtype)
    packed = torch.stack([case.q, case.k, case.v], 1)
    want = check_case(case)
    got = results(replace(case, q=packed[:, 0], k=packed[:, 1], v=packed[:, 2]))
    assert all(same_bits(got[name], want[name]) for name in want)


def test_strides_of_dimensions_of_size_one_do_not_matter():
    q, k, v = qkv(65, lead=(1,), hq=1, hk=1)
    strange = [x.as_strided(x.shape, (7, 3, 64, 1)) for x in (q, k, v)]
    assert same(attend(*strange), attend(q, k, v))


def test_views_with_flags_are_seen():
    """The negative of a tensor can be a bit in its flags, with the data unchanged."""
    q, k, v = qkv(40)
    got = fm.flash_attention(torch._neg_view(q), k, v)
    assert same_bits(got, fm.flash_attention(-q, k, v))


def test_an_upstream_gradient_with_flags_is_seen():
    case = dense(40)
    want = results(replace(case, grad_out=-case.grad_out))
    got = results(replace(case, grad_out=torch._neg_view(case.grad_out)))
    assert all(same_bits(got[name], want[name]) for name in want)


def test_explain_speaks_of_copies():
    """Nothing is copied in silence."""
    tensors = qkv(70)
    for layout in (torch.clone, heads_in_the_middle, rows_apart):
        text = fm.explain(*(layout(x) for x in tensors))
        assert "copies     none" in text, text
    if tensors[0].is_cuda:  # the CPU reads any layout where it lies
        text = fm.explain(*(odd_rows(x) for x in tensors))
        assert "copies     none" not in text and "query" in text, text
