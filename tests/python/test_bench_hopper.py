"""The benchmark for Hopper: rows beside our own, peers measured before, bars of the sm90 family."""

from __future__ import annotations

import dataclasses
import io
import json
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console

from flashmoe_science.bench import anchors, bars, peers, ragged, report, runner, timing, workloads
from flashmoe_science.bench.accuracy import check, heads_to_compare
from flashmoe_science.bench.case import Implementation, Shape
from flashmoe_science.bench.workloads import WORKLOADS

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import generate_docs  # noqa: E402

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
TABLES = {
    "head_dims": workloads.HEAD_DIMS,
    "gqa": workloads.GQA,
    "window": workloads.WINDOW,
    "mixed_lengths": workloads.MIXED_LENGTHS,
}
H200 = {"device": "cuda", "gpu": {"name": "NVIDIA H200"}}


def flops_of(workload: str, shape: str) -> float:
    """Of the forward pass, without making the tensors of a GPU's row."""
    parsed = Shape.parse(shape)
    pairs = parsed.batch * parsed.pairs
    if workload == "mixed_lengths" and not parsed.even:
        lengths = ragged.uniform_lengths(parsed.batch, parsed.length)
        pairs = sum(n * n for n in lengths) // (2 if parsed.causal else 1)
    return 4.0 * pairs * parsed.heads * parsed.dim


@pytest.mark.parametrize("workload", TABLES)
def test_rows_lie_beside_rows_of_as_many_flops(workload):
    shapes = WORKLOADS[workload].shapes["cuda"]
    assert len(set(shapes)) == len(shapes)
    assert all(str(Shape.parse(shape)) == shape for shape in shapes), "or bars would not find them"
    for shape, others in TABLES[workload].items():
        for other in others:
            assert other in shapes and other not in TABLES[workload]
            share = flops_of(workload, shape) / flops_of(workload, other)
            if workload == "window":
                assert 0.115 < share < 0.125, "of 16,384 keys at most 1,024"
            else:
                assert 0.96 < share < 1.04


def test_the_rows_are_those_that_were_asked_for():
    assert {(Shape.parse(s).dim, Shape.parse(s).length) for s in workloads.HEAD_DIMS} == {
        (96, 1024), (96, 4096), (192, 1024), (192, 4096)
    }  # fmt: skip
    assert {(Shape.parse(s).heads, Shape.parse(s).kv_heads) for s in workloads.GQA} == {
        (32, 8), (64, 8)
    }  # fmt: skip
    lengths = ragged.uniform_lengths(64, 4096)
    # Every version of Python draws these, or the rows of two machines are not about the same thing.
    assert (len(lengths), sum(lengths), lengths[:3]) == (64, 146_158, [3558, 1677, 3204])
    assert 100 <= min(lengths) < 300 and 4000 < max(lengths) <= 4096
    assert min(ragged.uniform_lengths(1000, 4096)) >= 100 and min(ragged.uniform_lengths(99, 9)) > 0


def test_a_shape_has_a_window():
    shape = Shape.parse("1,4,1024,64,kv2,causal,w128")
    assert shape.window == 128 and shape.causal and str(shape) == "1,4,1024,64,kv2,causal,w128"
    assert Shape.parse("3,4,9,8,causal,even").even
    for length, window in ((7, 1), (7, 3), (7, 7), (7, 9), (64, 16)):
        seen = peers.window_mask(length, window, CPU)
        assert Shape(1, 1, length, 8, causal=True, window=window).pairs == seen.sum()
    assert Shape.parse("1,1,10,8").pairs == 100 and Shape.parse("1,1,10,8,causal").pairs == 50


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_window_is_that_of_the_library(dtype):
    case = WORKLOADS["window"].make(Shape.parse("2,4,40,8,kv2,causal,w6"), dtype, CPU)
    assert case.ours.run.keywords == {"causal": True, "window": (5, 0)}
    assert check(case, backward=True).ok and case.scores == 2 * 4 * (21 + 34 * 6)
    assert case.reference_scores == 2 * 4 * 40 * 40, "of which few heads fit, where they are long"
    assert heads_to_compare(dataclasses.replace(case, reference_scores=1 << 25)) == 2
    wider = workloads.our_dense(causal=True, window=(6, 0))
    assert not check(dataclasses.replace(case, ours=wider), backward=True).ok


def test_even_lengths_are_dense():
    case = WORKLOADS["mixed_lengths"].make(Shape.parse("3,4,21,8,even"), torch.float32, CPU)
    assert case.leaves["q"].shape == (3, 4, 21, 8) and not case.lengths
    case = WORKLOADS["mixed_lengths"].make(Shape.parse("3,4,21,8"), torch.float32, CPU)
    assert len(case.lengths) == 3 and case.leaves["q"].shape == (sum(case.lengths), 4, 8)


def test_a_peer_that_a_case_lacks_is_left_out(monkeypatch):
    """Packed sequences on a GPU have varlen_attn alone, the dense ones beside them no varlen."""
    right = workloads.make_ragged
    monkeypatch.setattr(
        workloads,
        "make_ragged",
        lambda shape, dtype, device, draw: right(shape, dtype, CPU, draw=draw),
    )
    case = workloads.make_mixed_lengths(Shape.parse("3,4,21,8"), torch.float32, CUDA)
    assert list(case.peers) == ["varlen"]
    made = dataclasses.replace(WORKLOADS["mixed_lengths"], make=lambda *_: case)
    monkeypatch.setitem(WORKLOADS, "mixed_lengths", made)
    spec = runner.RowSpec("mixed_lengths", Shape.parse("3,4,21,8"), "fp32", "fwd")
    found = runner.run_row(spec, ["math", "varlen"], CPU, timing.CpuClock(), 0.001)
    assert list(found["implementations"]) == ["ours"], "math is asked for, and is none of its peers"


@pytest.mark.parametrize("name", WORKLOADS)
def test_every_row_knows_its_kernels(name):
    case = WORKLOADS[name].make(Shape.parse("2,4,9,8"), torch.float32, CPU)
    kernels = runner.kernels_of(case, "fwd+bwd")
    assert list(kernels) == ["fwd", "bwd"] and runner.family_of(kernels) == "cpu"
    assert kernels["fwd"].endswith("attention_fwd") and kernels["bwd"].endswith("attention_bwd")


def test_the_family_is_that_of_the_pass():
    def plan(leaves, backward):
        return f"a call\n  options    none\n  kernel     sm{80 if backward else 90}_attention_x\n"

    case = WORKLOADS["dense"].make(Shape.parse("1,2,8,8"), torch.float32, CPU)
    case = dataclasses.replace(case, ours=Implementation(case.ours.run, explain=plan))
    families = [runner.family_of(runner.kernels_of(case, p)) for p in runner.PASSES]
    assert families == ["sm90", "sm80", "sm90+sm80"]
    refused = dataclasses.replace(case, ours=Implementation(case.ours.run, explain=refuse))
    assert runner.kernels_of(refused, "fwd") == {}


def refuse(leaves, backward):
    raise RuntimeError("no CUDA kernel of this build can run this")


def test_anchors_are_of_the_dense_rows():
    times = anchors.measured_before()
    for direction in runner.PASSES:
        known = {shape for p, shape in times if p == direction}
        assert known == set(WORKLOADS["dense"].shapes["cuda"])
    assert all(found.keys() == anchors.NAMES.keys() for found in times.values())
    assert times["fwd", "32,32,512,64"]["fa3"] == 0.20998
    assert times["bwd", "4,16,4096,128"]["fa4"] == 2.30549
    both = times["fwd+bwd", "4,16,4096,128"]["fa4"]
    assert both == pytest.approx(0.76477 + 2.30549)
    about = (anchors.TABLE.parent / "README.md").read_text()
    assert anchors.TABLE.name in about and "not by this benchmark" in about.replace("\n", " ")


@pytest.mark.parametrize(
    ("change", "about", "found"),
    [
        ({}, H200, True),
        ({"dtype": "fp16"}, H200, False),
        ({"workload": "deterministic", "pass": "bwd"}, H200, False),
        ({"label": "4,16,4096,64"}, H200, False),
        ({}, {"device": "cuda", "gpu": {"name": "NVIDIA H100 80GB HBM3"}}, False),
        ({}, {"device": "cpu"}, False),
    ],
)
def test_anchors_are_for_rows_like_theirs(change, about, found):
    row = {"workload": "dense", "dtype": "bf16", "pass": "fwd", "label": "4,16,4096,128"} | change
    anchors.add_anchors([row], about)
    assert row.get("anchors") == ({"fa3": 0.84582, "fa4": 0.76477} if found else None)


def made_up_row(
    spec: runner.RowSpec, ratio: float, family: str = "sm90", cudnn: float | None = 1.2
) -> dict:
    """A row in which FA3, or our other rows for as many FLOPs, take our time times a ratio."""
    flops = flops_of(spec.workload, str(spec.shape)) * runner.FLOPS_OF_PASS[spec.direction]
    row = {
        "workload": spec.workload, "label": str(spec.shape), "dtype": spec.dtype, "family": family,
        "shape": dataclasses.asdict(spec.shape), "pass": spec.direction, "flops": flops,
        "check": {"status": "ok"},
    }  # fmt: skip
    anchors.add_anchors([row], H200)
    known = row.get("anchors")
    ours = known["fa3"] / ratio if known else flops / 1e12 / ratio
    implementations = {"ours": {"ms": ours}, "cudnn": {"ms": cudnn and cudnn * ours}}
    baseline = None
    if spec.workload == "deterministic":
        implementations = {"ours": {"ms": ours}, "nondeterministic": {"ms": ratio * ours}}
        baseline = "nondeterministic"
    if known:
        known["fa4"] = known["fa3"] * 1.01
    row["implementations"] = implementations
    return row | runner.compare(implementations, baseline)


def is_row(spec: runner.RowSpec, facts: dict) -> bool:
    own = {"workload": spec.workload, "direction": spec.direction, "dtype": spec.dtype}
    own |= {"dim": spec.shape.dim, "label": str(spec.shape), "length": spec.shape.length}
    return facts.items() <= own.items()


def made_up_table(facts: dict | None = None, **changes) -> list[dict]:
    """Default rows of a GPU, training steps and fp16 too; changes are for those of the facts."""
    names = ("dense", *TABLES, "deterministic")
    specs = runner.rows_of(names, None, ("bf16",), None, "cuda")
    specs += runner.rows_of(("dense",), None, ("bf16",), ("fwd+bwd",), "cuda")
    specs += runner.rows_of(("dense",), None, ("fp16",), ("fwd",), "cuda")
    rows = []
    for spec in specs:
        beside = str(spec.shape) in TABLES.get(spec.workload, ())
        dense = spec.workload == "dense" and spec.dtype == "bf16"
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


def test_bars_of_hopper_are_about_their_rows():
    found = bars.standings(made_up_table(), "cuda")
    assert [(s.bar.name, s.missed) for s in found if s.verdict != "met"] == []
    assert all(s.bar.families == ("sm90",) for s in found), "and no bar about FlashAttention-2"
    forward, backward = [36, 36, 36, 12, 8], [36, 36, 36, 12, 8]
    assert [len(s.ratios) for s in found] == [*forward, *backward, 36, 8, 36, 4, 2, 2, 18]
    by_against = {s.bar.against for s in found}
    assert by_against == {
        "FA3 (measured before)", "cudnn", "best of all", "our other row", "its peer"
    }  # fmt: skip
    assert not bars.missed_bars(made_up_table(), "cuda")


FORWARD = {"workload": "dense", "direction": "fwd", "dtype": "bf16"}
BACKWARD = FORWARD | {"direction": "bwd"}
NEIGHBOURS = "head dims 96 and 192 (the mean of their neighbours)"


@pytest.mark.parametrize(
    ("facts", "changes", "missed"),
    [
        # One row under 0.97 of FA3; the means bear it.
        (FORWARD | {"label": "4,16,4096,128"}, {"ratio": 0.96}, ["dense (4,16,4096,128) bf16 fwd"]),
        (FORWARD | {"label": "4,16,4096,128"}, {"ratio": 0.98}, []),
        # cuDNN faster than ours in a row, and so the best of all there.
        (BACKWARD | {"label": "4,16,4096,128"}, {"cudnn": 0.99},
         ["dense (4,16,4096,128) bf16 bwd"]),
        # The means of short rows are about the best of all, which cuDNN is here.
        (FORWARD | {"length": 1024}, {"cudnn": 1.1}, ["dense forward, up to 1,024 tokens"]),
        (FORWARD | {"dim": 64, "length": 4096}, {"ratio": 1.09}, ["dense (4,32,4096,64) bf16 fwd",
         "dense (4,32,4096,64,causal) bf16 fwd"]),
        (BACKWARD | {"dim": 256, "length": 4096}, {"ratio": 1.09}, ["dense (4,8,4096,256) bf16 bwd",
         "dense (4,8,4096,256,causal) bf16 bwd"]),
        (BACKWARD | {"dim": 64, "length": 4096}, {"ratio": 1.09}, []),
        (FORWARD | {"direction": "fwd+bwd"}, {"ratio": 1.04},
         ["dense, forward and backward (the sum of both)"]),
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
def test_check_knows_the_bars_of_hopper(facts, changes, missed):
    lines = bars.missed_bars(made_up_table(facts, **changes), "cuda")
    assert list(dict.fromkeys(line.split(": ")[0] for line in lines)) == missed


def test_the_best_of_all_may_be_an_anchor():
    spec = runner.RowSpec("dense", Shape.parse("4,16,4096,128"), "bf16", "fwd")
    row = made_up_row(spec, 1.1, cudnn=1.2)
    assert bars.ratio_to_everyone(row) == pytest.approx(1.1) == bars.ratio_to_anchor(row, "fa3")
    assert row["ratio"] == pytest.approx(1.2) and row["best_peer"] == "cudnn", "of those that ran"
    assert bars.ratio_to_everyone(made_up_row(spec, 1.3, cudnn=1.2)) == pytest.approx(1.2)
    assert bars.ratio_to_everyone(made_up_row(spec, 1.3, cudnn=None)) == pytest.approx(1.3)
    del row["implementations"]["cudnn"]
    assert bars.ratio_to_everyone(row) is None, "it may be the best, and nobody asked it"


def test_what_was_not_measured_is_not_missed():
    rows = [row for row in made_up_table() if row["workload"] == "dense" and row["pass"] == "fwd"]
    for row in rows:
        del row["implementations"]["cudnn"]
    found = {(s.bar.name, s.bar.against): s for s in bars.standings(rows, "cuda")}
    verdicts = {against: s.verdict for (name, against), s in found.items() if "," not in name}
    assert verdicts == {
        "FA3 (measured before)": "met", "cudnn": "not measured", "best of all": "not measured",
        "our other row": "met",
    }  # fmt: skip
    assert found["dense forward", "cudnn"].rows == "0 of 36"
    assert not bars.missed_bars(rows, "cuda")
    for row in rows:
        row.pop("anchors", None)
    verdicts = {s.bar.against: s.verdict for s in bars.standings(rows, "cuda")}
    assert set(verdicts.values()) == {"not measured", "met"} and verdicts["our other row"] == "met"


def test_a_row_left_to_an_older_family_is_not_let_off():
    rows = made_up_table(FORWARD | {"length": 512}, family="sm80", ratio=0.5)
    missed = bars.missed_bars(rows, "cuda")
    assert sum("(32," in line and "bf16 fwd" in line for line in missed) >= 6
    assert not [s for s in bars.standings(rows, "cuda") if s.bar.families == ("sm80",)]


def test_each_pass_is_held_to_the_family_that_ran_it():
    rows = made_up_table(BACKWARD, family="sm80", cudnn=0.5)
    found = bars.standings(rows, "cuda")
    backward = [s.bar for s in found if s.bar.name.startswith("dense backward")]
    assert {bar.families for bar in backward} == {("sm80",)} and not bars.missed_bars(rows, "cuda")
    assert {s.verdict for s in found if s.bar in backward} == {"not measured"}, "without flash"
    both = bars.families_of([{"workload": "dense", "pass": "fwd+bwd", "family": "sm90+sm80"}])
    assert both == {("dense", "fwd+bwd"): "sm90"}
    assert bars.families_of([{"workload": "dense", "pass": "fwd"}]) == {("dense", "fwd"): ""}


def test_a_check_that_checks_nothing_says_so():
    rows = [row for row in made_up_table() if row["workload"] == "gqa"]
    for row in rows:
        row["family"] = "sm80"
    assert bars.missed_bars(rows, "cuda") == ["no bar is about these rows"]


def results_of(rows: list[dict]) -> dict:
    """A results file of an H200 with these rows."""
    versions = {"flashmoe_science": "0.1.0", "torch": "2.11", "python": "3.12"}
    about = {"commit": "0123456789", "dirty": False, "date": "2026-11-15", "versions": versions}
    about |= {"cpu_target": "neon", "forced_family": "sm90", **H200}
    for row in rows:
        for data in row["implementations"].values():
            data |= {"few_samples": False, "gflops": 1.0, "reason": "no"}
    return {"about": about, "rows": rows, "means": runner.means(rows, "workload", "dtype", "pass")}


def printed(function, results: dict) -> str:
    out = io.StringIO()
    function(Console(width=190, color_system=None, file=out), results)
    return out.getvalue()


def test_anchors_are_told_from_peers_that_ran():
    specs = runner.rows_of(("dense",), ["4,16,4096,128"], ("bf16", "fp16"), ("fwd",), "cuda")
    results = results_of([made_up_row(spec, 1.25, cudnn=1.5) for spec in specs])
    assert report.names_of(results["rows"]) == ["ours", "cudnn"]
    mean, other = results["means"]
    assert mean["ratio"] == pytest.approx(1.5) and mean["peers"].keys() == {"cudnn"}
    assert mean["anchors"]["fa3"] == {"rows": 1, "ratio": pytest.approx(1.25),
                                      "lowest": pytest.approx(1.25)}  # fmt: skip
    assert other["anchors"] == {}
    table = printed(report.print_table, results)
    assert table.count("before) ms") == 2 and "FA3 (measured" in table and "FA4 (measured" in table
    assert "\N{HORIZONTAL ELLIPSIS}" not in table, "it fits"
    lines = [line.split() for line in table.splitlines() if "fp16" in line or "bf16" in line]
    assert lines[0][-5:] == ["1.50x", "0.8458", "1.25x", "0.8543", "1.26x"]
    assert lines[1][-5:] == ["1.50x", "-", "-", "-", "-"]
    means = printed(report.print_means, results)
    assert "FA3 (measured before)" in means and "1.25x (1.25)" in means
    text = printed(report.print_bars, results)
    assert "FA3 (measured before)" in text and "best of all" in text


def test_docs_tell_anchors_from_peers(tmp_path):
    specs = runner.rows_of(("dense",), ["4,16,4096,128"], ("bf16", "fp16"), ("fwd",), "cuda")
    results = results_of([made_up_row(spec, 1.25, cudnn=1.5) for spec in specs])
    for row in results["rows"]:  # as files from before rows said so are
        del row["family"]
        row.pop("anchors", None)
    (tmp_path / "gpu-h200-2026-11-15-sm90.json").write_text(json.dumps(results))
    (found,) = generate_docs.newest_results(tmp_path, "gpu")
    assert found["rows"][0]["family"] == "sm90" and found["rows"][0]["anchors"]["fa3"] == 0.84582
    text = generate_docs.gpu_results(found)
    header = next(line for line in text.splitlines() if line.startswith("| batch"))
    columns = [cell.strip() for cell in header.strip("|").split("|")]
    assert columns == [
        "batch, heads, length, dim", "bf16 ms", "TFLOP/s", "cuDNN / ours",
        "FA3 (measured before) / ours", "FA4 (measured before) / ours",
        "fp16 ms", "TFLOP/s", "cuDNN / ours",
    ]  # fmt: skip
    yes = generate_docs.YES
    assert (
        f"| dense forward (FA3, measured before) | 1 | 1.25 | 1.05 | 1.25 | 0.97 | {yes} |" in text
    )
    assert f"| dense forward (cuDNN) | 1 | 1.50 | 1.00 | 1.50 | 1.00 | {yes} |" in text
    assert f"dense forward ({generate_docs.BEST_OF_ALL}) | 1 | 1.13 |" in text
    assert "FlashAttention-2" not in text, "a bar of another family"


def test_the_family_of_older_files_is_the_one_that_ran():
    for about, family in (
        ({"device": "cuda", "forced_family": "sm90"}, "sm90"),
        ({"device": "cuda", "forced_family": None}, "sm80"),
        ({"device": "cpu"}, "cpu"),
    ):
        results = {"about": about, "rows": [{}, {"family": "sm75"}]}
        bars.name_families(results)
        assert [row["family"] for row in results["rows"]] == [family, "sm75"]


def test_committed_results_are_held_to_the_bars_of_their_family():
    found = generate_docs.newest_results(ROOT / "bench" / "results", "gpu")
    forced = [results for results in found if results["about"]["forced_family"]]
    assert forced
    for results in forced:
        standings = bars.standings(results["rows"], "cuda")
        families = {family for s in standings for family in s.bar.families}
        assert families <= {results["about"]["forced_family"]}
