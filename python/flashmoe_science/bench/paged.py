"""Attention over the pages of a cache: decodes, chunks of prompts, and both in one call.

What a call reads is the caches, and a server's are in no L2: calls of a graph take copies of the
inputs in turn that are larger than it (timing.py), and most caches here are larger by themselves.
Peers get the same keys side by side, without pages, in the dtype of the queries: that copy is made
before any clock starts. GB/s count each key and value once.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import random
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right

from flashmoe_science import (
    explain_paged,
    flash_attention,
    flash_attention_paged,
    flash_attention_varlen,
)
from flashmoe_science.bench.case import Case, Implementation, Shape, Tensors, Workload, each
from flashmoe_science.bench.peers import sdpa_peers, torch_varlen
from flashmoe_science.bench.ragged import ragged_lengths

FLOAT8 = torch.float8_e4m3fn
# What the numbers of an fp8 cache are times of. Standard normal ones then reach half of its range.
K_SCALE, V_SCALE = 0.02, 0.03

# Our own calls as peers.
CONTIGUOUS = "contiguous"  # over the same keys side by side, without pages
SIXTEEN_BITS = "sixteen_bits"  # over a cache that is not in fp8
APART = "apart"  # decodes and chunk in two calls, one after the other
DECODES, CHUNK = "decodes", "chunk"  # each of the two alone

Lengths = list[tuple[int, int]]  # (queries, keys) of each sequence


@dataclass(frozen=True)
class Group:
    """Sequences next to each other with as many queries each: a batch, as others want it."""

    first: int  # token of q
    count: int
    queries: int
    keys: tuple[int, ...]

    @property
    def longest(self) -> int:
        return max(self.keys)

    @property
    def last(self) -> int:
        return self.first + self.count * self.queries


@dataclass(frozen=True)
class Pages:
    """Which sequences there are and where their keys lie."""

    lengths: Lengths
    blocks: list[list[int]]  # of each sequence
    page: int
    device: torch.device

    @classmethod
    def spread(cls, lengths: Lengths, page: int, device: torch.device) -> Pages:
        """Sequences whose pages lie in any order, as in a cache that has served for a while."""
        counts = [-(-keys // page) for _, keys in lengths]
        order = list(range(sum(counts)))
        random.Random(0).shuffle(order)
        taken = iter(order)
        blocks = [list(itertools.islice(taken, count)) for count in counts]
        return cls(lengths, blocks, page, device)

    def part(self, start: int, stop: int) -> Pages:
        """Some of the sequences over the same cache."""
        return Pages(self.lengths[start:stop], self.blocks[start:stop], self.page, self.device)

    def integers(self, values: Any) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    @functools.cached_property
    def block_table(self) -> torch.Tensor:
        longest = max(map(len, self.blocks))
        return self.integers([row + [0] * (longest - len(row)) for row in self.blocks])

    @functools.cached_property
    def seq_lens(self) -> torch.Tensor:
        return self.integers([keys for _, keys in self.lengths])

    @functools.cached_property
    def cu_seqlens_q(self) -> torch.Tensor:
        return self.integers(list(itertools.accumulate((n for n, _ in self.lengths), initial=0)))

    @functools.cached_property
    def cu_seqlens_k(self) -> torch.Tensor:
        return self.integers(list(itertools.accumulate((m for _, m in self.lengths), initial=0)))

    @property
    def maxima(self) -> dict[str, int]:
        return {
            "max_seqlen_q": max(n for n, _ in self.lengths),
            "max_seqlen_k": max(m for _, m in self.lengths),
        }

    @functools.cached_property
    def slots(self) -> torch.Tensor:
        """Where each key lies among all rows of a cache, sequence after sequence."""
        offset = torch.arange(self.page)
        rows = [
            (torch.tensor(blocks)[:, None] * self.page + offset).flatten()[:keys]
            for blocks, (_, keys) in zip(self.blocks, self.lengths, strict=True)
        ]
        return torch.cat(rows).to(self.device)

    @functools.cached_property
    def groups(self) -> list[Group]:
        found, first = [], 0
        for queries, members in itertools.groupby(self.lengths, lambda length: length[0]):
            keys = tuple(m for _, m in members)
            found.append(Group(first, len(keys), queries, keys))
            first = found[-1].last
        return found

    def keys(self, cache: torch.Tensor, like: torch.Tensor, scale: float) -> torch.Tensor:
        """(keys, Hk, D): what a cache holds, sequence after sequence, in the dtype of like."""
        if cache.dtype == like.dtype and scale == 1:
            return cache.flatten(0, 1)[self.slots]
        # Rows of fp8 are taken as bytes: torch indexes few things that are of 8 bits.
        bytes_ = cache.view(torch.uint8) if cache.dtype == FLOAT8 else cache
        rows = bytes_.flatten(0, 1)[self.slots]
        return rows.view(cache.dtype).to(like.dtype) * scale


@dataclass(frozen=True)
class PagedCase(Case):
    """Leaves q, k_cache and v_cache; heads are dimension 2 of the caches."""

    attention: Attention | None = None

    @property
    def group(self) -> int:
        return self.heads // self.leaves["k_cache"].shape[2]

    def kept_bytes(self, backward: bool) -> int:
        return 0

    def take_heads(self, heads: int) -> Case:
        part, heads_k = heads / self.heads, heads // self.group
        leaves = {
            name: (leaf[:, :heads] if name == "q" else leaf[:, :, :heads_k]).contiguous()
            for name, leaf in self.leaves.items()
        }
        return dataclasses.replace(
            self,
            leaves=leaves,
            grad=each(lambda grad: grad[:, :heads].contiguous(), self.grad),
            scores=int(self.scores * part),
            flops=self.flops * part,
            bytes=int(self.bytes * part),
        )


@dataclass(frozen=True)
class Attention:
    """One batch over pages, as everyone computes it. The scales are those of an fp8 cache, or 1."""

    pages: Pages
    k_scale: float = 1.0
    v_scale: float = 1.0

    @functools.cached_property
    def keywords(self) -> dict[str, Any]:
        """What our call is told besides the leaves, and a peer's file: as engines tell it, with
        cu_seqlens_q of decodes too."""
        pages = self.pages
        told = {name: getattr(pages, name) for name in ("block_table", "seq_lens", "cu_seqlens_q")}
        told |= pages.maxima
        if self.k_scale != 1:
            scales = {"k_scale": self.k_scale, "v_scale": self.v_scale}
            told |= {n: torch.tensor(x, device=pages.device) for n, x in scales.items()}
        return told

    def ours(self, leaves: Tensors) -> torch.Tensor:
        return flash_attention_paged(**leaves, **self.keywords)

    def explain(self, leaves: Tensors, backward: bool) -> str:
        return explain_paged(**leaves, **self.keywords)

    def keys_of(self, leaves: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
        k = self.pages.keys(leaves["k_cache"], leaves["q"], self.k_scale)
        return k, self.pages.keys(leaves["v_cache"], leaves["q"], self.v_scale)

    def reference(self, leaves: Tensors) -> torch.Tensor:
        """SDPA on one sequence after the other: plainly right."""
        sizes = [list(side) for side in zip(*self.pages.lengths, strict=True)]
        k, v = (x.split(sizes[1]) for x in self.keys_of(leaves))
        outs = []
        for q, k_, v_ in zip(leaves["q"].split(sizes[0]), k, v, strict=True):
            n, m = len(q), len(k_)
            row, key = (torch.arange(size, device=q.device) for size in (n, m))
            heads_first = (x.transpose(0, 1)[None] for x in (q, k_, v_))
            mask = key <= row[:, None] + m - n
            out = F.scaled_dot_product_attention(*heads_first, attn_mask=mask, enable_gqa=True)
            outs.append(out[0].transpose(0, 1))
        return torch.cat(outs)

    def packed(self, leaves: Tensors, grad: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        """Keys without pages, (keys, Hk, D)."""
        return {"q": leaves["q"], **dict(zip("kv", self.keys_of(leaves), strict=True))}, grad

    def batches(self, leaves: Tensors, grad: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        """A dense batch for each group, "q0", "k0", "v0", ...; heads second, as SDPA has them."""
        found: Tensors = {}
        packed, _ = self.packed(leaves, grad)
        at = 0
        for i, group in enumerate(self.pages.groups):
            q = leaves["q"][group.first : group.last].unflatten(0, (group.count, group.queries))
            found[f"q{i}"] = q.transpose(1, 2)
            until = at + sum(group.keys)
            for name in "kv":
                parts = packed[name][at:until].split(list(group.keys))
                padded = torch.nn.utils.rnn.pad_sequence(parts, batch_first=True)
                found[f"{name}{i}"] = padded.transpose(1, 2)
            at = until
        return found, grad

    def unbatched(self, results: Tensors) -> Tensors:
        """Outputs of batches() as q has its tokens."""
        outs = (out.transpose(1, 2).flatten(0, 1) for out in results.values())
        return {"out": torch.cat(list(outs))}

    def masked(self, leaves: Tensors, grad: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        """The same with "mask0", ...: 0 and -inf, where a group's queries do not see all keys."""
        found, _ = self.batches(leaves, grad)
        q, device = leaves["q"], self.pages.device
        for i, group in enumerate(self.pages.groups):
            keys = group.keys if len(set(group.keys)) > 1 else group.keys[:1]  # one mask for all
            if group.queries > 1 or len(keys) > 1:
                key = torch.arange(group.longest, device=device)
                row = torch.arange(group.queries, device=device)
                last = self.pages.integers(keys)[:, None, None, None] - group.queries
                hidden = key > last + row[:, None]
                mask = torch.zeros(hidden.shape, dtype=q.dtype, device=device)
                found[f"mask{i}"] = mask.masked_fill_(hidden, -torch.inf)
        return found, grad

    @functools.cached_property
    def corners(self) -> list[Any]:
        """Of each group, what tells SDPA that the last query sees the last key."""
        return [
            causal_lower_right(group.queries, group.longest) if group.queries > 1 else None
            for group in self.pages.groups
        ]

    def sdpa(self, leaves: Tensors) -> tuple[torch.Tensor, ...]:
        return tuple(
            F.scaled_dot_product_attention(
                leaves[f"q{i}"],
                leaves[f"k{i}"],
                leaves[f"v{i}"],
                attn_mask=leaves.get(f"mask{i}", corner),
                enable_gqa=True,
            )
            for i, corner in enumerate(self.corners)
        )

    def sdpa_peers(self) -> dict[str, Implementation]:
        """Those that know of corners go without a mask, which others would make in every call."""
        found = sdpa_peers(self.sdpa, self.masked, self.unbatched)
        if self.pages.device.type == "cuda" and not self.uneven:
            for name in ("flash", "efficient"):
                found[name] = dataclasses.replace(found[name], prepare=self.batches)
        return found

    @property
    def uneven(self) -> bool:
        """Some sequences that have as many queries have other numbers of keys."""
        return any(len(set(group.keys)) > 1 for group in self.pages.groups)

    def varlen(self, leaves: Tensors) -> torch.Tensor:
        pages, maxima = self.pages, self.pages.maxima.values()
        return torch_varlen(leaves, (pages.cu_seqlens_q, pages.cu_seqlens_k), (*maxima,), True)

    def ours_packed(self, leaves: Tensors) -> torch.Tensor:
        pages = self.pages
        offsets = (pages.cu_seqlens_q, pages.cu_seqlens_k)
        return flash_attention_varlen(
            leaves["q"], leaves["k"], leaves["v"], *offsets, **pages.maxima, causal=True
        )

    def ours_dense(self, leaves: Tensors) -> tuple[torch.Tensor]:
        return (flash_attention(leaves["q0"], leaves["k0"], leaves["v0"], causal=True),)

    def sixteen_bits(self, leaves: Tensors, grad: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        """The same caches in the dtype of q, times their scales."""
        q, scales = leaves["q"], {"k_cache": self.k_scale, "v_cache": self.v_scale}
        return {"q": q, **{n: leaves[n].to(q.dtype) * scale for n, scale in scales.items()}}, grad

    def peers(self) -> dict[str, Implementation]:
        found = self.sdpa_peers()
        found["varlen"] = Implementation(self.varlen, self.packed)
        if self.uneven or len(self.pages.groups) > 1:
            found[CONTIGUOUS] = Implementation(self.ours_packed, self.packed)
        else:
            dense = Implementation(self.ours_dense, self.batches, restore=self.unbatched)
            found[CONTIGUOUS] = dense
        if self.k_scale != 1:
            unscaled = dataclasses.replace(self, k_scale=1.0, v_scale=1.0)
            found[SIXTEEN_BITS] = Implementation(unscaled.ours, self.sixteen_bits)
        return found

    def part(self, start: int, stop: int) -> Attention:
        """Of some of the sequences."""
        return dataclasses.replace(self, pages=self.pages.part(start, stop))


def make_paged(
    shape: Shape, dtype: torch.dtype, device: torch.device, lengths: Lengths
) -> PagedCase:
    """Queries (T, H, D) over caches of (blocks, page, Hk, D) that hold no more than their keys."""
    pages = Pages.spread(lengths, shape.page or USUAL_PAGE, device)
    scales = (K_SCALE, V_SCALE) if shape.e4m3 else (1.0, 1.0)
    attention = Attention(pages, *scales)

    def normal(*size: int, scale: float, dtype: torch.dtype) -> torch.Tensor:
        return (torch.randn(*size, device=device) / scale).to(dtype)

    query_size = (sum(n for n, _ in lengths), shape.heads, shape.dim)
    cache_size = (sum(map(len, pages.blocks)), pages.page, shape.kv_heads, shape.dim)
    leaves = {"q": normal(*query_size, scale=1.0, dtype=dtype)}
    for name, scale in zip(("k_cache", "v_cache"), scales, strict=True):
        stored = FLOAT8 if shape.e4m3 else dtype
        leaves[name] = normal(*cache_size, scale=scale, dtype=stored)
    scores = shape.heads * sum(n * m - n * (n - 1) // 2 for n, m in lengths)
    row_bytes = 2 * shape.kv_heads * shape.dim * leaves["k_cache"].element_size()
    return PagedCase(
        leaves=leaves,
        grad=torch.empty(query_size, dtype=dtype, device=device),
        scores=scores,
        flops=4.0 * scores * shape.dim,
        ours=Implementation(attention.ours, explain=attention.explain),
        reference=Implementation(attention.reference, backend="math"),
        peers=attention.peers(),
        bytes=row_bytes * sum(m for _, m in lengths),
        reproducible=True,
        keywords=attention.keywords,
        attention=attention,
    )


def make_decode(shape: Shape, dtype: torch.dtype, device: torch.device) -> Case:
    """One new token of each of shape.batch sequences."""
    return make_paged(shape, dtype, device, [(1, shape.length)] * shape.batch)


def make_uneven(shape: Shape, dtype: torch.dtype, device: torch.device) -> Case:
    """The same over lengths that are log-normal around shape.length: the longest has many times
    the keys of most."""
    lengths = ragged_lengths(shape.batch, shape.length, spread=1.0)
    case = make_paged(shape, dtype, device, [(1, keys) for keys in lengths])
    return dataclasses.replace(case, lengths=tuple(lengths))


def make_prefill(shape: Shape, dtype: torch.dtype, device: torch.device) -> Case:
    """Chunks of shape.queries new tokens, shape.length with those before them."""
    chunk = (shape.queries or -(-shape.length // 2), shape.length)
    case = make_paged(shape, dtype, device, [chunk] * shape.batch)
    return dataclasses.replace(case, bytes=0)  # products are the work


def make_mixed(shape: Shape, dtype: torch.dtype, device: torch.device) -> Case:
    """shape.batch decodes and one chunk of shape.queries, all over shape.length keys."""
    chunk = (shape.queries or -(-shape.length // 2), shape.length)
    case = make_paged(shape, dtype, device, [(1, shape.length)] * shape.batch + [chunk])
    batch = shape.batch
    decodes, chunk = case.attention.part(0, batch), case.attention.part(batch, batch + 1)

    def first(leaves: Tensors, grad: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        return {**leaves, "q": leaves["q"][:batch]}, grad

    def rest(leaves: Tensors, grad: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        return {**leaves, "q": leaves["q"][batch:]}, grad

    def apart(leaves: Tensors) -> tuple[torch.Tensor, ...]:
        return decodes.ours(first(leaves, None)[0]), chunk.ours(rest(leaves, None)[0])

    own = {
        APART: Implementation(apart, restore=lambda x: {"out": torch.cat([*x.values()])}),
        DECODES: Implementation(decodes.ours, first, another=True),
        CHUNK: Implementation(chunk.ours, rest, another=True),
    }
    return dataclasses.replace(case, peers={**case.peers, **own})


USUAL_PAGE = 16
HEADS = "128,kv8"  # and 32 query heads: those of most models of 8 billion numbers


def shapes(sizes: Iterable[str], options: str) -> tuple[str, ...]:
    """ "16x8192" as 16,32,8192,128,kv8 with the options."""
    pairs = (size.split("x") for size in sizes)
    return tuple(f"{batch},32,{keys},{HEADS},{options}" for batch, keys in pairs)


def chunk_shapes(options: str) -> tuple[str, ...]:
    """Chunks of a prompt that has 8,192 tokens with them."""
    return tuple(s for n in CHUNKS for s in shapes(("1x8192",), f"q{n},{options}"))


# Where memory is not yet busy, and where it is: from 256k keys on.
FEW_KEYS = ("1x512", "1x8192", "16x512", "16x2048", "16x8192")
MANY_KEYS = ("256x1024", "64x8192", "8x32768")
DECODE = {
    "p16": shapes((*FEW_KEYS, *MANY_KEYS), "p16"),
    "p64": shapes(("16x8192", *MANY_KEYS), "p64"),
    "p1": shapes(("16x8192", *MANY_KEYS), "p1"),
    "e4m3": shapes((*FEW_KEYS, *MANY_KEYS), "p16,e4m3"),
}
# Means that give as many keys altogether as those of published comparisons: 19k and 654k.
UNEVEN = ("16x1262", "256x2571")
MIXED = (("16x8192", 512), ("64x8192", 512), ("255x8192", 2048))
CHUNKS = (512, 1024, 2048)

BATCHED = ("flash", "cudnn", "efficient")
COMMON = {
    "operator": "attention over pages",
    "options": frozenset({"kv", "page", "e4m3"}),
    "passes": ("fwd",),
    "in_graph": True,
}
CHUNKED = {**COMMON, "options": COMMON["options"] | {"queries"}}


def peers_on(cuda: tuple[str, ...], *own: str) -> dict[str, tuple[str, ...]]:
    """PyTorch's varlen_attn is a GPU's alone."""
    ours = (CONTIGUOUS, SIXTEEN_BITS, *own)
    return {"cpu": ("flash", "math", *ours), "cuda": (*cuda, "varlen", *ours)}


PAGED_WORKLOADS = {
    "paged_decode": Workload(
        "one new token of each of B sequences over S keys in pages of N (pN), 16 bits or e4m3",
        {
            "cpu": ("4,8,512,64,kv2,p16", "4,8,512,64,kv2,p1", "4,8,512,64,kv2,p16,e4m3"),
            "cuda": tuple(itertools.chain(*DECODE.values())),
        },
        make_decode,
        peers_on=peers_on(BATCHED),
        **COMMON,
    ),
    "paged_uneven": Workload(
        "paged_decode over lengths that are log-normal around S; SDPA gets them padded",
        {
            "cpu": ("8,8,256,64,kv2,p16",),
            "cuda": (*shapes(UNEVEN, "p16"), *shapes(UNEVEN, "p16,e4m3")),
        },
        make_uneven,
        # Padded to the longest they would need a hundred gigabytes.
        peers_on=peers_on(()),
        **COMMON,
    ),
    "paged_mixed": Workload(
        "B decodes and one chunk of N tokens (qN) in a call, next to our own in two (apart)",
        {
            "cpu": ("4,8,512,64,kv2,q64,p16",),
            "cuda": tuple(
                shape
                for cache in ("p16", "p16,e4m3")
                for size, chunk in MIXED
                for shape in shapes((size,), f"q{chunk},{cache}")
            ),
        },
        make_mixed,
        peers_on=peers_on(BATCHED, APART, DECODES, CHUNK),
        **CHUNKED,
    ),
    "paged_prefill": Workload(
        "a chunk of N tokens (qN) over S keys in pages",
        {
            "cpu": ("1,8,512,64,kv2,q128,p16",),
            "cuda": (
                *chunk_shapes("p16"),
                *chunk_shapes("p64"),
                *chunk_shapes("p16,e4m3"),
            ),
        },
        make_prefill,
        peers_on=peers_on(BATCHED),
        **CHUNKED,
    ),
}
