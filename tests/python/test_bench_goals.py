"""The project's own goals: which rows each is about, and that it notices where one is missed."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import pytest

from bench_rows import flops_of
from flashmoe_science.bench import runner, workloads
from flashmoe_science.bench.case import Shape
from flashmoe_science.bench.results import compare
from flashmoe_science.bench.workloads import WORKLOADS

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))

import goals

MATERIALS = ("pair_bias", "fp32_bias", "diffusion", "triangle", "crystals", "crystals_bias")
OWN_PEERS = ("fp32_bias", "crystals_bias")  # in rows about what an option costs
TABLES = {
    "head_dims": workloads.HEAD_DIMS,
    "gqa": workloads.GQA,
    "window": workloads.WINDOW,
    "mixed_lengths": workloads.MIXED_LENGTHS,
}


def row_of(spec: runner.RowSpec, implementations: dict, baseline=None, family: str = "") -> dict:
    """The data of a row with these times."""
    return {
        "workload": spec.workload, "label": str(spec.shape), "dtype": spec.dtype, "family": family,
        "shape": dataclasses.asdict(spec.shape), "pass": spec.direction, "regime": "sustained",
        "check": {"status": "ok"}, "implementations": implementations,
        **compare(implementations, baseline),
    }  # fmt: skip


def row(dtype: str, ratio: float | None, status: str = "ok") -> dict:
    fixed = {"workload": "dense", "label": "1,1,1,1", "pass": "fwd", "regime": "sustained"}
    fixed["implementations"] = {"ours": {"ms": 1.0}, "flash": {"ms": ratio}}
    return {**fixed, "dtype": dtype, "ratio": ratio, "check": {"status": status}}


@pytest.mark.parametrize(
    ("rows", "missed"),
    [
        ([row("fp32", 1.0), row("bf16", 1.2), row("fp16", 1.3)], 0),
        ([row("fp32", 0.9), row("fp32", 1.2)], 0),
        ([row("fp32", 0.95)], 1),
        ([row("bf16", 1.1)], 1),
        ([row("fp32", 0.89), row("fp32", 2.0)], 1),
        ([row("fp16", 0.5)], 2),
        ([row("fp32", 1.5), row("fp32", None)], 0),
        ([row("fp32", None)], 1),
        ([row("fp32", 1.5), row("fp32", 1.5, "failed")], 1),
        ([], 1),
    ],
)
def test_every_miss_is_noticed(rows, missed):
    assert len(goals.missed_goals(rows, "cpu")) == missed


def gpu_row(spec: runner.RowSpec, flash: float | None) -> dict:
    """A row in which we take 2 ms, cuDNN half of that, and flash that times a ratio."""
    peers = {"flash": {"ms": flash and 2 * flash}, "cudnn": {"ms": 1.0}}
    baseline = None
    if spec.workload == "deterministic":
        peers, baseline = {"nondeterministic": peers["flash"]}, "nondeterministic"
    if spec.workload == "small":
        del peers["cudnn"]  # other goals are about the best of them
    implementations = {"ours": {"ms": 2.0}, **peers}
    return row_of(spec, implementations, baseline, "sm80")


def whole_table(ratio_of) -> list[dict]:
    names = ("dense", "small", "decode", "deterministic")
    specs = runner.rows_of(names, None, ("bf16", "fp16"), None, "cuda")
    return [gpu_row(spec, ratio_of(spec)) for spec in specs]


def test_gpu_goals_are_about_flash():
    """The default shapes and passes on a GPU answer every goal, whatever cuDNN does."""
    found = goals.standings(whole_table(lambda spec: 1.6), "cuda")
    assert [s.verdict for s in found] == ["met"] * 10 and found[7].goal.dims == (64, 128)
    assert [len(s.ratios) for s in found] == [40, 20, 40, 20, 6, 6, 10, 24, 36, 36]


@pytest.mark.parametrize(
    ("workload", "direction", "ratio", "missed"),
    [
        ("dense", "fwd", 1.04, 1),  # the mean of dims 64 and 128; 1 is enough for 256
        ("dense", "bwd", 0.99, 2 + 60),  # both means, and every row from 1,024 tokens on
        ("small", "fwd+bwd", 1.4, 1 + 6),
        ("small", "fwd", 1.22, 1 + 6 + 1),  # and the mean that both families are held to
        ("small", "fwd+bwd", 0.99, 1 + 6 + 1 + 36),  # of which no row may be under 1
        ("decode", "fwd", 0.9, 1 + 10),
        ("deterministic", "bwd", 0.79, 1),
        ("deterministic", "bwd", 0.81, 0),
        ("decode", "fwd", None, 0),  # FlashAttention-2 did not run
    ],
)
def test_every_miss_is_noticed_of_a_gpu(workload, direction, ratio, missed):
    def ratio_of(spec):
        return ratio if (spec.workload, spec.direction) == (workload, direction) else 1.6

    assert len(goals.missed_goals(whole_table(ratio_of), "cuda")) == missed


def test_a_wrong_row_misses_its_goal():
    rows = whole_table(lambda spec: 1.6)
    decode = next(row for row in rows if row["workload"] == "decode")
    decode["check"] = {"status": "failed"}
    assert [line.split(": ")[1] for line in goals.missed_goals(rows, "cuda")] == ["wrong"]
    decode["check"] = {"status": "refused"}
    decode["implementations"]["ours"]["ms"] = None
    missed = [line.split(": ")[1] for line in goals.missed_goals(rows, "cuda")]
    assert missed == ["refused, not timed"]


def made_up_row(
    spec: runner.RowSpec, ratio: float, family: str = "sm90", cudnn: float | None = 1.2
) -> dict:
    """A row in which FA3, or our other rows for as many FLOPs, take our time times a ratio."""
    factor = WORKLOADS[spec.workload].flops_of_pass(spec.direction)
    flops = flops_of(spec.workload, str(spec.shape)) * factor
    ours = flops / 1e12 / ratio
    if spec.workload == "deterministic":
        implementations = {"ours": {"ms": ours}, "nondeterministic": {"ms": ratio * ours}}
        return row_of(spec, implementations, "nondeterministic", family) | {"flops": flops}
    implementations = {"ours": {"ms": ours}, "cudnn": {"ms": cudnn and cudnn * ours}}
    if spec.dtype == "bf16":
        dense = spec.workload in ("dense", "uneven")
        implementations["fa3"] = {"ms": (ratio if dense else 1.3) * ours}
    return row_of(spec, implementations, None, family) | {"flops": flops}


def is_row(spec: runner.RowSpec, facts: dict) -> bool:
    own = {"workload": spec.workload, "direction": spec.direction, "dtype": spec.dtype}
    own |= {"dim": spec.shape.dim, "label": str(spec.shape), "length": spec.shape.length}
    return facts.items() <= own.items()


def made_up_table(facts: dict | None = None, **changes) -> list[dict]:
    """Default rows of a GPU, training steps and fp16 too; changes are for those of the facts."""
    names = ("dense", *TABLES, "uneven", "deterministic")
    specs = runner.rows_of(names, None, ("bf16",), None, "cuda")
    specs += runner.rows_of(("dense",), None, ("bf16",), ("fwd+bwd",), "cuda")
    specs += runner.rows_of(("dense",), None, ("fp16",), ("fwd",), "cuda")
    rows = []
    for spec in specs:
        beside = str(spec.shape) in TABLES.get(spec.workload, ())
        dense = spec.workload in ("dense", "uneven") and spec.dtype == "bf16"
        usual = {"ratio": 1.16 if dense else 1.001 if beside else 1.0}
        changed = changes if facts is not None and is_row(spec, facts) else {}
        rows.append(made_up_row(spec, **(usual | changed)))
    for row in rows:  # fp16 takes as long as bf16
        if row["dtype"] == "fp16":
            same = {"workload": "dense", "dtype": "bf16", "pass": "fwd", "label": row["label"]}
            ours = next(r for r in rows if same.items() <= r.items())["implementations"]["ours"]
            slower = row["implementations"]["ours"]["ms"] * 1e12 / row["flops"]
            row["implementations"]["ours"]["ms"] = ours["ms"] * slower
    return rows


def test_goals_of_hopper_are_about_their_rows():
    found = goals.standings(made_up_table(), "cuda")
    assert [(s.goal.name, s.missed) for s in found if s.verdict != "met"] == []
    assert all(s.goal.families == ("sm90",) for s in found), "and no goal about FlashAttention-2"
    forward, backward, both = [36, 12, 6, 3], [36, 3, 3, 4, 8], [36]
    beside = [12, 16, 48, 8, 36, 4, 2, 2, 18]
    assert [len(s.ratios) for s in found] == [*forward, *backward, *both, *beside]
    assert {s.goal.against for s in found} == {"best of all", "our other row", "its peer"}
    assert not goals.missed_goals(made_up_table(), "cuda")


FORWARD = {"workload": "dense", "direction": "fwd", "dtype": "bf16"}
BACKWARD = FORWARD | {"direction": "bwd"}
NEIGHBOURS = "head dims 96 and 192 (the mean of their neighbours)"


@pytest.mark.parametrize(
    ("facts", "changes", "missed"),
    [
        # A mean bears one slow row, where no row is asked for by itself.
        (FORWARD | {"label": "4,16,4096,128"}, {"ratio": 0.9}, []),
        (FORWARD | {"label": "4,16,4096,128,causal"}, {"ratio": 0.99},
         ["dense (4,16,4096,128,causal) bf16 fwd"]),
        # cuDNN faster than ours, and so the best of all.
        (BACKWARD | {"label": "4,16,4096,128,causal"}, {"cudnn": 0.99},
         ["dense (4,16,4096,128,causal) bf16 bwd"]),
        (FORWARD | {"length": 1024}, {"cudnn": 1.0}, ["dense forward, up to 1,024 tokens"]),
        (BACKWARD | {"dim": 64, "length": 16384}, {"ratio": 0.7},
         ["dense backward, head dim 64, causal, from 4,096 tokens"]),
        (BACKWARD | {"dim": 256, "length": 4096}, {"ratio": 1.09},
         ["dense backward, head dim 256, from 2,048 tokens", "dense (4,8,4096,256) bf16 bwd",
          "dense (4,8,4096,256,causal) bf16 bwd"]),
        (FORWARD | {"direction": "fwd+bwd"}, {"ratio": 1.04},
         ["dense, forward and backward"]),
        ({"workload": "gqa", "direction": "bwd", "label": "2,28,8192,128,kv4,causal"},
         {"cudnn": 0.99}, ["gqa (2,28,8192,128,kv4,causal) bf16 bwd"]),
        ({"workload": "gqa", "direction": "fwd", "label": "2,28,8192,128,kv4,causal"},
         {"cudnn": 0.99}, []),
        ({"workload": "head_dims", "direction": "bwd", "label": "4,21,4096,96"}, {"cudnn": 0.99},
         ["head_dims (4,21,4096,96) bf16 bwd"]),
        ({"workload": "uneven", "label": "3,7,1777,64", "direction": "bwd"}, {"ratio": 0.99},
         ["uneven (3,7,1777,64) bf16 bwd"]),
        ({"workload": "dense", "dtype": "fp16", "label": "4,16,4096,128"}, {"ratio": 0.96},
         ["dense (4,16,4096,128) fp16 fwd"]),
        ({"workload": "dense", "dtype": "fp16"}, {"ratio": 0.975}, []),
        ({"label": "4,21,4096,96"}, {"ratio": 0.99},
         [NEIGHBOURS, "head_dims (4,21,4096,96) bf16 fwd"]),
        # Halfway between neighbours of 0.8 and 1.
        ({"workload": "head_dims", "label": "4,32,4096,64"}, {"ratio": 0.8}, []),
        ({"workload": "head_dims", "label": "4,32,4096,64"}, {"ratio": 1.1},
         [NEIGHBOURS, "head_dims (4,21,4096,96) bf16 fwd"]),
        ({"label": "4,64,4096,128,kv8"}, {"ratio": 0.96}, ["gqa (4,64,4096,128,kv8) bf16 fwd"]),
        ({"label": "4,64,4096,128,kv8"}, {"ratio": 0.975}, []),
        ({"label": "1,16,16384,128,causal,w1024"}, {"ratio": 0.61}, []),
        ({"label": "1,16,16384,128,causal,w1024"}, {"ratio": 0.59},
         ["window (1,16,16384,128,causal,w1024) bf16 fwd"]),
        ({"workload": "mixed_lengths", "label": "64,16,4096,128"}, {"ratio": 0.89},
         ["mixed_lengths (64,16,4096,128) bf16 fwd"]),
        ({"workload": "deterministic"}, {"ratio": 0.84}, ["deterministic backward (our fast one)"]),
        ({"workload": "deterministic"}, {"ratio": 0.86}, []),
    ],
)  # fmt: skip
def test_every_miss_is_noticed_of_hopper(facts, changes, missed):
    lines = goals.missed_goals(made_up_table(facts, **changes), "cuda")
    assert list(dict.fromkeys(line.split(": ")[0] for line in lines)) == missed


def test_the_best_of_all_is_known_where_all_were_asked():
    spec = runner.RowSpec("dense", Shape.parse("4,16,4096,128"), "bf16", "fwd")
    row = made_up_row(spec, 1.1, cudnn=1.2)
    assert goals.ratio_to_everyone(row) == pytest.approx(1.1) == goals.ratio_to(row, "fa3")
    assert row["ratio"] == pytest.approx(1.1) and row["best_peer"] == "fa3"
    assert goals.ratio_to_everyone(made_up_row(spec, 1.3, cudnn=1.2)) == pytest.approx(1.2)
    assert goals.ratio_to_everyone(made_up_row(spec, 1.3, cudnn=None)) == pytest.approx(1.3)
    del row["implementations"]["cudnn"]
    assert goals.ratio_to_everyone(row) is None, "it may be the best, and nobody asked it"


def test_what_was_not_measured_is_not_missed():
    rows = [row for row in made_up_table() if row["workload"] == "dense" and row["pass"] == "fwd"]
    for row in rows:
        del row["implementations"]["cudnn"]
    found = {s.goal.name: s for s in goals.standings(rows, "cuda")}
    assert found["dense forward"].verdict == "not measured"
    assert found["dense forward"].rows == "0 of 36"
    beside = [s.verdict for s in found.values() if s.goal.against == "our other row"]
    assert beside == ["met"] and not goals.missed_goals(rows, "cuda")


def test_sustained_rows_count_where_they_were_measured():
    rows = made_up_table()
    rested = [row | {"regime": "rested"} for row in made_up_table(FORWARD, ratio=0.5)]
    assert not goals.missed_goals([*rows, *rested], "cuda")
    assert goals.missed_goals(rested, "cuda"), "where nothing else was"


def test_a_row_left_to_an_older_family_is_not_let_off():
    rows = made_up_table(FORWARD | {"length": 512}, family="sm80", ratio=0.5)
    missed = goals.missed_goals(rows, "cuda")
    assert sum("(32," in line and "bf16 fwd" in line for line in missed) >= 6
    assert not [s for s in goals.standings(rows, "cuda") if s.goal.families == ("sm80",)]


def test_each_pass_is_held_to_the_family_that_ran_it():
    rows = made_up_table(BACKWARD, family="sm80", cudnn=0.5)
    found = goals.standings(rows, "cuda")
    backward = [s.goal for s in found if s.goal.name.startswith("dense backward")]
    assert {goal.families for goal in backward} == {("sm80",)} and not goals.missed_goals(
        rows, "cuda"
    )
    assert {s.verdict for s in found if s.goal in backward} == {"not measured"}, "without flash"
    both = goals.families_of([{"workload": "dense", "pass": "fwd+bwd", "family": "sm90+sm80"}])
    assert both == {("dense", "fwd+bwd"): "sm90"}
    assert goals.families_of([{"workload": "dense", "pass": "fwd"}]) == {("dense", "fwd"): ""}


def test_a_check_that_checks_nothing_says_so():
    rows = [row for row in made_up_table() if row["workload"] == "gqa"]
    for row in rows:
        row["family"] = "sm80"
    assert goals.missed_goals(rows, "cuda") == ["no goal is about these rows"]


def material_row(
    spec: runner.RowSpec, ours: float = 2.0, ratio: float | None = None, held: float = 1.05
) -> dict:
    """A row in which we take a time for a giga-score, and its peer that times a ratio."""
    shape = spec.shape
    scores = shape.batch * shape.heads * shape.length**2
    ms = ours * scores / 1e9
    implementations = {"ours": {"ms": ms}, "efficient": {"ms": ms * (ratio or 7.0)}}
    baseline = None
    if spec.workload in OWN_PEERS:
        implementations["own"], baseline = {"ms": ms * (ratio or 1.0)}, "own"
    return row_of(spec, implementations, baseline) | {
        "flops": 4.0 * scores,
        "memory": {"peak_bytes": int(held * 1e9), "needed_bytes": 10**9},
    }


def material_table(**changes) -> list[dict]:
    """Every default row of a GPU; changes are for one of them, named by the rest."""
    where = {key: changes.pop(key) for key in ("workload", "label", "direction") if key in changes}
    rows = []
    for spec in runner.rows_of(MATERIALS, None, ("bf16",), None, "cuda"):
        facts = {"workload": spec.workload, "label": str(spec.shape), "direction": spec.direction}
        rows.append(material_row(spec, **(changes if where.items() <= facts.items() else {})))
    return rows


def test_goals_of_the_materials_are_about_their_rows():
    found = goals.standings(material_table(), "cuda")
    assert [s.verdict for s in found] == ["met"] * 20
    pairs, triangles, crystals = [5, 5, 6, 6, 4, 4], [3, 3, 3, 3, 4], [1, 1, 1, 1, 2, 2]
    assert [len(s.ratios) for s in found] == [*pairs, 2, 2, *triangles, *crystals, 46]
    by_name = {s.goal.name.split(" (")[0]: s for s in found}
    assert by_name["triangle of odd length"].mean == pytest.approx(1), "per score"
    assert by_name["crystals with pair bias"].mean == pytest.approx(1)
    assert by_name["peak memory"].mean == pytest.approx(1 / 1.05)
    against = [s.goal.against for s in found]
    assert set(against) == {"its peer", "our other row", "what is needed"}
    assert against[12] == "our other row" and against[-1] == "what is needed"


@pytest.mark.parametrize(
    ("changes", "missed"),
    [
        ({"workload": "pair_bias", "direction": "fwd", "ratio": 1.4}, 1),  # enough for odd lengths
        ({"workload": "pair_bias", "direction": "fwd", "ratio": 1.2}, 2),
        ({"workload": "pair_bias", "direction": "fwd+bwd", "ratio": 2.4}, 1),
        ({"workload": "pair_bias", "label": "8,8,256,64", "ratio": 2.0}, 0),  # a mean
        ({"workload": "fp32_bias", "ratio": 0.78}, 0),
        ({"workload": "fp32_bias", "label": "4,16,768,64", "ratio": 0.76}, 2),  # every row
        ({"workload": "diffusion", "ratio": 1.9}, 1),  # enough forward
        ({"workload": "triangle", "ratio": 1.7}, 3),  # enough forward, of 256 to 512
        ({"workload": "triangle", "label": "768,4,768,32", "ratio": 0.3}, 2),  # not of those
        ({"workload": "triangle", "label": "257,4,257,32", "ours": 2.28}, 0),  # 14%
        ({"workload": "triangle", "label": "257,4,257,32", "ours": 2.32}, 2),  # 16%, both passes
        ({"workload": "triangle", "label": "384,4,384,32", "ours": 1.7}, 2),  # 381 beside it
        ({"workload": "triangle", "label": "512,4,512,32", "ours": 1.0}, 0),  # nobody's neighbour
        ({"workload": "crystals", "direction": "fwd", "ratio": 5.5}, 1),  # 6 for small heads
        ({"workload": "crystals", "label": "4096,8,443,64", "ratio": 4.9}, 2),
        ({"workload": "crystals_bias", "ratio": 0.68}, 0),
        ({"workload": "crystals_bias", "direction": "fwd", "ratio": 0.66}, 1 + 2),
        ({"workload": "triangle", "label": "512,4,512,32", "held": 1.11}, 2),
    ],
)
def test_every_miss_is_noticed_of_the_materials(changes, missed):
    assert len(goals.missed_goals(material_table(**changes), "cuda")) == missed


def test_a_row_without_its_sibling_or_its_memory_is_not_measured():
    rows = [row for row in material_table() if row["label"] in goals.ODD_TRIANGLES]
    *_, beside, held = goals.standings(rows, "cuda")
    assert beside.verdict == "not measured" and beside.rows == "0 of 4" and held.verdict == "met"
    rows = [row for row in material_table() if row["workload"] == "pair_bias"]
    del rows[0]["memory"]
    held = goals.standings(rows, "cuda")[-1]
    assert held.unmeasured == ["pair_bias (8,8,256,64) bf16 fwd"] and held.rows == "21 of 22"
    assert held.verdict == "met" and not goals.missed_goals(rows, "cuda")


def test_goals_of_workloads_that_were_not_run_are_not_listed():
    rows = [row for row in material_table() if row["workload"] == "triangle"]
    names = [s.goal.name for s in goals.standings(rows, "cuda")]
    assert len(names) == 6 and all(name.startswith(("triangle", "peak memory")) for name in names)


def test_the_exit_code_says_whether_a_goal_is_missed(tmp_path, capsys):
    path = tmp_path / "results.json"
    path.write_text(json.dumps({"about": {"device": "cuda"}, "rows": made_up_table()}))
    assert goals.main([str(path)]) == 0
    rows = made_up_table({"workload": "deterministic"}, ratio=0.84)
    path.write_text(json.dumps({"about": {"device": "cuda"}, "rows": rows}))
    assert goals.main([str(path)]) == 1
    text = capsys.readouterr().out
    assert "missed: deterministic backward (our fast one)" in text and "best of all" in text
