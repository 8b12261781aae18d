"""Ours next to others': checks each answer, times it, writes table, JSON and plot.

Peers of attention are PyTorch's SDPA backends in the same process with the same threads, on a GPU
also its compiled FlexAttention ("flex") and varlen_attn ("varlen"); over pages they get the same
keys without pages. Of mixtures of experts a loop over them, PyTorch's grouped_mm and transformers'
own; --peer adds anybody's. Everyone is timed
turn by turn under the same conditions, in changing order, and a time is the median of the turns'
medians. On a GPU that happens twice: sustained (without pauses, at the power limit as in training;
the numbers that count) and rested (the same pause before every turn). Workloads of short calls are
timed there as CUDA graphs, everyone's; --list says which, and results.json what could not be.
Training steps of whole models are timed by the wall clock, with what they wait for the host.

A ratio is the best peer's time over ours: above 1 we are faster. Where a workload says "next to our
own", its ratio is about that; "crystals" on a GPU is about varlen.
The exit code is 1 when an answer of ours is wrong.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import shlex
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from flashmoe_science.bench import runner, timing

SUMMARY = "attention and experts next to PyTorch's own: table, JSON and plot"
EXAMPLES = """\
examples:
  python -m flashmoe_science bench
  python -m flashmoe_science bench --workload pair_bias,ragged --dtype fp32
  python -m flashmoe_science bench --shape 1,8,512,64 1,8,512,64,causal,kv2 --pass fwd
  python -m flashmoe_science bench --workload decode --peers flash
  python -m flashmoe_science bench --workload crystals,crystals_bias --dtype bf16
  python -m flashmoe_science bench --workload pair_bias,triangle --only ,256, "(512,"
  python -m flashmoe_science bench --workload dense --pass fwd,bwd,fwd+bwd --peers flash,cudnn
  python -m flashmoe_science bench --workload dense --peers cudnn --peer theirs.py
  python -m flashmoe_science bench --workload moe,moe_elements,moe_decode --dtype fp32,bf16
  python -m flashmoe_science bench --workload paged_decode,paged_mixed,append --dtype bf16
  python -m flashmoe_science bench --workload paged_decode --shape 16,32,8192,128,kv8,p16,e4m3
  python -m flashmoe_science bench --workload second,fp32,dropout,mask
  python -m flashmoe_science bench --workload training --dtype bf16
  python -m flashmoe_science bench --list

a peer's file (--peer FILE.py) is a module with
  attention(q, k, v, causal)
      q (B, S, H, D), k and v (B, S, Hkv, D): dense workloads. Also bias, window or deterministic,
      where a workload needs them
  attention_varlen(q, k, v, cu_seqlens, max_seqlen, causal)
      q (T, H, D), k and v (T, Hkv, D): ragged workloads. Also bias, where there is one
  attention_paged(q, k_cache, v_cache, block_table, seq_lens, cu_seqlens_q, max_seqlen_q,
                  max_seqlen_k)
      q (T, H, D), caches (blocks, page, Hkv, D): paged workloads. Also k_scale and v_scale, where
      caches are float8_e4m3fn
  cache_append(k, v, k_cache, v_cache, slot_mapping)
      k and v (T, H, D): append. Also k_scale and v_scale
  moe(x, gate_up, down, ids, weights)
      x (T, d), gate_up (E, 2n, d), down (E, d, n), ids and weights (T, k): moe workloads
and, if it likes, NAME, LAYOUT = "BHSD" and supports(case): see flashmoe_science/bench/peer_file.py
"""

DTYPES = "fp32, fp16, bf16"
PEERS = (
    "flash, math; on a GPU also cudnn, efficient, flex with a bias, varlen for ragged; of experts "
    "loop, grouped_mm, transformers, transformers_batched; of append copy, index_copy; of training "
    "sdpa; and ours "
    "in other ways: contiguous, sixteen_bits, apart, decodes, chunk, mask_as_bias, ..."
)
PASSES = "fwd, bwd (the backward pass alone), fwd+bwd"


def words(text: str) -> list[str]:
    return [word for word in text.split(",") if word]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `bench`."""
    add = parser.add_argument
    add("--workload", type=words, default=["dense"], metavar="NAME,...", help="default: dense")
    shape = "B,H,S,D[,kvN][,causal][,...]|T,d,n,E,k|T,H,D,N"
    add("--shape", nargs="+", action="extend", metavar=shape, help="instead of the workload's own")
    add("--only", nargs="+", action="extend", metavar="TEXT",
        help="only rows with one of these in their name: dense (4,8,256,64) bf16 fwd")  # fmt: skip
    add(
        "--dtype",
        type=words,
        metavar="NAME,...",
        help=f"{DTYPES}. default: the workload's own, most often all, on a GPU bf16",
    )
    add("--pass", type=words, dest="passes", metavar="NAME,...",
        help=f"{PASSES}. default: the workload's own")  # fmt: skip
    add("--peers", type=words, metavar="NAME,...", help=f"{PEERS}. default: all")
    add("--peer", type=Path, action="append", default=[], metavar="FILE.py",
        help="another peer, checked against float64 and then timed; may be repeated")  # fmt: skip
    add("--device", metavar="cpu|cuda[:N]", help="default: the best one the library can use")
    add("--threads", type=int, metavar="N", help="CPU threads, for everyone. default: torch's own")
    add("--regimes", type=words, metavar="NAME,...",
        help="sustained, rested. default: both on a GPU, sustained on a CPU")  # fmt: skip
    add("--turns", type=int, metavar="N",
        help="turns of each implementation; their median counts. default: 3")  # fmt: skip
    add("--budget", type=float, metavar="SECONDS",
        help="for the calls of a turn. default: 0.05, on a GPU 0.04")  # fmt: skip
    add("--out", type=Path, default=Path("build/bench"), metavar="DIR",
        help="where results.json and the plots go. default: build/bench")  # fmt: skip
    add("--no-plot", action="store_true", help="do not draw results.png and crystals.png")
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
            how = ", as CUDA graphs" if workload.in_graph and device_type == "cuda" else ""
            print(f"{'':13} {device_type}, {passes}{how}: {'  '.join(shapes)}")


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


def schedule_of(args: argparse.Namespace, device_type: str) -> timing.Schedule:
    """The device's own schedule, with what was asked for instead."""
    from flashmoe_science.bench import timing

    usual = timing.SCHEDULES[device_type]
    regimes = usual.regimes if args.regimes is None else tuple(args.regimes)
    check_words("--regimes", list(regimes), list(usual.regimes))
    turns = usual.turns if args.turns is None else args.turns
    if turns < 1:
        raise ValueError(f"--turns {turns}: at least 1")
    budget_s = usual.budget_s if args.budget is None else args.budget
    if not 0 < budget_s < float("inf"):
        raise ValueError(f"--budget {budget_s}: more than 0 seconds")
    return timing.Schedule(turns, budget_s, regimes)


def make_folder(out: Path) -> None:
    """Before anything is measured; ValueError where nothing could be written."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--out {out}: {error.strerror}") from error


def setting_of(args: argparse.Namespace, device: torch.device) -> runner.Setting:
    """Who is timed on what and how; ValueError for what makes no sense."""
    from flashmoe_science.bench import peer_file, runner, timing
    from flashmoe_science.bench.workloads import WORKLOADS

    known = list(dict.fromkeys(p for w in args.workload for p in WORKLOADS[w].peers(device.type)))
    peers = args.peers if args.peers is not None else known
    check_words("--peers", peers, known)
    taken = ["ours", *(p for workload in WORKLOADS.values() for p in workload.peers(device.type))]
    files = peer_file.load_all(args.peer, taken)
    schedule = schedule_of(args, device.type)
    return runner.Setting(device, peers, files, timing.make_clock(device), schedule)


def measure(args: argparse.Namespace) -> int:
    """The benchmark itself; ValueError for options that make no sense."""
    import torch

    from flashmoe_science.bench import host, machine, report, results, runner, timing
    from flashmoe_science.bench.workloads import WORKLOADS

    device = choose_device(args.device, machine.build_info()["families"])
    if args.threads is not None:
        if args.threads < 1:
            raise ValueError(f"--threads {args.threads}: at least 1")
        torch.set_num_threads(args.threads)
    if args.dtype is not None:
        check_words("--dtype", args.dtype, list(runner.DTYPES))
    check_words("--workload", args.workload, list(WORKLOADS))
    if args.passes is not None:
        check_words("--pass", args.passes, list(runner.PASSES))
    specs = runner.rows_of(args.workload, args.shape, args.dtype, args.passes, device.type)
    if args.only:
        specs = [spec for spec in specs if any(text in spec.label for text in args.only)]
        if not specs:
            raise ValueError(f"--only {' '.join(args.only)}: in no row's name")
    setting = setting_of(args, device)
    schedule = setting.schedule
    make_folder(args.out)

    console = report.make_console()
    about = machine.describe(device)
    heading = f"{machine.title(about)}; {report.provenance(about)}"
    console.print(heading, markup=False, highlight=False)
    seconds = runner.estimated_seconds(specs, setting)
    console.print(f"{len(specs)} rows, about {report.format_duration(seconds)}", highlight=False)
    others, start = machine.OtherWork(), time.monotonic()
    path = args.out / "results.json"
    found: dict[str, Any] = {
        "schema": results.SCHEMA,
        "complete": False,
        "command": shlex.join(["python", "-m", "flashmoe_science", *sys.argv[1:]]),
        "about": about,
        "regimes": list(schedule.regimes),
        "turns": schedule.turns,
        "budget_s": schedule.budget_s,
        "pause_s": timing.PAUSE_S if results.RESTED in schedule.regimes else 0,
        "peer_files": {file.name: file.path.name for file in setting.files},
        "seconds": 0.0,
        "rows": [],
    }
    with report.ProgressReport(console, len(specs)) as progress:

        def on_rows(spec: runner.RowSpec, rows: list[results.Row]) -> None:
            progress(spec, rows)
            if rows:
                found["rows"] += rows
                found["seconds"] = time.monotonic() - start
                results.write(found, path)

        runner.run_rows(specs, setting, on_rows)
    about["cores_busy_with_other_work"] = others.cores()
    if device.type == "cuda":
        about["gpu_state_after"] = machine.gpu_state(device)
    found["means"] = results.means(found["rows"], "workload", "dtype", "pass", "regime")
    found["host_us"] = host.times(device) if device.type == "cuda" else None
    found["complete"] = True
    found["seconds"] = time.monotonic() - start
    results.write(found, path)
    return finish(args, console, found, path)


def finish(args: argparse.Namespace, console: Any, found: dict[str, Any], path: Path) -> int:
    """Prints and draws the results; the exit code says whether ours are right."""
    from flashmoe_science.bench import plot, report

    report.print_tables(console, found)
    report.print_means(console, found)
    report.print_host_times(console, found)
    report.print_problems(console, found)
    written = [path, *([] if args.no_plot else plot.write_plots(found, args.out))]
    console.print(f"wrote {' and '.join(str(path) for path in written)}", markup=False)
    ours_failed = any(
        row["check"]["status"] == "failed"
        or (row["check"]["status"] != "refused" and row["implementations"]["ours"]["ms"] is None)
        for row in found["rows"]
    )
    return 1 if ours_failed else 0
