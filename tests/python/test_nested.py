"""Jagged nested tensors are ragged batches; results are nested too."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import flashmoe_science as fm
import oracle
from flashmoe_science.compat.flash_attn import flash_attn_func
from oracle import Case, same_bits

LENGTHS_Q = (3, 0, 17, 129, 1)
LENGTHS_K = (5, 4, 17, 0, 31)


def nested(lengths, heads, dim, dtype=torch.float32):
    """(B, H, j, D) over (T, H, D) memory, as projections of a nested tensor make it; the leaf."""
    parts = [torch.randn(n, heads, dim).to(dtype) for n in lengths]
    leaf = torch.nested.nested_tensor(parts, layout=torch.jagged, requires_grad=True)
    return leaf, leaf.transpose(1, 2)


def qkv(lengths_q=LENGTHS_Q, lengths_k=LENGTHS_K, dtype=torch.float32, dim_v=12):
    """Leaves and views; v has the very lengths of k."""
    q_leaf, q = nested(lengths_q, 4, 16, dtype)
    k_leaf, k = nested(lengths_k, 2, 16, dtype)
    values = torch.randn(sum(lengths_k), 2, dim_v).to(dtype)
    offsets = k_leaf.offsets()
    v_leaf = torch.nested.nested_tensor_from_jagged(values, offsets=offsets)
    v_leaf = v_leaf.detach().requires_grad_()
    return (q_leaf, k_leaf, v_leaf), (q, k, v_leaf.transpose(1, 2))


def ragged_case(leaves, grad_out, grad_lse, options) -> Case:
    q, k, v = (x.detach().values() for x in leaves)
    cu_q, cu_k = leaves[0].offsets(), leaves[1].offsets()
    longest = (max(LENGTHS_Q), max(LENGTHS_K))
    return Case(
        q, k, v, grad_out, grad_lse, None, None, cu_q, cu_k, *longest, options=dict(options)
    )


OPTIONS = [{}, {"causal": True}, {"window": (7, 2)}, {"scale": 0.3, "softcap": 5.0}]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_nested_is_ragged(options, dtype):
    """The bits of flash_attention_varlen on the values, gradients and lse included."""
    leaves, views = qkv(dtype=dtype)
    out, lse = fm.flash_attention(*views, **options, return_lse=True)
    assert out.is_nested and lse.is_nested and out.layout == lse.layout == torch.jagged
    assert out.shape == (5, 4, views[0].shape[2], 12) and lse.shape == out.shape[:3]
    assert [x.shape[1] for x in out.unbind()] == list(LENGTHS_Q)
    assert same_bits(fm.flash_attention(*views, **options).values(), out.values())

    rows, row_lse = out.transpose(1, 2).values(), lse.transpose(1, 2).values()
    upstream = (torch.randn_like(rows), torch.randn_like(row_lse))
    grads = torch.autograd.grad((rows, row_lse), leaves, upstream)
    assert all(grad.is_nested for grad in grads)
    got = {"out": rows.detach(), "lse": row_lse.detach()}
    got |= {f"d{n}": x.values() for n, x in zip("qkv", grads, strict=True)}
    case = ragged_case(leaves, *upstream, options)
    oracle.accept(case, got)
    want = oracle.ours(case)
    assert all(same_bits(x, want[name]) for name, x in got.items())


def test_in_a_model():
    """As users of SDPA have it: projections of a nested batch, and a residual of the result."""
    x = torch.nested.nested_tensor(
        [torch.randn(n, 32) for n in (3, 9, 1)], layout=torch.jagged, requires_grad=True
    )
    *inner, outer = (torch.nn.Linear(32, 32) for _ in range(4))

    def model(attention):
        heads = (linear(x).unflatten(-1, (4, 8)).transpose(1, 2) for linear in inner)
        return x + outer(attention(*heads).transpose(1, 2).flatten(-2))

    with sdpa_kernel(SDPBackend.MATH):
        theirs = model(F.scaled_dot_product_attention)
        (want,) = torch.autograd.grad(theirs.values().square().sum(), x)
    ours = model(fm.flash_attention)
    (got,) = torch.autograd.grad(ours.values().square().sum(), x)
    torch.testing.assert_close(ours.values(), theirs.values())
    torch.testing.assert_close(got.values(), want.values(), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("lengths", [(), (0,), (0, 0), (1,), (64, 65)], ids=str)
def test_sizes(lengths):
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    values = torch.randn(sum(lengths), 2, 8)
    x = torch.nested.nested_tensor_from_jagged(values, offsets=offsets).transpose(1, 2)
    if not lengths:  # torch has no longest of none
        x._metadata_cache["max_seqlen"] = torch.zeros(0, 0)
    out = fm.flash_attention(x, x, x)
    longest = max(lengths, default=0)
    call = (values, values, values, offsets, offsets, longest, longest)
    assert same_bits(out.transpose(1, 2).values(), fm.flash_attention_varlen(*call))


def test_values_of_any_strides():
    """(H, T, D) memory too: what nested tensors of a dense (H, T, D) tensor have."""
    offsets = torch.tensor([0, 4, 9])
    values = torch.randn(2, 9, 8)
    x = torch.nested.nested_tensor_from_jagged(values, offsets=offsets, jagged_dim=2)
    rows = values.transpose(0, 1)
    want = fm.flash_attention_varlen(rows, rows, rows, offsets, offsets, 5, 5)
    assert same_bits(fm.flash_attention(x, x, x).values().transpose(0, 1), want)


def test_lengths_made_one_by_one():
    """k and v from lists of the same lengths: torch gives their raggedness different names."""
    _, q = nested(LENGTHS_Q, 2, 8)
    (_, k), (_, v) = nested(LENGTHS_K, 2, 8), nested(LENGTHS_K, 2, 8)
    assert k.shape[2] != v.shape[2]
    shared = torch.nested.nested_tensor_from_jagged(v.values(), offsets=k.offsets(), jagged_dim=2)
    got, want = (fm.flash_attention(q, k, x) for x in (v, shared))
    assert same_bits(got.values(), want.values())


def test_autocast_and_other_names():
    _, views = qkv(dim_v=16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low = fm.flash_attention(*views)
    assert low.dtype == torch.bfloat16 and low.is_nested
    rows = flash_attn_func(*(x.transpose(1, 2) for x in views))
    assert same_bits(rows.values(), fm.flash_attention(*views).transpose(1, 2).values())


def test_compiled():
    leaves, _ = qkv(dim_v=16)

    def call(*rows):
        views = (x.transpose(1, 2) for x in rows)
        return fm.flash_attention(*views, causal=True).transpose(1, 2).values()

    want = call(*leaves)
    upstream = torch.randn_like(want)
    got = torch.compile(call, fullgraph=True, backend="aot_eager")(*leaves)
    assert same_bits(got, want)
    for a, b in zip(*(torch.autograd.grad(x, leaves, upstream) for x in (got, want)), strict=True):
        assert same_bits(a.values(), b.values())


def test_explain():
    _, views = qkv()
    text = fm.explain(*views)
    assert "ragged batch of 5" in text and "129 queries x 31 keys" in text


def strided(*lengths):
    return torch.nested.nested_tensor([torch.randn(2, n, 8) for n in lengths])


def bad_calls():
    _, (q, k, v) = qkv(dim_v=16)
    dense = torch.randn(5, 2, 31, 16)
    lengths = torch.tensor([2, 4, 1, 0, 3])
    holes = torch.nested.nested_tensor_from_jagged(
        k.transpose(1, 2).values(), offsets=k.offsets(), lengths=lengths
    ).transpose(1, 2)
    other = nested((4, 5, 17, 0, 31), 2, 16)[1]
    return {
        "dense key": ((q, dense, v), {}, TypeError, "k is no nested tensor and q, v is"),
        "dense query": ((dense, k, v), {}, TypeError, "q is no nested tensor"),
        "strided": ((strided(3, 4),) * 3, {}, ValueError, "torch.strided"),
        "strided key": ((q, strided(3, 4), v), {}, ValueError, "k is .*torch.strided"),
        "not transposed": ((q.transpose(1, 2), k, v), {}, ValueError, r"q has .*transpose\(1, 2\)"),
        "three dimensions": ((q[..., 0], k, v), {}, ValueError, "q has shape"),
        "holes": ((q, holes, holes), {}, ValueError, r"k has holes.*contiguous"),
        "lengths of the value": ((q, k, other), {}, ValueError, "v must have those of k"),
        "batch": ((nested((1, 2), 4, 16)[1], k, v), {}, ValueError, "2, 5 and 5 sequences"),
        "bias": ((q, k, v), {"bias": torch.randn(9, 4)}, ValueError, "bias is given"),
        "lengths": ((q, k, v), {"key_lengths": lengths}, ValueError, "key_lengths is given"),
        "heads": ((nested(LENGTHS_Q, 3, 16)[1], k, v), {}, RuntimeError, "query has 3 heads"),
        "head dim": ((nested(LENGTHS_Q, 4, 8)[1], k, v), {}, RuntimeError, "key has head dim 16"),
    }


@pytest.mark.parametrize("name", bad_calls())
def test_what_does_not_fit_is_refused(name):
    tensors, options, error, message = bad_calls()[name]
    with pytest.raises(error, match=message):
        fm.flash_attention(*tensors, **options)


def test_varlen_takes_packed_tensors():
    _, (q, k, v) = qkv()
    with pytest.raises(TypeError, match="pass nested tensors to flash_attention"):
        fm.flash_attention_varlen(q, k, v, q.offsets(), k.offsets(), 129, 31)


def test_contiguous_closes_the_holes():
    """What the error says works."""
    rows = torch.randn(9, 2, 8)
    holes = torch.nested.nested_tensor_from_jagged(
        rows, offsets=torch.tensor([0, 4, 9]), lengths=torch.tensor([2, 5])
    )
    x = holes.contiguous().transpose(1, 2)
    kept, cu = torch.cat((rows[:2], rows[4:])), torch.tensor([0, 2, 7])
    want = fm.flash_attention_varlen(kept, kept, kept, cu, cu, 5, 5)
    assert same_bits(fm.flash_attention(x, x, x).transpose(1, 2).values(), want)
