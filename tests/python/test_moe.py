"""A mixture of experts on the CPU against the float64 oracle: random problems, edges, layouts."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch

import flashmoe_science as fm
import moe_oracle as oracle
from moe_oracle import ACTIVATIONS, DIFFERENTIABLE, Case, check, make
from oracle import same_bits

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def laid_out(x: torch.Tensor, how: str) -> torch.Tensor:
    """The same numbers, lying differently."""
    if how == "transposed":
        return x.mT.contiguous().mT
    if how == "in wider rows":
        return torch.nn.functional.pad(x, (1, 2))[..., 1:-2]
    between = torch.full_like(x, torch.nan if x.is_floating_point() else 1)
    if how == "every other row":
        return torch.stack([x, between], -2).flatten(-3, -2)[..., ::2, :]
    if how == "every other element":
        return torch.stack([x, between], -1).flatten(-2)[..., ::2]
    return x


LAYOUTS = ("plain", "transposed", "in wider rows", "every other row", "every other element")


def some_ids(pick: random.Random, generator, T: int, k: int, E: int) -> torch.Tensor:
    """Distinct experts, any experts, one for all, or some that do not exist."""
    kind = pick.choice(("distinct", "any", "one", "dropped", "far away"))
    ids = torch.rand(T, max(E, k, 1), generator=generator).argsort(-1)[:, :k] % max(E, 1)
    if kind == "any":
        ids = torch.randint(E, (T, k), generator=generator)
    elif kind == "one":
        ids = torch.full((T, k), pick.randrange(E))
    elif kind == "dropped":
        ids = torch.randint(-1, E + 1, (T, k), generator=generator)
    elif kind == "far away":
        ids = ids.where(
            torch.rand(T, k, generator=generator) < 0.7, pick.choice((2**31 - 1, -(2**31)))
        )
    if pick.random() < 0.5:
        return ids.int()
    return ids


def random_case(seed: int) -> Case:
    pick = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    T, E = pick.choice((0, 1, 2, 5, 17, 40)), pick.choice((1, 2, 3, 8, 20))
    d, n = (pick.choice((1, 2, 3, 7, 8, 13, 16, 31, 33)) for _ in range(2))
    k = pick.choice((0, 1, 1, 2, 3, 5))
    case = make(
        *(T, d, n, E, k),
        dtype=pick.choice(DTYPES),
        activation=pick.choice(ACTIVATIONS),
        weighted=pick.random() < 0.8,
        biases=(pick.random() < 0.5, pick.random() < 0.5),
        ids=some_ids(pick, generator, T, k, E),
        needs=tuple(n for n in DIFFERENTIABLE if pick.random() < 0.75),
        generator=generator,
    )
    if case.weights is not None and pick.random() < 0.3:
        case.weights -= 0.75  # of either sign
    for name in ("x", "gate_up", "down", "grad_out"):
        setattr(case, name, laid_out(getattr(case, name), pick.choice(LAYOUTS)))
    for name in ("ids", "weights", "up_bias", "down_bias"):
        if getattr(case, name) is not None and pick.random() < 0.3:
            setattr(case, name, laid_out(getattr(case, name), "transposed"))
    return case


@pytest.mark.parametrize("part", range(10))
def test_random_problems(part):
    for seed in range(50 * part, 50 * part + 50):
        try:
            check(random_case(seed))
        except Exception as error:
            raise AssertionError(f"random_case({seed}): {error}") from error


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tiles_and_their_remainders(dtype, activation):
    """Larger than any tile, and a multiple of none."""
    check(make(203, 67, 133, 3, 2, dtype=dtype, activation=activation, biases=(True, True)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_wrong_number_would_be_found(dtype):
    """One element of each result off by 3% of its size, an activation in place of its sister."""
    case = make(dtype=dtype, biases=(True, True))
    right = oracle.ours(case)
    for name, value in right.items():
        wrong = value.clone()
        wrong.view(-1)[value.abs().argmax()] *= 1.03 if dtype == torch.bfloat16 else 1.01
        complaints = oracle.compare(case, {**right, name: wrong})
        assert len(complaints) == 1 and complaints[0].startswith(f"{name}:"), name
    other = oracle.ours(dataclasses.replace(case, activation="geglu"))
    assert len(oracle.compare(case, other)) == len(right) - 1  # not the gradient of the last bias


# Shapes at the edge.


@pytest.mark.parametrize(
    "shape",
    [
        {"T": 0},
        {"k": 0},
        {"T": 0, "k": 0},
        {"E": 1, "k": 1},
        {"E": 1, "k": 3, "ids": torch.zeros(24, 3, dtype=torch.int64)},
        {"E": 4096, "k": 8, "T": 40, "d": 3, "n": 2},
        {"k": 16, "E": 16},
        {"T": 1, "d": 1, "n": 1, "E": 1, "k": 1},
        {"n": 1},
        {"d": 1},
        {"d": 257, "n": 63},
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_edges(shape, dtype):
    got = check(make(**shape, dtype=dtype, biases=(True, True)))
    if 0 in (shape.get("T"), shape.get("k")):
        assert all((x == 0).all() for x in got.values())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_all_to_one_expert(dtype):
    case = make(70, dtype=dtype, ids=torch.full((70, 2), 3), biases=(True, True))
    got = check(case)
    for name in ("dgate_up", "ddown", "dup_bias", "ddown_bias"):
        others = [e for e in range(5) if e != 3]
        assert (got[name][others] == 0).all() and (got[name][3] != 0).any(), name


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_no_pair_uses_is_not_read(dtype):
    """NaN in idle experts, in weights of dropped pairs and in tokens that have no expert."""
    ids = torch.tensor([[0, 2], [2, -1], [-1, 7], [5, 0], [-(2**31), 2**31 - 1], [2, 2]])
    clean = make(6, dtype=dtype, E=5, ids=ids, biases=(True, True))
    dirty = dataclasses.replace(clean, **{n: x.clone() for n, x in clean.inputs().items()})
    idle, dropped, alone = [1, 3, 4], (ids < 0) | (ids >= 5), [2, 4]
    for name in ("gate_up", "down", "up_bias", "down_bias"):
        getattr(dirty, name)[idle] = torch.nan
    dirty.weights[dropped] = torch.nan
    dirty.x[alone] = torch.nan
    dirty.grad_out = clean.grad_out.clone()
    dirty.grad_out[alone] = torch.nan
    want, got = check(clean), oracle.ours(dirty)
    for name in want:
        assert same_bits(got[name], want[name]), name
    for name in ("dgate_up", "ddown", "dup_bias", "ddown_bias"):
        assert (got[name][idle] == 0).all(), name
    assert (got["dweights"][dropped] == 0).all()
    assert (got["out"][alone] == 0).all() and (got["dx"][alone] == 0).all()


def test_nan_stays_with_its_token():
    case = make(30, biases=(True, True))
    case.x[7] = torch.nan
    out = fm.moe(case.x, case.gate_up, case.down, case.ids, case.weights)
    assert out[7].isnan().all() and out[:7].isfinite().all() and out[8:].isfinite().all()


# What the arguments may look like.


@pytest.mark.parametrize("how", LAYOUTS)
@pytest.mark.parametrize("name", ["x", "gate_up", "down", "grad_out", "ids", "weights"])
def test_layouts_give_the_same_bits(name, how):
    case = make(37, 24, 20, dtype=torch.float32)
    moved = laid_out(getattr(case, name), how)
    want, got = oracle.ours(case), oracle.ours(dataclasses.replace(case, **{name: moved}))
    assert all(same_bits(got[n], want[n]) for n in want)


def test_gradients_lie_like_their_tensors():
    """Optimizers step through both together; storage (E, d, 2n) keeps its order."""
    case = make()
    case.gate_up, case.down = (laid_out(w, "transposed") for w in (case.gate_up, case.down))
    got = oracle.ours(case)
    for name in ("gate_up", "down", "x", "weights"):
        assert got[f"d{name}"].stride() == getattr(case, name).stride(), name
    assert got["out"].is_contiguous()


@pytest.mark.parametrize("lead", [(), (3,), (2, 3), (2, 1, 4), (0, 5), (2, 0)], ids=str)
def test_leading_dimensions(lead):
    T = torch.Size(lead).numel()
    case = make(T)
    flat = oracle.ours(case)
    x, ids, weights, g = (
        y.unflatten(0, lead) if lead else y[0]
        for y in (case.x, case.ids, case.weights, case.grad_out)
    )
    x, weights = x.detach().requires_grad_(), weights.detach().requires_grad_()
    out = fm.moe(x, case.gate_up, case.down, ids, weights)
    assert out.shape == x.shape and same_bits(out.reshape(flat["out"].shape), flat["out"])
    dx, dw = torch.autograd.grad(out, (x, weights), g)
    assert same_bits(dx.reshape(flat["dx"].shape), flat["dx"])
    assert same_bits(dw.reshape(flat["dweights"].shape), flat["dweights"])


def test_strided_leading_dimensions():
    case = make(12)
    x = case.x.view(3, 4, -1).transpose(0, 1)
    ids, weights = (y.view(3, 4, -1).transpose(0, 1) for y in (case.ids, case.weights))
    out = fm.moe(x, case.gate_up, case.down, ids, weights)
    assert same_bits(out.transpose(0, 1).reshape(12, -1), oracle.ours(case)["out"])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_weights_of_any_float_dtype(dtype):
    case = make(dtype=torch.bfloat16)
    w = case.weights.to(dtype).requires_grad_()
    out = fm.moe(case.x, case.gate_up, case.down, case.ids, w)
    (dw,) = torch.autograd.grad(out, w, case.grad_out)
    wide = w.detach().float().requires_grad_()
    want = fm.moe(case.x, case.gate_up, case.down, case.ids, wide)
    assert same_bits(out, want) and dw.dtype == dtype
    assert same_bits(dw, torch.autograd.grad(want, wide, case.grad_out)[0].to(dtype))


def test_no_weights_are_ones():
    case = make(weighted=False)
    ones = dataclasses.replace(case, weights=torch.ones(case.ids.shape))
    got, want = oracle.ours(case), oracle.ours(ones)
    assert "dweights" not in got and all(same_bits(got[n], want[n]) for n in got)


def test_ids_are_int32_or_int64():
    case = make()
    narrow = oracle.ours(dataclasses.replace(case, ids=case.ids.int()))
    assert all(same_bits(narrow[n], x) for n, x in oracle.ours(case).items())


def test_autocast():
    """As for F.linear: x and the experts are cast, the result has autocast's dtype."""
    case = make(biases=(True, True))
    names = ("x", "gate_up", "down", "up_bias", "down_bias")
    leaves = {n: x.detach().requires_grad_() for n, x in case.inputs().items()}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = fm.moe(**leaves, ids=case.ids)
        wide = fm.moe(*(leaves[n].double() for n in names[:3]), case.ids, leaves["weights"])
    assert out.dtype == torch.bfloat16 and wide.dtype == torch.float64
    low = dataclasses.replace(case, **{n: getattr(case, n).bfloat16() for n in names})
    want = oracle.ours(low)
    assert same_bits(out.detach(), want["out"])
    grads = torch.autograd.grad(out, list(leaves.values()), case.grad_out.bfloat16())
    for name, grad in zip(leaves, grads, strict=True):
        assert grad.dtype == leaves[name].dtype and same_bits(grad, want[f"d{name}"].float()), name


# The same bits in every run.


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_number_of_threads_gives_the_same_bits(threads, dtype):
    case = make(150, 48, 40, 6, 3, dtype=dtype, biases=(True, True))
    threads(1)
    want = oracle.ours(case)
    for count in (1, 2, 3, 8):
        threads(count)
        got = oracle.ours(case)
        assert all(same_bits(got[n], want[n]) for n in want), count


def test_without_gradients_the_bits_are_the_same():
    case = make(50)
    want = oracle.ours(case)["out"]
    arguments = (case.x, case.gate_up, case.down, case.ids, case.weights)
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            assert same_bits(fm.moe(*arguments), want)


def test_a_token_does_not_see_its_neighbours():
    """The bits of a token depend on nothing but itself and its experts."""
    case = make(60)
    whole = oracle.ours(case)["out"]
    order = torch.randperm(60)[:23]
    part = fm.moe(case.x[order], case.gate_up, case.down, case.ids[order], case.weights[order])
    torch.testing.assert_close(part, whole[order])


# What would run.


def test_explain_says_what_would_run():
    case = make(dtype=torch.bfloat16, biases=(True, False), weighted=False)
    arguments = {**case.inputs(), "ids": case.ids, "activation": case.activation}
    meta = {n: x.to("meta") if isinstance(x, torch.Tensor) else x for n, x in arguments.items()}
    forward = fm.explain_moe(**arguments)
    assert forward.startswith("forward mixture of experts in bfloat16: 24 tokens of width 16")
    assert fm.explain_moe(**meta, device="cpu") == forward
    for words in ("kernel     cpu_", "swiglu, up bias, no weights", "copies     none"):
        assert words in forward
    assert "nothing kept" in forward
    meta["x"].requires_grad_()
    assert "nothing kept" not in fm.explain_moe(**meta, device="cpu")
    assert fm.explain_moe(**meta, device="cpu", backward=True).startswith("backward mixture")


def test_explain_refuses_what_the_call_refuses():
    x, w = torch.zeros(3, 4), torch.zeros(2, 6, 4)
    for changes, words in (
        ({"down": torch.zeros(2, 4, 2)}, "gate_up has 6 rows"),
        ({"activation": "tanh"}, "activation is 'tanh'"),
        ({"device": "toaster"}, "device is 'toaster'"),
    ):
        given = {"x": x, "gate_up": w, "down": torch.zeros(2, 4, 3), "ids": torch.zeros(3, 1).int()}
        with pytest.raises(RuntimeError, match=words):
            fm.explain_moe(**{**given, **changes})
