"""The examples and the code in the documentation do what they say."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from itertools import pairwise

import pytest
import torch


def run(script, *arguments) -> str:
    """Its output. On one thread: others may be running, and the models are small."""
    path = str(script.parents[1] / "python")
    done = subprocess.run(
        [sys.executable, str(script), *arguments],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def python_blocks(document) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", document.read_text(), re.M | re.DOTALL)


def test_the_first_example_is_the_readmes(checkout):
    example = checkout / "examples" / "first.py"
    code = python_blocks(checkout / "README.md")[0]
    assert example.read_text().replace("\n\n", "\n").endswith(code.replace("\n\n", "\n"))
    printed = run(example).splitlines()
    assert "\n".join(printed[:2]) in (checkout / "README.md").read_text()
    assert printed[2].startswith("kernel")


def test_the_code_of_the_models_page_runs(checkout, capsys):
    """Top to bottom, as a reader would; it asserts by itself that before and after agree."""
    code = "\n".join(python_blocks(checkout / "docs" / "models.md"))
    assert code.count("assert_close") >= 5
    exec(compile(code, "docs/models.md", "exec"), {"__name__": "models"})
    assert "attention in float32" in capsys.readouterr().out


def load(checkout, name: str):
    spec = importlib.util.spec_from_file_location(name, checkout / "examples" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def example(checkout):
    return load(checkout, "crystal_transformer")


@pytest.fixture
def crystals(example):
    return [example.random_crystal() for _ in range(64)]


def test_crystals_are_ragged_and_like_crystals(crystals):
    lengths = {len(crystal.elements) for crystal in crystals}
    assert len(lengths) > 10 and min(lengths) >= 8 and max(lengths) <= 64
    for crystal in crystals:
        distances = crystal.distances
        torch.testing.assert_close(distances, distances.T)
        assert (distances.diagonal() == 0).all()
        others = distances + 99 * torch.eye(len(distances))
        assert others.min() > 1.5, "no two atoms on top of each other"
        assert crystal.energy.isfinite()
    energies = torch.stack([crystal.energy for crystal in crystals])
    assert energies.std() > 0.01


def test_a_crystal_does_not_see_its_neighbours_in_the_batch(example, crystals):
    model = example.CrystalTransformer(mean=-0.1, deviation=0.05)
    together = model(example.pack(crystals, torch.device("cpu")))
    alone = [model(example.pack([crystal], torch.device("cpu"))) for crystal in crystals]
    torch.testing.assert_close(together, torch.cat(alone))
    assert together.std() > 1e-4, "a model that says the same of every crystal would pass too"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_bias_function_is_taught(example, crystals, threads, dtype):
    threads(1)
    energies = torch.stack([crystal.energy for crystal in crystals])
    model = example.CrystalTransformer(energies.mean().item(), energies.std().item(), dtype)
    before = {name: p.clone() for name, p in model.named_parameters()}
    losses = torch.stack(list(example.train(model, crystals, steps=80)))
    assert losses[-10:].mean() < 0.7 * losses[:10].mean()
    taught = [(name, p) for name, p in model.named_parameters() if ".bias." in name]
    assert len(taught) == 4 * len(model.blocks)
    for name, parameter in taught:
        assert parameter.grad.isfinite().all() and parameter.grad.abs().max() > 0, name
        assert (parameter != before[name]).any(), name


@pytest.fixture(scope="module")
def experts(checkout):
    return load(checkout, "element_experts")


def test_surroundings_do_not_depend_on_the_order_of_atoms(experts):
    crystal = experts.random_crystal()
    assert crystal.surroundings.isfinite().all() and (crystal.surroundings > 0.1).any(1).all()
    assert len(crystal.elements.unique()) > 1
    batch = experts.pack([crystal], torch.device("cpu"))
    order = torch.randperm(len(crystal.elements))
    turned = batch._replace(elements=batch.elements[order], surroundings=batch.surroundings[order])
    model = experts.Model(mean=-0.1, deviation=0.05)
    torch.testing.assert_close(model(turned), model(batch))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_element_teaches_its_own_expert(experts, threads, dtype):
    threads(1)
    crystals = [experts.random_crystal() for _ in range(64)]
    energies = torch.stack([crystal.energy for crystal in crystals])
    model = experts.Model(energies.mean().item(), energies.std().item(), dtype)
    before = [layer.down.detach().clone() for layer in model.layers]
    losses = torch.stack(list(experts.train(model, crystals, steps=60)))
    assert losses[-10:].mean() < 0.5 * losses[:10].mean()
    for layer, old in zip(model.layers, before, strict=True):
        assert ((layer.down - old).flatten(1).abs().amax(1) > 1e-3).all(), "of every expert"


@pytest.fixture(scope="module")
def forces(checkout):
    return load(checkout, "forces")


@pytest.fixture
def clusters(forces):
    torch.manual_seed(0)
    return [(elements, x.double()) for elements, x in (forces.random_cluster() for _ in range(4))]


def test_forces_are_what_the_energy_falls_by(forces, clusters):
    model = forces.Potential(per_atom=-1.0).double()
    batch, step = forces.pack(clusters), 1e-5
    for energy in (model, forces.true_energy):
        _, given = forces.energy_and_forces(energy, batch)
        atom, axis = len(batch.elements) // 2, 1
        moved = torch.zeros_like(batch.positions)
        moved[atom, axis] = step
        above, below = (
            energy(batch._replace(positions=batch.positions + sign * moved)).sum()
            for sign in (1, -1)
        )
        assert given.abs().max() > 1e-3
        assert given[atom, axis].item() == pytest.approx(
            (below - above).item() / (2 * step), rel=1e-5, abs=1e-8
        )


def test_a_loss_of_forces_teaches_what_plain_math_would(forces, clusters, monkeypatch):
    model, batch = forces.Potential(per_atom=-1.0).double(), forces.pack(clusters)

    def gradients():
        _, pushed = forces.energy_and_forces(model, batch, train=True)
        parameters = dict(model.named_parameters())
        loss = (pushed - 1).square().sum()
        found = torch.autograd.grad(loss, parameters.values(), materialize_grads=True)
        return dict(zip(parameters, found, strict=True))

    def plain(q, k, v, cu, *_, bias, return_lse):
        outs, lses, start = [], [], 0
        for first, last in pairwise(cu.tolist()):
            n = last - first
            pair = bias[start : start + n * n].unflatten(0, (n, n)).movedim(-1, 0)
            start += n * n
            a, b, c = (x[first:last].transpose(0, 1) for x in (q, k, v))
            scores = a @ b.mT / q.shape[-1] ** 0.5 + pair
            outs.append((scores.softmax(-1) @ c).transpose(0, 1))
            lses.append(scores.logsumexp(-1).transpose(0, 1))
        return torch.cat(outs), torch.cat(lses)

    got = gradients()
    monkeypatch.setattr(forces, "flash_attention_varlen", plain)
    want = gradients()
    for name, gradient in want.items():
        torch.testing.assert_close(got[name], gradient, rtol=1e-8, atol=1e-10, msg=name)
    taught = [name for name, gradient in got.items() if gradient.abs().max() > 1e-6]
    assert {f"blocks.{i}.bias.{j}.weight" for i in (0, 1) for j in (0, 2)} <= set(taught)


def test_energy_is_conserved_along_forces(forces, clusters, threads):
    """The error of velocity Verlet falls with the square of the time step, if forces are true."""
    threads(1)
    torch.manual_seed(3)
    model = forces.Potential(per_atom=-1.0).double()
    for block in model.blocks:
        block.bias[2].weight.data *= 10  # stronger forces
    (long, motion), (short, _) = (
        forces.drift(model, forces.pack(clusters), step, span=2) for step in (0.1, 0.05)
    )
    assert 0 < long < 0.01 * motion
    assert 3.5 < long / short < 4.5


@pytest.mark.slow
def test_the_example_of_forces_learns(checkout):
    printed = run(checkout / "examples" / "forces.py", "--steps", "300")
    errors = [float(x) for x in re.findall(r"force error ([\d.]+)", printed)]
    assert len(errors) == 10 and errors[-1] < 0.6 * errors[0]
    motion, long, short = map(
        float, re.search(r"up to ([\d.]+) meV.* by ([\d.]+) meV.* by ([\d.]+)", printed).groups()
    )
    assert long < 0.05 * motion and short < 0.35 * long, printed


@pytest.mark.slow
@pytest.mark.parametrize("name, steps", [("crystal_transformer", 250), ("element_experts", 250)])
def test_an_example_beats_predicting_the_mean(checkout, name, steps):
    script = checkout / "examples" / f"{name}.py"
    printed = run(script, "--device", "cpu", "--steps", str(steps))
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", printed)]
    assert len(losses) == 10 and losses[-1] < 0.2 * losses[0]
    errors = re.search(r": ([\d.]+) meV per atom; predicting the mean: ([\d.]+)", printed)
    error, trivial = map(float, errors.groups())
    assert error < 0.4 * trivial, printed
