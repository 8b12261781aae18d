"""Where the package is, and the same seed for every test."""

import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "python" / "flashmoe_science"
sys.path.insert(0, str(ROOT / "python"))

# torch.compile keeps what it compiled for other processes, and does not notice that an op of ours
# takes other arguments than it did then.
torch.compiler.config.force_disable_caches = True

# What takes longest comes first: at the end of a run no process waits for another.
LONGEST = "test_wheel.py"
# Files that look at the checkout and not at the library.
WITHOUT_LIBRARY = {"test_house.py", "test_image_cache.py"}


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: takes more than ten seconds")


def pytest_collection_modifyitems(config, items):
    items.sort(key=lambda item: item.path.name != LONGEST)
    if any((PACKAGE / "lib").glob("*.so*")):
        return
    if any(item.path.name not in WITHOUT_LIBRARY for item in items):
        raise pytest.UsageError("the library is not built: run `make build` first")


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture
def threads():
    """Calls torch.set_num_threads, and puts the number back afterwards."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def checkout() -> Path:
    return ROOT
