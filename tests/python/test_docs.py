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
    gpu = made_up("host", "2026-09-09", 4)
    gpu["about"] |= {"device": "cuda", "gpu": {"name": "GPU z"}}
    (results / "gpu-h100-2026-09-09.json").write_text(json.dumps(gpu))
    return tmp_path


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
    assert "### GPU z" in text and "| fwd | 4.000 | 0.0 |" in text  # 25 GFLOP/s, in TFLOP/s


def test_missing_markers_are_an_error(house):
    (house / "README.md").write_text("nothing here\n")
    with pytest.raises(SystemExit, match="support:begin"):
        generate_docs.main(["--root", str(house)])


def test_without_results_it_says_so(house):
    shutil.rmtree(house / "bench")
    generate_docs.main(["--root", str(house)])
    assert "make bench" in (house / "docs" / "performance.md").read_text()
