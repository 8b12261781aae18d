"""What the compiler made of every CUDA kernel: registers, shared memory, stack, spills, occupancy.

    python3 tools/kernel_report.py [FATBINS]

Reads the compiled fatbins with cuobjdump (of a CUDA toolkit, or `pip install
nvidia-cuda-cuobjdump`), and threads and dynamic shared memory from the built library; needs no GPU.
The tests of the images (tests/python/test_images.py, test_machine_code.py) use its functions.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "release"
sys.path.insert(0, str(ROOT / "cmake"))

import compile_image  # noqa: E402


@dataclass(frozen=True)
class Chip:
    """Limits of one SM: the CUDA programming guide's table of compute capabilities."""

    shared_bytes: int  # of an SM
    block_shared_bytes: int  # that one block may have
    reserved_shared_bytes: int  # of each block, taken by the driver
    threads: int
    blocks: int
    registers: int = 65_536


KB = 1024
CHIPS = {
    "sm_75": Chip(64 * KB, 64 * KB, 0, 1024, 16),
    "sm_80": Chip(164 * KB, 163 * KB, KB, 2048, 32),
    "sm_86": Chip(100 * KB, 99 * KB, KB, 1536, 16),
    "sm_87": Chip(164 * KB, 163 * KB, KB, 1536, 16),
    "sm_89": Chip(100 * KB, 99 * KB, KB, 1536, 24),
    "sm_90": Chip(228 * KB, 227 * KB, KB, 2048, 32),
    "sm_100": Chip(228 * KB, 227 * KB, KB, 2048, 32),
    "sm_120": Chip(100 * KB, 99 * KB, KB, 1536, 24),
}


@dataclass(frozen=True)
class Usage:
    """One kernel as compiled for one chip. `shared` is what the code itself declares, not what a
    launch asks for; spills are None where the compiler's log is not at hand."""

    kernel: str
    image: str
    chip: str  # "sm_80", "sm_90a"
    registers: int
    stack: int
    shared: int
    local: int
    spills: int | None  # bytes stored and loaded


def find_cuobjdump() -> Path | None:
    """On the PATH, in a toolkit, or among the packages of the running Python."""
    toolkits = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    folders = [str(Path(toolkit) / "bin") for toolkit in toolkits if toolkit]
    for key in ("purelib", "platlib"):
        packages = Path(sysconfig.get_path(key)) / "nvidia"
        folders += [str(folder) for folder in sorted(packages.glob("*/bin"), reverse=True)]
    found = shutil.which("cuobjdump", path=os.pathsep.join([os.environ.get("PATH", ""), *folders]))
    return Path(found) if found else None


def cuobjdump(image: Path, *options: str) -> str:
    tool = find_cuobjdump()
    if tool is None:
        raise FileNotFoundError("cuobjdump is not installed: pip install nvidia-cuda-cuobjdump")
    done = subprocess.run([tool, *options, image], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"cuobjdump {' '.join(options)} {image}: {done.stderr.strip()}")
    return done.stdout


def fatbin_folder(build: Path = BUILD) -> Path:
    """Where the fatbins of this build are: compiled by it, or given to it (FLASHMOE_FATBINS)."""
    settings = build / "CMakeCache.txt"
    given = None
    if settings.exists():
        given = re.search(r"^FLASHMOE_FATBINS:\w+=(.+)$", settings.read_text(), re.M)
    return ROOT / given[1] if given else build / "fatbins"


def fatbins(folder: Path | None = None) -> list[Path]:
    return sorted((folder or fatbin_folder()).glob("*.fatbin"))


def readable(symbol: str) -> str:
    """_Z23sm80_attention_fwd_bf16ILi64ELi128ELi128EEv... -> sm80_attention_fwd_bf16_d64_128x128,
    _Z16sm80_moe_up_bf16ILi128ELi128EEv... -> sm80_moe_up_bf16_128x128"""
    tile = re.fullmatch(r"_Z\d+(\w+?)I(?:Li(\d+)E)?Li(\d+)ELi(\d+)EE\w+", symbol)
    if not tile:
        return symbol
    name, head_dim, rows, columns = tile.groups()
    return f"{name}{f'_d{head_dim}' if head_dim else ''}_{rows}x{columns}"


@cache
def chips(image: Path) -> tuple[set[str], set[str]]:
    """The chips an image has machine code for, and those it has PTX for."""
    machine_code = re.findall(r"^ELF file.*\.(sm_\w+)\.cubin$", cuobjdump(image, "-lelf"), re.M)
    # Without PTX cuobjdump says so on stderr and returns an error or not, depending on its version.
    try:
        ptx = re.findall(r"^PTX file.*\.(sm_\w+)\.ptx$", cuobjdump(image, "-lptx"), re.M)
    except RuntimeError:
        ptx = []
    return set(machine_code), set(ptx)


def spills(image: Path) -> dict[tuple[str, str], int]:
    """From the log of `ptxas -v` beside the image: bytes spilled by (kernel, chip)."""
    log = image.with_suffix(".log")
    if not log.exists():
        return {}
    entry = (
        r"Compiling entry function '(\w+)' for '(\w+)'"
        r"(?:(?!Compiling entry).)*?(\d+) bytes spill stores, (\d+) bytes spill loads"
    )
    found = re.findall(entry, log.read_text(), re.DOTALL)
    return {
        (readable(symbol), chip): int(stores) + int(loads) for symbol, chip, stores, loads in found
    }


def machine_code(image: Path, *options: str) -> Iterator[tuple[str, str]]:
    """(chip, what cuobjdump says about it) for each chip the image has machine code for."""
    sections = re.split(r"^Fatbin (?=elf code|ptx code)", cuobjdump(image, *options), flags=re.M)
    for section in sections:
        chip = re.search(r"^arch = (sm_\w+)$", section, re.M)
        if section.startswith("elf code") and chip:
            yield chip[1], section


@cache
def usages(image: Path) -> list[Usage]:
    """Every kernel of an image, for every chip it has machine code for."""
    spilled = spills(image)
    line = r"Function (\w+):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)"
    return [
        Usage(
            kernel, image.stem, chip, *(int(n) for n in numbers), spilled.get((kernel, chip), None)
        )
        for chip, section in machine_code(image, "--dump-resource-usage")
        for symbol, *numbers in re.findall(line, section)
        for kernel in [readable(symbol)]
    ]


Opcodes = dict[tuple[str, str], Counter[str]]


@cache
def opcodes(image: Path) -> Opcodes:
    """How often each (kernel, chip) has which instruction, without operands: HMMA.16816.F32, ...

    Disassembling takes a second of processor time an image: the counts are kept beside the images
    in the user's cache, by the image's bytes.
    """
    digest = hashlib.sha256(b"1\n" + image.read_bytes())  # 1: what is counted, and how
    kept = compile_image.cache_folder() / f"{digest.hexdigest()}-opcodes{compile_image.SUFFIX}"
    try:
        return {tuple(key.split()): Counter(n) for key, n in json.loads(kept.read_text()).items()}
    except (OSError, ValueError):
        found = count_opcodes(image)
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", suffix=".tmp", dir=kept.parent, delete=False) as file:
            json.dump({" ".join(key): counts for key, counts in found.items()}, file)
        os.replace(file.name, kept)
    except OSError as error:
        print(f"flashmoe: the image cache cannot be written: {error}", file=sys.stderr)
    return found


def count_opcodes(image: Path) -> Opcodes:
    found = {}
    for chip, section in machine_code(image, "-sass"):
        for function in re.split(r"^\s+Function : ", section, flags=re.M)[1:]:
            kernel = readable(function.split(None, 1)[0])
            # "        /*0010*/         @!P0 LDGSTS.E.BYPASS.128 [R1], ... ;"
            code = re.findall(r"^\s+/\*\w+\*/\s+(?:@!?\w+\s+)?([A-Z][\w.]*)", function, re.M)
            found[kernel, chip] = Counter(code)
    return found


@cache
def ptx(image: Path) -> str:
    """The PTX of an image."""
    return cuobjdump(image, "-ptx")


@cache
def symbols(image: Path) -> frozenset[str]:
    """The names in the symbol tables of an image's machine code, of all chips."""
    # "STT_FUNC         STB_GLOBAL STO_ENTRY      sm80_attention_fwd_fp16_d64_128x128"
    table = cuobjdump(image, "-symbols")
    return frozenset(re.findall(r"^STT_\w+ .*?(\S+)$", table, re.M))


def read_all(images: list[Path]) -> None:
    """Everything above for these images, several at once: disassembling takes a second each."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for read in (opcodes, usages, chips, symbols):
            list(pool.map(read, images))


def registers_of_block(registers: int, threads: int) -> int:
    """What a block really takes: whole warps, each in units of 256."""
    per_warp = -(-registers * 32 // 256) * 256
    return per_warp * -(-threads // 32)


def blocks_per_sm(chip: str, registers: int, threads: int, shared_bytes: int) -> tuple[int, str]:
    """How many blocks an SM holds at once, and what limits them."""
    limits = CHIPS[chip.rstrip("af")]
    shared = shared_bytes + limits.reserved_shared_bytes
    counts = {
        "registers": limits.registers // registers_of_block(registers, threads),
        "shared": limits.shared_bytes // shared if shared else limits.blocks,
        "threads": limits.threads // threads,
        "blocks": limits.blocks,
    }
    by = min(counts, key=lambda name: counts[name])
    return counts[by], by


def catalogue() -> dict[str, dict[str, Any]]:
    """The kernels that the built library knows, by name."""
    sys.path.insert(0, str(ROOT / "python"))
    import torch

    import flashmoe_science  # noqa: F401  (registers the ops)

    info = json.loads(torch.ops.flashmoe.build_info())
    return {kernel["name"]: kernel for kernel in info.get("kernels", [])}


def rows(folder: Path | None = None) -> list[list[str]]:
    known = catalogue()
    table = []
    images = fatbins(folder)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(usages, images))
    for image in images:
        for use in sorted(usages(image), key=lambda use: (use.chip, use.kernel)):
            plan = known.get(use.kernel)
            launch = ["?", "?", "?"]  # compiled, but not in the library's catalogue
            if plan:
                threads, shared = plan["threads"], plan["shared_bytes"]
                count, by = blocks_per_sm(use.chip, use.registers, threads, shared)
                launch = [str(threads), f"{shared / KB:g} KB", f"{count} ({by})"]
            spilled = "?" if use.spills is None else str(use.spills)
            code = [use.kernel, use.chip, str(use.registers), str(use.stack), spilled]
            table.append([*code, *launch])
    return table


HEADER = ["kernel", "chip", "registers", "stack", "spilled", "threads", "shared", "CTAs per SM"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("fatbins", nargs="?", type=Path, help="folder (default: the build's)")
    folder = parser.parse_args().fatbins or fatbin_folder()
    if not fatbins(folder):
        sys.exit(f"no fatbins in {folder}: run `make build` where there is an nvcc")
    try:
        table = [HEADER, *rows(folder)]
    except FileNotFoundError as error:
        sys.exit(str(error))
    widths = [max(len(row[i]) for row in table) for i in range(len(HEADER))]
    for row in table:
        left = [cell.ljust(width) for cell, width in zip(row[:2], widths[:2], strict=True)]
        right = [cell.rjust(width) for cell, width in zip(row[2:], widths[2:], strict=True)]
        print("  ".join([*left, *right]))


if __name__ == "__main__":
    main()
