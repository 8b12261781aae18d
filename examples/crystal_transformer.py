"""A small crystal transformer that learns the energies of random crystals in under a minute.

Crystals have different numbers of atoms. A batch holds them end to end, without padding, and
attention adds to the score of two atoms a bias learned from the distance between them. That bias
is all the model ever sees of the geometry.

    python examples/crystal_transformer.py
    python examples/crystal_transformer.py --steps 3000 --seed 1 --device cuda --dtype bfloat16
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from flashmoe_science import flash_attention_varlen

# The physics to be learned: Morse potentials between four made-up elements, in eV and Angstrom.
RADIUS = torch.tensor([0.9, 1.1, 1.2, 1.4])  # two atoms like to be the sum of their radii apart,
DEPTH = torch.tensor([0.2, 0.5, 0.3, 0.8])  # and this is how much they like it
STEEPNESS = 1.5
CUTOFF = 3.6


class Crystal(NamedTuple):
    """A periodic cell with n atoms."""

    elements: Tensor  # (n,)
    distances: Tensor  # (n, n), from each atom to the nearest image of each other
    energy: Tensor  # eV per atom


def energy_per_atom(elements: Tensor, distances: Tensor) -> Tensor:
    best = RADIUS[elements][:, None] + RADIUS[elements]
    depth = (DEPTH[elements][:, None] * DEPTH[elements]).sqrt()
    morse = depth * ((1 - torch.exp(STEEPNESS * (best - distances))) ** 2 - 1)
    # Fades to 0 at the cutoff, so that the energy does not jump where an atom crosses it.
    fade = 0.5 + 0.5 * torch.cos(torch.pi * distances.clamp(max=CUTOFF) / CUTOFF)
    pairs = (morse * fade).fill_diagonal_(0)  # no atom meets itself
    return pairs.sum() / 2 / len(elements)  # each pair was counted twice


def random_crystal() -> Crystal:
    """Atoms on some sites of a stretched and sheared grid, each shaken a little."""
    sites = torch.randint(3, 5, (3,))  # along each axis
    # Wider than two cutoffs: of all images of an atom only the nearest can be within one.
    cell = torch.diag(sites * (2.5 + 0.7 * torch.rand(3))) + 0.3 * torch.randn(3, 3).tril(-1)
    grid = torch.cartesian_prod(*(torch.arange(int(n)) for n in sites))
    grid = grid[torch.randperm(len(grid))[: torch.randint(8, len(grid) + 1, ())]]
    positions = (grid + 0.05 * torch.randn(grid.shape)) / sites  # in units of the cell
    apart = positions[:, None] - positions
    distances = ((apart - apart.round()) @ cell).norm(dim=-1)
    elements = torch.randint(len(RADIUS), (len(grid),))
    return Crystal(elements, distances, energy_per_atom(elements, distances))


class Batch(NamedTuple):
    """N crystals end to end: T atoms and P pairs, the sum of all n * n."""

    elements: Tensor  # (T,)
    distances: Tensor  # (P,): the n x n of each crystal, row after row, as a packed bias lies
    offsets: Tensor  # (N + 1,): crystal i has the atoms from offsets[i] to offsets[i + 1]
    longest: int  # atoms of the largest crystal
    energy: Tensor  # (N,)


def pack(crystals: list[Crystal], device: torch.device) -> Batch:
    lengths = [len(crystal.elements) for crystal in crystals]
    return Batch(
        torch.cat([crystal.elements for crystal in crystals]).to(device),
        torch.cat([crystal.distances.flatten() for crystal in crystals]).to(device),
        torch.tensor([0, *lengths], device=device).cumsum(0),
        max(lengths),
        torch.stack([crystal.energy for crystal in crystals]).to(device),
    )


class Block(nn.Module):
    """Atoms look at each other, guided by distance; then each one thinks for itself."""

    def __init__(self, width: int, heads: int, radial: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.heads, self.dtype = heads, dtype
        # From a distance to one number per head, added to the scores of that head.
        self.bias = nn.Sequential(nn.Linear(radial, 32), nn.SiLU(), nn.Linear(32, heads))
        self.qkv = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 3 * width))
        self.out = nn.Linear(width + heads, width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.SiLU(), nn.Linear(2 * width, width)
        )

    def forward(self, x: Tensor, radial: Tensor, batch: Batch) -> Tensor:
        q, k, v = self.qkv(x).to(self.dtype).unflatten(1, (3, self.heads, -1)).unbind(1)
        bias = self.bias(radial)  # (P, heads), in fp32 whatever the dtype of q, k and v
        cu, longest = batch.offsets, batch.longest
        out, lse = flash_attention_varlen(
            q, k, v, cu, cu, longest, longest, bias=bias, return_lse=True
        )
        # Softmax gives an average over the neighbours. How many there are, and how near, it divides
        # away; that is in lse, the log of what it divided by, which has a gradient too.
        x = x + self.out(torch.cat([out.flatten(1).to(x.dtype), lse], dim=1))
        return x + self.mlp(x)


class CrystalTransformer(nn.Module):
    """From elements and distances to the energy per atom, which has this mean and deviation."""

    def __init__(
        self,
        mean: float,
        deviation: float,
        dtype: torch.dtype = torch.float32,  # of attention; weights are always fp32
        width: int = 64,
        heads: int = 4,
        radial: int = 24,
        layers: int = 2,
    ) -> None:
        super().__init__()
        self.mean, self.deviation = mean, deviation
        self.register_buffer("centers", torch.linspace(0, CUTOFF, radial))
        self.element = nn.Embedding(len(RADIUS), width)
        self.blocks = nn.ModuleList(Block(width, heads, radial, dtype) for _ in range(layers))
        self.energy = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 1))

    def forward(self, batch: Batch) -> Tensor:
        # A distance becomes a row of overlapping Gaussians, from which it is easy to learn a curve.
        away = (batch.distances[:, None] - self.centers) / self.centers[1]
        radial = torch.exp(-0.5 * away**2)  # (P, radial)
        x = self.element(batch.elements)  # (T, width)
        for block in self.blocks:
            x = block(x, radial, batch)
        atoms = self.energy(x).squeeze(1)
        crystals = torch.segment_reduce(atoms, "mean", lengths=batch.offsets.diff())
        return self.mean + self.deviation * crystals


def train(model: CrystalTransformer, crystals: list[Crystal], steps: int) -> Iterator[Tensor]:
    """Yields the loss of every step, in units of what predicting the mean would give."""
    device = model.centers.device
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 5e-3, steps, pct_start=0.1)
    for _ in range(steps):
        batch = pack([crystals[i] for i in torch.randint(len(crystals), (16,))], device)
        loss = ((model(batch) - batch.energy) / model.deviation).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        yield loss.detach()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--dtype",
        choices=["float32", "bfloat16", "float16"],
        help="of query, key and value; default float32, on a GPU bfloat16",
    )
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    device = torch.device(args.device)
    dtype = args.dtype or ("bfloat16" if device.type == "cuda" else "float32")

    torch.manual_seed(args.seed)
    crystals = [random_crystal() for _ in range(2304)]
    crystals, unseen = crystals[256:], crystals[:256]
    energies = torch.stack([crystal.energy for crystal in crystals])
    mean, deviation = energies.mean().item(), energies.std().item()
    model = CrystalTransformer(mean, deviation, getattr(torch, dtype)).to(device)
    lengths = [len(crystal.elements) for crystal in crystals]
    print(
        f"{len(crystals)} crystals of {min(lengths)} to {max(lengths)} atoms; "
        f"attention on {device} in {dtype}"
    )

    start, recent = time.perf_counter(), []
    for step, loss in enumerate(train(model, crystals, args.steps), 1):
        recent.append(loss)
        if step % max(1, args.steps // 10) == 0 or step == args.steps:
            seconds = time.perf_counter() - start
            loss = torch.stack(recent).mean()
            print(f"step {step:4}/{args.steps}   loss {loss:.4f}   {seconds:4.0f} s", flush=True)
            recent.clear()

    batch = pack(unseen, device)
    with torch.no_grad():
        error = (model(batch) - batch.energy).abs().mean()
    trivial = (mean - batch.energy).abs().mean()
    print(
        f"mean error on {len(unseen)} unseen crystals: {1000 * error:.1f} meV per atom; "
        f"predicting the mean: {1000 * trivial:.1f}"
    )


if __name__ == "__main__":
    main()
