"""A small potential for clusters of atoms, trained on energies and forces in a minute on a CPU.

Attention adds to the score of two atoms a bias learned from the distance between them, and that is
all the model sees of the geometry. So forces, the derivatives of the energy by the positions, come
through the gradient of the bias; and a loss of forces is trained through second derivatives of
attention, for which no pair of atoms is ever stored that the bias does not have.

Forces that are true derivatives conserve the energy: in the end a cluster moves along them, and its
energy stays what it was, the better the shorter the time step.

    python examples/forces.py
    python examples/forces.py --steps 2000 --seed 1
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from flashmoe_science import flash_attention_varlen

# The physics to be learned: Morse potentials between two made-up elements, in eV and Angstrom.
RADIUS = torch.tensor([1.0, 1.3])  # two atoms like to be the sum of their radii apart,
DEPTH = torch.tensor([0.4, 0.9])  # and this is how much they like it
STEEPNESS = 1.3
FARTHEST = 6.0  # distances that the model tells apart
MASS = 10.0  # of every atom; so that a time of 1 is about 3 femtoseconds


class Clusters(NamedTuple):
    """N clusters end to end: T atoms and P pairs, the sum of all n * n."""

    elements: Tensor  # (T,)
    positions: Tensor  # (T, 3)
    first: Tensor  # (P,): the atoms of each pair, a cluster's n x n row after row, as a packed
    second: Tensor  # (P,)  bias lies
    offsets: Tensor  # (N + 1,): cluster i has the atoms from offsets[i] to offsets[i + 1]
    largest: int  # atoms of the largest cluster


def distances(clusters: Clusters) -> Tensor:
    """(P,), of an atom to itself 0, where a norm has no derivative."""
    apart = clusters.positions[clusters.first] - clusters.positions[clusters.second]
    other = (clusters.first != clusters.second).to(apart.dtype)
    return (apart.square().sum(1) + 1 - other).sqrt() * other


def per_cluster(atoms: Tensor, clusters: Clusters) -> Tensor:
    """(T,) to (N,), summed."""
    lengths = clusters.offsets.diff()
    which = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    return atoms.new_zeros(len(lengths)).index_add(0, which, atoms)


def true_energy(clusters: Clusters) -> Tensor:
    """(N,), in eV."""
    i, j = clusters.elements[clusters.first], clusters.elements[clusters.second]
    best, depth = RADIUS[i] + RADIUS[j], (DEPTH[i] * DEPTH[j]).sqrt()
    morse = depth * ((1 - torch.exp(STEEPNESS * (best - distances(clusters)))) ** 2 - 1)
    pairs = torch.where(clusters.first == clusters.second, 0, morse) / 2  # each is there twice
    atoms = torch.zeros_like(clusters.positions[:, 0]).index_add(0, clusters.first, pairs)
    return per_cluster(atoms, clusters)


def energy_and_forces(energy, clusters: Clusters, train: bool = False) -> tuple[Tensor, Tensor]:
    """(N,) and (T, 3); to train on the forces, a graph of how they came about is kept."""
    positions = clusters.positions.detach().requires_grad_()
    energies = energy(clusters._replace(positions=positions))
    gradient = torch.autograd.grad(energies.sum(), positions, create_graph=train)[0]
    return energies if train else energies.detach(), -gradient


def pack(clusters: list[tuple[Tensor, Tensor]]) -> Clusters:
    """Of each cluster its elements and positions."""
    lengths = [len(elements) for elements, _ in clusters]
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    pairs = [torch.cartesian_prod(*[torch.arange(n)] * 2) for n in lengths]
    pairs = torch.cat([pair + start for pair, start in zip(pairs, offsets, strict=False)])
    return Clusters(
        torch.cat([elements for elements, _ in clusters]),
        torch.cat([positions for _, positions in clusters]),
        *pairs.T.contiguous(),
        offsets,
        max(lengths),
    )


def random_cluster() -> tuple[Tensor, Tensor]:
    """Atoms on some of the inner sites of a grid, shaken."""
    count = int(torch.randint(5, 13, ()))
    grid = torch.cartesian_prod(*[torch.arange(3.0)] * 3) - 1
    near = grid[grid.norm(dim=1).add(0.1 * torch.rand(27)).argsort()[:count]]
    positions = 2.3 * near + 0.15 * torch.randn(count, 3)
    return torch.randint(len(RADIUS), (count,)), positions


class Block(nn.Module):
    """Atoms look at each other, guided by distance; then each one thinks for itself."""

    def __init__(self, width: int, heads: int, radial: int) -> None:
        super().__init__()
        self.heads = heads
        self.bias = nn.Sequential(nn.Linear(radial, 32), nn.SiLU(), nn.Linear(32, heads))
        self.qkv = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 3 * width))
        self.out = nn.Linear(width + heads, width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.SiLU(), nn.Linear(2 * width, width)
        )

    def forward(self, x: Tensor, radial: Tensor, clusters: Clusters) -> Tensor:
        q, k, v = self.qkv(x).unflatten(1, (3, self.heads, -1)).unbind(1)
        cu, most = clusters.offsets, clusters.largest
        bias = self.bias(radial)  # (P, heads)
        out, lse = flash_attention_varlen(q, k, v, cu, cu, most, most, bias=bias, return_lse=True)
        # Softmax divides away how many neighbours there are, and how near; lse is the log of that.
        x = x + self.out(torch.cat([out.flatten(1), lse], dim=1))
        return x + self.mlp(x)


class Potential(nn.Module):
    """From elements and positions to energies."""

    def __init__(self, per_atom: float, width: int = 32, heads: int = 4, radial: int = 20) -> None:
        super().__init__()
        self.per_atom = per_atom  # the mean
        self.register_buffer("centers", torch.linspace(0, FARTHEST, radial))
        self.element = nn.Embedding(len(RADIUS), width)
        self.blocks = nn.ModuleList(Block(width, heads, radial) for _ in range(2))
        self.energy = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 1))

    def forward(self, clusters: Clusters) -> Tensor:
        # A distance becomes a row of overlapping Gaussians: smooth, so that forces are too.
        away = (distances(clusters)[:, None] - self.centers) / self.centers[1]
        radial = torch.exp(-0.5 * away**2)  # (P, radial)
        x = self.element(clusters.elements)  # (T, width)
        for block in self.blocks:
            x = block(x, radial, clusters)
        return per_cluster(self.energy(x).squeeze(1) + self.per_atom, clusters)


def train(model: Potential, clusters: list, steps: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields the errors of every step: of energies per atom, and of forces, mean squares."""
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 5e-3, steps, pct_start=0.1)
    for _ in range(steps):
        batch = pack([clusters[i] for i in torch.randint(len(clusters), (16,))])
        energies, forces = energy_and_forces(true_energy, batch)
        said, pushed = energy_and_forces(model, batch, train=True)
        energy_error = ((said - energies) / batch.offsets.diff()).square().mean()
        force_error = (pushed - forces).square().mean()
        optimizer.zero_grad()
        (10 * energy_error + force_error).backward()  # second derivatives of attention
        optimizer.step()
        schedule.step()
        yield energy_error.detach(), force_error.detach()


def trajectory(
    model: Potential, clusters: Clusters, step: float, steps: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields each cluster's energy of place and of motion along its way, by velocity Verlet."""
    velocities = torch.zeros_like(clusters.positions)
    energies, forces = energy_and_forces(model, clusters)
    for _ in range(steps + 1):
        yield energies, per_cluster(0.5 * MASS * velocities.square().sum(1), clusters)
        velocities = velocities + 0.5 * step / MASS * forces
        clusters = clusters._replace(positions=clusters.positions + step * velocities)
        energies, forces = energy_and_forces(model, clusters)
        velocities = velocities + 0.5 * step / MASS * forces


def drift(model: Potential, clusters: Clusters, step: float, span: float) -> tuple[float, float]:
    """By how much the whole energy of a cluster strays at most, and its largest one of motion."""
    path = trajectory(model, clusters, step, round(span / step))
    place, motion = map(torch.stack, zip(*path, strict=True))
    whole = place + motion
    return (whole - whole[0]).abs().max().item(), motion.max().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    clusters = [random_cluster() for _ in range(1088)]
    clusters, unseen = clusters[64:], pack(clusters[:64])
    everything = pack(clusters)
    energies, forces = energy_and_forces(true_energy, everything)
    model = Potential((energies.sum() / len(everything.elements)).item())
    print(f"{len(clusters)} clusters of 5 to {everything.largest} atoms")

    start, recent = time.perf_counter(), []
    for step, errors in enumerate(train(model, clusters, args.steps), 1):
        recent.append(torch.stack(errors))
        if step % max(1, args.steps // 10) == 0 or step == args.steps:
            energy_error, force_error = torch.stack(recent).mean(0).sqrt().tolist()
            print(
                f"step {step:4}/{args.steps}   energy error {1000 * energy_error:6.1f} meV per "
                f"atom   force error {force_error:.3f} eV/A   {time.perf_counter() - start:4.0f} s",
                flush=True,
            )
            recent.clear()

    energies, forces = energy_and_forces(true_energy, unseen)
    said, pushed = energy_and_forces(model, unseen)
    error = ((said - energies) / unseen.offsets.diff()).abs().mean()
    print(
        f"mean error on 64 unseen clusters: {1000 * error:.1f} meV per atom; forces "
        f"{(pushed - forces).abs().mean():.3f} of {forces.abs().mean():.3f} eV/A"
    )

    model.double()
    cluster = pack([(elements, positions.double()) for elements, positions in clusters[:4]])
    (long, motion), (short, _) = (drift(model, cluster, step, span=10) for step in (0.1, 0.05))
    print(
        f"along a trajectory with up to {1000 * motion:.0f} meV of motion the energy strays by "
        f"{1000 * long:.3f} meV, with half the time step by {1000 * short:.3f}"
    )


if __name__ == "__main__":
    main()
