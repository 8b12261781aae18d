"""The examples and the code in the documentation do what they say."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys

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
