"""The compiled kernels: what is in the fatbins and what it costs. Reads files only: no GPU.

test_machine_code.py looks at their instructions.
"""

from __future__ import annotations

import re
import subprocess
import sys
import zlib
from pathlib import Path

import pytest
import torch

from catalogue import (
    BACKWARD,
    CATALOGUE,
    FAMILIES,
    FORWARD,
    IMAGES,
    INFO,
    MOE_PRODUCTS,
    PAIRS,
    ROOT,
    TORCH_DTYPES,
    beside,
    bias_sum,
    chip_of,
    dtype_of,
    needs_all_families,
    needs_images,
    report,
)
from listed_kernels import (
    FP32_ROWS,
    HOPPER_ROWS,
    WITH_PRODUCTS,
    every_image,
    family_of,
    kernels_of,
    listed_kernels,
    needs_cuobjdump,
    read_images,  # noqa: F401  an autouse fixture
)

pytestmark = needs_images
CHIPS, KB = report.CHIPS, report.KB


# What was compiled.


def test_the_images_are_those_of_the_tables():
    """One for each family, pass, dtype, head dim and chip, and those of kernels without a tile."""
    listed = {kernel.image for kernel in listed_kernels().values()}
    assert listed == {image.name.split(".")[0] for image in IMAGES}
    assert set(FAMILIES) >= set(INFO["families"]) == {family_of(image) for image in IMAGES}
    for image in IMAGES:
        assert chip_of(image) in FAMILIES[family_of(image)].machine_code


@needs_cuobjdump
@every_image
def test_an_image_has_code_for_its_chip(image):
    chip = chip_of(image)
    assert report.chips(image) == ({chip}, {chip} & FAMILIES[family_of(image)].ptx)


@needs_cuobjdump
@every_image
def test_an_image_has_the_kernels_of_its_tables(image):
    """By the symbols that the library will ask the driver for."""
    wanted = {CATALOGUE[name]["symbol"] for name in kernels_of(image)}
    assert wanted
    assert {use.kernel for use in report.usages(image)} == kernels_of(image)
    assert wanted <= report.symbols(image)
    if chip_of(image) in FAMILIES[family_of(image)].ptx:
        entries = re.findall(r"^(?:\.visible|\.weak) \.entry (\w+)\(", report.ptx(image), re.M)
        assert set(entries) == wanted


# Rows of sm80's tables that sm_90 images leave out: the planner takes an earlier one there for any
# problem (test_plan_code.py asks it).
NOT_ON_HOPPER = {
    "attention_bwd": {(64, 32, 128), (128, 32, 64), (192, 32, 64), (256, 32, 64), (256, 32, 32)},
    "attention_bwd_bias": {(64, 32, 128), (96, 32, 64), (128, 32, 64)},
    "attention_bwd_dropout": {(64, 32, 128), (128, 32, 64)},
}


@needs_all_families
def test_what_is_not_compiled_for_every_chip_of_its_family():
    for kernel in CATALOGUE.values():
        tile = tuple(kernel[name] for name in ("head_dim", "block_q", "block_k"))
        halves = kernel["family"] == "sm80" and kernel["dtype"] != "float32"
        left_out = halves and tile in NOT_ON_HOPPER.get(kernel["role"].removesuffix("_dq"), ())
        chips = FAMILIES[kernel["family"]].machine_code - ({"sm_90"} if left_out else set())
        assert set(kernel["chips"]) == chips, kernel["name"]


def test_the_catalogue_has_the_kernels_of_the_tables():
    assert set(CATALOGUE) == set(listed_kernels())
    for name, listed in listed_kernels().items():
        known = CATALOGUE[name]
        assert (known["image"], known["role"]) == (listed.image, listed.role)
        assert (known["head_dim"], known["block_q"], known["block_k"]) == listed.tile
        assert known["threads"] == listed.warps * 32
        assert known["family"] == name.split("_")[0]
        if dtype := dtype_of(Path(known["image"])):
            assert known["dtype"] == str(TORCH_DTYPES.get(dtype, torch.float32))[6:]


def test_every_tile_has_all_that_its_pass_needs():
    for kernel in CATALOGUE.values():
        family, dtype = kernel["image"].split("_")[0], dtype_of(Path(kernel["image"]))
        if kernel["role"] in PAIRS:
            combine = re.sub(r"_paged(?:_decode)?(?:_fp8)?_", "_paged_combine_", kernel["name"])
            stem = combine.rpartition("_")[0]  # its tile is that of the cache in the query's dtype
            assert any(name.startswith(stem) for name in CATALOGUE)
        if kernel["role"] in {*PAIRS, "cache_append"}:
            continue
        if kernel["dtype"] == "float32":
            for role in FP32_ROWS:
                assert f"{family}_{role}_fp32" in CATALOGUE
            if kernel["role"] in BACKWARD:
                assert beside(kernel["name"], "dq") in CATALOGUE
            assert kernel["role"] != "attention_bwd_bias" or bias_sum(kernel["name"]) in CATALOGUE
            continue
        if family == "sm90":  # no split over keys
            for role in HOPPER_ROWS:
                assert f"{family}_{role}_{dtype}" in CATALOGUE
            # A packed bias that heads share is for other families.
            if kernel["role"] == "attention_bwd_bias" and "_packed_bias_" not in kernel["name"]:
                assert bias_sum(kernel["name"]) in CATALOGUE
            continue
        if kernel["role"] in WITH_PRODUCTS:
            assert f"{family}_attention_ragged_blocks_{dtype}" in CATALOGUE
            assert f"{family}_attention_bias_align_{dtype}" in CATALOGUE
        if kernel["role"] in FORWARD:
            assert f"{family}_attention_combine_{dtype}" in CATALOGUE
        elif kernel["role"] in BACKWARD:
            assert f"{family}_attention_bwd_preprocess_{dtype}" in CATALOGUE
            assert f"{family}_attention_bwd_sinks_{dtype}" in CATALOGUE
            assert beside(kernel["name"], "dq") in CATALOGUE
            assert kernel["role"] == "attention_bwd" or bias_sum(kernel["name"]) in CATALOGUE


def test_every_tile_of_experts_has_both_orders_of_weights():
    for kernel in CATALOGUE.values():
        if kernel["role"] in MOE_PRODUCTS["kRows"]:
            plain, order = kernel["name"].replace("_t_", "_"), f"{kernel['role']}_t_"
            other = plain.replace(f"{kernel['role']}_", order)
            assert {plain, other} <= set(CATALOGUE)
        if kernel["role"] == "moe_bwd_weights":
            assert kernel["name"].replace("_weights_", "_weights_sum_") in CATALOGUE


def test_the_library_holds_these_images():
    library = (ROOT / "python/flashmoe_science/lib/libflashmoe.so").read_bytes()
    for image in IMAGES:
        assert image.read_bytes() in library, f"{image.name} is newer than the library: make build"


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


@every_image
def test_the_compiler_had_nothing_to_complain_of(image):
    """It serialises products whose registers are touched too early, and says so: C7510, C7520."""
    log = image.with_suffix(".log")
    if not log.exists():
        pytest.skip("the fatbins were compiled elsewhere")
    assert not re.findall(r".*(?:C75\d\d|warning).*", log.read_text())


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
    """By registers and threads, where shared memory lets it. Splitting keys counts on it."""
    for use in report.usages(image):
        kernel, promised = CATALOGUE[use.kernel], listed_kernels()[use.kernel].ctas
        held, _ = report.blocks_per_sm(use.chip, use.registers, kernel["threads"], 0)
        fits, _ = report.blocks_per_sm(use.chip, 1, kernel["threads"], kernel["shared_bytes"])
        assert held >= min(promised, fits), use


def test_every_chip_has_a_tile_of_every_head_dim():
    """Whose shared memory it has, from the smallest: 64 KB on Turing, 99 KB on 8.6, 8.9, 12.0."""
    smallest: dict[tuple, int] = {}
    for kernel in CATALOGUE.values():
        if kernel["block_q"]:
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
    assert len(lines) == 1 + sum(len(report.usages(image)) for image in report.fatbins())
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
    """The wheel of all families, which is compressed, stays far below 100 MB."""
    assert all(image.stat().st_size < 8e6 for image in IMAGES)
    assert sum(len(zlib.compress(image.read_bytes(), 1)) for image in IMAGES) < 60e6
    assert (ROOT / "python/flashmoe_science/lib/libflashmoe.so").stat().st_size < 80e6


def test_compile_times():
    """Under 60 s of processor time for one image, as measured when it was compiled."""
    seconds = {image.stem: image.with_suffix(".seconds") for image in IMAGES}
    seconds = {name: float(file.read_text()) for name, file in seconds.items() if file.exists()}
    if not seconds:
        pytest.skip("the fatbins were compiled elsewhere")
    assert len(seconds) == len(IMAGES)
    assert max(seconds.values()) < 60, seconds
