"""A small model of crystals whose experts are chosen by element, trained in a minute on a CPU.

What an atom's surroundings mean for its energy depends on which element it is. So each layer has
an expert for every element, and an atom goes to its own: nothing to route and nothing to balance,
whatever the elements' shares.

    python examples/element_experts.py
    python examples/element_experts.py --steps 2000 --seed 1 --device cuda --dtype bfloat16
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from flashmoe_science import moe

# The physics to be learned, of six made-up elements: atoms swim in the density of their neighbours,
# and each element likes another density, in a valley of another depth and width.
SHARES = torch.tensor([0.45, 0.2, 0.15, 0.1, 0.07, 0.03])  # some elements are everywhere
CHARGE = torch.tensor([0.5, 0.8, 1.0, 1.2, 1.5, 2.0])  # how much density an atom gives
BEST = torch.tensor([3.0, 4.5, 2.0, 6.0, 3.5, 5.0])  # and how much it likes to have
DEPTH = torch.tensor([0.4, -0.3, 0.7, 0.5, -0.6, 0.9])  # eV; hills where negative
WIDTH = torch.tensor([1.0, 0.7, 1.5, 0.8, 1.2, 1.0])
DECAY, CUTOFF = 1.2, 4.5  # Angstrom
RADIAL = 10  # Gaussians that a distance becomes


class Crystal(NamedTuple):
    """A periodic cell with n atoms."""

    elements: Tensor  # (n,)
    surroundings: Tensor  # (n, elements * RADIAL): which neighbours, and how far
    energy: Tensor  # eV per atom


def fade(distances: Tensor) -> Tensor:
    """From 1 to 0 at the cutoff; 0 for an atom and itself."""
    smooth = 0.5 + 0.5 * torch.cos(torch.pi * distances.clamp(max=CUTOFF) / CUTOFF)
    return smooth.masked_fill(distances == 0, 0)


def energy_per_atom(elements: Tensor, distances: Tensor) -> Tensor:
    density = (CHARGE[elements] * torch.exp(-distances / DECAY) * fade(distances)).sum(1) * 10
    off = (density - BEST[elements]) / WIDTH[elements]
    return (-DEPTH[elements] * torch.exp(-0.5 * off**2)).mean()


def surroundings_of(elements: Tensor, distances: Tensor) -> Tensor:
    centers = torch.linspace(1.0, CUTOFF, RADIAL)
    away = (distances[..., None] - centers) / (centers[1] - centers[0])
    radial = torch.exp(-0.5 * away**2) * fade(distances)[..., None]  # (n, n, RADIAL)
    kinds = nn.functional.one_hot(elements, len(SHARES)).to(radial.dtype)  # (n, elements)
    return torch.einsum("ijr,je->ier", radial, kinds).flatten(1)


def random_crystal() -> Crystal:
    """A cubic grid of atoms, shaken, in a cell that is sometimes wide and sometimes narrow."""
    n = int(torch.randint(3, 5, ()))
    grid = torch.cartesian_prod(*[torch.arange(n)] * 3).float()
    grid = grid[torch.randperm(len(grid))[: torch.randint(n**3 // 2, n**3 + 1, ())]]
    spacing = 2.4 + 0.8 * torch.rand(())
    positions = grid + 0.08 * torch.randn(grid.shape)  # in units of the spacing
    apart = positions[:, None] - positions
    distances = ((apart - n * (apart / n).round()) * spacing).norm(dim=-1)
    elements = torch.multinomial(SHARES, len(grid), replacement=True)
    surroundings = surroundings_of(elements, distances)
    return Crystal(elements, surroundings, energy_per_atom(elements, distances))


class Batch(NamedTuple):
    """N crystals end to end: T atoms."""

    elements: Tensor  # (T,)
    surroundings: Tensor  # (T, elements * RADIAL)
    lengths: Tensor  # (N,), atoms of each
    energy: Tensor  # (N,)


def pack(crystals: list[Crystal], device: torch.device) -> Batch:
    return Batch(
        torch.cat([crystal.elements for crystal in crystals]).to(device),
        torch.cat([crystal.surroundings for crystal in crystals]).to(device),
        torch.tensor([len(crystal.elements) for crystal in crystals], device=device),
        torch.stack([crystal.energy for crystal in crystals]).to(device),
    )


class ElementExperts(nn.Module):
    """A layer with one expert for each of `experts` kinds of atoms."""

    def __init__(self, experts: int, width: int, inner: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype, self.norm = dtype, nn.LayerNorm(width)
        self.gate_up = nn.Parameter(torch.randn(experts, 2 * inner, width) / width**0.5)
        self.down = nn.Parameter(torch.randn(experts, width, inner) / inner**0.5)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        """ids: (T, 1), which expert each atom goes to."""
        gate_up, down = self.gate_up.to(self.dtype), self.down.to(self.dtype)
        out = moe(self.norm(x).to(self.dtype), gate_up, down, ids)
        return x + out.to(x.dtype)


class Model(nn.Module):
    """From elements and surroundings to the energy per atom, which has this mean and deviation."""

    def __init__(
        self,
        mean: float,
        deviation: float,
        dtype: torch.dtype = torch.float32,  # of the experts' products; weights are fp32
        width: int = 48,
        inner: int = 64,
        layers: int = 2,
    ) -> None:
        super().__init__()
        self.mean, self.deviation = mean, deviation
        self.element = nn.Embedding(len(SHARES), width)
        self.surroundings = nn.Linear(len(SHARES) * RADIAL, width)
        self.layers = nn.ModuleList(
            ElementExperts(len(SHARES), width, inner, dtype) for _ in range(layers)
        )
        self.energy = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 1))

    def forward(self, batch: Batch) -> Tensor:
        x = self.element(batch.elements) + self.surroundings(batch.surroundings)
        for layer in self.layers:
            x = layer(x, batch.elements[:, None])
        atoms = self.energy(x).squeeze(1)
        crystals = torch.segment_reduce(atoms, "mean", lengths=batch.lengths)
        return self.mean + self.deviation * crystals


def train(model: Model, crystals: list[Crystal], steps: int) -> Iterator[Tensor]:
    """Yields the loss of every step, in units of what predicting the mean would give."""
    device = model.element.weight.device
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, steps, pct_start=0.1)
    for _ in range(steps):
        batch = pack([crystals[i] for i in torch.randint(len(crystals), (32,))], device)
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
        help="of the experts' products; default float32, on a GPU bfloat16",
    )
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    device = torch.device(args.device)
    dtype = args.dtype or ("bfloat16" if device.type == "cuda" else "float32")

    torch.manual_seed(args.seed)
    crystals = [random_crystal() for _ in range(2304)]
    crystals, unseen = crystals[256:], pack(crystals[:256], device)
    energies = torch.stack([crystal.energy for crystal in crystals])
    mean, deviation = energies.mean().item(), energies.std().item()
    atoms = sum(len(crystal.elements) for crystal in crystals)
    print(f"{len(crystals)} crystals, {atoms} atoms; experts on {device} in {dtype}")

    model = Model(mean, deviation, getattr(torch, dtype)).to(device)
    start, recent = time.perf_counter(), []
    for step, loss in enumerate(train(model, crystals, args.steps), 1):
        recent.append(loss)
        if step % max(1, args.steps // 10) == 0 or step == args.steps:
            seconds, loss = time.perf_counter() - start, torch.stack(recent).mean()
            print(f"step {step:4}/{args.steps}   loss {loss:.4f}   {seconds:4.0f} s", flush=True)
            recent.clear()

    with torch.no_grad():
        error = (model(unseen) - unseen.energy).abs().mean()
    trivial = (mean - unseen.energy).abs().mean()
    print(
        f"mean error on {len(unseen.energy)} unseen crystals: {1000 * error:.1f} meV per atom; "
        f"predicting the mean: {1000 * trivial:.1f}"
    )


if __name__ == "__main__":
    main()
