"""flash-attn's functions over a cache, contiguous or in pages: append, rotate and attend."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace

import pytest
import torch

import flashmoe_science as fm
import oracle
import pages
from flashmoe_science.compat import kvcache
from flashmoe_science.compat.flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache
from oracle import Case, same_bits

REFUSED = (NotImplementedError, RuntimeError, ValueError, TypeError)


def normal(*shape, dtype=torch.float32, grad=True):
    return torch.randn(shape).to(dtype).requires_grad_(grad)


# flash_attn_varlen_func


def paged_call(seed: int = 0, **changes):
    """The arguments of flash_attention_paged, and the same as flash_attn_varlen_func has them."""
    problem = pages.Problem(
        seed=seed,
        dtype="bfloat16",
        float8=False,
        heads_q=6,
        heads_k=2,
        head_dim=16,
        head_dim_v=16,
        page=8,
        lengths=((1, 20), (7, 33), (0, 4), (5, 5)),
    )
    made = pages.build(replace(problem, **changes))
    x = made.tensors
    call = {"q": x["q"], "k": x["k_cache"], "v": x["v_cache"], "block_table": x["block_table"]}
    call |= {name: made.options[name] for name in ("cu_seqlens_q", "max_seqlen_q", "max_seqlen_k")}
    return made, {**call, "seqused_k": x["seq_lens"], "causal": True}


@pytest.mark.parametrize("given", ["seqused_k", "cu_seqlens_k"])
def test_varlen_over_pages(given):
    made, call = paged_call(sinks="bfloat16", window=(9, -1), softcap=5.0)
    if given == "cu_seqlens_k":
        del call["seqused_k"]
        call["cu_seqlens_k"] = torch.nn.functional.pad(made.tensors["seq_lens"].cumsum(0), (1, 0))
    options = {"window_size": (9, -1), "softcap": 5.0, "s_aux": made.options["sinks"]}
    out, lse, rest = flash_attn_varlen_func(**call, **options, return_attn_probs=True)
    want = pages.ours(made)
    assert same_bits(out, want["out"]) and same_bits(lse.mT, want["lse"]) and rest is None
    assert same_bits(out, flash_attn_varlen_func(**call, **options))


@pytest.mark.parametrize("scales", ["()", "(1,)", "(Hk,)"])
def test_varlen_scales_are_those_of_a_batch_or_of_heads(scales):
    """vLLM expands one scale, or one for each head, to (batch, heads)."""
    made, call = paged_call(float8=True, scales=scales)
    k_scale, v_scale = made.options["k_scale"], made.options["v_scale"]
    want = pages.ours(made)["out"]
    plain = {"k_descale": k_scale, "v_descale": v_scale}
    assert same_bits(flash_attn_varlen_func(**call, **plain), want)
    wide = {name: x.expand(4, 2) for name, x in plain.items()}
    assert same_bits(flash_attn_varlen_func(**call, **wide), want)
    with pytest.raises(NotImplementedError, match=r"k_descale.*each sequence"):
        flash_attn_varlen_func(**call, **{**wide, "k_descale": wide["k_descale"].contiguous()})
    with pytest.raises(ValueError, match="v_descale has shape"):
        flash_attn_varlen_func(**call, **{**plain, "v_descale": torch.ones(3, 2)})


def test_varlen_sinks():
    q, k, v = normal(21, 4, 16), normal(33, 2, 16), normal(33, 2, 16)
    cu_q = torch.tensor([0, 9, 9, 21], dtype=torch.int32)
    cu_k = torch.tensor([0, 12, 20, 33], dtype=torch.int32)
    sinks = normal(4)
    call = (q, k, v, cu_q, cu_k, 12, 13)
    out = flash_attn_varlen_func(*call, s_aux=sinks)
    want = fm.flash_attention_varlen(*call, sinks=sinks)
    assert same_bits(out, want)
    assert torch.autograd.grad(out.sum(), sinks)[0].abs().sum() > 0


@pytest.mark.parametrize("name", ["seqused_k", "k_descale", "v_descale"])
def test_varlen_arguments_of_pages_are_refused_without_any(name):
    q, cu = normal(21, 4, 16, grad=False), torch.tensor([0, 21])
    with pytest.raises(NotImplementedError, match=name):
        flash_attn_varlen_func(q, q, q, cu, cu, 21, 21, **{name: torch.tensor([1.0])})


@pytest.mark.parametrize("name", ["cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"])
def test_varlen_lengths_are_needed_without_pages(name):
    q, cu = normal(21, 4, 16, grad=False), torch.tensor([0, 21])
    lengths = {"cu_seqlens_k": cu, "max_seqlen_q": 21, "max_seqlen_k": 21, name: None}
    with pytest.raises(TypeError, match=name):
        flash_attn_varlen_func(q, q, q, cu, **lengths)


def test_varlen_over_pages_needs_lengths():
    _, call = paged_call()
    del call["seqused_k"]
    with pytest.raises(TypeError, match="seqused_k"):
        flash_attn_varlen_func(**call)


# flash_attn_with_kvcache


def rotated(x, positions, cos, sin, interleaved):
    """In float64, one pair after the other."""
    x, pairs = x.double().clone(), cos.shape[1]
    for b, i in itertools.product(range(x.shape[0]), range(x.shape[1])):
        at = int(positions[b, i])
        for r in range(pairs):
            first, second = (2 * r, 2 * r + 1) if interleaved else (r, r + pairs)
            c, s = cos[at, r].double(), sin[at, r].double()
            a, b_ = x[b, i, :, first].clone(), x[b, i, :, second].clone()
            x[b, i, :, first], x[b, i, :, second] = a * c - b_ * s, a * s + b_ * c
    return x


@dataclass
class Cache:
    """A call of flash_attn_with_kvcache, and the keys that each of its sequences has after it."""

    call: dict
    keys: list[torch.Tensor]
    values: list[torch.Tensor]


def make_cache(
    kind="contiguous",
    new=0,
    length=1,
    rotary=None,
    dtype=torch.float32,
    causal=True,
    window=(-1, -1),
) -> Cache:
    batch, capacity, heads_q, heads_k, dim, page = 3, 24, 6, 2, 16, 8
    before = [10, 0, 17]
    leftpad = [3, 0, 8] if kind == "leftpad" else [0, 0, 0]
    rows = [2, 0, 4] if kind == "batch_idx" else [0, 1, 2]
    q = torch.randn(batch, length, heads_q, dim).to(dtype)
    flat = [torch.randn(batch, capacity, heads_k, dim).to(dtype) for _ in range(2)]
    call = {"q": q, "causal": causal, "window_size": window}
    call["cache_seqlens"] = torch.tensor(before, dtype=torch.int32)
    if kind == "paged":
        order = torch.randperm(batch * capacity // page)
        call["block_table"] = order.view(batch, -1).int()
        caches = []
        for x in flat:
            cache = torch.empty(len(order), page, heads_k, dim, dtype=dtype)
            cache[order] = x.reshape(len(order), page, heads_k, dim)
            caches.append(cache)
    else:
        caches = [torch.full((5, capacity, heads_k, dim), math.nan, dtype=dtype) for _ in flat]
        for cache, x in zip(caches, flat, strict=True):
            cache[rows] = x
        if kind == "batch_idx":
            call["cache_batch_idx"] = torch.tensor(rows, dtype=torch.int32)
        if kind == "leftpad":
            call["cache_leftpad"] = torch.tensor(leftpad, dtype=torch.int32)
    for cache in caches:
        cache.requires_grad_(False)
    call |= {"k_cache": caches[0], "v_cache": caches[1]}
    keys, values = ([x[b, leftpad[b] : before[b]] for b in range(batch)] for x in flat)
    if new:
        k, v = (torch.randn(batch, new, heads_k, dim).to(dtype) for _ in range(2))
        call |= {"k": k, "v": v}
        start = torch.tensor(before)[:, None]
        if rotary is not None:
            angles = torch.rand(capacity, rotary[0]) * 6
            call |= {"rotary_cos": angles.cos().to(dtype), "rotary_sin": angles.sin().to(dtype)}
            call["rotary_interleaved"] = rotary[1]
            tables = (call["rotary_cos"], call["rotary_sin"], rotary[1])
            k = rotated(k, start + torch.arange(new), *tables).to(dtype)
            moves = causal or window != (-1, -1)
            at = start + (torch.arange(length) if moves else torch.zeros(length, dtype=torch.int64))
            call["turned"] = rotated(q, at, *tables).to(dtype)
        keys = [torch.cat((old, x)) for old, x in zip(keys, k, strict=True)]
        values = [torch.cat((old, x)) for old, x in zip(values, v, strict=True)]
    return Cache(call, keys, values)


def accept_cache(made: Cache, **options) -> None:
    """Against the oracle; and the cache holds the new keys and nothing else has changed."""
    call = dict(made.call)
    q = call.pop("turned", call["q"])
    out, lse = flash_attn_with_kvcache(**call, **options, return_softmax_lse=True)
    batch, length = q.shape[:2]
    cu_q = torch.arange(batch + 1) * length
    cu_k = torch.tensor([0, *(len(k) for k in made.keys)]).cumsum(0)
    names = {"softmax_scale": "scale", "window_size": "window"}
    scores = {names.get(n, n): call[n] for n in ("causal", "window_size")}
    scores |= {names.get(n, n): x for n, x in options.items() if n in ("softmax_scale", "softcap")}
    case = Case(
        q.flatten(0, 1),
        torch.cat(made.keys),
        torch.cat(made.values),
        torch.zeros_like(q.flatten(0, 1)),
        sinks=options.get("s_aux"),
        cu_q=cu_q,
        cu_k=cu_k,
        options=scores,
        needs="",
    )
    assert lse.shape == (batch, q.shape[2], length)
    got = {"out": out.flatten(0, 1), "lse": lse.mT.flatten(0, 1)}
    oracle.accept(case, got)


KINDS = ["contiguous", "paged", "batch_idx", "leftpad"]


@pytest.mark.parametrize("new, length", [(0, 1), (0, 4), (1, 1), (5, 5), (3, 7), (6, 0)])
@pytest.mark.parametrize("kind", KINDS)
def test_kvcache(kind, new, length):
    accept_cache(make_cache(kind, new, length))
    accept_cache(make_cache(kind, new, length, causal=False))
    accept_cache(make_cache(kind, new, length, causal=False, window=(4, 1)))


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("pairs", [8, 3, 1])
@pytest.mark.parametrize("kind", ["contiguous", "paged", "leftpad"])
def test_kvcache_rotary(kind, pairs, interleaved):
    """Queries move with their positions when causal or local; else all are at the first."""
    for options in ({}, {"causal": False}, {"causal": False, "window": (3, -1)}):
        accept_cache(make_cache(kind, 4, 4, rotary=(pairs, interleaved), **options))


def test_kvcache_options():
    sinks = torch.randn(6)
    for kind in ("contiguous", "paged"):
        for options in ({"softcap": 2.0}, {"softmax_scale": 0.7}, {"s_aux": sinks}):
            accept_cache(make_cache(kind, 2, 3), **options)


@pytest.mark.parametrize("kind", KINDS)
def test_kvcache_writes_new_keys_and_nothing_else(kind):
    made = make_cache(kind, new=3)
    before = [made.call[name].clone() for name in ("k_cache", "v_cache")]
    flash_attn_with_kvcache(**made.call)
    table = made.call.get("block_table")
    rows = made.call.get("cache_batch_idx", torch.arange(3)).tolist()
    for name, want, new in zip(("k_cache", "v_cache"), before, ("k", "v"), strict=True):
        for b, start in enumerate(made.call["cache_seqlens"].tolist()):
            for i in range(3):
                if table is None:
                    want[rows[b], start + i] = made.call[new][b, i]
                else:
                    want[table[b, (start + i) // 8], (start + i) % 8] = made.call[new][b, i]
        assert same_bits(made.call[name], want)


def test_kvcache_num_splits_change_nothing():
    made = make_cache("paged", length=3)
    want = flash_attn_with_kvcache(**made.call)
    for splits in (1, 2, 16):
        assert same_bits(flash_attn_with_kvcache(**made.call, num_splits=splits), want)


def test_kvcache_lengths_as_a_number_and_by_default():
    made = make_cache()
    call = {name: x for name, x in made.call.items() if name != "cache_seqlens"}
    call |= {name: call[name][:3] for name in ("k_cache", "v_cache")}
    whole = flash_attn_with_kvcache(**call)
    assert same_bits(flash_attn_with_kvcache(**call, cache_seqlens=24), whole)
    lens = torch.full((3,), 24)
    assert same_bits(flash_attn_with_kvcache(**call, cache_seqlens=lens), whole)
    assert not same_bits(flash_attn_with_kvcache(**call, cache_seqlens=23), whole)


def test_kvcache_padding_has_no_keys():
    """transformers states a length of -1 for a request that is only padding."""
    made = make_cache("paged", new=1)
    made.call["cache_seqlens"][1] = -1
    before = made.call["k_cache"].clone()
    out = flash_attn_with_kvcache(**made.call)
    assert out[1].eq(0).all() and out[[0, 2]].ne(0).all()
    assert (made.call["k_cache"] != before).flatten(1).any(1).sum() == 2  # blocks


def test_kvcache_in_fp8():
    made = make_cache("paged", new=2, length=2, dtype=torch.bfloat16)
    scale = torch.tensor([0.5, 0.25])
    call = dict(made.call)
    for name in ("k_cache", "v_cache"):
        call[name] = (call[name].float() / scale[:, None]).to(torch.float8_e4m3fn)
    out = flash_attn_with_kvcache(**call, k_descale=scale.expand(3, 2), v_descale=scale)

    def through_fp8(parts):
        return [
            ((x.float() / scale[:, None]).to(torch.float8_e4m3fn).float() * scale[:, None])
            for x in parts
        ]

    exact = Cache(made.call, through_fp8(made.keys), through_fp8(made.values))
    want = [
        fm.flash_attention(*(x.double().transpose(0, 1)[None] for x in (q, k, v)), causal=True)[
            0
        ].transpose(0, 1)
        for q, k, v in zip(call["q"], exact.keys, exact.values, strict=True)
    ]
    torch.testing.assert_close(out.double(), torch.stack(want), rtol=2e-2, atol=2e-2)


KV_REFUSED = {
    "k without v": ({"v": None}, "k and v"),
    "no place for k": ({"cache_seqlens": None}, "cache_seqlens"),
    "cosines alone": ({"rotary_cos": torch.ones(24, 4)}, "rotary"),
    "angles without k": (
        {"k": None, "v": None, "rotary_cos": torch.ones(24, 4), "rotary_sin": torch.ones(24, 4)},
        "rotary_cos.*without k",
    ),
    "too few angles": (
        {"rotary_cos": torch.ones(23, 4), "rotary_sin": torch.ones(23, 4)},
        "rotary_cos has 23 positions",
    ),
    "angles for more than there is": (
        {"rotary_cos": torch.ones(24, 9), "rotary_sin": torch.ones(24, 9)},
        "at most 8 pairs",
    ),
    "two ways to find keys": (
        {"block_table": torch.zeros(3, 1, dtype=torch.int32), "cache_batch_idx": torch.arange(3)},
        "cache_batch_idx and block_table",
    ),
    "pages and padding": (
        {"block_table": torch.zeros(3, 1, dtype=torch.int32), "cache_leftpad": torch.arange(3)},
        "cache_leftpad and block_table",
    ),
    "more sequences than caches": ({"q": torch.randn(6, 1, 6, 16)}, "6 sequences"),
    "q of rank 3": ({"q": torch.randn(3, 6, 16)}, "q has shape"),
    "a scale for no fp8": ({"k_descale": torch.tensor(0.5)}, "k_scale"),
    "alibi": ({"alibi_slopes": torch.ones(6)}, "alibi_slopes"),
    "fp8 queries": ({"q_descale": torch.ones(3, 2)}, "q_descale"),
}


@pytest.mark.parametrize("name", KV_REFUSED)
def test_kvcache_refusals(name):
    changes, pattern = KV_REFUSED[name]
    made = make_cache(new=1)
    with pytest.raises(REFUSED, match=pattern):
        flash_attn_with_kvcache(**{**made.call, **changes})


CACHES = ("k_cache", "v_cache")
# What is refused, and how its message begins; every one before anything is written.
FROM_0 = r"it must be from 0 to"
UNWRITTEN = {
    "s_aux of another length": ({"s_aux": torch.randn(5)}, "sinks has shape"),
    "s_aux as a list": ({"s_aux": [0.0] * 6}, "s_aux must be a torch.Tensor"),
    "s_aux of rank 2": ({"s_aux": torch.randn(1, 6)}, "s_aux has shape"),
    "negative window": ({"window_size": (-5, 0)}, "window is"),
    "window of one number": ({"window_size": (1,)}, "window must be a pair"),
    "softcap": ({"softcap": -1.0}, "softcap is"),
    "scale": ({"softmax_scale": math.nan}, "scale is"),
    "query heads": ({"q": torch.randn(3, 1, 5, 16)}, "query has 5 heads"),
    "head dim": ({"q": torch.randn(3, 1, 6, 8)}, "k_cache has head dim 16"),
    "dtype": ({"q": torch.randn(3, 1, 6, 16).double()}, "k_cache is"),
    "q as a list": ({"q": [1.0]}, "q must be a torch.Tensor"),
    "k_cache of rank 3": ({"k_cache": torch.randn(3, 24, 32)}, "k_cache has shape"),
    "v_cache as None": ({"v_cache": None}, "v_cache must be a torch.Tensor"),
    "k of rank 3": ({"k": torch.randn(3, 2, 16)}, "k has shape .3, 2, 16.; it must be .B, Snew"),
    "k of other sequences": ({"k": torch.randn(2, 3, 2, 16)}, r"k has shape.*\(3, 3, 2, 16\) here"),
    "k of other heads": ({"k": torch.randn(3, 3, 1, 16)}, "k has shape"),
    "v of other tokens": ({"v": torch.randn(3, 1, 2, 16)}, r"v has shape.*\(3, 3, 2, 16\) here"),
    "float lengths": ({"cache_seqlens": torch.ones(3)}, "cache_seqlens is torch.float32"),
    "a float length": ({"cache_seqlens": 2.0}, "cache_seqlens must be an int"),
    "other lengths": ({"cache_seqlens": torch.arange(2)}, r"cache_seqlens has shape.*\(3,\) here"),
    "a negative length": (
        {"cache_seqlens": torch.tensor([3, -1, 2])},
        rf"cache_seqlens\[1\] is -1; {FROM_0} 21",
    ),
    "a length of -1 for all": ({"cache_seqlens": -1}, r"cache_seqlens\[0\] is -1"),
    "no room": (
        {"cache_seqlens": torch.tensor([3, 4, 22])},
        rf"cache_seqlens\[2\] is 22; {FROM_0} 21: the cache has room for 24 keys, 3 are new",
    ),
    "no room at all": ({"cache_seqlens": 24}, r"cache_seqlens\[0\] is 24"),
    "negative padding": (
        {"cache_leftpad": torch.tensor([0, -1, 0])},
        rf"cache_leftpad\[1\] is -1; {FROM_0} 3, the keys",
    ),
    "more padding than keys": (
        {"cache_leftpad": torch.tensor([0, 0, 21])},
        rf"cache_leftpad\[2\] is 21; {FROM_0} 20",
    ),
    "padding in float": ({"cache_leftpad": torch.zeros(3)}, "cache_leftpad is torch.float32"),
    "padding of others": ({"cache_leftpad": torch.arange(2)}, "cache_leftpad has shape"),
    "a cache there is not": (
        {"cache_batch_idx": torch.tensor([0, 5, 2])},
        rf"cache_batch_idx\[1\] is 5; {FROM_0} 4",
    ),
    "a negative cache": ({"cache_batch_idx": torch.tensor([0, 1, -1])}, r"cache_batch_idx\[2\]"),
    "caches of others": ({"cache_batch_idx": torch.arange(4)}, "cache_batch_idx has shape"),
}
UNWRITTEN_IN_PAGES = {
    "a block there is not": ((0, 1, 9), rf"block_table\[0, 1\] is 9; {FROM_0} 8"),
    "a negative block": ((1, 0, -1), r"block_table\[1, 0\] is -1"),
    "a block of old keys": ((2, 0, 9), r"block_table\[2, 0\] is 9"),
}


def refused_unwritten(call, pattern):
    before = [call[name].clone() if call[name] is not None else None for name in CACHES]
    with pytest.raises(REFUSED, match=f"^{pattern}"):
        flash_attn_with_kvcache(**call)
    for name, want in zip(CACHES, before, strict=True):
        assert want is None or same_bits(call[name], want)


@pytest.mark.parametrize("name", UNWRITTEN)
def test_kvcache_refuses_before_it_writes(name):
    changes, pattern = UNWRITTEN[name]
    made = make_cache(new=3)
    refused_unwritten({**made.call, **changes}, pattern)


@pytest.mark.parametrize("name", UNWRITTEN_IN_PAGES)
def test_kvcache_refuses_blocks_before_it_writes(name):
    (i, j, block), pattern = UNWRITTEN_IN_PAGES[name]
    call = make_cache("paged", new=3).call
    call["block_table"][i, j] = block
    refused_unwritten(call, pattern)


def test_kvcache_blocks_that_nobody_looks_at_may_be_anything():
    """Those past the last key, and those before the window."""
    made = make_cache("paged", new=3, length=2, window=(4, 0))
    want = flash_attn_with_kvcache(**made.call)
    made.call["block_table"][0, 2] = 9
    made.call["block_table"][1, 1:] = -1
    made.call["block_table"][2, 0] = -7
    assert same_bits(flash_attn_with_kvcache(**made.call), want)
    accept_cache(made)


def test_kvcache_refuses_tables_of_another_shape():
    call = make_cache("paged", new=1).call
    for shape in ((3,), (2, 3), (3, 3, 1)):
        bad = {**call, "block_table": torch.zeros(shape, dtype=torch.int32)}
        refused_unwritten(bad, "block_table has shape")
    refused_unwritten({**call, "block_table": torch.zeros(3, 3)}, "block_table is torch.float32")
    refused_unwritten({**call, "block_table": [[0]] * 3}, "block_table must be a torch.Tensor")


@pytest.mark.parametrize("leftpad, pattern", [(-1, FROM_0), (3, rf"{FROM_0} 2")])
def test_kvcache_padding_is_within_its_sequence(leftpad, pattern):
    """Padding of -1 would see the last row of the cache before it."""
    call = make_cache("leftpad").call
    call["cache_seqlens"] = 2
    call["cache_leftpad"] = torch.tensor([0, leftpad, 0])
    refused_unwritten(call, rf"cache_leftpad\[1\] is {leftpad}; {pattern}")
    call["cache_leftpad"] = torch.tensor([0, 2, 0])
    out = flash_attn_with_kvcache(**call)
    assert out[1].eq(0).all() and out[[0, 2]].ne(0).all()


def test_kvcache_new_keys_may_be_padding():
    """A padded prompt in an empty cache."""
    made = make_cache("leftpad", new=6, length=6)
    made.call |= {"cache_seqlens": 0, "cache_leftpad": torch.tensor([4, 0, 6])}
    out = flash_attn_with_kvcache(**made.call)
    for b, pad in enumerate((4, 0, 6)):
        q, k, v = (made.call[name][b : b + 1, pad:] for name in "qkv")
        want = fm.flash_attention(*(x.transpose(1, 2) for x in (q, k, v)), causal=True)
        torch.testing.assert_close(out[b : b + 1, pad:], want.transpose(1, 2))
        assert out[b, :pad].eq(0).all()


def test_kvcache_without_new_keys_names_its_lengths():
    call = make_cache().call
    for value in (-1, 25):
        call["cache_seqlens"] = torch.tensor([3, value, 4])
        with pytest.raises(ValueError, match=rf"cache_seqlens\[1\] is {value}; {FROM_0} 24"):
            flash_attn_with_kvcache(**call)


# Where values cannot be read, as on CUDA.

UNREADABLE = {
    "one of too few": (1, {"cache_seqlens": [10, -2, 17]}),
    "too few": (3, {"cache_seqlens": [10, -1, 17]}),
    "far too few": (3, {"cache_seqlens": [10, -(2**62), 17]}),
    "one too many": (1, {"cache_seqlens": [10, 24, 17]}),
    "too many": (3, {"cache_seqlens": [10, 22, 17]}),
    "far too many": (3, {"cache_seqlens": [10, 2**63 - 2, 17]}),
    "negative padding": (3, {"cache_leftpad": [0, -1, 0]}),
    "negative padding of old keys": (0, {"cache_leftpad": [0, -1, 0]}),
    "more padding than keys": (1, {"cache_leftpad": [0, 2, 0]}),
    "far more padding than keys": (0, {"cache_leftpad": [0, 2**63 - 1, 0]}),
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_kvcache_of_impossible_lengths_that_only_the_device_knows(name, monkeypatch):
    """Attention is given -1 keys, which it makes NaN, and of that sequence nothing is written."""
    new, changes = UNREADABLE[name]
    call = make_cache(new=new).call
    good = make_cache(new=new).call
    call |= {name: torch.tensor(values) for name, values in changes.items()}
    given = {}

    def attend(q, k_cache, v_cache, table, seq_lens, **options):
        given["seq_lens"] = seq_lens
        return q, q[..., 0]

    monkeypatch.setattr(kvcache, "readable", lambda tensor: False)
    monkeypatch.setattr(kvcache, "flash_attention_paged", attend)
    before = call["k_cache"].clone()
    flash_attn_with_kvcache(**call)
    others = good["cache_seqlens"][[0, 2]] + new
    assert given["seq_lens"][[0, 2]].equal(others)
    impossible = given["seq_lens"][1]
    assert impossible < 0 or impossible > 24
    assert same_bits(call["k_cache"][1], before[1])
    changed = (call["k_cache"] != before).any(-1).any(-1)
    assert new == 0 or changed[[0, 2], [10, 17]].all()


def test_kvcache_of_a_negative_cache_that_only_the_device_knows(monkeypatch):
    """No row of another cache comes into its table, whatever the padding."""
    call = make_cache("leftpad").call
    call["cache_batch_idx"] = torch.tensor([0, -1, 2])
    call["cache_leftpad"] = torch.tensor([3, 7, 8])
    given = {}

    def attend(q, k_cache, v_cache, table, seq_lens, **options):
        given["table"] = table
        return q, q[..., 0]

    monkeypatch.setattr(kvcache, "readable", lambda tensor: False)
    monkeypatch.setattr(kvcache, "flash_attention_paged", attend)
    flash_attn_with_kvcache(**call)
    assert given["table"][1].lt(0).all() and given["table"][[0, 2]].ge(0).all()


def make_cache_again(kind):
    torch.manual_seed(0)
    return make_cache(kind, new=3, length=2)


@pytest.mark.parametrize("kind", KINDS)
def test_kvcache_compiled(kind):
    made, same = (make_cache_again(kind) for _ in range(2))
    want = flash_attn_with_kvcache(**made.call)
    torch.compiler.reset()
    compiled = torch.compile(flash_attn_with_kvcache, fullgraph=True, backend="aot_eager")
    assert same_bits(compiled(**same.call), want)
    for name in CACHES:
        assert same_bits(same.call[name], made.call[name])
    torch.compiler.reset()


def test_kvcache_has_no_gradient():
    made = make_cache(new=1)
    made.call["q"].requires_grad_()
    before = made.call["k_cache"].clone()
    with pytest.raises(NotImplementedError, match="no gradient"):
        flash_attn_with_kvcache(**made.call)
    assert same_bits(made.call["k_cache"], before)  # refused before anything was written


def test_kvcache_leftpad_needs_sequences_one_after_the_other():
    made = make_cache("leftpad")
    for name in ("k_cache", "v_cache"):
        made.call[name] = made.call[name].transpose(1, 2).contiguous().transpose(1, 2)
    with pytest.raises(NotImplementedError, match="cache_leftpad"):
        flash_attn_with_kvcache(**made.call)
