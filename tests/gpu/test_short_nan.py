"""NaN and infinity in thousands of short sequences.

What is hidden is not there, whatever it holds; what is not reaches what the oracle says.
"""

from __future__ import annotations

from dataclasses import replace
from math import inf, nan

import pytest
import torch
from helpers import DEVICE, check_containment, needs_short_tiles, put, results, with_packed_bias
from short import batch_of, either_width, every_length, planned, short, short_ragged, spans
from test_bias import broadcast, full, with_bias

import oracle
from oracle import Case, same_bits

pytestmark = needs_short_tiles

HIDING = {
    "nothing": {},
    "causal": {"causal": True},
    "window": {"window": (5, 3)},
    "softcap": {"causal": True, "softcap": 5.0},
    "key lengths": {},
    "all of them": {"causal": True, "window": (20, -1)},
}
every_hiding = pytest.mark.parametrize("hiding", HIDING)
every_poison = pytest.mark.parametrize("poison", [nan, inf, -inf], ids=str)


def behind(hiding: str, n, m, **shape) -> Case:
    case = short(n, m, options=HIDING[hiding], **shape)
    return every_length(case) if hiding in ("key lengths", "all of them") else case


def poisoned_places(case: Case, names, value: float) -> Case:
    """Some places of each tensor, all in different sequences: none hides what another does."""
    sequence, changed = 0, {}
    for name in names:
        x = getattr(case, name).clone()
        for place in (0, 15, 16, x.shape[2] - 1):
            sequence += 5
            at = (sequence, sequence % x.shape[1], place)
            x[at if x.dim() == 3 else (*at, -1 - sequence % 3)] = value
        changed[name] = x
    return replace(case, **changed)


@every_hiding
@pytest.mark.parametrize("m", [32, 29])
def test_nan_reaches_what_depends_on_it(m, hiding, dtype):
    names = ("q", "k", "v", "grad_out", "grad_lse")
    clean = behind(hiding, 29, m, d=16, dtype=dtype)
    planned(clean)
    assert check_containment(clean, poisoned_places(clean, names, nan))
    for wide in (None, torch.float32):
        own = with_bias(clean, full(clean), wide)
        mask = torch.rand(own.bias.shape, device=DEVICE) < 0.3
        own = replace(own, bias=own.bias.masked_fill(mask, -inf))
        planned(own)
        assert check_containment(own, poisoned_places(own, (*names, "bias"), nan))


@pytest.mark.parametrize("d, dv, hq", [(8, 8, 4), (20, 36, 2), (48, 64, 2), (64, 33, 2)])
def test_nan_in_other_head_dims(d, dv, hq, dtype):
    """In the last columns too: beside them lies what pads the dims of a tile."""
    names = ("q", "k", "v", "grad_out")
    clean = short(20, 31, hq=hq, hk=2, d=d, dv=dv, dtype=dtype, options={"causal": True})
    for case in (clean, with_bias(clean, full(clean))):
        planned(case)
        assert check_containment(case, poisoned_places(case, names, nan))


@every_hiding
def test_infinity_reaches_what_depends_on_it(hiding, dtype):
    """In q and k it would make scores of either infinity; these two are linear in it."""
    clean = behind(hiding, 29, 31, d=16, dtype=dtype)
    own = with_bias(clean, full(clean))
    own = replace(own, bias=put(own.bias, (..., slice(4, 12), slice(10, None)), -inf))
    for case in (clean, own):
        planned(case)
        for value in (inf, -inf):
            assert check_containment(case, poisoned_places(case, ("v", "grad_out"), value))


def test_nan_with_a_shared_bias(dtype):
    """Reaches its row of the gradient, which all sequences share, and nothing of the others."""
    clean = short(29, 31, d=16, dtype=dtype, options={"causal": True})
    clean = with_bias(clean, broadcast(clean, (0, 1, 1, 1)))
    planned(clean)
    for name in ("q", "grad_out", "grad_lse"):
        bad = getattr(clean, name)
        at = (9, 1, 17) if bad.dim() == 3 else (9, 1, 17, 2)
        assert check_containment(clean, replace(clean, **{name: put(bad, at, nan)}))


@every_poison
def test_keys_that_nobody_sees_may_hold_anything(poison, dtype):
    """Because of their length, of a window, and of a bias."""
    key = torch.arange(31, device=DEVICE)[:, None]
    by_length = every_length(short(20, 31, d=16, dtype=dtype, options={"causal": True}))
    past = key >= by_length.key_lengths[:, None, None, None]
    own = with_bias(by_length, full(by_length))
    by_window = short(9, 31, d=16, dtype=dtype, options={"window": (4, 0)})
    before = key < 31 - 9 - 4
    by_bias = with_bias(c := short(20, 31, d=16, dtype=dtype), full(c))
    by_bias = replace(by_bias, bias=put(by_bias.bias, (..., slice(12, 15)), -inf))
    some = (key >= 12) & (key < 15)
    for case, unseen in ((by_length, past), (own, past), (by_window, before), (by_bias, some)):
        planned(case)
        bad = {name: getattr(case, name).masked_fill(unseen, poison) for name in "kv"}
        assert check_containment(case, replace(case, **bad)) == 0


@every_poison
def test_rows_that_see_nothing_may_hold_anything(poison, dtype):
    """Before the first key of a causal call, and where a bias hides them all."""
    causal = short(31, 20, d=16, dtype=dtype, options={"causal": True})
    row = torch.arange(31, device=DEVICE)[:, None]
    by_bias = with_bias(c := short(31, 20, d=16, dtype=dtype), full(c))
    by_bias = replace(by_bias, bias=put(by_bias.bias, (..., slice(15, 18), slice(None)), -inf))
    some = (row >= 15) & (row < 18)
    own = with_bias(causal, full(causal))
    for case, blind in ((causal, row < 11), (own, row < 11), (by_bias, some)):
        planned(case)
        bad = {name: getattr(case, name).masked_fill(blind, poison) for name in ("q", "grad_out")}
        bad["grad_lse"] = case.grad_lse.masked_fill(blind[:, 0], poison)
        dirty = replace(case, **bad)
        assert check_containment(case, dirty) == 0
        got = results(dirty)
        for name in ("out", "dq", "dbias") if case.bias is not None else ("out", "dq"):
            assert got[name].masked_fill(~blind, 0).eq(0).all(), name


@either_width
@pytest.mark.parametrize("poison", [nan, inf], ids=str)
@pytest.mark.parametrize("hiding", ["causal", "window", "key lengths", "all of them"])
def test_a_bias_behind_another_mask_may_hold_anything(hiding, poison, wide, dtype):
    """And its gradient is 0, not only small."""
    for n, m in ((32, 32), (29, 19), (9, 31)):
        case = with_bias(c := behind(hiding, n, m, d=16, dtype=dtype), full(c), wide)
        planned(case)
        lengths = torch.tensor(m, device=DEVICE) if case.key_lengths is None else case.key_lengths
        lengths = lengths.expand(len(case.q))[:, None, None, None]
        mask = {"causal": False, "window": None} | case.options
        seen = oracle.allowed_keys(n, m, lengths, mask["causal"], mask["window"])
        assert not seen.all()
        dirty = replace(case, bias=case.bias.where(seen, poison))
        assert check_containment(case, dirty) == 0
        assert results(dirty)["dbias"].masked_fill(seen, 0).eq(0).all()


# The same of ragged batches, of few sequences with many heads: the oracle takes one at a time.


def seen_pairs(case: Case) -> torch.Tensor:
    """(pairs, 1) truth."""
    mask = {"causal": False, "window": None} | case.options
    seen = [
        oracle.allowed_keys(
            q1 - q0, k1 - k0, torch.tensor(k1 - k0), mask["causal"], mask["window"]
        ).flatten()
        for (q0, q1), (k0, k1), _ in spans(case)
    ]
    return torch.cat(seen).to(DEVICE)[:, None]


def poisoned_tokens(case: Case, names, value: float) -> Case:
    """A token or pair in the middle of one sequence and the last of another, for each tensor."""
    places = iter([one for one in spans(case) if one[2][1] > one[2][0]])
    side = {"k": 1, "v": 1, "bias": 2}
    changed = {}
    for name in names:
        x = getattr(case, name).clone()
        for part in (0.6, 1):
            start, end = next(places)[side.get(name, 0)]
            token = start + int(part * (end - start - 1))
            x[token, token % x.shape[1]] = value
        changed[name] = x
    return replace(case, **changed)


RAGGED_HIDING = {
    "nothing": {},
    "causal": {"causal": True},
    "window": {"window": (40, 3)},
    "softcap": {"causal": True, "softcap": 5.0},
}


@pytest.mark.parametrize("heads", [0, 32, 1], ids=["no bias", "each head", "all heads"])
@pytest.mark.parametrize("hiding", RAGGED_HIDING)
def test_nan_stays_in_its_sequence(hiding, heads, dtype):
    names = ("q", "k", "v", "grad_out", "grad_lse")
    clean = short_ragged(hq=32, hk=32, d=16, dtype=dtype, options=RAGGED_HIDING[hiding])
    if heads:
        clean = with_packed_bias(clean, heads)
        mask = torch.rand(clean.bias.shape, device=DEVICE) < 0.3
        clean = replace(clean, bias=clean.bias.masked_fill(mask, -inf))
        names += ("bias",)
    planned(clean)
    assert check_containment(clean, poisoned_tokens(clean, names, nan))


@pytest.mark.parametrize("heads", [0, 32], ids=["no bias", "each head"])
def test_infinity_stays_in_its_sequence(heads, dtype):
    clean = short_ragged(hq=32, hk=32, d=16, dtype=dtype, options={"causal": True})
    clean = with_packed_bias(clean, heads) if heads else clean
    planned(clean)
    assert check_containment(clean, poisoned_tokens(clean, ("v", "grad_out"), inf))


@pytest.mark.parametrize("poison", [nan, inf], ids=str)
@pytest.mark.parametrize("options", [{"causal": True}, {"window": (7, 3)}], ids=str)
def test_a_packed_bias_behind_another_mask_may_hold_anything(options, poison, dtype):
    """Also in blocks of keys that a block of queries does not go through."""
    for wide in (None, torch.float32):
        case = short_ragged(hq=32, hk=32, d=16, dtype=dtype, options=options)
        case = with_packed_bias(case, 32, wide)
        seen = seen_pairs(case)
        assert not seen.all()
        dirty = replace(case, bias=case.bias.where(seen, poison))
        planned(dirty)
        assert check_containment(case, dirty) == 0
        assert results(dirty)["dbias"].masked_fill(seen, 0).eq(0).all()


@every_poison
def test_what_a_packed_bias_hides_may_hold_anything(poison, dtype):
    """Keys that no row sees, and rows that see no key."""
    case = with_packed_bias(short_ragged(hq=32, hk=32, d=16, dtype=dtype), 32)
    bias, rows, keys = case.bias.clone(), [], []
    for (q0, q1), (k0, k1), (start, end) in spans(case):
        n, m = q1 - q0, k1 - k0
        matrix = bias[start:end].view(n, m, 32)
        if n > 33:  # in several blocks
            rows += [q0, q0 + 33]
            matrix[[0, 33]] = -inf
        if m > 33:
            keys += [k0 + 31, k1 - 1]
            matrix[:, [31, m - 1]] = -inf
    assert rows and keys
    clean = replace(case, bias=bias)
    planned(clean)
    bad = {name: put(getattr(case, name), (keys,), poison) for name in "kv"}
    names = ("q", "grad_out", "grad_lse")
    bad |= {name: put(getattr(case, name), (rows,), poison) for name in names}
    assert check_containment(clean, replace(clean, **bad)) == 0


def test_neighbours_full_of_nan(dtype):
    """The bits of a sequence do not change with those beside it, in memory or in time."""
    case = with_bias(c := short(17, 31, d=32, dtype=dtype, options={"causal": True}), full(c))
    planned(case)
    odd = (batch_of(case) % 2 == 1)[:, None, None]
    names = ("q", "k", "v", "grad_out", "grad_lse", "bias")
    dirty = {}
    for name in names:
        x = getattr(case, name)
        dirty[name] = x.masked_fill(odd if x.dim() == 3 else odd[..., None], nan)
    want, got = results(case), results(replace(case, **dirty))
    assert all(same_bits(got[name][::2], want[name][::2]) for name in want)
    assert all(got[name][1::2].isnan().any() for name in want)


@pytest.mark.parametrize("heads", [16, 6])
def test_ragged_neighbours_full_of_nan(heads, dtype):
    shape = {"hq": heads, "hk": heads, "d": 32, "dtype": dtype, "rest": (40, 50)}
    case = with_packed_bias(short_ragged(options={"causal": True}, **shape), heads)
    planned(case)
    sides = {"q": 0, "dq": 0, "out": 0, "lse": 0, "grad_out": 0, "grad_lse": 0}
    sides |= {"k": 1, "v": 1, "dk": 1, "dv": 1, "bias": 2, "dbias": 2}
    names = ("q", "k", "v", "grad_out", "grad_lse", "bias")
    sizes = (len(case.q), len(case.k), len(case.bias))
    clean = [torch.zeros(size, dtype=torch.bool, device=DEVICE) for size in sizes]
    for one in spans(case)[::2]:
        for side, (start, end) in zip(clean, one, strict=True):
            side[start:end] = True
    dirty = {name: put(getattr(case, name), (~clean[sides[name]],), nan) for name in names}
    want, got = results(case), results(replace(case, **dirty))
    for name in want:
        mine = clean[sides[name]]
        assert same_bits(got[name][mine], want[name][mine]), name
        assert got[name][~mine].isnan().any(), name
    # Nobody looks at the tokens after the last sequence.
    assert got["out"][-40:].eq(0).all() and got["lse"][-40:].eq(-inf).all()
    assert got["dq"][-40:].eq(0).all() and got["dk"][-50:].eq(0).all()
