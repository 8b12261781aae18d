"""torch.compile and torch.export.

aot_eager traces all that inductor traces, and compiles nothing.
"""

from __future__ import annotations

import pytest
import torch
import torch._dynamo.testing

import flashmoe_science as fm
from oracle import same_bits
from test_torch import grads_of, qkv, ragged


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield


def compiled(function, backend="aot_eager", **options):
    return torch.compile(function, fullgraph=True, backend=backend, **options)


def dense_block(q, k, v, bias, sinks):
    options = {"causal": True, "window": (7, -1), "softcap": 3.0, "return_lse": True}
    out, lse = fm.flash_attention(q * 1.1, k, v, bias=bias.tanh(), sinks=sinks * 2, **options)
    return torch.relu(out) + lse.exp().unsqueeze(-1)


def bias_and_sinks(n, m):
    return torch.randn(4, n, m, requires_grad=True), torch.randn(4, requires_grad=True)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compile_dense(backend):
    tensors = [*qkv(2, n=21, m=33), *bias_and_sinks(21, 33)]
    want = dense_block(*tensors)
    got = compiled(dense_block, backend)(*tensors)
    torch.testing.assert_close(got, want)
    for a, b in zip(grads_of(got, tensors), grads_of(want, tensors), strict=True):
        torch.testing.assert_close(a, b)


def test_compile_ragged():
    tensors, cu, longest, bias = ragged()
    inputs = [*tensors, bias, torch.randn(4, requires_grad=True)]

    def block(q, k, v, bias, sinks):
        more = {"bias": bias * 2, "sinks": sinks.sin(), "causal": True}
        return fm.flash_attention_varlen(q, k.sin(), v, *cu, *longest, **more).cos()

    want = block(*inputs)
    got = compiled(block)(*inputs)
    torch.testing.assert_close(got, want)
    for a, b in zip(grads_of(got, inputs), grads_of(want, inputs), strict=True):
        torch.testing.assert_close(a, b)


def test_compile_without_gradients():
    tensors = qkv(2, grad=False)
    want = fm.flash_attention(*tensors, return_lse=True)
    got = compiled(fm.flash_attention)(*tensors, return_lse=True)
    assert all(same_bits(a, b) for a, b in zip(got, want, strict=True))


def test_compile_keeps_the_layout_of_strided_inputs():
    tensors = [
        x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in qkv(2)
    ]
    want, got = fm.flash_attention(*tensors), compiled(fm.flash_attention)(*tensors)
    assert got.stride() == want.stride() and same_bits(got, want)
    for a, b in zip(grads_of(got, tensors), grads_of(want, tensors), strict=True):
        assert same_bits(a, b)


def test_compile_with_dynamic_shapes_compiles_once():
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    block = torch.compile(dense_block, fullgraph=True, backend=counter, dynamic=True)
    # No two sizes alike in the first call: dynamo takes equal ones for one symbol.
    for batch, n, m in ((3, 21, 33), (2, 18, 40), (5, 64, 65)):
        tensors = [*qkv(batch, n=n, m=m), *bias_and_sinks(n, m)]
        want, got = dense_block(*tensors), block(*tensors)
        torch.testing.assert_close(got, want)
        for a, b in zip(grads_of(got, tensors), grads_of(want, tensors), strict=True):
            torch.testing.assert_close(a, b)
    assert counter.frame_count == 1


def test_compile_ragged_with_dynamic_shapes_compiles_once():
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    block = torch.compile(fm.flash_attention_varlen, fullgraph=True, backend=counter, dynamic=True)
    for lengths in (((5, 7), (6, 9)), ((9, 11), (0, 3), (6, 6)), ((3, 3), (8, 5), (7, 2), (2, 4))):
        tensors, cu, longest, bias = ragged(lengths)
        want = fm.flash_attention_varlen(*tensors, *cu, *longest, bias=bias)
        got = block(*tensors, *cu, *longest, bias=bias)
        assert same_bits(got, want)
        inputs = [*tensors, bias]
        for a, b in zip(grads_of(got, inputs), grads_of(want, inputs), strict=True):
            assert same_bits(a, b)
    assert counter.frame_count == 1


class Attends(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.project = torch.nn.Linear(8, 8)
        self.sinks = torch.nn.Parameter(torch.randn(4))

    def forward(self, x, bias):
        q, k, v = self.project(x), self.project(x + 1), x
        options = {"bias": bias, "sinks": self.sinks, "causal": True}
        return fm.flash_attention(q, k, v, **options, return_lse=True)


@pytest.mark.parametrize("strict", [False, True])
def test_export(strict):
    module, x, bias = Attends(), torch.randn(2, 4, 9, 8), torch.randn(4, 9, 9)
    batch, length = torch.export.Dim("batch"), torch.export.Dim("length", min=2, max=4096)
    shapes = {"x": {0: batch, 2: length}, "bias": {1: length, 2: length}}
    program = torch.export.export(module, (x, bias), dynamic_shapes=shapes, strict=strict)
    graphs = [m.code for m in program.graph_module.modules() if hasattr(m, "code")]
    assert any("flashmoe.attention." in code for code in graphs)
    for inputs in ((x, bias), (torch.randn(3, 4, 33, 8), torch.randn(4, 33, 33))):
        want = module(*inputs)
        got = program.module()(*inputs)
        assert all(same_bits(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_program_has_gradients(strict):
    module, x, bias = Attends(), torch.randn(2, 4, 9, 8), torch.randn(4, 9, 9)
    program = torch.export.export(module, (x, bias), strict=strict).module()
    bias.requires_grad_()
    want = grads_of(module(x, bias), [*module.parameters(), bias])
    got = grads_of(program(x, bias), [*program.parameters(), bias])
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("allowed", [False, True], ids=["three", "one"])
def test_what_is_exported_keeps_its_product(allowed):
    """Whether fp32 on a GPU may be TF32 is an argument of the op; meta stands for the GPU."""
    tensors = [torch.empty(1, 2, 8, 16, device="meta") for _ in "qkv"]

    class Model(torch.nn.Module):
        def forward(self, q, k, v):
            return fm.flash_attention(q, k, v)

    torch.set_float32_matmul_precision("high" if allowed else "highest")
    try:
        program = torch.export.export(Model(), tuple(tensors))
    finally:
        torch.set_float32_matmul_precision("highest")
    (call,) = (node for node in program.graph.nodes if "flashmoe" in str(node.target))
    assert call.args[16] is allowed
    names = [argument.name for argument in call.target._schema.arguments]
    assert names[16] == "allow_tf32"


def test_a_compiled_call_follows_what_torch_allows():
    seen = []

    def record(graph, _):
        seen.extend(node.args[16] for node in graph.graph.nodes if "flashmoe" in str(node.target))
        return graph.forward

    call = torch.compile(lambda q: fm.flash_attention(q, q, q), fullgraph=True, backend=record)
    q = torch.empty(1, 2, 8, 16, device="meta")
    try:
        for precision in ("highest", "high", "highest"):
            torch.set_float32_matmul_precision(precision)
            call(q)
        call(q.half())
    finally:
        torch.set_float32_matmul_precision("highest")
    assert seen == [False, True, False], "each kept, and none for other dtypes"
