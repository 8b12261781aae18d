"""Ragged batches: how long their sequences are, and the same batch as others want it."""

from __future__ import annotations

import collections
import csv
import functools
import itertools
import random
import statistics
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

from flashmoe_science.bench import peers
from flashmoe_science.bench.case import Tensors

CRYSTALS = Path(__file__).parent / "data" / "mptrj_atoms_per_structure.csv"
MOST_ATOMS = 443  # of a structure in that table


def ragged_lengths(count: int, mean: int, spread: float = 0.8) -> list[int]:
    """Lengths spread like the atoms of crystals: log-normal around mean, always the same ones.

    A spread of 0.8 puts the longest of 64 near seven times the median.
    """
    normal = statistics.NormalDist(-spread * spread / 2, spread)
    quantiles = (normal.inv_cdf((i + 0.5) / count) for i in range(count))
    lengths = [max(1, round(mean * 2.718281828**z)) for z in quantiles]
    random.Random(0).shuffle(lengths)
    return lengths


def uniform_lengths(count: int, longest: int) -> list[int]:
    """From 100 tokens (fewer where even the longest is short) to the longest; always the same."""
    shortest = min(100, 1 + longest // 40)
    draw = random.Random(0)
    return [draw.randint(shortest, longest) for _ in range(count)]


@functools.cache
def structures_by_atoms() -> dict[int, int]:
    """How many structures of MPtrj have how many atoms; data/README.md says where this is from."""
    with CRYSTALS.open(newline="") as file:
        return {int(row["atoms"]): int(row["structures"]) for row in csv.DictReader(file)}


def crystal_lengths(count: int, most: int) -> list[int]:
    """Atoms of count crystals of at most that many, drawn from MPtrj; always the same ones."""
    table = {atoms: n for atoms, n in structures_by_atoms().items() if atoms <= most}
    return random.Random(0).choices(list(table), list(table.values()), k=count)


@dataclass(frozen=True)
class Ragged:
    """Sequences packed along the first dimension, and how others want them."""

    lengths: list[int]
    causal: bool
    device: torch.device

    @functools.cached_property
    def cu_seqlens(self) -> torch.Tensor:
        offsets = list(itertools.accumulate(self.lengths, initial=0))
        return torch.tensor(offsets, dtype=torch.int32, device=self.device)

    @property
    def longest(self) -> int:
        return max(self.lengths)

    @functools.cached_property
    def groups(self) -> list[tuple[int, int]]:
        """(length, how many sequences have it), shortest first."""
        return sorted(collections.Counter(self.lengths).items())

    def _by_length(self, sizes: list[int]) -> torch.Tensor:
        """Where the packed entries are, sequences of equal length side by side.

        sizes says how many entries each sequence has: tokens or pairs.
        """
        spans = torch.arange(sum(sizes)).split(sizes)
        order = sorted(range(len(sizes)), key=self.lengths.__getitem__)
        return torch.cat([spans[i] for i in order]).to(self.device)

    @functools.cached_property
    def tokens_by_length(self) -> torch.Tensor:
        return self._by_length(self.lengths)

    @functools.cached_property
    def pairs_by_length(self) -> torch.Tensor:
        return self._by_length([n * n for n in self.lengths])

    def without_padding(self, leaves: Tensors) -> torch.Tensor:
        """SDPA on all sequences of one length at a time: no mask, and plainly right.

        One sequence at a time would be plainer still: a check of 4,096 crystals then takes two CPU
        cores 28 s, like this 5.
        """
        tokens = self.tokens_by_length
        parts = [leaves[x][tokens].split([n * c for n, c in self.groups]) for x in "qkv"]
        biases: list | tuple = [None] * len(self.groups)
        if "bias" in leaves:
            pairs = leaves["bias"][self.pairs_by_length]
            biases = pairs.split([n * n * c for n, c in self.groups])
        outs = []
        for (n, count), *qkv, bias in zip(self.groups, *parts, biases, strict=True):
            q, k, v = (x.unflatten(0, (count, n)).transpose(1, 2) for x in qkv)
            mask = None if bias is None else bias.unflatten(0, (count, n, n)).permute(0, 3, 1, 2)
            gqa = q.shape[1] != k.shape[1]
            out = F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=self.causal, enable_gqa=gqa
            )
            outs.append(out.transpose(1, 2).flatten(0, 1))
        return torch.cat(outs)[tokens.argsort()]

    @functools.cached_property
    def inside(self) -> torch.Tensor:
        """Which places of a padded batch hold a token, (N, longest); in order, the packed ones."""
        position = torch.arange(self.longest, device=self.device)
        return position < torch.tensor(self.lengths, device=self.device)[:, None]

    @functools.cached_property
    def padding_mask(self) -> torch.Tensor:
        """Which keys a padded batch may see, (N, 1, 1 or longest, longest).

        Padded rows see some keys too: a row that sees none is NaN in PyTorch.
        """
        mask = self.inside[:, None, None, :]
        position = torch.arange(self.longest, device=self.device)
        return mask & (position <= position[:, None]) if self.causal else mask

    def pad(self, leaves: Tensors, grad: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        """The tensors as a padded batch, (N, H, longest, D); a bias takes in the padding mask."""
        padded = {name: self._pad_tokens(leaves[name]) for name in "qkv"}
        if "bias" in leaves:
            padded["bias"] = self._pad_bias(leaves["bias"])
        return padded, self._pad_tokens(grad)

    def _pad_tokens(self, packed: torch.Tensor) -> torch.Tensor:
        padded = packed.new_zeros(len(self.lengths), self.longest, *packed.shape[1:])
        padded[self.inside] = packed
        return padded.transpose(1, 2).contiguous()

    def _pad_bias(self, packed: torch.Tensor) -> torch.Tensor:
        # Tens of gigabytes for thousands of crystals: filled in place.
        size = (len(self.lengths), packed.shape[1], self.longest, self.longest)
        padded = packed.new_zeros(size)
        padded.permute(0, 2, 3, 1)[self.inside[:, :, None] & self.inside[:, None, :]] = packed
        return padded.masked_fill_(~self.padding_mask, float("-inf"))

    def unpad(self, results: Tensors) -> Tensors:
        """Output and gradients of a padded batch, packed again."""
        tokens, pairs = self.inside, self.inside[:, :, None] & self.inside[:, None, :]
        return {
            name: padded.permute(0, 2, 3, 1)[pairs]
            if name == "grad_bias"
            else padded.transpose(1, 2)[tokens]
            for name, padded in results.items()
        }

    def sdpa(self, leaves: Tensors) -> torch.Tensor:
        q, k, v = leaves["q"], leaves["k"], leaves["v"]
        mask = leaves.get("bias", self.padding_mask)
        gqa = q.shape[1] != k.shape[1]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=gqa)

    def torch_varlen(self, leaves: Tensors) -> torch.Tensor:
        cu_seqlens, longest = (self.cu_seqlens,) * 2, (self.longest,) * 2
        return peers.torch_varlen(leaves, cu_seqlens, longest, self.causal)
