"""torch.autocast: attention is cast as F.scaled_dot_product_attention is."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import flashmoe_science as fm
from flashmoe_science.compat.flash_attn import flash_attn_func, flash_attn_varlen_func
from oracle import same_bits

LOW = (torch.bfloat16, torch.float16)
CU = torch.tensor([0, 9, 9, 21])
NAMES = ("q", "k", "v", "bias")


def dense(dtypes=(torch.float32,) * 4) -> dict[str, torch.Tensor]:
    shapes = ((2, 4, 21, 16), (2, 2, 33, 16), (2, 2, 33, 12), (4, 21, 33))
    return {
        name: torch.randn(shape).to(dtype).requires_grad_()
        for name, shape, dtype in zip(NAMES, shapes, dtypes, strict=True)
    }


def ragged() -> dict[str, torch.Tensor]:
    shapes = ((21, 4, 16), (21, 2, 16), (21, 2, 16), (9 * 9 + 12 * 12, 4))
    return {n: torch.randn(s, requires_grad=True) for n, s in zip(NAMES, shapes, strict=True)}


def varlen(q, k, v, bias, **options):
    return fm.flash_attention_varlen(q, k, v, CU, CU, 12, 12, bias=bias, **options)


def results(call, leaves, upstream=None):
    """out, lse and the gradients by name."""
    out, lse = call(**leaves, return_lse=True)
    upstream = torch.ones_like(out) if upstream is None else upstream
    grads = torch.autograd.grad((out, lse.sum()), tuple(leaves.values()), (upstream, None))
    return {"out": out, "lse": lse, **dict(zip(leaves, grads, strict=True))}


MIXED = (torch.float32, torch.bfloat16, torch.float16, torch.float32)


@pytest.mark.parametrize("low", LOW, ids=str)
@pytest.mark.parametrize("call", [fm.flash_attention, varlen], ids=["dense", "ragged"])
@pytest.mark.parametrize("mixed", [False, True], ids=["float32", "mixed"])
def test_inputs_are_cast_and_gradients_come_back(call, low, mixed):
    """The bits of the same call on tensors cast by hand; gradients in the inputs' own dtypes."""
    leaves = dense() if call is fm.flash_attention else ragged()
    if mixed:
        leaves = {
            n: x.detach().to(dtype).requires_grad_()
            for (n, x), dtype in zip(leaves.items(), MIXED, strict=True)
        }
    with torch.autocast("cpu", dtype=low):
        got = results(call, leaves)
    cast = {n: x.detach().to(low).requires_grad_() for n, x in leaves.items()}
    want = results(call, cast)
    assert got["out"].dtype == low and got["lse"].dtype == torch.float32
    for name, x in got.items():
        like = leaves[name].dtype if name in leaves else x.dtype
        assert x.dtype == like, name
        assert same_bits(x, want[name].to(like)), name


def test_dtypes_are_those_of_sdpa():
    """What SDPA casts we cast, what it refuses we refuse."""
    kinds = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
    q = torch.randn(1, 2, 9, 8)
    for query in kinds:
        for key in kinds:
            for mask in (*kinds, torch.bool, None):
                inputs = (q.to(query), q.to(key), q.to(key))
                bias = None if mask is None else torch.ones(9, 9, dtype=mask)
                answers = []
                for call in (F.scaled_dot_product_attention, fm.flash_attention):
                    with torch.autocast("cpu", dtype=torch.bfloat16):
                        try:
                            answers.append(call(*inputs, bias).dtype)
                        except RuntimeError:
                            answers.append("refused")
                theirs, ours = answers
                # A float32 mask of float64 tensors is more than SDPA takes; we always do.
                assert ours == theirs or theirs == "refused", (query, key, mask)


def test_float64_is_left_alone():
    leaves = dense((torch.float64,) * 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = results(fm.flash_attention, leaves)
    outside = results(fm.flash_attention, leaves)
    assert inside["out"].dtype == torch.float64
    assert all(same_bits(x, outside[name]) for name, x in inside.items())


def test_off_and_other_devices():
    leaves = dense()
    want = fm.flash_attention(**leaves)
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.autocast("cpu", enabled=False):
        assert same_bits(fm.flash_attention(**leaves), want)
    with torch.autocast("xpu", dtype=torch.bfloat16):  # any other device's
        assert same_bits(fm.flash_attention(**leaves), want)


def test_mixed_dtypes_outside_are_refused():
    q, k, v, bias = dense((torch.float32, *MIXED[1:])).values()
    with pytest.raises(RuntimeError, match="key is bfloat16, expected float32"):
        fm.flash_attention(q, k, v, bias)


@pytest.mark.parametrize("low", LOW, ids=str)
def test_other_names(low):
    """compat.flash_attn and enable_sdpa() too."""
    q, k, v, bias = (x.detach() for x in dense().values())
    rows = [x.transpose(1, 2) for x in (q, k, v)]
    flat = [x.detach() for x in ragged().values()][:3]
    with torch.autocast("cpu", dtype=low):
        out = flash_attn_func(*rows)
        packed = flash_attn_varlen_func(*flat, CU, CU, 12, 12)
        with fm.enable_sdpa():
            sdpa = F.scaled_dot_product_attention(q, k, v, bias, enable_gqa=True)
    assert same_bits(out, flash_attn_func(*(x.to(low) for x in rows)))
    assert same_bits(packed, flash_attn_varlen_func(*(x.to(low) for x in flat), CU, CU, 12, 12))
    assert same_bits(sdpa, fm.flash_attention(*(x.to(low) for x in (q, k, v, bias))))


@pytest.mark.parametrize("call", [fm.flash_attention, varlen], ids=["dense", "ragged"])
def test_compiled(call):
    """Autocast outside of the compiled function, and within it."""
    leaves = dense() if call is fm.flash_attention else ragged()

    def inside(**tensors):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return call(**tensors)

    with torch.autocast("cpu", dtype=torch.bfloat16):
        want = results(call, leaves)
        got = results(torch.compile(call, fullgraph=True, backend="aot_eager"), leaves)
    assert all(same_bits(x, want[name]) for name, x in got.items())
    got = results(torch.compile(inside, fullgraph=True, backend="aot_eager"), leaves)
    assert all(same_bits(x, want[name]) for name, x in got.items())


def test_torch_func():
    leaves = dense()
    loss = lambda q: fm.flash_attention(q, *list(leaves.values())[1:]).float().sum()  # noqa: E731
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = torch.func.grad(loss)(leaves["q"].detach())
        (want,) = torch.autograd.grad(loss(leaves["q"]), leaves["q"])
    assert got.dtype == torch.float32 and same_bits(got, want)


def test_explain_says_what_runs():
    tensors = {n: x.detach() for n, x in dense().items()}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        text = fm.explain(**tensors)
    assert "attention in bfloat16" in text and "bias bfloat16" in text
    assert "attention in float32" in fm.explain(**tensors)
