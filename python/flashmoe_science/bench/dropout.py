"""Attention with dropout as plain PyTorch, dropping the pairs that ours drops: its oracle.

Which those are is in docs/semantics.md. PyTorch's own dropout drops others, as many of them.
"""

from __future__ import annotations

import torch

from flashmoe_science.bench.case import Tensors

LOW = 0xFFFFFFFF
ROUNDS = 7
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
INCREMENTS = (0x9E3779B9, 0xBB67AE85)


def product(a: int, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The upper and lower 32 bits of a product of 32-bit numbers, none of which fits int64."""
    low = (a & 0xFFFF) * b
    high = (a >> 16) * b + (low >> 16)
    return high >> 16, (high << 16 | low & 0xFFFF) & LOW


def philox(counter: list[torch.Tensor], seed: int) -> list[torch.Tensor]:
    """Philox 4x32-7 (Salmon et al., Parallel random numbers: as easy as 1, 2, 3)."""
    c0, c1, c2, c3 = counter
    keys = [seed & LOW, seed >> 32 & LOW]
    for _ in range(ROUNDS):
        (high0, low0), (high1, low1) = product(MULTIPLIERS[0], c0), product(MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ keys[0], low1, high0 ^ c3 ^ keys[1], low0
        keys = [(key + step) & LOW for key, step in zip(keys, INCREMENTS, strict=True)]
    return [c0, c1, c2, c3]


def kept(size: torch.Size, p: float, seed: int, like: torch.Tensor) -> torch.Tensor:
    """(B, H, S, S): what the weight of each pair is multiplied by, 0 where it is dropped."""
    batch, head, row, key = (
        torch.arange(n, device=like.device).view([-1 if i == at else 1 for i in range(4)])
        for at, n in enumerate(size)
    )
    counter = [row // 16 * 8 + row % 8, key // 32 * 8 + key % 8, head, batch]
    words = philox([x.expand(size) for x in counter], seed)
    word = sum(torch.where(key // 8 % 4 == i, words[i], 0) for i in range(4))
    dropped = round(p * 2**16)
    bits = word >> (row // 8 % 2 * 16) & 0xFFFF
    return (bits >= dropped).to(like.dtype) * (2**16 / (2**16 - dropped))


def attention(leaves: Tensors, causal: bool, p: float, seed: int) -> torch.Tensor:
    """As PyTorch's math backend computes it, with all weights in memory."""
    q, k, v = leaves["q"], leaves["k"], leaves["v"]
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    scores = q @ k.mT * q.shape[-1] ** -0.5
    if causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(later, -torch.inf)
    weights = scores.softmax(-1)
    return (weights * kept(weights.shape, p, seed, weights)) @ v
