"""The compiled kernels: what is in the fatbins, what it costs, and that plans name what is there.

Everything here reads files or asks the planner: no GPU. Written over families, so that a new one
only adds its line to the tables below.
"""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import torch

import flashmoe_science as fm

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import kernel_report as report  # noqa: E402
from kernel_report import CHIPS, KB  # noqa: E402


@dataclass(frozen=True)
class Family:
    machine_code: set[str]
    ptx: set[str]
    dtypes: set[str]
    instructions: tuple[str, ...]  # that each kernel with products has
    foreign: str  # a pattern of instructions that none of its kernels has


FAMILIES = {
    "sm75": Family(
        {"sm_75"}, {"sm_75"}, {"fp16"}, ("HMMA.1688", "LDSM"), r"HMMA\.16816|LDGSTS|F32x\d"
    ),
    "sm80": Family(
        {"sm_80", "sm_90"},
        {"sm_80"},
        {"fp16", "bf16"},
        ("HMMA.16816", "LDSM", "LDGSTS.E.BYPASS.128"),
        r"HMMA\.1688|HGMMA|UTMA",
    ),
    "sm90": Family({"sm_90a"}, set(), {"fp16", "bf16"}, ("HGMMA", "UTMALDG"), r"HMMA"),
}
WITH_PRODUCTS = {"attention_fwd", "attention_bwd"}
# What several blocks do to the same memory in any order: only where grad_query is added up.
SHARED_SUMS = r"(?:RED|ATOM)[GS]?\."
TORCH_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
# What the other dtype looks like: in the name of a symbol, in PTX, in machine code. A product of
# fp16 numbers has no word for its type in machine code; one of bf16 numbers has. HFMA2.MMA without
# a type only loads constants.
FOREIGN = {
    "fp16": (r"bf16|BF16|bfloat", r"\.bf16", r"BF16"),
    "bf16": (
        r"fp16|FP16|float16(?<!bfloat16)",
        r"\.f16(?:x2)?\b",
        r"\.F16|\bH(?:ADD|MUL|SETP?|MNMX)2?\b(?!.*BF16)",
    ),
}

IMAGES = report.fatbins()
every_image = pytest.mark.parametrize("image", IMAGES, ids=lambda image: image.stem)

INFO = json.loads(torch.ops.flashmoe.build_info())
CATALOGUE = {kernel["name"]: kernel for kernel in INFO.get("kernels", [])}

pytestmark = pytest.mark.skipif(
    not IMAGES or not CATALOGUE, reason="this build has no CUDA kernels, or no fatbins beside it"
)
needs_cuobjdump = pytest.mark.skipif(
    report.find_cuobjdump() is None,
    reason="cuobjdump is not installed: pip install nvidia-cuda-cuobjdump",
)


@pytest.fixture(scope="module", autouse=True)
def read_images(request):
    """All at once and only where they are needed: most of the time of this file."""
    wanted = any("image" in getattr(item, "fixturenames", ()) for item in request.session.items)
    if wanted and CATALOGUE and report.find_cuobjdump():
        report.read_all(IMAGES)


def family_of(image: Path) -> str:
    """sm80_attention_fwd_fp16_d64 -> sm80"""
    return image.stem.split("_")[0]


def dtype_of(image: Path) -> str:
    """sm80_attention_fwd_fp16_d64 -> fp16"""
    return re.search(r"_([a-z]+16)(?:_d\d+)?$", image.stem)[1]


@dataclass(frozen=True)
class Listed:
    """A kernel as the families' lists have it."""

    image: str
    role: str
    tile: tuple[int, int, int] = (0, 0, 0)  # head dim, queries, keys
    warps: int = 4
    ctas: int = 0  # that an SM's registers are to hold


@cache
def listed_kernels() -> dict[str, Listed]:
    """What the rows of each variants.h stand for, by name."""
    found = {}
    for path in sorted((ROOT / "src/cuda").glob("*/variants.h")):
        family = path.parent.name
        text = path.read_text().replace("\\\n", " ")
        lists = re.findall(r"^#define FLASHMOE_\w+_ATTENTION_(FWD|BWD)_\d+\(X\)(.*)$", text, re.M)
        assert lists, path
        for dtype in FAMILIES[family].dtypes:
            for direction, body in lists:
                for row in re.findall(r"X\(([\d, ]+)\)", body):
                    d, q, k, warps, *others = (int(number) for number in row.split(","))
                    # fwd: q_steps, stages, ctas; bwd: stages, ctas, and who shares out what
                    ctas = others[2] if direction == "FWD" else others[1]
                    kind = f"attention_{direction.lower()}"
                    tile = f"{dtype}_d{d}_{q}x{k}"
                    image = f"{family}_{kind}_{dtype}_d{d}"
                    listed = Listed(image, kind, (d, q, k), warps, ctas)
                    found[f"{family}_{kind}_{tile}"] = listed
                    if direction == "BWD":
                        finish = Listed(image, f"{kind}_finish", (d, q, k), warps, ctas)
                        found[f"{family}_{kind}_finish_{tile}"] = finish
            for role in ("attention_combine", "attention_bwd_prepare"):
                image = f"{family}_attention_rows_{dtype}"
                found[f"{family}_{role}_{dtype}"] = Listed(image, role)
    return {name: kernel for name, kernel in found.items() if name[:4] in INFO["families"]}


def kernels_of(image: Path) -> set[str]:
    return {name for name, kernel in listed_kernels().items() if kernel.image == image.stem}


# What was compiled.


def test_the_images_are_those_of_the_lists():
    """One for each family, pass, dtype and head dim, and one for the kernels that go by rows."""
    assert {kernel.image for kernel in listed_kernels().values()} == {x.stem for x in IMAGES}
    sources = {f"{path.parent.name}_{path.stem}" for path in (ROOT / "src/cuda").glob("sm*/*.cu")}
    assert {re.sub(r"_d\d+$", "", image.stem) for image in IMAGES} == sources
    assert set(FAMILIES) >= set(INFO["families"]) == {family_of(image) for image in IMAGES}


@needs_cuobjdump
@every_image
def test_an_image_has_code_for_the_chips_of_its_family(image):
    family = FAMILIES[family_of(image)]
    assert report.chips(image) == (family.machine_code, family.ptx)


@needs_cuobjdump
@every_image
def test_an_image_has_the_kernels_of_its_list(image):
    compiled: dict[str, set[str]] = {}
    for use in report.usages(image):
        compiled.setdefault(use.chip, set()).add(use.kernel)
    wanted = kernels_of(image)
    assert wanted
    assert compiled == dict.fromkeys(FAMILIES[family_of(image)].machine_code, wanted)
    if FAMILIES[family_of(image)].ptx:
        entries = re.findall(r"^\.visible \.entry (\w+)\(", report.ptx(image), re.M)
        assert set(entries) == wanted


def test_the_catalogue_has_the_kernels_of_the_lists():
    assert set(CATALOGUE) == set(listed_kernels())
    for name, listed in listed_kernels().items():
        known = CATALOGUE[name]
        assert (known["image"], known["role"]) == (listed.image, listed.role)
        assert (known["head_dim"], known["block_q"], known["block_k"]) == listed.tile
        assert known["threads"] == listed.warps * 32
        assert known["family"] == name.split("_")[0]
        assert known["dtype"] == str(TORCH_DTYPES[dtype_of(Path(known["image"]))])[6:]


def test_every_tile_has_all_that_its_pass_needs():
    for kernel in CATALOGUE.values():
        family, dtype = kernel["image"].split("_")[0], dtype_of(Path(kernel["image"]))
        if kernel["role"] == "attention_fwd":
            assert f"{family}_attention_combine_{dtype}" in CATALOGUE
        elif kernel["role"] == "attention_bwd":
            assert f"{family}_attention_bwd_prepare_{dtype}" in CATALOGUE
            assert kernel["name"].replace("_bwd_", "_bwd_finish_") in CATALOGUE


def test_the_library_holds_these_images():
    library = (ROOT / "python/flashmoe_science/lib/libflashmoe.so").read_bytes()
    for image in IMAGES:
        assert image.read_bytes() in library, f"{image.name} is newer than the library: make build"


@needs_cuobjdump
@every_image
def test_no_dtype_in_the_image_of_another(image):
    """bf16 in an sm_75 image is the case that matters most: that chip has none."""
    dtype = dtype_of(image)
    assert dtype in FAMILIES[family_of(image)].dtypes
    in_names, in_ptx, in_code = FOREIGN[dtype]
    names = report.symbols(image)
    assert names >= kernels_of(image)
    assert not [name for name in names if re.search(in_names, name)]
    for (kernel, chip), opcodes in report.opcodes(image).items():
        strangers = {opcode for opcode in opcodes if re.search(in_code, opcode)}
        assert not strangers, f"{kernel} for {chip}"
        products = {opcode for opcode in opcodes if opcode.startswith(("HMMA", "HGMMA"))}
        assert all(("BF16" in opcode) == (dtype == "bf16") for opcode in products)
    if FAMILIES[family_of(image)].ptx:
        assert ".entry" in report.ptx(image)
        assert not re.search(in_ptx, report.ptx(image))


def test_a_foreign_dtype_would_be_found():
    for dtype, (names, ptx, code) in {
        "fp16": ("a_bf16_d64", "cvt.rn.bf16x2.f32", "HMMA.16816.F32.BF16"),
        "bf16": ("a_fp16_d64", "cvt.rn.f16x2.f32", "F2FP.F16.F32.PACK_AB"),
    }.items():
        for pattern, text in zip(FOREIGN[dtype], (names, ptx, code), strict=True):
            assert re.search(pattern, text)
    assert re.search(FOREIGN["bf16"][2], "HADD2.F32"), "how fp16 becomes fp32"
    own = ("a_bf16_d64", "mma.f32.bf16.bf16.f32", "HMMA.16816.F32.BF16")
    for pattern, text in zip(FOREIGN["bf16"], own, strict=True):
        assert not re.search(pattern, text)
    own = ("a_fp16_d64", "mma.f32.f16.f16.f32", "F2FP.F16.F32.PACK_AB")
    for pattern, text in zip(FOREIGN["fp16"], own, strict=True):
        assert not re.search(pattern, text)


# What it costs.


@needs_cuobjdump
@every_image
def test_kernels_keep_everything_in_registers(image):
    """A stack frame or a spill in the inner loop costs more than any tuning brings."""
    framed = [use for use in report.usages(image) if use.stack or use.local or use.spills]
    assert not framed
    for (kernel, chip), opcodes in report.opcodes(image).items():
        memory = {opcode for opcode in opcodes if re.match(r"(?:LDL|STL)\b", opcode)}
        assert not memory, f"{kernel} for {chip}"


def strange_code(kernel: str, chip: str, opcodes: Counter[str]) -> list[str]:
    """What a kernel's instructions lack, or have and should not."""
    role, family = CATALOGUE[kernel]["role"], FAMILIES[CATALOGUE[kernel]["family"]]

    def some(pattern: str) -> list[str]:
        return [opcode for opcode in opcodes if re.match(pattern, opcode)]

    found = [f"has {opcode}" for opcode in some(rf".*(?:{family.foreign})")]
    wanted = [re.escape(prefix) for prefix in family.instructions if role in WITH_PRODUCTS]
    if role != "attention_combine":  # which writes single numbers
        wanted.append(r"STG\.E\.128")
    if role == "attention_bwd":  # four numbers at once from Hopper on
        wanted.append(r"REDG?\.E\.ADD\.F32" + (r"x4\b" if chip == "sm_90" else r"\."))
    else:  # everything else has the same bits in every run
        found += [f"has {opcode}" for opcode in some(SHARED_SUMS)]
        if role != "attention_fwd":
            found += [f"has {opcode}" for opcode in some(r"HMMA|HGMMA")]
    return found + [f"has no {pattern}" for pattern in wanted if not some(pattern)]


@needs_cuobjdump
@every_image
def test_kernels_use_the_instructions_of_their_family(image):
    for (kernel, chip), opcodes in report.opcodes(image).items():
        assert not strange_code(kernel, chip, opcodes), f"{kernel} for {chip}"


def test_strange_code_would_be_found():
    def codes(text: str) -> Counter[str]:
        return Counter(text.split())

    kernels = {(k["family"], k["role"]): name for name, k in CATALOGUE.items()}
    good = "HMMA.16816.F32 LDSM.16.M88.4 LDGSTS.E.BYPASS.128.ZFILL STG.E.128 BAR.RED.OR"
    if "sm80" in INFO["families"]:
        forward, backward = (kernels["sm80", f"attention_{x}"] for x in ("fwd", "bwd"))
        assert not strange_code(forward, "sm_80", codes(good))
        assert strange_code(forward, "sm_80", codes(good.replace("16816", "1688")))
        assert strange_code(forward, "sm_80", codes(good.replace("LDGSTS", "LDG")))
        assert strange_code(forward, "sm_80", codes(good + " RED.E.ADD.F32.FTZ.RN.STRONG.GPU"))
        assert strange_code(forward, "sm_90", codes(good + " ATOMG.E.ADD.F32.FTZ.RN.STRONG.GPU"))
        single, four = "RED.E.ADD.F32.FTZ.RN", "REDG.E.ADD.F32x4.FTZ.RN"
        assert strange_code(backward, "sm_80", codes(good))
        assert not strange_code(backward, "sm_80", codes(f"{good} {single}"))
        assert strange_code(backward, "sm_90", codes(f"{good} {single}"))
        assert not strange_code(backward, "sm_90", codes(f"{good} {four}"))
    if "sm75" in INFO["families"]:
        forward = kernels["sm75", "attention_fwd"]
        assert strange_code(forward, "sm_75", codes(good))
        assert not strange_code(forward, "sm_75", codes("HMMA.1688.F32 LDSM.16 STG.E.128.SYS"))


@needs_cuobjdump
@every_image
def test_a_block_fits_an_sm(image):
    for use in report.usages(image):
        kernel = CATALOGUE[use.kernel]
        assert use.registers <= 255
        blocks, _ = report.blocks_per_sm(
            use.chip, use.registers, kernel["threads"], kernel["shared_bytes"]
        )
        # A family's list may have tiles for its largest chip only; plans pass them over elsewhere.
        fits = kernel["shared_bytes"] <= CHIPS[use.chip.rstrip("af")].block_shared_bytes
        assert blocks >= 1 or not fits, use
        # Shared memory that the code declares itself comes on top of what a launch asks for;
        # from sm_90 on cuobjdump counts the driver's own kilobyte with it.
        assert use.shared <= CHIPS[use.chip.rstrip("af")].reserved_shared_bytes


@needs_cuobjdump
@every_image
def test_an_sm_holds_as_many_blocks_as_the_list_promises(image):
    """By registers and threads. Splitting keys counts on it."""
    for use in report.usages(image):
        promised = listed_kernels()[use.kernel].ctas
        held, _ = report.blocks_per_sm(use.chip, use.registers, CATALOGUE[use.kernel]["threads"], 0)
        assert held >= promised, use


def test_every_chip_has_a_tile_of_every_head_dim():
    """Whose shared memory it has, from the smallest: 64 KB on Turing, 99 KB on 8.6, 8.9, 12.0."""
    smallest: dict[tuple, int] = {}
    for kernel in CATALOGUE.values():
        if kernel["head_dim"]:
            key = tuple(kernel[name] for name in ("family", "role", "dtype", "head_dim"))
            smallest[key] = min(smallest.get(key, 2**30), kernel["shared_bytes"])
    limits = {"sm75": CHIPS["sm_75"], "sm80": CHIPS["sm_86"], "sm90": CHIPS["sm_90"]}
    for (family, *rest), shared in smallest.items():
        assert shared <= limits[family].block_shared_bytes, (family, *rest)


@needs_cuobjdump
def test_the_report_has_every_kernel():
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools/kernel_report.py")], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 1 + sum(len(report.usages(image)) for image in IMAGES)
    assert {line.split()[0] for line in lines[1:]} == set(CATALOGUE)
    assert "?" not in done.stdout or not IMAGES[0].with_suffix(".log").exists()


@pytest.mark.parametrize(
    "chip, registers, threads, shared, count, by",
    [
        ("sm_80", 255, 128, 96 * KB, 1, "shared"),
        ("sm_90", 255, 128, 96 * KB, 2, "registers"),
        ("sm_90a", 168, 384, 200 * KB, 1, "registers"),
        ("sm_75", 128, 256, 32 * KB, 2, "registers"),
        ("sm_80", 32, 1024, 0, 2, "registers"),
        ("sm_86", 40, 512, 0, 3, "registers"),
        ("sm_80", 16, 32, 0, 32, "blocks"),
    ],
)
def test_occupancy(chip, registers, threads, shared, count, by):
    """By hand, from the occupancy calculator's rules; of equal limits the first is named."""
    assert report.blocks_per_sm(chip, registers, threads, shared) == (count, by)


def test_sizes():
    """The wheel of all families stays below 100 MB, compressed; one image is far from that."""
    assert all(image.stat().st_size < 8e6 for image in IMAGES)
    assert sum(image.stat().st_size for image in IMAGES) < 80e6
    assert (ROOT / "python/flashmoe_science/lib/libflashmoe.so").stat().st_size < 100e6


def test_compile_times():
    """Under 60 s for one translation unit, as ninja measured the last time it was compiled."""
    log = ROOT / "build/release/.ninja_log"
    if not log.exists():
        pytest.skip("no build in build/release")
    seconds = {}
    for line in log.read_text().splitlines()[1:]:
        start, end, _, output, _ = line.split("\t")
        if output.endswith(".fatbin"):
            seconds[Path(output).name] = (int(end) - int(start)) / 1000
    if not seconds:
        pytest.skip("the fatbins were compiled elsewhere")
    assert max(seconds.values()) < 60, seconds


# What plans say. tests/cpp/test_plan.cc asks for many more problems.

PLANNED = ("sm_75", "sm_80", "sm_86", "sm_87", "sm_89", "sm_90", "sm_100", "sm_120")
HEAD_DIMS = (1, 8, 16, 24, 32, 33, 48, 64, 80, 96, 128, 160, 192, 250, 256)
SHAPE = {"batch": 3, "heads_q": 8, "heads_k": 2, "n": 300, "m": 517}


def spec(*shape: int, dtype=torch.float16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def problem(dtype="fp16", d=64, dv=0, **sizes: int) -> list[torch.Tensor]:
    batch, heads_q, heads_k, n, m = (SHAPE | sizes).values()
    q, k, v = (batch, heads_q, n, d), (batch, heads_k, m, d), (batch, heads_k, m, dv or d)
    return [spec(*shape, dtype=TORCH_DTYPES[dtype]) for shape in (q, k, v)]


def capability(chip: str) -> int:
    return int(re.sub(r"\D", "", chip))


def can_run(family: Family, chip: str) -> bool:
    """Machine code runs on its own generation from its own chip on, with an "a" on that chip only;
    PTX on everything newer."""
    here = capability(chip)
    for code in family.machine_code:
        there = capability(code)
        if code.endswith("a"):
            if here == there:
                return True
        elif here // 10 == there // 10 and here >= there:
            return True
    return any(here >= capability(code) for code in family.ptx)


def told(text: str) -> dict[str, object]:
    """A plan from its explanation."""
    numbers = re.search(
        r"launch +grid (\d+) x (\d+) x (\d+), (\d+) threads, (\d+) bytes of shared memory", text
    )
    tile = re.search(r"tile +(\d+) queries x (\d+) keys", text)
    splits = re.search(r"^ +splits +the keys, in (\d+)$", text, re.M)
    return {
        "kernel": re.search(r"^ +kernel +(\S+)$", text, re.M)[1],
        "before": re.findall(r"^ +before +(\S+)$", text, re.M),
        "after": re.findall(r"^ +after +(\S+)$", text, re.M),
        "splits": int(splits[1]) if splits else 1,
        "grid": tuple(int(x) for x in numbers.groups()[:3]) if numbers else None,
        "threads": int(numbers[4]) if numbers else None,
        "shared_bytes": int(numbers[5]) if numbers else None,
        "block_q": int(tile[1]),
        "block_k": int(tile[2]),
    }


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("dtype", TORCH_DTYPES)
@pytest.mark.parametrize("chip", PLANNED)
def test_plans_name_kernels_that_exist_and_fit(chip, dtype, backward):
    families = [FAMILIES[name] for name in INFO["families"]]
    if not any(dtype in family.dtypes and can_run(family, chip) for family in families):
        with pytest.raises(RuntimeError, match=rf"(?is){chip}.*cpu"):
            fm.explain(*problem(dtype), device=chip)
        return
    for d in HEAD_DIMS:
        plan = told(fm.explain(*problem(dtype, d), backward=backward, device=chip))
        kernel = CATALOGUE[plan["kernel"]]
        assert can_run(FAMILIES[kernel["family"]], chip)
        assert kernel["role"] == ("attention_bwd" if backward else "attention_fwd")
        assert kernel["dtype"] == str(TORCH_DTYPES[dtype]).removeprefix("torch.")
        buckets = {k["head_dim"] for k in CATALOGUE.values()}
        assert kernel["head_dim"] == min(bucket for bucket in buckets if bucket >= d)
        for name in ("threads", "shared_bytes", "block_q", "block_k"):
            assert plan[name] == kernel[name], name
        assert plan["shared_bytes"] <= CHIPS[chip].block_shared_bytes
        family = kernel["family"]
        if backward:
            assert plan["before"] == [f"{family}_attention_bwd_prepare_{dtype}"]
            assert plan["after"] == [plan["kernel"].replace("_bwd_", "_bwd_finish_")]
            blocks, heads = math.ceil(SHAPE["m"] / kernel["block_k"]), SHAPE["heads_k"]
        else:
            combine = [f"{family}_attention_combine_{dtype}"]
            assert plan["before"] == []
            assert plan["after"] == (combine if plan["splits"] > 1 else [])
            blocks = math.ceil(SHAPE["n"] / kernel["block_q"]) * plan["splits"]
            heads = SHAPE["heads_q"]
        assert {*plan["before"], *plan["after"]} <= set(CATALOGUE)
        assert plan["grid"] == (blocks, heads, SHAPE["batch"])


@pytest.mark.parametrize("chip", PLANNED)
def test_few_queries_over_many_keys_are_split(chip):
    few = {"n": 1, "m": 100_000, "batch": 1}
    text = fm.explain(*problem(d=128, **few), device=chip)
    plan = told(text)
    assert plan["splits"] > 8
    assert plan["grid"] == (plan["splits"], SHAPE["heads_k"], 1), "a group's heads are rows"
    assert plan["after"] == [f"{plan['kernel'].split('_')[0]}_attention_combine_fp16"]
    assert CATALOGUE[plan["after"][0]]["role"] == "attention_combine"
    assert f"split in {plan['splits']}" in text and "\n  bitwise reproducible\n" in text
    for sizes in ({**few, "batch": 512}, {**few, "m": 100}, {"n": 4096, "m": 4096}):
        plan = told(fm.explain(*problem(d=128, **sizes), device=chip))
        assert plan["splits"] == 1 and not plan["after"], sizes


def test_a_backward_pass_says_whether_it_is_reproducible():
    for chip in ("sm_75", "sm_80", "sm_90"):
        text = fm.explain(*problem(), backward=True, device=chip)
        assert "\n  not bitwise reproducible" in text and "deterministic" in text
        again = fm.explain(*problem(), backward=True, deterministic=True, device=chip)
        assert "\n  bitwise reproducible\n" in again
        assert told(text) == told(again), "the same kernels, in turns"


def test_a_tile_that_does_not_fit_is_passed_over_by_name():
    """The backward pass of head dim 256 has a tile for chips with more than 164 KB."""
    large = problem(d=256, n=4096)
    on_h100, on_a100 = (
        fm.explain(*large, backward=True, device=chip) for chip in ("sm_90", "sm_80")
    )
    name = told(on_h100)["kernel"]
    assert CATALOGUE[name]["shared_bytes"] > CHIPS["sm_80"].block_shared_bytes
    assert told(on_a100)["kernel"] != name
    reason = f"needs {CATALOGUE[name]['shared_bytes']} bytes of shared memory, sm_80 has"
    assert f"{name}: passed over: {reason}" in on_a100
    short = fm.explain(*problem(d=128, n=40), device="sm_90")
    assert re.search(r"128x64: passed over: 40 rows would leave half of the tile empty", short)


def test_a_tile_that_leaves_an_sm_half_empty_is_passed_over_by_name():
    """Two blocks of the backward pass of head dim 64 fit an SM of Hopper, one an SM of Ampere."""
    on_h100, on_a100 = (
        fm.explain(*problem(d=64, n=4096), backward=True, device=chip)
        for chip in ("sm_90", "sm_80")
    )
    name = told(on_h100)["kernel"]
    assert told(on_a100)["kernel"] != name
    assert f"{name}: passed over: made for 2 blocks on an SM, of which sm_80 holds 1" in on_a100


def test_a_machine_without_a_gpu_plans_for_the_cpu():
    plan = told(fm.explain(*problem(), causal=True, device="cpu"))
    assert plan["kernel"].startswith("cpu_")


def test_a_chip_before_turing_is_refused():
    with pytest.raises(RuntimeError, match=r"(?s)sm75: needs sm_75.*sm_70.*\.cpu\(\)"):
        fm.explain(*problem(), device="sm_70")


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_a_turing_chip_has_no_bf16(backward):
    words = r"(?s)sm_75.*sm80: needs sm_80.*sm75: has no kernels for bfloat16.*\.cpu\(\)"
    with pytest.raises(RuntimeError, match=words):
        fm.explain(*problem("bf16"), backward=backward, device="sm_75")
    plan = told(fm.explain(*problem("fp16"), backward=backward, device="sm_75"))
    assert plan["kernel"].startswith("sm75_")


def test_explain_gives_the_reasons():
    text = fm.explain(*problem(), causal=True, device="sm_90")
    assert re.search(r"^ +copies +none$", text, re.M)
    assert "chosen" in text
    if "sm90" not in INFO["families"]:
        assert re.search(r"sm90: passed over: .+", text)


def test_explain_tells_of_copies():
    q, k, v = problem()
    odd = spec(*k.shape[:-1], 65)[..., :64]
    rows_first = spec(3, 517, 2, 64).transpose(1, 2)
    packed = spec(3, 517, 3, 2, 64)[:, :, 1].transpose(1, 2)
    columns = spec(3, 2, 64, 517).mT

    def copies(*tensors, **options):
        return re.search(r"copies +(.*)", fm.explain(*tensors, **options))[1]

    for chip in ("sm_75", "sm_80", "sm_90"):
        assert copies(q, rows_first, packed, device=chip) == "none"
        assert copies(q, k[:, :, :1].expand(k.shape), v, device=chip) == "none"
        assert copies(q, odd, v, device=chip) == "key once, before the kernel"
        assert copies(q, odd, columns, device=chip) == "key, value once, before the kernel"
        # A head dim that is no multiple of 8: rows of 33 are copied, rows 40 apart are not.
        assert copies(*problem(d=33), device=chip).startswith("query, key, value once, before")
        apart = [x[..., :33] for x in problem(d=40)]
        assert not re.search("query|key|value", copies(*apart, device=chip))
        # The gradient of a key with gaps has none.
        back = copies(q, odd, v, device=chip, backward=True)
        assert back == "key once, before the kernel"
        back = copies(q, columns, v, device=chip, backward=True)
        assert back == "key once, before the kernel; grad_key once, after it"


def ragged(d=64, dtype="fp16") -> tuple[list[torch.Tensor], dict]:
    offsets = {f"cu_seqlens_{x}": spec(3, dtype=torch.int32) for x in "qk"}
    tensors = [spec(40, 4, d, dtype=TORCH_DTYPES[dtype])] * 3
    return tensors, offsets | {"max_seqlen_q": 20, "max_seqlen_k": 20}


# Every option but bias, each way.
OPTIONS = {
    "causal": (problem(), {"causal": True}),
    "window": (problem(), {"window": (5, 3)}),
    "softcap": (problem(), {"softcap": 20.0}),
    "scale": (problem(), {"scale": -0.3}),
    "key_lengths": (problem(), {"key_lengths": spec(3, dtype=torch.int32)}),
    "head dims": (problem(d=40, dv=72), {}),
    "ragged": ragged(),
    "ragged, small": ragged(d=24),
    "five dimensions": ([x[None, None] for x in problem()], {}),
    "nothing": (problem(m=0), {}),
    "nobody": (problem(batch=0), {}),
}


@pytest.mark.parametrize("chip", PLANNED)
@pytest.mark.parametrize("what", OPTIONS)
def test_options(what, chip):
    tensors, options = OPTIONS[what]
    for more in ({}, {"backward": True}, {"backward": True, "deterministic": True}):
        plan = told(fm.explain(*tensors, **options, **more, device=chip))
        assert {plan["kernel"], *plan["before"], *plan["after"]} <= set(CATALOGUE)


# What has no kernel yet: an explanation that fails, by name and with what would work.
REFUSED = {
    "bias": (problem(), {"bias": spec(300, 517)}, r"bias has no CUDA kernel"),
    "ragged bias": (
        ragged()[0],
        ragged()[1] | {"bias": spec(800, 4)},
        r"bias has no CUDA kernel",
    ),
    "dtype": ([x.float() for x in problem()], {}, r"float32.*float16"),
}


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("chip", ["sm_75", "sm_80", "sm_90", "sm_120"])
@pytest.mark.parametrize("what", REFUSED)
def test_refusals(what, chip, backward):
    tensors, options, words = REFUSED[what]
    with pytest.raises(RuntimeError, match=rf"(?is){words}.*\.cpu\(\)"):
        fm.explain(*tensors, **options, backward=backward, device=chip)


# What the environment asks for.


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_can_be_forced(family, monkeypatch):
    monkeypatch.setenv("FLASHMOE_FAMILY", family)
    on_cpu = told(fm.explain(*problem(), device="cpu"))["kernel"]
    assert on_cpu.startswith("cpu_"), "CPU tensors have nothing to do with it"
    if family in INFO["families"]:
        for backward in (False, True):
            text = fm.explain(*problem(), backward=backward, device="sm_90")
            plan = told(text)
            for name in (plan["kernel"], *plan["before"], *plan["after"]):
                assert CATALOGUE[name]["family"] == family
            assert family == "sm90" or f"FLASHMOE_FAMILY asks for {family}" in text
    else:
        words = rf"(?s)FLASHMOE_FAMILY asks for|{family}: this build has no kernels of it"
        with pytest.raises(RuntimeError, match=words):
            fm.explain(*problem(), device="sm_90")


def test_a_forced_family_still_needs_its_chip_and_dtype(monkeypatch):
    monkeypatch.setenv("FLASHMOE_FAMILY", "sm80")
    with pytest.raises(RuntimeError, match=r"sm80: needs sm_80 or newer, the device is sm_75"):
        fm.explain(*problem(), device="sm_75")
    monkeypatch.setenv("FLASHMOE_FAMILY", "sm75")
    with pytest.raises(RuntimeError, match=r"sm75: has no kernels for bfloat16"):
        fm.explain(*problem("bf16"), device="sm_90")


def test_forcing_the_cpu_refuses_cuda_tensors(monkeypatch):
    monkeypatch.setenv("FLASHMOE_FAMILY", "cpu")
    with pytest.raises(RuntimeError, match=r"FLASHMOE_FAMILY is cpu.*\.cpu\(\)"):
        fm.explain(*problem(), device="sm_90")
    assert told(fm.explain(*problem(), device="cpu"))["kernel"].startswith("cpu_")


def test_a_family_that_does_not_exist_is_named(monkeypatch):
    monkeypatch.setenv("FLASHMOE_FAMILY", "sm42")
    with pytest.raises(RuntimeError, match=r"FLASHMOE_FAMILY is sm42; it must be sm75, sm80"):
        fm.explain(*problem(), device="sm_90")
    monkeypatch.setenv("FLASHMOE_FAMILY", "")
    fm.explain(*problem(), device="sm_90")


def test_a_tile_can_be_forced(monkeypatch):
    """Every forward tile of the lists; tests/cpp/test_plan.cc has the backward ones."""
    for name, kernel in CATALOGUE.items():
        if kernel["role"] != "attention_fwd":
            continue
        chip = "sm_75" if kernel["family"] == "sm75" else "sm_90"
        monkeypatch.setenv("FLASHMOE_TILE", f"{kernel['block_q']}x{kernel['block_k']}")
        tensors = problem(dtype_of(Path(kernel["image"])), kernel["head_dim"])
        assert told(fm.explain(*tensors, device=chip))["kernel"] == name


@pytest.mark.parametrize("tile", ["", "64", "64x", "64x64x64", "axb", "64 x 64 ", "1x1", "-64x64"])
def test_a_tile_that_does_not_exist_is_named(tile, monkeypatch):
    monkeypatch.setenv("FLASHMOE_TILE", tile)
    if not tile:
        fm.explain(*problem(), device="sm_90")
        return
    with pytest.raises(RuntimeError, match=rf"FLASHMOE_TILE .*{tile}.*\d+x\d+"):
        fm.explain(*problem(), device="sm_90")
    assert told(fm.explain(*problem(), device="cpu"))["kernel"].startswith("cpu_")
