"""A boolean bias is a mask: true where a key may be looked at, read as bytes, no gradient."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F

import flashmoe_science as fm
import oracle
from catalogue import needs_all_families
from flashmoe_science import _library
from oracle import Case, same_bits
from problems import BIAS_LAYOUTS, DTYPES, laid_out


def make(shape=(2, 4, 37, 53), share=0.6, dtype=torch.float32, layout="contiguous", **options):
    """A dense case with a mask of that shape, of which `share` is true."""
    n, m = 37, 53
    sizes = ((2, 4, n, 16), (2, 2, m, 16), (2, 2, m, 12), (2, 4, n, 12))
    q, k, v, grad_out = (torch.randn(size).to(dtype) for size in sizes)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    mask = laid_out(torch.rand(shape) < share, layout, torch.Generator().manual_seed(1))
    lengths = torch.tensor([41, 53]) if options.pop("key_lengths", False) else None
    grad_lse = torch.randn(2, 4, n, dtype=wide)
    return Case(q, k, v, grad_out, grad_lse, mask, key_lengths=lengths, options=options)


def ragged(heads=4, share=0.6, dtype=torch.float32, **options):
    lengths = ((9, 17), (0, 5), (33, 1), (16, 0), (20, 31))
    cu_q, cu_k = (torch.tensor([0, *(x[side] for x in lengths)]).cumsum(0) for side in (0, 1))
    sizes = ((cu_q[-1] + 2, 4, 8), (cu_k[-1], 2, 8), (cu_k[-1], 2, 8), (cu_q[-1] + 2, 4, 8))
    q, k, v, grad_out = (torch.randn(size).to(dtype) for size in sizes)
    mask = torch.rand(sum(n * m for n, m in lengths), heads) < share
    return Case(
        q, k, v, grad_out, None, mask, None, cu_q, cu_k, max_q=33, max_k=31, options=options
    )


def as_numbers(case: Case) -> Case:
    """The same mask as a bias of 0 and -inf, of which no gradient is asked."""
    bias = torch.zeros(case.bias.shape, dtype=case.q.dtype).masked_fill(~case.bias, -torch.inf)
    return dataclasses.replace(case, bias=bias, needs="qkv")


def check(case: Case) -> None:
    """Within the oracle's tolerance, and to the bit what the mask would be as numbers."""
    got = oracle.check(case)
    for name, want in oracle.ours(as_numbers(case)).items():
        assert same_bits(got[name], want), name


SHAPES = [
    (2, 4, 37, 53),
    (4, 37, 53),
    (37, 53),
    (2, 1, 1, 53),
    (2, 1, 37, 1),
    (4, 1, 53),
    (1, 4, 1, 1),
    (53,),
    (1,),
    (),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_any_broadcast(shape):
    check(make(shape))


@pytest.mark.parametrize("layout", BIAS_LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_any_strides_and_dtypes(dtype, layout):
    check(make(dtype=dtype, layout=layout))


OPTIONS = [
    {"causal": True},
    {"window": (9, 3)},
    {"softcap": 2.0, "scale": 0.7},
    {"key_lengths": True, "causal": True},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_with_other_options(options):
    check(make(**options))


@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("options", [{}, {"causal": True}], ids=str)
def test_ragged(heads, options):
    check(ragged(heads, **options))


@pytest.mark.parametrize("share", [0.0, 0.02, 1.0])
def test_rows_with_nothing_to_see(share):
    """0, with lse = -inf and gradient 0."""
    for case in (make(share=share), ragged(share=share)):
        check(case)
    got = oracle.ours(make(share=0.0))
    assert (got["lse"] == -torch.inf).all()
    assert all((got[name] == 0).all() for name in ("out", "dq", "dk", "dv"))


@pytest.mark.parametrize("n", [0, 1, 2, 127, 128, 129])
def test_sizes(n):
    """A column of queries, a row of keys, a square."""
    for rows, keys in ((n, 1), (1, n), (n, n)):
        q, k = torch.randn(1, 2, rows, 8), torch.randn(1, 2, keys, 8)
        case = Case(q, k, torch.randn(1, 2, keys, 8), torch.randn(1, 2, rows, 8))
        case.bias = torch.rand(rows, keys) < 0.5
        check(case)


def test_any_byte_but_0_is_true():
    case = make()
    bytes_ = case.bias.to(torch.uint8) * torch.randint(1, 256, case.bias.shape, dtype=torch.uint8)
    odd = fm.flash_attention(case.q, case.k, case.v, bytes_.view(torch.bool))
    assert same_bits(odd, fm.flash_attention(case.q, case.k, case.v, case.bias))


def test_nan_behind_a_mask_stays_there():
    case = make()
    case.bias[..., 7] = False
    want = oracle.ours(case)
    case.k[..., 7, :] = case.v[..., 7, :] = torch.nan
    got = oracle.ours(case)
    assert all(same_bits(got[name], want[name]) for name in ("out", "lse", "dq"))
    for name in ("dk", "dv"):
        assert same_bits(got[name], want[name]), name


def test_a_mask_has_no_gradient(monkeypatch):
    """Autograd never asks for one; the op refuses who does."""
    case, backward = make(), _library.backward
    asks = lambda *args: backward(*args[:-2], True, False)  # noqa: E731
    monkeypatch.setattr(_library, "backward", asks)
    with pytest.raises(RuntimeError, match="a mask has no gradient"):
        oracle.ours(case)


@pytest.mark.parametrize("case", [make((2, 1, 37, 53)), ragged()], ids=["dense", "ragged"])
def test_compiled(case):
    want = oracle.ours(case)

    def call(q, k, v):
        leaves = {"q": q, "k": k, "v": v}
        if case.cu_q is None:
            return fm.flash_attention(**leaves, bias=case.bias, return_lse=True)
        cu = (case.cu_q, case.cu_k, case.max_q, case.max_k)
        return fm.flash_attention_varlen(q, k, v, *cu, bias=case.bias, return_lse=True)

    leaves = [x.clone().requires_grad_() for x in (case.q, case.k, case.v)]
    out, lse = torch.compile(call, fullgraph=True, backend="aot_eager")(*leaves)
    grads = oracle.differentiate(case, dict(zip("qkv", leaves, strict=True)), out, lse)
    for name, x in {"out": out, "lse": lse, **grads}.items():
        assert same_bits(x, want[name]), name


def test_torch_func():
    case = make((37, 53))
    masks = torch.rand(3, 37, 53) < 0.5
    loss = lambda q, mask: fm.flash_attention(q, case.k, case.v, mask).sum()  # noqa: E731
    got = torch.func.vmap(torch.func.grad(loss), (None, 0))(case.q, masks)
    q = case.q.clone().requires_grad_()
    for one, mask in zip(got, masks, strict=True):
        (want,) = torch.autograd.grad(loss(q, mask), q)
        assert torch.allclose(one, want, atol=1e-6)


def test_sdpa_reads_the_mask_as_it_is():
    """No op of torch's between SDPA and ours: nothing expands the mask."""
    case = make()
    call = {"attn_mask": case.bias, "enable_gqa": True}
    with fm.enable_sdpa(), torch.profiler.profile(record_shapes=True) as profile:
        out = F.scaled_dot_product_attention(case.q, case.k, case.v, **call)
    assert same_bits(out, fm.flash_attention(case.q, case.k, case.v, case.bias))
    ran = [event.key for event in profile.key_averages() if event.key.startswith("flashmoe::")]
    assert ran == ["flashmoe::attention_forward"]
    copies = {"aten::where", "aten::copy_", "aten::_to_copy", "aten::log", "aten::masked_fill"}
    assert not copies & {event.key for event in profile.key_averages()}


def test_explain_names_the_mask():
    case = make((4, 37, 53))
    text = fm.explain(case.q, case.k, case.v, case.bias)
    assert "mask bool (4, 37, 53)" in text and "copies     none" in text
    assert "mask bool" in fm.explain(case.q, case.k, case.v, case.bias, backward=True)


@needs_all_families
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("chip", ["sm_75", "sm_80", "sm_90"])
def test_cuda_reads_it_where_it_lies(chip, backward):
    """Never copied or expanded, however it is laid out; Hopper has kernels of its own for it."""
    case = make((37, 53), dtype=torch.float16)
    for mask in (case.bias.expand(2, 4, 37, 53), case.bias.mT.contiguous().mT, case.bias[:, :1]):
        text = fm.explain(case.q, case.k, case.v, mask, device=chip, backward=backward)
        assert "mask bool" in text and "bias" not in text.split("  copies")[1]
        assert "attention_bias_align" not in text
    q = torch.empty(2, 4, 1024, 64, dtype=torch.float16, device="meta")
    mask = torch.empty(4, 1024, 1023, dtype=torch.bool, device="meta")
    text = fm.explain(q, q[..., :1023, :], q[..., :1023, :], mask, device=chip, backward=backward)
    pass_ = "bwd" if backward else "fwd"
    kernel = f"sm90_attention_{pass_}_mask_" if chip == "sm_90" else f"_attention_{pass_}_bias_"
    assert kernel in text
    for padding in (mask[:, :1], mask[0, 0]):  # the same for all queries
        keys = [q[..., :1023, :]] * 2
        assert kernel in fm.explain(q, *keys, padding, device=chip, backward=backward)


@needs_all_families
@pytest.mark.parametrize("backward", [False, True])
def test_a_packed_mask_is_not_transposed(backward):
    """A packed bias is copied head by head first; the bytes of a mask are read in place."""
    q = torch.empty(50, 4, 32, dtype=torch.float16, device="meta")
    cu = torch.empty(3, dtype=torch.int32, device="meta")
    mask = torch.empty(1300, 4, dtype=torch.bool, device="meta")
    sides = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": 30, "max_seqlen_k": 30}
    options = {**sides, "backward": backward}
    for chip in ("sm_75", "sm_80", "sm_90"):
        assert "transpose" not in fm.explain(q, q, q, mask, **options, device=chip)
        assert "transpose" in fm.explain(q, q, q, mask.half(), **options, device=chip)
