"""Plain calls are a node of torch's graph in C++: it gives what the node in Python gives."""

from __future__ import annotations

import pytest
import torch
import torch.autograd.forward_ad as fwd
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.two_tensor import TwoTensor

import flashmoe_science as fm
from autograd_subjects import weights


def plain_leaves(dtype, biased):
    shapes = ((2, 4, 9, 8), (2, 2, 11, 8), (2, 2, 11, 8), (4, 9, 11))
    generator = torch.Generator().manual_seed(5)
    made = (torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes)
    return [x.requires_grad_() for x in made][: 3 + biased]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_a_node_in_cpp_and_one_in_python_give_the_same_bits(dtype, biased, causal, monkeypatch):
    def found(create_graph):
        inputs = plain_leaves(dtype, biased)
        out = fm.flash_attention(*inputs, causal=causal, scale=0.3)
        grads = torch.autograd.grad(out, inputs, weights(out), create_graph=create_graph)
        if create_graph:
            grads += torch.autograd.grad(sum(x.square().sum() for x in grads), inputs)
        return out.grad_fn.name(), (out, *grads)

    for create_graph in (False, True):
        name, got = found(create_graph)
        assert "Overrideable" in name
        with monkeypatch.context() as patch:
            patch.setattr(fm._library, "node", None)  # as with a torch that has no such node
            name, want = found(create_graph)
        assert name == "_AttentionBackward"
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_what_a_node_in_cpp_does_not_know_has_one_in_python():
    q, k, v = plain_leaves(torch.float64, False)
    for options in (
        {"window": (3, 0)}, {"softcap": 5.0}, {"key_lengths": torch.tensor([3, 11])},
        {"sinks": torch.zeros(4, dtype=torch.float64)}, {"dropout_p": 0.1}, {"return_lse": True},
        {"deterministic": True},
    ):  # fmt: skip
        out = fm.flash_attention(q, k, v, **options)
        out = out[0] if isinstance(out, tuple) else out
        assert out.grad_fn.name() == "_AttentionBackward", options
    meta = [x.detach().to("meta").requires_grad_() for x in (q, k, v)]
    out = fm.flash_attention(*meta)
    out.sum().backward()
    assert out.grad_fn.name() == "_AttentionBackward"
    assert all(x.grad.shape == x.shape for x in meta)
    with pytest.raises(RuntimeError, match="no dropout; call flash_attention"):
        fm._library.node(q, k, v, None, 0.1, False)


def test_a_node_in_cpp_gives_what_is_asked_of_it():
    q, k, v, bias = plain_leaves(torch.float64, True)
    with torch.no_grad():
        assert not fm.flash_attention(q, k, v, bias=bias).requires_grad
    # Gradients of some inputs, twice, and none that comes back.
    for wanted in ((q,), (k, bias), (v,)):
        for x in (q, k, v, bias):
            x.requires_grad_(any(x is y for y in wanted)).grad = None
        out = fm.flash_attention(q, k, v, bias=bias)
        out.sum().backward(retain_graph=True)
        once = [x.grad.clone() for x in wanted]
        out.sum().backward()
        assert all(torch.equal(x.grad, 2 * y) for x, y in zip(wanted, once, strict=True))
        assert all((x.grad is None) != x.requires_grad for x in (q, k, v, bias))
        with pytest.raises(RuntimeError, match="second time"):
            out.sum().backward()
    # A gradient that moves, of a call that was made before anything did.
    q.requires_grad_()
    out = fm.flash_attention(q, k, v, bias=bias)
    along = torch.ones_like(out)
    with fwd.dual_level():
        (grad,) = torch.autograd.grad(out, q, fwd.make_dual(weights(out), along), retain_graph=True)
        moved = fwd.unpack_dual(grad).tangent
    torch.testing.assert_close(moved, torch.autograd.grad(out, q, along)[0])


def both_nodes(monkeypatch, gradient):
    """gradient(out, q), by the node in C++ and by the one in Python."""
    found = []
    for node in (fm._library.node, None):
        with monkeypatch.context() as patch:
            patch.setattr(fm._library, "node", node)
            q, k, v = plain_leaves(torch.float64, False)
            found.append(gradient(fm.flash_attention(q, k, v), q))
    return found


def lazily_negated(out, q):
    """As of a loss in complex numbers: -1 is a bit of the gradient, not yet in its memory."""
    grad = torch._neg_view(weights(out))
    assert grad.is_neg()
    return torch.autograd.grad(out, q, grad)[0]


def through_complex_numbers(out, q):
    loss = (torch.complex(torch.zeros_like(out), out).conj() * (1 + 2j)).real.sum()
    return torch.autograd.grad(loss, q)[0]


def of_zeros_without_memory(out, q):
    return torch.autograd.grad(out, q, torch._efficientzerotensor(out.shape, dtype=out.dtype))[0]


def traced(out, q):
    """What is traced has the gradient that comes in as an input, and no number of the trace."""

    def backward(grad):
        return torch.autograd.grad(out, q, grad, retain_graph=True)[0]

    return make_fx(backward)(torch.ones_like(out))(weights(out))


def of_a_pair(out, q):
    """A gradient that is a tensor of two."""
    return torch.autograd.grad(out, q, TwoTensor(weights(out), 2 * weights(out)))[0].b


def by_compiled_autograd(out, q):
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
        (out * weights(out)).sum().backward()
    return q.grad


@pytest.mark.parametrize(
    "gradient",
    [
        lazily_negated, through_complex_numbers, of_zeros_without_memory, traced, of_a_pair,
        by_compiled_autograd,
    ],
)  # fmt: skip
def test_the_gradient_that_comes_in_is_what_torch_means_by_it(gradient, monkeypatch):
    got, want = both_nodes(monkeypatch, gradient)
    torch.testing.assert_close(got, want, rtol=0, atol=0)
    assert (want != 0).any() == (gradient is not of_zeros_without_memory)


def test_a_bias_that_is_no_plain_tensor_has_the_node_in_python():
    q, k, v, bias = plain_leaves(torch.float64, True)
    plain, parameter = bias.detach(), torch.nn.Parameter(bias.detach())
    assert "Overrideable" in fm.flash_attention(q, k, v, bias=plain).grad_fn.name()
    assert "Overrideable" in fm.flash_attention(q, k, v, bias=parameter).grad_fn.name()
    out = fm.flash_attention(q, k, v, bias=TwoTensor(plain, plain))
    torch.testing.assert_close(out.a, fm.flash_attention(q, k, v, bias=plain))
