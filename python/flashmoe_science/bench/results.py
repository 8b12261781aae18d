"""What a benchmark learns, as plain data: rows, what follows from their times, and their file.

A row is one workload, shape, dtype and pass in one regime. Tables, plots and docs read only rows.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection
from pathlib import Path
from typing import Any

Row = dict[str, Any]

SCHEMA = 2
OURS = "ours"
# Without pauses, as in training: a GPU is at its power limit. Or with the same pause before every
# turn. Where both were measured, the first is the one that counts.
SUSTAINED, RESTED = REGIMES = ("sustained", "rested")


def name_of(row: Row) -> str:
    return f"{row['workload']} ({row['label']}) {row['dtype']} {row['pass']}"


def regimes_of(rows: list[Row]) -> list[str]:
    """The regimes of these rows, the one that counts first."""
    found = {row["regime"] for row in rows}
    return [regime for regime in REGIMES if regime in found]


def rows_in(rows: list[Row], regime: str) -> list[Row]:
    return [row for row in rows if row["regime"] == regime]


def headline(rows: list[Row]) -> list[Row]:
    """The rows that count: sustained ones, and rested ones only where there are no others."""
    regimes = regimes_of(rows)
    return rows_in(rows, regimes[0]) if regimes else []


def geometric_mean(values: list[float]) -> float:
    return math.exp(sum(math.log(v) for v in values) / len(values))


def compare(
    implementations: dict[str, dict[str, Any]],
    baseline: str | None = None,
    another: Collection[str] = (),
) -> dict[str, Any]:
    """How many times our time the peers take, and which peer the row's own ratio is about.

    another: peers that do something else, and are the best only where they are the baseline.
    """
    ours = implementations[OURS]["ms"]
    peers = {n: i["ms"] for n, i in implementations.items() if n != OURS and i["ms"]}
    ratios = {name: ms / ours for name, ms in peers.items()} if ours else {}
    alike = [name for name in peers if name not in another]
    best = baseline or min(alike, key=peers.__getitem__, default=None)
    return {"best_peer": best, "ratio": ratios.get(best), "ratios": ratios}


def means(rows: list[Row], *keys: str) -> list[dict[str, Any]]:
    """Ratios of rows that share these keys: geometric means and the lowest; wrong rows left out.

    "ratio" is about the best peer of each row, "peers" about each of them.
    """
    groups: dict[tuple, list[Row]] = {}
    for row in rows:
        if row["ratio"] is not None and row["check"]["status"] != "failed":
            groups.setdefault(tuple(row[k] for k in keys), []).append(row)
    found = []
    for group, members in groups.items():
        by_peer: dict[str, list[float]] = {}
        for row in members:
            for peer, ratio in row["ratios"].items():
                by_peer.setdefault(peer, []).append(ratio)
        mean = {
            **summary([row["ratio"] for row in members]),
            "peers": {peer: summary(ratios) for peer, ratios in by_peer.items()},
        }
        found.append(dict(zip(keys, group, strict=True)) | mean)
    return found


def summary(ratios: list[float]) -> dict[str, Any]:
    return {"rows": len(ratios), "ratio": geometric_mean(ratios), "lowest": min(ratios)}


def write(results: dict[str, Any], path: Path) -> None:
    """Replaces the file in one step: a run that is cut leaves the rows it has."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".tmp")
    unfinished.write_text(json.dumps(results, indent=1) + "\n")
    unfinished.replace(path)
