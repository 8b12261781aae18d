"""The GPU tests use the oracle of the Python tests, and start each from the same seed."""

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

# torch.compile keeps what it compiled for other processes, and does not notice that an op of ours
# takes other arguments than it did then.
torch.compiler.config.force_disable_caches = True

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "python"), str(ROOT / "tests" / "python")]

from families import COMPLETE, EVERY_DTYPE, FAMILIES, has  # noqa: E402


def pytest_addoption(parser):
    parser.addoption(
        "--part", metavar="I/N", help="every N-th test only, from the I-th on, I from 0"
    )


def pytest_configure(config):
    for mark in (
        "kernels(role, tile): only for families that have such a kernel",
        "family(name): only for this family",
    ):
        config.addinivalue_line("markers", mark)


def pytest_report_header():
    return "kernel families: " + ", ".join(f"{f} ({' '.join(d)})" for f, d in FAMILIES.items())


def pytest_generate_tests(metafunc):
    """A test that asks for a dtype or a family runs for each that has the kernels it is about.

    A module may have DTYPE_NAMES: its tests run for those, in the families that have everything.
    """
    marks = list(metafunc.definition.iter_markers())
    wanted = [mark.kwargs for mark in marks if mark.name == "kernels"]
    only = {name for mark in marks if mark.name == "family" for name in mark.args}
    families = [
        family
        for family in FAMILIES
        if (not only or family in only)
        and (family in COMPLETE or all(has(family, **one) for one in wanted))
    ]
    names = getattr(metafunc.module, "DTYPE_NAMES", None)
    if names:
        families = [family for family in families if family in COMPLETE]
    if "family" in metafunc.fixturenames:
        metafunc.parametrize("family", families, indirect=True)
    if "dtype" in metafunc.fixturenames and "dtype" not in marked(metafunc):
        both = [
            f"{f}-{d}"
            for f in families
            for d in names or FAMILIES[f]
            if d in (*FAMILIES[f], "fp32")
        ]
        metafunc.parametrize("dtype", both, indirect=True)


def marked(metafunc) -> list[str]:
    """Arguments that the test has values of its own for."""
    marks = metafunc.definition.iter_markers("parametrize")
    names = [mark.args[0] for mark in marks]
    return [x for name in names for x in (name.split(", ") if isinstance(name, str) else name)]


def pytest_collection_modifyitems(config, items):
    if part := config.getoption("--part", None):
        first, step = map(int, part.split("/"))
        if not 0 <= first < step:
            raise pytest.UsageError(f"--part {part}: I must be one of 0 to N - 1")
        config.hook.pytest_deselected(items=[x for i, x in enumerate(items) if i % step != first])
        items[:] = items[first::step]
    # A rehearsal: the tests of numbers run on the CPU backend, which shows that the tests work.
    if torch.cuda.is_available() or os.environ.get("FLASHMOE_TEST_DEVICE") == "cpu":
        return
    # Without a GPU the first test of a file is skipped for all of them: there are 20,000.
    here = Path(__file__).parent
    of_gpu = Counter(item.path for item in items if here in item.path.parents)
    kept, seen = [], set()
    for item in items:
        if item.path in of_gpu:
            if item.path in seen:
                continue
            seen.add(item.path)
            why = f"no CUDA device, or a torch without CUDA, for {of_gpu[item.path]} tests"
            item.add_marker(pytest.mark.skip(reason=why))
        kept.append(item)
    items[:] = kept


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture
def family(request, monkeypatch) -> str:
    """Each kernel family in turn, forced. The variable is read at every call."""
    monkeypatch.setenv("FLASHMOE_FAMILY", request.param)
    return request.param


@pytest.fixture
def dtype(request, monkeypatch) -> torch.dtype:
    """Each dtype of each kernel family in turn, the family forced."""
    forced, name = request.param.split("-")
    monkeypatch.setenv("FLASHMOE_FAMILY", forced)
    return EVERY_DTYPE[name]


@pytest.fixture
def roomy():
    """Asks for free bytes of GPU memory, and gives what a test took back to the device."""
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    torch.cuda.empty_cache()

    def need(free_bytes: int) -> None:
        free, _ = torch.cuda.mem_get_info()
        if free < free_bytes:
            pytest.skip(f"needs {free_bytes / 1e9:.0f} GB of free GPU memory, has {free / 1e9:.0f}")

    yield need
    torch.cuda.empty_cache()


@pytest.fixture
def script(tmp_path):
    """Runs a script in a process of its own and returns what it printed."""

    def run(code: str, **variables: str) -> str:
        path = tmp_path / "script.py"
        path.write_text(code)
        done = subprocess.run(
            [sys.executable, str(path)],
            env={**os.environ, "PYTHONPATH": str(ROOT / "python"), **variables},
            capture_output=True,
            text=True,
            timeout=180,
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
        return done.stdout.strip()

    return run
