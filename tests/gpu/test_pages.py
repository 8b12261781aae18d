"""Attention over the pages of a cache, and writing to one: the problems of the CPU's tests.

And what only a GPU can get wrong: lengths that change in a captured graph, lengths and blocks that
cannot be, splits of long sequences, tiles of many and of few rows in one call.
"""

from __future__ import annotations

from dataclasses import replace
from math import nan

import pytest
import torch
from families import forced
from helpers import DEVICE, integers, normal, on_a_gpu

import flashmoe_science as fm
import oracle
import pages
from oracle import same_bits
from pages import FLOAT8, Problem

pytestmark = [pytest.mark.kernels(role="attention_paged"), pytest.mark.usefixtures("family")]

CHUNK = 100  # random problems in one test


def taken(problem: Problem) -> bool:
    """Whether CUDA kernels take the problem's dtype."""
    dtypes = ("float16",) if forced() == "sm75" else ("float16", "bfloat16")
    return problem.dtype in dtypes


def accept(problem: Problem) -> None:
    found = pages.complaints(pages.build(problem, DEVICE))
    assert not found, "\n  ".join([str(problem), *found])


def random_problem(seed: int) -> Problem:
    problem = pages.seeded(seed)
    dtype = "float16" if forced() == "sm75" or seed % 2 else "bfloat16"
    sinks = None if problem.sinks is None else "float32" if seed % 3 else dtype
    return replace(problem, dtype=dtype, sinks=sinks)


@pytest.mark.parametrize("first", range(0, 2000, CHUNK))
def test_random_problems(first):
    """Against the oracle, and each sequence alone bit by bit."""
    failures = []
    for seed in range(first, first + CHUNK):
        problem = random_problem(seed)
        if found := pages.complaints(pages.build(problem, DEVICE)):
            failures.append("\n  ".join([f"seed {seed}: {problem}", *found]))
    assert not failures, "\n".join([f"{len(failures)} of {CHUNK} failed", *failures[:5]])


BASE = Problem(
    seed=1,
    dtype="float16",
    float8=False,
    heads_q=8,
    heads_k=2,
    head_dim=128,
    head_dim_v=128,
    page=16,
    lengths=((1, 300), (1, 1), (1, 4097), (1, 0)),
    decode=True,
)


@pytest.mark.parametrize("float8", [False, True], ids=["16 bits", "fp8"])
@pytest.mark.parametrize("d", [64, 80, 128, 256, 512])
@pytest.mark.parametrize("group", [1, 4, 5, 7, 16, 17, 71])
def test_groups_and_head_dims(group, d, float8):
    accept(
        replace(BASE, heads_q=2 * group, head_dim=d, head_dim_v=d, float8=float8, sinks="float32")
    )


# Heads of a group and queries: 1 to 16 rows. Up to 8 have a tile of their own if no sequence of the
# call may have more.
UP_TO_8 = ((1, 1), (1, 2), (1, 3), (1, 4), (3, 1), (3, 2), (4, 1), (4, 2), (5, 1), (7, 1), (8, 1))
UP_TO_16 = ((3, 3), (3, 4), (4, 3), (4, 4), (8, 2), (12, 1), (13, 1), (16, 1))
FEW_ROWS = pytest.mark.parametrize(("group", "queries"), (*UP_TO_8, *UP_TO_16))
DTYPES = pytest.mark.parametrize("dtype", ["float16", "bfloat16"])


def few_rows(group, queries, **changes) -> Problem:
    lengths = ((queries, 300), (queries, 17), (1, 1500), (queries, queries), (queries, 0))
    scales = "(Hk,)" if changes.get("float8") else None
    problem = replace(BASE, decode=False, heads_q=2 * group, lengths=lengths, scales=scales)
    problem = replace(problem, **changes)
    if not taken(problem):
        pytest.skip("another family has bf16")
    return problem


@pytest.mark.parametrize("float8", [False, True], ids=["16 bits", "fp8"])
@DTYPES
@pytest.mark.parametrize("d", [64, 128, 256, 512])
@FEW_ROWS
def test_few_rows(group, queries, d, dtype, float8):
    sizes = {"head_dim": d, "head_dim_v": d}
    accept(few_rows(group, queries, dtype=dtype, float8=float8, sinks="float32", **sizes))


@pytest.mark.parametrize(
    "rule",
    [{}, {"window": (37, 0)}, {"causal": False}, {"softcap": 2.0}, {"scale": -0.2}, {"page": 5}],
    ids=["causal", "window", "all", "softcap", "scale", "page"],
)
@pytest.mark.parametrize("float8", [False, True], ids=["16 bits", "fp8"])
@DTYPES
@pytest.mark.parametrize("d", [64, 128, 256, 512])
def test_bits_do_not_depend_on_the_bound_on_queries(d, dtype, float8, rule):
    """That is, on whether the tile has 8 rows or 16."""
    sizes = {"head_dim": d, "head_dim_v": d, "spread": 4.0}
    for group, queries in ((1, 1), (4, 1), (4, 2), (3, 2), (7, 1), (8, 1)):
        made = pages.build(
            few_rows(group, queries, dtype=dtype, float8=float8, **sizes, **rule), DEVICE
        )
        want = call(made)  # at most 8 rows
        for bound in (9, 16, 100):
            got = call(made, max_seqlen_q=bound)
            assert all(same_bits(a, b) for a, b in zip(got, want, strict=True)), (group, bound)


@pytest.mark.parametrize("page", [1, 8, 16, 24, 64, 256])
@pytest.mark.parametrize("layout", pages.CACHE_LAYOUTS)
def test_long_sequences(page, layout):
    lengths = ((1, 20_011), (1, 7_919), (1, 255), (1, 257))
    accept(replace(BASE, page=page, lengths=lengths, layouts=("contiguous", layout, "contiguous")))


@pytest.mark.parametrize("float8", [False, True], ids=["16 bits", "fp8"])
@DTYPES
@pytest.mark.parametrize("window", [None, (100, 0), (700, 64)])
@pytest.mark.parametrize("page", [1, 5, 16, 64, 128])
@pytest.mark.parametrize("d", [64, 80, 128, 256])
def test_chunks_beside_decodes(d, page, window, float8, dtype):
    """Few queries, some, and many: each has a shape of tile of its own."""
    lengths = ((1, 3000), (130, 1000), (4, 515), (0, 40), (16, 900), (257, 257), (64, 64), (65, 9))
    problem = replace(BASE, decode=False, lengths=lengths, page=page, window=window, rest=3)
    problem = replace(problem, dtype=dtype, float8=float8, scales="(Hk,)" if float8 else None)
    if not taken(problem):
        pytest.skip("another family has bf16")
    accept(replace(problem, head_dim=d, head_dim_v=d))


@pytest.mark.parametrize("layout", pages.CACHE_LAYOUTS)
@pytest.mark.parametrize("page", [1, 8, 24, 32, 64, 256])
@pytest.mark.parametrize("dims", [(128, 128), (192, 256), (256, 64), (128, 64), (96, 128)])
def test_chunks_of_any_layout(dims, page, layout):
    """Where rows can come whole, 64 columns at a time, and one by one."""
    lengths = ((129, 257), (64, 3), (100, 0), (200, 128), (127, 1000))
    problem = replace(BASE, decode=False, lengths=lengths, page=page)
    problem = replace(problem, head_dim=dims[0], head_dim_v=dims[1])
    for heads in ((8, 2), (3, 1)):
        problem = replace(problem, heads_q=heads[0], heads_k=heads[1])
        accept(replace(problem, layouts=("contiguous", layout, "contiguous"), window=(500, 5)))


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("d", [64, 96, 128, 256])
def test_a_cache_of_one_block(d, heads):
    """How far blocks are apart means nothing there; and there is no block 1."""
    two = [normal(2, 256, heads, d) for _ in "kv"]
    q, lens = normal(129, 4, d), integers(200)
    options = {"cu_seqlens_q": integers(0, 129), "max_seqlen_q": 129, "max_seqlen_k": 200}
    out = [
        fm.flash_attention_paged(q, *caches, integers(block)[None], lens, **options)
        for caches, block in ((two, 0), ([x[:1] for x in two], 0), ([x[:1] for x in two], 1))
    ]
    assert same_bits(out[0], out[1]) and out[0].isfinite().all() and out[2].isnan().all()


@pytest.mark.parametrize("float8", [False, True], ids=["16 bits", "fp8"])
@pytest.mark.parametrize("dim", [0, 1, 2], ids=["blocks", "rows", "heads"])
def test_chunks_over_what_is_broadcast(dim, float8):
    """No tensor map describes such a cache."""
    problem = replace(BASE, decode=False, lengths=((129, 257), (70, 300)), float8=float8)
    made = pages.build(problem, DEVICE)
    shape, dtype = made.tensors["k_cache"].shape, made.tensors["k_cache"].dtype
    size = [1 if i == dim else n for i, n in enumerate(shape)]
    there = {x: normal(*size).to(dtype).expand(shape) for x in ("k_cache", "v_cache")}
    copied = {x: y.contiguous() for x, y in there.items()}
    got, want = (
        fm.flash_attention_paged(**{**made.tensors, **x}, **made.options) for x in (there, copied)
    )
    assert same_bits(got, want) and want.isfinite().all()


# More items than any chip holds CTAs: each takes several, and loads the next before one ends. Some
# have no key, or fewer tiles than there are teams.
MANY = tuple(
    ((1, 1, 3, 1, 20)[i % 5], (700, 1, 65, 0, 15, 64, 17, 300, 49)[i % 9]) for i in range(450)
)


@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("float8", [False, True], ids=["16 bits", "fp8"])
@pytest.mark.parametrize("d", [64, 128, 256, 512])
def test_many_items_of_a_cta(d, float8, page):
    problem = replace(BASE, decode=False, lengths=MANY, page=page, float8=float8)
    made = pages.build(replace(problem, head_dim=d, head_dim_v=d), DEVICE)
    assert not (found := oracle.compare(made.exact, pages.ours(made), made.rounded)), found
    for i in (0, 4, 7, 449):  # alone: the same bits
        start = sum(n for n, _ in MANY[:i])
        for name, x in pages.one(made, i).items():
            assert same_bits(made.results[name][start : start + MANY[i][0]], x), (name, i)


@pytest.mark.parametrize("float8", [False, True], ids=["16 bits", "fp8"])
def test_a_wrong_block_does_not_reach_the_item_before(float8):
    """Blocks of the next item are looked up early."""
    made = pages.build(replace(BASE, decode=False, lengths=MANY, float8=float8), DEVICE)
    right, start = call(made), 0
    wrong = torch.zeros(right[0].shape[0], dtype=torch.bool, device=DEVICE)
    blind = torch.zeros_like(wrong)  # a query that sees no key needs no block
    for i, (queries, keys) in enumerate(MANY):
        if i % 3 == 1 and keys > 0:
            made.tensors["block_table"][i, 0] = -1
            wrong[start : start + queries] = True
            blind[start : start + max(queries - keys, 0)] = True
        start += queries
    for x, want in zip(call(made), right, strict=True):
        assert torch.isnan(x[wrong & ~blind]).all() and same_bits(x[~wrong], want[~wrong])


@pytest.mark.parametrize("float8", [False, True], ids=["16 bits", "fp8"])
@pytest.mark.parametrize("page", [1, 8, 64])
def test_chunks_with_sinks(page, float8):
    lengths = ((200, 900), (1, 700), (64, 70))
    problem = replace(BASE, decode=False, lengths=lengths, page=page, sinks="float32")
    accept(replace(problem, float8=float8, scales="()" if float8 else None))


@pytest.mark.parametrize("dims", [(64, 64), (96, 128), (128, 48), (80, 80), (32, 16), (128, 128)])
def test_chunks_over_fp8_of_any_head_dim(dims):
    """Also with rows that see nothing, and queries before the first key."""
    lengths = ((129, 257), (64, 3), (100, 0), (200, 128), (127, 1000))
    for layout in ("separate", "halves", "head-major"):
        problem = replace(BASE, decode=False, lengths=lengths, page=24, float8=True, scales="(Hk,)")
        problem = replace(problem, head_dim=dims[0], head_dim_v=dims[1])
        accept(replace(problem, layouts=("contiguous", layout, "contiguous")))
        accept(replace(problem, layouts=("contiguous", layout, "contiguous"), window=(70, 5)))


@DTYPES
def test_every_fp8_number_in_a_chunk(dtype):
    """Each as a value of the one key that a query of its own sees, and as a key of NaN or not."""
    if dtype == "bfloat16" and forced() == "sm75":
        pytest.skip("another family has bf16")
    dtype = getattr(torch, dtype)
    numbers = torch.arange(256, dtype=torch.uint8, device=DEVICE).view(FLOAT8)
    v_cache = numbers.view(256, 1, 1, 1).expand(256, 1, 1, 64).contiguous()
    k_cache = torch.ones(256, 1, 1, 64, device=DEVICE).to(FLOAT8)
    table = torch.arange(256, device=DEVICE, dtype=torch.int32)[None]
    lens = integers(256)
    q = normal(256, 1, 64).to(dtype)
    options = {"cu_seqlens_q": integers(0, 256), "max_seqlen_q": 256, "max_seqlen_k": 256}
    window = {"causal": True, "window": (0, 0)}
    out = fm.flash_attention_paged(q, k_cache, v_cache, table, lens, **options, **window)
    want = numbers.to(dtype)[:, None].expand(256, 64)
    torch.testing.assert_close(out[:, 0], want, rtol=0, atol=0, equal_nan=True)
    k_cache = v_cache.clone()  # a key of NaN makes the row NaN that sees it, and no other
    ones = torch.ones_like(k_cache.float()).to(FLOAT8)
    out = fm.flash_attention_paged(q, k_cache, ones, table, lens, **options, **window)
    assert (out[:, 0, 0].isnan() == numbers.to(dtype).isnan()).all()


@pytest.mark.parametrize("scale", [-0.7, 0.0, 1e-42, nan])
def test_scales_of_keys_that_nobody_has(scale):
    """A chunk's keys one by one, as fewer queries would have it."""
    made = pages.build(replace(BASE, decode=False, lengths=((70, 200),), float8=True), DEVICE)
    made.options["k_scale"] = torch.tensor(scale, device=DEVICE)
    whole = call(made)
    tensors = dict(made.tensors, q=made.tensors["q"][-3:])
    few = {**made.options, "cu_seqlens_q": integers(0, 3), "max_seqlen_q": 3}
    for x, want in zip(
        whole, fm.flash_attention_paged(**tensors, **few, return_lse=True), strict=True
    ):
        torch.testing.assert_close(x[-3:], want, rtol=2e-3, atol=2e-3, equal_nan=True)


@pytest.mark.parametrize("float8", [False, True], ids=["16 bits", "fp8"])
def test_nan_behind_a_mask(float8):
    """In V at the last key, which only the last query of a chunk sees."""
    for queries in (2, 3, 40, 200):
        problem = replace(BASE, decode=False, lengths=((queries, 300), (1, 70)), float8=float8)
        made = pages.build(problem, DEVICE)
        block = int(made.tensors["block_table"][0, 299 // 16])
        made.tensors["v_cache"][block, 299 % 16, 0, 5] = nan
        out = pages.ours(made)["out"]
        hit = torch.isnan(out[:queries])
        group = problem.heads_q // problem.heads_k
        assert hit[-1, :group, 5].all() and hit.sum() == group


def call(made, **changes):
    return fm.flash_attention_paged(**{**made.tensors, **made.options, **changes}, return_lse=True)


# Sequences after those that a test is about. With as many, no CTA of a decode has one item alone:
# they share out the work and take tickets.
CROWDS = pytest.mark.parametrize("crowd", [(), ((1, 30),) * 1500], ids=["few", "many"])


@CROWDS
@pytest.mark.parametrize("queries", [1, 5, 100], ids=["decode", "some", "chunk"])
@pytest.mark.parametrize("wrong", ["too long", "negative", "block", "negative block"])
@pytest.mark.parametrize("float8", [False, True], ids=["16 bits", "fp8"])
def test_what_cannot_be_is_nan_for_its_sequence(queries, wrong, crowd, float8):
    lengths = ((1, 600), (queries, 700), (2, 50), *crowd)
    problem = replace(BASE, decode=False, lengths=lengths, slack=0, float8=float8)
    made = pages.build(problem, DEVICE)
    right = call(made)
    if "block" in wrong:
        blocks = made.tensors["k_cache"].shape[0]
        made.tensors["block_table"][1, 3] = -1 if "negative" in wrong else blocks
    else:
        made.tensors["seq_lens"][1] = -1 if wrong == "negative" else 100_000
    for x, want in zip(call(made), right, strict=True):
        assert torch.isnan(x[1 : 1 + queries]).all()
        assert same_bits(x[:1], want[:1]) and same_bits(x[1 + queries :], want[1 + queries :])


@CROWDS
def test_cumulative_lengths_that_fall_are_nan(crowd):
    problem = replace(BASE, decode=False, lengths=((3, 60), (5, 70), (2, 50), *crowd))
    made = pages.build(problem, DEVICE)
    made.options["cu_seqlens_q"][1:3] = integers(8, 3)
    out, lse = call(made)
    assert torch.isnan(out).all() and torch.isnan(lse).all()


@on_a_gpu
@CROWDS
@pytest.mark.parametrize("float8", [False, True], ids=["16 bits", "fp8"])
def test_a_captured_graph_serves_other_lengths(float8, crowd):
    """Captured with the bounds; then lengths shrink, requests become padding, and grow again."""
    lengths = ((1, 5000), (100, 3000), (1, 2000), (1, 1), *crowd)
    problem = replace(BASE, decode=False, lengths=lengths, float8=float8, slack=0)
    made = pages.build(problem, DEVICE)
    memory = (made.results["out"], made.results["lse"])
    lens, cu = made.tensors["seq_lens"], made.options["cu_seqlens_q"]
    options = {**made.tensors, **made.options, "out": memory, "return_lse": True}
    fm.flash_attention_paged(**options)  # loads the kernels
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fm.flash_attention_paged(**options)
    for keys, queries in (
        ((5000, 3000, 2000, 1), (1, 100, 1, 1)),
        ((17, 200, 2000, 1), (1, 3, 0, 0)),
        ((0, 0, 0, 0), (0, 0, 0, 0)),
        ((4999, 64, 1, 0), (1, 64, 1, 0)),
    ):
        lens[:4] = integers(*keys)
        cu.copy_(torch.tensor([0, *queries, *(n for n, _ in crowd)]).cumsum(0))
        for x in memory:
            x.fill_(nan)
        graph.replay()
        got = [x.clone() for x in memory]
        want = call(made)
        assert all(same_bits(a, b) for a, b in zip(got, want, strict=True)), (keys, queries)


# Writing to a cache.

APPENDED = ("float32", "float16", "bfloat16")


@pytest.mark.parametrize("layout", pages.CACHE_LAYOUTS)
@pytest.mark.parametrize("dtype", APPENDED)
@pytest.mark.parametrize("float8", [False, True], ids=["as it is", "fp8"])
@pytest.mark.parametrize("d", [128, 64, 20, 3])
def test_append_writes_what_the_cpu_writes(d, float8, dtype, layout):
    dtype, heads, page, blocks, tokens = getattr(torch, dtype), 3, 5, 40, 130
    k, v = (normal(tokens, heads, size, dtype=dtype, std=100) for size in (d, d + 4))
    k[0, 0, 0], v[1, 0, 0], k[2, 0, 0] = nan, 1e4, -1e4
    slots = torch.randperm(blocks * page)[:tokens]
    slots[3::11] += blocks * page
    slots[::7] = -1
    scales = {}
    if float8:
        scales = {"k_scale": torch.rand(heads) + 0.5, "v_scale": torch.tensor(0.3)}
    results = []
    for device in (DEVICE, "cpu"):
        cache = pages.empty_caches(
            layout, blocks, page, heads, (d, d + 4), FLOAT8 if float8 else dtype, device
        )
        fm.kv_cache_append(
            k.to(device),
            v.to(device),
            *cache,
            slots.to(device),
            **{name: x.to(device) for name, x in scales.items()},
        )
        results.append([x.cpu().view(torch.uint8) if float8 else x.cpu() for x in cache])
    for got, want in zip(*results, strict=True):
        if float8:  # a NaN has either sign
            got, want = (
                (x & 0x7F == 0x7F, torch.where(x & 0x7F == 0x7F, 0, x)) for x in (got, want)
            )
            assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
        else:
            assert same_bits(got, want)


@on_a_gpu
def test_append_then_attend():
    """What was appended is what is read: the oracle of the dense call on the same numbers."""
    heads, d, page, keys = 2, 128, 16, 100
    k, v = (normal(keys, heads, d) for _ in "kv")
    cache = pages.empty_caches("halves", 12, page, heads, (d, d), torch.float16, DEVICE)
    table = torch.randperm(12, device=DEVICE)[: -(-keys // page)].int()
    at = torch.arange(keys, device=DEVICE)
    fm.kv_cache_append(k, v, *cache, table[at // page] * page + at % page)
    q = normal(1, 4 * heads, d)
    out = fm.flash_attention_paged(q, *cache, table[None], integers(keys))
    want = oracle.Case(
        q, k, v, torch.zeros_like(q), cu_q=integers(0, 1), cu_k=integers(0, keys), needs=""
    )
    assert not oracle.compare(want, {"out": out})
