"""A NaN goes where it has to, and nowhere else: out, lse and every gradient."""

from __future__ import annotations

from dataclasses import replace
from math import inf, nan

import pytest
import torch
from families import RECOMPUTES, forced
from helpers import (
    DEVICE,
    attend,
    check_containment,
    dense,
    either_way,
    every_head_dim,
    every_mask,
    integers,
    put,
    qkv,
    ragged,
    results,
    unchanged,
)

from oracle import Case, same_bits


@every_head_dim
@every_mask
def test_nan_in_a_query_stays_in_its_row(causal, d, dtype):
    q, k, v = qkv(150, 200, d=d, dtype=dtype)
    want = attend(q, k, v, causal=causal)
    bad = q.clone()
    bad[1, 2, 77, 5] = nan
    hit = torch.zeros(q.shape[:-1], dtype=torch.bool, device=DEVICE)
    hit[1, 2, 77] = True
    for got, clean in zip(attend(bad, k, v, causal=causal), want, strict=True):
        assert got[hit].isnan().all()
        assert unchanged(got[~hit], clean[~hit])


@every_head_dim
@pytest.mark.parametrize("name", ["key", "value"])
@pytest.mark.parametrize("poison", [nan, inf], ids=str)
def test_nan_behind_the_mask_is_not_seen(poison, name, d, dtype):
    """Key 133 belongs to the rows from 83 on, of the two query heads that share it."""
    q, k, v = qkv(150, 200, d=d, dtype=dtype)
    out, lse = attend(q, k, v, causal=True)
    bad = (k if name == "key" else v).clone()
    bad[1, 1, 133, 7] = poison
    inputs = (q, bad, v) if name == "key" else (q, k, bad)
    got_out, got_lse = attend(*inputs, causal=True)
    sees = torch.zeros(out.shape[:-1], dtype=torch.bool, device=DEVICE)
    sees[1, 2:, 133 - 50 :] = True
    assert unchanged(got_out[~sees], out[~sees])
    assert unchanged(got_lse[~sees], lse[~sees])
    if name == "value":
        assert unchanged(got_lse, lse)
        assert not got_out[sees][:, 7].isfinite().any()
        assert unchanged(got_out[..., :7], out[..., :7])
        assert unchanged(got_out[..., 8:], out[..., 8:])
    elif poison != poison:
        assert got_out[sees].isnan().all() and got_lse[sees].isnan().all()


# Gradients too: 0 * NaN is NaN, so what is masked must not be multiplied by 0.

HIDING = {
    "nothing": {},
    "causal": {"options": {"causal": True}},
    "window": {"options": {"window": (5, 3)}},
    "key lengths": {"key_lengths": (31, 150)},
    "softcap": {"options": {"causal": True, "softcap": 5.0}},
    "all of them": {"key_lengths": (40, 163), "options": {"causal": True, "window": (70, -1)}},
}


def hidden(hiding: str, **shape):
    given = dict(HIDING[hiding])
    if "key_lengths" in given:
        given["key_lengths"] = integers(*given["key_lengths"])
    torch.manual_seed(0)
    return dense(150, 170, lead=(2,), hq=4, hk=2, **shape, **given)


@either_way
@pytest.mark.parametrize("where", ["q", "k", "v"])
@pytest.mark.parametrize("hiding", HIDING)
def test_nan_reaches_what_depends_on_it(hiding, where, deterministic, dtype):
    """Rows in the first and the last of a tile and beyond it, in several heads."""
    index = {"q": (1, 2), "k": (1, 1), "v": (0, 0)}
    reached = []
    for place in (0, 30, 63, 64, 127, 128, 149):
        clean, dirty = (
            hidden(hiding, d=32, dtype=dtype, deterministic=deterministic) for _ in range(2)
        )
        setattr(dirty, where, put(getattr(clean, where), (*index[where], place, 5), nan))
        reached.append(check_containment(clean, dirty))
    assert any(reached), "no place was seen by anything: the test says nothing"


@pytest.mark.parametrize("d, dv", [(8, 8), (48, 64), (128, 128), (20, 36), (256, 256)])
@pytest.mark.parametrize("where", ["q", "k", "v"])
def test_nan_in_other_head_dims(where, d, dv, dtype):
    """In the last column too: beside it lies what pads the dims of a tile."""
    clean, dirty = (hidden("causal", d=d, dv=dv, dtype=dtype) for _ in range(2))
    x = getattr(clean, where)
    setattr(dirty, where, put(x, (1, 1, 100, x.shape[-1] - 1), nan))
    assert check_containment(clean, dirty)


@either_way
@pytest.mark.parametrize("value", [inf, -inf], ids=str)
@pytest.mark.parametrize("hiding", HIDING)
def test_infinity_in_a_value_reaches_what_depends_on_it(hiding, value, deterministic, dtype):
    for place in (0, 63, 130):
        clean, dirty = (
            hidden(hiding, d=32, dtype=dtype, deterministic=deterministic) for _ in range(2)
        )
        dirty.v = put(clean.v, (1, 0, place, 7), value)
        check_containment(clean, dirty)


@either_way
@pytest.mark.parametrize("name, index", [("grad_out", (1, 3, 20, 4)), ("grad_lse", (1, 3, 20))])
@pytest.mark.parametrize("hiding", ["nothing", "causal", "window", "all of them"])
def test_nan_upstream_reaches_what_depends_on_it(hiding, name, index, deterministic, dtype):
    clean, dirty = (
        hidden(hiding, d=32, dtype=dtype, deterministic=deterministic) for _ in range(2)
    )
    setattr(dirty, name, put(getattr(clean, name), index, nan))
    assert check_containment(clean, dirty) or hiding == "all of them"


def check_never_looked_at(clean: Case, dirty: Case) -> None:
    """The bits too, but for a family that computes a tile with a NaN once more."""
    want, got = results(clean), results(dirty)
    if forced() in RECOMPUTES:
        assert check_containment(clean, dirty) == 0
    else:
        for name in want if clean.deterministic else ("out", "lse"):
            assert same_bits(want[name], got[name]), name
    assert all(got[name].isfinite().all() for name in ("out", "dq", "dk", "dv"))


@either_way
@pytest.mark.parametrize("n", [1, 17, 150])
def test_keys_behind_the_length_are_never_looked_at(n, deterministic, dtype):
    """The usual case: a padded batch whose padding was never written."""
    lengths = integers(0, 1, 63, 64, 65, 170)
    options = {"causal": True}
    clean = dense(
        n,
        170,
        lead=(6,),
        d=48,
        dtype=dtype,
        key_lengths=lengths,
        options=options,
        deterministic=deterministic,
    )
    padding = torch.arange(170, device=DEVICE)[:, None] >= lengths[:, None, None, None]
    k, v = clean.k.masked_fill(padding, nan), clean.v.masked_fill(padding, inf)
    check_never_looked_at(clean, replace(clean, k=k, v=v))


def test_few_queries_over_many_keys(dtype):
    """Where the keys are split between blocks: one NaN reaches every row that sees it."""
    case = dense(4, 5000, lead=(1,), hq=4, hk=2, d=64, dtype=dtype, options={"causal": True})
    want = results(case)
    case.v = put(case.v, (0, 1, 4998, 3), nan)  # seen by rows 2 and 3 of the last two heads
    got = results(case)
    hit = torch.zeros_like(want["out"], dtype=torch.bool)
    hit[0, 2:, 2:, 3] = True
    assert got["out"][hit].isnan().all() and unchanged(got["out"][~hit], want["out"][~hit])
    assert unchanged(got["lse"], want["lse"])
    rows = hit.any(-1)
    assert got["dq"][rows].isnan().all()
    assert unchanged(got["dq"][~rows], want["dq"][~rows], gradient=True)


# Ragged: the neighbours' tokens lie next door in memory, and in the same tile.

NEIGHBOURS = ((31, 31), (1, 7), (64, 65), (17, 0), (100, 33), (0, 4), (5, 5))


@pytest.mark.parametrize("length", [150, 3000], ids=["whole", "split"])
@pytest.mark.parametrize("poison", [nan, inf], ids=str)
def test_one_query_does_not_see_past_its_window(poison, length, dtype):
    """The window begins within a tile, and what lies before it shares that tile."""
    q, k, v = qkv(1, length, hq=8, hk=2, d=64, dtype=dtype)
    want = attend(q, k, v, window=(40, -1))
    for name in ("key", "value"):
        bad = (k if name == "key" else v).clone()
        bad[1, 1, length - 42, 7] = poison  # one before the first key that is seen
        inputs = (q, bad, v) if name == "key" else (q, k, bad)
        for got, clean in zip(attend(*inputs, window=(40, -1)), want, strict=True):
            assert unchanged(got, clean)


@either_way
@every_mask
@pytest.mark.parametrize("where", ["q", "k", "v"])
def test_nan_stays_in_its_sequence(where, causal, deterministic, dtype):
    def case():
        torch.manual_seed(0)
        shape = {"d": 32, "dtype": dtype, "deterministic": deterministic}
        return ragged(NEIGHBOURS, options={"causal": causal}, **shape)

    for token in (0, 30, 31, 32, 38, 90, 103):
        clean, dirty = case(), case()
        setattr(dirty, where, put(getattr(clean, where), (token, 1, 2), nan))
        alone = where == "q" and 96 <= token < 113  # in the sequence without keys
        assert bool(check_containment(clean, dirty)) != alone


@either_way
def test_tokens_of_no_sequence_are_never_looked_at(deterministic, dtype):
    case = ragged(NEIGHBOURS, rest=(70, 90), d=32, dtype=dtype, deterministic=deterministic)
    names = ("q", "grad_out", "grad_lse")
    bad = {name: put(getattr(case, name), (slice(-70, None),), nan) for name in names}
    bad["k"] = put(case.k, (slice(-90, None),), nan)
    bad["v"] = put(case.v, (slice(-90, None),), inf)
    check_never_looked_at(case, replace(case, **bad))
