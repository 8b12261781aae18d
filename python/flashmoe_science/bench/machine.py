"""Who and what am I: the machine, the software and the commit that a measurement belongs to."""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
import time
from pathlib import Path
from typing import Any

import torch

GPU_QUERY = (
    "name,driver_version,clocks.sm,clocks.max.sm,clocks.mem,power.draw,power.limit,temperature.gpu"
)


def output_of(*command: str, cwd: Path | None = None) -> str | None:
    """What a program prints, or None where it is missing or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, cwd=cwd)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def cpu_name() -> str:
    """The CPU's model. lscpu knows the Arm part numbers, /proc/cpuinfo only those of x86."""
    listings = (output_of("lscpu"), read_text("/proc/cpuinfo"))
    for listing in listings:
        for line in (listing or "").splitlines():
            name, _, value = line.partition(":")
            if name.strip().lower() == "model name" and value.strip() not in ("", "-"):
                return value.strip()
    return platform.processor() or platform.machine()


def read_text(path: str) -> str | None:
    try:
        return Path(path).read_text()
    except OSError:
        return None


def cpu_clock_mhz() -> float | None:
    """The highest clock the kernel admits to; virtual machines usually hide it."""
    text = read_text("/sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq")
    return int(text) / 1000 if text and text.strip().isdigit() else None


def usable_cores() -> int:
    """Cores this process may run on."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def cpu() -> dict[str, Any]:
    return {
        "name": cpu_name(),
        "architecture": platform.machine(),
        "cores": usable_cores(),
        "max_clock_mhz": cpu_clock_mhz(),
    }


class OtherWork:
    """How many cores other programs, and a host that steals time, kept busy since this was made."""

    def __init__(self) -> None:
        self.start = self._read()

    def cores(self) -> float | None:
        """None where the system does not say."""
        now = self._read()
        if self.start is None or now is None:
            return None
        busy, own, wall = (b - a for a, b in zip(self.start, now, strict=True))
        return max(0.0, busy - own) / wall if wall > 0 else None

    def _read(self) -> tuple[float, float, float] | None:
        """Seconds of all cores busy, of this process, and of the clock."""
        listing = read_text("/proc/stat")
        if not listing or not listing.startswith("cpu "):
            return None
        ticks = [int(word) for word in listing.split("\n")[0].split()[1:9]]
        idle = ticks[3] + ticks[4]  # user nice system idle iowait irq softirq steal
        busy = (sum(ticks) - idle) / os.sysconf("SC_CLK_TCK")
        return busy, time.process_time(), time.monotonic()


def gpus() -> list[dict[str, Any]]:
    """The CUDA devices torch sees."""
    if not torch.cuda.is_available():
        return []
    found = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        found.append(
            {
                "name": properties.name,
                "capability": f"sm_{properties.major}{properties.minor}",
                "memory_bytes": properties.total_memory,
                "multiprocessors": properties.multi_processor_count,
            }
        )
    return found


def gpu_state(device: torch.device) -> dict[str, str] | None:
    """Clocks, power and temperature of a GPU right now, from nvidia-smi."""
    # By bus address: CUDA_VISIBLE_DEVICES renumbers torch's devices but not nvidia-smi's.
    properties = torch.cuda.get_device_properties(device)
    address = "{:08x}:{:02x}:{:02x}.0".format(
        getattr(properties, "pci_domain_id", 0),
        getattr(properties, "pci_bus_id", 0),
        getattr(properties, "pci_device_id", 0),
    )
    query = ["nvidia-smi", f"--query-gpu={GPU_QUERY}", "--format=csv,noheader"]
    text = output_of(*query, f"--id={address}")
    if not text:
        return None
    values = [value.strip() for value in text.splitlines()[0].split(",")]
    return dict(zip(GPU_QUERY.split(","), values, strict=False))


def versions() -> dict[str, str | None]:
    return {
        "flashmoe_science": build_info()["version"],
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }


def build_info() -> dict[str, Any]:
    """What the compiled library says about itself."""
    return json.loads(torch.ops.flashmoe.build_info())


def checkout() -> Path | None:
    """The root of the git checkout this package runs from; None when it is installed."""
    root = Path(__file__).resolve().parents[3]
    ours = (root / "python" / "flashmoe_science" / "bench" / "machine.py").exists()
    return root if ours and (root / ".git").exists() else None


def commit() -> dict[str, Any]:
    """The commit measured, and whether the tree had other changes.

    FLASHMOE_COMMIT says it ("1234abc", "1234abc-dirty") where files came without their history.
    """
    if given := os.environ.get("FLASHMOE_COMMIT"):
        return {"commit": given.removesuffix("-dirty"), "dirty": given.endswith("-dirty")}
    root = checkout()
    if root is None:
        return {"commit": None, "dirty": None}
    status = output_of("git", "status", "--porcelain", cwd=root)
    return {
        "commit": output_of("git", "rev-parse", "--verify", "-q", "HEAD", cwd=root),
        "dirty": None if status is None else bool(status),
    }


def describe(device: torch.device) -> dict[str, Any]:
    """Everything a reader of a number may ask about where it came from."""
    info = build_info()
    about = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        **commit(),
        "device": device.type,
        "cpu": cpu(),
        "threads": torch.get_num_threads(),
        "cpu_target": info["cpu_target"],
        "families": info["families"],
        "forced_family": os.environ.get("FLASHMOE_FAMILY") or None,
        "versions": versions(),
    }
    if device.type == "cuda":
        about["gpu"] = gpus()[device.index or 0]
        about["gpu_state_before"] = gpu_state(device)
    return about


def title(about: dict[str, Any]) -> str:
    """The machine in a few words, for the head of a table or plot."""
    if about["device"] == "cuda":
        forced = about.get("forced_family")
        return about["gpu"]["name"] + (f", FLASHMOE_FAMILY={forced}" if forced else "")
    threads = about["threads"]
    return f"{about['cpu']['name']}, {threads} thread{'s' if threads != 1 else ''}"
