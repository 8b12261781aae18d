"""Dropout: which pairs are dropped is a function of the seed and of where they are."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F

import flashmoe_science as fm
import oracle
from catalogue import needs_all_families
from dropped import LOW, kept, philox, with_dropout
from flashmoe_science.compat.flash_attn import flash_attn_func, flash_attn_varlen_func
from oracle import Case, same_bits
from problems import DTYPES


def test_philox_itself():
    """The known answers of Random123's kat_vectors."""
    known = [
        ((0, 0, 0, 0), 0, "5f6fb709 0d893f64 4f121f81 4f730a48"),
        ((LOW,) * 4, 2**64 - 1, "5207ddc2 45165e59 4d8ee751 8c52f662"),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            0x299F31D0A4093822,
            "4dfccaba 190a87f0 c47362ba b6b5242a",
        ),
    ]
    for counter, seed, answer in known:
        words = philox([torch.tensor(x) for x in counter], seed)
        assert " ".join(f"{int(word):08x}" for word in words) == answer


def dense(n=37, m=53, lead=(2,), dtype=torch.float32, bias=None, key_lengths=None, **options):
    sizes = ((*lead, 4, n, 16), (*lead, 2, m, 16), (*lead, 2, m, 12), (*lead, 4, n, 12))
    q, k, v, grad_out = (torch.randn(size).to(dtype) for size in sizes)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    bias = None if bias is None else torch.randn(bias).to(dtype)
    grad_lse = torch.randn(*lead, 4, n, dtype=wide)
    lengths = None if key_lengths is None else torch.tensor(key_lengths)
    return Case(q, k, v, grad_out, grad_lse, bias, lengths, options=options)


LENGTHS = ((9, 17), (0, 5), (33, 1), (16, 0), (20, 64), (1, 130))


def ragged(dtype=torch.float32, heads=None, **options):
    cu_q, cu_k = (torch.tensor([0, *(x[side] for x in LENGTHS)]).cumsum(0) for side in (0, 1))
    sizes = ((cu_q[-1] + 2, 4, 8), (cu_k[-1], 2, 8), (cu_k[-1], 2, 8), (cu_q[-1] + 2, 4, 8))
    q, k, v, grad_out = (torch.randn(size).to(dtype) for size in sizes)
    pairs = sum(n * m for n, m in LENGTHS)
    bias = None if heads is None else torch.randn(pairs, heads).to(dtype)
    longest = (33, 130)
    return Case(q, k, v, grad_out, None, bias, None, cu_q, cu_k, *longest, options=options)


# Which pairs.


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("n, m", [(1, 1), (15, 33), (17, 31), (129, 70), (65, 7)])
def test_the_pairs_are_those_of_philox(n, m, dtype):
    """With equal scores and the identity as value, out shows what was kept."""
    q, k = torch.zeros(2, 3, 2, n, 8, dtype=dtype), torch.zeros(2, 3, 1, m, 8, dtype=dtype)
    v = torch.eye(m, dtype=dtype).expand(2, 3, 1, m, m)
    for seed in (0, -1, 2**40 + 3):
        out = fm.flash_attention(q, k, v, dropout_p=0.4, seed=seed)
        want = kept(seed, 0.4, 6, 2, n, m).view(2, 3, 2, n, m) != 0
        assert torch.equal(out != 0, want)


def test_ragged_pairs_are_counted_from_their_sequence():
    """Sequence b drops what batch entry b of a dense call would, wherever its tokens lie."""
    case = ragged()
    q, k = torch.zeros_like(case.q), torch.zeros_like(case.k)
    v = torch.cat([torch.eye(m, 130) for _, m in LENGTHS])[:, None].expand(-1, 2, -1)
    call = (q, k, v, case.cu_q, case.cu_k, 33, 130)
    out = fm.flash_attention_varlen(*call, dropout_p=0.4, seed=5)
    every = kept(5, 0.4, len(LENGTHS), 4, 33, 130) != 0
    for b, (n, m) in enumerate(LENGTHS):
        got = out[case.cu_q[b] : case.cu_q[b + 1]].transpose(0, 1) != 0
        assert torch.equal(got[..., :m], every[b, :, :n, :m]), b


@pytest.mark.parametrize("options", [{"causal": True}, {"window": (40, 3)}, {"window": (0, 100)}])
def test_masks_do_not_move_the_pairs(options):
    n = m = 150
    q, v = torch.zeros(1, 1, n, 8), torch.eye(m)[None, None]
    out = fm.flash_attention(q, q, v, **options, dropout_p=0.4, seed=9)
    whole = fm.flash_attention(q, q, v, **options)
    assert torch.equal(out != 0, (whole != 0) & (kept(9, 0.4, 1, 1, n, m) != 0))


# Against the oracle.


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
@pytest.mark.parametrize("p", [0.1, 0.9])
def test_dense(p, dtype):
    oracle.check(with_dropout(dense(dtype=dtype, bias=(2, 4, 37, 53)), p))


OPTIONS = [
    {"causal": True},
    {"window": (9, 3), "bias": (37, 53)},
    {"softcap": 2.0, "scale": 0.7, "bias": (2, 1, 1, 53)},
    {"key_lengths": (41, 53), "causal": True, "bias": (4, 37, 1)},
    {"lead": (3, 2), "n": 5, "m": 9},
    {"n": 129, "m": 131, "lead": (1,), "bias": (129, 131)},
    {"n": 0, "m": 5},
    {"n": 5, "m": 0},
    {"lead": (0,)},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_with_other_options(options):
    """A bias that nobody shares and biases that are sums; masks; more leading dimensions."""
    oracle.check(with_dropout(dense(**options)))


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
@pytest.mark.parametrize("heads", [None, 1, 4])
def test_ragged(heads, dtype):
    oracle.check(with_dropout(ragged(dtype, heads, causal=heads == 4)))


def test_a_mask():
    case = dense()
    case.bias = torch.rand(4, 37, 53) < 0.5
    oracle.check(with_dropout(case))


def test_gradcheck():
    """The derivative of what is computed, dropped pairs and all."""
    case = dense(5, 7, (1,), torch.float64, (4, 5, 7))
    inputs = [x.clone().requires_grad_() for x in (case.q, case.k, case.v, case.bias)]
    call = lambda q, k, v, bias: fm.flash_attention(  # noqa: E731
        q, k, v, bias, softcap=3.0, return_lse=True, dropout_p=0.4, seed=3
    )
    assert torch.autograd.gradcheck(call, inputs)


# Seeds.


def results(p, seed=None, case=None):
    case = dense(bias=(4, 37, 53)) if case is None else case
    return oracle.ours(dataclasses.replace(case, dropout={"dropout_p": p, "seed": seed}))


def same(a, b) -> bool:
    return all(same_bits(a[name], b[name]) for name in a)


@pytest.mark.parametrize("case", [dense(150, 170, bias=(150, 170)), ragged()], ids=["d", "r"])
def test_the_same_bits_for_any_number_of_threads(case, threads):
    threads(1)
    want = results(0.2, 11, case)
    for count in (1, 2, 5):
        threads(count)
        assert same(results(0.2, 11, case), want)


def test_seeds():
    case = dense()
    one, other = results(0.2, 1, case), results(0.2, 2, case)
    assert not same_bits(one["out"], other["out"])
    assert same(results(0.2, torch.tensor(1), case), one)
    assert same(results(0.2, torch.tensor([[1]]), case), one)


def test_manual_seed():
    case = dense()
    torch.manual_seed(3)
    first, second = results(0.2, case=case), results(0.2, case=case)
    assert not same_bits(first["out"], second["out"])
    torch.manual_seed(3)
    assert same(results(0.2, case=case), first)


def test_generators_are_left_alone_where_nothing_is_drawn():
    case, state = dense(), torch.get_rng_state()
    for p, seed in ((0.0, None), (0.2, 5)):
        results(p, seed, case)
        assert torch.equal(torch.get_rng_state(), state)
    with pytest.raises(ValueError, match="dropout_p is 2"):
        fm.flash_attention(case.q, case.k, case.v, dropout_p=2)
    assert torch.equal(torch.get_rng_state(), state)


# How many.


def test_none_and_all():
    case = dense(bias=(37, 53))
    assert same(results(0.0, 1, case), oracle.ours(case))
    whole, nothing = oracle.ours(case), results(1.0, 1, dataclasses.replace(case, grad_lse=None))
    assert same_bits(nothing["lse"], whole["lse"])
    assert all((x == 0).all() for name, x in nothing.items() if name != "lse")
    want = F.dropout(whole["out"], 1.0)
    assert torch.equal(nothing["out"], want)


def test_a_little_is_not_nothing():
    """p is rounded to a 65,536th, and never to 0 or 1."""
    q, v = torch.zeros(1, 64, 256, 8), torch.ones(1, 64, 256, 1)
    few = fm.flash_attention(q, q, v, dropout_p=1e-9, seed=1)
    most = fm.flash_attention(q, q, v, dropout_p=1 - 1e-9, seed=1)
    assert 0 < (few < 0.999).sum() < 400 and 0 < (most > 0).sum() < 400


def test_the_mean_is_kept():
    """The share that is dropped, and the mean over seeds of a result."""
    q, v = torch.zeros(2, 4, 200, 8), torch.ones(2, 4, 200, 1)
    for p in (0.01, 0.1, 0.5):
        out = fm.flash_attention(q, q, v, dropout_p=p, seed=17).double()
        # A mean of so many independent pairs is this near to 1 but for one seed in a million.
        deviation = math.sqrt(p / (1 - p) / (out.numel() * 200))
        assert abs(out.mean().item() - 1) < 5 * deviation
        rows = math.sqrt(p / (1 - p) / 200)
        assert 0.9 * rows < out.std().item() < 1.1 * rows


def test_lse_knows_nothing_of_it():
    case = dense()
    assert same_bits(results(0.5, 1, case)["lse"], oracle.ours(case)["lse"])


def test_nan_in_a_dropped_value_stays_there():
    case = with_dropout(dense(dtype=torch.float32), 0.5)
    case.v[:, :, 7] = torch.nan
    out = oracle.ours(case)["out"]
    assert torch.equal(out.isnan().any(-1), case.kept[..., 7] != 0)


# Through everything else.


def test_other_names():
    case = dense()
    q, k, v = case.q, case.k, case.v
    rows = [x.transpose(1, 2) for x in (q, k, v)]
    packed = ragged()
    cu = (packed.cu_q, packed.cu_k, 33, 130)
    calls = {
        "sdpa": lambda p: F.scaled_dot_product_attention(q, k, v, dropout_p=p, enable_gqa=True),
        "compat": lambda p: flash_attn_func(*rows, dropout_p=p).transpose(1, 2),
        "ours": lambda p: fm.flash_attention(q, k, v, dropout_p=p),
        "compat ragged": lambda p: flash_attn_varlen_func(packed.q, packed.k, packed.v, *cu, p),
        "ragged": lambda p: fm.flash_attention_varlen(
            packed.q, packed.k, packed.v, *cu, dropout_p=p
        ),
    }
    got = {}
    with fm.enable_sdpa():
        for name, call in calls.items():
            torch.manual_seed(8)
            got[name] = call(0.3)
    assert same_bits(got["sdpa"], got["ours"]) and same_bits(got["compat"], got["ours"])
    assert same_bits(got["compat ragged"], got["ragged"])


def test_a_module_in_training():
    """nn.MultiheadAttention drops while it trains, and not in eval()."""
    module = torch.nn.MultiheadAttention(32, 4, dropout=0.5, batch_first=True)
    x = torch.randn(3, 17, 32)
    with fm.enable_sdpa():
        torch.manual_seed(1)
        one, other = (module(x, x, x, need_weights=False)[0] for _ in range(2))
        torch.manual_seed(1)
        again = module(x, x, x, need_weights=False)[0]
        module.eval()
        calm = module(x, x, x, need_weights=False)[0]
    assert same_bits(one, again) and not same_bits(one, other) and not same_bits(one, calm)


@pytest.mark.parametrize("options", [{}, {"return_lse": True}, {"window": (9, 9)}])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_seed_may_move_on_before_the_backward_pass(options, compiled):
    """As in model(..., seed=seed); seed.add_(1) for each layer."""

    def call(q, k, v, seed, step):
        out = fm.flash_attention(q, k, v, dropout_p=0.5, seed=seed, **options)
        seed.add_(step)
        return out[0] if isinstance(out, tuple) else out

    case = dense()
    leaves = [x.clone().requires_grad_() for x in (case.q, case.k, case.v)]
    run = torch.compile(call, backend="aot_eager", fullgraph=True) if compiled else call
    found = []
    for step in (1, 0):
        seed = torch.tensor(5)
        out = run(*leaves, seed, step)
        assert seed == 5 + step
        found.append((out, *torch.autograd.grad(out, leaves, case.grad_out)))
    assert all(same_bits(one, other) for one, other in zip(*found, strict=True))


def test_an_op_refuses_a_seed_that_has_moved_on():
    case = dense()
    q, seed = case.q.clone().requires_grad_(), torch.tensor(5)
    options = (0, 0, False, -1, -1, None, 0.0, False, False, 0.5, seed)
    tensors = (q, case.k, case.v, None, None, None, None, None)
    out, _ = torch.ops.flashmoe.attention(*tensors, *options)
    seed.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_nested_and_autocast():
    case = ragged()
    q, k = (
        torch.nested.nested_tensor_from_jagged(x, offsets=cu).transpose(1, 2)
        for x, cu in ((case.q[: case.cu_q[-1]], case.cu_q), (case.k, case.cu_k))
    )
    out = fm.flash_attention(q, k, k, dropout_p=0.3, seed=4).transpose(1, 2).values()
    call = (case.q, case.k, case.k, case.cu_q, case.cu_k, 33, 130)
    want = fm.flash_attention_varlen(*call, dropout_p=0.3, seed=4)
    assert same_bits(out, want[: len(out)])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low = fm.flash_attention_varlen(*call, dropout_p=0.3, seed=4)
    torch.testing.assert_close(low.float(), want, atol=0.1, rtol=0.1)


def test_compiled():
    case = dense()
    leaves = [x.clone().requires_grad_() for x in (case.q, case.k, case.v)]

    def call(q, k, v, seed=None):
        return fm.flash_attention(q, k, v, dropout_p=0.3, seed=seed)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for seed in (7, torch.tensor(7)):
        got, want = compiled(*leaves, seed), call(*leaves, 7)
        assert same_bits(got, want)
        grads = [torch.autograd.grad(x, leaves, case.grad_out) for x in (got, want)]
        assert all(same_bits(a, b) for a, b in zip(*grads, strict=True))
    runs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        out = compiled(*leaves)
        runs.append((out, *torch.autograd.grad(out, leaves, case.grad_out)))
    assert all(same_bits(a, b) for a, b in zip(*runs[:2], strict=True))
    assert not same_bits(runs[0][0], runs[2][0])
    # The backward pass drops what the forward pass dropped: out is linear in v.
    (out, *_, grad) = runs[0]
    torch.testing.assert_close((grad * leaves[2]).sum(), (out * case.grad_out).sum())


def test_checkpointing():
    """The forward pass that is done again draws the same seed."""
    from torch.utils.checkpoint import checkpoint

    case = dense()
    q = case.q.clone().requires_grad_()
    call = lambda q: fm.flash_attention(q, case.k, case.v, dropout_p=0.3)  # noqa: E731
    grads = []
    for run in (call, lambda q: checkpoint(call, q, use_reentrant=False)):
        torch.manual_seed(5)
        grads += torch.autograd.grad(run(q), q, case.grad_out)
    assert same_bits(*grads)


def test_torch_func():
    """Gradients; what would ask for the pairs of another batch is refused."""
    case = dense()
    loss = lambda q: fm.flash_attention(  # noqa: E731
        q, case.k, case.v, dropout_p=0.3, seed=2
    ).sum()
    q = case.q.clone().requires_grad_()
    (want,) = torch.autograd.grad(loss(q), q)
    assert same_bits(torch.func.grad(loss)(case.q), want)
    with pytest.raises(NotImplementedError, match="dropout has no vmap"):
        torch.func.vmap(loss)(case.q[None])
    with pytest.raises(NotImplementedError, match="dropout has no vmap"):
        torch.func.jacrev(lambda q: fm.flash_attention(q, case.k, case.v, dropout_p=0.3, seed=2))(
            case.q
        )


def test_explain():
    case = dense()
    assert "dropout 0.25" in fm.explain(case.q, case.k, case.v, dropout_p=0.25)
    assert "dropout" not in fm.explain(case.q, case.k, case.v)
    state = torch.get_rng_state()
    fm.explain(case.q, case.k, case.v, dropout_p=0.25, backward=True)
    assert torch.equal(torch.get_rng_state(), state)
    with pytest.raises(RuntimeError, match="dropout_p is 3"):
        fm.explain(case.q, case.k, case.v, dropout_p=3)


# Plans for GPUs.


@needs_all_families
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("chip", ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100"])
@pytest.mark.parametrize("d", [1, 16, 32, 48, 64, 96, 128, 200, 256])
def test_every_chip_and_head_dim_has_kernels(d, chip, backward):
    q = torch.empty(2, 4, 300, d, dtype=torch.float16, device="meta")
    bias = torch.empty(4, 300, 300, dtype=torch.float16, device="meta")
    for extra in ({}, {"bias": bias}, {"bias": bias.bool()}, {"causal": True, "softcap": 3.0}):
        text = fm.explain(q, q, q, **extra, dropout_p=0.1, device=chip, backward=backward)
        assert f"attention_{'bwd' if backward else 'fwd'}_dropout_fp16_" in text
        assert "copies     none" in text or d % 8
    if chip == "sm_90":
        assert "sm90: passed over: has no dropout" in text


@needs_all_families
def test_one_query_keeps_its_head():
    """Without dropout the heads of a group are rows of one tile."""
    q, k = (
        torch.empty(2, h, n, 64, dtype=torch.float16, device="meta") for h, n in ((8, 1), (2, 9))
    )
    assert ": grid 1 x 8 x 2" in fm.explain(q, k, k, dropout_p=0.1, device="sm_80")
    assert ": grid 1 x 2 x 2" in fm.explain(q, k, k, device="sm_80")
