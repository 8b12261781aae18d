"""The benchmark: what it measures, what it writes, and that it notices a wrong answer."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import json
import math
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import flashmoe_science
from bench_rows import ATTENTION
from clocks import CPU, ONE_TURN, FakeCudaClock
from flashmoe_science.__main__ import main
from flashmoe_science.bench import accuracy, attention, machine, ragged, report, runner, timing
from flashmoe_science.bench import results as results_file
from flashmoe_science.bench.case import Shape, tokens_first
from flashmoe_science.bench.workloads import WORKLOADS

PACKAGE = Path(flashmoe_science.__file__).parent


@pytest.fixture(scope="module")
def bench_run(tmp_path_factory):
    """One small benchmark run as a user would: (process, results, folder)."""
    out = tmp_path_factory.mktemp("bench")
    arguments = f"--workload {','.join(ATTENTION)} --shape 3,4,21,8 --dtype fp32,bf16"
    arguments += " --pass fwd,bwd,fwd+bwd"
    command = [
        sys.executable,
        "-m",
        "flashmoe_science",
        "bench",
        "--device",
        "cpu",
        *arguments.split(),
    ]
    command += ["--budget", "0.001", "--threads", "1", "--out", str(out)]
    environment = os.environ | {"PYTHONPATH": str(PACKAGE.parent)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done, json.loads((out / "results.json").read_text()), out


def test_every_row_is_there(bench_run):
    _, results, _ = bench_run
    rows = [(r["workload"], r["label"], r["dtype"], r["pass"]) for r in results["rows"]]
    expected = {
        (w, "3,4,21,8", d, p)
        for w, workload in ATTENTION.items()
        for d in ("fp32", "bf16")
        for p in workload.passes
        if d in workload.dtypes
    }
    assert len(rows) == len(expected) and set(rows) == expected
    assert all(row["check"]["status"] == "ok" for row in results["rows"])
    assert {row["regime"] for row in results["rows"]} == {"sustained"}, "all that a CPU has"
    assert not [row for row in results["rows"] if "memory" in row], "which is a GPU's"
    for row in results["rows"]:
        assert row["family"] == "cpu" and list(row["kernels"]) == row["pass"].split("+")
        assert all(name.startswith("cpu_") for name in row["kernels"].values())


def test_ratios_and_means_follow_from_the_times(bench_run):
    _, results, _ = bench_run
    for row in results["rows"]:
        times = {name: i["ms"] for name, i in row["implementations"].items()}
        ours = times.pop("ours")
        assert ours > 0
        best = min(ms for name, ms in times.items() if ms and name != "without_dropout")
        assert row["ratio"] == pytest.approx(best / ours)
        assert times[row["best_peer"]] == best
        for name, ms in times.items():
            assert row["ratios"].get(name) == (ms and pytest.approx(ms / ours))
        measured = row["implementations"]["ours"]
        assert measured["gflops"] == pytest.approx(row["flops"] / ours / 1e6)
        assert measured["ms"] == statistics.median(measured["turn_medians_ms"])
        assert len(measured["turn_medians_ms"]) == 3 and measured["samples"] >= 3
        assert measured["min_ms"] <= measured["ms"] <= measured["max_ms"]
        assert measured["method"] == "wall clock"
        assert ("gb_per_s" in measured) == (row["workload"] == "decode")
    flops = {r["pass"]: r["flops"] for r in results["rows"] if r["workload"] == "dense"}
    assert flops["bwd"] == 2.5 * flops["fwd"] and flops["fwd+bwd"] == 3.5 * flops["fwd"]
    assert len(results["means"]) == len(results["rows"]), "one shape each"


def row(dtype: str, ratio: float, status: str = "ok") -> dict:
    ratios = {"ratio": ratio, "ratios": {"flash": ratio}}
    return {"dtype": dtype, "check": {"status": status}, **ratios}


def test_means_are_geometric():
    rows = [row("fp32", 2.0), row("fp32", 8.0), row("fp32", 1e9, "failed"), row("bf16", 3.0)]
    rows[0]["ratios"] = {"flash": 3.0, "math": 2.0}
    found = {mean["dtype"]: mean for mean in results_file.means(rows, "dtype")}
    assert found["fp32"]["rows"] == 2 and found["fp32"]["lowest"] == 2.0
    assert found["fp32"]["ratio"] == pytest.approx(4.0)
    flash = found["fp32"]["peers"]["flash"]
    assert flash["ratio"] == pytest.approx(math.sqrt(3 * 8)) and flash["rows"] == 2
    assert found["bf16"]["peers"] == {"flash": {"rows": 1, "ratio": pytest.approx(3), "lowest": 3}}


def test_a_peer_that_cannot_run_says_why(bench_run):
    done, results, _ = bench_run
    biased = [r for r in results["rows"] if r["workload"] == "pair_bias" and r["pass"] != "fwd"]
    for row in biased:
        flash = row["implementations"]["flash"]  # has no gradient of its mask
        assert flash["ms"] is None and "kernel" in flash["reason"]
        assert row["best_peer"] == "math"
    assert "flash cannot run" in done.stdout
    for row in results["rows"]:
        assert "varlen" not in row["implementations"], "which has no CPU kernel, ever"


def test_results_say_where_they_come_from(bench_run):
    _, results, out = bench_run
    about = results["about"]
    assert about["device"] == "cpu" and about["threads"] == 1
    assert about["cpu"]["name"] and about["cpu"]["cores"] >= 1
    assert about["versions"]["torch"] == torch.__version__
    assert about["cpu_target"] == machine.build_info()["cpu_target"]
    assert about["date"].startswith("20") and about["date"].endswith("+00:00")
    assert {"commit", "dirty", "cores_busy_with_other_work", "forced_family"} <= about.keys()
    assert results["seconds"] >= sum(r["seconds"] for r in results["rows"]) > 0
    assert results["complete"] and results["turns"] == 3 and results["regimes"] == ["sustained"]
    assert all(0 < r["check"]["seconds"] < r["seconds"] for r in results["rows"])
    assert (
        "bench --device cpu --workload dense" in results["command"]
        and str(out) in results["command"]
    )


def test_table_shows_the_numbers_of_the_json(bench_run):
    done, results, _ = bench_run
    lines = done.stdout.splitlines()
    for row in results["rows"]:
        cells = [row["workload"], row["label"], row["dtype"], row["pass"], f"{row['ratio']:.2f}x"]
        ours = row["implementations"]["ours"]
        cells += [f"{ours['gb_per_s']:.1f}" if "gb_per_s" in ours else f"{ours['gflops']:.1f}"]
        found = [line for line in lines if all(f" {c} " in f"{line} " for c in cells)]
        assert found, f"no line of the table has {cells}"
    assert f"[{len(results['rows'])}/{len(results['rows'])}]" in done.stdout, "no progress"
    for mean in results["means"]:
        assert f"{mean['ratio']:.2f}x" in done.stdout


@pytest.mark.parametrize("name", ["results.png", "crystals.png"])
def test_plot_is_a_picture(bench_run, name):
    from matplotlib import image

    pixels = image.imread(bench_run[2] / name)
    height, width = pixels.shape[:2]
    assert width > 1000 and height > 1000
    ours = (27 / 255, 108 / 255, 168 / 255)  # the colour of our bars
    distance = abs(pixels[..., :3] - torch.tensor(ours).numpy()).max(axis=-1)
    assert (distance < 0.02).mean() > 0.002, "our bars are not in the plot"


def test_a_wrong_answer_fails_the_run(monkeypatch, tmp_path, capsys):
    right = attention.flash_attention
    monkeypatch.setattr(attention, "flash_attention", lambda *a, **o: right(*a, **o) * 1.01)
    arguments = "--shape 1,2,16,8 --dtype fp32 --pass fwd --budget 0.001 --no-plot"
    assert main(["bench", "--device", "cpu", *arguments.split(), "--out", str(tmp_path)]) == 1
    text = capsys.readouterr().out
    assert "wrong" in text and "is off by" in text
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["rows"][0]["check"]["status"] == "failed"
    assert results["means"] == [], "a wrong row must not count"
    assert not (tmp_path / "results.png").exists()


def test_a_call_that_fails_fails_the_run(monkeypatch, tmp_path, capsys):
    def broken(*args, **options):
        raise RuntimeError("the kernel is on strike")

    monkeypatch.setattr(attention, "flash_attention", broken)
    arguments = "--shape 1,2,16,8 --dtype fp32 --pass fwd --budget 0.001 --no-plot"
    assert main(["bench", "--device", "cpu", *arguments.split(), "--out", str(tmp_path)]) == 1
    assert "the kernel is on strike" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ("--shape 4,8,256", "batch,heads,length,dim"),
        ("--shape 4,8,0,64", "at least 1"),
        ("--shape 4,8,16,64,kv3", "not a multiple"),
        ("--shape 4,8,16,64,casual", "casual"),
        ("--shape 4,8,16,64,w4", "add causal"),
        ("--shape 4,8,16,64,causal,w0", "at least 1"),
        ("--workload small --shape 4,8,16,64,causal,w4", "does not take window"),
        ("--shape 4,8,16,64,even", "does not take even"),
        ("--workload pair_bias --shape 4,8,16,64,causal", "does not take causal"),
        ("--workload dnse", "dnse"),
        ("--only nobody --device cpu", "in no row's name"),
        ("--dtype fp8", "fp8"),
        ("--pass back", "back"),
        ("--workload decode --pass bwd", "decode has only fwd"),
        ("--workload decode --shape 1,8,64,64,causal", "does not take causal"),
        ("--peers cudnn --device cpu", "cudnn"),
        ("--regimes calm --device cpu", "calm"),
        ("--regimes rested --device cpu", "not one of sustained"),
        ("--turns 0 --device cpu", "at least 1"),
        ("--budget -1 --device cpu", "more than 0 seconds"),
        ("--threads 0 --device cpu", "--threads 0: at least 1"),
        ("--out /dev/null/results --device cpu", "--out /dev/null/results: Not a directory"),
        ("--peer nobody.py --device cpu", "no such file"),
        ("--device tpu", "tpu"),
        ("--device cuda:99", "no such GPU"),
    ],
)
def test_bad_options_are_named(capsys, arguments, complaint):
    assert main(["bench", *arguments.split()]) == 2
    assert complaint in capsys.readouterr().err


def test_other_work_is_noticed():
    spin = "import time; t = time.time()\nwhile time.time() < t + 20: pass"
    quiet = machine.OtherWork()
    time.sleep(0.3)
    if quiet.cores() is None:
        pytest.skip("no /proc/stat here")
    others = machine.OtherWork()
    with subprocess.Popen([sys.executable, "-c", spin]) as process:
        time.sleep(1.0)
        found = others.cores()
        process.kill()
    assert found > 0.3


def test_missing_tools_are_named(monkeypatch, capsys):
    found = importlib.util.find_spec
    missing = {"rich", "matplotlib"}
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda n, *a: None if n in missing else found(n, *a)
    )
    assert main(["bench"]) == 1
    assert "pip install 'flashmoe_science[bench]'" in capsys.readouterr().err


def test_list(capsys):
    assert main(["bench", "--list"]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in WORKLOADS) and "1,8,512,128" in text
    graphs = [name for name, workload in ATTENTION.items() if workload.in_graph]
    assert text.count("cuda, fwd,fwd+bwd, as CUDA graphs") == len(graphs) - 1 == 8, "and decode"


def test_rows_can_be_picked(tmp_path):
    options = "--workload dense,small --dtype fp32 --device cpu --budget 0.001 --no-plot --only"
    command = ["bench", *options.split(), "dense (4,8", ",32) fp32 fwd", "--out", str(tmp_path)]
    assert main(command) == 0
    rows = json.loads((tmp_path / "results.json").read_text())["rows"]
    assert [(r["workload"], r["label"], r["pass"]) for r in rows] == [
        ("dense", "4,8,256,64", "fwd"), ("dense", "4,8,256,64", "fwd+bwd"),
        ("small", "4,8,256,32", "fwd"), ("small", "4,8,256,32", "fwd+bwd"),
    ]  # fmt: skip


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_default_shapes_are_legal(device):
    rows = runner.rows_of(WORKLOADS, None, runner.DTYPES, runner.PASSES, device)
    assert {row.workload for row in rows} == set(WORKLOADS)
    for row in rows:
        assert WORKLOADS[row.workload].shape_type.parse(str(row.shape)) == row.shape


@pytest.mark.parametrize("name", ATTENTION)
def test_peers_compute_the_same_thing(name):
    """A peer that computes something else would make the comparison meaningless."""
    kv = "kv" in WORKLOADS[name].options
    causal = ",causal" if "causal" in WORKLOADS[name].options else ""
    causal += ",w5" if "window" in WORKLOADS[name].options else ""
    shape = Shape.parse(f"3,4,13,8{',kv2' if kv else ''}{causal}")
    case = WORKLOADS[name].make(shape, torch.float32, CPU)
    truth = accuracy.compute(case.reference, accuracy.in_double(case), backward=True)
    math_peer = case.peers.get("math") or case.peers[case.baseline]
    if name == "dropout":  # of which math drops other pairs
        assert accuracy.Oracle(case, backward=True).verdict(case.ours).ok
        assert not accuracy.Oracle(case, backward=True).verdict(math_peer).ok
        return
    found = accuracy.compute(math_peer, case, backward=True)
    if case.lengths:
        unpad = functools.partial(packed_again, case.lengths)
        found = {n: t for n, t in found.items() if n != "grad_bias"}
        found = {n: unpad(t) for n, t in found.items()}
    for result, values in found.items():
        torch.testing.assert_close(values.double(), truth[result], rtol=1e-4, atol=1e-5)


def packed_again(lengths: tuple[int, ...], padded: torch.Tensor) -> torch.Tensor:
    """(N, H, longest, D) as (T, H, D)."""
    return torch.cat([padded[i, :, :n].transpose(0, 1) for i, n in enumerate(lengths)])


@pytest.mark.parametrize("name", ATTENTION)
def test_some_heads_are_a_smaller_case(name):
    case = WORKLOADS[name].make(Shape.parse("2,6,9,8,kv3"), torch.float64, CPU)
    assert case.group == 2
    part = case.take_heads(4)
    assert part.leaves["k"].shape[1] == 2 and part.flops == pytest.approx(case.flops * 4 / 6)
    whole = accuracy.compute(case.ours, case, backward=True)
    some = accuracy.compute(case.ours, part, backward=True)
    for result, values in some.items():
        assert torch.equal(values, whole[result][:, : values.shape[1]]), result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_decode_is_one_query_over_all_keys(dtype):
    case = WORKLOADS["decode"].make(Shape.parse("2,6,33,8,kv2"), dtype, CPU)
    assert case.leaves["q"].shape == (2, 6, 1, 8) and case.leaves["v"].shape == (2, 2, 33, 8)
    assert case.grad.shape == (2, 6, 1, 8)
    assert case.scores == 2 * 6 * 33 and case.flops == 4 * case.scores * 8
    assert case.bytes == 2 * (2 * 2 * 33 * 8) * dtype.itemsize
    assert accuracy.check(case, backward=False).ok
    data = runner.as_data(timing.Timing([[2.0]]), flops=1.0, moved_bytes=6_000_000)
    assert data["gb_per_s"] == pytest.approx(3.0)


def test_a_deterministic_row_must_repeat_its_bits(monkeypatch):
    shape = Shape.parse("1,2,16,8")
    case = WORKLOADS["deterministic"].make(shape, torch.float32, CPU)
    assert case.ours.run.keywords["deterministic"] is True
    assert case.peers["nondeterministic"].run.keywords["deterministic"] is False
    verdict = accuracy.check(case, backward=True)
    assert verdict.ok and verdict.deviations["grad_k twice"].ours == 0
    calls, right = [], attention.flash_attention

    def moody(*args, **options):
        calls.append(options["deterministic"])
        return right(*args, **options) * (1 + 1e-7 * len(calls))

    monkeypatch.setattr(attention, "flash_attention", moody)
    verdict = accuracy.check(case, backward=True)
    assert calls == [True, True] and not verdict.ok
    assert verdict.worst[0].endswith("twice"), "within the tolerance, but not the same"


def test_our_own_peer_stays_whatever_peers_are_asked_for(threads):
    threads(1)
    spec = runner.RowSpec("deterministic", Shape.parse("1,2,16,8"), "fp32", "bwd")
    setting = runner.Setting(CPU, ["flash"], [], timing.CpuClock(), ONE_TURN)
    (found,) = runner.run_row(spec, setting)
    assert list(found["implementations"]) == ["ours", "nondeterministic"]
    assert found["best_peer"] == "nondeterministic" and found["ratio"] > 0


def test_tokens_first_changes_the_layout_only():
    case = WORKLOADS["pair_bias"].make(Shape.parse("2,4,6,8,kv2"), torch.float32, CPU)
    leaves, grad = tokens_first(case.leaves, case.grad)
    assert all(torch.equal(leaves[n], case.leaves[n]) for n in leaves)
    assert leaves["bias"] is case.leaves["bias"] and torch.equal(grad, case.grad)
    assert all(t.transpose(1, 2).is_contiguous() for t in (leaves["q"], leaves["k"], grad))


def test_ragged_lengths_are_many_and_always_the_same():
    lengths = ragged.ragged_lengths(256, 31)
    assert lengths == ragged.ragged_lengths(256, 31)
    assert 29 <= sum(lengths) / 256 <= 32 and min(lengths) >= 1 and max(lengths) > 150
    assert lengths != sorted(lengths)


def test_dense_rows_beside_two_peers_fit_four_minutes_of_a_gpu():
    """In both regimes, 36 rows forward and 36 backward."""
    specs = runner.rows_of(["dense"], None, ["bf16"], None, "cuda")
    assert len(specs) == 72
    schedule = timing.SCHEDULES["cuda"]
    device = torch.device("cuda")
    setting = runner.Setting(device, ["cudnn"], [None], FakeCudaClock(), schedule)
    seconds = runner.estimated_seconds(specs, setting)
    assert 72 * 3 * 3 * timing.PAUSE_S < seconds < 240
    sustained = dataclasses.replace(schedule, regimes=("sustained",))
    assert runner.estimated_seconds(specs, dataclasses.replace(setting, schedule=sustained)) < 80
    assert report.format_duration(150) == "2 minutes" and report.format_duration(42.4) == "42 s"


def test_rows_of_science_fit_three_minutes_of_a_gpu():
    """Sustained, as CUDA graphs, which need half of the usual budget."""
    names = [n for n, workload in ATTENTION.items() if workload.in_graph and n != "decode"]
    specs = runner.rows_of(names, None, ["bf16"], None, "cuda")
    assert len(specs) == 2 * (18 + 2 + 11 + 4 + 2 + 6 + 2 + 2)
    peers = [peer for name in names for peer in WORKLOADS[name].peers("cuda")]
    schedule = timing.Schedule(3, 0.02)
    setting = runner.Setting(torch.device("cuda"), peers, [], FakeCudaClock(), schedule)
    assert 90 < runner.estimated_seconds(specs, setting) < 180
    others = dataclasses.replace(setting, peers=[p for p in peers if p != "flex"])
    assert runner.estimated_seconds(specs, others) < 90, "half is FlexAttention's compilation"


def test_rows_of_a_gpu_are_there_in_both_regimes(monkeypatch):
    monkeypatch.setattr(runner.memory, "measure", lambda case, backward: None)
    dense = WORKLOADS["dense"]
    on_cpu = dataclasses.replace(
        dense, make=lambda shape, dtype, device: dense.make(shape, dtype, CPU)
    )
    monkeypatch.setitem(WORKLOADS, "dense", on_cpu)
    schedule = dataclasses.replace(ONE_TURN, regimes=results_file.REGIMES)
    setting = runner.Setting(torch.device("cuda"), ["math"], [], FakeCudaClock(), schedule)
    spec = runner.RowSpec("dense", Shape.parse("1,2,8,8"), "fp32", "bwd")
    rows = runner.run_row(spec, setting)
    assert [row["regime"] for row in rows] == ["sustained", "rested"]
    assert results_file.headline(rows) == rows[:1] and results_file.headline(rows[1:]) == rows[1:]
    assert all(row["ratio"] == 1.0 and row["check"]["status"] == "ok" for row in rows)


def test_a_run_that_is_cut_leaves_its_rows(monkeypatch, tmp_path):
    right, calls = runner.run_row, []

    def cut(spec, setting):
        calls.append(spec)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return right(spec, setting)

    monkeypatch.setattr(runner, "run_row", cut)
    shapes = ["1,2,16,8", "1,2,17,8", "1,2,18,8", "1,2,19,8"]
    options = "--dtype fp32 --pass fwd --budget 0.001 --no-plot --device cpu --out"
    command = ["bench", *options.split(), str(tmp_path), "--shape", *shapes]
    assert main(command) == 130
    found = json.loads((tmp_path / "results.json").read_text())
    assert [row["label"] for row in found["rows"]] == shapes[:2] and not found["complete"]
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]


def test_a_wrong_row_is_said_once_for_both_regimes(capsys):
    check = {"status": "failed", "reason": "off by one"}
    implementations = {"ours": {"ms": 1.0}, "x": {"ms": None, "reason": "no room"}}
    fixed = {"workload": "dense", "label": "1,1,1,1", "dtype": "bf16", "pass": "fwd"}
    rows = [
        {**fixed, "regime": regime, "check": check, "implementations": implementations}
        for regime in results_file.REGIMES
    ]
    about = {"cores_busy_with_other_work": 0}
    report.print_problems(report.make_console(), {"about": about, "rows": rows})
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 and "ours failed: off by one (1 rows" in lines[0]
    assert "x cannot run: no room (1 rows" in lines[1]


def test_a_forced_family_is_said(monkeypatch):
    monkeypatch.setenv("FLASHMOE_FAMILY", "sm80")
    about = machine.describe(CPU)
    assert about["forced_family"] == "sm80"
    about |= {"device": "cuda", "gpu": {"name": "GPU"}}
    assert machine.title(about) == "GPU, FLASHMOE_FAMILY=sm80"
