"""What the benchmark can run: one entry of WORKLOADS each, and nothing about them elsewhere.

A workload makes a Case from a shape. To add one, write a function that makes its Case and add an
entry at the end of this file; attention.py has the functions of those that are here, options.py the
workloads of second derivatives, fp32, dropout and masks, paged.py those of attention over pages,
append.py of writing to a cache, moe.py of mixtures of experts, training.py of whole models.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping

from flashmoe_science.bench.append import APPEND_WORKLOADS
from flashmoe_science.bench.attention import (
    NONDETERMINISTIC,
    ROUNDED_BIAS,
    WITHOUT_BIAS,
    make_crystals,
    make_decode,
    make_dense,
    make_deterministic,
    make_diffusion,
    make_fp32_bias,
    make_mixed_lengths,
    make_pair_bias,
    make_ragged,
    make_triangle,
)
from flashmoe_science.bench.case import Workload
from flashmoe_science.bench.moe import MOE_WORKLOADS
from flashmoe_science.bench.options import OPTION_WORKLOADS
from flashmoe_science.bench.paged import PAGED_WORKLOADS
from flashmoe_science.bench.ragged import MOST_ATOMS
from flashmoe_science.bench.training import TRAINING_WORKLOADS


def gpu_dense_shape(dim: int, length: int, options: str = "") -> str:
    """batch * length = 16,384 and heads * dim = 2,048, the sizes published comparisons use."""
    return f"{16384 // length},{round(2048 / dim)},{length},{dim}{options}"


def gpu_dense_shapes(dims: Iterable[int], lengths: Iterable[int]) -> tuple[str, ...]:
    return tuple(
        gpu_dense_shape(dim, length, causal)
        for dim in dims
        for causal in ("", ",causal")
        for length in lengths
    )


# Rows, and the ones whose speed (their mean) they are held to: as many FLOPs, or nearly, without
# what the row is about. The workloads measure what is in these tables.
Beside = Mapping[str, tuple[str, ...]]

HEAD_DIMS: Beside = {
    gpu_dense_shape(dim, length, causal): tuple(
        gpu_dense_shape(neighbour, length, causal) for neighbour in neighbours
    )
    for dim, neighbours in {96: (64, 128), 192: (128, 256)}.items()
    for causal in ("", ",causal")
    for length in (1024, 4096)
}
GQA: Beside = {
    f"4,{heads},4096,128,kv8{causal}": (f"4,{heads},4096,128{causal}",)
    for heads in (32, 64)
    for causal in ("", ",causal")
}
# Query and key heads of language models, causal, and groups of other sizes.
GROUPS = tuple(
    f"{16384 // length},{heads},{length},128,kv{kv_heads},causal"
    for heads, kv_heads, lengths in (
        (32, 8, (2048, 8192)),  # and 4,096 above
        *((heads, kv, (2048, 4096, 8192)) for heads, kv in ((32, 4), (28, 4))),
        *((heads, kv, (4096,)) for heads, kv in ((40, 8), (64, 4), (16, 8))),
    )
    for length in lengths
)
# Lengths that fill no tile, heads that fill the SMs unevenly, groups of 5, 7, 8 and 16.
UNEVEN = tuple(
    f"{shape}{causal}"
    for shape in (
        "4,16,1000,128",
        "3,7,1777,64",
        "1,13,4099,64",
        "5,11,2047,96",
        "3,7,1777,128",
        "1,5,8191,128",
        "2,9,3001,192",
        "3,5,1533,256",
        "5,10,1250,128,kv2",
        "2,21,2500,64,kv3",
        "8,16,1024,256,kv2",
        "1,16,5003,128,kv1",
    )
    for causal in ("", ",causal")
)
WINDOW: Beside = {
    gpu_dense_shape(dim, 16384, ",causal,w1024"): (gpu_dense_shape(dim, 16384, ",causal"),)
    for dim in (64, 128)
}
# Of lengths spread evenly up to 4,096 the average FLOP belongs to a sequence of 3,072 tokens.
MIXED_LENGTHS: Beside = {
    f"64,16,4096,128{causal}": (f"44,16,3072,128{causal},even",) for causal in ("", ",causal")
}


def shapes_of(table: Beside) -> tuple[str, ...]:
    """Every row of a table, each once, after those it is held to."""
    return tuple(dict.fromkeys(s for row, others in table.items() for s in (*others, row)))


def small_shapes() -> tuple[str, ...]:
    """16,384 tokens in short sequences: small head dims, and 64 with lengths that fill no tile."""
    sizes = [(n, dim) for dim in (16, 32, 48) for n in (64, 128, 256, 512, 1024)]
    sizes += [(n, 64) for n in (200, 300, 400)]
    return tuple(f"{16384 // n},{32 if dim < 64 else 16},{n},{dim}" for n, dim in sizes)


# What a launch costs shows in these.
SMALL_CALLS = ("2,8,64,32", "8,8,256,64")

EVEN_PAIR_BIAS = ("8,8,256,64", "4,16,384,64", "4,16,768,64", "2,16,1024,64", "1,16,2048,64")
# Lengths that fill no tile and leave rows of a bias unaligned.
ODD_PAIR_BIAS = (
    *("8,16,255,32", "4,16,511,32", "2,16,1023,32", "1,16,2047,32"),
    *("4,16,511,48", "2,16,1023,48"),
)


def crystal_shapes(count: int) -> tuple[str, ...]:
    """Few heads as in language models, and many small ones as equivariant models have."""
    return (f"{count},8,{MOST_ATOMS},64", f"{count},48,{MOST_ATOMS},16")


# PyTorch's flash takes a mask on a CPU alone (there without its gradient), varlen_attn a GPU alone.
BIASED = {"cpu": ("flash", "math"), "cuda": ("cudnn", "efficient", "math", "flex")}
PADDED = {"cpu": ("flash", "math"), "cuda": ("cudnn", "efficient", "math")}
# For rows that are held to other rows of ours: peers that say where those stand.
FEW_PEERS = {"cpu": ("math",), "cuda": ("flash", "cudnn")}
DENSE_OPTIONS = frozenset({"causal", "kv", "window"})

WORKLOADS = {
    "dense": Workload(
        "attention without a bias, (B, H, S, D)",
        {
            "cpu": ("4,8,256,64", "1,8,1024,64", "1,8,512,128", "64,8,30,16"),
            "cuda": gpu_dense_shapes((64, 128, 256), (512, 1024, 2048, 4096, 8192, 16384)),
        },
        make_dense,
        options=DENSE_OPTIONS,
        own_passes={"cuda": ("fwd", "bwd")},  # the forward pass would blur the backward's ratio
    ),
    "head_dims": Workload(
        "dense with head dims 96 and 192, beside their neighbours",
        {"cpu": ("1,2,128,96", "1,2,128,192"), "cuda": shapes_of(HEAD_DIMS)},
        make_dense,
        peers_on=FEW_PEERS,
        own_passes={"cpu": ("fwd",), "cuda": ("fwd", "bwd")},
    ),
    "uneven": Workload(
        "dense with odd lengths, numbers of heads that fill no GPU evenly, and groups of all sizes",
        {"cpu": ("1,3,129,40", "1,5,77,64,kv1,causal"), "cuda": UNEVEN},
        make_dense,
        peers_on=FEW_PEERS,
        own_passes={"cpu": ("fwd",), "cuda": ("fwd", "bwd")},
    ),
    "gqa": Workload(
        "dense with groups of query heads on a key head, beside as many key heads as query heads",
        {"cpu": ("1,8,128,64", "1,8,128,64,kv2"), "cuda": (*shapes_of(GQA), *GROUPS)},
        make_dense,
        peers_on=FEW_PEERS,
        own_passes={"cpu": ("fwd",), "cuda": ("fwd", "bwd")},
    ),
    "window": Workload(
        "dense with a window of the last N keys (wN), beside all of them; PyTorch gets a mask",
        {"cpu": ("1,2,256,64,causal", "1,2,256,64,causal,w32"), "cuda": shapes_of(WINDOW)},
        make_dense,
        options=DENSE_OPTIONS,
        peers_on=FEW_PEERS,
        own_passes={"cpu": ("fwd",), "cuda": ("fwd",)},
    ),
    "mixed_lengths": Workload(
        "B sequences of 100 to S tokens, packed, beside dense ones of S (even) with as many FLOPs",
        {"cpu": ("8,2,128,64", "5,2,96,64,even"), "cuda": shapes_of(MIXED_LENGTHS)},
        make_mixed_lengths,
        options=frozenset({"causal", "kv", "even"}),
        peers_on={"cpu": ("math",), "cuda": ("flash", "cudnn", "varlen")},
        own_passes={"cpu": ("fwd",), "cuda": ("fwd",)},
    ),
    "small": Workload(
        "dense with the small head dims and short sequences of science models",
        {"cpu": ("4,8,256,16", "4,8,256,32", "4,8,256,48"), "cuda": small_shapes()},
        make_dense,
        in_graph=True,
    ),
    "small_calls": Workload(
        "dense calls of a few microseconds",
        {"cpu": SMALL_CALLS, "cuda": SMALL_CALLS},
        make_dense,
        in_graph=True,
    ),
    "decode": Workload(
        "one query over S keys",
        {
            "cpu": ("1,32,8192,128,kv8",),
            "cuda": tuple(f"1,32,{length << 10},128,kv8" for length in (8, 16, 32, 64, 128)),
        },
        make_decode,
        options=frozenset({"kv"}),  # causal removes nothing, and means another thing in PyTorch
        passes=("fwd",),
        in_graph=True,
    ),
    "deterministic": Workload(
        "dense with deterministic=True, next to our own without it",
        {
            "cpu": ("1,8,1024,64",),
            "cuda": gpu_dense_shapes((64, 128, 256), (1024, 4096, 16384)),
        },
        make_deterministic,
        peers_on={"cpu": (NONDETERMINISTIC,), "cuda": (NONDETERMINISTIC,)},
        passes=("bwd", "fwd+bwd"),
        own_passes={"cpu": ("bwd",), "cuda": ("bwd",)},
    ),
    "pair_bias": Workload(
        "a learned bias of (B, H, S, S) and its gradient",
        {
            "cpu": ("16,8,64,32", "4,8,256,32", "1,16,512,64"),
            "cuda": (*EVEN_PAIR_BIAS, *ODD_PAIR_BIAS),
        },
        make_pair_bias,
        options=frozenset({"kv"}),
        peers_on=BIASED,
        in_graph=True,
    ),
    "fp32_bias": Workload(
        "pair_bias with the bias and its gradient in fp32, next to our own with a bias in 16 bits",
        {
            "cpu": ("4,8,256,32",),
            "cuda": ("8,8,256,64", "4,16,768,64", "1,16,2048,64", "2,16,1023,32"),
        },
        make_fp32_bias,
        options=frozenset({"kv"}),
        peers_on={"cpu": (ROUNDED_BIAS,), "cuda": (ROUNDED_BIAS,)},
        in_graph=True,
    ),
    "diffusion": Workload(
        "B samples of S tokens share a learned bias of (1, H, S, S), as in diffusion transformers",
        {"cpu": ("8,4,64,48",), "cuda": ("48,16,384,48", "48,16,768,48")},
        make_diffusion,
        options=frozenset({"kv"}),
        peers_on=BIASED,
        in_graph=True,
    ),
    "triangle": Workload(
        "B rows of S tokens share a learned bias of (1, H, S, S); its gradient is summed over them",
        {
            "cpu": tuple(f"{n},4,{n},32" for n in (32, 33, 64)),
            "cuda": tuple(f"{n},4,{n},32" for n in (256, 257, 381, 384, 512, 768)),
        },
        make_triangle,
        options=frozenset({"kv"}),
        peers_on=BIASED,
        in_graph=True,
    ),
    "ragged": Workload(
        "B sequences of S tokens on average, packed; PyTorch gets them padded",
        {
            "cpu": ("64,8,31,16", "16,8,128,64"),
            "cuda": ("256,8,31,16", "256,16,31,32", "64,16,512,64"),
        },
        make_ragged,
        peers_on=PADDED | {"cuda": (*PADDED["cuda"], "varlen")},
    ),
    "ragged_bias": Workload(
        "ragged with a packed pair bias and its gradient",
        {"cpu": ("64,8,31,16", "16,8,128,32"), "cuda": ("256,8,31,16", "64,16,256,32")},
        functools.partial(make_ragged, with_bias=True),
        options=frozenset({"kv"}),
        peers_on=PADDED,
    ),
    "crystals": Workload(
        "B crystals of at most S atoms, as many as those of the Materials Project have, packed",
        {"cpu": crystal_shapes(32), "cuda": crystal_shapes(4096)},
        make_crystals,
        options=frozenset({"kv"}),
        peers_on=PADDED | {"cuda": ("varlen", "efficient")},
        in_graph=True,
    ),
    "crystals_bias": Workload(
        "crystals with a packed pair bias and its gradient, on a GPU next to our own without it",
        {"cpu": crystal_shapes(32), "cuda": crystal_shapes(4096)},
        functools.partial(make_crystals, with_bias=True),
        options=frozenset({"kv"}),
        peers_on=PADDED | {"cuda": (WITHOUT_BIAS, "efficient")},
        in_graph=True,
    ),
    **OPTION_WORKLOADS,
    **PAGED_WORKLOADS,
    **APPEND_WORKLOADS,
    **MOE_WORKLOADS,
    **TRAINING_WORKLOADS,
}
