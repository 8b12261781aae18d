"""Random problems over everything the CUDA backend does, against the float64 oracle on the GPU.

    FLASHMOE_RANDOM_CASES=25000 pytest tests/gpu/test_random_problems.py     more than the default
    FLASHMOE_RANDOM_SEED=1234   pytest tests/gpu/test_random_problems.py     one again

A problem is its seed and its family; what fails is printed with both.
"""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch
from families import COMPLETE, DTYPES, FAMILIES
from helpers import DEVICE, explained, refused, results, unsteady

import oracle
from problems import Bias, Problem, Seeded, build, draw_bias_shape, draw_sinks

CASES = int(os.environ.get("FLASHMOE_RANDOM_CASES", 1500))  # of each family
CHUNK = 100  # cases in one test, so that progress is seen
ONE = os.environ.get("FLASHMOE_RANDOM_SEED")

LONG_NAMES = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}
COMMON_HEAD_DIMS = (8, 16, 24, 32, 40, 48, 56, 64, 64, 72, 80, 96, 104, 112, 128, 128)
EDGES = (15, 16, 17, 31, 32, 33, 47, 48, 49, 63, 64, 65, 95, 97, 127, 128, 129, 131, 191, 192, 193)
LATE_EDGES = (197, 211, 255, 256, 257, 263, 293, 300)
LONG = (319, 320, 321, 383, 384, 385, 499, 511, 512, 513, 640, 769, 1023, 1024, 1025, 1097)
# Twice over what the kernels read where it lies.
LAYOUTS = ("contiguous", "contiguous", "swapped", "swapped", "padded", "permuted", "sliced")
LAYOUTS += ("offset", "expanded")
# Twice over what comes in chunks of 16 bytes where its lengths allow. NaN lies around the rows of
# every one that can have it there.
BIAS_LAYOUTS = ("guarded", "guarded", "aligned", "aligned", "padded", "sliced", "offset")
BIAS_LAYOUTS += ("transposed", "permuted", "expanded", "hankel")


def draw_head_dim(pick: Seeded) -> int:
    kind = pick.integer(0, 9)
    if kind <= 5:
        return pick.choice(COMMON_HEAD_DIMS)
    if kind == 6:
        return 8 * pick.integer(17, 32)
    if kind == 7:
        return pick.integer(1, 40)
    return pick.integer(1, 256)


def draw_length(pick: Seeded, long: bool) -> int:
    kind = pick.integer(0, 19)
    if kind == 0:
        return 0
    if kind == 1:
        return 1
    if kind <= 6:
        return pick.integer(1, 40)
    if kind <= 13:
        return pick.choice(EDGES)
    if kind <= 16 or not long:
        return pick.choice(LATE_EDGES) if kind <= 17 else pick.integer(1, 300)
    return pick.choice(LONG)


def draw_dense(pick: Seeded) -> dict:
    long = pick.chance(0.1)
    n = draw_length(pick, long)
    m = n if pick.chance(0.3) else draw_length(pick, long)
    if pick.chance(0.06):  # few queries over many keys: split
        n, m = pick.integer(1, 17), pick.choice((700, 1024, 1025, 3001, 6000))
    few = n * m > 300**2
    lead = tuple(
        0 if pick.chance(0.01) else pick.integer(1, 1 if few else 3)
        for _ in range(pick.choice((1, 1, 1, 2, 3)))
    )
    problem = {"lead": lead, "len_q": n, "len_k": m}
    if pick.chance(0.25):
        kept = lead[pick.integer(0, len(lead)) :] if pick.chance(0.3) else lead
        shape = tuple(1 if pick.chance(0.2) else size for size in kept)
        problem["key_lengths"] = (shape, pick.choice(("int32", "int64")))
    return problem


def draw_ragged(pick: Seeded) -> dict:
    """Few sequences as a rule: the oracle takes one at a time."""
    lengths = []
    for _ in range(pick.choice((0, 1, 2, 2, 3, 3, 4, 4, 5, 9))):
        n = draw_length(pick, False)
        lengths.append((n, n if pick.chance(0.4) else draw_length(pick, False)))
    return {
        "lengths": tuple(lengths),
        "cu_dtype": pick.choice(("int32", "int64")),
        "slack": pick.choice((0, 0, 1, 100, 5000)),
        "rest": pick.choice(((0, 0), (0, 0), (0, 0), (3, 0), (1, 5), (70, 130))),
    }


def draw(seed: int, dtypes: tuple[str, ...]) -> Problem:
    pick = Seeded(seed)
    ragged = pick.chance(0.3)
    shape = draw_ragged(pick) if ragged else draw_dense(pick)
    longest = max([1, *(max(pair) for pair in shape.get("lengths", ()))])
    longest = max(longest, shape.get("len_q", 0), shape.get("len_k", 0))
    window = None
    if pick.chance(0.3):
        reach = pick.choice((3, 70, longest + 2))
        window = tuple(-1 if pick.chance(0.25) else pick.integer(0, reach) for _ in "lr")
    head_dim = draw_head_dim(pick)
    heads_k = pick.integer(1, 3)
    use_out = not pick.chance(0.06)
    problem = Problem(
        seed=seed,
        dtype=LONG_NAMES[pick.choice(dtypes)],
        heads_q=heads_k * pick.choice((1, 1, 2, 3, 4)),
        heads_k=heads_k,
        head_dim=head_dim,
        head_dim_v=draw_head_dim(pick) if pick.chance(0.3) else head_dim,
        causal=pick.chance(0.4),
        window=window,
        scale=pick.choice((None, None, None, None, 0.3, 1.0, -0.2, 0.0)),
        softcap=pick.choice((None, None, None, 1.0, 5.0, 30.0)),
        spread=pick.choice((1.0, 1.0, 1.0, 4.0)),
        layouts=tuple(pick.choice(LAYOUTS) for _ in range(4)),
        grad_lse=not use_out or pick.chance(0.5),
        use_out=use_out,
        deterministic=pick.choice((None, True, True, False)),
        needs="qkv" if not pick.chance(0.2) else pick.choice(("q", "k", "v", "qk", "kv", "")),
        **shape,
    )
    problem = with_bias(pick, problem) if pick.chance(0.45) else problem
    if sinks := draw_sinks(pick, problem.dtype):  # four in five want their gradient
        wanted = "s" if pick.chance(0.8) else ""
        problem = replace(problem, sinks=sinks, needs=problem.needs + wanted)
    return problem


def with_bias(pick: Seeded, problem: Problem) -> Problem:
    """Of any shape that the problem can have; three in four want its gradient."""
    if problem.lengths is not None:
        shape = (pick.choice((1, problem.heads_q)),)
    else:
        full = (*problem.lead, problem.heads_q, problem.len_q, problem.len_k)
        shape = full if pick.chance(0.3) else draw_bias_shape(pick, full)
    bias = Bias(
        shape=shape,
        dtype=pick.choice((problem.dtype, problem.dtype, "float32")),
        layout=pick.choice(BIAS_LAYOUTS),
        masked=pick.choice((0.0, 0.0, 0.0, 0.2, 0.9)),
        masked_rows=pick.choice((0.0, 0.0, 0.0, 0.3)),
        offset=pick.choice((0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 30.0, -500.0)),
    )
    wanted = "b" if pick.chance(0.75) else ""
    return replace(problem, bias=bias, needs=problem.needs + wanted)


def complaints_about(problem: Problem) -> list[str] | None:
    """None: the family does not take it."""
    case = build(problem, DEVICE)
    tensors, options = explained(case)
    if any(refused(*tensors, **options, backward=backward) for backward in (False, True)):
        return None
    got = results(case)
    found = [f"{name}: two runs give different bits" for name in unsteady(case, got)]
    return found + oracle.compare(case, got)


def alive() -> bool:
    """False after an error of the device's that every later call would meet too."""
    try:
        torch.zeros(1, device=DEVICE).item()
    except RuntimeError:
        return False
    return True


def failures_among(seeds, family: str, dtypes: tuple[str, ...]) -> list[str]:
    failures, taken = [], 0
    for seed in seeds:
        problem = draw(seed, dtypes)
        try:
            found = complaints_about(problem)
        except (RuntimeError, AssertionError) as error:
            found = [f"{type(error).__name__}: {error}"]
            # explain() does not know how the upstream gradient lies.
            if family not in COMPLETE and f"{family}: grad_out is broadcast" in found[0]:
                found = None
        taken += found is not None
        if found:
            failures.append("\n  ".join([f"{family}, seed {seed}: {problem}", *found]))
            if not alive():
                return [*failures, "the device is lost; no other case was run"]
    # The others refuse a bias, which one in two has, and expanded tensors, which one in three has.
    if taken < (len(seeds) if family in COMPLETE else len(seeds) // 5):
        failures.append(f"{family} takes only {taken} of {len(seeds)} problems")
    return failures


CHUNKS = [range(int(ONE), int(ONE) + 1)] if ONE else []
CHUNKS = CHUNKS or [range(i, min(i + CHUNK, CASES)) for i in range(0, CASES, CHUNK)]


@pytest.mark.parametrize("seeds", CHUNKS, ids=lambda seeds: f"from{seeds.start}")
def test_random_problems(seeds, family):
    failures = failures_among(seeds, family, FAMILIES[family])
    assert not failures, "\n".join([f"{len(failures)} of {len(seeds)} failed", *failures[:5]])


@pytest.mark.family(*COMPLETE)
@pytest.mark.parametrize(
    "seeds", CHUNKS[: max(1, len(CHUNKS) // 3)], ids=lambda x: f"from{x.start}"
)
def test_random_problems_in_fp32(seeds, family):
    failures = failures_among(seeds, family, ("fp32",))
    assert not failures, "\n".join([f"{len(failures)} of {len(seeds)} failed", *failures[:5]])


def test_the_draw_reaches_everything():
    """A generator that never drew an option would pass any test of it."""
    drawn = [draw(seed, FAMILIES[next(iter(FAMILIES))]) for seed in range(1500)]
    dense = [p for p in drawn if p.lengths is None]
    ragged = [p for p in drawn if p.lengths is not None]
    for kind in (dense, ragged):
        assert {p.dtype for p in kind} == {LONG_NAMES[name] for name in DTYPES}
        for name in ("causal", "deterministic", "grad_lse", "use_out", "softcap", "scale", "needs"):
            assert len({getattr(p, name) for p in kind}) > 1, name
        assert sum(p.window is not None for p in kind) > 50
        assert sum(p.heads_q > p.heads_k for p in kind) > 50
        assert sum(p.head_dim != p.head_dim_v for p in kind) > 50
        assert sum(p.head_dim % 8 > 0 for p in kind) > 50
        assert {len({p.layouts[i] for p in kind}) for i in range(4)} == {len(set(LAYOUTS))}
        with_sinks = [p for p in kind if p.sinks is not None]
        assert 0.2 * len(kind) < len(with_sinks) < 0.4 * len(kind)
        assert {p.sinks.dtype == "float32" for p in with_sinks} == {False, True}
        assert {p.sinks.offset for p in with_sinks} > {0.0, 500.0}
        assert {"s" in p.needs for p in with_sinks} == {False, True}
        assert sum(p.bias is not None for p in with_sinks) > 20
        biased = [p for p in kind if p.bias is not None]
        assert len(biased) < 0.6 * len(kind), "there are kernels without a bias too"
        assert {p.bias.layout for p in biased} == set(BIAS_LAYOUTS)
        for wide in (False, True):
            of_dtype = [p for p in biased if (p.bias.dtype == "float32") == wide]
            for wanted in (False, True):
                assert sum(("b" in p.needs) == wanted for p in of_dtype) > 20
            assert sum(p.bias.masked > 0 for p in of_dtype) > 20
            assert sum(p.bias.masked_rows > 0 for p in of_dtype) > 10
        assert sum(p.needs == "b" for p in biased) > 0
        assert sum(p.causal and p.softcap is not None for p in biased) > 20
        assert sum(p.heads_q > p.heads_k for p in biased) > 50
    assert sum(p.key_lengths is not None for p in dense) > 50
    assert sum(len(p.lead) > 1 for p in dense) > 50
    assert sum(p.len_k > 600 >= 20 * p.len_q for p in dense) > 10
    assert sum(0 in (p.len_q, p.len_k) for p in dense) > 10
    biased = [p for p in dense if p.bias is not None and 0 not in p.bias.shape]
    sizes = [(*p.lead, p.heads_q, p.len_q, p.len_k) for p in biased]
    assert sum(p.bias.shape == full for p, full in zip(biased, sizes, strict=True)) > 50
    for dim in (-4, -3, -2, -1):  # shared by batches, heads, queries, keys
        shared = [
            full[dim] > 1 and (*[1] * len(full), *p.bias.shape)[dim] == 1
            for p, full in zip(biased, sizes, strict=True)
        ]
        assert 50 < sum(shared) < len(shared) - 50, dim
    assert sum(p.len_k % 8 > 0 for p in biased) > 50 < sum(p.len_k % 8 == 0 for p in biased)
    assert sum(p.key_lengths is not None for p in biased) > 50
    assert sum(p.len_k > 600 >= 20 * p.len_q for p in biased) > 5
    packed = [p for p in ragged if p.bias is not None and p.heads_q > 1]
    assert sum(p.bias.shape == (1,) for p in packed) > 50
    assert sum(p.bias.shape != (1,) for p in packed) > 50
    assert sum(p.rest != (0, 0) for p in ragged) > 50
    assert (
        sum((0, 0) not in p.lengths and any(0 in pair for pair in p.lengths) for p in ragged) > 20
    )
