"""Our attention next to PyTorch's own: checks each answer, times it, writes table, JSON and plot.

Peers are PyTorch's SDPA backends in the same process with the same threads, on a GPU also its
compiled FlexAttention ("flex") and varlen_attn ("varlen"). A ratio is the best peer's time over
ours: above 1 we are faster. "flash" is FlashAttention-2 on a GPU and has a column of its own. The
workload "deterministic" has our own ordinary backward pass as its only peer; "crystals" on a GPU is
about varlen. FlashAttention-3 and 4 do not run here: dense bf16 rows on an H200 show their times as
measured before. The exit code is 1 when an answer is wrong.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import shlex
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

SUMMARY = "attention next to PyTorch's own: table, JSON and plot"
EXAMPLES = """\
examples:
  python -m flashmoe_science bench
  python -m flashmoe_science bench --workload pair_bias,ragged --dtype fp32
  python -m flashmoe_science bench --shape 1,8,512,64 1,8,512,64,causal,kv2 --pass fwd
  python -m flashmoe_science bench --workload decode --peers flash --check
  python -m flashmoe_science bench --workload crystals,crystals_bias --dtype bf16
  python -m flashmoe_science bench --workload dense --pass fwd,bwd,fwd+bwd --peers flash,cudnn
  python -m flashmoe_science bench --workload head_dims,gqa,window,mixed_lengths --check
  python -m flashmoe_science bench --list
"""

DTYPES = "fp32, fp16, bf16"
PEERS = "flash, math; on a GPU also cudnn, efficient, flex with a bias, varlen for ragged"
PASSES = "fwd, bwd (the backward pass alone), fwd+bwd"


def words(text: str) -> list[str]:
    return [word for word in text.split(",") if word]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `bench`."""
    add = parser.add_argument
    add("--workload", type=words, default=["dense"], metavar="NAME,...", help="default: dense")
    shape = "B,H,S,D[,causal][,kvN][,wN]"
    add("--shape", nargs="+", action="extend", metavar=shape, help="instead of the workload's own")
    add("--dtype", type=words, metavar="NAME,...", help=f"{DTYPES}. default: all, on a GPU bf16")
    add("--pass", type=words, dest="passes", metavar="NAME,...",
        help=f"{PASSES}. default: the workload's own")  # fmt: skip
    add("--peers", type=words, metavar="NAME,...", help=f"{PEERS}. default: all")
    add("--device", metavar="cpu|cuda[:N]", help="default: the best one the library can use")
    add("--threads", type=int, metavar="N", help="CPU threads, for everyone. default: torch's own")
    add("--budget", type=float, default=0.25, metavar="SECONDS",
        help="for each of an implementation's two rounds on a row. default: 0.25")  # fmt: skip
    add("--out", type=Path, default=Path("build/bench"), metavar="DIR",
        help="where results.json and the plots go. default: build/bench")  # fmt: skip
    add("--no-plot", action="store_true", help="do not draw results.png and crystals.png")
    add("--check", action="store_true", help="exit 1 also where a speed bar is missed")
    add("--list", action="store_true", help="list the workloads with their shapes and stop")


def missing_tools(args: argparse.Namespace) -> list[str]:
    wanted = ["rich"] if args.no_plot else ["rich", "matplotlib"]
    return [name for name in wanted if importlib.util.find_spec(name) is None]


def choose_device(asked: str | None, families: list[str]) -> torch.device:
    """The device to measure on: a GPU where there is one and this build has kernels for it."""
    import torch

    usable = torch.cuda.is_available() and bool(families)
    name = asked or ("cuda" if usable else "cpu")
    if not re.fullmatch(r"cpu|cuda(:\d+)?", name):
        raise ValueError(f"--device {name}: not cpu, cuda or cuda:N")
    device = torch.device(name)
    if device.type == "cuda":
        device = torch.device("cuda", device.index or 0)
        if device.index >= torch.cuda.device_count():
            raise ValueError(f"--device {name}: torch sees no such GPU here")
        torch.cuda.set_device(device)
    return device


def check_words(option: str, given: list[str], known: list[str]) -> None:
    unknown = [word for word in given if word not in known]
    if unknown or not given:
        what = ", ".join(unknown) or "nothing"
        raise ValueError(f"{option} {what}: not one of {', '.join(known)}")


def list_workloads() -> None:
    from flashmoe_science.bench.workloads import WORKLOADS

    for name, workload in WORKLOADS.items():
        print(f"{name:13} {workload.summary}")
        for device_type, shapes in workload.shapes.items():
            passes = ",".join(workload.passes_for(None, device_type))
            print(f"{'':13} {device_type}, {passes}: {'  '.join(shapes)}")


def run(args: argparse.Namespace) -> int:
    """Runs `bench` and returns the exit code."""
    if missing := missing_tools(args):
        print(
            f"bench needs {' and '.join(missing)}: pip install 'flashmoe_science[bench]'",
            file=sys.stderr,
        )
        return 1
    from flashmoe_science.cli import load

    if problem := load.problem():
        print(problem, file=sys.stderr)
        return 1
    if args.list:
        list_workloads()
        return 0
    try:
        return measure(args)
    except ValueError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2


def measure(args: argparse.Namespace) -> int:
    """The benchmark itself; ValueError for options that make no sense."""
    import torch

    from flashmoe_science.bench import anchors, machine, report, runner, timing
    from flashmoe_science.bench.workloads import WORKLOADS

    device = choose_device(args.device, machine.build_info()["families"])
    if args.threads:
        torch.set_num_threads(args.threads)
    dtypes = args.dtype or (list(runner.DTYPES) if device.type == "cpu" else ["bf16"])
    check_words("--dtype", dtypes, list(runner.DTYPES))
    check_words("--workload", args.workload, list(WORKLOADS))
    if args.passes is not None:
        check_words("--pass", args.passes, list(runner.PASSES))
    known = list(dict.fromkeys(p for w in args.workload for p in WORKLOADS[w].peers(device.type)))
    peers = args.peers if args.peers is not None else known
    check_words("--peers", peers, known)
    specs = runner.rows_of(args.workload, args.shape, dtypes, args.passes, device.type)

    console = report.make_console()
    about = machine.describe(device)
    heading = f"{machine.title(about)}; {report.provenance(about)}"
    console.print(heading, markup=False, highlight=False)
    seconds = runner.estimated_seconds(specs, peers, args.budget, device.type)
    console.print(f"{len(specs)} rows, about {report.format_duration(seconds)}", highlight=False)
    others, start = machine.OtherWork(), time.monotonic()
    with report.ProgressReport(console, len(specs)) as progress:
        rows = runner.run_rows(specs, peers, device, args.budget, progress)
    anchors.add_anchors(rows, about)
    about["cores_busy_with_other_work"] = others.cores()
    if device.type == "cuda":
        about["gpu_state_after"] = machine.gpu_state(device)
    results = {
        "schema": 1,
        "command": shlex.join(["python", "-m", "flashmoe_science", *sys.argv[1:]]),
        "about": about,
        "budget_s": args.budget,
        "rest_s": timing.REST_S if device.type == "cuda" else 0,
        "seconds": time.monotonic() - start,
        "rows": rows,
        "means": runner.means(rows, "workload", "dtype", "pass"),
        "host_us": timing.host_times(device) if device.type == "cuda" else None,
    }
    return finish(args, console, results)


def finish(args: argparse.Namespace, console: Any, results: dict[str, Any]) -> int:
    """Prints and writes the results; the exit code says whether they are good."""
    from flashmoe_science.bench import bars, plot, report

    report.print_table(console, results)
    report.print_means(console, results)
    report.print_host_times(console, results)
    report.print_problems(console, results)
    args.out.mkdir(parents=True, exist_ok=True)
    written = [args.out / "results.json"]
    written[0].write_text(json.dumps(results, indent=1) + "\n")
    if not args.no_plot:
        written += plot.write_plots(results, args.out)
    console.print(f"wrote {' and '.join(str(path) for path in written)}", markup=False)
    ours_failed = any(
        row["check"]["status"] == "failed"
        or (row["check"]["status"] != "refused" and row["implementations"]["ours"]["ms"] is None)
        for row in results["rows"]
    )
    missed = []
    if args.check:
        report.print_bars(console, results)
        missed = bars.missed_bars(results["rows"], results["about"]["device"])
    for line in missed:
        console.print(f"missed: {line}", markup=False, style="bold red")
    return 1 if ours_failed or missed else 0
