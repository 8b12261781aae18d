"""Random problems over a paged cache, and the oracle for them.

`draw` describes a problem with plain values, `build` makes its tensors: the pages that the
sequences have, with NaN in every other row of the cache, and numbers of no block in every entry of
the table past a sequence's end. The oracle sees the same keys as a ragged batch (oracle.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch

import oracle
from oracle import Case
from problems import DTYPES, HEAD_DIMS, INPUT_LAYOUTS, Picker, Seeded, laid_out

FLOAT8 = torch.float8_e4m3fn
# Rows of one block apart from each other, or one half of each row for keys, the other for values;
# (blocks, heads, page, dim) in memory, or (heads, blocks, page, dim); rows, blocks and heads with
# gaps between them, of one number each, or of a chunk, whereby heads are not evenly far apart.
CACHE_LAYOUTS = (
    *("separate", "halves", "head-major", "head-major halves", "heads first"),
    *("sliced", "uneven"),
)
PAGES = (16, 1, 2, 3, 5, 8, 32, 64)
BIG_HEAD_DIMS = (160, 192, 256, 257, 320, 511, 512)
# torch.library.opcheck compares tensors with allclose(), which fp8 has not.
CHECKS_OF_FLOAT8 = ("test_autograd_registration", "test_faketensor")
POISON = (-1, 2**31 - 1, -(2**31), 1_000_000)  # blocks that no cache here has


@dataclass(frozen=True)
class Problem:
    seed: int  # of the data
    dtype: str
    float8: bool
    heads_q: int
    heads_k: int
    head_dim: int
    head_dim_v: int
    page: int
    lengths: tuple[tuple[int, int], ...]  # (queries, keys) of each sequence
    decode: bool = False  # one query each, without cu_seqlens_q
    rest: int = 0  # tokens behind the last sequence
    shared: bool = False  # sequences begin with the same blocks, as far as the shorter one has any
    slack: int | None = 0  # the stated maxima exceed the real ones by this; None: not stated
    causal: bool = True
    window: tuple[int, int] | None = None
    scale: float | None = None
    softcap: float | None = None
    sinks: str | None = None  # their dtype
    scales: str | None = None  # "number", "()", "(1,)" or "(Hk,)"
    layouts: tuple[str, str, str] = ("contiguous", "separate", "contiguous")  # q, caches, out
    integers: tuple[str, str, str] = ("int32",) * 3  # block_table, seq_lens, cu_seqlens_q
    spread: float = 1.0


@dataclass
class Pages:
    """The call: tensors and options as flash_attention_paged takes them."""

    tensors: dict[str, torch.Tensor]
    options: dict[str, Any]
    exact: Case  # the same as a ragged batch; an fp8 cache times its scales in float64
    rounded: Case  # as who converts the cache to the queries' dtype first would have it
    lengths: tuple[tuple[int, int], ...]
    results: dict[str, torch.Tensor] = field(default_factory=dict)  # memory for them, full of NaN


def draw(pick: Picker, budget: int = 400_000) -> Problem:
    """One problem. `budget` bounds its multiplications."""
    seed = pick.integer(0, 2**31 - 1)
    dtype = pick.choice(tuple(DTYPES))
    float8 = pick.chance(0.3)
    head_dim = pick.choice(BIG_HEAD_DIMS if pick.chance(0.1) else HEAD_DIMS)
    head_dim_v = pick.choice(HEAD_DIMS) if pick.chance(0.2) else head_dim
    heads_k = pick.integer(1, 3)
    heads_q = heads_k * pick.choice((1, 2, 4, 5, 7, 8))
    page = pick.choice(PAGES)

    decode = pick.chance(0.4)
    pairs_left = max(1, budget // (heads_q * (head_dim + head_dim_v)))
    lengths = []
    for _ in range(pick.integer(0, 6)):
        keys = 0 if pick.chance(0.1) else pick.integer(1, 150)
        if pick.chance(0.2):  # where a page ends
            keys = page * pick.integer(1, 4) + pick.integer(-1, 1)
        queries = 1 if decode or pick.chance(0.4) else pick.integer(0, 40)
        if pick.chance(0.9):
            queries = min(queries, max(keys, int(decode)))  # new tokens are among the keys
        if queries * keys <= pairs_left:
            lengths.append((queries, keys))
            pairs_left -= queries * keys
    window = None
    if pick.chance(0.3):
        window = tuple(-1 if pick.chance(0.3) else pick.integer(0, 60) for _ in "lr")
    scales = pick.choice((None, "()", "(1,)", "(Hk,)", "number")) if float8 else None
    return Problem(
        seed=seed,
        dtype=dtype,
        float8=float8,
        heads_q=heads_q,
        heads_k=heads_k,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        page=page,
        lengths=tuple(lengths),
        decode=decode,
        rest=0 if decode else pick.choice((0, 0, 0, 3)),
        shared=pick.chance(0.2),
        slack=pick.choice((None, 0, 1, 100)),
        causal=not pick.chance(0.3),
        window=window,
        scale=pick.choice((None, None, 0.3, -0.2)),
        softcap=pick.choice((None, None, None, 1.0, 30.0)),
        sinks=pick.choice((None, None, "float32", dtype)),
        scales=scales,
        layouts=(
            pick.choice(INPUT_LAYOUTS),
            pick.choice(CACHE_LAYOUTS),
            pick.choice(("contiguous", "swapped", "padded", "sliced")),
        ),
        integers=tuple(pick.choice(("int32", "int64")) for _ in range(3)),
        spread=pick.choice((1.0, 1.0, 4.0)),
    )


def seeded(seed: int) -> Problem:
    return draw(Seeded(seed))


def problems():
    """The hypothesis strategy."""
    from hypothesis import strategies

    from problems import Drawn

    @strategies.composite
    def problem(draw_one):
        return draw(Drawn(draw_one), budget=100_000)

    return problem()


def empty_caches(layout, blocks, page, heads, dims, dtype, device="cpu") -> list[torch.Tensor]:
    """(blocks, page, heads, dim) for keys and for values, in memory of that layout; all NaN."""

    def nans(*size: int) -> torch.Tensor:
        return torch.full(size, math.nan).to(dtype).to(device)  # a GPU rounds NaN to other bits

    d, dv = dims
    if layout == "separate":
        return [nans(blocks, page, heads, d), nans(blocks, page, heads, dv)]
    if layout == "halves":
        rows = nans(blocks, page, heads, d + dv)
        return [rows[..., :d], rows[..., d:]]
    if layout == "head-major":
        return [nans(blocks, heads, page, size).transpose(1, 2) for size in dims]
    if layout == "head-major halves":
        rows = nans(blocks, heads, page, d + dv).transpose(1, 2)
        return [rows[..., :d], rows[..., d:]]
    if layout == "heads first":
        return [nans(heads, blocks, page, size).permute(1, 2, 0, 3) for size in dims]
    if layout == "uneven":
        each = [page * heads * size + 8 for size in dims]
        flat = [nans(blocks, size)[:, : size - 8] for size in each]
        return [x.unflatten(1, (page, heads, -1)) for x in flat]
    wide = [nans(2 * blocks, page + 1, heads + 1, 3 * size)[1::2, 1:, 1:, ::3] for size in dims]
    assert layout == "sliced" and wide[0].shape == (blocks, page, heads, d)
    return wide


def scales_of(kind: str | None, heads: int, generator) -> Any:
    """One of the ways to state a scale, and its values for the heads."""
    values = torch.rand(heads, generator=generator) + 0.3
    if kind is None:
        return None, torch.ones(heads)
    if kind == "(Hk,)":
        return values, values
    values = values[:1]
    given = {"()": values[0], "(1,)": values, "number": values[0].item()}[kind]
    return given, values.expand(heads)


def build(problem: Problem, device: str = "cpu") -> Pages:
    """The tensors of a problem; the same numbers every time and on every device."""
    p = problem
    generator = torch.Generator().manual_seed(p.seed)
    dtype = DTYPES[p.dtype]
    tokens = sum(n for n, _ in p.lengths) + p.rest
    keys = sum(m for _, m in p.lengths)

    def normal(*shape: int, std: float = 1.0) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * std).to(dtype).to(device)

    q = laid_out(normal(tokens, p.heads_q, p.head_dim, std=p.spread), p.layouts[0], generator)
    flat = [normal(keys, p.heads_k, size) for size in (p.head_dim, p.head_dim_v)]

    # Blocks in any order. Where sequences share a beginning, all have the keys of the first.
    counts = [-(-m // p.page) for _, m in p.lengths]
    order = torch.randperm(sum(counts) + 3, generator=generator).tolist()
    taken = iter(order)
    rows, starts, at = [], [], 0
    for _, m in p.lengths:
        starts.append(at)
        at += m
    for i, count in enumerate(counts):
        row = [next(taken) for _ in range(count)]
        if p.shared and i > 0:
            both = min(p.lengths[0][1], p.lengths[i][1]) // p.page
            row[:both] = rows[0][:both]
            for x in flat:
                both_keys = both * p.page
                x[starts[i] : starts[i] + both_keys] = x[starts[0] : starts[0] + both_keys]
        rows.append(row)

    options: dict[str, Any] = {
        name: getattr(p, name) for name in ("causal", "window", "scale", "softcap")
    }
    exact, rounded = list(flat), list(flat)
    if p.float8:
        for side, name in enumerate(("k_scale", "v_scale")):
            given, values = scales_of(p.scales, p.heads_k, generator)
            if given is not None:
                options[name] = given.to(device) if isinstance(given, torch.Tensor) else given
            flat[side] = flat[side].to(FLOAT8)
            # fp32 times fp8 in float64 is exact.
            exact[side] = flat[side].double() * values.double().to(device)[:, None]
            rounded[side] = exact[side].to(dtype)

    dims = (p.head_dim, p.head_dim_v)
    shape = (len(order), p.page, p.heads_k)
    caches = empty_caches(p.layouts[1], *shape, dims, flat[0].dtype, device)
    columns = max(counts, default=0) + int(torch.randint(0, 4, (), generator=generator))
    wide = (len(counts), columns + 2)  # rows further apart than they are long
    table = torch.tensor(POISON)[torch.randint(0, len(POISON), wide, generator=generator)]
    for i, row in enumerate(rows):
        table[i, : len(row)] = torch.tensor(row, dtype=torch.int64)
        m = p.lengths[i][1]
        for cache, x in zip(caches, flat, strict=True):
            for n, block in enumerate(row):
                part = x[starts[i] + n * p.page : starts[i] + min((n + 1) * p.page, m)]
                cache[block, : len(part)].copy_(part)

    def integers(values, which: int) -> torch.Tensor:
        return torch.as_tensor(values).to(getattr(torch, p.integers[which])).to(device)

    cu_q = torch.tensor([0, *(n for n, _ in p.lengths)]).cumsum(0)
    cu_k = torch.tensor([0, *(m for _, m in p.lengths)]).cumsum(0)
    if not p.decode:
        options["cu_seqlens_q"] = integers(cu_q, 2)
    if p.slack is not None:
        options["max_seqlen_q"] = max((n for n, _ in p.lengths), default=0) + p.slack
        options["max_seqlen_k"] = max((m for _, m in p.lengths), default=0) + p.slack
    tensors = {
        "q": q,
        "k_cache": caches[0],
        "v_cache": caches[1],
        "block_table": integers(table, 0)[:, :columns],
        "seq_lens": integers([m for _, m in p.lengths], 1),
    }
    scores = {name: options[name] for name in ("causal", "window", "scale", "softcap")}
    sinks = None
    if p.sinks is not None:
        sinks = (torch.randn(p.heads_q, generator=generator) * 3).to(DTYPES[p.sinks]).to(device)
        options["sinks"] = sinks
    grad_out = torch.zeros(tokens, p.heads_q, p.head_dim_v, device=device)
    both = [
        Case(q, *kv, grad_out, sinks=sinks, cu_q=cu_q, cu_k=cu_k, options=scores, needs="")
        for kv in (exact, rounded)
    ]
    out = laid_out(torch.full_like(grad_out, math.nan, dtype=dtype), p.layouts[2], generator)
    lse_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    lse = torch.full((tokens, p.heads_q), math.nan, dtype=lse_dtype, device=device)
    return Pages(tensors, options, *both, p.lengths, {"out": out, "lse": lse})


def ours(pages: Pages) -> dict[str, torch.Tensor]:
    """What the library says, written to memory full of NaN."""
    import flashmoe_science as fm

    memory = tuple(x.fill_(math.nan) for x in pages.results.values())
    out, lse = fm.flash_attention_paged(
        **pages.tensors, **pages.options, out=memory, return_lse=True
    )
    assert out is memory[0] and lse is memory[1]
    return {"out": out.clone(), "lse": lse.clone()}


def one(pages: Pages, i: int) -> dict[str, torch.Tensor]:
    """Sequence i alone, under the bounds that the whole call stated."""
    import flashmoe_science as fm

    start = sum(n for n, _ in pages.lengths[:i])
    queries = pages.lengths[i][0]
    tensors, options = dict(pages.tensors), dict(pages.options)
    options.setdefault("max_seqlen_q", max(1, tensors["q"].shape[0]))
    table = tensors["block_table"]
    options.setdefault("max_seqlen_k", table.shape[1] * tensors["k_cache"].shape[1])
    tensors["q"] = tensors["q"][start : start + queries]
    tensors["block_table"] = table[i : i + 1]
    tensors["seq_lens"] = tensors["seq_lens"][i : i + 1]
    if "cu_seqlens_q" in options:
        options["cu_seqlens_q"] = torch.tensor([0, queries], device=table.device)
    out, lse = fm.flash_attention_paged(**tensors, **options, return_lse=True)
    return {"out": out, "lse": lse}


def complaints(pages: Pages) -> list[str]:
    """What is wrong with our results, against the oracle and against sequences alone."""
    got = ours(pages)
    found = oracle.compare(pages.exact, got, pages.rounded)
    start = 0
    for i, (n, _) in enumerate(pages.lengths):
        alone = one(pages, i)
        for name, x in got.items():
            if not oracle.same_bits(x[start : start + n], alone[name]):
                found.append(f"{name}: sequence {i} alone has other bits")
        start += n
    return found
