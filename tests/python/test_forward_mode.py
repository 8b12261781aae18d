"""Forward mode of attention: tangents of out and lse, of gradients, and with torch.func."""

from __future__ import annotations

import pytest
import torch
import torch.autograd.forward_ad as fwd
from torch import func

import flashmoe_science as fm
import second_oracle
from oracle import same_bits
from problems import Seeded, build, draw
from second_oracle import call_ours, tangents_of

PROBLEMS = 120
CHUNK = 20


def own(x):
    """With memory for each element, without which torch makes no dual tensor."""
    return x.clone() if torch._debug_has_internal_overlap(x) else x


def moved(case, tangents) -> dict[str, torch.Tensor]:
    """out' and lse' by dual tensors."""
    with fwd.dual_level(), torch.no_grad():
        duals = {
            name: fwd.make_dual(own(x), tangents[name]) if name in tangents else x
            for name, x in case.inputs().items()
        }
        out, lse = (fwd.unpack_dual(x) for x in call_ours(case, duals))
        plain = call_ours(case, case.inputs())
        assert same_bits(out.primal, plain[0]) and same_bits(lse.primal, plain[1])
        return {"out'": out.tangent, "lse'": lse.tangent}


def complaints_about(seed: int, threads) -> list[str]:
    case = second_oracle.differentiable(build(draw(Seeded(seed), budget=200_000)))
    case.use_out = True
    if case.grad_lse is None:
        case.grad_lse = torch.zeros(
            case.q.shape[:-1], dtype=torch.promote_types(case.q.dtype, torch.float32)
        )
    case.needs = case.needs or "q"
    tangents = tangents_of(case, seed)
    if not tangents:
        return []
    threads(1)
    alone = moved(case, tangents)
    threads(2)
    together = moved(case, tangents)
    found = second_oracle.compare(case, tangents, together)
    different = (name for name in alone if not same_bits(alone[name], together[name]))
    return found + [f"{name}: 1 and 2 threads give different bits" for name in different]


@pytest.mark.parametrize("first", range(0, PROBLEMS, CHUNK))
def test_random_problems(first, threads):
    failures = []
    for seed in range(9000 + first, 9000 + first + CHUNK):
        if found := complaints_about(seed, threads):
            failures.append("\n  ".join([f"seed {seed}", *found]))
    assert not failures, "\n".join(failures[:5])


def inputs(dtype=torch.float64):
    generator = torch.Generator().manual_seed(3)
    shapes = ((2, 4, 5, 8), (2, 2, 7, 8), (2, 2, 7, 6), (4, 5, 7))
    return tuple(torch.randn(x, generator=generator, dtype=torch.float64).to(dtype) for x in shapes)


def along(x):
    return tuple(y.sin() for y in x)


def call(q, k, v, bias):
    return fm.flash_attention(q, k, v, bias=bias, causal=True, softcap=2.0, return_lse=True)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_results_have_the_dtypes_and_layouts_of_the_primals(dtype):
    x = tuple(y.transpose(-3, -2).contiguous().transpose(-3, -2) for y in inputs(dtype))
    (out, lse), (out_move, lse_move) = func.jvp(call, x, along(x))
    assert (out.dtype, out.stride()) == (out_move.dtype, out_move.stride())
    assert (lse.dtype, lse.stride()) == (lse_move.dtype, lse_move.stride())


def test_gradcheck_in_forward_mode():
    x = tuple(y[:1, :, :2].clone().requires_grad_() for y in inputs()[:3])

    def call(q, k, v):
        return fm.flash_attention(q, k, v, return_lse=True)

    assert torch.autograd.gradcheck(
        call, x, check_forward_ad=True, check_backward_ad=False, check_undefined_grad=False
    )


def test_a_directional_derivative_is_the_same_by_both_modes():
    """<grad, tangent> of a loss, forward and backward."""
    x = inputs()

    def loss(*x):
        out, lse = call(*x)
        return out.square().sum() + lse.exp().sum()

    _, forward = func.jvp(loss, x, along(x))
    grads = func.grad(loss, (0, 1, 2, 3))(*x)
    backward = sum((g * t).sum() for g, t in zip(grads, along(x), strict=True))
    torch.testing.assert_close(forward, backward, rtol=1e-12, atol=0)


def test_a_hessian_is_the_same_by_every_way_there():
    q, *rest = (y[:1, :, :2] if y.dim() == 4 else y[:, :2, :2] for y in inputs())

    def loss(q):
        return call(q, *rest)[0].square().sum()

    by_forward = func.hessian(loss)(q)
    torch.testing.assert_close(
        func.jacrev(func.jacrev(loss))(q), by_forward, rtol=1e-10, atol=1e-12
    )
    torch.testing.assert_close(
        func.jacrev(func.jacfwd(loss))(q), by_forward, rtol=1e-10, atol=1e-12
    )
    by_autograd = torch.autograd.functional.hessian(loss, q)
    torch.testing.assert_close(by_autograd, by_forward, rtol=1e-10, atol=1e-12)


def test_a_tangent_that_is_expanded_or_zero():
    q, k, v, _ = inputs()
    ones = torch.ones((), dtype=q.dtype).expand(q.shape)
    _, got = func.jvp(
        fm.flash_attention, (q, k, v), (ones, torch.zeros_like(k), torch.zeros_like(v))
    )
    _, want = func.jvp(lambda q: fm.flash_attention(q, k, v), (q,), (ones.contiguous(),))
    assert same_bits(got, want)


def test_rows_without_keys_do_not_move():
    q, k, v, _ = inputs()
    bias = torch.zeros(5, 7, dtype=q.dtype)
    bias[2] = -torch.inf
    (_, lse), (out_move, lse_move) = func.jvp(
        lambda q, k, v, b: fm.flash_attention(q, k, v, bias=b, return_lse=True),
        (q, k, v, bias),
        (*along((q, k, v)), torch.full_like(bias, torch.nan).where(bias == -torch.inf, 1)),
    )
    assert (lse[..., 2] == -torch.inf).all()
    assert not out_move[..., 2, :].any() and not lse_move[..., 2].any()
    assert out_move.isfinite().all() and lse_move.isfinite().all()


def test_forward_mode_in_a_compiled_function():
    x = inputs()
    want = func.jvp(call, x, along(x))
    compiled = torch.compile(lambda x, t: func.jvp(call, x, t), fullgraph=True, backend="aot_eager")
    for got, expected in zip(compiled(x, along(x)), want, strict=True):
        torch.testing.assert_close(got, expected)
