"""Second derivatives of attention: against torch's autograd over the plain formula in float64."""

from __future__ import annotations

import gc
import os
import subprocess
import sys

import pytest
import torch
from torch import func
from torch.autograd import forward_ad

import flashmoe_science as fm
import second_oracle
from catalogue import needs_all_families
from oracle import same_bits
from problems import Seeded, build, draw
from second_oracle import call_ours, differentiate_twice, tangents_of

PROBLEMS = 120
CHUNK = 20


def complaints_about(seed: int, threads) -> list[str]:
    case = second_oracle.differentiable(build(draw(Seeded(seed), budget=200_000)))
    tangents = tangents_of(case, seed)
    threads(1)
    alone = differentiate_twice(case, tangents, call_ours)
    threads(2)
    together = differentiate_twice(case, tangents, call_ours)
    found = second_oracle.compare(case, tangents, together)
    different = (name for name in alone if not same_bits(alone[name], together[name]))
    return found + [f"{name}: 1 and 2 threads give different bits" for name in different]


@pytest.mark.parametrize("first", range(0, PROBLEMS, CHUNK))
def test_random_problems(first, threads):
    failures = []
    for seed in range(7000 + first, 7000 + first + CHUNK):
        if found := complaints_about(seed, threads):
            failures.append("\n  ".join([f"seed {seed}", *found]))
    assert not failures, "\n".join(failures[:5])


def double(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()


def masked(bias):
    """A key that no row of the first head sees, and a row without keys."""
    hole = torch.zeros(2, 3, 4, dtype=torch.bool)
    hole[0, :, 1] = hole[1, 2] = True
    return bias.masked_fill(hole, -torch.inf)


@pytest.mark.parametrize(
    "options", [{}, {"softcap": 0.7}, {"causal": True, "scale": -0.4}], ids=str
)
def test_gradgradcheck(options):
    """With a bias that masks, and both results in the loss."""
    q, k, v, bias = double(1, 2, 3, 2), double(1, 1, 4, 2), double(1, 1, 4, 3), double(2, 3, 4)

    def call(q, k, v, bias):
        out, lse = fm.flash_attention(q, k, v, bias=masked(bias), return_lse=True, **options)
        return out, lse.masked_fill(lse == -torch.inf, 0)

    assert torch.autograd.gradgradcheck(call, (q, k, v, bias))


SUBSETS = ["q", "k", "v", "b", "qk", "vb", "qkvb"]


@pytest.mark.parametrize("first", SUBSETS)
@pytest.mark.parametrize("second", SUBSETS)
def test_any_subset_of_inputs(first, second):
    """Gradients by some inputs, differentiated by others."""
    inputs = {"q": double(2, 2, 5, 4), "k": double(2, 2, 6, 4, seed=1)}
    inputs |= {"v": double(2, 2, 6, 3, seed=2), "b": double(5, 6, seed=3)}

    def ask(call):
        out = call(*inputs.values())
        grads = torch.autograd.grad(
            out.sin().sum(), [inputs[name] for name in first], create_graph=True
        )
        return torch.autograd.grad(
            sum(x.cos().sum() for x in grads), [inputs[name] for name in second]
        )

    def math(q, k, v, b):
        return (q @ k.mT / 2 + b).softmax(-1) @ v

    for got, want in zip(ask(fm.flash_attention), ask(math), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("rows, keys", [(0, 3), (3, 0), (0, 0)])
def test_empty_sequences(rows, keys):
    q, k, v = double(2, 2, rows, 4), double(2, 2, keys, 4), double(2, 2, keys, 3)
    out, lse = fm.flash_attention(q, k, v, return_lse=True)
    grads = torch.autograd.grad(out.sum() + lse.sum(), (q, k, v), create_graph=True)
    seconds = torch.autograd.grad(sum(x.sum() for x in grads), (q, k, v))
    for x, second in zip((q, k, v), seconds, strict=True):
        assert second.shape == x.shape and not second.any()


def test_second_gradients_accumulate_in_leaves():
    """As forces are trained: backward() of a loss of gradients."""
    x = double(1, 1, 6, 4).detach().requires_grad_()
    weight = double(4, 4, seed=5)

    def loss(attention):
        weight.grad = None
        h = x @ weight
        force = torch.autograd.grad(attention(h, h, h).square().sum(), x, create_graph=True)[0]
        (force - 1).square().sum().backward()
        return weight.grad.clone()

    want = loss(lambda q, k, v: (q @ k.mT / 2).softmax(-1) @ v)
    torch.testing.assert_close(loss(fm.flash_attention), want, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("poisoned", ["q", "k", "v", "b"])
def test_nan_behind_a_mask_stays_there(poisoned):
    """Keys past key_lengths, and pairs that a bias of -inf hides, in inputs and their tangents."""
    q, k, v, b = (
        x.detach()
        for x in (double(2, 1, 3, 4), double(2, 1, 5, 4), double(2, 1, 5, 3), double(2, 1, 3, 5))
    )
    lengths = torch.tensor([5, 3])
    b[0, :, :, 2] = -torch.inf

    def ask(q, k, v, b, tangents):
        inputs = [x.clone().requires_grad_() for x in (q, k, v, b)]
        out, lse = fm.flash_attention(
            *inputs[:3], bias=inputs[3], key_lengths=lengths, return_lse=True
        )
        grads = torch.autograd.grad((out.sin().sum() + lse.sum()), inputs, create_graph=True)
        return torch.autograd.grad(grads, inputs, tangents)

    tangents = [x.detach().sin().nan_to_num() for x in (q, k, v, b)]
    want = ask(q, k, v, b, tangents)
    at = "qkvb".index(poisoned)
    for tensors in ([q, k, v, b], tangents):
        x = tensors[at]
        if poisoned == "q":
            continue  # every row sees a key
        if poisoned == "b":
            x[1, :, :, 3:] = torch.nan
        else:
            x[0, :, 2] = x[1, :, 3:] = torch.nan
    got = ask(q, k, v, b, tangents)
    for a, w in zip(got, want, strict=True):
        assert same_bits(a, w)


def test_third_derivatives_are_refused():
    q = double(1, 1, 3, 2)
    first = torch.autograd.grad(fm.flash_attention(q, q, q).sin().sum(), q, create_graph=True)[0]
    second = torch.autograd.grad(first.sin().sum(), q, create_graph=True)[0]
    with pytest.raises(NotImplementedError, match="no third derivative"):
        torch.autograd.grad(second.sum(), q)


@pytest.mark.parametrize("op", ["attention_tangent", "attention_second"])
def test_ops_pass_opcheck(op):
    x = [
        y.detach()
        for y in (double(1, 2, 3, 4), *(double(1, 1, 5, 4),) * 2, double(2, 3, 5), double(2))
    ]
    options = (*(None,) * 3, 0, 0, False, -1, -1, None, 0.0, False, False, 0.0, None)
    out, lse = torch.ops.flashmoe.attention(*x, *options)
    tangents = tuple(y.sin() for y in x)
    args = (*tangents, out, lse, *x, *options)
    if op == "attention_second":
        moved = torch.ops.flashmoe.attention_tangent(*args)
        args = (
            *tangents,
            *moved,
            out.cos(),
            lse.cos(),
            out,
            lse,
            *x,
            *options,
            *(True,) * 4,
            False,
        )
    torch.library.opcheck(getattr(torch.ops.flashmoe, op).default, args)


def test_second_derivatives_of_a_compiled_function():
    q, k, v = (double(1, 2, 3, 4, seed=i) for i in range(3))

    def second(call):
        first = torch.autograd.grad(call(q, k, v).sin().sum(), (q, k, v), create_graph=True)
        return torch.autograd.grad(sum(x.sin().sum() for x in first), (q, k, v))

    compiled = torch.compile(fm.flash_attention, backend="eager", fullgraph=True)
    for got, want in zip(second(compiled), second(fm.flash_attention), strict=True):
        assert same_bits(got, want)


def test_an_exported_program_has_second_derivatives():
    """A potential that was exported gives forces that can be trained on."""

    class Model(torch.nn.Module):
        def forward(self, q, k, v, bias):
            return fm.flash_attention(q, k, v, bias=bias)

    inputs = tuple(double(*s) for s in ((1, 2, 3, 4), (1, 2, 5, 4), (1, 2, 5, 4), (2, 3, 5)))
    program = torch.export.export(Model(), inputs).module()

    def second(call):
        first = torch.autograd.grad(call(*inputs).sin().sum(), inputs, create_graph=True)
        return torch.autograd.grad(sum(x.sin().sum() for x in first), inputs)

    for got, want in zip(second(program), second(Model()), strict=True):
        assert same_bits(got, want)


@pytest.mark.parametrize("derivative", ["tangent", "second"])
def test_explain_answers(derivative):
    q = torch.empty(2, 4, 300, 24, dtype=torch.bfloat16, device="meta")
    bias = torch.empty(4, 300, 300, device="meta")
    text = fm.explain(q, q, q, bias=bias, device="cpu", derivative=derivative)
    assert f"_attention_{derivative}" in text and "bitwise reproducible" in text
    assert "bias float32 (4, 300, 300)" in text


@needs_all_families
@pytest.mark.parametrize("chip, family", [("sm_75", "sm75"), ("sm_80", "sm80"), ("sm_90", "sm80")])
@pytest.mark.parametrize("derivative", ["tangent", "second"])
def test_explain_answers_for_a_gpu(derivative, chip, family):
    for dtype in (torch.float32, torch.float16):
        q = torch.empty(2, 4, 300, 24, dtype=dtype, device="meta")
        text = fm.explain(q, q, q, device=chip, derivative=derivative)
        assert f"{family}_attention_{derivative}" in text and "bitwise reproducible" in text


def test_explain_knows_what_to_explain():
    q = torch.empty(1, 1, 3, 4)
    with pytest.raises(ValueError, match='derivative must be "tangent" or "second"'):
        fm.explain(q, q, q, derivative="third")
    with pytest.raises(ValueError, match="backward and derivative"):
        fm.explain(q, q, q, backward=True, derivative="second")


def test_dropout_has_gradients_alone():
    q, k, v = double(1, 2, 3, 4), double(1, 2, 5, 4), double(1, 2, 5, 4)

    def attend(q):
        return fm.flash_attention(q, k, v, dropout_p=0.5, seed=1)

    (grad,) = torch.autograd.grad(attend(q).square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match=r"dropout.*second"):
        torch.autograd.grad(grad.sum(), q)
    with pytest.raises(RuntimeError, match=r"dropout.*forward-mode"):
        torch.func.jvp(attend, (q,), (q,))


def alive() -> int:
    gc.collect()
    return sum(type(x) is torch.Tensor for x in gc.get_objects())


@pytest.mark.parametrize("how", ["backward", "func.hessian", "forward_ad"])
def test_memory_is_given_back(how):
    """No graph holds itself."""

    def ask():
        q, k, v = (double(1, 2, 3, 4, seed=i).detach().requires_grad_() for i in range(3))
        if how == "backward":
            out, lse = fm.flash_attention(q, k, v, return_lse=True)
            loss = out.square().sum() + lse.sum()
            first = torch.autograd.grad(loss, (q, k, v), create_graph=True)
            torch.autograd.grad(sum(x.square().sum() for x in first), (q, k, v))
        elif how == "func.hessian":
            torch.func.hessian(lambda q: fm.flash_attention(q, k, v).square().sum())(q.detach())
        else:
            with forward_ad.dual_level():
                fm.flash_attention(forward_ad.make_dual(q, q.detach()), k, v).sum().backward()

    ask()
    before = alive()
    for _ in range(3):
        ask()
    assert alive() <= before


MEMORY = """
import torch
import flashmoe_science as fm

def status(field):
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field))

def grown(work):
    with open("/proc/self/clear_refs", "w") as refs:
        refs.write("5")
    before = status("VmRSS")
    work()
    return status("VmHWM") - before

def attention(length):
    q, k, v = (torch.randn(1, 1, length, 16, requires_grad=True) for _ in range(3))
    bias = torch.randn(length, 1, requires_grad=True)
    out = fm.flash_attention(q, k, v, bias=bias, window=(64, 64))
    grads = torch.autograd.grad(out.sum(), (q, k, v, bias), create_graph=True)
    sum(x.sum() for x in grads).backward()
    assert q.grad.isfinite().all() and bias.grad.isfinite().all()

attention(512)
print(*(grown(lambda: attention(length)) for length in (16384, 32768)))
"""


def test_memory_is_linear_in_the_length(checkout):
    """32,768 squared is a GiB even of bytes."""
    run = subprocess.run(
        [sys.executable, "-c", MEMORY],
        env={**os.environ, "PYTHONPATH": str(checkout / "python")},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
    half, whole = map(int, run.stdout.split())
    assert whole < 256 << 20, f"{whole >> 20} MiB for tensors of 2 MiB"
    assert whole < 2.5 * half + (4 << 20), f"{half >> 20} MiB, and {whole >> 20} for twice that"


@pytest.mark.parametrize("shape", [(4, 5), (1, 5), (2, 4, 5), (1, 2, 4, 5), (5,), ()], ids=str)
def test_samples_of_sinks_with_a_bias_of_any_rank(shape):
    """vmap goes through the samples one by one; what it hands on has the rank of the bias."""
    q, k, v = (torch.randn(1, 2, n, 3, dtype=torch.float64) for n in (4, 5, 5))
    bias, sinks = torch.randn(shape, dtype=torch.float64), torch.randn(3, 2, dtype=torch.float64)

    def by_bias(sinks, bias):
        return func.grad(lambda b: fm.flash_attention(q, k, v, b, sinks=sinks).square().sum())(bias)

    def twice(sinks, bias):
        return func.grad(lambda s, b: by_bias(s, b).square().sum(), (0, 1))(sinks, bias)

    for biases, dim in ((bias, None), (torch.stack([bias, -bias, 2 * bias]), 0)):
        got = func.vmap(twice, (0, dim))(sinks, biases)
        each = [twice(sinks[i], bias if dim is None else biases[i]) for i in range(3)]
        for one, many in zip(got, zip(*each, strict=True), strict=True):
            torch.testing.assert_close(one, torch.stack(many))
