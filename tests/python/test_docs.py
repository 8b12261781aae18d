"""The generated parts of the documentation are up to date, and the generator notices when not."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch

import flashmoe_science  # noqa: F401  (registers the ops)

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import generate_docs  # noqa: E402


def test_docs_are_up_to_date(capsys):
    if not json.loads(torch.ops.flashmoe.build_info())["families"]:
        pytest.skip("built without CUDA kernels; the table is that of a full build")
    assert generate_docs.main(["--check"]) == 0, capsys.readouterr().out


@pytest.fixture
def house(tmp_path):
    """A small checkout with empty blocks and results of two machines, one measured twice."""
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text("a\n<!-- support:begin -->\n<!-- support:end -->\nz\n")
    performance = "b\n<!-- cpu:begin -->\nold\n<!-- cpu:end -->\ny\n"
    performance += "<!-- gpu:begin -->\n<!-- gpu:end -->\n"
    (tmp_path / "docs" / "performance.md").write_text(performance)
    results = tmp_path / "bench" / "results"
    results.mkdir(parents=True)
    for machine, date, ms in (
        ("x-1", "2026-01-02", 8),
        ("x-1", "2026-03-04", 5),
        ("y", "2026-02-01", 2),
    ):
        (results / f"cpu-{machine}-{date}.json").write_text(json.dumps(made_up(machine, date, ms)))
    for name, gpu in (
        ("gpu-h100-2026-09-09", made_up_gpu(4)),
        ("gpu-h100-2026-09-08-sm80", made_up_gpu(1000)),
        ("gpu-h100-2026-09-09-sm80", made_up_gpu(8, "sm80")),
    ):
        (results / f"{name}.json").write_text(json.dumps(gpu))
    return tmp_path


def made_up_gpu(ms: float, family: str | None = None) -> dict:
    """One row of most sections in two dtypes; of one decode row the answer is wrong."""
    results = made_up("host", "2026-09-09", ms)
    clock = {"clocks.sm": "1980 MHz"}
    results["about"] |= {"device": "cuda", "gpu": {"name": "GPU z"}, "forced_family": family}
    results["about"] |= {"gpu_state_before": clock, "gpu_state_after": clock}
    results["rows"] = []
    for workload, direction, peers in (
        ("dense", "fwd", {"flash": 1.2, "cudnn": 0.5}),
        ("dense", "bwd", {"flash": 0.9, "cudnn": None}),
        ("decode", "fwd", {"flash": 1.1}),
        ("deterministic", "bwd", {"nondeterministic": 0.75}),
    ):
        for dtype in ("bf16", "fp16"):
            ours = {"ms": ms, "gflops": 100e3 / ms, "method": "events"}
            if workload == "decode":
                ours |= {"gb_per_s": 16000 / ms, "method": "CUDA graph of 16 calls"}
            times = {peer: {"ms": ratio and ratio * ms} for peer, ratio in peers.items()}
            wrong = (workload, dtype) == ("decode", "fp16")
            results["rows"].append({
                "workload": workload, "label": "16,32,1024,64", "dtype": dtype, "pass": direction,
                "shape": {"dim": 64, "length": 1024}, "ratio": next(iter(peers.values())),
                "check": {"status": "failed" if wrong else "ok"},
                "implementations": {"ours": ours, **times},
            })  # fmt: skip
    return results


def made_up(machine: str, date: str, ms: float) -> dict:
    slow = {"ms": 4000.0, "estimated_from_heads": 2}
    implementations = {
        "ours": {"ms": ms, "gflops": 100 / ms},
        "flash": slow,
        "math": {"ms": 10.0},
        "varlen": {"ms": None, "reason": "no"},
    }
    row = {
        "workload": "dense", "label": "4,8,256,64", "dtype": "fp32", "pass": "fwd",
        "ratio": 10 / ms, "implementations": implementations,
    }  # fmt: skip
    return {
        "about": {
            "date": f"{date}T10:00:00+00:00", "commit": "0123456789abcdef", "dirty": False,
            "threads": 2, "cpu_target": "neon", "cpu": {"name": f"CPU {machine}"},
            "versions": {"torch": "2.10.0", "python": "3.11.7"},
        },
        "rows": [row],
        "means": [{"dtype": "fp32", "pass": "fwd", "rows": 1, "ratio": 10 / ms}],
    }  # fmt: skip


def test_generating_settles(house, capsys):
    arguments = ["--root", str(house)]
    assert generate_docs.main([*arguments, "--check"]) == 1
    assert "out of date" in capsys.readouterr().out
    assert (house / "README.md").read_text().count("\n") == 4, "--check must not write"
    assert generate_docs.main(arguments) == 0
    assert generate_docs.main([*arguments, "--check"]) == 0
    readme = (house / "README.md").read_text()
    assert readme.startswith("a\n") and readme.endswith("z\n")
    stale = readme.replace(generate_docs.YES, generate_docs.NO, 1)
    (house / "README.md").write_text(stale)
    assert generate_docs.main([*arguments, "--check"]) == 1


def test_support_table_is_what_the_planner_says(house):
    generate_docs.main(["--root", str(house)])
    lines = (house / "README.md").read_text().splitlines()
    table = [line.strip("| ").split(" | ") for line in lines if line.startswith("| ")]
    header, rows = lines[2].strip("|").split(" | "), table[2:]
    assert len(rows) == len(generate_docs.OPTIONS)
    columns = [f"{b} {d}" for b, dtypes in generate_docs.BACKENDS.items() for d in dtypes]
    assert [name.strip() for name in header[1:]] == columns
    for row in rows:
        assert row[1:5] == [generate_docs.YES] * 4, f"the CPU does everything, also {row[0]}"


def test_support_table_can_say_no(monkeypatch):
    from flashmoe_science import explanation

    monkeypatch.setitem(
        generate_docs.OPTIONS, "impossible", lambda m: [generate_docs.dense(m, kv_heads=3)]
    )
    line = generate_docs.support_table().split("| impossible |")[1].splitlines()[0]
    assert generate_docs.YES not in line and generate_docs.NO in line
    assert explanation.explain  # the planner asked is the package's own


def test_newest_results_of_each_machine(house):
    generate_docs.main(["--root", str(house)])
    text = (house / "docs" / "performance.md").read_text()
    assert text.startswith("b\n") and "\ny\n" in text and "old" not in text
    assert "CPU x-1, 2 threads" in text and "CPU y, 2 threads" in text
    assert "2026-03-04" in text and "2026-01-02" not in text
    assert "0123456789" in text and "torch 2.10.0" in text
    no = generate_docs.NO
    row = f"| 4, 8, 256, 64 | fp32 | fwd | 5.000 | 20.0 | ~4000 | 10.0 | {no} | 2.00 |"
    assert row in text


def test_gpu_results_say_where_we_stand(house):
    generate_docs.main(["--root", str(house)])
    text = (house / "docs" / "performance.md").read_text()
    assert "### GPU z\n" in text and "1000" not in text, "the newest of each series"
    block = text.split("### GPU z, FLASHMOE_FAMILY=sm80\n")[1]
    assert "SM clock 1980 MHz before" in block
    yes, no = generate_docs.YES, generate_docs.NO
    flash = "FlashAttention-2"
    backward = "dense backward, head dim"
    for line in (
        f"| dense forward, head dims 64, 128 ({flash}) | 2 | 1.20 | 1.05 | 1.20 | 1.00 | {yes} |",
        f"| {backward}s 64, 128 ({flash}) | 2 | 0.90 | 1.05 | 0.90 | 1.00 | **missed** |",
        f"| {backward} 256 ({flash}) | 0 | {no} | 1.00 | {no} | 1.00 | not measured |",
        f"1.25 times its time) | 2 | 0.75 | 0.80 | 0.75 | {no} | **missed** |",
    ):
        assert line in block
    sections = {part.split("\n")[0]: part for part in block.split("#### ")[1:]}
    assert list(sections) == [
        "Dense, forward", "Dense, backward", "Decode, forward", "Deterministic, backward"
    ]  # fmt: skip
    row = "| 16, 32, 1024, 64 | 8.000 | 12.5 | 1.20 | 0.50 | 8.000 | 12.5 | 1.20 | 0.50 |"
    assert row in sections["Dense, forward"]
    assert f"{flash} / ours: geometric mean 1.20, lowest" in sections["Dense, forward"]
    assert "cuDNN" not in sections["Dense, backward"], "it ran nowhere there"
    assert generate_docs.standings_table([]) == "", "no table of bars that nothing was measured for"
    decode = sections["Decode, forward"]
    assert f"| 16, 32, 1024, 64 | 8.000 | 2000 | 1.10 | wrong | {no} | {no} |" in decode
    assert "GB/s" in decode and "Timed as a CUDA graph of 16 calls." in decode
    assert "not deterministic / ours" in sections["Deterministic, backward"]


def test_missing_markers_are_an_error(house):
    (house / "README.md").write_text("nothing here\n")
    with pytest.raises(SystemExit, match="support:begin"):
        generate_docs.main(["--root", str(house)])


def test_without_results_it_says_so(house):
    shutil.rmtree(house / "bench")
    generate_docs.main(["--root", str(house)])
    assert "make bench" in (house / "docs" / "performance.md").read_text()
