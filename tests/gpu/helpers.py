"""What the GPU tests share: tensors, layouts, poisoned memory, and judging against the oracle."""

from __future__ import annotations

import os
import re
from contextlib import contextmanager
from dataclasses import replace
from math import inf, nan

import pytest
import torch
from families import COMPLETE, RECOMPUTES, forced, refusal

import flashmoe_science as fm
import oracle
from oracle import Case, same_bits

# "cpu" is for trying out the tests themselves; see conftest.py.
DEVICE = os.environ.get("FLASHMOE_TEST_DEVICE", "cuda")
HEAD_DIMS = (64, 128)
# One in each bucket and at its ends, from small molecules' to the largest; 20 and 100 are copied.
ALL_HEAD_DIMS = (8, 16, 20, 24, 32, 40, 48, 64, 72, 80, 96, 100, 104, 128, 160, 192, 200, 256)
VALUE_HEAD_DIMS = [(8, 64), (64, 8), (32, 48), (48, 32), (64, 128), (128, 64), (192, 128)]
VALUE_HEAD_DIMS += [(128, 256), (256, 128), (256, 8), (8, 256), (72, 40), (20, 64), (64, 20)]
VALUE_HEAD_DIMS += [(1, 3), (100, 1), (1, 255)]

# Where fragments (8, 16), tiles (64, 128) and several of them end, and primes.
LENGTHS = (0, 1, 2, 15, 16, 17, 31, 63, 64, 65, 127, 128, 129, 191, 255, 257)
LENGTHS += (97, 331, 523, 997, 1023, 1024, 1025)

on_a_gpu = pytest.mark.skipif(DEVICE == "cpu", reason="nothing to rehearse on the CPU")
every_head_dim = pytest.mark.parametrize("d", HEAD_DIMS, ids=lambda d: f"d{d}")
every_mask = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
either_way = pytest.mark.parametrize("deterministic", [False, True], ids=["atomic", "ordered"])

# Options that every path must get right: tests cross them with what else they are about.
OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window": (13, 4)},
    "left only": {"window": (70, -1)},
    "right only": {"window": (-1, 0)},
    "one key": {"window": (0, 0)},
    "wide window": {"window": (129, 64)},
    "causal window": {"window": (65, 9), "causal": True},
    "endless window": {"window": (2**62, 2**62)},
    "softcap": {"softcap": 2.0},
    "softcap causal": {"softcap": 20.0, "causal": True},
    "softcap far past saturation": {"softcap": 0.5, "scale": 50.0},
    "scale": {"scale": 0.8},
    "negative scale": {"scale": -0.3, "causal": True},
    "zero scale": {"scale": 0.0},
    "all of them": {"causal": True, "window": (90, 7), "softcap": 7.0, "scale": -0.4},
}
every_option = pytest.mark.parametrize("option", OPTIONS)


needs_bias = pytest.mark.kernels(role="attention_fwd_bias")
needs_packed_bias = pytest.mark.kernels(role="attention_bias_transpose")
needs_short_tiles = pytest.mark.kernels(role="attention_fwd", tile=(32, 32))
needs_dropout = pytest.mark.kernels(role="attention_fwd_dropout")
needs_splits = pytest.mark.kernels(role="attention_combine")
needs_query_splits = pytest.mark.kernels(role="attention_bwd_key_sum")


def refused(*tensors, **options) -> str:
    """Why the family that is forced does not take a call, which explain() is asked; "": it does.
    One that carries every option is not asked: it has to."""
    if DEVICE == "cpu" or forced() is None or forced() in COMPLETE:
        return ""
    return refusal(*tensors, **options)


def skip_if_refused(*tensors, **options) -> None:
    if why := refused(*tensors, **options):
        pytest.skip(why)


def explained(case: Case) -> tuple[list, dict]:
    """The tensors and options that explain() takes of a case."""
    tensors = {"bias": case.bias, "sinks": case.sinks, "key_lengths": case.key_lengths}
    if case.cu_q is not None:
        tensors |= {"cu_seqlens_q": case.cu_q, "cu_seqlens_k": case.cu_k}
        tensors |= {"max_seqlen_q": case.max_q, "max_seqlen_k": case.max_k}
    dropout = {name: x for name, x in case.dropout.items() if name == "dropout_p"}
    return [case.q, case.k, case.v], tensors | case.options | dropout


def normal(*shape: int, dtype=torch.float16, std: float = 1.0) -> torch.Tensor:
    return (torch.randn(shape, device=DEVICE) * std).to(dtype)


def integers(*values: int, dtype=torch.int32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=DEVICE)


def qkv(
    n, m=None, *, lead=(2,), hq=4, hk=2, d=64, dv=None, dtype=torch.float16
) -> list[torch.Tensor]:
    m = n if m is None else m
    shapes = ((*lead, hq, n, d), (*lead, hk, m, d), (*lead, hk, m, d if dv is None else dv))
    return [normal(*shape, dtype=dtype) for shape in shapes]


def dense(
    n,
    m=None,
    *,
    grad_lse=True,
    key_lengths=None,
    deterministic=True,
    needs="qkv",
    options=None,
    **shape,
) -> Case:
    """A dense case; `shape` as for qkv()."""
    q, k, v = qkv(n, m, **shape)
    return Case(
        q,
        k,
        v,
        normal(*q.shape[:-1], v.shape[-1], dtype=q.dtype),
        grad_lse=torch.randn(q.shape[:-1], device=DEVICE) if grad_lse else None,
        key_lengths=None if key_lengths is None else key_lengths.to(DEVICE),
        options=dict(options or {}),
        deterministic=deterministic,
        needs=needs,
    )


def cumulative(lengths, dtype=torch.int32) -> torch.Tensor:
    return torch.tensor([0, *lengths], device=DEVICE).cumsum(0).to(dtype)


def ragged(
    lengths,
    *,
    hq=4,
    hk=2,
    d=64,
    dv=None,
    dtype=torch.float16,
    rest=(0, 0),
    slack=0,
    cu_dtype=torch.int32,
    grad_lse=True,
    deterministic=True,
    needs="qkv",
    options=None,
) -> Case:
    """Sequences of (n_i, m_i) queries and keys, and `rest` tokens that belong to none."""
    ns, ms = [n for n, _ in lengths], [m for _, m in lengths]
    dv = d if dv is None else dv
    q = normal(sum(ns) + rest[0], hq, d, dtype=dtype)
    k, v = (normal(sum(ms) + rest[1], hk, width, dtype=dtype) for width in (d, dv))
    return Case(
        q,
        k,
        v,
        normal(*q.shape[:-1], dv, dtype=dtype),
        grad_lse=torch.randn(q.shape[:-1], device=DEVICE) if grad_lse else None,
        cu_q=cumulative(ns, cu_dtype),
        cu_k=cumulative(ms, cu_dtype),
        max_q=max(ns, default=0) + slack,
        max_k=max(ms, default=0) + slack,
        options=dict(options or {}),
        deterministic=deterministic,
        needs=needs,
    )


def with_packed_bias(case: Case, heads: int, dtype=None, layout=None) -> Case:
    """A ragged case with a bias (sum of n_i * m_i, heads), wanted with its gradient."""
    spans = zip(oracle.spans(case.cu_q), oracle.spans(case.cu_k), strict=True)
    pairs = sum((q1 - q0) * (k1 - k0) for (q0, q1), (k0, k1) in spans)
    bias = normal(pairs, heads, dtype=case.q.dtype if dtype is None else dtype)
    return replace(case, bias=layout(bias) if layout else bias, needs=case.needs + "b")


def with_sinks(case: Case, dtype=torch.float32, layout=None) -> Case:
    """The case with a sink for each head, wanted with their gradient."""
    heads = case.q.shape[-3 if case.cu_q is None else -2]
    sinks = normal(heads, dtype=dtype, std=2.0)
    return replace(case, sinks=layout(sinks) if layout else sinks, needs=case.needs + "s")


@contextmanager
def poisoned(*results: tuple[tuple[int, ...], torch.dtype]):
    """What torch.empty gives inside holds NaN, so that an element nobody writes shows.

    In both ways that there are: blocks of the results' sizes are filled and freed, and reused by
    the allocator; and torch fills new memory itself when asked for determinism.
    """
    blocks = [torch.full(shape, nan, dtype=dtype, device=DEVICE) for shape, dtype in results]
    del blocks
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def same(got, want) -> bool:
    return all(same_bits(a, b) for a, b in zip(got, want, strict=True))


def attend(q, k, v, **options) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse, made in poisoned memory, made twice with the same bits, inputs untouched."""
    skip_if_refused(q, k, v, **options)
    before = [x.clone() for x in (q, k, v)]
    shapes = ((*q.shape[:-1], v.shape[-1]), q.dtype), (q.shape[:-1], torch.float32)
    with poisoned(*shapes):
        results = fm.flash_attention(q, k, v, return_lse=True, **options)
    again = fm.flash_attention(q, k, v, return_lse=True, **options)
    for name, a, b in zip(("out", "lse"), results, again, strict=True):
        assert a.device == q.device
        assert same_bits(a, b), f"{name} differs between two runs"
    for name, a, b in zip("qkv", (q, k, v), before, strict=True):
        assert same_bits(a, b), f"{name} was changed"
    return results


def judge(out, lse, q, k, v, key_lengths=None, **options) -> None:
    """Against the float64 oracle, with the tolerance of every other test."""
    no_grad = q.new_zeros(1).expand(*q.shape[:-1], v.shape[-1])
    case = Case(q, k, v, no_grad, key_lengths=key_lengths, options=options, needs="")
    oracle.accept(case, {"out": out, "lse": lse})


def check(q, k, v, **options) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = attend(q, k, v, **options)
    judge(out, lse, q, k, v, **options)
    return out, lse


def tiles_there_are(call) -> list[str]:
    """What FLASHMOE_TILE may say, from the error of a call for which it asks for 1x1."""
    with pytest.raises(RuntimeError, match=r"FLASHMOE_TILE.*1x1\b") as refusal:
        call()
    return sorted(set(re.findall(r"\b\d+x\d+\b", str(refusal.value))) - {"1x1"})


# What explain() says of a plan.


def launches(text: str) -> list[str]:
    """The kernels besides the one that does most of the work, in their order.

    One that is launched twice in a row (a sum, then the sum of its parts) is named once.
    """
    kernel = re.search(r"^ +kernel +(\S+)$", text, re.M)[1]
    names = re.findall(r"^ +(\S+): grid ", text, re.M)
    names = [name for i, name in enumerate(names) if i == 0 or names[i - 1] != name]
    return [name for name in names if name != kernel]


def slices(text: str) -> int:
    """Parts of the heads that a ragged batch goes in."""
    found = re.search(r"^ +slices +(\d+), each a part of the heads$", text, re.M)
    return int(found[1]) if found else 1


def splits(text: str) -> int:
    """Parts that the keys of one tile of queries come in; backward, the queries of one of keys."""
    found = re.search(r"^ +splits +the (?:keys|queries), in (\d+)(?:,.*)?$", text, re.M)
    return int(found[1]) if found else 1


def tile(text: str) -> tuple[int, int]:
    queries, keys = re.search(r"^ +tile +(\d+) queries x (\d+) keys$", text, re.M).groups()
    return int(queries), int(keys)


def results(case: Case) -> dict[str, torch.Tensor]:
    """Everything the case asks for, made in poisoned memory."""
    tensors, options = explained(case)
    for backward in (False, True) if case.needs else (False,):
        skip_if_refused(*tensors, **options, backward=backward)
    # Poison asks torch for determinism, which `deterministic=None` would follow.
    case = replace(case, deterministic=bool(case.deterministic))
    shapes = [(x.shape, x.dtype) for x in (case.grad_out, *case.inputs().values())]
    with poisoned(*shapes, (case.q.shape[:-1], torch.float32)):
        return oracle.ours(case)


def unsteady(case: Case, got: dict[str, torch.Tensor]) -> list[str]:
    """Results that a second run gives other bits, of those that promise the same ones."""
    again = oracle.ours(case)
    promised = again if case.deterministic else again.keys() & {"out", "lse", "dbias", "dsinks"}
    return [name for name in promised if not same_bits(got[name], again[name])]


def check_case(case: Case) -> dict[str, torch.Tensor]:
    """Forward and backward: numbers, bits of a second run, inputs untouched."""
    inputs = {**case.inputs(), "grad_out": case.grad_out}
    if case.grad_lse is not None:
        inputs["grad_lse"] = case.grad_lse
    before = {name: x.clone() for name, x in inputs.items()}
    got = results(case)
    assert not unsteady(case, got), "two runs differ"
    for name, x in inputs.items():
        assert same_bits(x, before[name]), f"{name} was changed"
    return oracle.accept(case, got)


# Layouts. Memory that belongs to no element is NaN.


def gaps(*shape: int, dtype) -> torch.Tensor:
    return torch.full(shape, nan, dtype=dtype, device=DEVICE)


def filled(view: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    assert view.shape == values.shape
    return view.copy_(values)


def rows_first(x):
    """(B, S, H, D) in memory, as projections leave it."""
    return x.transpose(-3, -2).contiguous().transpose(-3, -2)


def heads_in_the_middle(x):
    """A slice of (B, S, 3, H, D): one of a packed q, k, v."""
    wide = gaps(*x.shape[:-3], x.shape[-2], 3, x.shape[-3], x.shape[-1], dtype=x.dtype)
    return filled(wide[..., 1, :, :].transpose(-3, -2), x)


def rows_apart(x):
    """Room before, after and between the rows, aligned."""
    wide = gaps(*x.shape[:-2], x.shape[-2] + 9, x.shape[-1] + 24, dtype=x.dtype)
    return filled(wide[..., 4 : 4 + x.shape[-2], 8 : 8 + x.shape[-1]], x)


def every_third_row(x):
    wide = gaps(*x.shape[:-2], 3 * x.shape[-2] + 2, x.shape[-1], dtype=x.dtype)
    return filled(wide[..., 2::3, :][..., : x.shape[-2], :], x)


def batch_last(x):
    """The slowest dimension varies fastest but for the rows' elements."""
    return x.movedim(0, -2).contiguous().movedim(-2, 0)


def odd_rows(x):
    """Rows a whole number of elements apart, but not of 16 bytes."""
    wide = gaps(*x.shape[:-1], x.shape[-1] + 1, dtype=x.dtype)
    return filled(wide[..., : x.shape[-1]], x)


def half_aligned_rows(x):
    wide = gaps(*x.shape[:-1], x.shape[-1] + 4, dtype=x.dtype)
    return filled(wide[..., : x.shape[-1]], x)


def odd_start(x):
    """Dense, but not where 16 bytes begin."""
    return filled(gaps(x.numel() + 8, dtype=x.dtype)[3 : 3 + x.numel()].view(x.shape), x)


def odd_heads(x):
    """Aligned rows, heads that start anywhere."""
    size = x.shape[-2] * x.shape[-1]
    wide = gaps(*x.shape[:-2], size + 5, dtype=x.dtype)
    return filled(wide[..., :size].unflatten(-1, x.shape[-2:]), x)


def columns_first(x):
    """(B, H, D, S) in memory: the last dimension is not the unit one."""
    return x.mT.contiguous().mT


def every_second_column(x):
    wide = gaps(*x.shape[:-1], 2 * x.shape[-1], dtype=x.dtype)
    return filled(wide[..., ::2], x)


IN_PLACE = [rows_first, heads_in_the_middle, rows_apart, every_third_row, batch_last]
COPIED = [odd_rows, half_aligned_rows, odd_start, odd_heads, columns_first, every_second_column]


# Where a result may not be finite.


def legal(name: str, x: torch.Tensor) -> torch.Tensor:
    """Finite, or the lse of a row without keys."""
    return x.isfinite() | (x == -inf) if name == "lse" else x.isfinite()


def put(x: torch.Tensor, index: tuple, value: float) -> torch.Tensor:
    x = x.clone()
    x[index] = value
    return x


def unchanged(got: torch.Tensor, want: torch.Tensor, gradient: bool = False) -> bool:
    """Whether a NaN elsewhere left these alone: the very bits, or, where a tile that meets one is
    computed once more, to a few units in the last place of the dtype. fp32 rounds the scores of
    such a tile's gradients twice."""
    if forced() not in RECOMPUTES and not (gradient and got.dtype == torch.float32):
        return same_bits(got, want)
    eps = 1e-5 if got.dtype == torch.float32 and not gradient else torch.finfo(got.dtype).eps
    return torch.allclose(got, want, atol=8 * eps, rtol=4 * eps)


def check_containment(clean: Case, dirty: Case) -> int:
    """The oracle's pattern of NaN, and elsewhere the results of the clean run.

    The very bits for out and lse, unless a tile with a NaN is computed once more; gradients of such
    a tile are summed in another order.
    Returns how many elements the NaN reached.
    """
    bits = forced() not in RECOMPUTES
    before, got = results(clean), results(dirty)
    if oracle.is_small(clean, 1 << 22):  # `contain` has every multiplication in memory
        clean, dirty = oracle.on_the_cpu(clean), oracle.on_the_cpu(dirty)
        before, got = ({name: x.cpu() for name, x in of.items()} for of in (before, got))
    want = oracle.reference(dirty, contain=True)
    right, by_math, floor = oracle.reference(clean), oracle.math(clean), oracle.floors(clean)
    reached = 0
    for name, tensor in got.items():
        expected, found = legal(name, want[name]), legal(name, tensor)
        wrong = (expected != found).nonzero()
        assert not len(wrong), f"{name}: {len(wrong)} are not as expected, {wrong[:5].tolist()}"
        if bits and name in ("out", "lse"):
            assert same_bits(tensor[expected], before[name][expected]), f"{name} changed elsewhere"
        else:
            limit = oracle.tolerance(tensor, right[name], by_math[name], floor[name])
            ours, wanted = tensor[expected].double(), right[name][expected]
            error = (ours - wanted).where(ours != wanted, 0).abs()  # -inf is the lse of no key
            assert (error <= limit).all(), f"{name} changed elsewhere by {error.max():.3g}"
        reached += int((~expected).sum())
    return reached
