"""The wheel: built, looked into, installed into an empty environment and used from elsewhere."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest
import torch

from catalogue import IMAGES

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "python" / "flashmoe_science"

pytestmark = pytest.mark.slow

USE = """
import sys, torch
import flashmoe_science as fm
from flashmoe_science.compat.flash_attn import flash_attn_func

assert fm.__file__.startswith(sys.prefix), fm.__file__
q, k, v = (torch.randn(2, 4, 65, 16, dtype=torch.float64, requires_grad=True) for _ in range(3))
bias = torch.randn(4, 65, 65, dtype=torch.float64, requires_grad=True)
inputs = (q, k, v, bias)
out = fm.flash_attention(q, k, v, bias=bias)
want = torch.softmax(q @ k.mT / 4 + bias, -1) @ v
torch.testing.assert_close(out, want)
weight = torch.randn_like(out)
got = torch.autograd.grad(out, inputs, weight)
for a, b in zip(got, torch.autograd.grad(want, inputs, weight)):
    torch.testing.assert_close(a, b)
assert "cpu" in fm.explain(q, k, v)
print("works")
"""


def environment() -> dict[str, str]:
    """Ours without what would lead back to the checkout."""
    names = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    return {name: value for name, value in os.environ.items() if name not in names}


def run(*command: str | Path, **options) -> str:
    done = subprocess.run(
        [str(part) for part in command],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=900,
        **options,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def in_place() -> dict[str, str]:
    """The libraries that `make build` left, by their content."""
    libraries = sorted((PACKAGE / "lib").glob("*"))
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in libraries}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    before = in_place()
    # The kernels of the checkout's build, where it has any.
    given = [f"--config-settings=cmake.define.FLASHMOE_FAMILIES={'auto' if IMAGES else 'none'}"]
    if IMAGES:
        given += [f"--config-settings=cmake.define.FLASHMOE_FATBINS={IMAGES[0].parent}"]
    run(
        *(sys.executable, "-m", "pip", "wheel", "--disable-pip-version-check", "--quiet"),
        *("--no-build-isolation", "--no-deps", "--no-index", "-w", folder, *given, ROOT),
        cwd=folder,
    )
    assert in_place() == before, "building the wheel changed the build of the checkout"
    (built,) = folder.glob("*.whl")
    return built


def test_one_wheel_for_every_python(wheel):
    """py3-none: no Python is linked, so none is named."""
    platform = re.sub(r"[-.]", "_", sysconfig.get_platform())
    system, machine = platform.split("_", 1)
    tag = rf"(?:{platform}|many{system}\w*_{machine.removeprefix('gnu_')})"
    assert re.fullmatch(rf"flashmoe_science-\d+\.\d+\.\d+\S*-py3-none-{tag}\.whl", wheel.name)


def test_the_wheel_is_small(wheel):
    assert wheel.stat().st_size < 100_000_000


def test_the_wheel_holds_the_package_and_nothing_else(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    files = {name for name in names if not name.endswith("/")}
    package = {name for name in files if name.startswith("flashmoe_science/")}
    metadata = {name for name in files if re.match(r"flashmoe_science-[^/]*\.dist-info/", name)}
    assert files == package | metadata
    sources = {
        f"flashmoe_science/{path.relative_to(PACKAGE)}"
        for path in PACKAGE.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and "lib" not in path.parts
    }
    libraries = {f"flashmoe_science/lib/lib{name}.so" for name in ("flashmoe", "flashmoe_torch")}
    assert package == sources | libraries
    assert "flashmoe_science/py.typed" in package
    assert any(name.endswith("licenses/LICENSE") for name in metadata)


def test_the_wheel_tells_serving_engines_of_itself(wheel):
    archive = zipfile.ZipFile(wheel)
    (name,) = (name for name in archive.namelist() if name.endswith("/entry_points.txt"))
    lines = archive.read(name).decode().replace(" ", "").splitlines()
    for group, module in (("vllm.general_plugins", "vllm"), ("sglang.srt.plugins", "sglang")):
        after = lines[lines.index(f"[{group}]") + 1]
        assert after == f"flashmoe_science=flashmoe_science.{module}:register"


def test_the_libraries_look_for_nothing_on_this_machine(wheel, tmp_path):
    zipfile.ZipFile(wheel).extractall(tmp_path)
    for library in tmp_path.rglob("*.so"):
        listed = run("readelf", "--dynamic", "--wide", library)
        paths = re.findall(r"\((?:RUNPATH|RPATH)\).*\[(.*?)\]", listed)
        assert all(path == "$ORIGIN" for path in paths), f"{library.name}: {paths}"


def test_the_wheel_works_in_an_empty_environment(wheel, tmp_path):
    env = tmp_path / "env"
    run(sys.executable, "-m", "venv", "--without-pip", env)
    python = env / "bin" / "python"
    (home,) = (env / "lib").glob("python*/site-packages")
    # It sees torch and what torch needs, as an environment with torch installed would.
    (home / "torch.pth").write_text(f"{Path(torch.__file__).parents[1]}\n")
    run(
        *(
            sys.executable,
            "-m",
            "pip",
            "--disable-pip-version-check",
            "--python",
            python,
            "install",
        ),
        *("--quiet", "--no-deps", "--no-index", "--ignore-installed", wheel),
    )
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    assert run(python, "-c", USE, cwd=elsewhere).strip() == "works"
    assert "doctor" in run(env / "bin" / "flashmoe-science", "--help", cwd=elsewhere)
    assert "explain" in run(python, "-m", "flashmoe_science", "--help", cwd=elsewhere)
