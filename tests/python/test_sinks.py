"""Sinks: against the float64 oracle, against the definition, and at their edges."""

from __future__ import annotations

import math

import pytest
import torch

import flashmoe_science as fm
import oracle
from oracle import same_bits
from problems import DTYPES, Bias, Problem, Sinks, build

OPTIONS = {
    "plain": {},
    "causal, rows without keys": {"causal": True},
    "window": {"window": (5, 0)},
    "softcap": {"softcap": 2.0, "spread": 3.0},
    "peaked": {"spread": 20.0},
    "no sink in some heads": {"sinks": Sinks("float32", absent=0.5)},
    "sinks far below the scores": {"sinks": Sinks("float32", offset=-200.0)},
    "sinks far above the scores": {"sinks": Sinks("float32", offset=200.0)},
    "sinks apart in memory": {"sinks": Sinks("float32", layout="sliced")},
    "one sink for all heads": {"sinks": Sinks("float32", layout="expanded")},
}


def dense(dtype="float32", **changes) -> Problem:
    shape = {"lead": (2,), "heads_q": 6, "heads_k": 2, "len_q": 70, "len_k": 51}
    rest = {"seed": 3, "dtype": dtype, "head_dim": 16, "head_dim_v": 24}
    return Problem(**{**shape, **rest, "sinks": Sinks("float32"), **changes})


def ragged(dtype="float32", **changes) -> Problem:
    lengths = ((31, 31), (1, 7), (0, 5), (64, 65), (17, 0), (100, 33))
    shape = {"heads_q": 6, "heads_k": 2, "head_dim": 16, "head_dim_v": 24, "lengths": lengths}
    return Problem(**{"seed": 5, "dtype": dtype, **shape, "sinks": Sinks("float32"), **changes})


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("option", OPTIONS)
def test_options(option, dtype):
    masked = Bias((6, 70, 51), dtype, masked=0.3, masked_rows=0.2)
    oracle.check(build(dense(dtype, **OPTIONS[option])))
    oracle.check(build(dense(dtype, key_lengths=((2,), "int64"), bias=masked, **OPTIONS[option])))
    oracle.check(build(ragged(dtype, **OPTIONS[option])))
    oracle.check(build(ragged(dtype, rest=(3, 4), bias=Bias((1,), dtype), **OPTIONS[option])))


@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes(dtype):
    for sinks in (Sinks("float32"), Sinks(dtype)):
        got = oracle.check(build(dense(dtype, sinks=sinks)))
        assert got["dsinks"].dtype == DTYPES[sinks.dtype] and got["dsinks"].shape == (6,)
        assert got["dsinks"].abs().min() > 0


@pytest.mark.parametrize("len_k", [0, 1, 63, 64, 65, 257])
def test_lengths(len_k):
    for len_q in (0, 1, 2, 63, 65, 300):
        shape = {"lead": (1,), "heads_q": 1, "heads_k": 1, "len_q": len_q, "len_k": len_k}
        for dtype in ("float32", "bfloat16"):
            oracle.check(build(dense(dtype, causal=True, **shape)))


@pytest.mark.parametrize("batch", [0, 1, 40])
def test_one_head_of_many_sequences(batch):
    """The gradient is a sum over all of the batch; of none it is 0."""
    shape = {"lead": (batch, 2), "heads_q": 1, "heads_k": 1, "len_q": 9, "len_k": 11}
    got = oracle.check(build(dense("float32", **shape)))
    assert got["dsinks"].ne(0).all() if batch else got["dsinks"].eq(0).all()


def test_a_sink_is_the_score_of_a_key_without_a_value():
    case = build(dense("float64"))
    case.k[..., 0, :] = 0  # a score of 0, to which the bias adds the sink
    case.v[..., 0, :] = 0
    bias = torch.zeros(6, 1, 51, dtype=torch.float64)
    bias[..., 0] = case.sinks[:, None]
    want = fm.flash_attention(case.q, case.k, case.v, bias=bias, return_lse=True)
    keys, values = case.k[..., 1:, :], case.v[..., 1:, :]
    got = fm.flash_attention(case.q, keys, values, sinks=case.sinks, return_lse=True)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("make", [dense, ragged])
@pytest.mark.parametrize("dtype", DTYPES)
def test_minus_infinity_is_no_sink(dtype, make):
    """To the last bit, in every result; and the sink has no gradient, whatever the loss is."""
    case = build(make(dtype, causal=True))
    case.sinks = torch.full_like(case.sinks, -math.inf)
    case.grad_out = case.grad_out.clone()
    case.grad_out[0, 0] = math.nan
    got = oracle.ours(case)
    assert got.pop("dsinks").eq(0).all()
    case.sinks = None
    want = oracle.ours(case)
    assert got.keys() == want.keys() and all(same_bits(got[x], want[x]) for x in want)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_that_see_nothing_but_the_sink(dtype):
    case = build(dense(dtype, causal=True, len_q=60, len_k=20))
    got = oracle.check(case)
    blind = slice(0, 40)
    assert got["out"][..., blind, :].eq(0).all() and got["dq"][..., blind, :].eq(0).all()
    assert got["lse"][..., blind].eq(case.sinks[:, None]).all()
    # d lse / d sink is 1 there, and d out / d sink is 0.
    case.grad_lse[..., 40:] = 0
    case.use_out, case.grad_out = False, torch.zeros_like(case.grad_out)
    want = case.grad_lse.double().sum((0, 2))
    torch.testing.assert_close(oracle.check(case)["dsinks"], want.float())


def test_tokens_of_no_sequence_have_no_sink():
    case = build(ragged("float32", rest=(3, 4)))
    got = oracle.check(case)
    assert got["out"][-3:].eq(0).all() and got["lse"][-3:].eq(-math.inf).all()
    case.grad_out[-3:] = math.nan
    case.grad_lse[-3:] = math.nan
    assert same_bits(oracle.ours(case)["dsinks"], got["dsinks"])


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("make", [dense, ragged])
@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_stays_in_its_head(dtype, make, value):
    clean, dirty = (build(make(dtype, causal=True)) for _ in range(2))
    dirty.sinks = clean.sinks.clone()
    dirty.sinks[4] = value  # of key head 1
    want, got = oracle.ours(clean), oracle.ours(dirty)
    nan = oracle.reference(dirty, contain=True)
    heads = -2 if make is ragged else -3
    for name, x in got.items():
        assert torch.equal(x.isnan(), nan[name].isnan()), name
        if name == "dsinks":
            hit, other = x[4:5], [(x[:4], want[name][:4]), (x[5:], want[name][5:])]
        else:
            axis = (heads + 1 if make is dense else -1) if name == "lse" else heads
            at = 1 if name in ("dk", "dv") else 4
            hit, whole = x.select(axis, at), range(x.shape[axis])
            other = [(x.select(axis, h), want[name].select(axis, h)) for h in whole if h != at]
        assert hit.isnan().any(), name
        assert all(same_bits(a, b) for a, b in other), name


@pytest.mark.parametrize("where", ["q", "k", "v", "grad_out", "grad_lse"])
def test_nan_elsewhere_reaches_the_gradient_of_its_heads_sink(where):
    clean, dirty = (build(dense("float32")) for _ in range(2))
    x = getattr(clean, where).clone()
    x[1, 1] = math.nan
    setattr(dirty, where, x)
    got, before = oracle.ours(dirty)["dsinks"], oracle.ours(clean)["dsinks"]
    hit = torch.zeros(6, dtype=torch.bool)
    hit[slice(3, 6) if where in ("k", "v") else 1] = True
    assert torch.equal(got.isnan(), hit) and same_bits(got[~hit], before[~hit])


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_same_bits_with_any_number_of_threads(dtype, threads):
    """Of one head that is cut into chunks, and of many sequences."""
    cut = {"lead": (1,), "heads_q": 2, "heads_k": 1, "len_q": 700, "len_k": 90}
    for case in (build(dense(dtype, **cut)), build(ragged(dtype, lengths=((31, 40), (99, 7)) * 5))):
        results = []
        for count in (1, 2, 3, 5):
            threads(count)
            results.append(oracle.ours(case))
        for other in results[1:]:
            assert all(same_bits(results[0][name], other[name]) for name in other)


@pytest.mark.parametrize("make", [dense, ragged])
def test_each_gradient_alone_is_the_same(make):
    case = build(make("float32", causal=True))
    want = oracle.ours(case)
    for needs in ("s", "q", "kv", ""):
        case.needs = needs
        got = oracle.ours(case)
        assert {name for name in got if name.startswith("d")} == {
            "dsinks" if x == "s" else f"d{x}" for x in needs
        }
        assert all(same_bits(got[name], want[name]) for name in got)


def test_explain_names_them():
    case = build(dense("bfloat16"))
    for backward in (False, True):
        text = fm.explain(case.q, case.k, case.v, sinks=case.sinks, backward=backward)
        assert "sinks in float32" in text
    with pytest.raises(RuntimeError, match=r"sinks has shape \(5,\), expected \(6,\)"):
        fm.explain(case.q, case.k, case.v, sinks=case.sinks[:5])
