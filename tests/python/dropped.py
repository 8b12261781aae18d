"""Which pairs dropout keeps, written down from its paper: src/attention/dropout.h says the same."""

from __future__ import annotations

import dataclasses
import math

import torch

from oracle import Case

LOW = 0xFFFFFFFF
ROUNDS = 7


def multiply(a: int, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The upper and the lower 32 bits of a product of 32-bit numbers."""
    low = (a & 0xFFFF) * b
    high = (a >> 16) * b + (low >> 16)
    return high >> 16, (high << 16 | low & 0xFFFF) & LOW


def philox(counter: list[torch.Tensor], seed: int) -> list[torch.Tensor]:
    """Philox 4x32-7."""
    c0, c1, c2, c3 = counter
    key0, key1 = seed & LOW, seed >> 32 & LOW
    for _ in range(ROUNDS):
        high0, low0 = multiply(0xD2511F53, c0)
        high1, low1 = multiply(0xCD9E8D57, c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ key0, low1, high0 ^ c3 ^ key1, low0
        key0, key1 = (key0 + 0x9E3779B9) & LOW, (key1 + 0xBB67AE85) & LOW
    return [c0, c1, c2, c3]


def kept(seed, p, batches, heads, rows, keys, device="cpu") -> torch.Tensor:
    """(batches, heads, rows, keys): 0, or what a weight is multiplied by."""
    b, h, i, j = (torch.arange(size, device=device) for size in (batches, heads, rows, keys))
    b, h, i = b[:, None, None, None], h[:, None, None], i[:, None]
    shape = (batches, heads, rows, keys)
    counter = [x.expand(shape) for x in (i // 16 * 8 + i % 8, j // 32 * 8 + j % 8, h, b)]
    words = torch.stack(philox(counter, seed))
    word = words.gather(0, (j // 8 % 4).expand(1, *shape))[0]
    bits = word >> (i // 8 % 2 * 16) & 0xFFFF
    dropped = 2**16 if p == 1 else min(max(round(p * 2**16), 1), 2**16 - 1)
    scale = 0.0 if p == 1 else 2**16 / (2**16 - dropped)
    return (bits >= dropped).double() * scale


def with_dropout(case: Case, p=0.3, seed=1234567890123) -> Case:
    """The case with dropout, and what the float64 oracle is to multiply its weights by."""
    device = case.q.device
    if case.cu_q is None:
        lead = case.q.shape[:-3]
        sizes = (math.prod(lead), *case.q.shape[-3:-1], case.k.shape[-2])
        every = kept(seed, p, *sizes, device).view(*lead, *sizes[1:])
    else:
        lengths = zip(case.cu_q.diff().tolist(), case.cu_k.diff().tolist(), strict=True)
        heads, many = case.q.shape[1], len(case.cu_q) - 1
        every = [
            kept(seed, p, many, heads, n, m, device)[b : b + 1] for b, (n, m) in enumerate(lengths)
        ]
    return dataclasses.replace(case, dropout={"dropout_p": p, "seed": seed}, kept=every)
