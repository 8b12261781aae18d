"""Sinks and their gradient on CUDA tensors, through every kind of forward kernel."""

from __future__ import annotations

from dataclasses import replace
from math import inf, nan

import pytest
import torch
from helpers import (
    ALL_HEAD_DIMS,
    DEVICE,
    OPTIONS,
    check_case,
    check_containment,
    dense,
    either_way,
    every_option,
    filled,
    gaps,
    integers,
    launches,
    needs_bias,
    needs_packed_bias,
    normal,
    on_a_gpu,
    put,
    ragged,
    results,
    with_packed_bias,
    with_sinks,
)

import flashmoe_science as fm
import oracle
from oracle import same_bits

LENGTHS = ((70, 91), (130, 33), (5, 200), (40, 0), (0, 9), (64, 64))
SHORT = tuple((1 + i % 37, 1 + i % 31) for i in range(300))


@either_way
@every_option
def test_options(option, deterministic, dtype):
    case = dense(131, 136, dtype=dtype, deterministic=deterministic, options=OPTIONS[option])
    check_case(with_sinks(case))


@pytest.mark.parametrize("d", ALL_HEAD_DIMS)
def test_head_dims(d, dtype):
    for n, m in ((70, 104), (200, 130)):
        check_case(with_sinks(dense(n, m, d=d, dtype=dtype), dtype))


@pytest.mark.parametrize("n", [0, 1, 2, 17, 63, 65, 129])
def test_lengths(n, dtype):
    """Where there are more queries than keys, the first rows see the sink alone."""
    for m in (0, 1, 16, 64, 127, 257):
        check_case(with_sinks(dense(n, m, dtype=dtype, options={"causal": True})))


@pytest.mark.parametrize("hq, hk", [(1, 1), (6, 6), (6, 2), (16, 1)])
def test_heads(hq, hk, dtype):
    for n in (5, 100):
        check_case(with_sinks(dense(n, 150, hq=hq, hk=hk, dtype=dtype)))


@pytest.mark.parametrize("n", [1, 2, 5])
def test_few_queries_over_many_keys(n, dtype):
    """Keys are split over blocks; the heads of one query are the rows of a tile."""
    for hq, hk in ((8, 2), (4, 4), (24, 1)):
        case = with_sinks(dense(n, 3001, lead=(1,), hq=hq, hk=hk, d=64, dtype=dtype))
        check_case(case)
        lengths = integers(0, 1, 2999)
        check_case(with_sinks(dense(n, 3001, lead=(3,), hq=hq, hk=hk, key_lengths=lengths)))


def test_key_lengths(dtype):
    lengths = integers(0, 1, 64, 200)
    check_case(with_sinks(dense(70, 200, lead=(4,), d=32, dtype=dtype, key_lengths=lengths)))


def every_second(x):
    return filled(gaps(2 * x.numel(), dtype=x.dtype)[::2], x)


def after_an_odd_start(x):
    return filled(gaps(x.numel() + 1, dtype=x.dtype)[1:], x)


@pytest.mark.parametrize("layout", [every_second, after_an_odd_start, lambda x: x[:1].expand(4)])
def test_layouts(layout, dtype):
    for wide in (dtype, torch.float32):
        check_case(with_sinks(dense(66, 88, dtype=dtype), wide, layout))


@pytest.mark.parametrize("offset", [-300.0, -20.0, 20.0, 300.0])
def test_sinks_far_from_the_scores(offset, dtype):
    case = with_sinks(dense(66, 88, dtype=dtype))
    got = check_case(replace(case, sinks=case.sinks + offset))
    assert got["out"].isfinite().all() and got["lse"].isfinite().all()


@pytest.mark.parametrize("lead, n", [((40,), 65), ((3, 5), 70), ((1,), 3000)])
def test_sums_in_parts(lead, n, dtype):
    """The gradient of a head's sink is a sum over all of the batch."""
    case = with_sinks(dense(n, 40, lead=lead, d=16, hq=3, hk=1, dtype=dtype, deterministic=False))
    check_case(case)


@on_a_gpu
def test_launches_of_the_gradient(dtype):
    case = with_sinks(dense(600, 40, dtype=dtype))
    tensors = (case.q, case.k, case.v)
    for backward in (False, True):
        text = fm.explain(*tensors, sinks=case.sinks, backward=backward)
        found = [name for name in launches(text) if "bwd_sinks" in name]
        assert len(found) == backward and "sinks in float32" in text


@needs_bias
@pytest.mark.parametrize("wide", [False, True], ids=["", "fp32"])
@pytest.mark.parametrize("m", [72, 131])
@pytest.mark.parametrize("d", [16, 32, 64, 128], ids=lambda d: f"d{d}")
def test_with_a_bias(d, m, wide, dtype):
    """Of its own for each pair or shared, in whole chunks or odd rows, with rows that it hides."""
    for shape in ((2, 4, 70, m), (4, 70, m), (2, 1, 1, m)):
        case = dense(70, m, d=d, dtype=dtype, needs="qkvb")
        bias = normal(*shape, dtype=torch.float32 if wide else dtype)
        bias[..., -1:, :3] = -inf
        if shape[-2] > 1:
            bias[..., 20:23, :] = -inf
        check_case(with_sinks(replace(case, bias=bias)))


@needs_bias
@pytest.mark.parametrize("n", [1, 5])
def test_with_a_bias_of_few_queries(n, dtype):
    case = dense(n, 2000, hq=8, hk=2, dtype=dtype, needs="qkvb")
    check_case(with_sinks(replace(case, bias=normal(8, n, 2000, dtype=dtype))))


@pytest.mark.parametrize("option", ["plain", "causal", "causal window", "softcap"])
@pytest.mark.parametrize("d", [16, 32, 64, 128, 256], ids=lambda d: f"d{d}")
def test_ragged(d, option, dtype):
    """Sequences without keys have lse = sink, tokens after the last one -inf."""
    case = with_sinks(ragged(LENGTHS, d=d, dtype=dtype, rest=(9, 11), options=OPTIONS[option]))
    got = check_case(case)
    assert got["lse"][-9:].eq(-inf).all() and got["out"][-9:].eq(0).all()
    keyless = slice(205, 245)  # of the sequence (40, 0)
    assert got["lse"][keyless].eq(case.sinks).all() and got["out"][keyless].eq(0).all()


@pytest.mark.parametrize("d, hq, hk", [(16, 8, 8), (16, 6, 6), (32, 3, 3), (64, 2, 2), (48, 4, 2)])
def test_many_short_sequences(d, hq, hk, dtype):
    """Tiles for short sequences, and tiles of packed tokens."""
    for lengths in (SHORT, ((31, 17),) * 280):
        case = ragged(lengths, d=d, hq=hq, hk=hk, dtype=dtype, rest=(40, 3))
        got = check_case(with_sinks(case, dtype))
        assert got["lse"][-40:].eq(-inf).all()
    check_case(with_sinks(dense(31, 17, lead=(270,), d=d, hq=hq, hk=hk, dtype=dtype)))


@needs_packed_bias
def test_ragged_with_a_bias(dtype):
    for heads in (4, 1):
        case = with_packed_bias(ragged(LENGTHS, d=32, dtype=dtype, rest=(3, 0)), heads)
        check_case(with_sinks(case))
    check_case(with_sinks(with_packed_bias(ragged(SHORT, d=32, hq=2, hk=2, dtype=dtype), 2)))


@pytest.mark.parametrize("lengths", [LENGTHS, SHORT], ids=["long", "short"])
def test_minus_infinity_is_no_sink(lengths, dtype):
    """To the last bit; and its gradient is 0 whatever the loss is."""
    for case in (
        dense(131, 70, dtype=dtype, options={"causal": True}),
        dense(1, 3001, lead=(1,), hq=8, dtype=dtype),
        ragged(lengths, d=32, hq=4, hk=4, dtype=dtype, rest=(5, 5)),
    ):
        want = results(case)
        none = torch.full_like(with_sinks(case).sinks, -inf)
        got = results(replace(case, sinks=none, needs=case.needs + "s"))
        assert got.pop("dsinks").eq(0).all()
        assert all(same_bits(got[name], want[name]) for name in want)


def heads_of(case, name: str) -> int:
    """Which dimension of a result counts heads."""
    if name == "dsinks":
        return 0
    return (-2 if name == "lse" else -3) if case.cu_q is None else 1


@pytest.mark.parametrize("value", [nan, inf], ids=str)
def test_nan_stays_in_its_head(value, dtype):
    """Of other heads out and lse keep their bits; gradients may be summed in another order."""
    for case in (
        dense(131, 136, dtype=dtype, options={"causal": True}),
        dense(70, 40, dtype=dtype, options={"causal": True}),  # rows without keys
        dense(1, 3001, lead=(1,), dtype=dtype),
        ragged(LENGTHS, dtype=dtype, rest=(9, 11)),
        ragged(SHORT, d=32, hq=4, hk=2, dtype=dtype, rest=(9, 11)),
    ):
        clean = with_sinks(case)
        dirty = replace(clean, sinks=put(clean.sinks, (2,), value))  # of key head 1
        before, got = results(clean), results(dirty)
        right, by_math, floor = oracle.reference(clean), oracle.math(clean), oracle.floors(clean)
        for name, x in got.items():
            dim, at = heads_of(case, name), 1 if name in ("dk", "dv") else 2
            assert x.select(dim, at).isnan().any(), name
            limit = oracle.tolerance(x, right[name], by_math[name], floor[name])
            for h in (h for h in range(x.shape[dim]) if h != at):
                ours, other = x.select(dim, h), before[name].select(dim, h)
                if name in ("out", "lse"):
                    assert same_bits(ours, other), name
                else:
                    error = (ours.double() - right[name].select(dim, h)).abs()
                    assert (error <= limit).all(), name


@pytest.mark.parametrize("poison", [nan, inf, -inf], ids=str)
def test_rows_that_see_the_sink_alone_may_hold_anything(poison, dtype):
    """What is in their Q and dO reaches nothing, the gradient of the sinks neither."""
    clean = with_sinks(dense(130, 60, dtype=dtype, options={"causal": True}))
    for name in ("q", "grad_out"):
        dirty = put(getattr(clean, name), (..., 21, slice(None)), poison)
        assert check_containment(clean, replace(clean, **{name: dirty})) == 0


@needs_bias
@pytest.mark.parametrize("poison", [nan, inf], ids=str)
def test_rows_that_a_bias_hides_may_hold_anything(poison, dtype):
    case = dense(65, 72, d=32, dtype=dtype, needs="qkvb")
    bias = put(normal(2, 4, 65, 72, dtype=dtype), (..., slice(20, 23), slice(None)), -inf)
    clean = with_sinks(replace(case, bias=bias))
    for name in ("q", "grad_out"):
        dirty = put(getattr(clean, name), (..., 21, slice(None)), poison)
        assert check_containment(clean, replace(clean, **{name: dirty})) == 0


@on_a_gpu
def test_lengths_that_are_wrong_make_the_gradient_nan(dtype):
    """It is a sum over all sequences; of these only the wrong one is NaN."""
    case = with_sinks(dense(66, 88, lead=(3,), dtype=dtype, key_lengths=integers(7, 89, 88)))
    got = results(case)
    assert got.pop("dsinks").isnan().all()
    for x in got.values():
        assert x[1].isnan().all() and x[0].isfinite().all() and x[2].isfinite().all()


@pytest.mark.parametrize("needs", ["s", "q", "kvs", ""])
def test_each_gradient_alone_is_the_same(needs, dtype):
    for case in (
        with_sinks(dense(131, 136, dtype=dtype)),
        with_sinks(ragged(SHORT, d=32, hq=2, hk=2, dtype=dtype)),
    ):
        want, got = results(case), results(replace(case, needs=needs))
        assert got.keys() == {"out", "lse"} | {"dsinks" if x == "s" else f"d{x}" for x in needs}
        assert all(same_bits(got[name], want[name]) for name in ("out", "lse", *got))


@on_a_gpu
def test_they_may_change_between_replays_of_a_graph(dtype):
    case = with_sinks(dense(70, 91, dtype=dtype))
    sinks = case.sinks.clone()

    def attend():
        return fm.flash_attention(case.q, case.k, case.v, sinks=sinks, return_lse=True)

    attend()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = attend()
    for values in (case.sinks, case.sinks + 3, torch.full_like(case.sinks, -inf)):
        sinks.copy_(values)
        graph.replay()
        want = fm.flash_attention(case.q, case.k, case.v, sinks=values, return_lse=True)
        assert all(same_bits(a, b) for a, b in zip(captured, want, strict=True))


def test_another_device_is_refused(dtype):
    case = with_sinks(dense(20, dtype=dtype))
    elsewhere = torch.zeros(4, device="meta" if DEVICE == "cpu" else "cpu")
    with pytest.raises(RuntimeError, match="sinks is on"):
        fm.flash_attention(case.q, case.k, case.v, sinks=elsewhere)
