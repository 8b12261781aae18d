"""Random attention problems over every option, drawn from a seed or by hypothesis.

`draw` describes a problem with plain values, through a `Picker` that makes the choices: `Seeded`
takes them from a random number generator, `Drawn` asks hypothesis, which then shrinks what fails.
Simple choices come first, so that what it shrinks to is simple. `build` makes the tensors.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from dropped import with_dropout
from oracle import Case

DTYPES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}
# Around the sizes at which vectors, tiles and blocks end, primes, and what real models use.
HEAD_DIMS = (8, 1, 2, 3, 5, 7, 15, 16, 17, 24, 31, 32, 33, 40, 48, 63, 64, 65, 80, 96, 127, 128)
LARGE_HEAD_DIMS = (129, 160, 192, 199, 255, 256)
EDGE_LENGTHS = (2, 15, 16, 17, 31, 32, 33, 47, 63, 64, 65, 97, 127, 128, 129)
LONG_LENGTHS = (191, 192, 193, 255, 256, 257, 331, 512)
INPUT_LAYOUTS = ("contiguous", "swapped", "padded", "permuted", "sliced", "offset", "expanded")
BIAS_LAYOUTS = ("contiguous", "transposed", "padded", "permuted", "sliced", "expanded", "hankel")


class Picker(Protocol):
    def integer(self, low: int, high: int) -> int: ...

    def choice(self, options: Sequence[Any]) -> Any: ...

    def chance(self, probability: float) -> bool: ...


class Seeded:
    """Choices from a seed."""

    def __init__(self, seed: int):
        self.random = random.Random(seed)

    def integer(self, low: int, high: int) -> int:
        return self.random.randint(low, high)

    def choice(self, options: Sequence[Any]) -> Any:
        return self.random.choice(options)

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability


class Drawn:
    """Choices by hypothesis, from the `draw` of a composite strategy."""

    def __init__(self, draw):
        from hypothesis import strategies

        self.draw, self.strategies = draw, strategies

    def integer(self, low: int, high: int) -> int:
        return self.draw(self.strategies.integers(low, high))

    def choice(self, options: Sequence[Any]) -> Any:
        return self.draw(self.strategies.sampled_from(list(options)))

    def chance(self, probability: float) -> bool:
        # Whole percents, so that it shrinks towards False.
        return self.draw(self.strategies.integers(0, 99)) >= 100 - round(100 * probability)


@dataclass(frozen=True)
class Bias:
    shape: tuple[int, ...]  # ragged: only the number of heads, 1 or heads_q
    dtype: str  # "bool": a mask, true where a number would not be -inf
    layout: str = "contiguous"
    masked: float = 0.0  # the share of entries that are -inf
    masked_rows: float = 0.0  # the share of rows that are -inf throughout
    offset: float = 0.0  # added to all of it: weights must not depend on it, lse must


@dataclass(frozen=True)
class Sinks:
    dtype: str
    layout: str = "contiguous"
    absent: float = 0.0  # the share of heads whose sink is -inf
    offset: float = 0.0  # large: sinks take all of the softmax; small: nothing


@dataclass(frozen=True)
class Problem:
    seed: int  # of the data
    dtype: str
    heads_q: int
    heads_k: int
    head_dim: int
    head_dim_v: int
    lead: tuple[int, ...] = ()  # dense: leading dimensions, lengths
    len_q: int = 0
    len_k: int = 0
    key_lengths: tuple[tuple[int, ...], str] | None = None  # shape, dtype
    lengths: tuple[tuple[int, int], ...] | None = None  # ragged: (n_i, m_i)
    cu_dtype: str = "int32"
    slack: int = 0  # ragged: stated maxima exceed the real ones by this
    rest: tuple[int, int] = (0, 0)  # ragged: query and key tokens behind the last sequence
    bias: Bias | None = None
    sinks: Sinks | None = None
    causal: bool = False
    window: tuple[int, int] | None = None
    scale: float | None = None
    softcap: float | None = None
    spread: float = 1.0  # the standard deviation of q: large ones make a peaked softmax
    layouts: tuple[str, str, str, str] = ("contiguous",) * 4  # q, k, v, grad_out
    grad_lse: bool = True
    deterministic: bool | None = None
    needs: str = "qkvbs"
    use_out: bool = True  # False: only lse takes part in the loss
    dropout: float = 0.0


def draw_length(pick: Picker, long: bool) -> int:
    kind = pick.integer(0, 9)
    if kind <= 4:
        return pick.integer(1, 40)
    if kind <= 8:
        return pick.choice(LONG_LENGTHS if long else EDGE_LENGTHS)
    return pick.integer(0, 3)


def draw_bias_shape(pick: Picker, full: tuple[int, ...]) -> tuple[int, ...]:
    """Any shape that broadcasts to `full`."""
    kept = full[pick.integer(0, len(full)) :] if pick.chance(0.4) else full
    return tuple(1 if pick.chance(0.3) else size for size in kept)


def draw_bias(pick: Picker, dtype: str, shape: tuple[int, ...]) -> Bias:
    return Bias(
        shape=shape,
        dtype=pick.choice((dtype, "float32", dtype, "float32", "bool")),
        layout=pick.choice(BIAS_LAYOUTS),
        masked=pick.choice((0.0, 0.0, 0.0, 0.2, 0.2, 0.9)),
        masked_rows=pick.choice((0.0, 0.0, 0.0, 0.0, 0.3)),
        offset=pick.choice((0.0, 0.0, 0.0, 30.0, -500.0)),
    )


def draw_sinks(pick: Picker, dtype: str) -> Sinks | None:
    if not pick.chance(0.3):
        return None
    return Sinks(
        dtype=pick.choice((dtype, "float32")),
        layout=pick.choice(("contiguous", "offset", "sliced", "expanded")),
        absent=pick.choice((0.0, 0.0, 0.5)),
        offset=pick.choice((0.0, 0.0, 10.0, -10.0, 500.0)),
    )


def draw(pick: Picker, budget: int = 3_000_000) -> Problem:
    """One problem. `budget` bounds its multiplications (one in ten may take ten times that)."""
    seed = pick.integer(0, 2**31 - 1)
    dtype = pick.choice(tuple(DTYPES))
    ragged = pick.chance(0.3)
    long = pick.chance(0.1)
    budget = 10 * budget if long else budget

    head_dim = pick.choice(LARGE_HEAD_DIMS if pick.chance(0.1) else HEAD_DIMS)
    head_dim_v = pick.choice(HEAD_DIMS) if pick.chance(0.3) else head_dim
    heads_k = pick.integer(1, 3)
    heads_q = heads_k * pick.choice((1, 1, 2, 3, 4))

    problem: dict[str, Any] = {}
    pairs_left = max(1, budget // (heads_q * (head_dim + head_dim_v)))
    if ragged:
        lengths = []
        for _ in range(pick.integer(0, 6)):
            n = 0 if pick.chance(0.1) else draw_length(pick, long)
            m = n if pick.chance(0.5) else 0 if pick.chance(0.1) else draw_length(pick, long)
            if n * m <= pairs_left:
                lengths.append((n, m))
                pairs_left -= n * m
        problem |= {
            "lengths": tuple(lengths),
            "cu_dtype": pick.choice(("int32", "int64")),
            "slack": pick.choice((0, 0, 1, 100)),
            "rest": pick.choice(((0, 0), (0, 0), (0, 0), (3, 0), (1, 5))),
        }
        longest_q = max((n for n, _ in lengths), default=0)
        longest_k = max((m for _, m in lengths), default=0)
        if pick.chance(0.5):
            problem["bias"] = draw_bias(pick, dtype, (pick.choice((1, heads_q)),))
    else:
        longest_q = draw_length(pick, long)
        longest_k = longest_q if pick.chance(0.4) else draw_length(pick, long)
        longest_k = min(longest_k, pairs_left // max(longest_q, 1))
        pairs_left //= max(longest_q * longest_k, 1)
        lead = []
        for _ in range(pick.choice((1, 1, 1, 2, 3))):
            lead.append(0 if pick.chance(0.01) else pick.integer(1, min(4, max(1, pairs_left))))
            pairs_left //= max(1, lead[-1])
        problem |= {"lead": tuple(lead), "len_q": longest_q, "len_k": longest_k}
        if pick.chance(0.25):
            shape = draw_bias_shape(pick, tuple(lead))
            problem["key_lengths"] = (shape, pick.choice(("int32", "int64")))
        if pick.chance(0.5):
            full = (*lead, heads_q, longest_q, longest_k)
            problem["bias"] = draw_bias(pick, dtype, draw_bias_shape(pick, full))

    window = None
    if pick.chance(0.3):
        reach = max(longest_q, longest_k, 1) + 2
        window = tuple(-1 if pick.chance(0.3) else pick.integer(0, reach) for _ in "lr")
    return Problem(
        seed=seed,
        dtype=dtype,
        heads_q=heads_q,
        heads_k=heads_k,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        causal=pick.chance(0.35),
        window=window,
        scale=pick.choice((None, None, 0.3, 1.0, -0.2)),
        softcap=pick.choice((None, None, None, 1.0, 5.0, 30.0)),
        spread=pick.choice((1.0, 1.0, 4.0)),
        layouts=tuple(pick.choice(INPUT_LAYOUTS) for _ in range(4)),
        grad_lse=pick.chance(0.5),
        deterministic=pick.choice((None, None, True, False)),
        needs="qkvbs"
        if not pick.chance(0.15)
        else pick.choice(("q", "k", "v", "b", "kv", "", "s")),
        sinks=draw_sinks(pick, dtype),
        **problem,
    )


def seeded(seed: int) -> Problem:
    return draw(Seeded(seed))


def problems(budget: int = 200_000):
    """The hypothesis strategy."""
    from hypothesis import strategies

    @strategies.composite
    def problem(draw_one):
        return draw(Drawn(draw_one), budget)

    return problem()


def laid_out(values: torch.Tensor, layout: str, generator: torch.Generator) -> torch.Tensor:
    """`values` in memory of that layout. Gaps in the memory hold NaN, so that reading one shows.

    The two layouts that share memory between elements (expanded, hankel) change values too.
    """
    shape, rank = values.shape, values.dim()
    if layout == "contiguous" or values.numel() == 0 or rank == 0:
        return values.contiguous()

    def filled_from(view: torch.Tensor) -> torch.Tensor:
        view.copy_(values)
        return view

    def gaps(*size: int) -> torch.Tensor:
        return torch.full(size, math.nan, dtype=values.dtype, device=values.device)

    if layout in ("swapped", "transposed"):  # (B, S, H, D) in memory; a transposed pair matrix
        dims = (-3, -2) if layout == "swapped" else (-2, -1)
        if rank < 3:
            dims = (0, rank - 1)
        return values.transpose(*dims).contiguous().transpose(*dims)
    if layout == "permuted":
        order = torch.randperm(rank, generator=generator).tolist()
        back = [order.index(i) for i in range(rank)]
        return values.permute(order).contiguous().permute(back)
    if layout == "padded":  # unit last stride, rows further apart than they are long
        pad = int(torch.randint(1, 9, (), generator=generator))
        return filled_from(gaps(*shape[:-1], shape[-1] + pad)[..., : shape[-1]])
    if layout == "sliced":  # every dimension with a start and a step of its own
        steps = torch.randint(1, 4, (rank,), generator=generator).tolist()
        starts = torch.randint(0, 3, (rank,), generator=generator).tolist()
        wide = gaps(*(a + n * s for a, n, s in zip(starts, shape, steps, strict=True)))
        index = tuple(slice(a, None, s) for a, s in zip(starts, steps, strict=True))
        return filled_from(wide[index])
    if layout == "offset":  # dense, but not aligned to anything
        start = int(torch.randint(1, 8, (), generator=generator))
        return filled_from(gaps(values.numel() + start)[start:].view(shape))
    if layout == "guarded":  # dense and 16-byte aligned, between NaN
        return filled_from(gaps(values.numel() + 64)[32:-32].view(shape))
    if layout == "aligned":  # rows that begin at 16 bytes, with NaN on all sides of each
        wide = gaps(*shape[:-1], 8 + (shape[-1] + 15) // 8 * 8)
        return filled_from(wide[..., 8 : 8 + shape[-1]])
    if layout == "expanded":
        dim = int(torch.randint(0, rank, (), generator=generator))
        return values.narrow(dim, 0, 1).contiguous().expand(shape)
    if layout == "hankel":  # entry (i, j) depends on i + j only: two dimensions share a stride
        if rank < 2:
            return values.contiguous()
        line = values.reshape(-1)[: shape[-2] + shape[-1] - 1]
        if line.numel() < shape[-2] + shape[-1] - 1:
            return values.contiguous()
        return line.clone().as_strided(shape, (0,) * (rank - 2) + (1, 1))
    raise ValueError(layout)


def build(problem: Problem, device: str = "cpu") -> Case:
    """The tensors of a problem; the same numbers every time and on every device."""
    generator = torch.Generator().manual_seed(problem.seed)
    dtype = DTYPES[problem.dtype]

    def normal(*shape: int, std: float = 1.0) -> torch.Tensor:
        # Drawn as float32 and then rounded, so that the dtype does not change the data.
        return (torch.randn(shape, generator=generator) * std).to(dtype).to(device)

    ragged = problem.lengths is not None
    hq, hk, d, dv = problem.heads_q, problem.heads_k, problem.head_dim, problem.head_dim_v
    if ragged:
        pairs = (*problem.lengths, problem.rest)
        tokens_q, tokens_k = (sum(pair[side] for pair in pairs) for side in (0, 1))
        shapes = [(tokens_q, hq, d), (tokens_k, hk, d), (tokens_k, hk, dv), (tokens_q, hq, dv)]
    else:
        lead, n, m = problem.lead, problem.len_q, problem.len_k
        shapes = [(*lead, hq, n, d), (*lead, hk, m, d), (*lead, hk, m, dv), (*lead, hq, n, dv)]
    stds = (problem.spread, 1.0, 1.0, 1.0)
    q, k, v, grad_out = (
        laid_out(normal(*shape, std=std), layout, generator)
        for shape, std, layout in zip(shapes, stds, problem.layouts, strict=True)
    )
    case = Case(q, k, v, grad_out, deterministic=problem.deterministic, needs=problem.needs)
    if not problem.use_out:
        case.use_out, case.grad_out = False, torch.zeros_like(grad_out)
    for name in ("causal", "window", "scale", "softcap"):
        case.options[name] = getattr(problem, name)

    if problem.grad_lse:
        lse_dtype = torch.float64 if dtype == torch.float64 else torch.float32
        case.grad_lse = torch.randn(shapes[0][:-1], generator=generator).to(lse_dtype).to(device)
    if problem.key_lengths is not None:
        shape, integer = problem.key_lengths
        lengths = torch.randint(0, problem.len_k + 1, shape, generator=generator)
        case.key_lengths = lengths.to(getattr(torch, integer)).to(device)
    if ragged:
        case.cu_q, case.cu_k = (
            torch.tensor([0, *(pair[side] for pair in problem.lengths)])
            .cumsum(0)
            .to(getattr(torch, problem.cu_dtype))
            .to(device)
            for side in (0, 1)
        )
        case.max_q, case.max_k = (
            problem.slack + max((pair[side] for pair in problem.lengths), default=0)
            for side in (0, 1)
        )
    if problem.bias is not None:
        spec = problem.bias
        rows = [sum(n * m for n, m in problem.lengths)] if ragged else []
        values = torch.randn((*rows, *spec.shape), generator=generator) * 2 + spec.offset
        if spec.masked:
            hole = torch.rand(values.shape, generator=generator) < spec.masked
            values = values.masked_fill(hole, -math.inf)
        if spec.masked_rows and values.dim():
            row = torch.rand((*values.shape[:-1], 1), generator=generator) < spec.masked_rows
            values = values.masked_fill(row, -math.inf)
        values = values != -math.inf if spec.dtype == "bool" else values.to(DTYPES[spec.dtype])
        case.bias = laid_out(values.to(device), spec.layout, generator)
    if problem.sinks is not None:
        spec = problem.sinks
        values = torch.randn(hq, generator=generator) * 2 + spec.offset
        hole = torch.rand(hq, generator=generator) < spec.absent
        values = values.masked_fill(hole, -math.inf).to(DTYPES[spec.dtype]).to(device)
        case.sinks = laid_out(values, spec.layout, generator)
    return with_dropout(case, problem.dropout, problem.seed) if problem.dropout else case
