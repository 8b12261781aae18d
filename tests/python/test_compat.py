"""Other names for attention: flash-attn's functions, and F.scaled_dot_product_attention itself."""

from __future__ import annotations

import inspect

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import flashmoe_science as fm
import oracle
from flashmoe_science.compat.flash_attn import (
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
)
from oracle import Case, same_bits


def normal(*shape, dtype=torch.float32, grad=True):
    return torch.randn(shape).to(dtype).requires_grad_(grad)


# flash-attn

OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window_size": (5, 2)},
    "causal window": {"causal": True, "window_size": (7, -1)},
    "scale": {"softmax_scale": 0.7},
    "softcap": {"softcap": 1.5},
    "deterministic": {"deterministic": True},
}


def in_our_terms(options):
    names = {"softmax_scale": "scale", "window_size": "window"}
    return {names.get(n, n): x for n, x in options.items() if n != "deterministic"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("option", OPTIONS)
def test_flash_attn_func(option, dtype):
    """(B, S, H, D), gradients too; (out, softmax_lse, S_dmask) on request, lse as (B, H, S)."""
    q, k, v = (normal(2, n, h, 16, dtype=dtype) for n, h in ((21, 4), (33, 2), (33, 2)))
    out, lse, rest = flash_attn_func(q, k, v, **OPTIONS[option], return_attn_probs=True)
    assert out.shape == (2, 21, 4, 16) and rest is None
    assert same_bits(out, flash_attn_func(q, k, v, **OPTIONS[option]))

    upstream = torch.randn_like(out)
    grads = torch.autograd.grad(out, (q, k, v), upstream)
    ours = [x.detach().transpose(1, 2) for x in (q, k, v, upstream, out, *grads)]
    case = Case(*ours[:4], options=in_our_terms(OPTIONS[option]))
    got = dict(zip(("out", "dq", "dk", "dv"), ours[4:], strict=True))
    oracle.accept(case, {"lse": lse.detach(), **got})


@pytest.mark.parametrize("option", OPTIONS)
def test_flash_attn_varlen_func(option):
    """(T, H, D), with lse as (H, T)."""
    q, k, v = normal(21, 4, 16), normal(33, 2, 16), normal(33, 2, 16)
    cu_q = torch.tensor([0, 9, 9, 21], dtype=torch.int32)
    cu_k = torch.tensor([0, 12, 20, 33], dtype=torch.int32)
    call = (q, k, v, cu_q, cu_k, 12, 13)
    out, lse, rest = flash_attn_varlen_func(*call, **OPTIONS[option], return_attn_probs=True)
    assert lse.shape == (4, 21) and rest is None
    assert same_bits(out, flash_attn_varlen_func(*call, **OPTIONS[option]))

    upstream = torch.randn_like(out)
    grads = torch.autograd.grad(out, (q, k, v), upstream)
    case = Case(q, k, v, upstream, cu_q=cu_q, cu_k=cu_k, options=in_our_terms(OPTIONS[option]))
    got = dict(zip(("dq", "dk", "dv"), grads, strict=True))
    oracle.accept(case, {"out": out.detach(), "lse": lse.detach().mT, **got})


def test_flash_attn_sinks():
    """s_aux, as vLLM's FlashAttention-3 calls them, with their gradient."""
    q, k, v, sinks = normal(2, 9, 4, 16), normal(2, 9, 2, 16), normal(2, 9, 2, 16), normal(4)
    want = fm.flash_attention(*(x.transpose(1, 2) for x in (q, k, v)), sinks=sinks).transpose(1, 2)
    got = flash_attn_func(q, k, v, s_aux=sinks)
    cu = torch.tensor([0, 9, 18])
    packed = flash_attn_varlen_func(
        *(x.flatten(0, 1) for x in (q, k, v)), cu, cu, 9, 9, s_aux=sinks
    )
    gradients = [torch.autograd.grad(x.square().sum(), sinks)[0] for x in (want, got, packed)]
    for out, gradient in zip((got, packed.unflatten(0, (2, 9))), gradients[1:], strict=True):
        torch.testing.assert_close(out, want)
        torch.testing.assert_close(gradient, gradients[0])
    assert (got != flash_attn_func(q, k, v)).any() and gradients[0].ne(0).all()


def defaults_of(function) -> dict:
    parameters = inspect.signature(function).parameters.items()
    empty = inspect.Parameter.empty
    return {name: p.default for name, p in parameters if p.default is not empty}


def positional(function) -> list[str]:
    parameters = inspect.signature(function).parameters.items()
    return [name for name, p in parameters if p.kind is not p.KEYWORD_ONLY]


def test_flash_attn_signatures():
    """Names, order and defaults of flash-attn 2.8, so that positional calls mean the same."""
    tail = "dropout_p softmax_scale causal window_size softcap alibi_slopes deterministic"
    lengths = "cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k"
    assert positional(flash_attn_func) == f"q k v {tail} return_attn_probs".split()
    names = f"q k v {lengths} {tail} return_attn_probs block_table"
    assert positional(flash_attn_varlen_func) == names.split()
    names = "q k_cache v_cache k v rotary_cos rotary_sin cache_seqlens cache_batch_idx "
    names += "cache_leftpad block_table softmax_scale causal window_size softcap "
    names += "rotary_interleaved alibi_slopes num_splits return_softmax_lse"
    assert positional(flash_attn_with_kvcache) == names.split()

    ours = dict.fromkeys(("q_descale", "k_descale", "v_descale", "s_aux"))
    defaults = {
        "dropout_p": 0.0,
        "softmax_scale": None,
        "causal": False,
        "window_size": (-1, -1),
        "softcap": 0.0,
        "alibi_slopes": None,
        "deterministic": False,
        "return_attn_probs": False,
    }
    assert defaults.items() <= defaults_of(flash_attn_func).items()
    # vLLM calls it with seqused_k in place of cu_seqlens_k.
    added = dict.fromkeys(("cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "seqused_k"))
    assert defaults_of(flash_attn_varlen_func) == {**defaults, "block_table": None, **added, **ours}
    changed = {"rotary_interleaved": True, "num_splits": 0, "return_softmax_lse": False}
    kept = {name: defaults[name] for name in ("causal", "window_size", "softcap")}
    want = dict.fromkeys(names.split()[3:]) | kept | changed | ours
    assert defaults_of(flash_attn_with_kvcache) == want


REFUSED = (NotImplementedError, RuntimeError, ValueError, TypeError)


@pytest.mark.parametrize("name", ["alibi_slopes", "q_descale", "window_size"])
def test_flash_attn_arguments_we_lack_are_refused_by_name(name):
    bad = {"window_size": (-2, 0), "alibi_slopes": torch.rand(4)}
    bad["q_descale"] = torch.rand(1, 4)
    pattern = name.removesuffix("_size")
    q = normal(21, 4, 16, grad=False)
    cu = torch.tensor([0, 21])
    with pytest.raises(REFUSED, match=pattern):
        flash_attn_varlen_func(q, q, q, cu, cu, 21, 21, **{name: bad[name]})
    if name != "q_descale":
        with pytest.raises(REFUSED, match=pattern):
            flash_attn_func(q[None], q[None], q[None], **{name: bad[name]})
    with pytest.raises(REFUSED, match=pattern):
        flash_attn_with_kvcache(q[None], q[None], q[None], **{name: bad[name]})


# enable_sdpa()


def ran_ours(call) -> bool:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        call()
    # A node in C++ goes by ATen's name, which only we have a kernel for.
    ours = ("flashmoe::", "aten::_scaled_dot_product_fused_attention_overrideable")
    return any(event.key.startswith(ours) for event in profile.key_averages())


def torch_math(*args, **options):
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(*args, **options)


def test_sdpa_is_ours_inside_and_torchs_outside():
    q, k, v = (normal(2, 4, 33, 16, grad=False) for _ in range(3))
    call = lambda: F.scaled_dot_product_attention(q, k, v)  # noqa: E731
    before = call()
    assert not ran_ours(call)
    with fm.enable_sdpa():
        assert ran_ours(call)
        assert same_bits(call(), fm.flash_attention(q, k, v))
    assert not ran_ours(call)
    assert same_bits(call(), before)


def test_sdpa_is_given_back_after_an_error():
    q = normal(1, 2, 9, 8, grad=False)
    with pytest.raises(KeyError), fm.enable_sdpa():
        raise KeyError
    assert not ran_ours(lambda: F.scaled_dot_product_attention(q, q, q))
    with pytest.raises((RuntimeError, ValueError)), fm.enable_sdpa():
        F.scaled_dot_product_attention(q, q[..., :3], q)
    assert not ran_ours(lambda: F.scaled_dot_product_attention(q, q, q))


def test_sdpa_contexts_nest_and_repeat():
    q = normal(1, 2, 9, 8, grad=False)
    call = lambda: F.scaled_dot_product_attention(q, q, q)  # noqa: E731
    for _ in range(2):
        with fm.enable_sdpa():
            with fm.enable_sdpa():
                assert ran_ours(call)
            assert ran_ours(call)
        assert not ran_ours(call)


SDPA = {
    "plain": {},
    "causal": {"is_causal": True},
    "scale": {"scale": 0.9},
    "scale causal": {"scale": 0.2, "is_causal": True},
    "bool mask": {"attn_mask": "bool"},
    "bool mask per key": {"attn_mask": "bool", "mask_shape": (2, 1, 1, 29)},
    "float mask": {"attn_mask": "float"},
    "float mask per head": {"attn_mask": "float", "mask_shape": (4, 21, 29)},
    "flat float mask": {"attn_mask": "float", "mask_shape": (21, 29)},
    "gqa": {"enable_gqa": True},
    "gqa causal": {"enable_gqa": True, "is_causal": True},
}


@pytest.mark.parametrize("lengths", [(21, 29), (29, 21), (25, 25), (1, 29), (29, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("option", SDPA)
def test_sdpa_means_what_torch_means(option, dtype, lengths):
    (n, m), options = lengths, dict(SDPA[option])
    heads_k = 2 if options.get("enable_gqa") else 4
    shapes = ((2, 4, n, 16), (2, heads_k, m, 16), (2, heads_k, m, 12))
    inputs = [normal(*shape, dtype=dtype) for shape in shapes]
    shape = tuple({21: n, 29: m}.get(s, s) for s in options.pop("mask_shape", (2, 4, 21, 29)))
    bias = None
    if options.get("is_causal"):
        # PyTorch's mask starts in the top left corner: row i sees the keys j <= i.
        bias = torch.ones(n, m).tril().log().to(dtype)
    elif options.get("attn_mask") == "bool":
        options["attn_mask"] = torch.rand(shape) < 0.6
        options["attn_mask"][..., 0] = True  # a row without keys is NaN in some of torch's kernels
        bias = options["attn_mask"].to(dtype).log()
    elif options.get("attn_mask") == "float":
        bias = options["attn_mask"] = normal(*shape, dtype=dtype)
        inputs.append(bias)

    with fm.enable_sdpa():
        out = F.scaled_dot_product_attention(*inputs[:3], **options)
    upstream = torch.randn_like(out)
    grads = torch.autograd.grad(out, inputs, upstream)
    got = dict(zip(("dq", "dk", "dv", "dbias"), grads, strict=False))
    case = Case(*(x.detach() for x in inputs[:3]), upstream, bias=bias)
    case.options = {"scale": options.get("scale")}
    oracle.accept(case, {"out": out.detach(), **got})

    # And that case is what torch itself computes.
    wide = [x.detach().double() for x in inputs]
    if len(wide) == 4:
        options["attn_mask"] = wide[3]
    torch.testing.assert_close(torch_math(*wide[:3], **options), oracle.reference(case)["out"])


@pytest.mark.parametrize("shape", [(9, 8), (3, 9, 8), (2, 3, 4, 9, 8)])
def test_sdpa_of_any_rank(shape):
    q, k, v = (normal(*shape, dtype=torch.float64) for _ in range(3))
    want = torch_math(q, k, v, is_causal=True)
    with fm.enable_sdpa():
        got = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert got.shape == want.shape
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("rank", [3, 4])
def test_sdpa_mask_of_lower_rank_inputs(rank):
    """The mask broadcasts against the inputs as they came, not as we see them."""
    shape = (3, 9, 8) if rank == 3 else (2, 3, 9, 8)
    q, k, v = (normal(*shape, dtype=torch.float64) for _ in range(3))
    mask = torch.randn(3, 9, 9, dtype=torch.float64)
    want = torch_math(q, k, v, attn_mask=mask)
    with fm.enable_sdpa():
        got = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    torch.testing.assert_close(got, want)


def test_sdpa_broadcasts_batches():
    q, k, v = normal(5, 4, 9, 8), normal(1, 4, 9, 8), normal(5, 4, 9, 8)
    want = torch_math(q, k, v)
    with fm.enable_sdpa():
        got = F.scaled_dot_product_attention(q, k, v)
    torch.testing.assert_close(got, want)


def test_sdpa_rows_without_keys_are_zero():
    q, k, v = (normal(1, 1, 4, 8) for _ in range(3))
    mask = torch.ones(4, 4, dtype=torch.bool)
    mask[2] = False
    with fm.enable_sdpa():
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    assert out[0, 0, 2].eq(0).all() and out[0, 0, [0, 1, 3]].ne(0).all()
    out.sum().backward()
    assert q.grad.isfinite().all() and k.grad.isfinite().all() and v.grad.isfinite().all()


def test_sdpa_mask_and_causal_are_refused_together():
    q = normal(1, 2, 9, 8)
    with fm.enable_sdpa(), pytest.raises(RuntimeError, match="attn_mask"):
        F.scaled_dot_product_attention(q, q, q, attn_mask=torch.zeros(9, 9), is_causal=True)


def test_sdpa_without_gqa_refuses_fewer_heads():
    q, k = normal(1, 4, 9, 8), normal(1, 2, 9, 8)
    with pytest.raises(RuntimeError):
        F.scaled_dot_product_attention(q, k, k)
    with fm.enable_sdpa(), pytest.raises(RuntimeError):
        F.scaled_dot_product_attention(q, k, k)


def test_a_torch_module_runs_on_ours():
    """nn.MultiheadAttention, trained and not, gives what it gave, through our kernels."""
    module = torch.nn.MultiheadAttention(32, 4, batch_first=True)
    x = normal(3, 17, 32)
    causal = torch.nn.Transformer.generate_square_subsequent_mask(17)

    def run():
        out, _ = module(x, x, x, attn_mask=causal, need_weights=False)
        return out, *torch.autograd.grad(out.square().sum(), [x, *module.parameters()])

    want = run()
    with fm.enable_sdpa():
        assert ran_ours(run)
        got = run()
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
