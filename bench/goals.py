#!/usr/bin/env python3
"""How fast we want to be, as data, and how a run stands: python bench/goals.py RESULTS.json

A ratio is a peer's time over ours: above 1 we are faster. A few goals are about other ratios, which
are the better the higher they are, too: our speed in one row over that in others, and the memory
that is needed over the memory that was held. Of serving, where others' kernels do not run beside
ours, some are about the best time that anyone had on an H200 on another day (2026-11-16: captured
graphs, cold L2; FlashInfer 0.7.2, vLLM's FlashAttention-3, cuDNN). Sustained rows count, where they
were measured.

A family of kernels has goals of its own. All rows of a workload and pass are held to those of the
newest family that ran one of them: a row left to an older family is not let off. FlashAttention-3
is a peer of the run (bench --peer) that is called fa3; without it those goals are not measured.

The exit code is 1 where a goal is missed.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "python"))

from flashmoe_science.bench import append, moe, options, paged, training, workloads
from flashmoe_science.bench.results import Row, geometric_mean, headline, name_of


@dataclass(frozen=True)
class Sibling:
    """Other rows of ours, of the same workload and pass, whose mean speed a row is measured by.

    Speed is work over time, so that the ratio is about the time for one score.
    """

    shapes: workloads.Beside = field(default_factory=dict)  # by the row's; none: the same shape
    dtype: str = ""  # the row's own unless given

    def speed(self, row: Row, rows: list[Row]) -> float | None:
        """Of the siblings of a row that is compared, if they were measured."""
        speeds = []
        for label in self.shapes.get(row["label"], (row["label"],)):
            key = {"label": label, "pass": row["pass"], "dtype": self.dtype or row["dtype"]}
            key["workload"] = row["workload"]
            speeds.append(next((speed(r) for r in rows if key.items() <= r.items()), None))
        return sum(speeds) / len(speeds) if all(speeds) else None


@dataclass(frozen=True)
class Goal:
    """What the rows it holds for must reach. An empty selection means any.

    The ratio is about a peer, unless it is about all of them, a sibling, times of another day, or
    memory.
    """

    name: str
    mean: float  # the geometric mean of the rows' ratios, at least
    each: float = 0.0  # and every one of them
    peer: str | tuple[str, ...] | None = "flash"  # the best of several; None: the row's own
    everyone: bool = False  # the best of all peers, those of EVERYONE among them
    sibling: Sibling | None = None
    times: Mapping[str, float] = field(default_factory=dict)  # microseconds by the row's shape
    memory: bool = False
    families: tuple[str, ...] = ()
    workloads: tuple[str, ...] = ()
    passes: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()
    dims: tuple[int, ...] = ()
    causal: bool | None = None
    shapes: tuple[str, ...] = ()
    shortest: int = 0
    longest: float = math.inf

    def is_asked_of(self, row: Row, family: str | None) -> bool:
        """Whether this goal is about the row's workload and pass, and the family it is held to."""
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
            and self.causal in (None, shape.get("causal"))
            and among(row["label"], self.shapes)
            and self.shortest <= shape.get("length", 0) <= self.longest
            and among(row["label"], tuple(self.sibling.shapes) if self.sibling else ())
            and among(row["label"], tuple(self.times))
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
        if self.times:
            return "another day"
        if isinstance(self.peer, tuple):
            return " or ".join(self.peer)
        return self.peer or "its peer"


def among(value: Any, selection: tuple) -> bool:
    return not selection or value in selection


SMALL = "head dims 16, 32, 48 at 1,024 tokens"
CPU = {"peer": None, "workloads": ("dense", "small", "pair_bias", "ragged", "ragged_bias")}
DENSE = {"workloads": ("dense",), "shortest": 1024}
SMALL_ROWS = {"workloads": ("small",), "dims": (16, 32, 48), "shortest": 1024}
MATERIALS = ("pair_bias", "diffusion", "triangle", "crystals", "crystals_bias")
# Lengths that fill no tile, beside the nearest ones that do.
ODD_TRIANGLES = {"257,4,257,32": ("256,4,256,32",), "381,4,381,32": ("384,4,384,32",)}
EVEN_TRIANGLES = tuple(f"{n},4,{n},32" for n in (256, 384, 512))
# Where peers are furthest behind.
HARD_TRIANGLES = (*ODD_TRIANGLES, "768,4,768,32")

# FlashAttention-2 uses the same instructions as this family of ours.
SM80 = {"families": ("sm80",)}
# FlashAttention-3 and cuDNN use those of this one.
SM90 = {"families": ("sm90",)}
FORWARD, BACKWARD, BOTH = ({"passes": (name,)} for name in ("fwd", "bwd", "fwd+bwd"))
# Who must have run, to say who is the best of all.
EVERYONE = {"cudnn", "fa3"}


def hopper(name: str, mean: float, each: float = 0.0, **rows: Any) -> Goal:
    """A goal of the sm90 family against whoever is the fastest in each row of the run."""
    rows = {"workloads": ("dense",), "dtypes": ("bf16",), **SM90, **rows}
    return Goal(name, mean, each, everyone=True, **rows)


CAUSAL_GQA = "4,32,4096,128,kv8,causal"

HOPPER = (
    hopper("dense forward", 1.0, **FORWARD),
    hopper("dense forward, up to 1,024 tokens", 1.08, 1.0, longest=1024, **FORWARD),
    hopper("dense forward, head dim 128, causal", 1.03, 1.0, dims=(128,), causal=True, **FORWARD),
    hopper("dense forward, head dim 256, causal, from 4,096 tokens", 1.02, dims=(256,), causal=True,
           shortest=4096, **FORWARD),
    hopper("dense backward", 1.0, **BACKWARD),
    hopper("dense backward, head dim 64, causal, from 4,096 tokens", 1.03, dims=(64,), causal=True,
           shortest=4096, **BACKWARD),
    hopper("dense backward, head dim 128, from 4,096 tokens", 1.03, dims=(128,), causal=False,
           shortest=4096, **BACKWARD),
    hopper("dense backward, head dim 128, causal, from 2,048 tokens", 1.03, 1.0, dims=(128,),
           causal=True, shortest=2048, **BACKWARD),
    hopper("dense backward, head dim 256, from 2,048 tokens", 1.15, 1.15, dims=(256,),
           shortest=2048, **BACKWARD),
    hopper("dense, forward and backward", 1.05, **BOTH),
    hopper("backward, language models' groups", 1.05, 1.0, workloads=("gqa",),
           shapes=(CAUSAL_GQA, *workloads.GROUPS), **BACKWARD),
    hopper("head dims 96 and 192", 1.05, 1.0, workloads=("head_dims",),
           shapes=tuple(workloads.HEAD_DIMS)),
    hopper("odd lengths, numbers of heads, groups", 1.05, 1.0, workloads=("uneven",)),
)  # fmt: skip


def hopper_beside(name: str, wanted: float, workload: str, shapes: workloads.Beside) -> Goal:
    """A goal about our forward pass in rows with and without what a workload is about."""
    return Goal(name, wanted, wanted, peer=None, workloads=(workload,),
               sibling=Sibling(shapes=shapes), **FORWARD, **SM90)  # fmt: skip


def science(name: str, forward: float, both: float, workload: str, **rows: Any) -> tuple[Goal, ...]:
    """Goals about the peer of each row's own ratio: of the forward pass, and of both passes."""
    rows |= {"peer": None, "workloads": (workload,)}
    return (
        Goal(f"{name}, forward", forward, **FORWARD, **rows),
        Goal(f"{name}, forward and backward", both, **BOTH, **rows),
    )


def experts(name: str, wanted: float, workload: str, **rows: Any) -> Goal:
    """A goal about both passes of each row, against what PyTorch's own products can do."""
    return Goal(name, wanted, wanted, workloads=(workload,), **rows)


def of_sizes(options: str, **microseconds: float) -> dict[str, float]:
    """Times by shape: b16x512=20.5 is about 16 sequences of 512 keys."""
    return {paged.shapes((size[1:],), options)[0]: us for size, us in microseconds.items()}


def beside(rows: tuple[str, ...], others: tuple[str, ...]) -> workloads.Beside:
    """The rows of as many sequences and keys, which differ in their pages."""
    return {row: tuple(o for o in others if o.split(",")[:4] == row.split(",")[:4]) for row in rows}


MANY_KEYS = paged.shapes(paged.MANY_KEYS, "p16")
OVER_PAGES = {"workloads": ("paged_decode",), "peer": None}
FEW_TIMES = {"b1x512": 12.67, "b1x8192": 23.84, "b16x512": 20.54, "b16x2048": 49.25}
FEW_TIMES |= {"b16x8192": 140.16}
FEW_TIMES_E4M3 = {"b1x512": 10.85, "b1x8192": 19.3, "b16x512": 15.3, "b16x2048": 37.06}
FEW_TIMES_E4M3 |= {"b16x8192": 103.87}
MIXED_TIMES = {"b16x8192": (512, 258.46), "b64x8192": (512, 675.04), "b255x8192": (2048, 2692.58)}
CHUNK_TIMES = {512: 117.79, 1024: 223.87, 2048: 412.19}

SERVING = (
    Goal("paged decode from 256k keys on (the best over contiguous keys)", 0.98, 0.98,
         shapes=MANY_KEYS, workloads=("paged_decode",),
         peer=("flash", "cudnn", "efficient", paged.CONTIGUOUS)),
    Goal("the same, pages of 16 (ours of 64)", 0.98, 0.98, **OVER_PAGES,
         sibling=Sibling(beside(MANY_KEYS, paged.DECODE["p64"]))),
    Goal("the same, pages of 1 (ours of 64; 0.91 is 10% more time)", 1 / 1.1, 1 / 1.1, **OVER_PAGES,
         sibling=Sibling(beside(paged.shapes(paged.MANY_KEYS, "p1"), paged.DECODE["p64"]))),
    Goal("paged decode of few keys (the best paged one)", 1.15, 1.15, **OVER_PAGES,
         times=of_sizes("p16", **FEW_TIMES)),
    Goal("decode over uneven lengths (the best paged one)", 1.3, 1.3, peer=None,
         workloads=("paged_uneven",), times=of_sizes("p16", b16x1262=40.83, b256x2571=709.17)),
    Goal("decodes and a chunk (the best paged one)", 1.15, 1.15, peer=None,
         workloads=("paged_mixed",), times={
             label: us for size, (chunk, us) in MIXED_TIMES.items()
             for label, us in of_sizes(f"q{chunk},p16", **{size: us}).items()}),
    Goal("decodes and a chunk (ours in two calls; 0.91 is 10% more time)", 1 / 1.1, 1 / 1.1,
         workloads=("paged_mixed",), peer=paged.APART),
    Goal("chunks over pages (ours without pages)", 0.95, 0.95, workloads=("paged_prefill",),
         peer=paged.CONTIGUOUS, shapes=tuple(paged.chunk_shapes("p16"))),
    Goal("chunks over pages (the best paged one)", 1.08, 1.08, peer=None,
         workloads=("paged_prefill",),
         times=dict(zip(paged.chunk_shapes("p16"), CHUNK_TIMES.values(), strict=True))),
    Goal("decode over e4m3 from 256k keys on (ours in 16 bits; 1.79 is 0.56 of its time)",
         1 / 0.56, 1 / 0.56, workloads=("paged_decode",), peer=paged.SIXTEEN_BITS,
         shapes=paged.shapes(paged.MANY_KEYS, "p16,e4m3")),
    Goal("decode over e4m3 of few keys (the best paged one)", 1.1, 1.1, **OVER_PAGES,
         times=of_sizes("p16,e4m3", **FEW_TIMES_E4M3)),
    Goal("append of 8,192 tokens (a plain copy)", 0.9, 0.9, workloads=("append",),
         peer=append.COPY, shapes=tuple(append.LARGE)),
    Goal("append of 64 tokens (5 us)", 1.0, 1.0, peer=None, workloads=("append",),
         times=dict.fromkeys(append.SMALL, 5.0)),
)  # fmt: skip

DERIVATIVES = (
    Goal("second derivatives (math)", 3.0, 3.0, peer="math",
         workloads=("second", "second_crystals")),
    Goal("fp32 (the best that PyTorch has)", 1.3, 1.3, peer=None, workloads=("fp32",)),
    Goal("dropout (FlashAttention-2 with it)", 1.1, 1.1, workloads=("dropout",)),
    Goal("a mask of bytes (ours as a bias)", 1.0, 1.0, peer=options.MASK_AS_BIAS,
         workloads=("mask",)),
)  # fmt: skip

PYTORCH_EXPERTS = {"peer": ("loop", "grouped_mm")}
COMPOSITION = {"peer": "grouped_mm"}

# On the CPU against PyTorch's better backend; on a GPU each family against its like.
GOALS = {
    "cpu": (
        experts("small experts", 1.5, "moe", shapes=(moe.CPU_SMALL,), dtypes=("fp32", "bf16"),
                **PYTORCH_EXPERTS),
        experts("experts by element", 1.5, "moe_elements", dtypes=("fp32", "bf16"),
                **PYTORCH_EXPERTS),
        experts("large experts, fp32", 1.0, "moe", shapes=(moe.CPU_LARGE,), dtypes=("fp32",),
                **PYTORCH_EXPERTS),
        experts("large experts, bf16", 1.2, "moe", shapes=(moe.CPU_LARGE,), dtypes=("bf16",),
                **PYTORCH_EXPERTS),
        Goal("fp32", 1.0, 0.9, dtypes=("fp32",), **CPU),
        Goal("fp16", 1.2, 0.9, dtypes=("fp16",), **CPU),
        Goal("bf16", 1.2, 0.9, dtypes=("bf16",), **CPU),
        Goal("second derivatives", 1.5, 1.5, peer="math", workloads=("second", "second_crystals")),
    ),
    "cuda": (
        Goal("dense forward, head dims 64, 128", 1.05, 1.0, dims=(64, 128), **FORWARD, **DENSE,
            **SM80),
        Goal("dense forward, head dim 256", 1.0, 1.0, dims=(256,), **FORWARD, **DENSE, **SM80),
        Goal("dense backward, head dims 64, 128", 1.05, 1.0, dims=(64, 128), **BACKWARD, **DENSE,
            **SM80),
        Goal("dense backward, head dim 256", 1.0, 1.0, dims=(256,), **BACKWARD, **DENSE, **SM80),
        Goal(f"{SMALL}, forward", 1.5, 1.5, **FORWARD, **SMALL_ROWS, **SM80),
        Goal(f"{SMALL}, forward and backward", 1.5, 1.5, **BOTH, **SMALL_ROWS, **SM80),
        Goal("decode, one query over the keys", 1.0, 1.0, workloads=("decode",), **SM80),
        Goal("deterministic backward (our fast one; 0.80 is 1.25 times its time)", 0.8, peer=None,
            workloads=("deterministic",), dims=(64, 128), **BACKWARD, **SM80),
        *HOPPER,
        hopper_beside("head dims 96 and 192 (the mean of their neighbours)", 1.0, "head_dims",
                      workloads.HEAD_DIMS),
        Goal("dense forward in fp16 (ours in bf16)", 0.97, 0.97, peer=None, workloads=("dense",),
            dtypes=("fp16",), sibling=Sibling(dtype="bf16"), **FORWARD, **SM90),
        hopper_beside("8 key heads (ours with a key head for each)", 0.97, "gqa", workloads.GQA),
        hopper_beside("window of 1,024 keys (ours without)", 0.6, "window", workloads.WINDOW),
        hopper_beside("packed sequences of 100 to 4,096 tokens (ours dense)", 0.9,
                      "mixed_lengths", workloads.MIXED_LENGTHS),
        Goal("deterministic backward (our fast one)", 0.85, peer=None,
            workloads=("deterministic",), **BACKWARD, **SM90),
        *science("pair bias, head dim 64 (best peer)", 1.5, 2.5, "pair_bias",
                 shapes=workloads.EVEN_PAIR_BIAS),
        *science("pair bias of odd length (best peer)", 1.3, 2.0, "pair_bias",
                 shapes=workloads.ODD_PAIR_BIAS),
        *science("bias in fp32 (ours in 16 bits; 0.77 is 1.3 times its time)", 1 / 1.3, 1 / 1.3,
                 "fp32_bias", each=1 / 1.3),
        *science("diffusion: a bias for 48 (best peer)", 1.8, 2.5, "diffusion"),
        *science("triangle of 256 to 512 (best peer)", 1.6, 1.8, "triangle",
                 shapes=EVEN_TRIANGLES),
        *science("triangle of 768 and of odd length (best peer)", 2.5, 4.0, "triangle",
                 shapes=HARD_TRIANGLES),
        Goal("triangle of odd length (its even neighbour; 0.87 is 15% more time per score)",
            1 / 1.15, 1 / 1.15, peer=None, workloads=("triangle",),
            sibling=Sibling(shapes=ODD_TRIANGLES)),
        *science("crystals, 8 heads of 64 (varlen_attn)", 5.0, 5.0, "crystals", dims=(64,)),
        *science("crystals, 48 heads of 16 (varlen_attn)", 6.0, 6.0, "crystals", dims=(16,)),
        *science("crystals with pair bias (ours without; 0.67 is 1.5 times its time)", 1 / 1.5,
                 1 / 1.5, "crystals_bias", each=1 / 1.5),
        *science("short sequences and small head dims (best peer)", 1.25, 1.2, "small", each=1.0),
        Goal("calls of a few microseconds (the best of SDPA)", 1.0, 1.0, peer=None,
            workloads=("small_calls",)),
        Goal("a model's training step (with SDPA)", 1.0, 1.0, peer=training.SDPA,
            workloads=("training",)),
        experts("experts, training", 1.2, "moe", shapes=moe.TRAINING, **COMPOSITION, **SM80),
        experts("small experts", 2.0, "moe", shapes=(moe.SMALL,), **COMPOSITION, **SM80),
        experts("experts by element", 2.0, "moe_elements", **COMPOSITION, **SM80),
        *SERVING,
        *DERIVATIVES,
        Goal("peak memory (inputs and results; 0.91 is 10% more)", 1 / 1.1, 1 / 1.1, peer=None,
            workloads=MATERIALS, memory=True),
    ),
}  # fmt: skip


@dataclass
class Standing:
    """How the rows of a run stand against one goal."""

    goal: Goal
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


def ratio_to(row: Row, peer: str | tuple[str, ...] | None) -> float | None:
    """A peer's time over ours. None asks for the row's own ratio, which is about the best peer."""
    if peer is None:
        return row["ratio"]
    if isinstance(peer, tuple):
        return min(filter(None, (ratio_to(row, one) for one in peer)), default=None)
    times = [row["implementations"].get(name, {}).get("ms") for name in (peer, "ours")]
    return times[0] / times[1] if all(times) else None


def ratio_to_everyone(row: Row) -> float | None:
    """Of the best peer; None unless those that may be the best were there."""
    asked = row["implementations"]
    ratios = [ratio_to(row, name) for name in asked if name != "ours"]
    return min(filter(None, ratios), default=None) if asked.keys() >= EVERYONE else None


def ratio_of(goal: Goal, row: Row, rows: list[Row]) -> float | None:
    """What a goal compares; None where one side is missing."""
    if goal.memory:
        held = row.get("memory")
        return held["needed_bytes"] / held["peak_bytes"] if held else None
    if goal.everyone:
        return ratio_to_everyone(row)
    if goal.times:
        ms = our_ms(row)
        return goal.times[row["label"]] / ms / 1e3 if ms else None
    if goal.sibling is None:
        return ratio_to(row, goal.peer)
    speeds = speed(row), goal.sibling.speed(row, rows)
    return speeds[0] / speeds[1] if all(speeds) else None


def our_ms(row: Row) -> float | None:
    return row["implementations"]["ours"]["ms"]


def speed(row: Row) -> float | None:
    """Ours: work over time, where the answer is right."""
    ms = our_ms(row)
    return row["flops"] / ms if ms and row["check"]["status"] != "failed" else None


def standing(goal: Goal, rows: list[Row], families: Families) -> Standing:
    """Wrong rows do not count for the mean; they, and rows we have no time in, miss the goal."""
    found = Standing(goal)
    for row in rows:
        if not goal.holds_for(row, families.get(group_of(row))):
            continue
        name, ratio = name_of(row), ratio_of(goal, row, rows)
        if row["check"]["status"] == "failed":
            found.missed.append(f"{name}: wrong")
        elif our_ms(row) is None:
            found.missed.append(f"{name}: {row['check']['status']}, not timed")
        elif ratio is None:
            found.unmeasured.append(name)
        else:
            found.ratios[name] = ratio
            if ratio < goal.each:
                found.missed.append(f"{name}: {ratio:.3f}, at least {goal.each:.3g} wanted")
    if found.mean is not None and found.mean < goal.mean:
        what = f"geometric mean {found.mean:.3f}, at least {goal.mean:.3g} wanted"
        found.missed.insert(0, f"{goal.name}: {what}")
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


def standings(rows: list[Row], device_type: str) -> list[Standing]:
    """Of the goals about workloads and passes that were measured, by a family they are about."""
    rows = headline(rows)
    families = families_of(rows)
    return [
        standing(goal, rows, families)
        for goal in GOALS[device_type]
        if any(goal.is_asked_of(row, families.get(group_of(row))) for row in rows)
    ]


def missed_goals(rows: list[Row], device_type: str) -> list[str]:
    """What is missing, in words."""
    found = standings(rows, device_type)
    missed = [line for s in found for line in s.missed]
    if not found:
        missed.append("no goal is about these rows")
    elif not any(s.ratios for s in found):
        missed.append("no row has both our time and a peer's")
    return missed


def print_standings(console: Any, found: list[Standing]) -> None:
    """Each goal, what was wanted and what was reached."""
    from rich import box
    from rich.table import Table

    table = Table(title="goals", box=box.SIMPLE_HEAD)
    for column in ("", "against", "rows", "mean", "wanted", "lowest", "wanted", ""):
        table.add_column(column, justify="right" if column not in ("", "against") else "left")
    for s in found:
        lowest = f"{s.ratios[s.lowest]:.2f}" if s.lowest else "-"
        mean = "-" if s.mean is None else f"{s.mean:.2f}"
        style = {"met": "green", "missed": "bold red"}.get(s.verdict, "dim")
        table.add_row(
            s.goal.name, s.goal.against, s.rows, mean, f"{s.goal.mean:.2f}",
            lowest, f"{s.goal.each:.2f}" if s.goal.each else "-", f"[{style}]{s.verdict}[/]",
        )  # fmt: skip
    console.print(table)


def main(argv: list[str] | None = None) -> int:
    from flashmoe_science.bench.report import make_console

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", type=Path, nargs="?", default=Path("build/bench/results.json"))
    found = json.loads(parser.parse_args(argv).results.read_text())
    rows, device_type = found["rows"], found["about"]["device"]
    console = make_console()
    print_standings(console, standings(rows, device_type))
    missed = missed_goals(rows, device_type)
    for line in missed:
        console.print(f"missed: {line}", markup=False, style="bold red")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
