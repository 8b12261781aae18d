"""Other names for attention: flash-attn's functions."""

from __future__ import annotations

import inspect

import pytest
import torch

import flashmoe_science as fm
import oracle
from flashmoe_science.compat.flash_attn import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)
from oracle import Case, same_bits


def normal(*shape, dtype=torch.float32, grad=True):
    return torch.randn(shape).to(dtype).requires_grad_(grad)


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
    packed = {
        flash_attn_qkvpacked_func: "qkv",
        flash_attn_kvpacked_func: "q kv",
        flash_attn_varlen_qkvpacked_func: "qkv cu_seqlens max_seqlen",
        flash_attn_varlen_kvpacked_func: f"q kv {lengths}",
    }
    for function, first in packed.items():
        assert positional(function) == f"{first} {tail} return_attn_probs".split()
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
    assert all(defaults_of(function) == defaults for function in packed)
    # vLLM calls it with seqused_k in place of cu_seqlens_k.
    added = dict.fromkeys(("cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "seqused_k"))
    assert defaults_of(flash_attn_varlen_func) == {**defaults, "block_table": None, **added, **ours}
    changed = {"rotary_interleaved": True, "num_splits": 0, "return_softmax_lse": False}
    kept = {name: defaults[name] for name in ("causal", "window_size", "softcap")}
    want = dict.fromkeys(names.split()[3:]) | kept | changed | ours
    assert defaults_of(flash_attn_with_kvcache) == want


# A packed function, the shapes of its tensors, and the call of the other that it stands for.
RAGGED = (torch.tensor([0, 9, 9, 21]), torch.tensor([0, 12, 20, 33]))
PACKED = {
    "qkvpacked": (
        flash_attn_qkvpacked_func,
        ((2, 21, 3, 4, 16),),
        lambda qkv, **options: flash_attn_func(*qkv.unbind(2), **options),
    ),
    "kvpacked": (
        flash_attn_kvpacked_func,
        ((2, 21, 4, 16), (2, 33, 2, 2, 16)),
        lambda q, kv, **options: flash_attn_func(q, *kv.unbind(2), **options),
    ),
    "varlen_qkvpacked": (
        lambda qkv, **options: flash_attn_varlen_qkvpacked_func(qkv, RAGGED[0], 12, **options),
        ((21, 3, 4, 16),),
        lambda qkv, **options: flash_attn_varlen_func(
            *qkv.unbind(1), RAGGED[0], RAGGED[0], 12, 12, **options
        ),
    ),
    "varlen_kvpacked": (
        lambda q, kv, **options: flash_attn_varlen_kvpacked_func(q, kv, *RAGGED, 12, 13, **options),
        ((21, 4, 16), (33, 2, 2, 16)),
        lambda q, kv, **options: flash_attn_varlen_func(
            q, *kv.unbind(1), *RAGGED, 12, 13, **options
        ),
    ),
}


@pytest.mark.parametrize("option", [*OPTIONS, "dropout"])
@pytest.mark.parametrize("name", PACKED)
def test_flash_attn_packed(name, option):
    """The same bits as of the tensors apart, and a gradient of the packed tensor."""
    function, shapes, apart = PACKED[name]
    options = {"dropout_p": 0.3} if option == "dropout" else OPTIONS[option]
    inputs = [normal(*shape) for shape in shapes]
    results = []
    for call in (function, apart):
        torch.manual_seed(1)
        out, lse, rest = call(*inputs, **options, return_attn_probs=True)
        assert rest is None
        results.append((out, lse, *torch.autograd.grad(out.sin().sum(), inputs)))
    for got, want in zip(*results, strict=True):
        assert same_bits(got, want)
    assert all(gradient.ne(0).any() for gradient in results[0][2:])
    plain = function(*inputs, **options) if option != "dropout" else results[0][0]
    assert same_bits(plain, results[0][0])


@pytest.mark.parametrize("name", PACKED)
def test_flash_attn_packed_tensors_are_not_copied(name, monkeypatch):
    function, shapes, _ = PACKED[name]
    where = flash_attn_func.__globals__
    ours = "flash_attention_varlen" if "varlen" in name else "flash_attention"
    inputs, seen = [normal(*shape) for shape in shapes], []
    original = where[ours]

    def look(q, k, v, *args, **options):
        seen.extend(x.untyped_storage().data_ptr() for x in (q, k, v))
        return original(q, k, v, *args, **options)

    monkeypatch.setitem(where, ours, look)
    function(*inputs)
    assert len(seen) == 3
    assert set(seen) == {x.untyped_storage().data_ptr() for x in inputs}


@pytest.mark.parametrize("name", PACKED)
def test_flash_attn_packed_refusals(name):
    function, shapes, _ = PACKED[name]
    inputs = [normal(*shape, grad=False) for shape in shapes]
    last = "qkv" if "qkv" in name else "kv"
    with pytest.raises(NotImplementedError, match="alibi_slopes"):
        function(*inputs, alibi_slopes=torch.rand(4))
    with pytest.raises(ValueError, match=rf"^{last} has shape .*{len(last)}, H"):
        function(*inputs[:-1], inputs[-1][..., :1, :, :])
    with pytest.raises(ValueError, match=f"^{last} has shape"):
        function(*inputs[:-1], inputs[-1][0])
    with pytest.raises(TypeError, match=f"^{last} must be a torch.Tensor"):
        function(*inputs[:-1], [inputs[-1]])


def test_flash_attn_arguments_are_refused_by_name():
    """Before torch or an op says what it makes of them."""
    q, cu = normal(1, 21, 4, 16, grad=False), torch.tensor([0, 21])
    for name, at in {"q": 0, "k": 1, "v": 2}.items():
        for function, x, rest in (
            (flash_attn_func, q, ()),
            (flash_attn_varlen_func, q[0], (cu, cu, 21, 21)),
        ):
            tensors = [x] * 3
            for bad in (None, x.tolist(), 3):
                tensors[at] = bad
                with pytest.raises(TypeError, match=rf"^{name} must be a torch.Tensor \("):
                    function(*tensors, *rest)
            for bad in (x.flatten(1), x[0, 0], torch.tensor(1.0)):
                tensors[at] = bad
                with pytest.raises(ValueError, match=rf"^{name} has shape .* must be \("):
                    function(*tensors, *rest)
    bad = {
        "cu_seqlens_q": (cu.float(), cu[None], [0, 21]),
        "cu_seqlens_k": (cu.float(), cu[None], [0, 21]),
        "max_seqlen_q": (21.0, "21"),
        "max_seqlen_k": (21.0, "21"),
    }
    for name, values in bad.items():
        for value in values:
            call = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": 21, "max_seqlen_k": 21}
            with pytest.raises((TypeError, ValueError), match=f"^{name} "):
                flash_attn_varlen_func(q[0], q[0], q[0], **{**call, name: value})
    with pytest.raises(TypeError, match=r"^max_seqlen must be an int, not 21\.0"):
        flash_attn_varlen_qkvpacked_func(normal(21, 3, 4, 16), cu, 21.0)
    with pytest.raises(TypeError, match=r"^cu_seqlens must be"):
        flash_attn_varlen_qkvpacked_func(normal(21, 3, 4, 16), None, 21)


def test_flash_attn_over_more_batches():
    """Triangle attention has (B, N, S, H, D)."""
    q = normal(2, 3, 9, 4, 8, grad=False)
    got = flash_attn_func(q, q, q)
    assert same_bits(got[1], flash_attn_func(q[1], q[1], q[1]))


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
