"""Goals of serving and of derivatives: which rows each is about, and that a miss is noticed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from flashmoe_science.bench import paged, runner
from flashmoe_science.bench.results import compare
from flashmoe_science.bench.workloads import WORKLOADS

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))

import goals

NAMES = [n for n in WORKLOADS if n.startswith("paged_")]
NAMES += ["append", "second", "second_crystals", "fp32", "dropout", "mask"]
ALONE = ("decodes", "chunk")


def made_up_row(spec: runner.RowSpec, ms: float = 1e-3, ratio: float = 2.0) -> dict:
    """A row in which every peer takes our time times a ratio, and an hour is far away."""
    peers = {name: {"ms": ms * ratio} for name in WORKLOADS[spec.workload].peers("cuda")}
    implementations = {"ours": {"ms": ms}, **peers}
    return {
        "workload": spec.workload, "label": str(spec.shape), "dtype": spec.dtype, "family": "sm90",
        "shape": {"length": getattr(spec.shape, "length", 0)}, "pass": spec.direction,
        "regime": "sustained", "check": {"status": "ok"}, "flops": 1e9,
        "implementations": implementations, **compare(implementations, None, ALONE),
    }  # fmt: skip


def table(where: dict | None = None, **changes: float) -> list[dict]:
    """Every default row of a GPU; changes are for those where all facts hold."""
    rows = []
    for spec in runner.rows_of(NAMES, None, None, None, "cuda"):
        facts = {"workload": spec.workload, "label": str(spec.shape), "pass": spec.direction}
        changed = where is not None and where.items() <= facts.items()
        usual = {"ratio": 4.0} if spec.workload.startswith("second") else {}
        rows.append(made_up_row(spec, **(usual | changes if changed else usual)))
    return rows


def test_goals_are_about_their_rows():
    found = goals.standings(table(), "cuda")
    assert [s.goal for s in found] == [*goals.SERVING, *goals.DERIVATIVES]
    assert [s.verdict for s in found] == ["met"] * len(found)
    counts = [len(s.ratios) for s in found]
    assert counts == [3, 3, 3, 5, 2, 3, 6, 3, 3, 3, 5, 2, 2, 12, 8, 4, 4]
    assert not goals.missed_goals(table(), "cuda")


SIXTEEN, SIXTY_FOUR, ONE = (paged.shapes(("64x8192",), p)[0] for p in ("p16", "p64", "p1"))


@pytest.mark.parametrize(
    ("where", "changes", "missed"),
    [
        ({"label": SIXTEEN}, {"ratio": 0.97}, ["paged decode from 256k keys on"]),
        ({"label": SIXTEEN}, {"ratio": 0.99}, []),
        ({"label": SIXTEEN}, {"ms": 1.03e-3}, ["the same, pages of 16"]),
        ({"label": ONE}, {"ms": 1.09e-3}, []),
        ({"label": ONE}, {"ms": 1.11e-3}, ["the same, pages of 1"]),
        ({"label": paged.shapes(("16x512",), "p16")[0]}, {"ms": 20.54e-3 / 1.14},
         ["paged decode of few keys"]),
        ({"label": paged.shapes(("16x512",), "p16")[0]}, {"ms": 20.54e-3 / 1.16}, []),
        ({"label": paged.shapes(("256x2571",), "p16")[0]}, {"ms": 0.70917 / 1.29},
         ["decode over uneven lengths"]),
        ({"label": paged.shapes(("255x8192",), "q2048,p16")[0]}, {"ms": 2.69258 / 1.1},
         ["decodes and a chunk"]),
        ({"workload": "paged_mixed"}, {"ratio": 0.9}, ["decodes and a chunk"]),
        ({"workload": "paged_mixed"}, {"ratio": 0.92}, []),
        ({"label": paged.shapes(("1x8192",), "q1024,p16")[0]}, {"ms": 0.22387 / 1.07},
         ["chunks over pages"]),
        ({"workload": "paged_prefill"}, {"ratio": 0.94}, ["chunks over pages"]),
        ({"label": paged.shapes(("8x32768",), "p16,e4m3")[0]}, {"ratio": 1.7},
         ["decode over e4m3 from 256k keys on"]),
        ({"label": paged.shapes(("1x512",), "p16,e4m3")[0]}, {"ms": 10.85e-3 / 1.05},
         ["decode over e4m3 of few keys"]),
        ({"label": "8192,8,128,16"}, {"ratio": 0.89}, ["append of 8,192 tokens"]),
        ({"label": "64,8,128,16"}, {"ms": 5.1e-3}, ["append of 64 tokens"]),
        ({"workload": "second", "pass": "bwd"}, {"ratio": 2.9}, ["second derivatives"]),
        ({"workload": "fp32", "label": "4,16,1024,64,tf32"}, {"ratio": 1.2},
         ["fp32"]),
        ({"workload": "dropout"}, {"ratio": 1.05}, ["dropout"]),
        ({"workload": "mask"}, {"ratio": 0.99}, ["a mask of bytes"]),
    ],
)  # fmt: skip
def test_every_miss_is_noticed(where, changes, missed):
    found = [s.goal for s in goals.standings(table(where, **changes), "cuda") if s.missed]
    assert list(dict.fromkeys(goal.name.split(" (")[0] for goal in found)) == missed


def test_a_row_without_our_time_misses_its_goal():
    rows = [row for row in table() if row["workload"] == "append"]
    for row in rows:
        row["implementations"]["ours"]["ms"], row["check"] = None, {"status": "refused"}
    missed = goals.missed_goals(rows, "cuda")
    assert [line.split(": ")[1] for line in missed if "append (" in line]
    assert all("refused, not timed" in line for line in missed if "append (" in line)
