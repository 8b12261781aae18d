"""dq, dk and dv on CUDA tensors: every option against the float64 oracle."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from helpers import (
    ALL_HEAD_DIMS,
    DEVICE,
    OPTIONS,
    VALUE_HEAD_DIMS,
    check_case,
    dense,
    either_way,
    every_head_dim,
    every_mask,
    every_option,
    explained,
    integers,
    normal,
    on_a_gpu,
    qkv,
    refused,
    results,
    tiles_there_are,
)

import flashmoe_science as fm
import oracle
from oracle import same_bits

# Rows and columns change places in the backward pass, and so do the tiles' edges.
LENGTHS = (0, 1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 97, 127, 128, 129, 191, 193, 257, 331)
PAIRS = [(n, n) for n in LENGTHS]
PAIRS += [(n, LENGTHS[(7 * i + 3) % len(LENGTHS)]) for i, n in enumerate(LENGTHS)]
PAIRS += [(LENGTHS[(3 * i + 5) % len(LENGTHS)], m) for i, m in enumerate(LENGTHS)]
PAIRS += [(1, 4097), (4097, 1), (1025, 4097), (4097, 1025), (2049, 2047)]
PAIRS = sorted(set(PAIRS))


@every_mask
@pytest.mark.parametrize("d", [32, 64, 128], ids=lambda d: f"d{d}")
@pytest.mark.parametrize("n, m", PAIRS, ids=lambda size: str(size))
def test_lengths(n, m, d, causal, dtype):
    large = n * m > 512**2
    shape = {"lead": (1,), "hq": 2, "hk": 1} if large else {"lead": (2,), "hq": 4, "hk": 2}
    # Both ways to sum, in turn.
    deterministic = bool((n + m + d // 32) % 2)
    options = {"causal": causal}
    check_case(dense(n, m, d=d, dtype=dtype, deterministic=deterministic, options=options, **shape))


@either_way
@pytest.mark.parametrize("d", ALL_HEAD_DIMS)
def test_head_dims(d, deterministic, dtype):
    for causal in (False, True):
        options = {"causal": causal}
        check_case(dense(131, 197, d=d, dtype=dtype, deterministic=deterministic, options=options))


@pytest.mark.parametrize("d", range(8), ids=lambda d: f"d{d}mod8")
def test_every_head_dim_there_is(d, family):
    for each in range(d or 8, 257, 8):
        options = {"causal": bool(each // 8 % 2)}
        check_case(dense(19, 70, lead=(1,), hq=2, hk=1, d=each, options=options))


@either_way
@pytest.mark.parametrize("d, dv", VALUE_HEAD_DIMS, ids=lambda size: str(size))
def test_value_head_dims(d, dv, deterministic, dtype):
    shape = {"lead": (1,), "d": d, "dv": dv, "dtype": dtype}
    check_case(dense(130, 201, deterministic=deterministic, options={"causal": True}, **shape))
    check_case(dense(70, 65, deterministic=deterministic, **shape))


@every_head_dim
@every_mask
@pytest.mark.parametrize("hq, hk", [(1, 1), (3, 3), (4, 2), (8, 2), (16, 2), (6, 2), (8, 1)])
def test_grouped_queries(hq, hk, causal, d, dtype):
    """dk and dv sum over the query heads that share them."""
    for deterministic in (False, True):
        shape = {"hq": hq, "hk": hk, "d": d, "dtype": dtype}
        options = {"causal": causal}
        check_case(dense(130, 77, deterministic=deterministic, options=options, **shape))


@either_way
@every_head_dim
@every_option
def test_options(option, d, deterministic, dtype):
    shape = {"d": d, "dtype": dtype, "hq": 2, "hk": 1}
    for n, m in ((200, 200), (130, 331), (331, 130), (1, 300), (67, 1)):
        check_case(dense(n, m, deterministic=deterministic, options=OPTIONS[option], **shape))


@every_mask
@pytest.mark.parametrize(
    "window",
    [(0, 0), (0, -1), (-1, 0), (63, 64), (64, 63), (127, 0), (0, 129), (200, 100), (5000, 0)],
    ids=str,
)
def test_windows(window, causal, dtype):
    for n, m in ((257, 257), (129, 400), (400, 129), (3, 523)):
        options = {"window": window, "causal": causal}
        check_case(dense(n, m, lead=(1,), dtype=dtype, options=options))


@every_mask
@pytest.mark.parametrize("window", [None, (40, 3)], ids=["all", "window"])
@pytest.mark.parametrize("n, m", [(130, 200), (1, 200), (200, 130), (64, 128)], ids=str)
def test_key_lengths(n, m, window, causal, dtype):
    lengths = integers(0, 1, 2, 63, 64, 65, m // 2, m - 1, m)
    for deterministic in (False, True):
        case = dense(
            n,
            m,
            lead=(9,),
            hq=2,
            hk=1,
            dtype=dtype,
            key_lengths=lengths,
            deterministic=deterministic,
            options={"causal": causal, "window": window},
        )
        got = check_case(case)
        assert got["dq"][0].eq(0).all()
        for name in ("dk", "dv"):
            behind = torch.arange(m, device=DEVICE) >= lengths[:, None, None]
            assert got[name][behind.expand(-1, 1, -1)].eq(0).all(), name


@pytest.mark.parametrize("shape", [(), (1,), (2,), (3, 1), (3, 2)], ids=str)
def test_key_lengths_are_broadcast(shape, dtype):
    lengths = torch.randint(0, 71, shape).long()
    options = {"causal": True}
    check_case(dense(33, 70, lead=(3, 2), dtype=dtype, key_lengths=lengths, options=options))


@either_way
@pytest.mark.parametrize("spread", [8.0, 40.0])
def test_a_peaked_softmax(spread, deterministic, dtype):
    case = dense(150, 201, dtype=dtype, deterministic=deterministic, options={"causal": True})
    check_case(replace(case, q=case.q * spread))


@pytest.mark.parametrize("sign", [1, -1])
def test_scores_far_from_zero(sign, dtype):
    case = dense(100, 300, dtype=dtype)
    check_case(replace(case, q=case.q * 0.1 + 8, k=case.k * 0.1 + 8 * sign))


@pytest.mark.parametrize("size", [1e-3, 30.0])
def test_small_and_large_upstream_gradients(size, dtype):
    """As loss scaling leaves them."""
    case = dense(130, 77, dtype=dtype, options={"causal": True})
    check_case(replace(case, grad_out=case.grad_out * size, grad_lse=case.grad_lse * size))


@on_a_gpu
@pytest.mark.parametrize("d", [16, 32, 48, 64, 96, 128, 192, 256])
def test_every_tile(d, dtype, monkeypatch):
    """Those too that the planner would not choose. The variable is for the backward pass alone."""

    def forward(case):
        leaves = [x.detach().requires_grad_() for x in (case.q, case.k, case.v)]
        options = {"deterministic": case.deterministic, **case.options}
        return leaves, fm.flash_attention(*leaves, return_lse=True, **options)

    def backward(case, leaves, results, tile):
        monkeypatch.setenv("FLASHMOE_TILE", tile)
        try:
            return torch.autograd.grad(results, leaves, (case.grad_out, case.grad_lse))
        finally:
            monkeypatch.delenv("FLASHMOE_TILE")

    def takes(case, tile):
        tensors, options = explained(case)
        with monkeypatch.context() as patch:
            patch.setenv("FLASHMOE_TILE", tile)
            return not refused(*tensors, **options, backward=True)

    def check_with(case, tile):
        leaves, (out, lse) = forward(case)
        grads = backward(case, leaves, (out, lse), tile)
        got = dict(zip(("dq", "dk", "dv"), grads, strict=True))
        oracle.accept(case, {"out": out.detach(), "lse": lse.detach(), **got})

    any_case = dense(70, d=d, dtype=dtype)
    for tile in tiles_there_are(lambda: backward(any_case, *forward(any_case), "1x1")):
        block_q, block_k = map(int, tile.split("x"))
        for n, m in ((1, 1), (block_q, block_k), (block_q + 1, 2 * block_k - 1), (300, 257)):
            for options in ({}, {"causal": True}, {"window": (block_k, 1), "softcap": 9.0}):
                deterministic = bool((n + m) % 2)
                shape = {"d": d, "dtype": dtype, "deterministic": deterministic}
                case = dense(n, m, options=options, **shape)
                if takes(case, tile):  # sm90 has fewer tiles with a softcap
                    check_with(case, tile)


# Which gradients there are, and of what.


@either_way
@pytest.mark.parametrize("needs", ["q", "k", "v", "qk", "qv", "kv"])
def test_only_the_gradients_that_are_wanted(needs, deterministic, dtype):
    case = dense(130, 77, dtype=dtype, deterministic=deterministic, options={"causal": True})
    want = check_case(case)
    got = check_case(replace(case, needs=needs))
    assert set(got) == {"out", "lse", *(f"d{name}" for name in needs)}
    if deterministic:
        assert all(same_bits(got[name], want[name]) for name in got)


@either_way
@pytest.mark.parametrize("loss", ["out", "lse", "both"])
@pytest.mark.parametrize("option", ["plain", "causal", "softcap", "all of them"])
def test_a_loss_of_either_result(option, loss, deterministic, dtype):
    shape = {"dtype": dtype, "deterministic": deterministic, "options": OPTIONS[option]}
    case = dense(130, 150, grad_lse=loss != "out", **shape)
    if loss == "lse":
        case = replace(case, use_out=False, grad_out=torch.zeros_like(case.grad_out))
    got = check_case(case)
    if loss == "lse":
        assert got["dv"].eq(0).all()
        assert got["dk"].abs().max() > 0


def test_a_loss_of_lse_alone_may_want_only_v(dtype):
    case = dense(70, dtype=dtype, needs="v")
    got = results(replace(case, use_out=False, grad_out=torch.zeros_like(case.grad_out)))
    assert got["dv"].eq(0).all()


def test_without_lse_the_gradients_are_the_same(dtype):
    case = dense(130, 77, dtype=dtype, grad_lse=False, options={"causal": True})
    want = results(case)
    leaves = [x.detach().requires_grad_() for x in (case.q, case.k, case.v)]
    out = fm.flash_attention(*leaves, causal=True, deterministic=True)
    got = torch.autograd.grad(out, leaves, case.grad_out)
    for name, grad in zip(("dq", "dk", "dv"), got, strict=True):
        assert same_bits(grad, want[name]), name


def test_gradients_do_not_change_the_forward_pass(dtype):
    tensors = qkv(130, 77, dtype=dtype)
    want = fm.flash_attention(*tensors)
    got = fm.flash_attention(*(x.clone().requires_grad_() for x in tensors))
    assert same_bits(got.detach(), want)


def test_backward_twice_over_one_graph(dtype):
    leaves = [x.requires_grad_() for x in qkv(70, dtype=dtype)]
    out = fm.flash_attention(*leaves, causal=True, deterministic=True)
    grad_out = torch.randn_like(out)
    first = torch.autograd.grad(out, leaves, grad_out, retain_graph=True)
    second = torch.autograd.grad(out, leaves, grad_out)
    assert all(same_bits(a, b) for a, b in zip(first, second, strict=True))


def test_gradients_add_up_in_leaves(dtype):
    leaves = [x.requires_grad_() for x in qkv(70, dtype=dtype)]
    for _ in range(2):
        fm.flash_attention(*leaves, deterministic=True).float().sum().backward()
    once = [x.detach().clone().requires_grad_() for x in leaves]
    fm.flash_attention(*once, deterministic=True).float().sum().backward()
    assert all(torch.equal(a.grad, 2 * b.grad) for a, b in zip(leaves, once, strict=True))


# Nothing to do.


@either_way
@every_mask
@pytest.mark.parametrize(
    "lead, n, m", [((0,), 5, 5), ((2, 0), 5, 5), ((2,), 0, 5), ((2,), 5, 0), ((2,), 0, 0)], ids=str
)
def test_empty_shapes(lead, n, m, causal, deterministic, dtype):
    shape = {"lead": lead, "dtype": dtype, "deterministic": deterministic}
    got = check_case(dense(n, m, options={"causal": causal}, **shape))
    assert all(x.eq(0).all() for name, x in got.items() if name != "lse")


@either_way
@pytest.mark.parametrize("n, m", [(200, 3), (300, 129), (257, 128), (129, 1)])
def test_rows_that_see_no_key(n, m, deterministic, dtype):
    shape = {"dtype": dtype, "deterministic": deterministic}
    got = check_case(dense(n, m, options={"causal": True}, **shape))
    assert got["dq"][..., : n - m, :].eq(0).all()


def test_keys_that_no_row_sees(dtype):
    """Row i sits at key i + 100 and looks back 9 keys: the first 91 are nobody's."""
    got = check_case(dense(100, 200, dtype=dtype, options={"window": (9, 0)}))
    assert got["dk"][..., :91, :].eq(0).all() and got["dv"][..., :91, :].eq(0).all()
    assert got["dk"][..., 91:, :].ne(0).any(-1).all()


def test_equal_keys_share_their_gradient(dtype):
    """A property that needs no oracle: the gradients of the scores of a row sum to 0."""
    case = dense(129, 200, dtype=dtype, grad_lse=False)
    case = replace(case, k=case.k[..., :1, :].expand(case.k.shape).contiguous())
    got = check_case(case)
    assert got["dq"].float().abs().max() < 1e-2
    assert got["dk"].float().sum(-2).abs().max() < 0.05 * got["dk"].float().abs().sum(-2).max()


def test_against_differences_of_the_loss():
    """The gradient as what it is, not as the oracle has it: one direction, float64 differences."""
    case = dense(150, 201, options={"causal": True})
    got = oracle.ours(case)
    step = {name: normal(*x.shape).double() for name, x in case.inputs().items()}

    def loss(h: float) -> torch.Tensor:
        moved = {name: x.double() + h * step[name] for name, x in case.inputs().items()}
        out, lse = oracle.call(case, moved)
        return (out * case.grad_out.double()).sum() + (lse * case.grad_lse.double()).sum()

    want = (loss(1e-4) - loss(-1e-4)) / 2e-4
    slope = sum((got[f"d{name}"].double() * x).sum() for name, x in step.items())
    size = sum((got[f"d{name}"].double() * x).square().sum() for name, x in step.items()).sqrt()
    assert abs(slope - want) < 1e-2 * size
