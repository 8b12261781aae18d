"""A mixture of experts and its router on the GPU, against the float64 oracle.

FLASHMOE_RANDOM_CASES=2000 pytest tests/gpu/test_experts.py     more random problems
FLASHMOE_RANDOM_SEED=1234  pytest tests/gpu/test_experts.py     one again
"""

from __future__ import annotations

import os
import random
import re
from dataclasses import replace

import pytest
import torch
from families import COMPLETE, DTYPES, FAMILIES, forced
from helpers import DEVICE, on_a_gpu, poisoned, tiles_there_are

import flashmoe_science as fm
import moe_oracle as oracle
from moe_oracle import ACTIVATIONS, DIFFERENTIABLE, Case, make
from oracle import same_bits, tolerance
from test_moe import LAYOUTS, laid_out, some_ids
from test_route import weights_of

pytestmark = pytest.mark.kernels(role="moe_up")

CASES = int(os.environ.get("FLASHMOE_RANDOM_CASES", 300))  # of each family
CHUNK = 50  # cases in one test, so that progress is seen
ONE = os.environ.get("FLASHMOE_RANDOM_SEED")
BOTH = (True, True)


def on_device(case: Case) -> Case:
    return case.to(DEVICE)


def results(case: Case) -> dict[str, torch.Tensor]:
    """Everything the case asks for, made in poisoned memory."""
    T, k = case.ids.shape
    pre = (T * k, case.gate_up.shape[1])
    shapes = [(x.shape, x.dtype) for x in (case.x, *case.inputs().values())]
    with poisoned(*shapes, (pre, case.x.dtype), ((T * k, case.x.shape[1]), case.x.dtype)):
        return oracle.ours(case)


def complaints_about(case: Case) -> list[str]:
    """Against the oracle; the bits of a second run; inputs untouched."""
    tensors = {**case.inputs(), "grad_out": case.grad_out, "ids": case.ids}
    before = {name: x.clone() for name, x in tensors.items()}
    got, again = results(case), oracle.ours(case)
    found = [f"{n}: two runs give different bits" for n in got if not same_bits(got[n], again[n])]
    found += [f"{n} was changed" for n, x in tensors.items() if not torch.equal(x, before[n])]
    return found + oracle.compare(case, got)


def refusal(case: Case) -> str:
    """Why the family that is forced cannot run the case; "" where it can. Some families take every
    case: what one of these refuses is an error."""
    if DEVICE != "cuda" or forced() in (None, *COMPLETE):
        return ""
    try:
        for backward in (False, True):
            fm.explain_moe(
                **case.inputs(), ids=case.ids, activation=case.activation, backward=backward
            )
    except RuntimeError as error:
        return str(error)
    return ""


def check(case: Case) -> dict[str, torch.Tensor]:
    case = on_device(case)
    if why := refusal(case):
        pytest.skip(why)
    found = complaints_about(case)
    assert not found, "\n  ".join(["", *found])
    return oracle.ours(case)


# Random problems.


def draw(seed: int, dtype: torch.dtype, family: str) -> Case:
    pick, generator = random.Random(seed), torch.Generator().manual_seed(seed)

    def width() -> int:
        kind = pick.randrange(5) if family in COMPLETE else 5  # Hopper: whole chunks
        if kind == 0:
            return pick.randint(1, 40)
        if kind == 1:
            return pick.randint(1, 300)
        return pick.choice((8, 16, 24, 32, 48, 64, 72, 96, 120, 128, 136, 192, 256, 264, 384))

    T = pick.choice((0, 1, 2, 3, 15, 16, 17, 31, 40, 63, 64, 65, 100, 127, 128, 129, 200, 333, 700))
    E = pick.choice((1, 2, 3, 5, 8, 8, 16, 33, 64, 200))
    k = pick.choice((0, 1, 1, 1, 2, 2, 3, 4, 5, 8, 11, 16))
    d, n = width(), width()
    if T * k > 2000:
        d, n = min(d, 136), min(n, 136)
    if E == 200:
        d, n = min(d, 72), min(n, 72)
    case = make(
        *(T, d, n, E, k),
        dtype=dtype,
        activation=pick.choice(ACTIVATIONS),
        weighted=pick.random() < 0.8,
        biases=(pick.random() < 0.4, pick.random() < 0.4),
        ids=some_ids(pick, generator, T, k, E),
        needs=tuple(name for name in DIFFERENTIABLE if pick.random() < 0.8),
        generator=generator,
    )
    if case.weights is not None and pick.random() < 0.3:
        case.weights -= 0.75  # of either sign
    case = on_device(case)
    for name in ("x", "gate_up", "down", "grad_out"):
        setattr(case, name, laid_out(getattr(case, name), pick.choice(("plain", *LAYOUTS))))
    for name in ("ids", "weights", "up_bias", "down_bias"):
        if getattr(case, name) is not None and pick.random() < 0.3:
            setattr(case, name, laid_out(getattr(case, name), "transposed"))
    return case


def alive() -> bool:
    """False after an error of the device's that every later call would meet too."""
    try:
        torch.zeros(1, device=DEVICE).item()
    except RuntimeError:
        return False
    return True


CHUNKS = [range(int(ONE), int(ONE) + 1)] if ONE else []
CHUNKS = CHUNKS or [range(i, min(i + CHUNK, CASES)) for i in range(0, CASES, CHUNK)]


@pytest.mark.parametrize("seeds", CHUNKS, ids=lambda seeds: f"from{seeds.start}")
def test_random_problems(seeds, family):
    failures = []
    for seed in seeds:
        names = FAMILIES[family]
        case = draw(seed, DTYPES[names[seed % len(names)]], family)
        if refusal(case):
            continue
        try:
            found = complaints_about(case)
        except (RuntimeError, AssertionError) as error:
            found = [f"{type(error).__name__}: {error}"]
        if found:
            (T, d), (E, _, n), k = case.x.shape, case.down.shape, case.ids.shape[1]
            what = f"{case.x.dtype} T={T} {d=} {n=} {E=} {k=} {case.activation} {case.needs}"
            failures.append("\n  ".join([f"{family}, seed {seed}: {what}", *found]))
            if not alive():
                failures.append("the device is lost; no other case was run")
                break
    assert not failures, "\n".join([f"{len(failures)} of {len(seeds)} failed", *failures[:5]])


# Every tile, every activation, every order of weights.


def forced_tiles(case: Case, monkeypatch) -> list[str]:
    monkeypatch.setenv("FLASHMOE_TILE", "1x1")
    return tiles_there_are(lambda: oracle.ours(case))


@on_a_gpu
@pytest.mark.parametrize("transposed", [False, True], ids=["rows", "columns"])
def test_every_tile(dtype, transposed, monkeypatch):
    """Remainders of rows, columns and depth, of experts with none, few and many rows."""
    ids = torch.randint(-1, 6, (300, 3)).where(torch.rand(300, 3) < 0.5, 2)
    case = on_device(make(300, 208, 176, 7, 3, dtype=dtype, ids=ids, biases=BOTH))
    if transposed:
        case.gate_up, case.down = (laid_out(w, "transposed") for w in (case.gate_up, case.down))
    for tile in forced_tiles(case, monkeypatch):
        monkeypatch.setenv("FLASHMOE_TILE", tile)
        assert f"_{tile}" in fm.explain_moe(**case.inputs(), ids=case.ids)
        assert not complaints_about(case), tile


@pytest.mark.parametrize("biases", [(False, False), BOTH], ids=["plain", "biases"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations(dtype, activation, biases):
    check(make(203, 72, 136, 3, 2, dtype=dtype, activation=activation, biases=biases))


@pytest.mark.parametrize("k", [1, 2, 3, 4, 5, 8, 13, 16])
def test_experts_of_a_token(dtype, k):
    check(make(65, 40, 24, 20, k, dtype=dtype))


@pytest.mark.parametrize("d, n", [(1, 1), (3, 5), (13, 31), (67, 133), (129, 7), (257, 63)])
@pytest.mark.parametrize("k", [1, 2])
def test_odd_widths(dtype, d, n, k):
    check(make(150, d, n, 4, k, dtype=dtype, biases=BOTH))


@pytest.mark.parametrize(
    "shape",
    [
        {"T": 0},
        {"k": 0},
        {"T": 0, "k": 0},
        {"E": 1, "k": 1},
        {"E": 1, "k": 3, "ids": torch.zeros(24, 3, dtype=torch.int64)},
        {"E": 4096, "k": 8, "T": 300, "d": 24, "n": 16},
        {"E": 4096, "k": 1, "T": 5000, "d": 8, "n": 8},
        {"T": 1, "d": 1, "n": 1, "E": 1, "k": 1},
        {"T": 1, "E": 128, "k": 8, "d": 256, "n": 192},
        {"T": 31, "E": 128, "k": 8, "d": 264, "n": 200},
        {"T": 127, "E": 128, "k": 8, "d": 72, "n": 40},
        {"E": 372, "k": 8, "T": 300, "d": 8, "n": 8},
        {"E": 11, "k": 8, "T": 1024, "d": 8, "n": 8},
        {"E": 11, "k": 9, "T": 1024, "d": 8, "n": 8},
    ],
    ids=str,
)
def test_edges(shape, dtype):
    got = check(make(**shape, dtype=dtype, biases=BOTH))
    if 0 in (shape.get("T"), shape.get("k")):
        assert all((x == 0).all() for x in got.values())


@on_a_gpu
@pytest.mark.parametrize("k", [1, 3])
def test_a_family_for_each_pass(k):
    """Few rows an expert and nothing forced: Hopper has sm80's forward pass and its own backward
    pass."""
    case = on_device(make(40, 72, 136, 16, k, dtype=torch.float16, biases=BOTH))
    if {"sm90", "sm80"} <= FAMILIES.keys():
        for backward, family in ((False, "sm80"), (True, "sm90")):
            text = fm.explain_moe(**case.inputs(), ids=case.ids, backward=backward)
            assert re.search(rf"^  kernel +{family}_", text, re.M), text
    check(case)


def test_all_to_one_expert(dtype):
    """So many that the gradients of weights are summed in slices."""
    case = make(6000, 136, 72, 5, 1, dtype=dtype, ids=torch.full((6000, 1), 3), biases=BOTH)
    got = check(case)
    for name in ("dgate_up", "ddown", "dup_bias", "ddown_bias"):
        others = [e for e in range(5) if e != 3]
        assert (got[name][others] == 0).all() and (got[name][3] != 0).any(), name


def test_many_experts_too_large(dtype):
    x, up, down = (
        torch.zeros(s, dtype=dtype, device=DEVICE) for s in ((2, 8), (8193, 16, 8), (8193, 8, 8))
    )
    if DEVICE == "cuda":
        with pytest.raises(RuntimeError, match=r"8193 experts; CUDA kernels take at most 8192"):
            fm.moe(x, up, down, torch.zeros(2, 1, dtype=torch.int32, device=DEVICE))


# What nobody uses, and what is not finite.


@pytest.mark.parametrize("k", [1, 2])
def test_what_no_pair_uses_is_not_read(dtype, k):
    """NaN in idle experts, in weights of dropped pairs and in tokens that have no expert."""
    ids = torch.tensor([[0, 2], [2, -1], [-1, 7], [5, 0], [-(2**31), 2**31 - 1], [2, 2]])
    ids = ids.repeat(30, 1)[:, :k].contiguous()
    clean = on_device(make(180, 72, 40, 5, k, dtype=dtype, ids=ids, biases=BOTH))
    dirty = replace(clean, **{n: x.clone() for n, x in clean.inputs().items()})
    dropped = ((ids < 0) | (ids >= 5)).to(DEVICE)
    idle, alone = [1, 3, 4], dropped.all(-1)
    for name in ("gate_up", "down", "up_bias", "down_bias"):
        getattr(dirty, name)[idle] = torch.nan
    dirty.weights[dropped] = torch.nan
    dirty.x[alone] = torch.nan
    dirty.grad_out = clean.grad_out.clone()
    dirty.grad_out[alone] = torch.nan
    assert not complaints_about(clean)
    want, got = oracle.ours(clean), results(dirty)
    for name in want:
        assert same_bits(got[name], want[name]), name
    for name in ("dgate_up", "ddown", "dup_bias", "ddown_bias"):
        assert (got[name][idle] == 0).all(), name
    assert (got["dweights"][dropped] == 0).all()
    assert (got["out"][alone] == 0).all() and (got["dx"][alone] == 0).all()


def test_nan_stays_with_its_token(dtype):
    case = on_device(make(300, 72, 40, dtype=dtype, biases=BOTH))
    want = fm.moe(**case.inputs(), ids=case.ids)
    case.x[7] = torch.nan
    out = fm.moe(**case.inputs(), ids=case.ids)
    assert out[7].isnan().all()
    others = [t for t in range(300) if t != 7]
    assert same_bits(out[others], want[others])


def test_a_token_does_not_see_its_neighbours(dtype):
    """The same tile, whoever else is in it: the bits of a token are its own."""
    case = on_device(make(512, 72, 40, 4, 2, dtype=dtype))
    whole = fm.moe(case.x, case.gate_up, case.down, case.ids, case.weights)
    order = torch.randperm(512, device=DEVICE)
    part = fm.moe(case.x[order], case.gate_up, case.down, case.ids[order], case.weights[order])
    assert same_bits(part, whole[order])


@pytest.mark.parametrize("how", LAYOUTS)
@pytest.mark.parametrize("name", ["x", "gate_up", "down", "grad_out", "ids", "weights"])
def test_layouts(name, how, dtype):
    """Read where it lies or copied: the products are the same ones, in the same order."""
    case = on_device(make(137, 48, 80, dtype=dtype))
    moved = replace(case, **{name: laid_out(getattr(case, name), how)})
    want, got = oracle.ours(case), results(moved)
    assert all(same_bits(got[n], want[n]) for n in want)


def test_gradients_lie_like_their_tensors(dtype):
    case = on_device(make(70, 48, 32, dtype=dtype))
    case.gate_up, case.down = (laid_out(w, "transposed") for w in (case.gate_up, case.down))
    got = results(case)
    for name in ("gate_up", "down", "x", "weights"):
        assert got[f"d{name}"].stride() == getattr(case, name).stride(), name
    assert not oracle.compare(case, got)


# A CUDA graph serves whatever routing comes.


@on_a_gpu
@pytest.mark.parametrize("k", [1, 3])
def test_a_graph_serves_any_routing(dtype, k):
    case = on_device(make(300, 72, 136, 6, k, dtype=dtype, biases=BOTH))
    leaves = {n: x.clone().requires_grad_() for n, x in case.inputs().items()}
    ids, grad = case.ids.clone(), case.grad_out

    def step():
        out = fm.moe(**leaves, ids=ids)
        return out.detach(), *torch.autograd.grad(out, list(leaves.values()), grad)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for other in (
        torch.randint(6, (300, k), device=DEVICE),
        torch.full((300, k), 4, device=DEVICE),
        torch.randint(-3, 9, (300, k), device=DEVICE),
        torch.full((300, k), -1, device=DEVICE),
    ):
        ids.copy_(other)
        graph.replay()
        want = step()
        assert all(same_bits(a, b) for a, b in zip(captured, want, strict=True))
    case.ids = ids
    assert (captured[0] == 0).all()


@on_a_gpu
def test_nothing_waits_for_the_device(dtype):
    case = on_device(make(300, 72, 136, 6, 2, dtype=dtype))
    oracle.ours(case)
    done = torch.cuda.Event()
    torch.cuda.synchronize()
    torch.cuda._sleep(600_000_000)  # a third of a second
    oracle.ours(case)
    done.record()
    assert not done.query(), "the call came back only when the work before it was done"
    torch.cuda.synchronize()


# Sizes past 2^31.


def large(*shape: int, dtype=torch.bfloat16, scale: float = 1.0) -> torch.Tensor:
    x = torch.empty(shape, dtype=dtype, device=DEVICE)
    for part in x.view(-1).split(1 << 28):
        part.normal_().mul_(scale)
    return x


def all_finite(x: torch.Tensor) -> bool:
    return all(bool(part.isfinite().all()) for part in x.flatten().split(1 << 28))


@pytest.mark.parametrize("part", ["first", "last"])
def test_pairs_past_two_to_the_31_elements(part, roomy):
    """T k d: y of the forward pass, dX of the backward pass. A token's results are its own."""
    roomy(40 << 30)
    T, d, n, E, k = 2**17 + 3, 2056, 72, 9, 8
    assert T * k * d > 2**31
    case = Case(
        x=large(T, d),
        gate_up=large(E, 2 * n, d, scale=1.5 * d**-0.5),
        down=large(E, d, n, scale=1.5 * n**-0.5),
        ids=torch.rand(T, E, device=DEVICE).argsort(-1)[:, :k],
        grad_out=large(T, d),
        weights=torch.rand(T, k, device=DEVICE) + 0.25,
    )
    got = results(case)
    assert all(all_finite(x) for x in got.values())
    tokens = slice(0, 150) if part == "first" else slice(T - 150, T)
    few = replace(case, needs=("x", "weights"))
    for name in ("x", "ids", "grad_out", "weights"):
        setattr(few, name, getattr(case, name)[tokens])
    found = oracle.compare(few, {n: got[n][tokens] for n in ("out", "dx", "dweights")})
    assert not found, found


@pytest.mark.parametrize("name", [f for f, dtypes in FAMILIES.items() if "bf16" in dtypes])
def test_weights_past_two_to_the_31_elements(name, roomy, monkeypatch):
    """So few rows an expert that Hopper would leave the forward pass to sm80."""
    roomy(60 << 30)
    monkeypatch.setenv("FLASHMOE_FAMILY", name)
    T, d, n, E, k = 300, 2048, 1032, 520, 2
    used = torch.tensor([0, 1, 300, E - 2, E - 1], device=DEVICE)
    assert E * 2 * n * d > 2**31
    choice = torch.randint(5, (T, k), device=DEVICE)
    case = Case(
        x=large(T, d),
        gate_up=large(E, 2 * n, d, scale=1.5 * d**-0.5),
        down=large(E, d, n, scale=1.5 * n**-0.5),
        ids=used[choice],
        grad_out=large(T, d),
        weights=torch.rand(T, k, device=DEVICE) + 0.25,
    )
    got = results(case)
    few = replace(case, gate_up=case.gate_up[used], down=case.down[used], ids=choice)
    idle = torch.ones(E, dtype=torch.bool, device=DEVICE)
    idle[used] = False
    for name in ("dgate_up", "ddown"):
        assert not any(x.any() for x, e in zip(got[name], idle.tolist(), strict=True) if e), name
        got[name] = got[name][used]
    found = oracle.compare(few, got)
    assert not found, found


# The router.


def check_route(logits, k, scoring, normalize, bias=None) -> None:
    """The choice is one of the best, in order; weights and gradient are within tolerance."""
    leaf = logits.detach().requires_grad_()
    with poisoned():
        ids, weights = fm.route(leaf, k, scoring, normalize, bias)
        seed = torch.randn(weights.shape, device=DEVICE)
        (grad,) = torch.autograd.grad(weights, leaf, seed)
    again = fm.route(leaf, k, scoring, normalize, bias)
    assert torch.equal(ids, again[0]) and same_bits(weights.detach(), again[1].detach())
    scores = logits.detach().double()
    scores = scores.softmax(-1) if scoring == "softmax" else scores.sigmoid()
    if bias is not None:
        scores = scores + bias.double()
    best = scores.sort(-1, descending=True).values[..., :k]
    rounding = 4 * torch.finfo(torch.float32).eps * scores.abs().amax(-1, keepdim=True)
    assert ((scores.gather(-1, ids.long()) - best).abs() <= rounding).all()
    assert all(len(set(row)) == k for row in ids.tolist())

    def gradient(dtype):
        x = logits.detach().to(dtype).requires_grad_()
        value = weights_of(x, ids, scoring, normalize)
        return value.detach(), torch.autograd.grad(value, x, seed.to(dtype))[0]

    unit = 2 * torch.finfo(torch.float32).eps
    floors = (unit, unit * k * max([1.0, *seed.abs().flatten().tolist()]))
    exact, plain = gradient(torch.float64), gradient(torch.float32)
    got = (weights.detach(), grad)
    for a, want, by_plain, floor in zip(got, exact, plain, floors, strict=True):
        error = (a.double() - want).abs()
        assert error.numel() == 0 or error.max() <= tolerance(a, want, by_plain, floor)


ROUTES = (
    (1, 1, 1),
    (7, 2, 2),
    (33, 8, 2),
    (100, 65, 8),
    (300, 128, 8),
    (5, 1000, 33),
    (9, 4096, 8),
)
ROUTES += ((4, 8192, 16), (3, 64, 64), (0, 4, 2), (3, 4, 0))


@pytest.mark.parametrize("biased", [False, True], ids=["plain", "biased"])
@pytest.mark.parametrize("normalize", [False, True], ids=["scores", "normalised"])
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("wide", [False, True], ids=["half", "float32"])
def test_route(dtype, wide, scoring, normalize, biased):
    for T, E, k in ROUTES:
        logits = torch.randn(T, E, device=DEVICE).to(torch.float32 if wide else dtype)
        bias = torch.randn(E, device=DEVICE) if biased else None
        check_route(logits, k, scoring, normalize, bias)


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_ties_go_to_the_lower_id(dtype, scoring):
    logits = torch.randint(-1, 2, (200, 70), device=DEVICE).to(dtype)
    ids, _ = fm.route(logits, 7, scoring)
    want, _ = oracle.route(logits.double(), 7, scoring)
    assert torch.equal(ids.long(), want)


@pytest.mark.parametrize("how", ["transposed", "in wider rows", "every other element"])
def test_logits_of_any_strides(dtype, how):
    logits = torch.randn(50, 33, device=DEVICE).to(dtype)
    for a, b in zip(fm.route(laid_out(logits, how), 4), fm.route(logits, 4), strict=True):
        assert torch.equal(a, b)


def test_nan_is_the_largest(dtype):
    logits = torch.randn(40, 20, device=DEVICE).to(dtype)
    logits[::2, 13] = torch.nan
    ids, weights = fm.route(logits, 3, "sigmoid")
    assert (ids[::2, 0] == 13).all() and weights[::2].isnan().all()
    assert weights[1::2].isfinite().all()


# What cannot be.


@on_a_gpu
def test_hopper_says_what_it_does_not_take(monkeypatch):
    case = on_device(make(20, n=13, dtype=torch.float16))
    monkeypatch.setenv("FLASHMOE_FAMILY", "sm90")
    with pytest.raises(RuntimeError, match=r"sm90: (takes widths|this build|is for|needs)"):
        fm.moe(**case.inputs(), ids=case.ids)


@on_a_gpu
@pytest.mark.parametrize("wide", [torch.float32, torch.float64], ids=str)
def test_wide_dtypes_are_refused(wide):
    case = on_device(make(20, dtype=wide))
    with pytest.raises(RuntimeError, match=r"x is float\d\d; CUDA kernels take float16"):
        fm.moe(**case.inputs(), ids=case.ids)
