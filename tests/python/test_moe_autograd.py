"""How the mixture of experts behaves inside torch: autograd, ops, compiled and exported graphs.

test_autograd.py asks it for everything else that autograd and torch.func offer.
"""

from __future__ import annotations

import gc

import pytest
import torch
from torch import func
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import flashmoe_science as fm
from moe_oracle import ACTIVATIONS, DIFFERENTIABLE, make
from oracle import same_bits


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield


OPS = torch.ops.flashmoe
BIASES = (True, True)


def leaves_of(case, needs=DIFFERENTIABLE):
    return {n: x.detach().requires_grad_(n in needs) for n, x in case.inputs().items()}


def gradients(case, leaves, call=fm.moe):
    out = call(**leaves, ids=case.ids, activation=case.activation)
    return torch.autograd.grad(out, [x for x in leaves.values() if x.requires_grad], case.grad_out)


def all_the_same(got, want) -> None:
    for a, b in zip(got, want, strict=True):
        assert same_bits(a, b)


# Derivatives by finite differences.


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradcheck(activation):
    ids = torch.tensor([[0, 2], [2, 2], [-1, 1], [4, 0], [1, 0]])
    case = make(5, 4, 3, 3, dtype=torch.float64, ids=ids, activation=activation, biases=BIASES)
    leaves = leaves_of(case)

    def ours(*tensors):
        named = dict(zip(leaves, tensors, strict=True))
        return fm.moe(**named, ids=ids, activation=activation)

    assert torch.autograd.gradcheck(ours, tuple(leaves.values()))


def test_gradcheck_across_tiles():
    """Past every tile, in one random direction (fast mode): all would take minutes."""
    case = make(150, 40, 70, 3, dtype=torch.float64, biases=BIASES)
    leaves = leaves_of(case)

    def ours(*tensors):
        return fm.moe(**dict(zip(leaves, tensors, strict=True)), ids=case.ids)

    assert torch.autograd.gradcheck(ours, tuple(leaves.values()), fast_mode=True)


# Autograd's house rules.


@pytest.mark.parametrize("wanted", [*DIFFERENTIABLE, "x weights", "gate_up down_bias"])
def test_only_the_gradients_that_are_wanted(wanted, monkeypatch):
    case = make(biases=BIASES)
    everything = dict(zip(case.inputs(), gradients(case, leaves_of(case)), strict=True))
    from flashmoe_science import _library

    asked, run = [], _library.moe_backward
    monkeypatch.setattr(
        _library, "moe_backward", lambda *args: asked.append(args[-6:]) or run(*args)
    )
    leaves = leaves_of(case, wanted.split())
    out = fm.moe(**leaves, ids=case.ids)
    out.backward(case.grad_out)
    for name, leaf in leaves.items():
        if name in wanted.split():
            assert same_bits(leaf.grad, everything[name]), name
        else:
            assert leaf.grad is None, name
    order = ("x", "gate_up", "down", "up_bias", "down_bias", "weights")
    assert asked == [tuple(name in wanted.split() for name in order)]


def held_for_backward(call) -> tuple[torch.Tensor, list[torch.Tensor]]:
    saved = []
    with saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        return call(), saved


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_memory_held_for_the_backward_pass(dtype):
    """x, pre-activations and routing; ids, weights and parameters are the caller's own."""
    T, d, n, E, k = 512, 64, 48, 8, 4
    case = make(T, d, n, E, k, dtype=dtype, biases=BIASES)
    leaves = leaves_of(case)
    out, saved = held_for_backward(lambda: fm.moe(**leaves, ids=case.ids))
    callers = {x.data_ptr() for n, x in leaves.items() if n != "x"} | {case.ids.data_ptr()}
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in saved}
    held = sum(size for address, size in storages.items() if address not in callers)
    size = torch.finfo(dtype).bits // 8
    needed = T * d * size + T * k * 2 * n * size + 4 * (E + 1 + T * k)
    assert needed <= held <= 1.02 * needed
    function = out.grad_fn
    assert not [x for x in vars(function).values() if isinstance(x, torch.Tensor)], "kept besides"


def test_memory_is_given_back():
    """No tensor of a call lives longer than its graph; without gradients nothing is kept."""
    case = make(64, 32, 24, biases=BIASES)
    gc.collect()

    def tensors():
        return sum(isinstance(x, torch.Tensor) for x in gc.get_objects())

    before = tensors()
    for _ in range(3):
        leaves = leaves_of(case)
        gradients(case, leaves)
        del leaves
    gc.collect()
    assert tensors() <= before  # what tests before left behind may go as well
    _, saved = held_for_backward(lambda: fm.moe(**leaves_of(case, ()), ids=case.ids))
    assert not saved


def test_backward_twice_over_one_graph():
    case = make(biases=BIASES)
    leaves = leaves_of(case)
    out = fm.moe(**leaves, ids=case.ids)
    first = torch.autograd.grad(out.sum(), list(leaves.values()), retain_graph=True)
    all_the_same(torch.autograd.grad(out.sum(), list(leaves.values())), first)


def test_checkpointing():
    case = make(33)
    leaves = leaves_of(case)

    def again(**named):
        return checkpoint(fm.moe, **named, use_reentrant=False)

    all_the_same(gradients(case, leaves, again), gradients(case, leaves))


@pytest.mark.parametrize("name", ["x", "gate_up", "down", "weights", "ids"])
def test_changing_a_saved_tensor_is_noticed(name):
    case = make()
    named = {n: 1.5 * x for n, x in leaves_of(case).items()} | {"ids": case.ids.clone()}
    loss = fm.moe(**named).sum()
    with torch.no_grad():
        named[name].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_lazy_negation_is_seen():
    """The negative of a tensor can be a bit in its flags, with the data unchanged."""
    case = make()
    flagged = torch._neg_view(case.x)
    assert flagged.is_neg() and flagged.data_ptr() == case.x.data_ptr()
    rest = (case.gate_up, case.down, case.ids, case.weights)
    assert same_bits(fm.moe(flagged, *rest), fm.moe(-case.x, *rest))


def test_explain_answers_inside_transforms():
    case = make()
    rest = (case.gate_up, case.down, case.ids, case.weights)
    said = []

    def ask(x):
        said.append(fm.explain_moe(x, *rest))
        return x.sum()

    func.grad(ask)(case.x)
    func.jvp(ask, (case.x,), (case.x,))
    assert all(text.startswith("forward mixture of experts") for text in said) and len(said) == 2


# The op registry.

VARIANTS = {
    "plain": {},
    "half": {"dtype": torch.float16},
    "biases": {"biases": BIASES, "activation": "gelu"},
    "no weights": {"weighted": False},
    "odd": {"T": 3, "d": 5, "n": 7, "E": 2, "k": 1},
    "empty": {"T": 0},
}


def arguments(kind: str, grad: bool) -> tuple:
    case = make(**VARIANTS[kind])
    tensors = leaves_of(case, DIFFERENTIABLE if grad else ())
    order = ("x", "gate_up", "down", "up_bias", "down_bias", "ids", "weights")
    return *(case.ids if n == "ids" else tensors.get(n) for n in order), case.activation


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("kind", VARIANTS)
def test_opcheck_forward(kind, keep):
    for grad in (False, True):
        torch.library.opcheck(OPS.moe_forward.default, (*arguments(kind, grad), keep))


@pytest.mark.parametrize("kind", VARIANTS)
def test_opcheck_with_autograd(kind):
    for grad in (False, True):
        torch.library.opcheck(OPS.moe.default, (*arguments(kind, grad), grad))


@pytest.mark.parametrize("kind", VARIANTS)
def test_opcheck_backward(kind):
    given = arguments(kind, grad=False)
    out, pre, routing = OPS.moe_forward(*given, True)
    there = tuple(given[i] is not None for i in (0, 1, 2, 3, 4, 6))
    for needs in (there, (False, True) + (False,) * 4, (True,) * 6):
        given_there = tuple(n and t for n, t in zip(needs, there, strict=True))
        torch.library.opcheck(
            OPS.moe_backward.default, (torch.randn_like(out), pre, routing, *given, *given_there)
        )


@pytest.mark.parametrize("grad", [False, True])
def test_opcheck_route(grad):
    logits, bias = torch.randn(6, 5, requires_grad=grad), torch.randn(5)
    for op in (OPS.route.default, OPS.route_forward.default):
        for more in ((None, 2, "softmax", True), (bias, 3, "sigmoid", False)):
            torch.library.opcheck(op, (logits, *more))
    ids, weights = fm.route(logits.detach(), 2)
    backward = (torch.randn_like(weights), logits.detach(), ids, "softmax", True)
    torch.library.opcheck(OPS.route_backward.default, backward)


@pytest.mark.parametrize("kind", ["plain", "half", "biases", "odd"])
@pytest.mark.parametrize("layout", ["plain", "transposed", "sliced"])
def test_fake_results_look_like_real_ones(kind, layout):
    """Shapes, dtypes and strides: a compiled graph is laid out by them."""

    def laid(x):
        if not isinstance(x, torch.Tensor) or layout == "plain":
            return x
        return (
            x.mT.contiguous().mT
            if layout == "transposed"
            else x.repeat(2, *[1] * (x.dim() - 1))[::2]
        )

    given = tuple(laid(x) for x in arguments(kind, grad=False))
    real = OPS.moe_forward(*given, True)
    there = tuple(given[i] is not None for i in (0, 1, 2, 3, 4, 6))
    grads = OPS.moe_backward(real[0], *real[1:], *given, *there)
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for x in given]
        fake = OPS.moe_forward(*fakes, True)
        fake_grads = OPS.moe_backward(fake[0], *fake[1:], *fakes, *there)
    for a, b in zip((*real, *grads), (*fake, *fake_grads), strict=True):
        assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())


# Compiled and exported graphs.


class Layer(torch.nn.Module):
    """A router and its experts."""

    def __init__(self, d=8, n=6, E=4, k=2) -> None:
        super().__init__()
        self.k, self.router = k, torch.nn.Linear(d, E)
        self.gate_up = torch.nn.Parameter(torch.randn(E, 2 * n, d))
        self.down = torch.nn.Parameter(torch.randn(E, d, n))

    def forward(self, x):
        ids, weights = fm.route(self.router(x), self.k)
        return x + fm.moe(x, self.gate_up, self.down, ids, weights)


def graph_of(program) -> str:
    return "".join(m.code for m in program.graph_module.modules() if hasattr(m, "code"))


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_compile_without_graph_breaks(backend):
    layer = Layer()
    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    for shape in ((7, 8), (2, 5, 8)):
        x = torch.randn(shape, requires_grad=True)
        inputs = [x, *layer.parameters()]
        want, got = layer(x), compiled(x)
        torch.testing.assert_close(got, want)
        weights = torch.randn_like(want)
        for a, b in zip(
            torch.autograd.grad(got, inputs, weights),
            torch.autograd.grad(want, inputs, weights),
            strict=True,
        ):
            torch.testing.assert_close(a, b)
        with torch.no_grad():
            torch.testing.assert_close(compiled(x), want)


def test_compile_with_dynamic_shapes():
    layer, counter = Layer(), torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=counter)
    for T in (5, 9, 33):
        x = torch.randn(T, 8)
        torch.testing.assert_close(compiled(x), layer(x))
    assert counter.frame_count == 1


def test_a_compiled_call_without_gradients_keeps_nothing():
    kept = []

    def backend(graph, inputs):
        kept.extend(n.args[-1] for n in graph.graph.nodes if n.target is OPS.moe.default)
        return graph

    layer, x = Layer(), torch.randn(7, 8)
    torch.compile(layer, fullgraph=True, backend=backend)(x)
    with torch.no_grad():
        torch.compile(layer, fullgraph=True, backend=backend)(x)
    assert kept == [True, False]


@pytest.mark.parametrize("strict", [False, True])
def test_export(strict):
    layer, x = Layer(), torch.randn(5, 8)
    shapes = {"x": {0: torch.export.Dim("tokens", min=2, max=4096)}}
    program = torch.export.export(layer, (x,), dynamic_shapes=shapes, strict=strict)
    assert "flashmoe.moe." in graph_of(program) and "flashmoe.route." in graph_of(program)
    for tokens in (5, 33):
        x = torch.randn(tokens, 8)
        assert same_bits(program.module()(x).detach(), layer(x).detach())


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_program_has_gradients(strict, grad):
    """Also one that was exported without: what is kept is decided when it runs."""
    layer, x = Layer(), torch.randn(5, 8)
    with torch.set_grad_enabled(grad):
        program = torch.export.export(layer, (x,), strict=strict).module()
    weights = torch.randn(5, 8)
    want = torch.autograd.grad(layer(x), list(layer.parameters()), weights)
    got = torch.autograd.grad(program(x), list(program.parameters()), weights)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)
