"""Thousands of sequences of a few dozen tokens: what their tests share.

Such calls have tiles of 32 x 32. Every case asks explain() whether it has them: another choice of
the planner must not leave them untested.
"""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest
import torch
from helpers import DEVICE, check_case, dense, explained, ragged, results, tile, unsteady

import flashmoe_science as fm
import oracle
from oracle import Case, same_bits

MANY = 640  # (sequence, key head): 4 for each SM of a chip that has up to 160
CHIP = None if DEVICE == "cuda" else "sm_90"  # for which a rehearsal plans


def planned(case: Case) -> tuple[str, str]:
    """What explain() says of the two passes, after a look at their tiles."""
    tensors, options = explained(case)
    forward, backward = (
        fm.explain(*tensors, **options, backward=it, device=CHIP) for it in (False, True)
    )
    for text in (forward, backward):
        assert tile(text) == (32, 32), text
    return forward, backward


def check_short(case: Case) -> dict[str, torch.Tensor]:
    """Forward and backward: tiles, numbers, bits of a second run, inputs untouched."""
    planned(case)
    return check_case(case) if case.cu_q is None else check_ragged(case)


def short(n, m=None, *, hq=2, hk=2, **shape) -> Case:
    """A dense case of enough sequences; `shape` as for dense()."""
    return dense(n, m, lead=(-(-MANY // hk),), hq=hq, hk=hk, **shape)


def batch_of(case: Case) -> torch.Tensor:
    return torch.arange(case.q.shape[0], device=DEVICE)


def every_length(case: Case, dtype=torch.int32) -> Case:
    """Key lengths from none to all."""
    return replace(case, key_lengths=(batch_of(case) % (case.k.shape[-2] + 1)).to(dtype))


# Ragged batches. Some sequences have several blocks, some nothing on one side or both; there are
# enough of them that are shorter for 48 tokens or less on average.

MIXED = ((31, 31), (1, 7), (0, 5), (33, 34), (17, 0), (150, 97), (1, 1), (0, 0), (40, 100), (5, 33))
MIXED += ((32, 32), (64, 64), (2, 3))
FEW = ((31, 31), (70, 40), (0, 3), (9, 65))


def short_ragged(lengths=MIXED, *, hq=2, hk=2, last=(), **shape) -> Case:
    """The lengths in turn, as often as it takes, and then the last; `shape` as for ragged()."""
    many = [lengths[i % len(lengths)] for i in range(-(-MANY // hk))]
    return ragged((*many, *last), hq=hq, hk=hk, **shape)


Span = tuple[int, int]


def spans(case: Case) -> list[tuple[Span, Span, Span]]:
    """Of each sequence: its queries, keys and pairs."""
    found, pair = [], 0
    for (q0, q1), (k0, k1) in zip(oracle.spans(case.cu_q), oracle.spans(case.cu_k), strict=True):
        end = pair + (q1 - q0) * (k1 - k0)
        found.append(((q0, q1), (k0, k1), (pair, end)))
        pair = end
    return found


def dense_part(case: Case, got, n, m, starts) -> tuple[Case, dict[str, torch.Tensor]]:
    """Sequences of n queries and m keys as a dense case, and their results as its results."""
    firsts = torch.tensor(starts, device=DEVICE).T[..., None]
    rows, keys, pairs = (
        first + torch.arange(size, device=DEVICE)
        for first, size in zip(firsts, (n, m, n * m), strict=True)
    )

    def batched(x, at):
        return None if x is None else x[at].transpose(1, 2)

    def matrices(x):
        if x is None:
            return None
        return x[pairs].reshape(len(starts), n, m, x.shape[1]).permute(0, 3, 1, 2)

    tensors = {name: batched(getattr(case, name), rows) for name in ("q", "grad_out", "grad_lse")}
    tensors |= {name: batched(getattr(case, name), keys) for name in ("k", "v")}
    part = replace(case, cu_q=None, cu_k=None, bias=matrices(case.bias), **tensors)
    at = {"dk": keys, "dv": keys}
    found = {name: batched(x, at.get(name, rows)) for name, x in got.items() if name != "dbias"}
    return part, found | ({"dbias": matrices(got["dbias"])} if "dbias" in got else {})


def check_ragged(case: Case) -> dict[str, torch.Tensor]:
    """As check_case(). The oracle takes one sequence at a time, so it is given those of the same
    lengths as a dense batch."""
    inputs = {**case.inputs(), "grad_out": case.grad_out}
    before = {name: x.clone() for name, x in inputs.items()}
    got = results(case)
    assert not unsteady(case, got), "two runs differ"
    for name, x in inputs.items():
        assert same_bits(x, before[name]), f"{name} was changed"
    groups: dict[Span, list] = {}
    for (q0, q1), (k0, k1), (pair, _) in spans(case):
        groups.setdefault((q1 - q0, k1 - k0), []).append((q0, k0, pair))
    for (n, m), starts in groups.items():
        part, found = dense_part(case, got, n, m, starts)
        complaints = oracle.compare(part, found)
        assert not complaints, "\n  ".join([f"sequences of {n} x {m}:", *complaints])
    # Tokens of no sequence.
    (_, q_end), (_, k_end), _ = spans(case)[-1]
    assert got["out"][q_end:].eq(0).all() and got["lse"][q_end:].eq(-inf).all()
    for name, end in (("dq", q_end), ("dk", k_end), ("dv", k_end)):
        assert name not in got or got[name][end:].eq(0).all(), name
    return got


HEAD_DIMS = [(8, 8), (16, 16), (20, 20), (32, 32), (33, 33), (48, 48), (64, 64)]
HEAD_DIMS += [(8, 64), (64, 8), (16, 48), (48, 33), (20, 64), (1, 3)]
every_dim = pytest.mark.parametrize("d, dv", HEAD_DIMS)
either_width = pytest.mark.parametrize("wide", [None, torch.float32], ids=["narrow", "fp32"])

# Masks and other options.
OPTIONS = {
    "causal": {"causal": True},
    "window": {"window": (5, 3)},
    "left only": {"window": (9, -1)},
    "right only": {"window": (-1, 0)},
    "one key": {"window": (0, 0)},
    "causal window": {"window": (12, 4), "causal": True},
    "softcap": {"softcap": 2.0},
    "softcap causal": {"softcap": 20.0, "causal": True},
    "softcap far past saturation": {"softcap": 0.5, "scale": 50.0},
    "negative scale": {"scale": -0.3},
    "negative scale causal": {"scale": -0.3, "causal": True},
    "tiny scale": {"scale": 1e-7},
    "zero scale": {"scale": 0.0},
    "zero scale softcap": {"scale": 0.0, "softcap": 3.0, "causal": True},
    "all of them": {"causal": True, "window": (20, 7), "softcap": 7.0, "scale": -0.4},
}
every_option = pytest.mark.parametrize("option", OPTIONS)

NEEDS = ("b", "q", "k", "v", "kv", "qb", "kb", "qkv")


def check_only(case: Case, needs: str) -> None:
    """What is not wanted changes nothing of what is."""
    want, got = results(case), check_short(replace(case, needs=needs))
    names = {"b": "dbias", **{name: f"d{name}" for name in "qkv"}}
    assert set(got) == {"out", "lse", *(names[name] for name in needs)}
    assert all(same_bits(got[name], want[name]) for name in got)
