"""What the benchmark can run: one entry of WORKLOADS each, and nothing about them elsewhere.

A workload makes a Case from a shape: the tensors, our call, the same thing said with PyTorch's math
backend (the correctness reference, in any dtype), and the peers. To add a workload, write a
function that makes its Case and add an entry at the end of this file; paged.py has those of
attention over pages, append.py of writing to a cache, moe.py of mixtures of experts.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from flashmoe_science import explain, flash_attention, flash_attention_varlen
from flashmoe_science.bench import dropout
from flashmoe_science.bench.append import APPEND_WORKLOADS
from flashmoe_science.bench.case import (
    Case,
    Implementation,
    Shape,
    Tensors,
    Workload,
    tokens_first,
)
from flashmoe_science.bench.moe import MOE_WORKLOADS
from flashmoe_science.bench.paged import PAGED_WORKLOADS
from flashmoe_science.bench.peers import (
    CompiledFlex,
    of_heads,
    sdpa_dense,
    sdpa_peers,
    window_mask,
)
from flashmoe_science.bench.ragged import (
    MOST_ATOMS,
    Ragged,
    crystal_lengths,
    ragged_lengths,
    uniform_lengths,
)
from flashmoe_science.bench.second import FIRST, SECOND, twice

# Our own calls as peers, for rows about what an option costs.
NONDETERMINISTIC = "nondeterministic"  # a backward pass that is free to add in any order
WITHOUT_BIAS = "without_bias"
ROUNDED_BIAS = "rounded_bias"  # in the dtype of q, k and v
MASK_AS_BIAS = "mask_as_bias"  # 0 and -inf in the dtype of q, k and v
WITHOUT_DROPOUT = "without_dropout"

DROPPED = 0.1  # of the workload dropout
SEED = 2**40 + 3


def normal(*size: int, like: torch.Tensor) -> torch.Tensor:
    """Standard normal numbers with the dtype and device of like."""
    return torch.randn(*size, dtype=torch.float32, device=like.device).to(like.dtype)


def ours_dense(leaves: Tensors, mask: torch.Tensor | None = None, **options: Any) -> torch.Tensor:
    q, k, v = leaves["q"], leaves["k"], leaves["v"]
    return flash_attention(q, k, v, bias=leaves.get("bias", of_heads(mask, q)), **options)


def explain_dense(
    leaves: Tensors, backward: bool, mask: torch.Tensor | None = None, **options: Any
) -> str:
    options.pop("seed", None)  # which pairs are dropped changes nothing
    given = leaves if mask is None else {**leaves, "bias": of_heads(mask, leaves["q"])}
    return explain(**given, backward=backward, **options)


def explain_derivative(explain_pass: Callable[..., str], leaves: Tensors, backward: bool) -> str:
    """Of a case of second derivatives: what their first and their second part would run."""
    return (
        explain_pass(leaves, False, derivative="second") if backward else explain_pass(leaves, True)
    )


def dense_options(shape: Shape) -> dict[str, Any]:
    """What a shape asks of our dense call."""
    window = {"window": (shape.window - 1, 0)} if shape.window else {}
    return {"causal": shape.causal, **window}


def our_dense(**options: Any) -> Implementation:
    return Implementation(
        functools.partial(ours_dense, **options),
        explain=functools.partial(explain_dense, **options),
    )


def without_bias(leaves: Tensors, grad: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    return {name: leaf for name, leaf in leaves.items() if name != "bias"}, grad


def rounded_bias(leaves: Tensors, grad: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    return {**leaves, "bias": leaves["bias"].to(grad.dtype)}, grad


def as_triangle(leaves: Tensors) -> Tensors:
    """Rows as a leading dimension of their own, as models have them: (1, N, H, S, D)."""
    return {name: leaf.unsqueeze(0) for name, leaf in leaves.items()}


def ours_triangle(leaves: Tensors) -> torch.Tensor:
    return flash_attention(**as_triangle(leaves)).squeeze(0)


def explain_triangle(leaves: Tensors, backward: bool) -> str:
    return explain(**as_triangle(leaves), backward=backward)


def ours_ragged(leaves: Tensors, ragged: Ragged) -> torch.Tensor:
    cu, longest = ragged.cu_seqlens, ragged.longest
    return flash_attention_varlen(
        leaves["q"], leaves["k"], leaves["v"], cu, cu, longest, longest,
        bias=leaves.get("bias"), causal=ragged.causal,
    )  # fmt: skip


def explain_ragged(
    leaves: Tensors, backward: bool, ragged: Ragged, derivative: str | None = None
) -> str:
    cu, longest = ragged.cu_seqlens, ragged.longest
    return explain(
        **leaves, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=longest, max_seqlen_k=longest,
        causal=ragged.causal, backward=backward, derivative=derivative,
    )  # fmt: skip


def make_dense(
    shape: Shape,
    dtype: torch.dtype,
    device: torch.device,
    bias_batch: int = 0,
    queries: int | None = None,
) -> Case:
    """(B, H, S, D), with a bias of (bias_batch, H, S, S) and its gradient where that is not 0."""
    like = torch.empty(0, dtype=dtype, device=device)
    queries = queries or shape.length
    query_size = (shape.batch, shape.heads, queries, shape.dim)
    key_size = (shape.batch, shape.kv_heads, shape.length, shape.dim)
    leaves = {name: normal(*key_size, like=like) for name in ("k", "v")}
    leaves = {"q": normal(*query_size, like=like), **leaves}
    pairs = shape.length if queries == 1 else shape.pairs
    scores = shape.batch * shape.heads * pairs
    gqa = shape.kv_heads != shape.heads
    mask = window_mask(shape.length, shape.window, device) if shape.window else None
    sdpa = functools.partial(sdpa_dense, causal=shape.causal, gqa=gqa, mask=mask)
    peers = sdpa_peers(sdpa)
    if bias_batch:
        leaves["bias"] = normal(bias_batch, shape.heads, queries, shape.length, like=like)
        peers["flex"] = Implementation(CompiledFlex(gqa))
    grad = normal(*query_size, like=like)
    if device.type == "cuda":
        leaves, grad = tokens_first(leaves, grad)
    options = dense_options(shape)
    return Case(
        leaves=leaves,
        grad=grad,
        scores=scores,
        flops=4.0 * scores * shape.dim,
        ours=our_dense(**options),
        reference=Implementation(sdpa, backend="math"),
        peers=peers,
        reference_scores=shape.batch * shape.heads * shape.length**2 if shape.window else 0,
        keywords=options,
    )


def make_decode(shape: Shape, dtype: torch.dtype, device: torch.device) -> Case:
    """One new query for each head over length keys."""
    case = make_dense(shape, dtype, device, queries=1)
    read = case.leaves["k"].nbytes + case.leaves["v"].nbytes
    return dataclasses.replace(case, bytes=read)


def make_deterministic(shape: Shape, dtype: torch.dtype, device: torch.device) -> Case:
    """Our reproducible backward pass, and our ordinary one as its peer."""
    options = dense_options(shape)
    return dataclasses.replace(
        make_dense(shape, dtype, device),
        ours=our_dense(**options, deterministic=True),
        peers={NONDETERMINISTIC: our_dense(**options, deterministic=False)},
        baseline=NONDETERMINISTIC,
        reproducible=True,
        keywords={**options, "deterministic": True},
    )


def make_pair_bias(shape: Shape, dtype: torch.dtype, device: torch.device) -> Case:
    """A bias for every pair of a sequence, its own in each."""
    return make_dense(shape, dtype, device, bias_batch=shape.batch)


def make_fp32_bias(shape: Shape, dtype: torch.dtype, device: torch.device) -> Case:
    """pair_bias with a bias, and so its gradient, in fp32; our own with a rounded one as peer."""
    case = make_pair_bias(shape, dtype, device)
    bias = torch.randn_like(case.leaves["bias"], dtype=torch.promote_types(dtype, torch.float32))
    return dataclasses.replace(
        case,
        leaves={**case.leaves, "bias": bias},
        peers={ROUNDED_BIAS: Implementation(ours_dense, rounded_bias, another=True)},
        baseline=ROUNDED_BIAS,
    )


def make_diffusion(shape: Shape, dtype: torch.dtype, device: torch.device) -> Case:
    """shape.batch noisy copies of one sequence, all with the one bias of (1, H, S, S)."""
    return make_dense(shape, dtype, device, bias_batch=1)


def make_triangle(shape: Shape, dtype: torch.dtype, device: torch.device) -> Case:
    """shape.batch rows of a pair representation, all with the one bias of (1, H, S, S)."""
    case = make_dense(shape, dtype, device, bias_batch=1)
    ours = Implementation(ours_triangle, explain=explain_triangle)
    return dataclasses.replace(case, ours=ours)


def make_ragged(
    shape: Shape,
    dtype: torch.dtype,
    device: torch.device,
    with_bias: bool = False,
    draw: Callable[[int, int], list[int]] = ragged_lengths,
) -> Case:
    """(T, H, D): shape.batch sequences whose lengths draw(shape.batch, shape.length) says.

    The SDPA peers get them padded to the longest, which is what a model without ragged attention
    does; the padding itself is not timed.
    """
    like = torch.empty(0, dtype=dtype, device=device)
    ragged = Ragged(draw(shape.batch, shape.length), shape.causal, device)
    tokens, pairs = sum(ragged.lengths), sum(n * n for n in ragged.lengths)
    query_size = (tokens, shape.heads, shape.dim)
    key_size = (tokens, shape.kv_heads, shape.dim)
    leaves = {name: normal(*key_size, like=like) for name in ("k", "v")}
    leaves = {"q": normal(*query_size, like=like), **leaves}
    peers = sdpa_peers(ragged.sdpa, ragged.pad, ragged.unpad)
    if with_bias:
        leaves["bias"] = normal(pairs, shape.heads, like=like)
        ours = functools.partial(ours_ragged, ragged=ragged)
        peers[WITHOUT_BIAS] = Implementation(ours, without_bias, another=True)
    else:
        peers["varlen"] = Implementation(ragged.torch_varlen)
    scores = pairs * shape.heads // (2 if shape.causal else 1)
    return Case(
        leaves=leaves,
        grad=normal(*query_size, like=like),
        scores=scores,
        flops=4.0 * scores * shape.dim,
        ours=Implementation(
            functools.partial(ours_ragged, ragged=ragged),
            explain=functools.partial(explain_ragged, ragged=ragged),
        ),
        reference=Implementation(ragged.without_padding, backend="math"),
        peers=peers,
        lengths=tuple(ragged.lengths),
        keywords={
            "cu_seqlens": ragged.cu_seqlens,
            "max_seqlen": ragged.longest,
            "causal": shape.causal,
        },
    )


def make_crystals(
    shape: Shape, dtype: torch.dtype, device: torch.device, with_bias: bool = False
) -> Case:
    """shape.batch real crystals of at most shape.length atoms.

    On a GPU scores are so few that reading the inputs and writing the output is the work, and the
    row is about the only one that does not pad: varlen_attn, or with a bias, which that does not
    take, our own without it.
    """
    case = make_ragged(shape, dtype, device, with_bias, crystal_lengths)
    if device.type != "cuda":
        return case
    moved = sum(leaf.nbytes for leaf in case.leaves.values()) + case.grad.nbytes
    return dataclasses.replace(case, bytes=moved, baseline=WITHOUT_BIAS if with_bias else "varlen")


def make_second(shape: Shape, dtype: torch.dtype, device: torch.device) -> Case:
    """Second derivatives of dense attention, with a bias for every pair of a sequence if asked."""
    case = make_dense(shape, dtype, device, bias_batch=shape.batch if shape.bias else 0)
    return twice(case, functools.partial(explain_derivative, case.ours.explain))


def make_second_crystals(shape: Shape, dtype: torch.dtype, device: torch.device) -> Case:
    """The same for a ragged batch; math gets all sequences of one length at a time, unpadded."""
    case = make_ragged(shape, dtype, device, draw=crystal_lengths)
    return twice(case, functools.partial(explain_derivative, case.ours.explain))


def make_fp32(shape: Shape, dtype: torch.dtype, device: torch.device) -> Case:
    """Dense attention, or pair_bias; with everyone's products in TF32 where that is allowed."""
    case = make_dense(shape, dtype, device, bias_batch=shape.batch if shape.bias else 0)
    allow = functools.partial(dataclasses.replace, tf32=shape.tf32)
    return dataclasses.replace(
        case,
        ours=allow(case.ours),
        reference=allow(case.reference),
        peers={name: allow(peer) for name, peer in case.peers.items()},
    )


def make_dropout(shape: Shape, dtype: torch.dtype, device: torch.device) -> Case:
    """Dense attention that drops pairs. Peers drop as many, and others: theirs are not compared."""
    case, options = make_dense(shape, dtype, device), dense_options(shape)
    # On the device, as torch's generator keeps its own.
    dropped = {"dropout_p": DROPPED, "seed": torch.tensor(SEED, device=device)}
    gqa = shape.kv_heads != shape.heads
    sdpa = functools.partial(sdpa_dense, causal=shape.causal, gqa=gqa, dropout_p=DROPPED)
    theirs = {n: dataclasses.replace(p, another=True) for n, p in sdpa_peers(sdpa).items()}
    exact = functools.partial(dropout.attention, causal=shape.causal, p=DROPPED, seed=SEED)
    without = dataclasses.replace(our_dense(**options), another=True)
    return dataclasses.replace(
        case,
        ours=our_dense(**options, **dropped),
        reference=Implementation(exact),
        peers={**theirs, WITHOUT_DROPOUT: without},
        baseline="flash" if device.type == "cuda" else "math",
        keywords={**options, **dropped},
    )


def make_mask(shape: Shape, dtype: torch.dtype, device: torch.device) -> Case:
    """A mask of bytes, (B, H, S, S) or shared by all heads, that hides half of all pairs.

    No query sees no key at all: PyTorch has no answer for that.
    """
    case = make_dense(shape, dtype, device)
    size = (shape.batch, 1 if shape.shared else shape.heads, shape.length, shape.length)
    mask = torch.rand(size, device=device) < 0.5
    mask.diagonal(dim1=-2, dim2=-1).fill_(True)
    bias = torch.zeros(size, dtype=dtype, device=device).masked_fill_(~mask, -torch.inf)
    sdpa = functools.partial(sdpa_dense, causal=False, gqa=shape.kv_heads != shape.heads, mask=mask)
    return dataclasses.replace(
        case,
        ours=our_dense(mask=mask),
        reference=Implementation(sdpa, backend="math"),
        peers={**sdpa_peers(sdpa), MASK_AS_BIAS: our_dense(mask=bias)},
        keywords={**dense_options(shape), "mask": mask},
    )


def make_mixed_lengths(shape: Shape, dtype: torch.dtype, device: torch.device) -> Case:
    """Sequences of every length up to shape.length, packed; where even, dense ones of that length.

    On a GPU the packed ones have varlen_attn for a peer and no padded ones: with their masks those
    need gigabytes, and twice the scores.
    """
    if shape.even:
        return make_dense(shape, dtype, device)
    case = make_ragged(shape, dtype, device, draw=uniform_lengths)
    if device.type != "cuda":
        return case
    return dataclasses.replace(case, peers={"varlen": case.peers["varlen"]})


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
CAUSAL = ("", ",causal")
SECOND_DERIVATIVES = {
    "operator": "second derivatives of attention",
    "backward_flops": SECOND / FIRST,
    "peers_on": {"cpu": ("math",), "cuda": ("math",)},
    "passes": ("bwd", "fwd+bwd"),
    "own_passes": {device: ("bwd", "fwd+bwd") for device in ("cpu", "cuda")},
    "own_dtypes": {"cuda": ("fp32", "bf16")},
    "in_graph": True,
}

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
        own_passes={"cpu": ("fwd",), "cuda": ("fwd",)},
    ),
    "gqa": Workload(
        "dense with 32 or 64 query heads on 8 key heads, beside as many key heads as query heads",
        {"cpu": ("1,8,128,64", "1,8,128,64,kv2"), "cuda": shapes_of(GQA)},
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
    "second": Workload(
        "second derivatives: the backward pass of a backward pass, with a pair bias too",
        {
            "cpu": ("2,4,64,32", "1,4,96,32,bias"),
            "cuda": ("8,8,256,64", "1,10,400,64,bias"),
        },
        make_second,
        options=frozenset({"kv", "bias"}),
        **SECOND_DERIVATIVES,
    ),
    "second_crystals": Workload(
        "second derivatives of crystals; PyTorch's math gets those of one length at a time",
        {"cpu": ("32,4,64,16",), "cuda": (f"4096,8,{MOST_ATOMS},64",)},
        make_second_crystals,
        options=frozenset({"kv"}),
        **SECOND_DERIVATIVES,
    ),
    "fp32": Workload(
        "dense, and with a pair bias (bias), in fp32; with TF32 for everyone where allowed (tf32)",
        {
            "cpu": ("1,4,256,64", "1,4,128,64,bias"),
            "cuda": tuple(
                s + t for t in ("", ",tf32") for s in ("4,16,1024,64", "4,16,384,64,bias")
            ),
        },
        make_fp32,
        options=frozenset({"kv", "bias", "tf32"}),
        dtypes=("fp32",),
        own_dtypes={"cuda": ("fp32",)},
    ),
    "dropout": Workload(
        f"dense that drops {DROPPED} of all pairs, beside the same in PyTorch",
        {"cpu": ("1,4,256,64",), "cuda": tuple(gpu_dense_shape(64, 4096, c) for c in CAUSAL)},
        make_dropout,
        peers_on={
            "cpu": ("math", WITHOUT_DROPOUT),
            "cuda": ("flash", "cudnn", "efficient", WITHOUT_DROPOUT),
        },
        own_passes={"cuda": ("fwd", "bwd")},
    ),
    "mask": Workload(
        "dense with a mask of bytes, one for each head or for all (shared), beside it as a bias",
        {
            "cpu": ("2,4,128,64", "2,4,128,64,shared"),
            "cuda": ("8,8,1024,64", "8,8,1024,64,shared"),
        },
        make_mask,
        options=frozenset({"kv", "shared"}),
        peers_on={
            "cpu": ("flash", "math", MASK_AS_BIAS),
            "cuda": ("cudnn", "efficient", "math", MASK_AS_BIAS),
        },
    ),
    **PAGED_WORKLOADS,
    **APPEND_WORKLOADS,
    **MOE_WORKLOADS,
}
