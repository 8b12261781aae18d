"""Writing to a cache: every row where it belongs, and no other byte."""

from __future__ import annotations

import inspect
import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import flashmoe_science as fm
import pages
from pages import FLOAT8
from problems import DTYPES, laid_out

ERRORS = (RuntimeError, TypeError, ValueError)
APPEND = torch.ops.flashmoe.cache_append.default
LARGEST = 448.0  # of e4m3


def stored(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """What a cache of fp8 holds of x: divided in float32, held within the range, rounded once."""
    held = (x.float() / scale[:, None]).clamp(-LARGEST, LARGEST)  # clamp keeps NaN
    return held.to(FLOAT8)


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8)


def expected(k, cache, slots, scale=None) -> torch.Tensor:
    """The cache with one token after the other written to it."""
    cache, page = cache.clone(), cache.shape[1]
    for t, slot in enumerate(slots.tolist()):
        if 0 <= slot < cache.shape[0] * page:
            row = k[t] if scale is None else stored(k[t], scale)
            cache[slot // page, slot % page] = row
    return cache


@st.composite
def problems(draw):
    pick = lambda *options: draw(st.sampled_from(options))  # noqa: E731
    dtype = pick(*DTYPES)
    float8 = draw(st.booleans())
    blocks, page = draw(st.integers(1, 5)), pick(1, 2, 5, 16)
    slots = draw(st.lists(st.integers(0, blocks * page - 1), unique=True, max_size=30))
    for _ in range(draw(st.integers(0, 4))):
        slots.insert(draw(st.integers(0, len(slots))), pick(-1, -7, blocks * page, 2**31 - 1))
    return {
        "seed": draw(st.integers(0, 2**31)),
        "dtype": dtype,
        "float8": float8,
        "shape": (blocks, page, draw(st.integers(1, 5))),
        "dims": (pick(8, 1, 3, 17, 64, 128), pick(8, 1, 5, 64, 128)),
        "layout": pick(*pages.CACHE_LAYOUTS),
        "layouts": (pick("contiguous", "swapped", "padded", "sliced", "expanded"),) * 2,
        "slots": tuple(slots),
        "integers": pick("int32", "int64"),
        "scales": pick(None, "()", "(1,)", "(Hk,)", "number") if float8 else None,
        "large": draw(st.booleans()),
    }


@settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(problem=problems())
def test_random_problems(problem):
    generator = torch.Generator().manual_seed(problem["seed"])
    slots = torch.tensor(problem["slots"], dtype=getattr(torch, problem["integers"]))
    *_, heads = shape = problem["shape"]
    dtype = DTYPES[problem["dtype"]]
    values, caches, scales, wanted = [], [], {}, []
    made = pages.empty_caches(
        problem["layout"], *shape, problem["dims"], FLOAT8 if problem["float8"] else dtype
    )
    for i, (name, dim) in enumerate(zip(("k_scale", "v_scale"), problem["dims"], strict=True)):
        x = torch.randn(len(slots), heads, dim, generator=generator)
        x = (x * (300 if problem["large"] else 1)).to(dtype)
        values.append(laid_out(x, problem["layouts"][i], generator))
        given_scale, numbers = pages.scales_of(problem["scales"], heads, generator)
        if given_scale is not None:
            scales[name] = given_scale
        caches.append(made[i])
        wanted.append(expected(values[i], made[i], slots, numbers if problem["float8"] else None))
    fm.kv_cache_append(*values, *caches, slots, **scales)
    for cache, want in zip(caches, wanted, strict=True):
        assert torch.equal(bits(cache), bits(want)), problem


def call(**changes):
    tensors = {
        "k": torch.randn(3, 2, 8),
        "v": torch.randn(3, 2, 5),
        "k_cache": torch.zeros(4, 4, 2, 8),
        "v_cache": torch.zeros(4, 4, 2, 5),
        "slot_mapping": torch.tensor([6, -1, 11]),
    }
    return {**tensors, **changes}


def float8(**changes):
    tensors = call()
    caches = {name: tensors[name].to(FLOAT8) for name in ("k_cache", "v_cache")}
    return {**tensors, **caches, **changes}


def test_rows_go_to_their_slots_and_nothing_else_changes():
    given_call = call()
    assert fm.kv_cache_append(**given_call) is None
    k, cache = given_call["k"], given_call["k_cache"]
    assert torch.equal(cache[1, 2], k[0]) and torch.equal(cache[2, 3], k[2])
    assert cache.count_nonzero() == 2 * 2 * 8
    assert given_call["v_cache"].count_nonzero() == 2 * 2 * 5


def test_the_signature_is_the_documented_one():
    parameters = inspect.signature(fm.kv_cache_append).parameters
    scales = ["k_scale", "v_scale"]
    assert list(parameters) == ["k", "v", "k_cache", "v_cache", "slot_mapping", *scales]
    assert [n for n, p in parameters.items() if p.kind is p.KEYWORD_ONLY] == scales


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_fp8_rounds_to_nearest_even_and_saturates(dtype):
    """Every number of e4m3, what lies between two of them, and what lies beyond the last."""
    exact = torch.arange(0, 0x7F, dtype=torch.uint8).view(FLOAT8).float()
    between = (exact[1:] + exact[:-1]) / 2
    beyond = torch.tensor([449.0, 464.0, 480.0, 1e4, math.inf])
    numbers = torch.cat((exact, between, between * 1.01, between * 0.99, beyond))
    numbers = torch.cat((numbers, -numbers, torch.tensor([math.nan]))).to(dtype)
    k = numbers.view(-1, 1, 1)
    caches = [torch.zeros(len(k), 1, 1, 1).to(FLOAT8) for _ in range(2)]
    slots = torch.arange(len(k))
    fm.kv_cache_append(k, k, *caches, slots)
    got = caches[0].flatten().float()
    held = numbers.double().clamp(-LARGEST, LARGEST)
    assert got[:-1].isfinite().all() and got[-1].isnan()
    assert torch.equal(bits(caches[0].flatten()), bits(held.float().to(FLOAT8)))
    assert got[:-1].max() == LARGEST and got[:-1].min() == -LARGEST


def test_attention_reads_what_append_wrote():
    """Token by token, with fp8 scales, as an engine decodes."""
    generator = torch.Generator().manual_seed(0)
    k, v = (torch.randn(9, 2, 8, generator=generator).bfloat16() for _ in range(2))
    q = torch.randn(9, 4, 8, generator=generator).bfloat16()
    scales = {"k_scale": torch.tensor([0.5, 0.75]), "v_scale": torch.tensor(0.3)}
    caches = [torch.full((5, 2, 2, 8), math.nan).to(FLOAT8) for _ in range(2)]
    table = torch.tensor([[3, 0, 4, 1, 2]])
    by_token = []
    for t in range(9):
        slot = table[0, t // 2] * 2 + t % 2
        fm.kv_cache_append(k[t : t + 1], v[t : t + 1], *caches, slot[None], **scales)
        lens = torch.tensor([t + 1])
        by_token.append(fm.flash_attention_paged(q[t : t + 1], *caches, table, lens, **scales))
    dequantized = [
        stored(x, s).double() * s[:, None].double()
        for x, s in ((k, scales["k_scale"]), (v, scales["v_scale"].expand(2)))
    ]
    want = fm.flash_attention(
        *(x.double().transpose(0, 1)[None] for x in (q, *dequantized)), causal=True
    )
    want = want[0].transpose(0, 1)
    torch.testing.assert_close(torch.cat(by_token).double(), want, rtol=1e-2, atol=1e-2)


BAD = {
    "k is a list": (call(k=[1.0]), r"\bk\b"),
    "slots are a list": (call(slot_mapping=[1]), "slot_mapping"),
    "k of rank 4": (call(k=torch.randn(1, 3, 2, 8)), "key"),
    "tokens": (call(v=torch.randn(4, 2, 5)), "value"),
    "heads": (call(k=torch.randn(3, 3, 8)), "key"),
    "head dim": (call(v=torch.randn(3, 2, 6)), "value"),
    "slots": (call(slot_mapping=torch.tensor([1, 2])), "slot_mapping"),
    "slots as floats": (call(slot_mapping=torch.tensor([1.0, 2.0, 3.0])), "slot_mapping"),
    "dtypes of k and v": (call(v=torch.randn(3, 2, 5).double()), "value"),
    "dtype of the cache": (call(k_cache=torch.zeros(4, 4, 2, 8).half()), "cache"),
    "one cache in fp8": (call(k_cache=float8()["k_cache"]), "v_cache"),
    "bytes": (
        call(k_cache=torch.zeros(4, 4, 2, 8, dtype=torch.uint8)),
        r"k_cache.*\.view\(torch\.float8_e4m3fn\)",
    ),
    "overlapping cache": (call(k_cache=torch.zeros(1, 4, 2, 8).expand(4, 4, 2, 8)), "k_cache"),
    "pages": (call(v_cache=torch.zeros(4, 5, 2, 5)), "v_cache"),
    "a scale for no fp8": (call(k_scale=0.5), "k_scale"),
    "a scale of 0": (float8(k_scale=0.0), "k_scale is 0"),
    "a negative scale": (float8(v_scale=-1.0), "v_scale is -1"),
    "scales of other heads": (float8(v_scale=torch.ones(3)), "v_scale"),
    "elsewhere": (call(k_cache=torch.zeros(4, 4, 2, 8, device="meta")), "k_cache"),
    "scale elsewhere": (float8(k_scale=torch.ones((), device="meta")), "k_scale"),
}


@pytest.mark.parametrize("name", BAD)
def test_errors_name_the_argument(name):
    bad, pattern = BAD[name]
    with pytest.raises(ERRORS, match=pattern):
        fm.kv_cache_append(**bad)


@pytest.mark.parametrize("name", ["k", "v"])
def test_a_gradient_is_refused(name):
    given_call = call()
    given_call[name].requires_grad_()
    with pytest.raises(NotImplementedError, match=rf"no gradient, and {name} would need one"):
        fm.kv_cache_append(**given_call)
    assert not given_call["k_cache"].any()
    with torch.no_grad():
        fm.kv_cache_append(**given_call)
    assert given_call["k_cache"].any()


@pytest.mark.parametrize("name", ["k_cache", "v_cache"])
def test_a_cache_with_a_gradient_is_refused(name):
    given_call = call()
    given_call[name].requires_grad_()
    for mode in (torch.enable_grad(), torch.no_grad()):
        with mode, pytest.raises(NotImplementedError, match=f"writes to {name}"):
            fm.kv_cache_append(**given_call)


def test_a_write_is_noticed_by_autograd():
    given_call = call()
    weight = torch.randn(4, 4, 2, 8, requires_grad=True)
    loss = (weight * given_call["k_cache"]).sum()
    fm.kv_cache_append(**given_call)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_negated_view_is_refused():
    cache = torch._neg_view(torch.zeros(4, 4, 2, 8))
    with pytest.raises(ValueError, match="k_cache is a lazily negated view"):
        fm.kv_cache_append(**call(k_cache=cache))


def test_torch_func_is_refused():
    given_call = call()
    rest = {name: x for name, x in given_call.items() if name != "k"}
    with pytest.raises(NotImplementedError, match="no vmap"):
        torch.func.vmap(lambda k: fm.kv_cache_append(k, **rest))(given_call["k"][None])


@pytest.mark.parametrize("kind", ["plain", "float8", "halves"])
def test_opcheck(kind):
    given_call = float8() if kind == "float8" else call()
    if kind == "halves":
        rows = torch.zeros(4, 4, 2, 13)
        given_call |= {"k_cache": rows[..., :8], "v_cache": rows[..., 8:]}
    scales = (torch.tensor(0.5), torch.rand(2) + 0.5) if kind == "float8" else (None, None)
    checks = {"test_utils": pages.CHECKS_OF_FLOAT8} if kind == "float8" else {}
    torch.library.opcheck(APPEND, (*given_call.values(), *scales), **checks)


def test_meta_tensors():
    meta = {name: x.to("meta") for name, x in call().items()}
    assert fm.kv_cache_append(**meta) is None


@pytest.mark.parametrize("float8", [False, True])
def test_explain(float8):
    meta = {"device": "meta"}
    k, v = (torch.empty(77, 4, dim, dtype=torch.bfloat16, **meta) for dim in (64, 32))
    stored_as = FLOAT8 if float8 else torch.bfloat16
    caches = [torch.empty(9, 16, 4, dim, dtype=stored_as, **meta) for dim in (64, 32)]
    slots = torch.empty(77, dtype=torch.int64, **meta)
    scales = {"k_scale": 0.5} if float8 else {}
    text = fm.explain_append(k, v, *caches, slots, **scales, device="cpu")
    assert text.startswith("append to a cache in bfloat16: 77 tokens, heads 4, head dim 64/32\n")
    assert ("in float8_e4m3fn, scaled" in text) == float8
    assert "_cache_append\n" in text and "chosen: " in text
    with pytest.raises(ERRORS, match="k_scale"):
        fm.explain_append(k, v, *caches, slots, k_scale=torch.empty(3, **meta), device="cpu")
    with pytest.raises(ERRORS, match=r"k must be a torch\.Tensor"):
        fm.explain_append(None, v, *caches, slots)
