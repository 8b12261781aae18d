"""What attention computes: every option against the float64 oracle, and what must never happen."""

from __future__ import annotations

import itertools
import math
import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

import flashmoe_science as fm
import oracle
from oracle import Case, same_bits
from problems import DTYPES, Bias, Problem, build

LENGTHS = (0, 1, 2, 31, 63, 64, 65, 97, 127, 128, 129, 257)
HEAD_DIMS = (1, 3, 8, 16, 24, 31, 32, 48, 64, 65, 96, 128, 192, 255, 256)


def dense(dtype="float32", **changes) -> Problem:
    shape = {"lead": (2,), "heads_q": 4, "heads_k": 2, "len_q": 70, "len_k": 91}
    rest = {"seed": 7, "dtype": dtype, "head_dim": 16, "head_dim_v": 24}
    return Problem(**{**shape, **rest, **changes})


def ragged(dtype="float32", **changes) -> Problem:
    lengths = ((31, 31), (1, 7), (0, 5), (64, 65), (17, 0), (100, 33))
    shape = {"heads_q": 4, "heads_k": 2, "head_dim": 16, "head_dim_v": 24, "lengths": lengths}
    return Problem(**{"seed": 11, "dtype": dtype, **shape, **changes})


# Each option alone and those that meet in one line of code.
OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window": (13, 4)},
    "left only": {"window": (20, -1)},
    "right only": {"window": (-1, 0)},
    "empty window rows": {"window": (0, 0), "causal": True},
    "causal window": {"window": (17, 9), "causal": True},
    "softcap": {"softcap": 2.0, "spread": 3.0},
    "scale": {"scale": 0.8},
    "negative scale": {"scale": -0.3},
    "zero scale": {"scale": 0.0},
    "peaked": {"spread": 20.0},
    "one key takes all": {"spread": 1000.0},
    "softcap far past saturation": {"softcap": 0.5, "spread": 1000.0},
    "softcap causal": {"softcap": 5.0, "causal": True},
}
DENSE_OPTIONS = {
    **OPTIONS,
    "key lengths": {"key_lengths": ((2,), "int32")},
    "key lengths causal": {"key_lengths": ((2,), "int64"), "causal": True},
    "key lengths window": {"key_lengths": ((), "int64"), "window": (9, 3)},
    "bias": {"bias": Bias((2, 4, 70, 91), "float32")},
    "bias per head": {"bias": Bias((4, 70, 91), "float32", layout="transposed")},
    "bias per key": {"bias": Bias((2, 1, 1, 91), "float32")},
    "bias per row": {"bias": Bias((2, 4, 70, 1), "float32")},
    "bias of one number": {"bias": Bias((), "float32")},
    "bias with masks": {"bias": Bias((2, 1, 70, 91), "float32", masked=0.3, masked_rows=0.2)},
    "everything": {
        "bias": Bias((2, 4, 70, 91), "float32", layout="permuted", masked=0.2),
        "causal": True,
        "window": (40, 7),
        "softcap": 7.0,
        "scale": 0.4,
        "key_lengths": ((2,), "int64"),
    },
}
RAGGED_OPTIONS = {
    **OPTIONS,
    "bias": {"bias": Bias((4,), "float32")},
    "bias for all heads": {"bias": Bias((1,), "float32", layout="padded")},
    "bias with masks": {"bias": Bias((4,), "float32", masked=0.3)},
    "everything": {
        "bias": Bias((4,), "float32", layout="transposed", masked=0.2),
        "causal": True,
        "window": (40, 7),
        "softcap": 7.0,
        "scale": 0.4,
    },
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("option", DENSE_OPTIONS)
def test_dense(option, dtype):
    oracle.check(build(dense(dtype, **DENSE_OPTIONS[option])))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("option", RAGGED_OPTIONS)
def test_ragged(option, dtype):
    oracle.check(build(ragged(dtype, **RAGGED_OPTIONS[option])))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("len_q", LENGTHS)
def test_lengths(len_q, causal):
    for len_k in LENGTHS:
        for dtype in ("float32", "float16"):
            shape = {"lead": (1,), "heads_q": 1, "heads_k": 1, "len_q": len_q, "len_k": len_k}
            oracle.check(build(dense(dtype, **shape, causal=causal)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_head_dims(head_dim, dtype):
    for head_dim_v in (head_dim, 17, 256):
        shape = {"lead": (1,), "len_q": 33, "len_k": 67, "heads_q": 2, "heads_k": 1}
        dims = {"head_dim": head_dim, "head_dim_v": head_dim_v}
        oracle.check(build(dense(dtype, **shape, **dims, bias=Bias((33, 67), dtype))))


@pytest.mark.parametrize("heads", [(1, 1), (6, 6), (6, 3), (6, 2), (6, 1), (32, 1)])
def test_head_ratios(heads):
    heads_q, heads_k = heads
    for bias_heads in (1, heads_q):
        bias = Bias((bias_heads, 30, 41), "float32")
        shape = {"heads_q": heads_q, "heads_k": heads_k, "len_q": 30, "len_k": 41}
        oracle.check(build(dense("float32", **shape, bias=bias)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("full", list(itertools.product((False, True), repeat=5)))
def test_every_broadcast_of_the_bias(full, dtype):
    sizes = (2, 3, 4, 21, 37)
    shape = tuple(size if keep else 1 for size, keep in zip(sizes, full, strict=True))
    problem = dense(dtype, lead=(2, 3), len_q=21, len_k=37, bias=Bias(shape, dtype, masked=0.1))
    oracle.check(build(problem))


@pytest.mark.parametrize("bias_dtype", ["float32", "own"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes_of_the_bias(dtype, bias_dtype):
    bias = Bias((4, 70, 91), "float32" if bias_dtype == "float32" else dtype)
    got = oracle.check(build(dense(dtype, bias=bias)))
    assert got["dbias"].dtype == DTYPES[bias.dtype]


@pytest.mark.parametrize(
    "layout", ["swapped", "padded", "permuted", "sliced", "offset", "expanded"]
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_layouts_of_the_inputs(dtype, layout):
    oracle.check(build(dense(dtype, layouts=(layout,) * 4)))
    oracle.check(build(ragged(dtype, layouts=(layout,) * 4)))


@pytest.mark.parametrize(
    "layout", ["transposed", "padded", "permuted", "sliced", "expanded", "hankel"]
)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_layouts_of_the_bias(dtype, layout):
    oracle.check(build(dense(dtype, bias=Bias((2, 4, 70, 91), dtype, layout=layout))))
    oracle.check(build(ragged(dtype, bias=Bias((4,), dtype, layout=layout))))


def test_bit_for_bit_the_same_whatever_the_layout():
    """A layout decides where the numbers are, never what becomes of them."""
    plain = build(dense("float32", bias=Bias((2, 4, 70, 91), "float32")))
    want = oracle.ours(plain)
    moved = build(dense("float32", bias=Bias((2, 4, 70, 91), "float32")))
    moved.q = moved.q.transpose(-3, -2).contiguous().transpose(-3, -2)
    moved.k = F.pad(moved.k, (1, 2))[..., 1:-2]
    moved.v = moved.v.mT.contiguous().mT
    moved.bias = moved.bias.mT.contiguous().mT
    got = oracle.ours(moved)
    for name, tensor in want.items():
        assert same_bits(tensor, got[name]), name


def test_extra_leading_dimensions_are_a_batch():
    case = build(dense("float32", lead=(2, 3, 2), len_q=19, len_k=23))
    want = fm.flash_attention(*(x.flatten(0, 2) for x in (case.q, case.k, case.v)), causal=True)
    got = fm.flash_attention(case.q, case.k, case.v, causal=True)
    assert same_bits(got.flatten(0, 2), want)


@pytest.mark.parametrize(
    "empty",
    [
        {"lead": (0,)},
        {"lead": (2, 0, 3)},
        {"len_q": 0},
        {"len_k": 0},
        {"len_q": 0, "len_k": 0},
        {"len_k": 0, "bias": Bias((4, 70, 1), "float32")},
        {"len_q": 0, "bias": Bias((4, 1, 91), "float32")},
        {"lead": (0,), "bias": Bias((1, 4, 70, 91), "float32")},
        {"lead": (0,), "key_lengths": ((1,), "int64")},
    ],
)
def test_empty_shapes(empty):
    case = build(dense("float32", **empty))
    got = oracle.check(case)
    assert got["out"].eq(0).all()
    assert got["lse"].eq(-math.inf).all()
    assert all(grad.eq(0).all() for name, grad in got.items() if name.startswith("d"))


@pytest.mark.parametrize(
    "lengths", [(), ((0, 0),), ((0, 9),), ((9, 0),), ((0, 0), (5, 5), (0, 0)), ((1, 1),) * 9]
)
def test_empty_sequences(lengths):
    oracle.check(build(ragged("float32", lengths=lengths, bias=Bias((4,), "float32"))))


def test_tokens_of_no_sequence():
    got = oracle.check(build(ragged("float32", rest=(3, 4))))
    assert got["out"][-3:].eq(0).all()
    assert got["lse"][-3:].eq(-math.inf).all()
    assert got["dk"][-4:].eq(0).all() and got["dv"][-4:].eq(0).all() and got["dq"][-3:].eq(0).all()


def test_ragged_is_dense_sequence_by_sequence():
    case = build(ragged("float32", causal=True))
    want, _ = oracle.attention_varlen(
        case.q, case.k, case.v, None, case.cu_q, case.cu_k, causal=True
    )
    got = fm.flash_attention_varlen(
        case.q, case.k, case.v, case.cu_q, case.cu_k, case.max_q, case.max_k, causal=True
    )
    torch.testing.assert_close(got, want)


def test_lengths_may_lie_apart_in_memory():
    """Lengths are small tensors that often are columns of a larger one."""
    case = build(ragged("float32"))
    want = oracle.ours(case)
    case.cu_q = torch.stack([case.cu_q, case.cu_q + 1000], 1)[:, 0]
    case.cu_k = torch.stack([case.cu_k - 5, case.cu_k], 1)[:, 1]
    assert not case.cu_q.is_contiguous()
    got = oracle.ours(case)
    assert all(same_bits(want[name], got[name]) for name in want)

    case = build(dense("float32", lead=(3,), key_lengths=((3,), "int32")))
    want = oracle.ours(case)
    case.key_lengths = torch.stack([case.key_lengths, case.key_lengths + 1000], 1)[:, 0]
    assert not case.key_lengths.is_contiguous()
    got = oracle.ours(case)
    assert all(same_bits(want[name], got[name]) for name in want)


def test_weights_do_not_depend_on_a_constant_in_the_bias():
    """exp(500) is inf in float32, and exp(-500) is 0."""
    for offset in (500.0, -500.0, 2e4, -2e4):
        got = oracle.check(
            build(dense("float32", bias=Bias((4, 70, 91), "float32", offset=offset)))
        )
        assert got["out"].isfinite().all() and got["out"].abs().max() > 0.1


def test_rows_that_see_nothing():
    case = build(dense("float32", causal=True, len_q=91, len_k=20))
    got = oracle.check(case)
    blind = slice(0, 71)  # row i sits at key position i - 71
    assert got["out"][..., blind, :].eq(0).all()
    assert got["lse"][..., blind].eq(-math.inf).all()
    assert got["dq"][..., blind, :].eq(0).all()
    assert got["out"][..., 71:, :].ne(0).all()


def test_decoding_sees_every_key():
    """One query at the end of the keys: causal changes nothing."""
    case = build(dense("float16", len_q=1))
    q, k, v = case.q, case.k, case.v
    assert same_bits(fm.flash_attention(q, k, v, causal=True), fm.flash_attention(q, k, v))


def test_window_of_everything_is_no_window():
    case = build(dense("float32"))
    q, k, v = case.q, case.k, case.v
    want = fm.flash_attention(q, k, v)
    for window in ((-1, -1), (1000, 1000), (2**62, 2**62)):
        assert same_bits(fm.flash_attention(q, k, v, window=window), want)


def test_softcap_of_zero_is_none():
    case = build(dense("float32"))
    want = fm.flash_attention(case.q, case.k, case.v)
    assert same_bits(fm.flash_attention(case.q, case.k, case.v, softcap=0.0), want)
    assert not same_bits(fm.flash_attention(case.q, case.k, case.v, softcap=1.0), want)


def test_return_lse_changes_only_what_is_returned():
    case = build(dense("float32"))
    out, lse = fm.flash_attention(case.q, case.k, case.v, return_lse=True)
    assert same_bits(fm.flash_attention(case.q, case.k, case.v), out)
    assert lse.shape == out.shape[:-1] and lse.dtype == torch.float32
    wide = [x.double() for x in (case.q, case.k, case.v)]
    assert fm.flash_attention(*wide, return_lse=True)[1].dtype == torch.float64


# A NaN, or an infinity, reaches what depends on it and nothing else.

HIDING = {
    "nothing": {},
    "causal": {"causal": True},
    "window": {"window": (5, 3)},
    "key lengths": {"key_lengths": ((2,), "int64")},
    "-inf bias": {"bias": Bias((2, 4, 70, 91), "float32", masked=0.7)},
    "-inf rows": {"bias": Bias((2, 4, 70, 91), "float32", masked_rows=0.5)},
    "all of them": {
        "causal": True,
        "window": (30, -1),
        "key_lengths": ((2,), "int64"),
        "bias": Bias((2, 4, 70, 91), "float32", masked=0.5),
    },
}


def put(x: torch.Tensor, index: tuple[int, ...], value: float) -> torch.Tensor:
    x = x.clone()
    x[index] = value
    return x


def check_containment(clean: Case, dirty: Case) -> int:
    """The pattern of the oracle, and elsewhere the very bits of the clean run."""
    want, before = oracle.reference(dirty, contain=True), oracle.ours(clean)
    reached = 0
    for name, tensor in oracle.ours(dirty).items():
        expected, found = want[name].isfinite(), tensor.isfinite()
        if name == "lse":  # of a row without keys
            expected, found = expected | (want[name] == -math.inf), found | (tensor == -math.inf)
        wrong = (expected != found).nonzero()
        assert not len(wrong), f"{name} at {wrong[:5].tolist()}: {len(wrong)} are not as expected"
        kept = expected if name != "dbias" else expected & (dirty.bias != -math.inf)
        assert same_bits(tensor[kept], before[name][kept]), f"{name} changed where it may not"
        reached += int((~expected).sum())
    return reached


@pytest.mark.parametrize("dtype", ["float32", "float16", "float64"])
@pytest.mark.parametrize("where", ["q", "k", "v", "bias"])
@pytest.mark.parametrize("hiding", HIDING)
def test_nan_reaches_what_depends_on_it(hiding, where, dtype):
    problem = dense(dtype, **{"bias": Bias((2, 4, 70, 91), "float32"), **HIDING[hiding]})
    reached = []
    for place in (0, 3, 33, 66, 69):
        clean, dirty = build(problem), build(problem)
        index = {"q": (1, 2, place, 5), "k": (0, 1, place, 3), "v": (1, 0, place, 7)}
        if where == "bias":
            keys = 91 if clean.key_lengths is None else int(clean.key_lengths[0])
            diagonal = max(place + keys - 70, 0)  # the key this row sits at
            dirty.bias = put(clean.bias, (0, 3, place, diagonal), math.nan)
        else:
            setattr(dirty, where, put(getattr(clean, where), index[where], math.nan))
        reached.append(check_containment(clean, dirty))
    assert any(reached), "no place was seen by anything: the test says nothing"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("value", [math.inf, -math.inf])
@pytest.mark.parametrize("hiding", HIDING)
def test_infinity_in_a_value_reaches_what_depends_on_it(hiding, value, dtype):
    problem = dense(dtype, **HIDING[hiding])
    for place in (0, 40, 90):
        clean, dirty = build(problem), build(problem)
        dirty.v = put(clean.v, (1, 0, place, 7), value)
        check_containment(clean, dirty)


def test_infinity_in_the_bias_reaches_its_row():
    problem = dense("float32", bias=Bias((2, 4, 70, 91), "float32"), causal=True)
    for place in (0, 40, 69):
        clean, dirty = build(problem), build(problem)
        dirty.bias = put(clean.bias, (0, 3, place, place), math.inf)
        assert check_containment(clean, dirty)


def test_keys_behind_the_length_are_never_looked_at():
    """The usual case: a padded batch whose padding was never written."""
    problem = dense("float32", lead=(3,), key_lengths=((3,), "int64"), causal=True)
    clean, dirty = build(problem), build(problem)
    padding = torch.arange(91)[:, None] >= clean.key_lengths[:, None, None, None]
    assert padding.any()
    dirty.k = clean.k.masked_fill(padding, math.nan)
    dirty.v = clean.v.masked_fill(padding, math.inf)
    want, got = oracle.ours(clean), oracle.ours(dirty)
    for name in want:
        assert same_bits(want[name], got[name]), name


@pytest.mark.parametrize("where", ["q", "k", "v"])
def test_nan_stays_in_its_sequence(where):
    problem = ragged("float32", bias=Bias((4,), "float32"))
    clean = build(problem)
    for token in (0, 31, 32, 60, 90):
        dirty = build(problem)
        setattr(dirty, where, put(getattr(clean, where), (token, 1, 2), math.nan))
        assert check_containment(clean, dirty)


def test_nan_upstream_reaches_what_depends_on_it():
    problem = dense("float32", causal=True, bias=Bias((2, 4, 70, 91), "float32"))
    for name, index in (("grad_out", (1, 3, 20, 4)), ("grad_lse", (1, 3, 20))):
        clean, dirty = build(problem), build(problem)
        setattr(dirty, name, put(getattr(clean, name), index, math.nan))
        assert check_containment(clean, dirty)


# Reproducible, and harmless.


def everything(dtype="float32", **changes) -> Problem:
    bias = Bias((4, 200, 300), dtype, masked=0.1)
    shape = {"lead": (3,), "len_q": 200, "len_k": 300, "bias": bias}
    return dense(dtype, **{**shape, "softcap": 9.0, "window": (150, 40), **changes})


@pytest.mark.parametrize("deterministic", [None, True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_twice_the_same_bits(dtype, deterministic):
    case = build(everything(dtype, deterministic=deterministic))
    first, second = oracle.ours(case), oracle.ours(case)
    for name in first:
        assert same_bits(first[name], second[name]), name


@pytest.mark.parametrize("kind", ["dense", "one head", "shared bias", "ragged"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_same_bits_with_any_number_of_threads(dtype, kind, threads):
    """A bias gradient summed over the batch, and heads that share keys, tempt threads most."""
    changes = {
        "dense": {},
        "one head": {"lead": (1,), "heads_q": 1, "heads_k": 1, "bias": None, "len_q": 700},
        "shared bias": {"bias": Bias((1, 300), dtype)},
    }
    case = build(
        ragged(dtype, bias=Bias((1,), dtype), lengths=((99, 120), (3, 400), (257, 8)) * 2)
        if kind == "ragged"
        else everything(dtype, **changes[kind])
    )
    results = []
    for count in (1, 2, 3, 5):
        threads(count)
        results.append(oracle.ours(case))
    for other in results[1:]:
        for name in other:
            assert same_bits(results[0][name], other[name]), name


@pytest.mark.parametrize("make", [dense, ragged])
def test_inputs_are_left_alone(make):
    shape = (2, 4, 70, 91) if make is dense else (4,)
    case = build(make("float32", bias=Bias(shape, "float32", masked=0.2), causal=True))
    tensors = [case.q, case.k, case.v, case.bias, case.grad_out, case.grad_lse]
    before = [x.clone() for x in tensors]
    oracle.ours(case)
    assert all(same_bits(a, b) for a, b in zip(before, tensors, strict=True))


@pytest.mark.parametrize("kind", ["sum", "transposed", "strided", "one row"])
def test_upstream_gradients_of_any_layout(kind):
    """out.sum() sends an expanded gradient back, a transpose a strided one."""
    case = build(dense("float32"))
    weight = torch.randn(24, 70)

    def loss(out):
        if kind == "sum":
            return out.sum()
        if kind == "transposed":
            return (out.mT * weight.to(out.dtype)).sum()
        return out[..., ::2].square().sum() if kind == "strided" else out[..., 5, :].exp().sum()

    ours = [x.detach().requires_grad_() for x in (case.q, case.k, case.v)]
    wide = [x.detach().double().requires_grad_() for x in (case.q, case.k, case.v)]
    got = torch.autograd.grad(loss(fm.flash_attention(*ours)), ours)
    want = torch.autograd.grad(loss(oracle.attention(*wide)[0]), wide)
    for a, b in zip(got, want, strict=True):
        assert b.abs().max() > 1e-2
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-6)


MEMORY = """
import torch
import flashmoe_science as fm

def status(field):
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field))

def grown(work):
    # VmHWM and not ru_maxrss, which a child inherits from the process that started it.
    with open("/proc/self/clear_refs", "w") as refs:
        refs.write("5")
    before = status("VmRSS")
    work()
    return status("VmHWM") - before

def attention(length):
    q, k, v = (torch.randn(1, 1, length, 16, requires_grad=True) for _ in range(3))
    bias = torch.randn({bias}, requires_grad=True) if {biased} else None
    out, lse = fm.flash_attention(q, k, v, bias=bias, return_lse=True, causal={causal})
    (out.sum() + lse.sum()).backward()
    assert q.grad.isfinite().all() and (bias is None or bias.grad.isfinite().all())

attention(512)
print(*(grown(lambda: attention(length)) for length in (8192, 16384)))
print(grown(lambda: torch.ones(2**26)))
"""


@pytest.mark.parametrize("bias", [None, "(1, 1, 1, length)", "(length, 1)"])
def test_memory_is_linear_in_the_length(bias, checkout):
    """16,384 squared is 256 MiB even of bytes, and four times 8,192 squared."""
    script = MEMORY.format(bias=bias, biased=bias is not None, causal=bias is None)
    run = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": str(checkout / "python")},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
    half, whole, known = map(int, run.stdout.split())
    assert known > 250 << 20, "256 MiB were not noticed: the measurement does not work"
    assert whole < 128 << 20, f"{whole >> 20} MiB for tensors of 1 MiB"
    assert whole < 2.5 * half + (4 << 20), (
        f"{half >> 20} MiB, and {whole >> 20} for twice the length"
    )
