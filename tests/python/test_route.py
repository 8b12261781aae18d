"""The router against plain torch in float64: choice, ties, weights and their gradient."""

from __future__ import annotations

import itertools

import pytest
import torch

import flashmoe_science as fm
import moe_oracle as oracle
from oracle import same_bits, tolerance

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def weights_of(logits, ids, scoring, normalize):
    """The weights of a choice that is made."""
    scores = logits.softmax(-1) if scoring == "softmax" else logits.sigmoid()
    weights = scores.gather(-1, ids.long())
    return weights / weights.sum(-1, keepdim=True) if normalize else weights


def check(logits, k, scoring="softmax", normalize=True, bias=None):
    """Fails unless the choice is a right one, and its weights and gradient within tolerance."""
    leaf = logits.detach().requires_grad_()
    ids, weights = fm.route(leaf, k, scoring, normalize, bias)
    shape = (*logits.shape[:-1], k)
    assert ids.dtype == torch.int32 and ids.shape == shape and not ids.requires_grad
    assert weights.dtype == wide(logits.dtype) and weights.shape == shape and weights.requires_grad
    seed = torch.randn(shape, dtype=weights.dtype)
    (grad,) = torch.autograd.grad(weights, leaf, seed)
    assert grad.dtype == logits.dtype and grad.shape == logits.shape

    # What is chosen is as good as what could have been, to the rounding of a score, in the same
    # order, and nothing twice.
    exact = logits.detach().double()
    scores = exact.softmax(-1) if scoring == "softmax" else exact.sigmoid()
    if bias is not None:
        scores = scores + bias.double()
    chosen = scores.gather(-1, ids.long())
    best = scores.sort(-1, descending=True).values[..., :k]
    rounding = 4 * torch.finfo(weights.dtype).eps * scores.abs().amax(-1, keepdim=True)
    assert ((chosen - best).abs() <= rounding).all()
    assert all(len(set(row)) == k for row in ids.reshape(-1, k).tolist())

    def gradient(dtype):
        x = logits.detach().to(dtype).requires_grad_()
        value = weights_of(x, ids, scoring, normalize)
        return value.detach(), torch.autograd.grad(value, x, seed.to(dtype))[0]

    # Scores are at most 1: one rounding of such a number, and in the gradient of k of them, each
    # times the seed.
    unit = 2 * torch.finfo(weights.dtype).eps
    floors = (unit, unit * k * max(1.0, *seed.abs().flatten().tolist(), 0.0))
    got = (weights.detach(), grad)
    exact, plain = gradient(torch.float64), gradient(wide(logits.dtype))
    for a, want, by_plain, floor in zip(got, exact, plain, floors, strict=True):
        error = (a.double() - want).abs()
        assert error.numel() == 0 or error.max() <= tolerance(a, want, by_plain, floor)
    return ids, weights.detach()


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_random_logits(dtype, scoring, normalize, biased):
    for T, E, k in itertools.product((1, 7, 33), (1, 2, 8, 65), (1, 2, 8)):
        if k <= E:
            bias = torch.randn(E, dtype=wide(dtype)) if biased else None
            check(torch.randn(T, E, dtype=dtype), k, scoring, normalize, bias)


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_all_experts(scoring):
    check(torch.randn(5, 16), 16, scoring)


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_4096_experts(scoring):
    check(torch.randn(9, 4096), 8, scoring)


@pytest.mark.parametrize("shape, k", [((0, 4), 2), ((3, 4), 0), ((0, 4), 0), ((3, 0), 0)])
def test_nothing_to_choose(shape, k):
    logits = torch.randn(shape, requires_grad=True)
    ids, weights = fm.route(logits, k)
    assert ids.shape == weights.shape == (shape[0], k)
    weights.sum().backward()
    assert logits.grad.shape == shape and (logits.grad == 0).all()


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_ties_go_to_the_lower_id(dtype, scoring):
    logits = torch.randint(0, 3, (200, 20)).to(dtype)
    ids, _ = fm.route(logits, 7, scoring)
    want, _ = oracle.route(logits.double(), 7, scoring)
    assert torch.equal(ids.long(), want)
    assert torch.equal(fm.route(torch.zeros(2, 5), 3)[0], torch.tensor([[0, 1, 2]] * 2).int())


def test_bias_shifts_the_choice_and_nothing_else():
    logits = torch.randn(40, 6)
    bias = torch.tensor([0.0, 0.0, 5.0, 0.0, -5.0, 0.0], requires_grad=True)
    ids, weights = fm.route(logits, 2, normalize=False, bias=bias)
    assert (ids[:, 0] == 2).all() and (ids != 4).all()
    torch.testing.assert_close(weights, logits.softmax(-1).gather(-1, ids.long()))
    assert not weights.requires_grad, "no gradient comes to the bias"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_bias_of_any_float_dtype(dtype):
    logits, bias = torch.randn(40, 6), torch.randn(6).to(dtype)
    got, want = fm.route(logits, 2, bias=bias), fm.route(logits, 2, bias=bias.float())
    assert torch.equal(got[0], want[0]) and same_bits(got[1], want[1])


@pytest.mark.parametrize("lead", [(), (3,), (2, 3), (2, 0)], ids=str)
def test_leading_dimensions(lead):
    logits = torch.randn(*lead, 5)
    ids, weights = fm.route(logits, 2)
    flat_ids, flat = fm.route(logits.reshape(-1, 5), 2)
    assert ids.shape == weights.shape == (*lead, 2)
    assert torch.equal(ids.reshape(flat_ids.shape), flat_ids)
    assert same_bits(weights.reshape(flat.shape), flat)


@pytest.mark.parametrize("how", ["transposed", "sliced", "expanded"])
def test_layouts(how):
    logits = torch.randn(12, 6)
    moved = {
        "transposed": logits.T.contiguous().T,
        "sliced": torch.nn.functional.pad(logits, (2, 1))[:, 2:-1],
        "expanded": logits[:1].expand(12, 6),
    }[how].detach()
    plain = moved.clone(memory_format=torch.contiguous_format)
    results = []
    for x in (plain, moved):
        x.requires_grad_()
        ids, weights = fm.route(x, 3)
        results.append((ids, weights.detach(), *torch.autograd.grad(weights.square().sum(), x)))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)
    if how == "transposed":
        assert results[1][2].stride() == moved.stride()


def test_nan_is_the_largest():
    logits = torch.tensor([[0.0, 1.0, torch.nan, 3.0], [0.0, 1.0, 2.0, 3.0]])
    ids, weights = fm.route(logits, 2, "sigmoid", normalize=False)
    assert ids[0].tolist() == [2, 3] and weights[0].isnan().tolist() == [True, False]
    assert ids[1].tolist() == [3, 2] and weights[1].isfinite().all()


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_large_logits(scoring):
    """Softmax and sigmoid saturate, and neither overflows."""
    logits = torch.tensor([[1e4, -1e4, 0.0, 3e4], [-1e4, -2e4, -3e4, -4e4]], requires_grad=True)
    ids, weights = fm.route(logits, 2, scoring, normalize=False)
    want = logits.detach().double()
    want = (want.softmax(-1) if scoring == "softmax" else want.sigmoid()).gather(-1, ids.long())
    torch.testing.assert_close(weights.detach().double(), want, rtol=1e-6, atol=1e-30)
    weights.sum().backward()
    assert logits.grad.isfinite().all()


@pytest.mark.parametrize("shift", [-95.0, -300.0, -690.0])
def test_small_sigmoids_keep_their_shares(shift):
    logits = torch.arange(4, dtype=torch.float64)[None] + shift
    ids, weights = fm.route(logits, 2, "sigmoid")
    want = logits.sigmoid().gather(-1, ids.long())
    torch.testing.assert_close(weights, want / want.sum(-1, keepdim=True), rtol=1e-12, atol=0)


def test_a_number_of_experts_below_0_is_refused_by_name():
    with pytest.raises(ValueError, match="k is -1"):
        fm.route(torch.randn(3, 4), -1)


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_gradcheck(scoring, normalize):
    logits = torch.randn(6, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: fm.route(x, 3, scoring, normalize)[1], (logits,))


def test_any_number_of_threads_gives_the_same_bits(threads):
    logits = torch.randn(500, 64)
    threads(1)
    want = fm.route(logits, 8)
    for count in (2, 7):
        threads(count)
        assert all(same_bits(a, b) for a, b in zip(fm.route(logits, 8), want, strict=True))
