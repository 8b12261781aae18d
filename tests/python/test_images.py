"""The compiled kernels: what is in the fatbins, what it costs, and that plans name what is there.

Everything here reads files or asks the planner: no GPU. Written over families, so that a new one
only adds its line to the tables below.
"""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from dataclasses import dataclass
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
    instructions: tuple[str, ...]  # that each of its attention kernels must have


FAMILIES = {
    "sm75": Family({"sm_75"}, {"sm_75"}, {"fp16"}, ("HMMA.1688", "LDSM", "STG.E.128")),
    "sm80": Family(
        {"sm_80", "sm_90"},
        {"sm_80"},
        {"fp16", "bf16"},
        ("HMMA.16816", "LDSM", "LDGSTS.E.BYPASS.128", "STG.E.128"),
    ),
    "sm90": Family({"sm_90a"}, set(), {"fp16", "bf16"}, ("HGMMA", "UTMALDG")),
}
TORCH_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
# What the other dtype looks like: in the name of a symbol, in PTX, in machine code. A product of
# fp16 numbers has no word for its type in machine code; one of bf16 numbers has.
FOREIGN = {
    "fp16": (r"bf16", r"\.bf16", r"BF16"),
    "bf16": (r"fp16", r"\.f16(?:x2)?\b", r"\.F16|\bH(?:ADD|MUL|FMA|SETP?|MNMX)2?\b(?!.*BF16)"),
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


def family_of(image: Path) -> str:
    """sm80_attention_fwd_fp16 -> sm80"""
    return image.stem.split("_")[0]


def dtype_of(image: Path) -> str:
    """sm80_attention_fwd_fp16 -> fp16"""
    return image.stem.split("_")[-1]


def listed_kernels() -> dict[str, set[str]]:
    """By image, the kernels that the families' lists name: one for each row of variants.h."""
    found = {}
    for path in sorted((ROOT / "src/cuda").glob("*/variants.h")):
        family = path.parent.name
        text = path.read_text().replace("\\\n", " ")
        for macro, body in re.findall(r"^#define FLASHMOE_(\w+)\(X\)(.*)$", text, re.M):
            stem = macro.lower()  # sm80_attention_fwd
            rows = [re.split(r",\s*", row) for row in re.findall(r"X\(([^)]*)\)", body)]
            for dtype in FAMILIES[family].dtypes:
                names = {f"{stem}_{dtype}_d{row[0]}_{row[1]}" for row in rows}
                found[f"{stem}_{dtype}"] = names
    return found


# What was compiled.


def test_the_images_are_those_of_the_lists():
    """One translation unit for each family, kernel and dtype."""
    families = set(INFO["families"])
    wanted = {name for name in listed_kernels() if name.split("_")[0] in families}
    assert wanted == {image.stem for image in IMAGES}
    sources = {f"{path.parent.name}_{path.stem}" for path in (ROOT / "src/cuda").glob("sm*/*.cu")}
    assert {image.stem for image in IMAGES} <= sources
    assert set(FAMILIES) >= families == {family_of(image) for image in IMAGES}


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
    wanted = listed_kernels()[image.stem]
    assert compiled == dict.fromkeys(FAMILIES[family_of(image)].machine_code, wanted)
    if FAMILIES[family_of(image)].ptx:
        entries = re.findall(r"^\.visible \.entry (\w+)\(", report.cuobjdump(image, "-ptx"), re.M)
        assert set(entries) == wanted


def test_the_catalogue_has_the_kernels_of_the_lists():
    wanted = listed_kernels()
    assert {image.stem for image in IMAGES} == {k["image"] for k in CATALOGUE.values()}
    for image in IMAGES:
        known = {name for name, kernel in CATALOGUE.items() if kernel["image"] == image.stem}
        assert known == wanted[image.stem]


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
    code = report.opcodes(image)
    assert code
    for (kernel, chip), opcodes in code.items():
        assert not re.search(in_names, kernel)
        strangers = {opcode for opcode in opcodes if re.search(in_code, opcode)}
        assert not strangers, f"{kernel} for {chip}"
        products = {opcode for opcode in opcodes if opcode.startswith(("HMMA", "HGMMA"))}
        assert all(("BF16" in opcode) == (dtype == "bf16") for opcode in products)
    if FAMILIES[family_of(image)].ptx:
        ptx = report.cuobjdump(image, "-ptx")
        assert ".entry" in ptx
        assert not re.search(in_ptx, ptx)


def test_a_foreign_dtype_would_be_found():
    for dtype, (names, ptx, code) in {
        "fp16": ("a_bf16_d64", "cvt.rn.bf16x2.f32", "HMMA.16816.F32.BF16"),
        "bf16": ("a_fp16_d64", "cvt.rn.f16x2.f32", "F2FP.F16.F32.PACK_AB"),
    }.items():
        for pattern, text in zip(FOREIGN[dtype], (names, ptx, code), strict=True):
            assert re.search(pattern, text)
    own = ("a_bf16_d64", "mma.f32.bf16.bf16.f32", "HMMA.16816.F32.BF16")
    for pattern, text in zip(FOREIGN["bf16"], own, strict=True):
        assert not re.search(pattern, text)
    own = ("a_fp16_d64", "mma.f32.f16.f16.f32", "F2FP.F16.F32.PACK_AB")
    for pattern, text in zip(FOREIGN["fp16"], own, strict=True):
        assert not re.search(pattern, text)


# What it costs.


@needs_cuobjdump
@every_image
def test_attention_kernels_keep_everything_in_registers(image):
    """A stack frame or a spill in the inner loop costs more than any tuning brings."""
    for use in report.usages(image):
        assert use.stack == use.local == 0, use
        assert not use.spills, use
    for (kernel, chip), opcodes in report.opcodes(image).items():
        memory = {opcode for opcode in opcodes if re.match(r"(?:LDL|STL)\b", opcode)}
        assert not memory, f"{kernel} for {chip}"


@needs_cuobjdump
@every_image
def test_attention_kernels_use_the_instructions_of_their_family(image):
    for (kernel, chip), opcodes in report.opcodes(image).items():
        for wanted in FAMILIES[family_of(image)].instructions:
            assert any(opcode.startswith(wanted) for opcode in opcodes), (
                f"{kernel} for {chip} has no {wanted}"
            )


@needs_cuobjdump
@every_image
def test_a_block_fits_an_sm(image):
    for use in report.usages(image):
        kernel = CATALOGUE[use.kernel]
        assert use.registers <= 255
        assert report.registers_of_block(use.registers, kernel["threads"]) <= 65_536
        blocks, _ = report.blocks_per_sm(
            use.chip, use.registers, kernel["threads"], kernel["shared_bytes"]
        )
        assert blocks >= 1, use
        # Shared memory that the code declares itself comes on top of what a launch asks for;
        # from sm_90 on cuobjdump counts the driver's own kilobyte with it.
        assert use.shared <= CHIPS[use.chip.rstrip("af")].reserved_shared_bytes


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


# What plans say.

PLANNED = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
SHAPE = {"batch": 3, "heads_q": 8, "heads_k": 2, "n": 300, "m": 517}


def spec(*shape: int, dtype=torch.float16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def problem(dtype="fp16", d=64) -> list[torch.Tensor]:
    q = (SHAPE["batch"], SHAPE["heads_q"], SHAPE["n"], d)
    k = (SHAPE["batch"], SHAPE["heads_k"], SHAPE["m"], d)
    return [spec(*shape, dtype=TORCH_DTYPES[dtype]) for shape in (q, k, k)]


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
    return {
        "kernel": re.search(r"^ +kernel +(\S+)$", text, re.M)[1],
        "grid": tuple(int(x) for x in numbers.groups()[:3]) if numbers else None,
        "threads": int(numbers[4]) if numbers else None,
        "shared_bytes": int(numbers[5]) if numbers else None,
        "block_q": int(tile[1]),
        "block_k": int(tile[2]),
    }


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("dtype", TORCH_DTYPES)
@pytest.mark.parametrize("chip", PLANNED)
def test_plans_name_kernels_that_exist_and_fit(chip, dtype, d, causal):
    families = [FAMILIES[name] for name in INFO["families"]]
    if not any(dtype in family.dtypes and can_run(family, chip) for family in families):
        with pytest.raises(RuntimeError, match=rf"(?is){chip}.*cpu"):
            fm.explain(*problem(dtype, d), causal=causal, device=chip)
        return
    plan = told(fm.explain(*problem(dtype, d), causal=causal, device=chip))
    kernel = CATALOGUE[plan["kernel"]]
    assert can_run(FAMILIES[kernel["family"]], chip)
    assert kernel["dtype"] == str(TORCH_DTYPES[dtype]).removeprefix("torch.")
    assert (kernel["head_dim"], kernel["causal"]) == (d, causal)
    for name in ("threads", "shared_bytes", "block_q", "block_k"):
        assert plan[name] == kernel[name], name
    assert plan["shared_bytes"] <= CHIPS[chip].block_shared_bytes
    assert plan["threads"] <= 1024
    blocks = math.ceil(SHAPE["n"] / kernel["block_q"])
    assert math.prod(plan["grid"]) == blocks * SHAPE["heads_q"] * SHAPE["batch"]


def test_a_machine_without_a_gpu_plans_for_the_cpu():
    plan = told(fm.explain(*problem(), causal=True, device="cpu"))
    assert plan["kernel"].startswith("cpu_")


def test_a_turing_chip_is_refused_until_there_is_a_family_for_it():
    if "sm75" in INFO["families"]:
        pytest.skip("there is one")
    with pytest.raises(RuntimeError, match=r"(?s)sm80: needs sm_80.*sm75: this build has no"):
        fm.explain(*problem(), device="sm_75")


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
    for chip in ("sm_80", "sm_90"):

        def copies(k, v, chip=chip):
            return re.search(r"copies +(.*)", fm.explain(q, k, v, device=chip))[1]

        assert copies(rows_first, packed) == "none"
        assert copies(k[:, :, :1].expand(k.shape), v) == "none"
        assert "key" in copies(odd, v) and "value" not in copies(odd, v)
        assert "key" in copies(odd, columns) and "value" in copies(odd, columns)


# What has no kernel yet: an explanation that fails, by name and with what would work.
REFUSED = {
    "bias": (problem(), {"bias": spec(300, 517)}, r"bias"),
    "window": (problem(), {"window": (5, 3)}, r"window"),
    "softcap": (problem(), {"softcap": 20.0}, r"softcap"),
    "key_lengths": (problem(), {"key_lengths": spec(3, dtype=torch.int32)}, r"key_lengths"),
    "backward": (problem(), {"backward": True}, r"backward"),
    "head dim": (problem(d=40), {}, r"head dim 40.*64.*128"),
    "dtype": ([x.float() for x in problem()], {}, r"float32.*float16"),
    "ragged": (
        [spec(40, 4, 64)] * 3,
        {f"cu_seqlens_{x}": spec(3, dtype=torch.int32) for x in "qk"}
        | {"max_seqlen_q": 20, "max_seqlen_k": 20},
        r"ragged|cu_seqlens",
    ),
}


@pytest.mark.parametrize("chip", ["sm_80", "sm_90", "sm_120"])
@pytest.mark.parametrize("what", REFUSED)
def test_refusals(what, chip):
    tensors, options, words = REFUSED[what]
    with pytest.raises(RuntimeError, match=rf"(?is){words}.*cpu"):
        fm.explain(*tensors, **options, device=chip)


FORCED = """
import sys, torch, flashmoe_science as fm
q = torch.empty(2, 4, 100, 64, dtype=torch.float16, device="meta")
for device in sys.argv[1:]:
    try:
        print(fm.explain(q, q, q, device=device).split("kernel")[1].split()[0])
    except RuntimeError as error:
        print(error)
"""


def forced(family: str, *devices: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", FORCED, *devices],
        env={**os.environ, "PYTHONPATH": str(ROOT / "python"), "FLASHMOE_FAMILY": family},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_can_be_forced(family):
    on_h100, on_cpu = forced(family, "sm_90", "cpu")
    assert on_cpu.startswith("cpu_"), "CPU tensors have nothing to do with it"
    if family in INFO["families"]:
        assert on_h100.startswith(f"{family}_")
        assert CATALOGUE[on_h100]["family"] == family
    else:
        assert f"{family}: this build has no kernels of it" in on_h100
        assert "FLASHMOE_FAMILY" in on_h100


def test_forcing_the_cpu_refuses_cuda_tensors():
    on_h100, on_cpu = forced("cpu", "sm_90", "cpu")
    assert "FLASHMOE_FAMILY is cpu" in on_h100 and ".cpu()" in on_h100
    assert on_cpu.startswith("cpu_")


def test_a_family_that_does_not_exist_is_named():
    (on_h100,) = forced("sm42", "sm_90")
    assert "FLASHMOE_FAMILY" in on_h100 and "sm42" in on_h100
