"""How fast we want to be, as data, and how a run stands: `bench --check` and the docs read this.

A ratio is a peer's time over ours: above 1 we are faster. A few bars are about other ratios, which
are the better the higher they are, too: our speed in one row over that in others, and the memory
that is needed over the memory that was held.

A family of kernels has bars of its own. All rows of a workload and pass are held to those of the
newest family that ran one of them: a row left to an older family is not let off.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from flashmoe_science.bench import anchors, workloads

Row = dict[str, Any]


@dataclass(frozen=True)
class Sibling:
    """Other rows of ours, of the same pass, whose mean speed a row is measured by.

    Speed is work over time, so that the ratio is about the time for one score.
    """

    workload: str = ""  # the row's own unless given
    shapes: workloads.Beside = field(default_factory=dict)  # by the row's; none: the same shape
    dtype: str = ""  # the row's own unless given

    def speed(self, row: Row, rows: list[Row]) -> float | None:
        """Of the siblings of a row that is compared, if they were measured."""
        speeds = []
        for label in self.shapes.get(row["label"], (row["label"],)):
            key = {"label": label, "pass": row["pass"], "dtype": self.dtype or row["dtype"]}
            key["workload"] = self.workload or row["workload"]
            speeds.append(next((speed(r) for r in rows if key.items() <= r.items()), None))
        return sum(speeds) / len(speeds) if all(speeds) else None


@dataclass(frozen=True)
class Bar:
    """What the rows it holds for must reach. An empty selection means any.

    The ratio is about a peer, unless it is about an anchor, all of them, a sibling, or memory.
    """

    name: str
    mean: float  # the geometric mean of the rows' ratios, at least
    each: float = 0.0  # and every one of them
    peer: str | None = "flash"  # None: the peer of the row's own ratio
    anchor: str | None = None  # one that was measured before
    everyone: bool = False  # the best of all peers and anchors
    sibling: Sibling | None = None
    memory: bool = False
    families: tuple[str, ...] = ()
    workloads: tuple[str, ...] = ()
    passes: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()
    dims: tuple[int, ...] = ()
    shortest: int = 0
    longest: float = math.inf

    def is_asked_of(self, row: Row, family: str | None) -> bool:
        """Whether this bar is about the row's workload and pass, and the family it is held to."""
        return (
            among(row["workload"], self.workloads)
            and among(row["pass"], self.passes)
            and among(family, self.families)
        )

    def holds_for(self, row: Row, family: str | None) -> bool:
        shape = row.get("shape", {})
        return (
            self.is_asked_of(row, family)
            and among(row["dtype"], self.dtypes)
            and among(shape.get("dim"), self.dims)
            and self.shortest <= shape.get("length", 0) <= self.longest
            and among(row["label"], tuple(self.sibling.shapes) if self.sibling else ())
        )

    @property
    def against(self) -> str:
        """What the ratio is about, in a word or two."""
        if self.memory:
            return "what is needed"
        if self.everyone:
            return "best of all"
        if self.sibling:
            return "our other row"
        return anchors.label_of(self.anchor) if self.anchor else self.peer or "its peer"


def among(value: Any, selection: tuple) -> bool:
    return not selection or value in selection


SMALL = "head dims 16, 32, 48"
CPU = {"peer": None, "workloads": ("dense", "small_dims", "pair_bias", "ragged", "ragged_bias")}
DENSE = {"workloads": ("dense",), "shortest": 1024}
MATERIALS = ("pair_bias", "triangle", "crystals", "crystals_bias")
# Lengths that fill no tile, beside the nearest ones that do.
ODD_TRIANGLES = {"257,4,257,32": ("256,4,256,32",), "381,4,381,32": ("384,4,384,32",)}

# FlashAttention-2 uses the same instructions as this family of ours.
SM80 = {"families": ("sm80",)}
# FlashAttention-3 and cuDNN use those of this one. The dense rows are 36, in bf16.
SM90 = {"families": ("sm90",)}
HOPPER = {"peer": None, "workloads": ("dense",), "dtypes": ("bf16",), **SM90}
FORWARD, BACKWARD, BOTH = ({"passes": (name,)} for name in ("fwd", "bwd", "fwd+bwd"))
# Who must have been asked or measured before, to say who is the best of all.
EVERYONE = {"peers": ("cudnn",), "anchors": ("fa3", "fa4")}


def hopper_dense(name: str, passes: dict[str, tuple[str, ...]]) -> tuple[Bar, ...]:
    """The bars that one pass alone has in the sm90 family, whichever pass it is."""
    rows = {**HOPPER, **passes}
    return (
        Bar(f"dense {name}", 1.05, 0.97, anchor="fa3", **rows),
        Bar(f"dense {name}", 1.0, 1.0, **{**rows, "peer": "cudnn"}),
        Bar(f"dense {name}", 1.0, everyone=True, **rows),
        Bar(f"dense {name}, up to 1,024 tokens", 1.15, everyone=True, longest=1024, **rows),
    )


def hopper_beside(name: str, wanted: float, workload: str, shapes: workloads.Beside) -> Bar:
    """A bar about our forward pass in rows with and without what a workload is about."""
    return Bar(name, wanted, wanted, peer=None, workloads=(workload,),
               sibling=Sibling(shapes=shapes), **FORWARD, **SM90)  # fmt: skip


# On the CPU against PyTorch's better backend; on a GPU each family against its like.
BARS = {
    "cpu": (
        Bar("fp32", 1.0, 0.9, dtypes=("fp32",), **CPU),
        Bar("fp16", 1.2, 0.9, dtypes=("fp16",), **CPU),
        Bar("bf16", 1.2, 0.9, dtypes=("bf16",), **CPU),
    ),
    "cuda": (
        Bar("dense forward, head dims 64, 128", 1.05, 1.0, dims=(64, 128), **FORWARD, **DENSE,
            **SM80),
        Bar("dense forward, head dim 256", 1.0, 1.0, dims=(256,), **FORWARD, **DENSE, **SM80),
        Bar("dense backward, head dims 64, 128", 1.05, 1.0, dims=(64, 128), **BACKWARD, **DENSE,
            **SM80),
        Bar("dense backward, head dim 256", 1.0, 1.0, dims=(256,), **BACKWARD, **DENSE, **SM80),
        Bar(f"{SMALL}, forward", 1.5, 1.5, workloads=("small_dims",), **FORWARD, **SM80),
        Bar(f"{SMALL}, forward and backward", 1.5, 1.5, workloads=("small_dims",), **BOTH, **SM80),
        Bar("decode, one query over the keys", 1.0, 1.0, workloads=("decode",), **SM80),
        Bar("deterministic backward (our fast one; 0.80 is 1.25 times its time)", 0.8, peer=None,
            workloads=("deterministic",), dims=(64, 128), **BACKWARD, **SM80),
        *hopper_dense("forward", FORWARD),
        Bar("dense forward, head dim 64 from 2,048 tokens", 1.1, 1.1, anchor="fa3", dims=(64,),
            shortest=2048, **FORWARD, **HOPPER),
        *hopper_dense("backward", BACKWARD),
        Bar("dense backward, head dim 256 from 2,048 tokens", 1.1, 1.1, anchor="fa3", dims=(256,),
            shortest=2048, **BACKWARD, **HOPPER),
        Bar("dense, forward and backward (the sum of both)", 1.05, anchor="fa3", **BOTH,
            **HOPPER),
        hopper_beside("head dims 96 and 192 (the mean of their neighbours)", 1.0, "head_dims",
                      workloads.HEAD_DIMS),
        Bar("dense forward in fp16 (ours in bf16)", 0.97, 0.97, peer=None, workloads=("dense",),
            dtypes=("fp16",), sibling=Sibling(dtype="bf16"), **FORWARD, **SM90),
        hopper_beside("8 key heads (ours with a key head for each)", 0.97, "gqa", workloads.GQA),
        hopper_beside("window of 1,024 keys (ours without)", 0.6, "window", workloads.WINDOW),
        hopper_beside("packed sequences of 100 to 4,096 tokens (ours dense)", 0.9,
                      "mixed_lengths", workloads.MIXED_LENGTHS),
        Bar("deterministic backward (our fast one)", 0.85, peer=None,
            workloads=("deterministic",), **BACKWARD, **SM90),
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
    unmeasured: list[str] = field(default_factory=list)  # names of rows with nothing to compare to

    @property
    def verdict(self) -> str:
        measured = self.ratios or self.missed
        return "missed" if self.missed else "met" if measured else "not measured"

    @property
    def rows(self) -> str:
        """How many rows were compared, and of how many where that is not all."""
        compared, missing = len(self.ratios), len(self.unmeasured)
        return f"{compared} of {compared + missing}" if missing else str(compared)

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


def ratio_to_anchor(row: Row, name: str) -> float | None:
    """The time of a peer that was measured before, over ours."""
    times = row.get("anchors", {}).get(name), our_ms(row)
    return times[0] / times[1] if all(times) else None


def ratio_to_everyone(row: Row) -> float | None:
    """Of the best among peers and anchors; None unless those that may be the best were there."""
    asked, known = row["implementations"], row.get("anchors", {})
    if not ({*EVERYONE["peers"]} <= asked.keys() and {*EVERYONE["anchors"]} <= known.keys()):
        return None
    ratios = [ratio_to(row, name) for name in asked if name != "ours"]
    ratios += [ratio_to_anchor(row, name) for name in known]
    return min(filter(None, ratios), default=None)


def ratio_of(bar: Bar, row: Row, rows: list[Row]) -> float | None:
    """What a bar compares; None where one side is missing."""
    if bar.memory:
        held = row.get("memory")
        return held["needed_bytes"] / held["peak_bytes"] if held else None
    if bar.everyone:
        return ratio_to_everyone(row)
    if bar.anchor:
        return ratio_to_anchor(row, bar.anchor)
    if bar.sibling is None:
        return ratio_to(row, bar.peer)
    speeds = speed(row), bar.sibling.speed(row, rows)
    return speeds[0] / speeds[1] if all(speeds) else None


def our_ms(row: Row) -> float | None:
    return row["implementations"]["ours"]["ms"]


def speed(row: Row) -> float | None:
    """Ours: work over time, where the answer is right."""
    ms = our_ms(row)
    return row["flops"] / ms if ms and row["check"]["status"] != "failed" else None


def standing(bar: Bar, rows: list[Row], families: Families) -> Standing:
    """Wrong rows do not count for the mean; they, and rows we have no time in, miss the bar."""
    found = Standing(bar)
    for row in rows:
        if not bar.holds_for(row, families.get(group_of(row))):
            continue
        name, ratio = name_of(row), ratio_of(bar, row, rows)
        if row["check"]["status"] == "failed":
            found.missed.append(f"{name}: wrong")
        elif our_ms(row) is None:
            found.missed.append(f"{name}: {row['check']['status']}, not timed")
        elif ratio is None:
            found.unmeasured.append(name)
        else:
            found.ratios[name] = ratio
            if ratio < bar.each:
                found.missed.append(f"{name}: {ratio:.3f}, at least {bar.each:.3g} wanted")
    if found.mean is not None and found.mean < bar.mean:
        what = f"geometric mean {found.mean:.3f}, at least {bar.mean:.3g} wanted"
        found.missed.insert(0, f"{bar.name}: {what}")
    return found


Families = dict[tuple[str, str], str]  # by workload and pass


def group_of(row: Row) -> tuple[str, str]:
    return row["workload"], row["pass"]


def families_of(rows: list[Row]) -> Families:
    """The newest family that ran a row of each workload and pass."""
    found: Families = {}
    for row in rows:
        for family in row.get("family", "").split("+"):
            found[group_of(row)] = max(family, found.get(group_of(row), ""))
    return found


def name_families(results: dict[str, Any]) -> None:
    """For files from before rows said so: sm80 ran whatever was not forced to be another's."""
    about = results["about"]
    on_gpu = about.get("device") == "cuda"
    for row in results["rows"]:
        row.setdefault("family", (about.get("forced_family") or "sm80") if on_gpu else "cpu")


def standings(rows: list[Row], device_type: str) -> list[Standing]:
    """Of the bars about workloads and passes that were measured, by a family they are about."""
    families = families_of(rows)
    return [
        standing(bar, rows, families)
        for bar in BARS[device_type]
        if any(bar.is_asked_of(row, families.get(group_of(row))) for row in rows)
    ]


def missed_bars(rows: list[Row], device_type: str) -> list[str]:
    """What `--check` finds missing, in words."""
    found = standings(rows, device_type)
    missed = [line for s in found for line in s.missed]
    if not found:
        missed.append("no bar is about these rows")
    elif not any(s.ratios for s in found):
        missed.append("no row has both our time and a peer's")
    return missed
