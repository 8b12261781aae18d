"""Requests over a paged cache, as serving engines have them, and what their attention should be."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

import flashmoe_science as fm

HEADS_Q, HEADS_K, DIM = 4, 2, 8
NOBODY = 1 << 20  # an entry of a table that must not be read


@dataclass
class Requests:
    """Each has `before` tokens in the cache and then `new` ones."""

    before: tuple[int, ...] = (6, 0, 4, 17, 0)
    new: tuple[int, ...] = (3, 1, 2, 1, 7)
    page: int = 4
    dtype: torch.dtype = torch.float32
    k: list[Tensor] = field(init=False)
    v: list[Tensor] = field(init=False)
    q: list[Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self.lengths = tuple(a + b for a, b in zip(self.before, self.new, strict=True))
        self.k, self.v = (
            [torch.randn(n, HEADS_K, DIM).to(self.dtype) for n in self.lengths] for _ in "kv"
        )
        self.q = [torch.randn(n, HEADS_Q, DIM).to(self.dtype) for n in self.new]
        pages = [-(-n // self.page) for n in self.lengths]
        self.blocks = sum(pages) + 3
        order = torch.randperm(self.blocks).tolist()
        self.table = torch.full((len(pages), max(pages) + 2), NOBODY, dtype=torch.int32)
        for row, n in zip(self.table, pages, strict=True):
            row[:n] = torch.tensor([order.pop() for _ in range(n)], dtype=torch.int32)

    def slots(self, request: int) -> Tensor:
        """Of all tokens of a request."""
        position = torch.arange(self.lengths[request])
        return self.table[request, position // self.page].long() * self.page + position % self.page

    def tokens(self, which: str) -> tuple[Tensor, Tensor, Tensor]:
        """k, v and slots of the tokens before, or of the new ones."""
        start = [slice(0, n) if which == "before" else slice(n, None) for n in self.before]
        rows = range(len(start))
        k, v = (torch.cat([x[i][start[i]] for i in rows]) for x in (self.k, self.v))
        return k, v, torch.cat([self.slots(i)[start[i]] for i in rows])

    @property
    def cu_seqlens_q(self) -> Tensor:
        return torch.tensor([0, *self.new], dtype=torch.int32).cumsum(0, dtype=torch.int32)

    def attention(self, k=None, v=None, **options) -> Tensor:
        """Of the new tokens, each request by itself over keys that lie side by side."""
        rows = [
            fm.flash_attention(*(x.transpose(0, 1)[None] for x in each), causal=True, **options)
            for each in zip(self.q, k or self.k, v or self.v, strict=True)
        ]
        return torch.cat([row[0].transpose(0, 1) for row in rows])
