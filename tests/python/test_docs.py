"""The generated parts of the documentation are up to date, and the generator notices when not."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import sys
import xml.etree.ElementTree
from pathlib import Path

import pytest
import torch

import flashmoe_science  # noqa: F401  (registers the ops)
from flashmoe_science.bench import runner
from flashmoe_science.bench.case import Shape
from flashmoe_science.bench.results import compare
from flashmoe_science.bench.workloads import WORKLOADS

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import generate_docs  # noqa: E402
import speed_docs  # noqa: E402
import speed_picture  # noqa: E402


def test_families_in_the_docs_are_the_librarys():
    short = {"float16": "fp16", "bfloat16": "bf16"}
    expected = []
    for family in json.loads(torch.ops.flashmoe.build_info())["cuda_families"]:
        runs_on = f"sm_{family['oldest']} " + ("alone" if family["newest"] else "and newer")
        assert family["newest"] in (0, family["oldest"]), "the docs have no words for that"
        dtypes = ", ".join(short[dtype] for dtype in family["dtypes"])
        machine_code = ", ".join(family["machine_code"])
        expected.append([family["name"], runs_on, machine_code, family["ptx"], dtypes])
    table = (ROOT / "docs" / "design.md").read_text().split("| family | runs on |")[1]
    lines = table.split("\n\n")[0].splitlines()[2:]
    assert [[cell.strip() for cell in line.split("|")[1:6]] for line in lines] == expected


def test_the_table_of_support_is_up_to_date(capsys):
    if not json.loads(torch.ops.flashmoe.build_info())["families"]:
        pytest.skip("built without CUDA kernels; the table is that of a full build")
    assert generate_docs.main(["--check", "--part", "support"]) == 0, capsys.readouterr().out


def test_the_pages_about_speed_are_up_to_date(capsys):
    assert generate_docs.main(["--check", "--part", "speed"]) == 0, capsys.readouterr().out


@pytest.mark.parametrize("page", ["docs/speed.md", "bench/results/README.md"])
def test_no_heading_is_there_twice(page):
    headings = [line for line in (ROOT / page).read_text().splitlines() if line.startswith("#")]
    assert headings and len(set(headings)) == len(headings)


@pytest.fixture
def house(tmp_path):
    """A small checkout with empty blocks and results of several machines, one measured twice."""
    blocks = (
        "<!-- support:begin -->\n<!-- support:end -->\n<!-- speed:begin -->\n<!-- speed:end -->"
    )
    (tmp_path / "README.md").write_text(f"a\n{blocks}\nz\n")
    results = tmp_path / "bench" / "results"
    results.mkdir(parents=True)
    for machine, date, ms in (
        ("x-1", "2026-01-02", 8),
        ("x-1", "2026-03-04", 5),
        ("y", "2026-02-01", 2),
    ):
        (results / f"cpu-{machine}-{date}.json").write_text(json.dumps(made_up(machine, date, ms)))
    for name, gpu in (
        ("gpu-h100-2026-09-09-dense", made_up_gpu()),
        ("gpu-h100-2026-09-09-sm80", made_up_gpu("sm80")),
        ("gpu-h100-2026-07-07-without-regime", without_regime(made_up_gpu(), rest_s=0)),
        ("gpu-h100-2026-08-08-rested", without_regime(made_up_gpu(), rest_s=0.1)),
    ):
        (results / f"{name}.json").write_text(json.dumps(gpu))
    return tmp_path


def row_of(workload: str, shape: str, dtype: str, direction: str, ms: dict, kind=Shape) -> dict:
    """A row in which everyone takes so many milliseconds; 100 GFLOP of work."""
    parsed = kind.parse(shape)
    implementations = {n: {"ms": t, "gflops": t and 1e5 / t} for n, t in ms.items()}
    return {
        "workload": workload, "label": shape, "dtype": dtype, "pass": direction,
        "regime": "sustained", "shape": dataclasses.asdict(parsed), "check": {"status": "ok"},
        "implementations": implementations, **compare(implementations),
    }  # fmt: skip


def made_up(machine: str, date: str, ms: float) -> dict:
    row = row_of("dense", "4,8,256,64", "fp32", "fwd", {"ours": ms, "flash": 4000.0, "math": 10.0})
    row["implementations"]["flash"]["estimated_from_heads"] = 2
    row["implementations"]["varlen"] = {"ms": None, "reason": "no"}
    return {
        "turns": 3, "budget_s": 0.05, "complete": True,
        "about": {
            "date": f"{date}T10:00:00+00:00", "commit": "0123456789abcdef", "dirty": False,
            "device": "cpu", "threads": 2, "cpu_target": "neon", "cpu": {"name": f"CPU {machine}"},
            "versions": {"torch": "2.10.0", "python": "3.11.7"},
        },
        "rows": [row],
    }  # fmt: skip


def made_up_gpu(family: str | None = None) -> dict:
    """Dense rows at seven lengths in both regimes: won when rested, lost at one length when not."""
    results = made_up("host", "2026-09-09", 1)
    clock = {"clocks.sm": "1980 MHz"}
    results["about"] |= {"device": "cuda", "gpu": {"name": "NVIDIA Z"}, "forced_family": family}
    results["about"] |= {"gpu_state_before": clock, "gpu_state_after": clock}
    results["rows"] = []
    for length in (512, 1024, 2048, 4096, 8192, 16384, 32768):
        for regime, slower in (("sustained", length == 16384), ("rested", False)):
            times = {"ours": 0.25 if slower else 0.125, "cudnn": 0.25, "fa3": 0.2}
            row = row_of("dense", f"1,8,{length},64,causal", "bf16", "fwd", times)
            results["rows"].append(row | {"regime": regime})
    times = {"ours": 2.0, "cudnn": None, "fa3": 3.0}
    results["rows"].append(row_of("dense", "1,8,512,64", "fp16", "fwd", times))
    results["rows"].append(row_of("decode", "1,8,512,64", "bf16", "fwd", {"ours": 1.0, "flash": 2}))
    results["rows"][-1]["implementations"]["ours"]["gb_per_s"] = 1234.0
    results["rows"].append(row_of("gqa", "1,8,512,64", "bf16", "fwd", {"ours": 1.0, "cudnn": 2}))
    results["rows"][-1]["check"] = {"status": "failed"}
    return results


def without_regime(results: dict, rest_s: float) -> dict:
    """As files were before rows said so."""
    results["about"]["date"] = "2026-08-08T10:00:00+00:00"
    results["rest_s"] = rest_s
    del results["turns"], results["complete"]
    for row in results["rows"]:
        del row["regime"]
    return results


def read(house, page: str) -> str:
    assert generate_docs.main(["--root", str(house)]) == 0
    return (house / page).read_text()


def test_generating_settles(house, capsys):
    arguments = ["--root", str(house)]
    assert generate_docs.main([*arguments, "--check"]) == 1
    assert "out of date" in capsys.readouterr().out
    assert (house / "README.md").read_text().count("\n") == 6, "--check must not write"
    assert generate_docs.main(arguments) == 0
    assert generate_docs.main([*arguments, "--check"]) == 0
    readme = (house / "README.md").read_text()
    assert readme.startswith("a\n") and readme.endswith("z\n")
    stale = readme.replace(generate_docs.YES, generate_docs.NO, 1)
    (house / "README.md").write_text(stale)
    assert generate_docs.main([*arguments, "--check"]) == 1
    assert generate_docs.main([*arguments, "--check", "--part", "speed"]) == 0


def test_a_picture_without_results_is_removed(house):
    generate_docs.main(["--root", str(house)])
    stray = house / "docs" / "speed" / "old.svg"
    stray.write_text("")
    assert generate_docs.main(["--root", str(house), "--check"]) == 1 and stray.exists()
    assert generate_docs.main(["--root", str(house)]) == 0 and not stray.exists()
    assert len(list(stray.parent.glob("*.svg"))) == 4


def test_support_table_is_what_the_planner_says(house):
    generate_docs.main(["--root", str(house)])
    lines = (house / "README.md").read_text().splitlines()
    table = [line.strip("| ").split(" | ") for line in lines if line.startswith("| ")]
    header, rows = lines[2].strip("|").split(" | "), table[2:]
    assert len(rows) == len(generate_docs.OPTIONS)
    columns = [f"{b} {d}" for b, dtypes in generate_docs.backends().items() for d in dtypes]
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


def test_every_row_of_every_file_is_listed(house):
    text = read(house, "bench/results/README.md")
    files = sorted(path.stem for path in (house / "bench" / "results").glob("*.json"))
    assert re.findall(r"^## (.*)$", text, re.M) == [f for f in files if "without-regime" not in f]
    assert "regime they were measured: gpu-h100-2026-07-07-without-regime.json." in text
    no = speed_docs.NONE
    row = "| dense | 4, 8, 256, 64 | fp32 | fwd | sustained | 5.000 | 20,000 "
    assert f"{row}| ~4,000.0 | 10.0 | {no} | 2.00 |" in text
    section = text.split("## gpu-h100-2026-09-09-dense\n")[1].split("## ")[0]
    where = section.split("|")[0].replace("\n", " ")
    assert "SM clock 1980 MHz before" in where and "median of 3 turns of 0.05 s" in where
    assert section.count("| dense |") == 15 and section.count("| rested |") == 7
    assert (
        "| dense | 1, 8, 512, 64, causal | bf16 | fwd | rested | 0.1250 | 800 | 0.2500 | "
        in section
    )
    assert f"| gqa | 1, 8, 512, 64 | bf16 | fwd | sustained | wrong | {no} |" in section
    assert "1,234 GB/s" in section
    rested = text.split("## gpu-h100-2026-08-08-rested\n")[1].split("## ")[0]
    assert "the better of two rounds" in rested and "| sustained |" not in rested
    assert "FLASHMOE_FAMILY=sm80" in text


def test_users_see_the_newest_rows_beside_the_best_peer(house):
    text = read(house, "docs/speed.md")
    headings = re.findall(r"^## (.*)$", text, re.M)
    assert headings == [
        "Dense, NVIDIA Z",
        "Decode, NVIDIA Z",
        "Dense, CPU x-1, 2 threads",
        "Dense, CPU y, 2 threads",
        "Your own implementation beside ours",
    ]
    dense, decode, cpu, *_ = (re.sub(r"\n +", " ", part) for part in text.split("\n## ")[1:])
    assert "2026-09-09, commit 0123456789" in dense and "sm80" not in text
    assert "The table is sustained." in dense and "fp16" not in dense
    fa3 = "FlashAttention-3"
    cells = [f"{length}: 1.60 (800, {fa3} 500)" for length in ("512", "4,096", "32,768")]
    assert f"| forward, head dim 64, causal | {' | '.join(cells)} |" in dense
    assert "slower in 1, lowest 0.80 (1, 8, 16384, 64, causal)." in dense
    assert f"- Forward, rested: 1.60 (cuDNN 2.00, {fa3} 1.60) over 7 rows, slower in none." in dense
    assert "in GB/s" in decode and "(1,234, FlashAttention-2" in decode
    assert "2026-03-04" in cpu and "2026-01-02" not in text
    assert "| forward | 256: 2.00 (20,000, PyTorch math 10,000) |" in cpu


def test_a_newer_file_without_the_best_peer_does_not_replace_one_that_has_it(house):
    folder = house / "bench" / "results"
    results = json.loads((folder / "gpu-h100-2026-09-09-dense.json").read_text())
    times = {"ours": 1.0, "cudnn": 2.0, "flex": 1.25}
    for day, left_out in (("09", None), ("10", "flex"), ("11", "cudnn")):
        implementations = {name: ms for name, ms in times.items() if name != left_out}
        row = row_of("small", "1,8,512,64", "bf16", "fwd", implementations)
        about = results["about"] | {"date": f"2026-09-{day}T00:00:00+00:00"}
        path = folder / f"gpu-h100-2026-09-{day}-{'dense' if day == '09' else 'small'}.json"
        path.write_text(json.dumps(results | {"rows": [row], "about": about}))
        small = read(house, "docs/speed.md").split("## Small")[1]
        assert f"2026-09-{'11' if day == '11' else '09'}, commit" in small.replace("\n", " ")


def test_a_newer_file_of_rested_rows_alone_does_not_replace_sustained_ones(house):
    before = read(house, "docs/speed.md")
    folder = house / "bench" / "results"
    results = json.loads((folder / "gpu-h100-2026-09-09-dense.json").read_text())
    results["rows"] = [row for row in results["rows"] if row["regime"] == "rested"]
    results["about"]["date"] = "2026-09-10T00:00:00+00:00"
    (folder / "gpu-h100-2026-09-10-rested.json").write_text(json.dumps(results))
    assert read(house, "docs/speed.md") == before


def test_users_read_what_was_timed_as_cuda_graphs(house):
    path = house / "bench" / "results" / "gpu-h100-2026-09-09-dense.json"
    results = json.loads(path.read_text())
    results["rows"] = [row_of("small", "1,8,512,64", "bf16", "fwd", {"ours": 1.0, "cudnn": 2})]
    methods = {"ours": "CUDA graph of 2 calls", "cudnn": "CUDA graph of 1 calls"}
    for method, said in (
        (methods["cudnn"], "Timed as CUDA graphs. 2026"),
        ("events; no CUDA graph: not permitted", "Timed as CUDA graphs, not always cuDNN. 2026"),
    ):
        found = results["rows"][0]["implementations"]
        found["ours"]["method"], found["cudnn"]["method"] = methods["ours"], method
        path.write_text(json.dumps(results))
        assert said in read(house, "docs/speed.md").replace("\n", " ")
    found["ours"]["method"] = "events"
    path.write_text(json.dumps(results))
    assert "CUDA graph" not in read(house, "docs/speed.md")


def test_rows_of_serving_and_of_derivatives_have_their_tables(house):
    """As a run on a GPU leaves them: nothing but the file is needed."""
    names = ("paged_decode", "paged_uneven", "paged_mixed", "paged_prefill", "append", "second")
    path = house / "bench" / "results" / "gpu-h100-2026-09-09-dense.json"
    results, rows = json.loads(path.read_text()), []
    for spec in runner.rows_of([*names, "fp32", "dropout", "mask"], None, None, None, "cuda"):
        workload = WORKLOADS[spec.workload]
        times = {"ours": 1.0, **dict.fromkeys(workload.peers("cuda"), 1.5)}
        kind = workload.shape_type
        row = row_of(spec.workload, str(spec.shape), spec.dtype, spec.direction, times, kind)
        if spec.workload in (*names[:3], "append"):
            row["implementations"]["ours"]["gb_per_s"] = 3456.0
        rows.append(row)
    rows[0]["implementations"]["ours"] = {"ms": None, "reason": "no CUDA kernel"}
    rows[0] |= {"check": {"status": "refused"}, "ratio": None, "ratios": {}}
    path.write_text(json.dumps(results | {"rows": rows}))
    text = read(house, "docs/speed.md")
    decode = text.split("## Paged decode, NVIDIA Z\n")[1].split("\n## ")[0]
    lines = [line for line in decode.splitlines() if line.startswith("| forward")]
    groups = ["pages of 16", "pages of 64", "pages of 1", "pages of 16, e4m3"]
    assert [line.split(" | ")[0] for line in lines] == [f"| forward, {group}" for group in groups]
    assert "1 x 8,192: 1.50 (3,456, " in lines[0] and "8 x 32,768: 1.50" in lines[0]
    assert "1 x 512 e4m3:" in lines[3] and "1 x 512:" not in lines[0], "which was refused"
    assert "in GB/s" in decode and "ours, cache in 16 bits" in decode
    mixed = text.split("## Paged mixed, NVIDIA Z\n")[1].split("\n## ")[0]
    assert "ours in two calls 1.50" in mixed.replace("\n  ", " ")
    assert "| 16 x 8,192 q512: 1.50" in mixed and "255 x 8,192 q2048 e4m3: 1.50" in mixed
    second = text.split("## Second, NVIDIA Z\n")[1].split("\n## ")[0]
    assert "| backward, fp32 |" in second and "| forward and backward, bf16 |" in second
    assert "a plain copy" in text.split("## Append, NVIDIA Z\n")[1].split("\n## ")[0]
    table = read(house, "bench/results/README.md").split("## gpu-h100-2026-09-09-dense\n")[1]
    assert "| batch, heads, length, dim or tokens, heads, dim, page |" in table
    refused = [cell for cell in table.splitlines() if "1, 32, 512, 128, kv8, p16 |" in cell]
    assert len(refused) == 1 and f"| sustained | {speed_docs.NONE} |" in refused[0]
    for name in ("paged_decode", "append", "mask"):
        xml.etree.ElementTree.parse(house / "docs" / "speed" / f"{name}-h100.svg")


def test_a_lost_row_is_as_plain_as_a_won_one(house):
    path = house / "bench" / "results" / "gpu-h100-2026-09-09-dense.json"
    results = json.loads(path.read_text())
    results["rows"] = [row for row in results["rows"] if row["shape"]["length"] >= 8192]
    path.write_text(json.dumps(results))
    text = read(house, "docs/speed.md")
    assert "| 16,384: **0.80** (400, FlashAttention-3 500) |" in text


def test_the_readme_shows_the_first_picture(house):
    readme = read(house, "README.md")
    assert "(docs/speed/dense-h100.svg)" in readme and "slower in 1, lowest 0.80" in readme
    picture = xml.etree.ElementTree.parse(house / "docs" / "speed" / "dense-h100.svg").getroot()
    texts = {e.text: e.get("fill") for e in picture if e.tag.endswith("text")}
    assert texts["0.80"] == speed_picture.LOST and texts["1.60"] == speed_picture.OURS
    assert {"512", "1,024", "32,768", "forward, head dim 64, causal"} <= texts.keys()
    ours = [e for e in picture if e.get("fill") == speed_picture.OURS and e.tag.endswith("rect")]
    heights = [float(e.get("height")) for e in ours[1:]]  # the first is the legend's
    assert len(heights) == 7 and heights[5] == pytest.approx(heights[0] / 2, abs=0.1)


@pytest.mark.parametrize(
    ("value", "rounded"), [(0.07, 0.08), (1.0, 1.0), (17, 20), (612, 800), (1000, 1000)]
)
def test_an_axis_ends_at_a_round_number(value, rounded):
    assert speed_picture.round_up(value) == pytest.approx(rounded)


def test_missing_markers_are_an_error(house):
    (house / "README.md").write_text("nothing here\n")
    with pytest.raises(SystemExit, match="support:begin"):
        generate_docs.main(["--root", str(house)])


def test_without_results_it_says_so(house):
    shutil.rmtree(house / "bench")
    for page in ("docs/speed.md", "bench/results/README.md", "README.md"):
        assert "No results are committed yet" in read(house, page)
