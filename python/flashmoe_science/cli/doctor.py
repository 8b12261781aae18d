"""What is installed, what can run here and why not, and a self-check that computes something.

The exit code is 1 when the compiled library does not load or the self-check finds a wrong answer.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from flashmoe_science.cli import load

if TYPE_CHECKING:
    import torch

SUMMARY = "what is installed, what can run here and why not, and a self-check"
EXAMPLES = """\
examples:
  python -m flashmoe_science doctor
  python -m flashmoe_science doctor --json
"""
DTYPES = {"fp64": "float64", "fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
# What people set to try something and forget.
VARIABLES = ("FLASHMOE_FAMILY", "FLASHMOE_TILE", "FLASHMOE_CPU_TARGET", "FLASHMOE_NUM_THREADS")

# Small, with everything awkward: lengths that fit no tile, shared key heads, masks, biases, widths
# that are no multiple of anything, experts that most tokens have and experts that none has.
CHECKS = (
    ("dense", "2,4,67,24,causal,kv2"),
    ("dense", "2,4,131,64,causal,kv2"),
    ("pair_bias", "2,4,35,16"),
    ("ragged", "5,4,19,32,causal"),
    ("ragged_bias", "5,4,13,8"),
    ("moe", "67,24,37,5,2"),
    ("moe_elements", "131,32,48,89,1"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `doctor`."""
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def run(args: argparse.Namespace) -> int:
    """Runs `doctor` and returns the exit code."""
    report = examine()
    if args.json:
        print(json.dumps(report, indent=2))
    else:
        sys.stdout.write(as_text(report))
    return 0 if report["healthy"] else 1


def examine() -> dict[str, Any]:
    """Everything there is to say, as plain data."""
    report: dict[str, Any] = {"python": platform.python_version(), "healthy": False}
    try:
        import torch
    except ImportError as error:
        return report | {"torch": None, "problem": f"torch is missing: {error}"}
    report |= {"torch": torch.__version__, "cuda_of_torch": torch.version.cuda}
    if problem := load.problem():
        return report | {"problem": problem}

    from flashmoe_science.bench import machine

    info = machine.build_info()
    report |= {
        "flashmoe_science": info["version"],
        "cpu": machine.cpu(),
        "cpu_target": info["cpu_target"],
        "cpu_targets": info["cpu_targets"],
        "threads": torch.get_num_threads(),
        "gpus": machine.gpus(),
        "families": info["families"],
        "environment": {name: os.environ[name] for name in VARIABLES if os.environ.get(name)},
    }
    chips = sorted(f"sm_{family['oldest']}" for family in info["cuda_families"])
    report["backends"] = [backend(device, ask_attention) for device in ("cpu", *chips)]
    report["moe_backends"] = [backend(device, ask_experts) for device in ("cpu", *chips)]
    devices = ["cpu"]
    if info["families"] and report["gpus"]:
        devices += [f"cuda:{i}" for i in range(len(report["gpus"]))]
    report["checks"] = [line for device in devices for line in self_check(torch.device(device))]
    report["healthy"] = all(check["ok"] for check in report["checks"])
    return report


def ask_attention(dtype: torch.dtype, **question: Any) -> None:
    """RuntimeError where attention in that dtype has no kernel."""
    import torch

    from flashmoe_science import explain

    q = torch.empty(1, 2, 64, 64, dtype=dtype, device="meta")
    explain(q, q, q, **question)


def ask_experts(dtype: torch.dtype, **question: Any) -> None:
    """The same about a mixture of experts."""
    import torch

    from flashmoe_science import explain_moe

    x, down = (torch.empty(size, dtype=dtype, device="meta") for size in ((64, 64), (2, 64, 64)))
    gate_up = torch.empty(2, 128, 64, dtype=dtype, device="meta")
    ids = torch.empty(64, 1, dtype=torch.int32, device="meta")
    explain_moe(x, gate_up, down, ids, **question)


def backend(device: str, ask: Callable[..., None]) -> dict[str, Any]:
    """Which dtypes the planner would run on a device, each way, and why not the others."""
    import torch

    runs, why_not = {"forward": [], "backward": []}, {}
    for name, torch_name in DTYPES.items():
        for direction, usable in runs.items():
            try:
                dtype = getattr(torch, torch_name)
                ask(dtype, backward=direction == "backward", device=device)
                usable.append(name)
            except RuntimeError as error:
                why_not[name] = first_line(error)
    return {"device": device, **runs, "why_not": why_not}


def first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def check_what_runs(check, case):
    """The verdict over both passes, over the forward pass where only that has a kernel, or None."""
    for backward in (True, False):
        try:
            return check(case, backward=backward)
        except RuntimeError as error:
            if "no CUDA kernel of this build" not in str(error):
                raise
    return None


def self_check(device: torch.device) -> list[dict[str, Any]]:
    """Forward and backward passes on a device, each against float64."""
    import torch

    from flashmoe_science.bench.accuracy import check
    from flashmoe_science.bench.workloads import WORKLOADS

    lines = []
    names = [name for name in DTYPES if device.type == "cpu" or name != "fp64"]
    for name in names:
        for workload, shape in CHECKS:
            line = {"device": str(device), "dtype": name, "workload": workload, "shape": shape}
            torch.manual_seed(0)
            dtype = getattr(torch, DTYPES[name])
            made = WORKLOADS[workload]
            case = made.make(made.shape_type.parse(shape), dtype, device)
            try:
                verdict = check_what_runs(check, case)
            except Exception as error:  # a call that fails is a finding, not a crash of doctor
                lines.append(line | {"ok": False, "problem": first_line(error)})
                continue
            if verdict is None:
                continue  # not in this build; the list of backends says so
            result, worst = verdict.worst
            found = {"ok": verdict.ok, "result": result, "error": worst.ours, "limit": worst.limit}
            lines.append(line | found)
    return lines


def as_text(report: dict[str, Any]) -> str:
    """The report for reading."""
    lines = ["versions"]
    for name in ("flashmoe_science", "python", "torch", "cuda_of_torch"):
        if name in report:
            lines.append(f"  {name:18} {report[name] or 'none'}")
    if "problem" in report:
        return "\n".join([*lines, "", report["problem"], "", "verdict: broken", ""])
    lines += ["", "this machine", *machine_lines(report)]
    lines += ["", "attention runs on", *backend_lines(report["backends"])]
    lines += ["", "mixtures of experts run on", *backend_lines(report["moe_backends"])]
    built = ", ".join(report["families"])
    built = f"{built} compiled in" if built else "none compiled in (build with FLASHMOE_FAMILIES)"
    lines += ["", f"  {'CUDA families':18} {built}"]
    lines += ["", "self-check (forward and backward, against float64: the error nearest its limit)"]
    lines += [check_line(check) for check in report["checks"]]
    verdict = "healthy" if report["healthy"] else "broken: do not trust the results"
    return "\n".join([*lines, "", f"verdict: {verdict}", ""])


def machine_lines(report: dict[str, Any]) -> list[str]:
    cpu = report["cpu"]
    others = [target for target in report["cpu_targets"] if target != report["cpu_target"]]
    lines = [
        f"  CPU                {cpu['name']} ({cpu['architecture']}), {cpu['cores']} cores",
        f"  instructions       {report['cpu_target']}"
        + (f"; also runs {', '.join(others)} (FLASHMOE_CPU_TARGET)" if others else ""),
        f"  threads            {report['threads']} (torch.set_num_threads)",
    ]
    for index, gpu in enumerate(report["gpus"]):
        memory = gpu["memory_bytes"] / 2**30
        lines.append(f"  GPU {index:<14} {gpu['name']}, {gpu['capability']}, {memory:.0f} GiB")
    if not report["gpus"]:
        why = "torch sees none" if report["cuda_of_torch"] else "this torch is built without CUDA"
        lines.append(f"  GPU                none: {why}")
    lines += [f"  {name:18} {value}" for name, value in report["environment"].items()]
    return lines


def backend_lines(backends: list[dict[str, Any]]) -> list[str]:
    """One line for each different answer of the planner, with the devices that share it."""
    devices: dict[str, list[str]] = {}
    for backend in backends:
        forward, backward = (" ".join(backend[d]) for d in ("forward", "backward"))
        if forward:
            text = f"forward {forward}; backward {backward or 'none'}"
        else:
            text = "no: " + next(iter(backend["why_not"].values()))
        devices.setdefault(text, []).append(backend["device"])
    return [f"  {' '.join(names):18} {text}" for text, names in devices.items()]


def check_line(check: dict[str, Any]) -> str:
    name = f"  {check['device']:6} {check['dtype']:5} {check['workload']:12}"
    if "problem" in check:
        return f"{name} FAILED: {check['problem']}"
    mark = "ok" if check["ok"] else "WRONG"
    return f"{name} {mark:6} {check['result']:13} {check['error']:.2e}, limit {check['limit']:.2e}"
