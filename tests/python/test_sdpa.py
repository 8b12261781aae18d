"""enable_sdpa(): F.scaled_dot_product_attention is ours, and means what it means in torch."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.nn.functional as F
from torch.backends import mha
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention import _registry as registry
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

import flashmoe_science as fm
import oracle
from flashmoe_science import sdpa
from oracle import Case, same_bits


def normal(*shape, dtype=torch.float32, grad=True):
    return torch.randn(shape).to(dtype).requires_grad_(grad)


@pytest.fixture
def calls(monkeypatch):
    """How often SDPA was ours."""
    counted, ours = [], sdpa.flash_attention

    def count(*tensors, **options):
        counted.append(options)
        return ours(*tensors, **options)

    monkeypatch.setattr(sdpa, "flash_attention", count)
    return counted


def test_it_is_ours_until_the_last_context_is_left(calls):
    q = torch.randn(1, 2, 5, 8)
    first, second = fm.enable_sdpa(), fm.enable_sdpa()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    F.scaled_dot_product_attention(q, q, q)
    assert len(calls) == 1
    second.__exit__(None, None, None)
    F.scaled_dot_product_attention(q, q, q)
    assert len(calls) == 1 and registry.current_flash_attention_impl() is None


def test_threads_have_it_as_long_as_they_ask_for_it(calls):
    q, entered, left = torch.randn(1, 2, 5, 8), threading.Event(), threading.Event()

    def stay():
        with fm.enable_sdpa():
            entered.set()
            left.wait(60)
            F.scaled_dot_product_attention(q, q, q)

    thread = threading.Thread(target=stay)
    with fm.enable_sdpa():
        thread.start()
        assert entered.wait(60)
    left.set()
    thread.join()
    assert len(calls) == 1 and registry.current_flash_attention_impl() is None


def test_who_had_activated_it_before_keeps_it():
    registry.activate_flash_attention_impl(sdpa.NAME)
    try:
        with fm.enable_sdpa():
            pass
        assert registry.current_flash_attention_impl() == sdpa.NAME
    finally:
        sdpa._deactivate(None)
    assert registry.current_flash_attention_impl() is None


@pytest.mark.parametrize("before", [True, False])
def test_modules_take_no_path_around_it(calls, before):
    """In eval() and without gradients torch's modules have kernels that are not SDPA."""
    x = torch.randn(3, 7, 16)
    attention = torch.nn.MultiheadAttention(16, 2, batch_first=True).eval()
    layer = torch.nn.TransformerEncoderLayer(16, 2, 24, batch_first=True).eval()
    encoder = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    used = mha.get_fastpath_enabled()
    mha.set_fastpath_enabled(before)
    try:
        with torch.no_grad():
            want = attention(x, x, x, need_weights=False)[0], encoder(x)
            with fm.enable_sdpa():
                got = attention(x, x, x, need_weights=False)[0], encoder(x)
            assert mha.get_fastpath_enabled() == before
    finally:
        mha.set_fastpath_enabled(used)
    assert len(calls) == 3, "once, and in both layers"
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize(
    "shapes",
    [
        ((5, 8), (2, 3, 5, 8), (2, 3, 5, 8)),
        ((5, 8), (1, 1, 5, 8), (1, 1, 5, 8)),
        ((3, 5, 8), (2, 3, 7, 8), (7, 8)),
        ((2, 3, 5, 8), (7, 8), (3, 7, 8)),
        ((5, 8), (7, 8), (7, 8)),
    ],
)
def test_the_result_has_the_highest_rank(shapes):
    q, k, v = (torch.randn(shape) for shape in shapes)
    want = F.scaled_dot_product_attention(q, k, v)
    with fm.enable_sdpa():
        got = F.scaled_dot_product_attention(q, k, v)
    assert got.shape == want.shape
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("word", [causal_upper_left, causal_lower_right])
def test_words_of_torch_for_causal_masks(calls, word):
    q, k = torch.randn(2, 3, 5, 8), torch.randn(2, 3, 7, 8)
    want = F.scaled_dot_product_attention(q, k, k, attn_mask=word(5, 7))
    with fm.enable_sdpa():
        got = F.scaled_dot_product_attention(q, k, k, attn_mask=word(5, 7))
    torch.testing.assert_close(got, want)
    assert len(calls) == 1


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
