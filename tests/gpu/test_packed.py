"""Tiles of tokens, whatever sequences these are of: both passes of the sm90 family over many short
sequences.

FLASHMOE_TILE asks for them, so that few and small sequences are enough; test_hopper_plans.py has
the planner's own choice.
"""

from __future__ import annotations

from dataclasses import replace
from math import inf, nan

import pytest
import torch
from families import refusal
from helpers import (
    DEVICE,
    OPTIONS,
    check_case,
    check_containment,
    every_mask,
    explained,
    filled,
    gaps,
    integers,
    launches,
    on_a_gpu,
    put,
    ragged,
    same_bits,
    tile,
)
from packed import BACKWARD, FORWARD, explain, packed_tiles  # noqa: F401
from test_bad_lengths import LENGTHS, REST, judge_ragged

import oracle

pytestmark = [on_a_gpu, pytest.mark.family("sm90")]


# Head dim, value head dim, query heads, key heads: boxes that are full and that are not.
SHAPES = [(16, 16, 8, 8), (16, 16, 6, 6), (16, 16, 1, 1), (32, 32, 4, 4), (32, 32, 3, 3)]
SHAPES += [(64, 64, 2, 2), (64, 64, 6, 2), (48, 48, 2, 1), (40, 64, 2, 2), (64, 8, 2, 2)]
every_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)

SEQUENCES = {
    "one": ((128, 128),),
    "single tokens": ((1, 1),) * 300,
    "edges": tuple((n, n) for n in (15, 16, 17, 31, 32, 33, 63, 64, 65, 95, 97, 127, 129)),
    "edges of 192": tuple((n, n) for n in (191, 1, 193, 192, 383, 5)),
    "even and odd": tuple((n, m) for n in range(1, 9) for m in range(1, 9)),
    "cross": ((150, 33), (33, 150), (1, 40), (40, 1), (0, 9), (9, 0), (2, 2), (3, 5)) * 3,
    "decoding": tuple((1, m) for m in (1, 2, 31, 32, 33, 64, 130, 0, 17)) * 20,
    "empty ends": ((0, 0), (0, 70), (5, 8), (33, 40), (0, 0), (31, 0), (0, 50)),
    "long among short": ((3, 3),) * 40 + ((700, 900),) + ((5, 7),) * 40,
}


def case_of(lengths, shape=(64, 64, 2, 2), **more) -> oracle.Case:
    d, dv, hq, hk = shape
    case = ragged(lengths, d=d, dv=dv, hq=hq, hk=hk, **more)
    text = explain(case)
    assert tile(text) == FORWARD and "_fwd_packed_" in text
    assert [name.split("_", 2)[2][:-5] for name in launches(text)] == ["row_bounds"]
    text = explain(case, backward=True)
    assert tile(text) == BACKWARD and "_bwd_packed_" in text and "bitwise reproducible" in text
    assert [name.split("_", 2)[2][:-5] for name in launches(text)] == ["bwd_packed_preprocess"]
    return case


@every_mask
@pytest.mark.parametrize("lengths", SEQUENCES)
@every_shape
def test_lengths(shape, lengths, causal, dtype):
    check_case(case_of(SEQUENCES[lengths], shape, dtype=dtype, options={"causal": causal}))


@pytest.mark.parametrize(
    "option", [name for name in OPTIONS if not OPTIONS[name].keys() & {"softcap", "scale"}]
)
def test_masks(option, dtype):
    for shape in ((16, 16, 4, 4), (64, 64, 4, 2)):
        for lengths in ("edges", "cross", "long among short"):
            check_case(case_of(SEQUENCES[lengths], shape, dtype=dtype, options=OPTIONS[option]))


@pytest.mark.parametrize("scale", [1e-7, 0.8, 30.0])
def test_scales(scale, dtype):
    """Where no score is above another, and where few are not far below."""
    for shape in ((16, 16, 4, 4), (64, 64, 2, 2)):
        for lengths in ("edges", "long among short"):
            check_case(case_of(SEQUENCES[lengths], shape, dtype=dtype, options={"scale": scale}))


def test_scores_that_rise(dtype):
    """Each key has larger scores than those before: no guess of a reference is right."""
    case = case_of(((90, 90), (300, 300)), (16, 16, 4, 4), dtype=dtype)
    rising = torch.linspace(0.1, 8, len(case.k), device=DEVICE)[:, None, None]
    check_case(replace(case, q=case.q.abs(), k=(case.k.abs() * rising).to(case.k.dtype)))


@pytest.mark.parametrize("cu_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("rest, slack", [((3, 0), 0), ((0, 4), 100), ((300, 130), 1)], ids=str)
def test_tokens_of_no_sequence(rest, slack, cu_dtype, dtype):
    for shape in ((16, 16, 4, 4), (64, 64, 2, 1)):
        more = {"rest": rest, "slack": slack, "cu_dtype": cu_dtype, "dtype": dtype}
        got = check_case(case_of(SEQUENCES["cross"], shape, **more))
        end = len(got["out"]) - rest[0]
        assert got["out"][end:].eq(0).all() and got["lse"][end:].eq(-inf).all()
        assert got["dq"][end:].eq(0).all()
        for name in ("dk", "dv"):
            assert got[name][len(got[name]) - rest[1] :].eq(0).all()


@pytest.mark.parametrize("shape", [(16, 16, 6, 6), (64, 64, 4, 2), (40, 64, 2, 2)], ids=str)
def test_what_is_not_wanted_changes_nothing(shape, dtype):
    case = case_of(SEQUENCES["cross"], shape, dtype=dtype)
    want = check_case(case)
    for needs in ("q", "k", "v", "qk", "qv", "kv"):
        got = check_case(replace(case, needs=needs))
        assert set(got) == {"out", "lse", *(f"d{name}" for name in needs)}
        assert all(same_bits(got[name], want[name]) for name in got)
    check_case(replace(case, grad_lse=None))
    check_case(replace(case, use_out=False, grad_out=torch.zeros_like(case.grad_out)))
    check_case(replace(case, deterministic=False))


def one_of_three(x):
    """A slice of (tokens, 3, heads, D)."""
    wide = gaps(x.shape[0], 3, *x.shape[1:], dtype=x.dtype)
    return filled(wide[:, 1], x)


def heads_apart(x):
    wide = gaps(*x.shape[:-1], x.shape[-1] + 8, dtype=x.dtype)
    return filled(wide[..., : x.shape[-1]], x)


def heads_outside(x):
    """(heads, tokens, D) in memory."""
    return x.transpose(0, 1).contiguous().transpose(0, 1)


@pytest.mark.parametrize("layout", [one_of_three, heads_apart, heads_outside])
def test_strides(layout, dtype):
    for shape in ((16, 16, 4, 4), (64, 64, 2, 2)):
        case = case_of(SEQUENCES["edges"], shape, dtype=dtype)
        laid = replace(case, **{name: layout(getattr(case, name)) for name in (*"qkv", "grad_out")})
        tensors, options = explained(laid)
        if shape[0] == 16 and layout is not one_of_three:  # heads of 16 share a box of 64 columns
            assert "FLASHMOE_TILE asks for 128x32" in refusal(*tensors, **options)
        else:
            assert "_fwd_packed_" in explain(laid)
            assert "_bwd_packed_" in explain(laid, backward=True)
            check_case(laid)


@pytest.mark.parametrize("count", [63, 64, 65, 1023, 1024, 1025, 9000])
def test_thousands_of_sequences(count, dtype):
    """Around the numbers that the kernel which finds the bounds takes at a time."""
    numbers = torch.randint(0, 12, (count, 2), generator=torch.Generator().manual_seed(0))
    lengths = [tuple(pair) for pair in numbers.tolist()]
    lengths[count // 3], lengths[-2] = (2100, 90), (1, 1500)
    case = case_of(tuple(lengths), (16, 16, 2, 2), dtype=dtype, rest=(5, 3))
    got = oracle.ours(case)
    q_spans, k_spans = oracle.spans(case.cu_q), oracle.spans(case.cu_k)
    for first in (0, max(count // 3 - 20, 0), count // 2, count - 40):
        part = slice(first, min(first + 40, count))
        (q0, q1), (k0, k1) = ((s[part][0][0], s[part][-1][1]) for s in (q_spans, k_spans))
        one = replace(
            case,
            q=case.q[q0:q1],
            grad_out=case.grad_out[q0:q1],
            grad_lse=case.grad_lse[q0:q1],
            k=case.k[k0:k1],
            v=case.v[k0:k1],
            cu_q=case.cu_q[part.start : part.stop + 1] - q0,
            cu_k=case.cu_k[part.start : part.stop + 1] - k0,
        )
        of_keys = ("dk", "dv")
        oracle.accept(
            one, {name: x[k0:k1] if name in of_keys else x[q0:q1] for name, x in got.items()}
        )
    assert got["out"][-5:].eq(0).all() and got["lse"][-5:].eq(-inf).all()
    assert got["dq"][-5:].eq(0).all() and got["dk"][-3:].eq(0).all() and got["dv"][-3:].eq(0).all()


# NaN and infinity.


@pytest.mark.parametrize("shape", [(16, 16, 4, 4), (64, 64, 4, 2), (48, 40, 2, 2)], ids=str)
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (5, 3)}], ids=str)
def test_nan_reaches_what_depends_on_it(options, shape, dtype):
    """Where sequences and tiles begin and end, and in the last columns."""
    clean = case_of(((70, 70), (31, 31), (60, 90), (2, 2), (17, 0)), shape, dtype=dtype,
                    rest=(3, 3), options=options)  # fmt: skip
    for name in (*"qkv", "grad_out"):
        for place in (0, 15, 69, 70, 100, 101, 127, 128, len(getattr(clean, name)) - 1):
            x = put(getattr(clean, name), (place, 0, -1), nan)
            check_containment(clean, replace(clean, **{name: x}))


@pytest.mark.parametrize("value", [nan, inf, -inf], ids=str)
def test_keys_and_rows_of_no_sequence_may_hold_anything(value, dtype):
    for shape in ((16, 16, 4, 4), (64, 64, 2, 2)):
        clean = case_of(((70, 60), (31, 31)), shape, dtype=dtype, rest=(40, 40))
        names = (*"qkv", "grad_out")
        dirty = {name: put(getattr(clean, name), (slice(-40, None),), value) for name in names}
        assert check_containment(clean, replace(clean, **dirty)) == 0


def test_infinity_in_values(dtype):
    for shape in ((16, 16, 4, 4), (64, 64, 2, 2)):
        clean = case_of(((70, 70), (31, 31), (60, 90)), shape, dtype=dtype)
        for value in (inf, -inf):
            assert check_containment(clean, replace(clean, v=put(clean.v, (71, 0, 3), value)))


# Lengths that are wrong.


@pytest.mark.parametrize("shape", [(16, 16, 4, 4), (64, 64, 4, 2)], ids=str)
def test_bad_lengths(shape, dtype):
    case = case_of(LENGTHS, shape, rest=REST, dtype=dtype)
    judge_ragged(case, replace(case, max_q=129), [0, 2, 3], [1])
    judge_ragged(case, replace(case, max_q=69), [2, 3], [0, 1])
    judge_ragged(case, replace(case, max_k=199), [0, 1, 3], [2])
    judge_ragged(case, replace(case, max_k=1), [], [0, 1, 2, 3])
    case = case_of(LENGTHS, shape, slack=100, dtype=dtype)
    for side in ("cu_q", "cu_k"):
        sound = getattr(case, side)
        for excess in (1, 64, 2**30):
            past = put(sound, (-1,), int(sound[-1]) + excess)
            judge_ragged(case, replace(case, **{side: past}), [0, 1, 2], [3])
        falls = put(sound, (3,), int(sound[2]) - 1)
        got = judge_ragged(case, replace(case, **{side: falls}), [0, 1], [])
        assert got["out"][int(case.cu_q[2]) :].isnan().all()
        assert got["dq"][int(case.cu_q[2]) :].isnan().all()
        assert got["dk"][int(case.cu_k[2]) :].isnan().all()
        for start in (-1, -1000, 3):
            got = judge_ragged(
                case, replace(case, **{side: put(sound, (0,), start)}), [1, 2, 3], []
            )
            assert got["out"][:70].isnan().all() and got["lse"][:70].isnan().all()
            assert got["dq"][:70].isnan().all() and got["dv"][: int(case.cu_k[1])].isnan().all()
        for values in ([2**31 - 1] * 5, [-(2**31)] * 5, [0, -5, 2**31 - 1, 7, -(2**31)]):
            oracle.ours(replace(case, **{side: integers(*values)}))
            torch.cuda.synchronize()
    judge_ragged(case, case, [0, 1, 2, 3], [])
