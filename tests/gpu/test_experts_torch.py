"""A mixture of experts inside torch on a GPU: what traced graphs rely on, and memory."""

from __future__ import annotations

import pytest
import torch
from families import forced
from helpers import DEVICE, on_a_gpu
from torch._subclasses.fake_tensor import FakeTensorMode

import flashmoe_science as fm
from moe_oracle import make
from oracle import same_bits
from test_moe_autograd import Layer, leaves_of

pytestmark = pytest.mark.kernels(role="moe_up")

OPS = torch.ops.flashmoe
NAMES = ("x", "gate_up", "down", "up_bias", "down_bias", "ids", "weights")


def skip_odd_widths(*widths: int) -> None:
    if forced() == "sm90" and any(width % 8 for width in widths):
        pytest.skip("the sm90 family takes widths that are multiples of 8")


def arguments(case, grad=False) -> tuple:
    given = leaves_of(case, NAMES if grad else ()) | {"ids": case.ids}
    return *(given.get(name) for name in NAMES), case.activation


@pytest.mark.parametrize("transposed", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize("activation", ["swiglu", "relu"])
@pytest.mark.parametrize("d, n", [(16, 24), (7, 5), (33, 1), (64, 20)])
def test_fake_results_look_like_real_ones(dtype, d, n, activation, transposed):
    """Shapes, dtypes and strides, also of pre-activations whose rows are padded here alone."""
    skip_odd_widths(d, n)
    case = make(9, d, n, 4, dtype=dtype, activation=activation, biases=(True, True)).to(DEVICE)
    if transposed:
        case.gate_up, case.down = (w.mT.contiguous().mT for w in (case.gate_up, case.down))
    given, needs = arguments(case), (True,) * 6
    real = OPS.moe_forward(*given, True)
    real += OPS.moe_backward(real[0], *real[1:], *given, *needs)
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for x in given]
        fake = OPS.moe_forward(*fakes, True)
        fake += OPS.moe_backward(fake[0], *fake[1:], *fakes, *needs)
    for a, b in zip(real, fake, strict=True):
        assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())


@pytest.mark.parametrize("n", [24, 5])
def test_opcheck(dtype, n):
    skip_odd_widths(n)
    case = make(9, 16, n, 4, dtype=dtype, biases=(True, True)).to(DEVICE)
    torch.library.opcheck(OPS.moe_forward.default, (*arguments(case), True))
    torch.library.opcheck(OPS.moe.default, (*arguments(case, grad=True), True))
    logits = torch.randn(9, 4, device=DEVICE, dtype=dtype, requires_grad=True)
    torch.library.opcheck(OPS.route.default, (logits, None, 2, "softmax", True))


@pytest.mark.parametrize("d, n", [(16, 24), (10, 5)])
def test_compiled(dtype, d, n):
    skip_odd_widths(d, n)
    torch._dynamo.reset()
    layer = Layer(d, n).to(DEVICE, dtype)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = torch.randn(37, d, device=DEVICE, dtype=dtype, requires_grad=True)
    inputs, results = [x, *layer.parameters()], []
    for call in (layer, compiled):
        out = call(x)
        results.append([out.detach(), *torch.autograd.grad(out, inputs, torch.ones_like(out))])
    assert all(same_bits(a, b) for a, b in zip(*results, strict=True))


@on_a_gpu
def test_memory_held_for_the_backward_pass(dtype):
    T, d, n, E, k = 8192, 256, 128, 16, 4
    case = make(T, d, n, E, k, dtype=dtype).to(DEVICE)
    leaves = leaves_of(case)
    fm.moe(**leaves, ids=case.ids)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    out = fm.moe(**leaves, ids=case.ids)
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated() - before - out.nbytes
    needed = T * k * 2 * n * dtype.itemsize + 4 * (E + 1 + T * k)  # and x, which is there
    assert needed <= held <= 1.02 * needed
