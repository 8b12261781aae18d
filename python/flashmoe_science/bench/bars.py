"""How fast we want to be, as data, and how a run stands: `bench --check` and the docs read this.

A ratio is a peer's time over ours: above 1 we are faster. A few bars are about other ratios, which
are the better the higher they are, too: our speed in one row over that in another, and the memory
that is needed over the memory that was held.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Row = dict[str, Any]


@dataclass(frozen=True)
class Sibling:
    """Another row of ours, of the same dtype and pass, whose speed a row is measured by.

    Speed is work over time, so that the ratio is about the time for one score.
    """

    workload: str = ""  # the row's own unless given
    shapes: Mapping[str, str] = field(default_factory=dict)  # by the row's; none: the same shape

    def of(self, row: Row, rows: list[Row]) -> Row | None:
        """The sibling of a row that is compared, if it was measured."""
        key = {"dtype": row["dtype"], "pass": row["pass"]}
        key["workload"] = self.workload or row["workload"]
        key["label"] = self.shapes.get(row["label"], row["label"])
        return next((r for r in rows if key.items() <= r.items()), None)


@dataclass(frozen=True)
class Bar:
    """What the rows it holds for must reach. An empty selection means any.

    The ratio is about a peer, unless it is about a sibling or about memory.
    """

    name: str
    mean: float  # the geometric mean of the rows' ratios, at least
    each: float = 0.0  # and every one of them
    peer: str | None = "flash"  # None: the peer of the row's own ratio
    sibling: Sibling | None = None
    memory: bool = False
    workloads: tuple[str, ...] = ()
    passes: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()
    dims: tuple[int, ...] = ()
    shortest: int = 0

    def holds_for(self, row: Row) -> bool:
        def among(value: Any, selection: tuple) -> bool:
            return not selection or value in selection

        shape = row.get("shape", {})
        return (
            among(row["workload"], self.workloads)
            and among(row["pass"], self.passes)
            and among(row["dtype"], self.dtypes)
            and among(shape.get("dim"), self.dims)
            and shape.get("length", 0) >= self.shortest
            and among(row["label"], tuple(self.sibling.shapes) if self.sibling else ())
        )

    @property
    def against(self) -> str:
        """What the ratio is about, in a word or two."""
        if self.memory:
            return "what is needed"
        return "our other row" if self.sibling else self.peer or "its peer"


SMALL = "head dims 16, 32, 48"
CPU = {"peer": None, "workloads": ("dense", "small_dims", "pair_bias", "ragged", "ragged_bias")}
DENSE = {"workloads": ("dense",), "shortest": 1024}
MATERIALS = ("pair_bias", "triangle", "crystals", "crystals_bias")
# Lengths that fill no tile, beside the nearest ones that do.
ODD_TRIANGLES = {"257,4,257,32": "256,4,256,32", "381,4,381,32": "384,4,384,32"}

# On the CPU against PyTorch's better backend; on a GPU against FlashAttention-2, which uses the
# same instructions as our sm80 family (cuDNN's wgmma is a bar for another family).
BARS = {
    "cpu": (
        Bar("fp32", 1.0, 0.9, dtypes=("fp32",), **CPU),
        Bar("fp16", 1.2, 0.9, dtypes=("fp16",), **CPU),
        Bar("bf16", 1.2, 0.9, dtypes=("bf16",), **CPU),
    ),
    "cuda": (
        Bar("dense forward, head dims 64, 128", 1.05, 1.0, passes=("fwd",), dims=(64, 128),
            **DENSE),
        Bar("dense forward, head dim 256", 1.0, 1.0, passes=("fwd",), dims=(256,), **DENSE),
        Bar("dense backward, head dims 64, 128", 1.05, 1.0, passes=("bwd",), dims=(64, 128),
            **DENSE),
        Bar("dense backward, head dim 256", 1.0, 1.0, passes=("bwd",), dims=(256,), **DENSE),
        Bar(f"{SMALL}, forward", 1.5, 1.5, workloads=("small_dims",), passes=("fwd",)),
        Bar(f"{SMALL}, forward and backward", 1.5, 1.5, workloads=("small_dims",),
            passes=("fwd+bwd",)),
        Bar("decode, one query over the keys", 1.0, 1.0, workloads=("decode",)),
        Bar("deterministic backward (our fast one; 0.80 is 1.25 times its time)", 0.8, peer=None,
            workloads=("deterministic",), passes=("bwd",)),
        Bar("pair bias, forward (best peer)", 1.3, peer=None, workloads=("pair_bias",),
            passes=("fwd",)),
        Bar("pair bias, forward and backward (best peer)", 2.5, peer=None,
            workloads=("pair_bias",), passes=("fwd+bwd",)),
        Bar("triangle, forward (best peer)", 1.5, peer=None, workloads=("triangle",),
            passes=("fwd",)),
        Bar("triangle, forward and backward (best peer)", 1.5, peer=None,
            workloads=("triangle",), passes=("fwd+bwd",)),
        Bar("triangle of odd length (its even neighbour; 0.87 is 15% more time per score)",
            1 / 1.15, 1 / 1.15, peer=None, workloads=("triangle",),
            sibling=Sibling(shapes=ODD_TRIANGLES)),
        Bar("crystals, forward (varlen_attn)", 4.0, 4.0, peer=None, workloads=("crystals",),
            passes=("fwd",)),
        Bar("crystals, forward and backward (varlen_attn)", 3.0, 3.0, peer=None,
            workloads=("crystals",), passes=("fwd+bwd",)),
        Bar("crystals with pair bias (ours without; 0.50 is twice its time)", 0.5, 0.5, peer=None,
            workloads=("crystals_bias",), sibling=Sibling("crystals")),
        Bar("peak memory (inputs and results; 0.91 is 10% more)", 1 / 1.1, 1 / 1.1, peer=None,
            workloads=MATERIALS, memory=True),
    ),
}  # fmt: skip


@dataclass
class Standing:
    """How the rows of a run stand against one bar."""

    bar: Bar
    ratios: dict[str, float] = field(default_factory=dict)  # by the name of the row
    missed: list[str] = field(default_factory=list)  # in words

    @property
    def verdict(self) -> str:
        measured = self.ratios or self.missed
        return "missed" if self.missed else "met" if measured else "not measured"

    @property
    def mean(self) -> float | None:
        return geometric_mean(list(self.ratios.values())) if self.ratios else None

    @property
    def lowest(self) -> str | None:
        """The name of the row with the lowest ratio."""
        return min(self.ratios, key=self.ratios.__getitem__, default=None)


def geometric_mean(values: list[float]) -> float:
    return math.exp(sum(math.log(v) for v in values) / len(values))


def name_of(row: Row) -> str:
    return f"{row['workload']} ({row['label']}) {row['dtype']} {row['pass']}"


def ratio_to(row: Row, peer: str | None) -> float | None:
    """A peer's time over ours. None asks for the row's own ratio, which is about the best peer."""
    if peer is None:
        return row["ratio"]
    times = [row["implementations"].get(name, {}).get("ms") for name in (peer, "ours")]
    return times[0] / times[1] if all(times) else None


def ratio_of(bar: Bar, row: Row, rows: list[Row]) -> float | None:
    """What a bar compares; None where one side is missing."""
    if bar.memory:
        held = row.get("memory")
        return held["needed_bytes"] / held["peak_bytes"] if held else None
    if bar.sibling is None:
        return ratio_to(row, bar.peer)
    speeds = [speed(r) for r in (row, bar.sibling.of(row, rows))]
    return speeds[0] / speeds[1] if all(speeds) else None


def speed(row: Row | None) -> float | None:
    """Ours: work over time."""
    ms = row["implementations"]["ours"]["ms"] if row else None
    return row["flops"] / ms if ms else None


def standing(bar: Bar, rows: list[Row]) -> Standing:
    """Wrong rows do not count for the mean; they, and rows without a ratio, miss the bar."""
    found = Standing(bar)
    for row in rows:
        if not bar.holds_for(row):
            continue
        name, ratio = name_of(row), ratio_of(bar, row, rows)
        if row["check"]["status"] == "failed":
            found.missed.append(f"{name}: wrong")
        elif ratio is None:
            found.missed.append(f"{name}: no ratio")
        else:
            found.ratios[name] = ratio
            if ratio < bar.each:
                found.missed.append(f"{name}: {ratio:.3f}, at least {bar.each:.3g} wanted")
    if found.mean is not None and found.mean < bar.mean:
        what = f"geometric mean {found.mean:.3f}, at least {bar.mean:.3g} wanted"
        found.missed.insert(0, f"{bar.name}: {what}")
    return found


def standings(rows: list[Row], device_type: str) -> list[Standing]:
    """Of the bars about workloads that were measured at all."""
    measured = {row["workload"] for row in rows}
    asked = [bar for bar in BARS[device_type] if not bar.workloads or measured & {*bar.workloads}]
    return [standing(bar, rows) for bar in asked]


def missed_bars(rows: list[Row], device_type: str) -> list[str]:
    """What `--check` finds missing, in words."""
    found = standings(rows, device_type)
    missed = [line for s in found for line in s.missed]
    if not any(s.ratios for s in found):
        missed.append("no row has both our time and a peer's")
    return missed
