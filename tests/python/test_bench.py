"""The benchmark: what it measures, what it writes, and that it notices a wrong answer."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import flashmoe_science
from flashmoe_science.__main__ import main
from flashmoe_science.bench import accuracy, machine, runner, timing, workloads
from flashmoe_science.bench.workloads import WORKLOADS, Implementation, Shape

PACKAGE = Path(flashmoe_science.__file__).parent
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def bench_run(tmp_path_factory):
    """One small benchmark run as a user would: (process, results, folder)."""
    out = tmp_path_factory.mktemp("bench")
    arguments = "--workload dense,pair_bias,ragged,ragged_bias --shape 3,4,21,8 --dtype fp32,bf16"
    command = [
        sys.executable,
        "-m",
        "flashmoe_science",
        "bench",
        "--device",
        "cpu",
        *arguments.split(),
    ]
    command += ["--budget", "0.01", "--threads", "1", "--out", str(out)]
    environment = os.environ | {"PYTHONPATH": str(PACKAGE.parent)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done, json.loads((out / "results.json").read_text()), out


def test_every_row_is_there(bench_run):
    _, results, _ = bench_run
    rows = [(r["workload"], r["label"], r["dtype"], r["pass"]) for r in results["rows"]]
    expected = {
        (w, "3,4,21,8", d, p) for w in WORKLOADS for d in ("fp32", "bf16") for p in runner.PASSES
    }
    assert len(rows) == len(expected) and set(rows) == expected
    assert all(row["check"]["status"] == "ok" for row in results["rows"])


def test_ratios_and_means_follow_from_the_times(bench_run):
    _, results, _ = bench_run
    for row in results["rows"]:
        times = {name: i["ms"] for name, i in row["implementations"].items()}
        ours = times.pop("ours")
        assert ours > 0
        best = min(ms for ms in times.values() if ms is not None)
        assert row["ratio"] == pytest.approx(best / ours)
        assert times[row["best_peer"]] == best
        measured = row["implementations"]["ours"]
        assert measured["gflops"] == pytest.approx(row["flops"] / ours / 1e6)
        assert measured["ms"] == min(measured["round_medians_ms"])
        assert len(measured["round_medians_ms"]) == 2 and measured["samples"] >= 4
        assert measured["min_ms"] <= measured["median_ms"] <= measured["max_ms"]
    assert len(results["means"]) == 4
    for mean in results["means"]:
        key = (mean["dtype"], mean["pass"])
        same = [r for r in results["rows"] if (r["dtype"], r["pass"]) == key]
        ratios = [r["ratio"] for r in same]
        assert len(ratios) == mean["rows"] == 4
        assert mean["ratio"] == pytest.approx(math.prod(ratios) ** (1 / 4))


def test_a_peer_that_cannot_run_says_why(bench_run):
    done, results, _ = bench_run
    biased = [r for r in results["rows"] if r["workload"] == "pair_bias" and r["pass"] == "fwd+bwd"]
    for row in biased:
        flash = row["implementations"]["flash"]  # has no gradient of its mask
        assert flash["ms"] is None and "kernel" in flash["reason"]
        assert row["best_peer"] == "math"
    assert "flash cannot run" in done.stdout
    ragged = next(r for r in results["rows"] if r["workload"] == "ragged_bias")
    assert "no bias" in ragged["implementations"]["varlen"]["reason"]


def test_results_say_where_they_come_from(bench_run):
    _, results, out = bench_run
    about = results["about"]
    assert about["device"] == "cpu" and about["threads"] == 1
    assert about["cpu"]["name"] and about["cpu"]["cores"] >= 1
    assert about["versions"]["torch"] == torch.__version__
    assert about["cpu_target"] == machine.build_info()["cpu_target"]
    assert about["date"].startswith("20") and about["date"].endswith("+00:00")
    assert {"commit", "dirty", "cores_busy_with_other_work"} <= about.keys()
    assert (
        "bench --device cpu --workload dense" in results["command"]
        and str(out) in results["command"]
    )


def test_table_shows_the_numbers_of_the_json(bench_run):
    done, results, _ = bench_run
    lines = done.stdout.splitlines()
    for row in results["rows"]:
        cells = [row["workload"], row["label"], row["dtype"], row["pass"], f"{row['ratio']:.2f}x"]
        cells += [f"{row['implementations']['ours']['gflops']:.1f}"]
        found = [line for line in lines if all(f" {c} " in f"{line} " for c in cells)]
        assert found, f"no line of the table has {cells}"
    assert f"[{len(results['rows'])}/{len(results['rows'])}]" in done.stdout, "no progress"
    for mean in results["means"]:
        assert f"{mean['ratio']:.2f}x" in done.stdout


def test_plot_is_a_picture(bench_run):
    from matplotlib import image

    pixels = image.imread(bench_run[2] / "results.png")
    height, width = pixels.shape[:2]
    assert width > 1000 and height > 1000
    ours = (27 / 255, 108 / 255, 168 / 255)  # the colour of our bars
    distance = abs(pixels[..., :3] - torch.tensor(ours).numpy()).max(axis=-1)
    assert (distance < 0.02).mean() > 0.002, "our bars are not in the plot"


def test_a_wrong_answer_fails_the_run(monkeypatch, tmp_path, capsys):
    right = workloads.flash_attention
    monkeypatch.setattr(workloads, "flash_attention", lambda *a, **o: right(*a, **o) * 1.01)
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

    monkeypatch.setattr(workloads, "flash_attention", broken)
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
        ("--workload pair_bias --shape 4,8,16,64,causal", "does not take causal"),
        ("--workload dnse", "dnse"),
        ("--dtype fp8", "fp8"),
        ("--pass bwd", "bwd"),
        ("--peers cudnn --device cpu", "cudnn"),
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
    assert all(name in text for name in WORKLOADS) and "1,16,2048,128" in text


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_default_shapes_are_legal(device):
    rows = runner.rows_of(WORKLOADS, None, runner.DTYPES, runner.PASSES, device)
    assert {row.workload for row in rows} == set(WORKLOADS)
    for row in rows:
        assert Shape.parse(str(row.shape)) == row.shape


@pytest.mark.parametrize("name", WORKLOADS)
def test_peers_compute_the_same_thing(name):
    """A peer that computes something else would make the comparison meaningless."""
    kv = "kv" in WORKLOADS[name].options
    causal = ",causal" if "causal" in WORKLOADS[name].options else ""
    shape = Shape.parse(f"3,4,13,8{',kv2' if kv else ''}{causal}")
    case = WORKLOADS[name].make(shape, torch.float32, CPU)
    truth = accuracy.compute(case.reference, accuracy.in_double(case), backward=True)
    math_peer = case.peers["math"]
    leaves, grad = math_peer.prepare(case.leaves, case.grad)
    padded = dataclasses.replace(case, leaves=leaves, grad=grad)
    found = accuracy.compute(math_peer, padded, backward=True)
    if name.startswith("ragged"):
        ragged = math_peer.run.__self__
        unpad = functools.partial(packed_again, ragged.lengths)
        found = {n: t for n, t in found.items() if n != "grad_bias"}
        found = {n: unpad(t) for n, t in found.items()}
    for result, values in found.items():
        torch.testing.assert_close(values.double(), truth[result], rtol=1e-4, atol=1e-5)


def packed_again(lengths: list[int], padded: torch.Tensor) -> torch.Tensor:
    """(N, H, longest, D) as (T, H, D)."""
    return torch.cat([padded[i, :, :n].transpose(0, 1) for i, n in enumerate(lengths)])


@pytest.mark.parametrize("name", WORKLOADS)
def test_some_heads_are_a_smaller_case(name):
    case = WORKLOADS[name].make(Shape.parse("2,6,9,8,kv3"), torch.float64, CPU)
    assert case.group == 2
    part = case.take_heads(4)
    assert part.leaves["k"].shape[1] == 2 and part.flops == pytest.approx(case.flops * 4 / 6)
    whole = accuracy.compute(case.ours, case, backward=True)
    some = accuracy.compute(case.ours, part, backward=True)
    for result, values in some.items():
        assert torch.equal(values, whole[result][:, : values.shape[1]]), result


def test_ragged_lengths_are_many_and_always_the_same():
    lengths = workloads.ragged_lengths(256, 31)
    assert lengths == workloads.ragged_lengths(256, 31)
    assert 29 <= sum(lengths) / 256 <= 32 and min(lengths) >= 1 and max(lengths) > 150
    assert lengths != sorted(lengths)


def fake_case(calls: list[str], seconds: dict[str, float]):
    """A case whose implementations sleep for given times and write their names down."""

    def fake(name: str) -> Implementation:
        def run(leaves):
            calls.append(name)
            time.sleep(seconds[name])
            return leaves["q"] * 1.0

        return Implementation(run)

    case = WORKLOADS["dense"].make(Shape.parse("1,4,8,8"), torch.float32, CPU)
    peers = {name: fake(name) for name in seconds if name != timing.OURS}
    return dataclasses.replace(case, ours=fake(timing.OURS), peers=peers)


def in_runs(calls: list[str]) -> list[str]:
    """Names without repetitions in a row."""
    return [name for i, name in enumerate(calls) if i == 0 or calls[i - 1] != name]


def test_order_is_peers_ours_ours_peers(monkeypatch):
    monkeypatch.setattr(timing, "FAR_SLOWER", 1e9)  # nobody is left out, on a busy machine either
    calls: list[str] = []
    case = fake_case(calls, {"ours": 0.002, "a": 0.002, "b": 0.003})
    timings = timing.measure(case, ["a", "b"], False, timing.CpuClock(), budget_s=0.01)
    assert in_runs(calls) == ["ours", "a", "b", "a", "b", "ours", "b", "a"]
    assert all(len(t.rounds) == 2 for t in timings.values())
    assert timings["a"].ms >= 2 and timings["b"].ms >= 3


def test_a_far_slower_peer_is_not_repeated():
    calls: list[str] = []
    case = fake_case(calls, {"ours": 0.05, "fast": 0.002, "slow": 0.4})
    timings = timing.measure(case, ["fast", "slow"], False, timing.CpuClock(), budget_s=0.01)
    assert calls.count("slow") == 1
    assert timings["slow"].few and timings["slow"].ms >= 400
    assert calls.count("ours") > 4, "ours is always measured, however slow"
    data = runner.as_data(timings["slow"], flops=1.0)
    assert data["samples"] == 1 and data["few_samples"]


def test_a_big_case_is_tried_on_a_few_heads(threads):
    threads(1)
    calls: list[str] = []
    case = fake_case(calls, {"ours": 0.002, "fast": 0.002, "slow": 0.2})
    clock = timing.CpuClock()
    clock.big_flops = 0
    timings = timing.measure(case, ["fast", "slow"], False, clock, budget_s=0.01)
    assert timings["slow"].estimated_from_heads == 1
    assert timings["slow"].ms >= 4 * 200, "the time of one head of four, times four"
    assert timings["fast"].estimated_from_heads is None and not timings["fast"].few
    assert "estimated_from_heads" in runner.as_data(timings["slow"], flops=1.0)


def test_gradients_do_not_pile_up_between_samples():
    case = WORKLOADS["pair_bias"].make(Shape.parse("1,2,8,8"), torch.float32, CPU)
    bound = timing.Runner(case.ours, case, backward=True)
    bound.sample(timing.CpuClock(), 3)
    expected = accuracy.compute(case.ours, case, backward=True)
    for name, leaf in bound.leaves.items():
        assert torch.equal(leaf.grad, expected[f"grad_{name}"])


def row(dtype: str, ratio: float | None, status: str = "ok") -> dict:
    fixed = {"workload": "dense", "label": "1,1,1,1", "pass": "fwd"}
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
        ([row("fp32", 1.5), row("fp32", None)], 1),
        ([], 1),
    ],
)
def test_check_knows_the_bars(rows, missed):
    assert len(runner.missed_bars(rows)) == missed


def test_check_decides_the_exit_code(monkeypatch, tmp_path, capsys):
    arguments = "--shape 1,2,16,8 --dtype fp32 --pass fwd --budget 0.001 --no-plot --check"
    command = ["bench", "--device", "cpu", *arguments.split(), "--out", str(tmp_path)]
    monkeypatch.setattr(runner, "CPU_BARS", dict.fromkeys(runner.DTYPES, 0.0))
    monkeypatch.setattr(runner, "CPU_BAR_OF_ANY_ROW", 0.0)
    assert main(command) == 0
    monkeypatch.setattr(runner, "CPU_BARS", dict.fromkeys(runner.DTYPES, 1e9))
    assert main(command) == 1
    assert "missed: fp32" in capsys.readouterr().out
