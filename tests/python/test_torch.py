"""How attention behaves inside torch: autograd, ops, threads, processes.

test_compile.py has torch.compile and torch.export.
"""

from __future__ import annotations

import os
import pickle
import random
import subprocess
import sys
import threading
import warnings

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import flashmoe_science as fm
import oracle
from oracle import same_bits
from problems import Bias, Problem, Sinks, build

FORWARD = torch.ops.flashmoe.attention_forward.default
BACKWARD = torch.ops.flashmoe.attention_backward.default


def qkv(*lead, hq=4, hk=2, n=9, m=13, d=8, dv=8, dtype=torch.float32, grad=True):
    shapes = ((*lead, hq, n, d), (*lead, hk, m, d), (*lead, hk, m, dv))
    return [torch.randn(shape, dtype=dtype, requires_grad=grad) for shape in shapes]


def ragged(lengths=((5, 7), (0, 3), (1, 1), (4, 2)), hq=4, hk=2, d=8, dtype=torch.float32):
    n, m = (sum(pair[side] for pair in lengths) for side in (0, 1))
    shapes = ((n, hq, d), (m, hk, d), (m, hk, d))
    tensors = [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]
    cu = [torch.tensor([0, *(pair[side] for pair in lengths)]).cumsum(0) for side in (0, 1)]
    longest = [max(pair[side] for pair in lengths) for side in (0, 1)]
    pairs = sum(n * m for n, m in lengths)
    return tensors, cu, longest, torch.randn(pairs, hq, dtype=dtype, requires_grad=True)


def grads_of(outputs, inputs):
    """Gradients of a loss that weighs every element of every output differently."""
    generator = torch.Generator().manual_seed(1)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    weights = [torch.randn(x.shape, generator=generator).to(x.dtype) for x in outputs]
    return torch.autograd.grad(outputs, inputs, weights)


# Derivatives by finite differences.

GRADCHECK = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window": (2, 1)},
    "softcap": {"softcap": 1.5, "spread": 2.0},
    "scale": {"scale": -0.7},
    "causal softcap window": {"causal": True, "softcap": 2.0, "window": (3, -1)},
    "sinks": {"sinks": Sinks("float64")},
    "sinks and rows without keys": {"sinks": Sinks("float64"), "window": (1, 0)},
}
DENSE_GRADCHECK = {
    **GRADCHECK,
    "key lengths": {"key_lengths": ((2,), "int64"), "causal": True},
    "bias": {"bias": Bias((2, 4, 5, 7), "float64")},
    "bias per key": {"bias": Bias((1, 1, 7), "float64")},
    "bias per row": {"bias": Bias((4, 5, 1), "float64"), "softcap": 2.0},
    "bias and sinks": {"bias": Bias((4, 5, 7), "float64"), "sinks": Sinks("float64")},
    "strided bias": {"bias": Bias((4, 5, 7), "float64", layout="permuted")},
}
RAGGED_GRADCHECK = {
    **GRADCHECK,
    "bias": {"bias": Bias((4,), "float64")},
    "bias for all heads": {"bias": Bias((1,), "float64"), "softcap": 2.0},
}


def gradcheck(problem: Problem) -> None:
    case = build(problem)
    names = tuple(case.inputs())
    leaves = [x.detach().clone().requires_grad_() for x in case.inputs().values()]

    def ours(*inputs):
        named = {**dict(zip(names, inputs, strict=True)), **case.options, "return_lse": True}
        if case.cu_q is None:
            return fm.flash_attention(**named, key_lengths=case.key_lengths)
        lengths = {"cu_seqlens_q": case.cu_q, "cu_seqlens_k": case.cu_k}
        lengths |= {"max_seqlen_q": case.max_q, "max_seqlen_k": case.max_k}
        return fm.flash_attention_varlen(**named, **lengths)

    _, lse = ours(*leaves)
    if lse.isfinite().all():
        assert torch.autograd.gradcheck(ours, leaves)
    else:  # finite differences of -inf are NaN; what lies beside it still has to be right
        finite = lse.isfinite()

        def where_seen(*inputs):
            out, lse = ours(*inputs)
            return out, lse[finite]

        assert torch.autograd.gradcheck(where_seen, leaves)


@pytest.mark.parametrize("option", DENSE_GRADCHECK)
def test_gradcheck_dense(option):
    shape = {"lead": (2,), "heads_q": 4, "heads_k": 2, "len_q": 5, "len_k": 7}
    dims = {"head_dim": 3, "head_dim_v": 2}
    gradcheck(Problem(seed=3, dtype="float64", **shape, **dims, **DENSE_GRADCHECK[option]))


@pytest.mark.parametrize("option", RAGGED_GRADCHECK)
def test_gradcheck_ragged(option):
    shape = {"heads_q": 4, "heads_k": 2, "lengths": ((3, 5), (0, 2), (4, 4), (2, 0))}
    dims = {"head_dim": 3, "head_dim_v": 2}
    gradcheck(Problem(seed=5, dtype="float64", **shape, **dims, **RAGGED_GRADCHECK[option]))


def test_gradcheck_across_blocks():
    """Lengths past every tile, in one random direction (fast mode): all would take minutes."""
    q, k, v = (x.double().detach().requires_grad_() for x in qkv(1, hq=2, hk=1, n=150, m=210, d=4))
    bias = torch.randn(150, 210, dtype=torch.float64, requires_grad=True)

    def ours(q, k, v, bias):
        return fm.flash_attention(q, k, v, bias=bias, causal=True, return_lse=True)

    assert torch.autograd.gradcheck(ours, (q, k, v, bias), fast_mode=True)


# Autograd's house rules.


@pytest.mark.parametrize("wanted", ["q", "k", "v", "bias", "sinks", "k bias", "q v sinks"])
@pytest.mark.parametrize("kind", ["dense", "ragged"])
def test_only_the_gradients_that_are_wanted(kind, wanted):
    if kind == "dense":
        tensors, bias = qkv(2), torch.randn(4, 9, 13, requires_grad=True)
        rest = ()
    else:
        tensors, cu, longest, bias = ragged()
        rest = (*cu, *longest)
    sinks = torch.randn(4)
    named = dict(zip(("q", "k", "v", "bias", "sinks"), (*tensors, bias, sinks), strict=True))

    def run(names):
        leaves = {n: x.detach().requires_grad_(n in names) for n, x in named.items()}
        call = fm.flash_attention if kind == "dense" else fm.flash_attention_varlen
        more = {"bias": leaves["bias"], "sinks": leaves["sinks"]}
        out = call(leaves["q"], leaves["k"], leaves["v"], *rest, **more)
        out.backward(torch.ones_like(out).cumsum(-1))
        return {n: x.grad for n, x in leaves.items()}

    everything, some = run(set(named)), run(set(wanted.split()))
    for name, grad in some.items():
        if name in wanted.split():
            assert same_bits(grad, everything[name]), name
        else:
            assert grad is None, name


@pytest.mark.parametrize("which", ["out", "lse", "both"])
def test_a_loss_of_either_result(which):
    tensors = qkv(2, dtype=torch.float64)
    picked = {"out": slice(0, 1), "lse": slice(1, 2), "both": slice(0, 2)}[which]
    got = grads_of(fm.flash_attention(*tensors, causal=True, return_lse=True)[picked], tensors)
    want = torch.autograd.grad(
        oracle.attention(*tensors, causal=True)[picked],
        tensors,
        [
            torch.randn(x.shape, generator=generator).double()
            for generator in [torch.Generator().manual_seed(1)]
            for x in fm.flash_attention(*tensors, return_lse=True)[picked]
        ],
        allow_unused=True,
        materialize_grads=True,
    )
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


def test_without_gradients_the_bits_are_the_same():
    tensors = qkv(2, n=70, m=70)
    with_grad = fm.flash_attention(*tensors, causal=True, return_lse=True)
    with torch.no_grad():
        without = fm.flash_attention(*tensors, causal=True, return_lse=True)
    with torch.inference_mode():
        inference = fm.flash_attention(*tensors, causal=True, return_lse=True)
    detached = fm.flash_attention(*(x.detach() for x in tensors), causal=True, return_lse=True)
    for other in (without, inference, detached):
        assert all(same_bits(a, b) for a, b in zip(with_grad, other, strict=True))
        assert not any(x.requires_grad for x in other)
    assert all(x.requires_grad for x in with_grad)


def test_backward_twice_over_one_graph():
    tensors = qkv(1)
    out = fm.flash_attention(*tensors)
    first = torch.autograd.grad(out.sum(), tensors, retain_graph=True)
    second = torch.autograd.grad(out.sum(), tensors)
    assert all(same_bits(a, b) for a, b in zip(first, second, strict=True))


def test_checkpointing():
    tensors = qkv(1, n=33, m=33)
    want = grads_of(fm.flash_attention(*tensors), tensors)
    got = grads_of(checkpoint(fm.flash_attention, *tensors, use_reentrant=False), tensors)
    assert all(same_bits(a, b) for a, b in zip(want, got, strict=True))


@pytest.mark.parametrize("how", ["backward", "grad", "grad that allows unused"])
@pytest.mark.parametrize("call", ["dense", "ragged"])
def test_the_third_derivative_is_refused(call, how):
    """A wrong number is worse than none."""
    if call == "dense":
        tensors = qkv(1)
        out = fm.flash_attention(*tensors)
    else:
        tensors, cu, longest, bias = ragged()
        out = fm.flash_attention_varlen(*tensors, *cu, *longest, bias=bias)
    loss = out.square().sum()
    for _ in range(2):
        grads = torch.autograd.grad(loss, tensors, create_graph=True)
        loss = sum(g.square().sum() for g in grads)
    with pytest.raises(NotImplementedError, match="third derivative"):
        if how == "backward":
            loss.backward()
        else:
            torch.autograd.grad(loss, tensors, allow_unused="allows" in how)


@pytest.mark.parametrize("name", ["q", "k", "v", "bias", "sinks", "out", "lse"])
def test_changing_a_saved_tensor_is_noticed(name):
    leaves = {"q": (2, 4, 9, 8), "k": (2, 2, 13, 8), "v": (2, 2, 13, 8), "bias": (4, 9, 13)}
    leaves["sinks"] = (4,)
    saved = {n: torch.randn(shape, requires_grad=True) * 1.5 for n, shape in leaves.items()}
    saved["out"], saved["lse"] = fm.flash_attention(**saved, return_lse=True)
    loss = saved["out"].sum() + saved["lse"].sum()
    with torch.no_grad():
        saved[name].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_lazy_negation_is_seen():
    """The negative of a tensor can be a bit in its flags, with the data unchanged."""
    q, k, v = (x.detach() for x in qkv(2))
    flagged = torch._neg_view(q)
    assert flagged.is_neg() and flagged.data_ptr() == q.data_ptr()
    assert same_bits(fm.flash_attention(flagged, k, v), fm.flash_attention(-q, k, v))


# The op registry.


KINDS = ["plain", "half", "bias", "sinks", "lengths", "dropout", "ragged"]


def forward_arguments(kind: str, grad: bool):
    dtype = torch.float16 if kind == "half" else torch.float32
    sinks = torch.randn(4) if kind in ("sinks", "half", "ragged") else None
    if kind == "ragged":
        tensors, cu, longest, bias = ragged()
        lengths = (None, *cu, *longest)
        options = (True, 3, -1, None, 0.0, False, False, 0.0, None)
        arguments = (*tensors, bias, sinks, *lengths, *options)
    else:
        tensors = qkv(2, 3, dtype=dtype, dv=8 if kind == "half" else 5)
        bias = torch.randn(3, 1, 9, 13, requires_grad=True) if kind == "bias" else None
        lengths = torch.tensor([[5], [13]]) if kind == "lengths" else None
        dropout = (0.3, torch.tensor(7)) if kind == "dropout" else (0.0, None)
        options = (0, 0, kind == "half", -1, -1, 0.4, 2.0, True, False, *dropout)
        arguments = (*tensors, bias, sinks, lengths, None, None, *options)
    return tuple(
        x.detach().requires_grad_(grad and x.is_floating_point())
        if isinstance(x, torch.Tensor)
        else x
        for x in arguments
    )


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_opcheck_forward(kind, grad):
    torch.library.opcheck(FORWARD, forward_arguments(kind, grad))


@pytest.mark.parametrize("kind", KINDS)
def test_opcheck_backward(kind):
    arguments = forward_arguments(kind, grad=False)
    out, lse = FORWARD(*arguments)
    grads = (torch.randn_like(out), torch.randn_like(lse))
    bias, sinks = (x is not None for x in arguments[3:5])
    some = (False, True, False, False, False)
    for needs in ((True, True, True, bias, sinks), some):
        torch.library.opcheck(BACKWARD, (*grads, out, lse, *arguments, *needs))
    needs = (True, True, True, False, False)
    torch.library.opcheck(BACKWARD, (None, grads[1], out, lse, *arguments, *needs))


@pytest.mark.parametrize("kind", ["plain", "bias", "sinks", "dropout", "ragged"])
def test_the_op_itself_is_differentiable(kind):
    """An exported graph calls it, with no Python of ours around it."""
    arguments = forward_arguments(kind, grad=True)
    leaves = [x for x in arguments[:5] if x is not None]
    got = grads_of(torch.ops.flashmoe.attention.default(*arguments), leaves)
    names = ("causal", "left", "right", "scale", "softcap", "deterministic", "allow_tf32")
    names += ("dropout_p", "seed")
    named = dict(zip(names, arguments[10:], strict=True))
    options = {"causal": named["causal"], "window": (named["left"], named["right"])}
    options |= {name: named[name] for name in ("scale", "softcap", "dropout_p", "seed")}
    options |= {"return_lse": True, "bias": arguments[3], "sinks": arguments[4]}
    if kind == "ragged":
        ours = fm.flash_attention_varlen(*arguments[:3], *arguments[6:10], **options)
    else:
        ours = fm.flash_attention(*arguments[:3], **options)
    for a, b in zip(got, grads_of(ours, leaves), strict=True):
        assert same_bits(a, b)


def test_fake_results_look_like_real_ones():
    """Shapes, dtypes and strides: a compiled graph is laid out by them."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    for dv in (8, 5):
        plain = qkv(2, dv=dv, grad=False)
        moved = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in plain]
        padded = [torch.nn.functional.pad(x, (0, 3))[..., : x.shape[-1]] for x in plain]
        expanded = [x[:1].expand(2, -1, -1, -1) for x in plain]
        for tensors in (plain, moved, padded, expanded):
            real = fm.flash_attention(*tensors, return_lse=True)
            with FakeTensorMode() as mode:
                fakes = [mode.from_tensor(x) for x in tensors]
                fake = fm.flash_attention(*fakes, return_lse=True)
            for a, b in zip(real, fake, strict=True):
                assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())


def any_layout(pick: random.Random, *shape: int) -> torch.Tensor:
    """Random numbers of that shape: dimensions in any order, with gaps, repeated, sliced."""
    order = pick.sample(range(len(shape)), len(shape))
    wide = [shape[dim] + pick.choice((0, 0, 1, 3)) for dim in order]
    x = torch.randn(wide)[tuple(slice(shape[dim]) for dim in order)]
    x = x.permute([order.index(dim) for dim in range(len(shape))])
    repeated = [1 if pick.random() < 0.15 else size for size in shape]
    x = x[tuple(slice(size) for size in repeated)].expand(shape)
    # A dimension of size 1 may have any stride.
    strides = [pick.choice((0, 1, 7)) if x.shape[i] == 1 else x.stride(i) for i in range(x.dim())]
    return x.as_strided(shape, strides)


def test_results_lie_as_torch_would_lay_them():
    """As empty_like() does: fake tensors promise it, and compiled graphs rely on it."""
    pick = random.Random(0)
    for _ in range(400):
        lead = [pick.choice((1, 2, 3)) for _ in range(pick.choice((1, 1, 2)))]
        hk, n, m, d = (pick.choice(sizes) for sizes in ((1, 2), (0, 1, 3, 5), (1, 4), (1, 3, 8)))
        shapes = ((*lead, 2 * hk, n, d), (*lead, hk, m, d), (*lead, hk, m, d), (2 * hk, n, m))
        inputs = [any_layout(pick, *shape).requires_grad_() for shape in shapes]
        out, lse = fm.flash_attention(*inputs, return_lse=True)
        assert out.stride() == torch.empty_like(inputs[0]).stride()
        assert lse.is_contiguous()
        for x, grad in zip(inputs, torch.autograd.grad(out.sum(), inputs), strict=True):
            assert grad.stride() == torch.empty_like(x).stride(), (x.shape, x.stride())


def test_meta_tensors_give_meta_results():
    q, k, v = (x.to("meta") for x in qkv(2, dv=5, grad=False))
    out, lse = fm.flash_attention(q, k, v, return_lse=True)
    assert out.is_meta and out.shape == (2, 4, 9, 5) and lse.shape == (2, 4, 9)


# Threads and processes.


def test_many_python_threads_at_once():
    cases = [[x.detach() for x in qkv(2, n=50 + i, m=70 + i)] for i in range(8)]
    want = [attend_and_differentiate(case) for case in cases]
    got: list = [None] * len(cases)

    def work(i):
        for _ in range(5):
            got[i] = attend_and_differentiate(cases[i])

    workers = [threading.Thread(target=work, args=(i,)) for i in range(len(cases))]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert not any(worker.is_alive() for worker in workers)
    for a, b in zip(want, got, strict=True):
        assert all(same_bits(x, y) for x, y in zip(a, b, strict=True))


def attend_and_differentiate(tensors):
    leaves = [x.detach().requires_grad_() for x in tensors]
    out, lse = fm.flash_attention(*leaves, causal=True, return_lse=True)
    return out.detach(), *grads_of((out, lse), leaves)


PROCESSES = """
import sys, torch
import torch.multiprocessing as multiprocessing
import flashmoe_science as fm

def attend(seed):
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(2, 4, 200, 16, generator=generator).requires_grad_() for _ in range(3))
    out = fm.flash_attention(q, k, v, causal=True)
    out.square().sum().backward()
    return out.detach().numpy().tobytes(), q.grad.numpy().tobytes()

if __name__ == "__main__":
    torch.set_num_threads(2)
    # The parent's threads are running now. Where torch has CUDA, its autograd refuses to work after
    # a fork if it worked before, so there the parent computes last.
    first = not torch.cuda.is_available()
    want = [attend(seed) for seed in range(4)] if first else None
    # One thread, as data loaders give their workers: more make OpenMP itself hang after a fork.
    context = multiprocessing.get_context(sys.argv[1])
    with context.Pool(2, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        got = pool.map_async(attend, range(4)).get(timeout=60)
    assert got == (want if first else [attend(seed) for seed in range(4)])
    print("same")
"""


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_child_processes_can_call_attention(method, tmp_path, checkout):
    """As the workers of a data loader do. A forked child has none of its parent's threads."""
    script = tmp_path / "processes.py"
    script.write_text(PROCESSES)
    run = subprocess.run(
        [sys.executable, str(script), method],
        env={**os.environ, "PYTHONPATH": str(checkout / "python")},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert run.stdout.strip() == "same", run.stderr[-3000:]


def test_functions_pickle():
    assert pickle.loads(pickle.dumps(fm.flash_attention)) is fm.flash_attention


def test_import_costs_little_beyond_torch(checkout):
    """Processor time: others may be at work. With the bytecode that an installed package has, and
    the first run writes here: to compile the sources takes as long again."""
    script = (
        "import time, torch; start = time.process_time(); import flashmoe_science; "
        "print(time.process_time() - start)"
    )
    env = {**os.environ, "PYTHONPATH": str(checkout / "python")}
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    times = [
        float(subprocess.check_output([sys.executable, "-c", script], env=env)) for _ in range(5)
    ]
    assert min(times) < 0.050, times


def test_import_says_nothing(checkout):
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", "import torch; import flashmoe_science"],
        env={**os.environ, "PYTHONPATH": str(checkout / "python")},
        capture_output=True,
        text=True,
    )
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")


def test_calls_warn_about_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tensors = qkv(2)
        grads_of(fm.flash_attention(*tensors, causal=True), tensors)


# explain() belongs to the planner; here only that it answers for the call it was asked about.


def test_explain_names_what_will_run():
    q, k, v = qkv(2, n=70, m=90, grad=False)
    text = fm.explain(q, k, v, causal=True)
    assert "cpu" in text and "causal" in text and "70" in text and "90" in text
    assert fm.explain(q, k, v, backward=True) != fm.explain(q, k, v)
    with pytest.raises(RuntimeError, match="key"):
        fm.explain(q, k[..., :4], v)
