"""The same bits in every run: the forward pass always, the backward pass when asked."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from helpers import DEVICE, OPTIONS, dense, integers, ragged, results

import flashmoe_science as fm
import oracle
from oracle import same_bits

RUNS = 5

# Many blocks add to the same dq, dk and dv, in whatever order they come.
CASES = {
    "long": lambda **kw: dense(1500, 1300, lead=(2,), hq=4, hk=1, **kw),
    "many heads": lambda **kw: dense(400, 700, lead=(3,), hq=16, hk=2, **kw),
    "small heads": lambda **kw: dense(700, 900, hq=8, hk=2, d=16, dv=24, **kw),
    "large heads": lambda **kw: dense(500, 600, d=256, dv=192, **kw),
    "odd heads": lambda **kw: dense(500, 600, d=20, dv=100, **kw),
    "few queries": lambda **kw: dense(4, 8000, hq=8, hk=2, d=128, **kw),
    "key lengths": lambda **kw: dense(500, 900, key_lengths=integers(123, 900), **kw),
    "ragged": lambda **kw: ragged(((500, 700), (3, 900), (0, 9), (257, 8), (64, 64)), hq=8, **kw),
}


def noise() -> None:
    """Other work on the device, so that blocks do not come in the same order by habit."""
    if DEVICE == "cuda":
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.randn(1 << 22, device=DEVICE).sort()


@pytest.mark.parametrize("option", ["plain", "causal", "wide window", "softcap", "all of them"])
@pytest.mark.parametrize("kind", CASES)
def test_gradients_when_asked(kind, option, dtype):
    case = CASES[kind](dtype=dtype, deterministic=True, options=OPTIONS[option])
    want = results(case)
    for _ in range(RUNS):
        noise()
        got = oracle.ours(case)
        for name in want:
            assert same_bits(got[name], want[name]), name


@pytest.mark.parametrize("kind", CASES)
def test_the_forward_pass_always(kind, dtype):
    case = replace(CASES[kind](dtype=dtype), deterministic=False, needs="")
    want = results(case)
    for _ in range(RUNS):
        noise()
        got = oracle.ours(case)
        assert same_bits(got["out"], want["out"]) and same_bits(got["lse"], want["lse"])


@pytest.mark.parametrize("kind", CASES)
def test_both_ways_to_sum_agree(kind, dtype):
    """Both are judged elsewhere; here is one that would show a block counted twice or left out."""
    case = CASES[kind](dtype=dtype, options={"causal": True})
    ordered, free = results(case), results(replace(case, deterministic=False))
    for name, a in ordered.items():
        if name == "lse":
            assert same_bits(a, free[name])
            continue
        size = a.float().abs().max()
        error = (a.float() - free[name].float()).abs().max()
        assert error <= 8 * torch.finfo(dtype).eps * size, name


def test_torch_can_ask_for_it(dtype):
    """deterministic=None follows torch.use_deterministic_algorithms."""
    case = CASES["long"](dtype=dtype, deterministic=True)
    want = results(case)
    torch.use_deterministic_algorithms(True)
    try:
        got = oracle.ours(replace(case, deterministic=None))
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(same_bits(got[name], want[name]) for name in want)


def test_the_batch_beside_a_sequence_changes_nothing(dtype):
    """Heads and sequences of one call do not see each other."""
    case = dense(200, 300, lead=(3,), dtype=dtype, options={"causal": True})
    want = results(case)
    other = {name: getattr(case, name).clone() for name in ("q", "k", "v", "grad_out")}
    for x in other.values():
        x[1] = torch.randn_like(x[1])
    got = results(replace(case, **other))
    for name in want:
        assert same_bits(got[name][::2], want[name][::2]), name
        assert not same_bits(got[name][1], want[name][1]), name


def test_explain_says_which(family):
    tensors = CASES["long"]().inputs().values()
    text = fm.explain(*tensors, backward=True, deterministic=True)
    assert "bitwise reproducible" in text and "not bitwise reproducible" not in text, text
