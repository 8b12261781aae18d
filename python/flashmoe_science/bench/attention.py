"""Cases of attention: the tensors of a shape, our call, the same thing said with PyTorch's math
backend (the correctness reference, in any dtype), and the peers."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch

from flashmoe_science import explain, flash_attention, flash_attention_varlen
from flashmoe_science.bench.case import (
    Case,
    Implementation,
    Shape,
    Tensors,
    tokens_first,
)
from flashmoe_science.bench.peers import (
    CompiledFlex,
    of_heads,
    sdpa_dense,
    sdpa_peers,
    window_mask,
)
from flashmoe_science.bench.ragged import (
    Ragged,
    crystal_lengths,
    ragged_lengths,
    uniform_lengths,
)

# Our own calls as peers, for rows about what an option costs.
NONDETERMINISTIC = "nondeterministic"  # a backward pass that is free to add in any order
WITHOUT_BIAS = "without_bias"
ROUNDED_BIAS = "rounded_bias"  # in the dtype of q, k and v


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
