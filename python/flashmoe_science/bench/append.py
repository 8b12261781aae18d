"""Writing keys and values of new tokens to a cache, beside PyTorch's own copies."""

from __future__ import annotations

import random
from dataclasses import dataclass, fields
from typing import Any

import torch

from flashmoe_science import explain_append, kv_cache_append
from flashmoe_science.bench.case import Case, Implementation, Tensors, Workload
from flashmoe_science.bench.paged import FLOAT8, K_SCALE

COPY = "copy"  # of as many bytes to one place, which no slot names: what the memory can do
INDEX_COPY = "index_copy"  # to the slots, keys and then values
A_CHUNK = 512  # tokens: fewer are decodes


@dataclass(frozen=True)
class AppendShape:
    """T, H, D, N: tokens, heads, head dim, tokens of a page; and whether the cache is fp8."""

    tokens: int
    heads: int
    dim: int
    page: int
    e4m3: bool = False

    @classmethod
    def parse(cls, text: str) -> AppendShape:
        """Reads "64,8,128,16" and "64,8,128,16,e4m3"."""
        *words, last = text.split(",")
        e4m3 = last == "e4m3"
        try:
            sizes = [int(word) for word in (words if e4m3 else [*words, last])]
        except ValueError:
            sizes = []
        if len(sizes) != len(fields(cls)) - 1 or min(sizes) < 1:
            raise ValueError(
                f"shape {text!r}: expected tokens,heads,dim,tokens of a page and then, for a cache "
                "in fp8, e4m3; each at least 1, for example 64,8,128,16 or 64,8,128,16,e4m3"
            )
        return cls(*sizes, e4m3=e4m3)

    def __str__(self) -> str:
        numbers = f"{self.tokens},{self.heads},{self.dim},{self.page}"
        return numbers + (",e4m3" if self.e4m3 else "")

    @property
    def options(self) -> set[str]:
        return {"e4m3"} if self.e4m3 else set()


@dataclass(frozen=True)
class AppendCase(Case):
    """Leaves new (2, T, H, D), keys and values, and cache (2, blocks, page, H, D), which is also
    the output: nothing is done for it to be one."""

    @property
    def heads(self) -> int:
        return 1

    group = heads

    def kept_bytes(self, backward: bool) -> int:
        return 0


def drawn_slots(shape: AppendShape, blocks: int) -> list[int]:
    """Where tokens go: each to a page of its own, as decodes do, or, from A_CHUNK on, side by side
    in pages of any order, as those of a prompt."""
    draw = random.Random(0)
    pages = draw.sample(range(blocks), blocks)
    if shape.tokens < A_CHUNK:
        return [page * shape.page + draw.randrange(shape.page) for page in pages]
    slots = [page * shape.page + i for page in pages for i in range(shape.page)]
    return slots[: shape.tokens]


@dataclass(frozen=True)
class Append:
    """One call, as everyone makes it."""

    slots: torch.Tensor
    stored: torch.dtype  # of the cache
    scale: torch.Tensor | None  # of an fp8 cache

    @property
    def keywords(self) -> dict[str, Any]:
        scales = {} if self.scale is None else {"k_scale": self.scale, "v_scale": self.scale}
        return {"slot_mapping": self.slots, **scales}

    def ours(self, leaves: Tensors) -> torch.Tensor:
        kv_cache_append(*leaves["new"], *leaves["cache"], **self.keywords)
        return leaves["cache"]

    def explain(self, leaves: Tensors, backward: bool) -> str:
        return explain_append(*leaves["new"], *leaves["cache"], **self.keywords)

    def to_store(self, new: torch.Tensor) -> torch.Tensor:
        """What the cache is to hold; where it is fp8, divided in fp32 and as bytes: torch copies
        those by index."""
        if self.scale is None:
            return new
        largest = torch.finfo(FLOAT8).max
        return (new.float() / self.scale).clamp(-largest, largest).to(FLOAT8).view(torch.uint8)

    def index_copy(self, leaves: Tensors) -> torch.Tensor:
        for new, cache in zip(leaves["new"], leaves["cache"], strict=True):
            rows = cache.flatten(0, 1)
            rows = rows if self.scale is None else rows.view(torch.uint8)
            rows.index_copy_(0, self.slots, self.to_store(new))
        return leaves["cache"]

    def reference(self, leaves: Tensors) -> torch.Tensor:
        """In any dtype: what an fp8 cache rounds to is what the oracle says, too."""
        cache = leaves["cache"]
        rows = self.to_store(leaves["new"])
        rows = rows if self.scale is None else rows.view(FLOAT8).to(cache.dtype)
        stored = cache.flatten(1, 2).clone()
        if cache.dtype == FLOAT8:
            stored, rows = stored.view(torch.uint8), rows.view(torch.uint8)
        stored[:, self.slots] = rows
        return stored.view(cache.dtype).view_as(cache)

    def copy(self, leaves: Tensors) -> torch.Tensor:
        return leaves["cache"].copy_(leaves["new"])


def room_for_new(leaves: Tensors, grad: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """Memory as large as the new tokens, to copy them to."""
    new = leaves["new"]
    return {"new": new, "cache": torch.empty_like(new, dtype=leaves["cache"].dtype)}, grad


def make_append(shape: AppendShape, dtype: torch.dtype, device: torch.device) -> Case:
    """A cache that the tokens fill, or has a page for each of them."""
    few = shape.tokens < A_CHUNK
    blocks = shape.tokens if few else -(-shape.tokens // shape.page)
    stored = FLOAT8 if shape.e4m3 else dtype
    slots = torch.tensor(drawn_slots(shape, blocks), device=device)
    scale = torch.tensor(K_SCALE, device=device) if shape.e4m3 else None
    new = torch.randn(2, shape.tokens, shape.heads, shape.dim, device=device).to(dtype)
    held = torch.randn(2, blocks, shape.page, shape.heads, shape.dim, device=device).to(stored)
    append = Append(slots, stored, scale)
    return AppendCase(
        leaves={"new": new, "cache": held},
        grad=new.new_empty(0),
        scores=shape.tokens,
        flops=float(new.numel()),
        ours=Implementation(append.ours, explain=append.explain),
        reference=Implementation(append.reference),
        peers={
            COPY: Implementation(append.copy, room_for_new, another=True),
            INDEX_COPY: Implementation(append.index_copy),
        },
        baseline=COPY,
        bytes=new.numel() * (dtype.itemsize + stored.itemsize),  # read and written
        reproducible=True,
        keywords=append.keywords,
    )


SMALL = ("64,8,128,16", "64,8,128,16,e4m3")
LARGE = ("8192,8,128,16", "8192,8,128,16,e4m3")

APPEND_WORKLOADS = {
    "append": Workload(
        "T new tokens of H heads to a cache in pages of N, next to a plain copy of their bytes",
        {
            "cpu": ("64,2,64,16", "64,2,64,16,e4m3", "1024,2,64,16"),
            "cuda": (*SMALL, *LARGE),
        },
        make_append,
        operator="writing to a cache",
        shape_type=AppendShape,
        sizes="T,H,D,N",
        options=frozenset({"e4m3"}),
        peers_on={device: (COPY, INDEX_COPY) for device in ("cpu", "cuda")},
        passes=("fwd",),
        in_graph=True,
    ),
}
