"""Dense batches of short sequences as packed tokens: both passes of the sm90 family.

FLASHMOE_TILE asks for it, so that few sequences are enough; test_hopper_plans.py has the planner's
own choice, and test_packed.py what packed tokens are otherwise about.
"""

from __future__ import annotations

from dataclasses import replace
from math import inf, nan

import pytest
import torch
from families import refusal
from helpers import (
    OPTIONS,
    batch_last,
    check_case,
    check_containment,
    dense,
    every_mask,
    explained,
    heads_in_the_middle,
    launches,
    on_a_gpu,
    put,
    rows_apart,
    rows_first,
    same_bits,
    tile,
    with_sinks,
)
from packed import BACKWARD, FORWARD, explain, packed_tiles  # noqa: F401

import oracle

pytestmark = [on_a_gpu, pytest.mark.family("sm90")]


# Head dim, value head dim, query heads, key heads: boxes that are full and that are not.
SHAPES = [(16, 16, 8, 8), (16, 16, 6, 6), (16, 16, 1, 1), (32, 32, 4, 4), (32, 32, 3, 3)]
SHAPES += [(64, 64, 2, 2), (64, 64, 6, 2), (48, 48, 2, 1), (40, 64, 2, 2)]
every_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)
# Batch, queries, keys: around chunks of 32 tokens and tiles of 128 and 192.
LENGTHS = [(1, 64, 64), (7, 64, 64), (300, 1, 1), (9, 31, 31), (5, 32, 32), (6, 33, 33)]
LENGTHS += [(4, 50, 50), (3, 128, 128), (2, 193, 193), (5, 17, 80), (5, 80, 17), (40, 1, 40)]


def is_packed(case: oracle.Case) -> oracle.Case:
    text = explain(case)
    assert tile(text) == FORWARD and "_fwd_packed_" in text
    assert [name.split("_", 2)[2][:-5] for name in launches(text)] == ["row_bounds"]
    text = explain(case, backward=True)
    assert tile(text) == BACKWARD and "_bwd_packed_" in text and "bitwise reproducible" in text
    assert [name.split("_", 2)[2][:-5] for name in launches(text)] == ["bwd_packed_preprocess"]
    return case


def case_of(lengths, shape=(64, 64, 2, 2), layout=rows_first, **more) -> oracle.Case:
    """Heads lie side by side, as projections leave them: of 16 and 32 several share a box."""
    (batch, n, m), (d, dv, hq, hk) = lengths, shape
    case = dense(n, m, lead=(batch,), hq=hq, hk=hk, d=d, dv=dv, **more)
    return is_packed(replace(case, **{n: layout(getattr(case, n)) for n in (*"qkv", "grad_out")}))


def heads_first(x):
    return x.contiguous()


@every_mask
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@every_shape
def test_lengths(shape, lengths, causal, dtype):
    check_case(case_of(lengths, shape, dtype=dtype, options={"causal": causal}))


@pytest.mark.parametrize(
    "option", [name for name in OPTIONS if not OPTIONS[name].keys() & {"softcap", "scale"}]
)
def test_masks(option, dtype):
    for shape in ((16, 16, 4, 4), (64, 64, 4, 2)):
        for lengths in ((6, 50, 50), (5, 17, 80), (3, 100, 70)):
            check_case(case_of(lengths, shape, dtype=dtype, options=OPTIONS[option]))


@pytest.mark.parametrize("layout", [heads_first, heads_in_the_middle, rows_apart, batch_last])
def test_strides(layout, dtype):
    for shape in ((40, 64, 2, 2), (64, 64, 2, 2)):
        check_case(case_of((5, 50, 50), shape, layout, dtype=dtype))
    for shape in ((16, 16, 6, 6), (32, 32, 2, 2)):
        if layout is heads_in_the_middle:
            check_case(case_of((5, 50, 50), shape, layout, dtype=dtype))
        else:
            case = dense(50, lead=(5,), hq=4, hk=4, d=shape[0], dtype=dtype)
            tensors, options = explained(
                replace(case, **{n: layout(getattr(case, n)) for n in "qkv"})
            )
            assert "FLASHMOE_TILE asks for 128x32" in refusal(*tensors, **options)


def test_several_leading_dimensions(dtype):
    for shape in ((16, 16, 4, 4), (64, 64, 2, 2)):
        case = case_of((6, 50, 50), shape, dtype=dtype)
        wide = {
            name: getattr(case, name).unflatten(0, (2, 3))
            for name in (*"qkv", "grad_out", "grad_lse")
            if getattr(case, name) is not None
        }
        check_case(is_packed(replace(case, **wide)))


@pytest.mark.parametrize("shape", [(16, 16, 6, 6), (64, 64, 4, 2), (40, 64, 2, 2)], ids=str)
def test_what_is_not_wanted_changes_nothing(shape, dtype):
    case = case_of((5, 50, 40), shape, dtype=dtype)
    want = check_case(case)
    for needs in ("q", "k", "v", "qk", "qv", "kv"):
        got = check_case(replace(case, needs=needs))
        assert set(got) == {"out", "lse", *(f"d{name}" for name in needs)}
        assert all(same_bits(got[name], want[name]) for name in got)
    check_case(replace(case, use_out=False, grad_out=torch.zeros_like(case.grad_out)))


@pytest.mark.parametrize("shape", [(16, 16, 4, 4), (64, 64, 4, 2), (48, 40, 2, 2)], ids=str)
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (5, 3)}], ids=str)
def test_nan_reaches_what_depends_on_it(options, shape, dtype):
    """Where sequences, chunks and tiles begin and end, and in the last columns."""
    clean = case_of((5, 50, 50), shape, dtype=dtype, options=options)
    for name in (*"qkv", "grad_out"):
        for batch, row in ((0, 0), (0, 49), (1, 15), (2, 31), (2, 32), (4, 49)):
            # An infinity in q or k makes scores of -inf too, and rows right that are not as before.
            for value in (nan, inf) if name in ("v", "grad_out") else (nan,):
                x = put(getattr(clean, name), (batch, 0, row, -1), value)
                check_containment(clean, replace(clean, **{name: x}))


def test_sinks(dtype):
    for shape in ((16, 16, 6, 6), (64, 64, 4, 2)):
        case = with_sinks(case_of((5, 50, 50), shape, dtype=dtype))
        assert "_fwd_packed_" in explain(case) and "_bwd_packed_" in explain(case, backward=True)
        check_case(case)


def test_key_lengths_are_refused(dtype):
    case = case_of((5, 50, 50), dtype=dtype)
    lengths = torch.tensor([50, 3, 0, 17, 50], dtype=torch.int32, device=case.q.device)
    tensors, options = explained(replace(case, key_lengths=lengths))
    assert "FLASHMOE_TILE asks for 128x32" in refusal(*tensors, **options)


def test_it_is_the_ragged_batch(dtype):
    """The same tokens as a ragged batch give the same bits."""
    for shape in ((16, 16, 8, 8), (64, 64, 4, 2)):
        case = case_of((7, 64, 64), shape, dtype=dtype)
        tokens = {n: getattr(case, n).transpose(1, 2).flatten(0, 1) for n in (*"qkv", "grad_out")}
        cu = torch.arange(8, dtype=torch.int32, device=case.q.device) * 64
        grad_lse = case.grad_lse.transpose(1, 2).flatten(0, 1)
        packed = replace(case, **tokens, cu_q=cu, cu_k=cu, max_q=64, max_k=64, grad_lse=grad_lse)
        ours, theirs = oracle.ours(case), oracle.ours(packed)
        for name, x in theirs.items():
            dense_one = ours[name].transpose(1, 2).flatten(0, 1)
            assert same_bits(dense_one.contiguous(), x.contiguous()), name
