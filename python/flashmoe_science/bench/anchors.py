"""Peers that cannot run beside us, as they were measured before on the same kind of GPU.

data/README.md says by whom and how. A dense row in bf16 on an H200 has them as its "anchors"; they
are never among its "implementations", which ran in the same minute as ours.
"""

from __future__ import annotations

import csv
import functools
from pathlib import Path
from typing import Any

TABLE = Path(__file__).parent / "data" / "h200_flash_attention.csv"
GPU = "H200"  # a part of the names of those it was measured on
NAMES = {"fa3": "FA3", "fa4": "FA4"}


def label_of(name: str) -> str:
    """How an anchor is called wherever people read of it."""
    return f"{NAMES[name]} (measured before)"


@functools.cache
def measured_before() -> dict[tuple[str, str], dict[str, float]]:
    """Milliseconds by name, for (pass, shape). Both passes take the sum of the two."""
    found: dict[tuple[str, str], dict[str, float]] = {}
    with TABLE.open(newline="") as file:
        for line in csv.DictReader(file):
            times = found.setdefault((line["pass"], line["shape"]), {})
            times[line["name"]] = float(line["ms"])
    for shape in {shape for _, shape in found}:
        forward, backward = found["fwd", shape], found["bwd", shape]
        found["fwd+bwd", shape] = {name: ms + backward[name] for name, ms in forward.items()}
    return found


def add_anchors(rows: list[dict[str, Any]], about: dict[str, Any]) -> None:
    """Gives its anchors to each row that has some and is to be compared with them."""
    if GPU not in about.get("gpu", {}).get("name", ""):
        return
    for row in rows:
        found = measured_before().get((row["pass"], row["label"]))
        if found and (row["workload"], row["dtype"]) == ("dense", "bf16"):
            row["anchors"] = dict(found)
