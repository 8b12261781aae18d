"""Runs tests/gpu/sanitize.py under compute-sanitizer and judges what it reports.

    python3 tools/sanitize.py memcheck racecheck initcheck synccheck --jobs 6
    python3 tools/sanitize.py racecheck --family sm90 --limit 200

A report that is the tool's own error is named in KNOWN, with the reason. How many such reports a
kernel has, told apart by the instruction they name first, is written down in
tests/gpu/sanitize_known.json: a kernel that is not in the list, or has more of them, is new.
Prints each call as it ends and a line for each tool, and exits with 1 where a report is new, a call
failed or its results are far off. --record writes the numbers of this run to the list; commit it
when you have looked at every new report.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CALLS = ROOT / "tests" / "gpu" / "sanitize.py"
COUNTS = ROOT / "tests" / "gpu" / "sanitize_known.json"
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")


@dataclass(frozen=True)
class Known:
    where: str  # a pattern of the kernel or driver call that is named
    why: str
    counted: bool = False  # whether COUNTS has how many there are


KNOWN = {
    "racecheck": [
        Known(
            r"sm90_attention_(bwd_(?!preprocess|dq|key_sum|whole)|fwd_(packed|bias_rows|mask)_)",
            "one lane arrives at an mbarrier for its warp after __syncwarp(); the tool does not "
            "follow an order made of the two",
            counted=True,
        )
    ],
    # O, dK and dV leave by TMA, and so do the parts of dQ. The tool does not see what TMA writes:
    # it takes whoever reads them for a reader of memory that nobody wrote.
    "initcheck": [
        Known(r"sm90_attention_bwd_", "reads O, or dQ's sums, which were stored by TMA", True),
        Known(r"sm90 cu(da)?Memcpy", "copies results that were stored by TMA to the host"),
        Known(
            r"sm80_attention_(fwd|bwd)_bias_",
            "cp.async is told how many bytes of a row's last 16 to read; the tool takes all 16 for "
            "read. sm75, whose loads go element by element, has no such report of the same calls",
        ),
    ],
}
# A kernel as the tool writes it, and as plans do: kernel_fp16<(int)64, (int)128, (int)128>(...).
TEMPLATE = re.compile(r"(\w+)<\(int\)(\d+), \(int\)(\d+), \(int\)(\d+)>")
# "at void kernel(...)+0x1c0 in file.cuh:12", or "at 0x1c0 in kernel" of older versions.
PLACE = re.compile(
    r"\bat (?:void )?(?:(?P<name>[A-Za-z_]\w*)(?:\([^)]*\))?\+)?"
    r"(?P<offset>0x[0-9a-f]+)(?: in (\w+))?"
)
VERDICT = re.compile(r": (?:fine|FAR OFF)")
API = re.compile(r"\b(cu(?:da)?Memcpy\w*)")
OTHER = re.compile(r" (COMPUTE-SANITIZER|\w+ SUMMARY|Target application|Error: No attachable)")
MORE = re.compile(r"  | (and|at|by|Address|in|Saved|Host Frame|Device Frame)\b| \[")


@dataclass(frozen=True)
class Report:
    title: str
    name: str  # of the kernel; "sm90 cuMemcpyDtoH": of the family and the driver's function
    places: tuple[str, ...]  # offsets of the instructions that are named


def reports_in(text: str) -> list[Report]:
    """Each begins with a line of the tool's own ("========= ...") that continues no other, and
    comes before the verdict on the call that it is about ("sm90 fp16 ...: fine")."""
    found: list[Report] = []
    blocks: list[list[str]] = []
    for line in [*text.splitlines(), "?: fine"]:
        words = line.removeprefix("=========")
        if VERDICT.search(line):
            found += [report_of(block, line.split()[0]) for block in blocks]
            blocks = []
        elif words == line or not words.strip() or OTHER.match(words):
            continue
        elif MORE.match(words) and blocks:
            blocks[-1].append(words.strip())
        else:
            blocks.append([words.strip()])
    return found


def report_of(block: list[str], family: str) -> Report:
    whole = TEMPLATE.sub(r"\1_d\2_\3x\4", " ".join(block))
    places = [(x["name"] or x[3], x["offset"]) for x in PLACE.finditer(whole)]
    places = [(name, offset) for name, offset in places if name]  # not an address of memory
    names = [name for name, _ in places] or [f"{family} {name}" for name in API.findall(whole)]
    return Report(block[0], (names or ["?"])[0], tuple(offset for _, offset in places))


def find_sanitizer() -> str | None:
    toolkit = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"))
    packages = Path(sysconfig.get_path("purelib"))
    paths = [shutil.which("compute-sanitizer"), toolkit / "bin" / "compute-sanitizer"]
    paths += [toolkit / "compute-sanitizer" / "compute-sanitizer"]
    paths += packages.glob("nvidia/*/bin/compute-sanitizer")
    return next((str(path) for path in paths if path and os.access(path, os.X_OK)), None)


def run_tool(
    sanitizer: str, tool: str, families: list[str], jobs: int, limit_s: float | None
) -> tuple[list[str], list[str]]:
    """What each process printed, and what those printed that failed or were ended at the limit."""
    # Where in Python a call came from is known; of a million reports it would be gigabytes.
    command = [sanitizer, "--tool", tool, "--print-limit", "100000", "--show-backtrace", "no"]
    # Errors that torch provokes and handles itself are none of ours; those of our calls are raised.
    command += ["--report-api-errors", "no"] if tool == "memcheck" else []
    command += [sys.executable, str(CALLS)]
    # A core for each: what a process computes beside the calls would want all of them.
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    for family in families:
        command += ["--family", family]
    running = [
        subprocess.Popen(
            [*command, "--part", f"{i}/{jobs}"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
            start_new_session=True,  # to end it with what it has started
        )
        for i in range(jobs)
    ]

    def end_all() -> None:
        for process in running:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)

    timer = threading.Timer(limit_s or 0, end_all)
    if limit_s:
        timer.start()
    start, done = time.monotonic(), itertools.count(1)

    def read(process: subprocess.Popen) -> str:
        lines = []
        for line in process.stdout:
            lines.append(line)
            if VERDICT.search(line):  # a call has ended
                seconds = time.monotonic() - start
                print(f"{next(done)} calls, {seconds:.0f} s: {line.strip()}", file=sys.stderr)
        process.wait()
        return "".join(lines)

    with ThreadPoolExecutor(jobs) as readers:
        texts = list(readers.map(read, running))
    timer.cancel()
    failed = [
        f"{text}\nexit status {process.returncode}"
        for text, process in zip(texts, running, strict=True)
        if process.returncode != 0
    ]
    return texts, failed


def judge(tool: str, reports: list[Report], counts: dict[str, int]) -> tuple[list[str], list[str]]:
    """What is new, and what is known, in words; `counts`: how many reports of each kernel."""
    new, known = [], []
    places: dict[str, set[str]] = {}
    reasons = {}
    for report in reports:
        rule = next((x for x in KNOWN.get(tool, ()) if re.match(x.where, report.name)), None)
        if rule is None:
            new.append(f"{report.name}: {report.title}")
            continue
        places.setdefault(report.name, set()).update(report.places[:1])
        reasons[report.name] = rule
    for name, there in sorted(places.items()):
        most = counts.get(name, 0) if reasons[name].counted else len(there)
        if len(there) > most:
            new.append(f"{name}: {len(there)} reports, {most} are known")
        known.append(f"{name}: {len(there)} reports ({reasons[name].why})")
    return list(Counter(new)), known


def record(tool: str, reports: list[Report]) -> dict[str, int]:
    """How many reports of each kernel there are, of those that are to be counted."""
    counted = [x.where for x in KNOWN.get(tool, ()) if x.counted]
    places: dict[str, set[str]] = {}
    for report in reports:
        if any(re.match(where, report.name) for where in counted):
            places.setdefault(report.name, set()).update(report.places[:1])
    return {name: len(there) for name, there in places.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("tools", nargs="+", choices=TOOLS, metavar="TOOL", help=", ".join(TOOLS))
    parser.add_argument("--family", action="append", default=[], help="only this one; repeatable")
    parser.add_argument("--jobs", type=int, default=4, help="processes at once (default: 4)")
    parser.add_argument("--limit", type=float, metavar="SECONDS", help="of a tool; then it fails")
    parser.add_argument("--record", action="store_true", help="write the numbers of this run down")
    parser.add_argument("--logs", type=Path, metavar="DIR", help="all that the tools say, to read")
    given = parser.parse_args()
    sanitizer = find_sanitizer()
    if not sanitizer:
        print("compute-sanitizer is not installed (it comes with the CUDA toolkit)")
        return 1
    counts = json.loads(COUNTS.read_text())
    bad = False
    for tool in given.tools:
        start = time.monotonic()
        texts, failed = run_tool(sanitizer, tool, given.family, given.jobs, given.limit)
        if given.logs:
            given.logs.mkdir(parents=True, exist_ok=True)
            (given.logs / f"{tool}.txt").write_text("\n".join(texts))
        reports = [report for text in texts for report in reports_in(text)]
        if given.record:
            counts[tool] = record(tool, reports)
            COUNTS.write_text(json.dumps(counts, indent=1, sort_keys=True) + "\n")
        new, known = judge(tool, reports, counts.get(tool, {}))
        calls = sum(len(VERDICT.findall(text)) for text in texts)
        far_off = [line for text in texts for line in text.splitlines() if "FAR OFF" in line]
        bad = bad or bool(new or failed or far_off or not calls)
        for line in (*far_off, *(f"new: {x}" for x in new), *(f"known: {x}" for x in known)):
            print(f"  {line}")
        if failed and not far_off:
            print("\n".join(text[-1500:] for text in failed)[-6000:])
        seconds = time.monotonic() - start
        print(
            f"{tool}: {calls} calls, {len(new)} new and {len(known)} known kinds of reports, "
            f"{len(far_off)} far off, {len(failed)} of {given.jobs} processes failed, "
            f"{seconds:.0f} s",
            flush=True,
        )
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
