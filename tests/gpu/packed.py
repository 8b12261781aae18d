"""What the tests of the packed kernels share: their tiles, which are forced in whoever imports
packed_tiles, and what the planner says."""

import pytest
from helpers import explained

import flashmoe_science as fm
import oracle

FORWARD, BACKWARD = (128, 32), (192, 32)


@pytest.fixture(autouse=True)
def packed_tiles(monkeypatch):
    monkeypatch.setenv("FLASHMOE_TILE", ",".join(f"{q}x{k}" for q, k in (FORWARD, BACKWARD)))


def explain(case: oracle.Case, **more) -> str:
    tensors, options = explained(case)
    return fm.explain(*tensors, **options, **more)
