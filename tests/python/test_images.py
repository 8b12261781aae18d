"""The compiled kernels: what is in the fatbins and what it costs. Reads files only: no GPU."""

from __future__ import annotations

import re
import subprocess
import sys
import zlib
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import torch

from catalogue import (
    BACKWARD,
    BIAS_SUM,
    CATALOGUE,
    FAMILIES,
    FINISH,
    FORWARD,
    FP32_PRODUCTS,
    IMAGES,
    INFO,
    MOE_PRODUCTS,
    PAGED,
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

CHIPS, KB = report.CHIPS, report.KB
# The kernels that go by rows, and their warps.
ROWS = {
    "attention_ragged_blocks": 32,
    "attention_bias_align": 4,
    "attention_bias_transpose": 4,
    "attention_combine": 4,
    "attention_bwd_preprocess": 4,
    "attention_bwd_sinks": 4,
}
HOPPER_ROWS = {
    "attention_ragged_blocks": 32,
    "attention_row_bounds": 32,
    "attention_task_counter": 4,
    "attention_bias_align": 4,
    "attention_bwd_preprocess": 4,
    "attention_bwd_packed_preprocess": 32,
    "attention_bwd_dq": 4,
    "attention_bwd_sinks": 4,
}
FP32_ROWS = ("attention_ragged_blocks", "attention_bwd_preprocess", "attention_bwd_sinks")
# What each fp32 kernel with products has, and what none of them has.
FP32_CODE = {
    "sm75": (("FFMA", "SHFL"), r"HMMA|LDGSTS"),
    "sm80": (("HMMA.1688.F32.TF32", "LDGSTS.E.BYPASS.128"), r"HMMA\.16816|HGMMA|UTMA|LDSM"),
}
MOE_ROWS = {
    "moe_sort": 32,
    "moe_count": 4,
    "moe_scan": 32,
    "moe_place": 1,
    "moe_combine": 8,
    "moe_bwd_prepare": 32,
    "moe_bwd_bias": 4,
    "moe_bwd_bias_sum": 4,
    "moe_bwd_scale": 8,
    "moe_route": 8,
    "moe_route_bwd": 8,
}
# Forward mode and second derivatives, which have every head dim: those that go by rows, and those
# with products, of 32 queries and 32 keys.
SECOND_ROWS = ("attention_second_rows", "attention_second_sinks")
SECOND_TILES = (
    "attention_tangent",
    "attention_second_queries",
    "attention_second_keys",
    "attention_second_bias_sum",
)
# Few rows an expert: the warps of a kernel, and the CTAs that an SM is to hold.
MOE_FEW = {"moe_few_up": (8, 2), "moe_few_down": (16, 1)}
# Tiles of tokens have warps that go their own ways.
PACKED = ("HMMA.16816", "LDSM", "UTMALDG")
# A bias that TMA cannot load.
BY_ROWS = re.compile("_(?:bias_rows|bias_float|mask)_")
# Products of experts that gather rows by token.
GATHERED = ("moe_up", "moe_bwd_act", "moe_bwd_weights")
WITH_PRODUCTS = FORWARD | BACKWARD | PAGED | {BIAS_SUM, *sum(MOE_PRODUCTS.values(), ())}
SINGLE_NUMBERS = ("attention_combine", "attention_bwd_sinks", BIAS_SUM)  # what they write
# What several blocks do to the same memory in any order: only where grad_query is added up.
SHARED_SUMS = r"(?:RED|ATOM)[GS]?\."
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

every_image = pytest.mark.parametrize("image", IMAGES, ids=lambda image: image.stem)

pytestmark = needs_images
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


def is_short(head_dim: int, block_q: int, block_k: int) -> bool:
    """A tile for thousands of short sequences."""
    return 0 < head_dim <= 64 and block_q <= 32 and block_k <= 32


def family_of(image: Path) -> str:
    """sm80_attention_fwd_fp16_d64 -> sm80"""
    return image.stem.split("_")[0]


@dataclass(frozen=True)
class Listed:
    """A kernel as the families' tables have it."""

    image: str
    role: str
    tile: tuple[int, int, int] = (0, 0, 0)  # head dim, queries, keys
    warps: int = 4
    ctas: int = 0  # that an SM's registers are to hold


# The tables of a family, each with the name of its kernels and that of their image.
TABLES = {
    "kFwd": ("fwd", "fwd"),
    "kFwdBias": ("fwd_bias", "fwd_bias"),
    "kFwdBiasRows": ("fwd_bias_rows", "fwd_bias_rows"),
    "kFwdBiasFloat": ("fwd_bias_float", "fwd_bias_rows"),
    "kFwdMask": ("fwd_mask", "fwd_mask"),
    "kFwdDropout": ("fwd_dropout", "fwd_dropout"),
    "kFwdGeneral": ("fwd_general", "fwd"),
    "kFwdPacked": ("fwd_packed", "fwd_packed"),
    "kBwdPacked": ("bwd_packed", "bwd_packed"),
    "kBwd": ("bwd", "bwd"),
    "kBwdBias": ("bwd_bias", "bwd_bias"),
    "kBwdBiasRows": ("bwd_bias_rows", "bwd_bias_rows"),
    "kBwdBiasFloat": ("bwd_bias_float", "bwd_bias_rows"),
    "kBwdMask": ("bwd_mask", "bwd_mask"),
    "kBwdDropout": ("bwd_dropout", "bwd_dropout"),
    "kBwdGeneral": ("bwd_general", "bwd"),
    "kBiasSum": ("bwd_bias_sum", "bwd_bias"),
}
# Where a row has the warps and the CTAs that an SM's registers are to hold.
COLUMNS = {"FwdTile": (3, 6), "BwdTile": (3, 5), "BiasSumTile": (3, 6)}


def rows(path: Path) -> list[tuple[str, str, list[int]]]:
    """(type, table, numbers) of each row in a header of kernel tables."""
    return rows_in(path.read_text())


def rows_in(text: str) -> list[tuple[str, str, list[int]]]:
    found = []
    pattern = r"^inline constexpr (\w+) (k\w+)\[\] = \{(.*?)\n\};"
    for kind, table, body in re.findall(pattern, text, re.M | re.S):
        for row in re.findall(r"\{([\w, ]+)\}", re.sub(r"//.*", "", body)):
            found.append((kind, table, [int(x) for x in re.findall(r"\d+", row)]))
    return found


# The tables of tiles over pages, of all families in one header.
PAGED_TABLES = {
    "kPaged": ("paged", "paged"),
    "kPagedFp8": ("paged_fp8", "paged_fp8"),
    "kPagedChunk": ("paged_chunk", "paged_chunk"),
}


def listed_pages(family: str) -> dict[str, Listed]:
    """Kernels over the pages of a cache, by name, and the one that writes to a cache."""
    found = {f"{family}_cache_append": Listed(f"{family}_cache_append", "cache_append")}
    tables = []
    for name in ("paged.h", "paged_chunk.h"):
        text = (ROOT / "src/cuda/attention/kernels" / name).read_text()
        parts = re.split(r"^namespace flashmoe::cuda::(\w+) \{$", text, flags=re.M)
        tables += [
            row
            for own, part in zip(parts[1::2], parts[2::2], strict=True)
            if own == family
            for row in rows_in(part)
        ]
    for dtype in FAMILIES[family].dtypes:
        for _, table, numbers in tables:
            name, image = PAGED_TABLES[table]
            d, q, k = numbers[:3]
            image, tile = f"{family}_attention_{image}_{dtype}_d{d}", f"{dtype}_d{d}_{q}x{k}"
            warps, ctas = (
                (4 * (q // 64 + 1), 1) if table == "kPagedChunk" else (numbers[3], numbers[7])
            )
            role = "attention_" + name.removesuffix("_fp8")
            found[f"{family}_attention_{name}_{tile}"] = Listed(image, role, (d, q, k), warps, ctas)
            if table == "kPaged":
                combine = Listed(image, "attention_paged_combine", (d, q, k))
                found[f"{family}_attention_paged_combine_{tile}"] = combine
    return found


def listed_second(family: str) -> dict[str, Listed]:
    """Kernels of forward mode and second derivatives, by name."""
    found = {}
    for dtype in {"fp32", *FAMILIES[family].dtypes} if family != "sm90" else ():
        image = f"{family}_attention_second_{dtype}"
        for role in SECOND_ROWS:
            found[f"{family}_{role}_{dtype}"] = Listed(image, role)
        for role in SECOND_TILES:
            kernel = Listed(image, role, (0, 32, 32), 2, 3)
            found[f"{family}_{role}_{dtype}"] = kernel
    return found


def listed_experts(family: str) -> dict[str, Listed]:
    """Kernels of a mixture of experts, by name. Weights may lie the other way round: _t."""
    path, found = ROOT / f"src/cuda/moe/kernels/{family}.h", {}
    for dtype in FAMILIES[family].dtypes if path.exists() else ():
        for kind, table, (m, n, *others) in rows(path):
            if kind == "FewTile":
                for role, (warps, ctas) in MOE_FEW.items():
                    kernel = Listed(f"{family}_moe_few_{dtype}", role, (0, m, n), warps, ctas)
                    found[f"{family}_{role}_{dtype}_{m}x{n}"] = kernel
                continue
            if kind == "TmaGemmTile":  # a producer and two consumers
                warps, ctas = 12, 1
            else:
                warps, ctas = others[2] * others[3], others[4]
            for role in MOE_PRODUCTS[table]:
                image = f"{family}_{role}_{dtype}"
                kernel = Listed(image, role, (0, m, n), warps, ctas)
                for order in ("", "_t") if table == "kRows" else ("",):
                    found[f"{family}_{role}{order}_{dtype}_{m}x{n}"] = kernel
                if role == "moe_bwd_weights":
                    total = Listed(image, f"{role}_sum", (0, m, n), 8)
                    found[f"{family}_{role}_sum_{dtype}_{m}x{n}"] = total
        for role, warps in MOE_ROWS.items():
            image = f"{family}_moe_small_{dtype}"
            found[f"{family}_{role}_{dtype}"] = Listed(image, role, warps=warps)
    return found


def listed_fp32(family: str) -> dict[str, Listed]:
    """Kernels of attention in fp32, by name."""
    text = (ROOT / "src/cuda/attention/kernels/fp32.h").read_text()
    parts = re.split(r"^namespace flashmoe::cuda::(\w+)::(\w+) \{$", text, flags=re.M)
    found = {}
    for own, product, part in zip(parts[1::3], parts[2::3], parts[3::3], strict=True):
        for kind, table, numbers in rows_in(part) if own == family else ():
            d, q, k = numbers[:3]
            warps = numbers[3] if kind == "Fp32FwdTile" else q // 16
            tile = f"{product}_d{d}_{q}x{k}"
            kernels = {
                "kFwd": {"fwd": "fwd", "fwd_bias": "fwd_bias"},
                "kBwd": {
                    "bwd": "bwd",
                    "bwd_dq": "bwd",
                    "bwd_bias": "bwd_bias",
                    "bwd_bias_dq": "bwd_bias",
                },
                "kBiasSum": {"bwd_bias_sum": "bwd_bias"},
            }[table]
            for name, image in kernels.items():
                found[f"{family}_attention_{name}_{tile}"] = Listed(
                    f"{family}_attention_{image}_{product}_d{d}",
                    f"attention_{name}",
                    (d, q, k),
                    warps,
                    numbers[-1],
                )
    for role in FP32_ROWS if found else ():
        image = f"{family}_attention_small_fp32"
        found[f"{family}_{role}_fp32"] = Listed(image, role, warps=ROWS[role])
    return found


@cache
def listed_kernels() -> dict[str, Listed]:
    """What the rows of each family's tables stand for, by name."""
    found = {}
    for family in INFO["families"]:
        found |= listed_experts(family) | listed_pages(family)
        found |= listed_second(family) | listed_fp32(family)
        listed = rows(ROOT / f"src/cuda/attention/kernels/{family}.h")
        assert {table for _, table, _ in listed} <= set(TABLES) and listed
        for dtype in FAMILIES[family].dtypes:
            for kind, table, numbers in listed:
                name, image = TABLES[table]
                d, q, k = numbers[:3]
                if kind == "Sm90PackedTile":
                    warps, ctas = q // 16 + 1, numbers[4]
                elif kind == "Sm90PackedBwdTile":
                    warps, ctas = q // 16 + 4, numbers[4]
                elif kind in COLUMNS:
                    warps, ctas = (numbers[column] for column in COLUMNS[kind])
                else:  # sm90, whose warpgroups follow from the tile
                    by_keys = table == "kBwdBias" and d <= 32
                    consumers = q // 64 if kind == "Sm90FwdTile" else k // 64 if by_keys else 2
                    warps = 4 * (consumers + 1)
                    ctas = numbers[4] if kind == "Sm90FwdTile" and len(numbers) > 4 else 1
                image = f"{family}_attention_{image}_{dtype}_d{d}"
                role = "attention_" + re.sub("_(?:general|packed|rows|float)$", "", name)
                role = role.replace("_mask", "_bias")
                tile = f"{dtype}_d{d}_{q}x{k}"
                found[f"{family}_attention_{name}_{tile}"] = Listed(
                    image, role, (d, q, k), warps, ctas
                )
                if kind == "BwdTile":
                    # For short sequences dQ takes fewer registers than the kernel before it.
                    held = 8 if is_short(d, q, k) and 4 < ctas < 8 else ctas
                    found[f"{family}_{role}_dq_{tile}"] = Listed(
                        image, f"{role}_dq", (d, q, k), warps, held
                    )
            for role, warps in (HOPPER_ROWS if family == "sm90" else ROWS).items():
                image = f"{family}_attention_small_{dtype}"
                found[f"{family}_{role}_{dtype}"] = Listed(image, role, warps=warps)
    return found


def kernels_of(image: Path) -> set[str]:
    """What the catalogue says an image holds."""
    name, chip, _ = image.name.split(".")
    return {k["name"] for k in CATALOGUE.values() if k["image"] == name and chip in k["chips"]}


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
        if kernel["role"] == "attention_paged":
            combine = re.sub(r"_paged(?:_fp8)?_", "_paged_combine_", kernel["name"])
            stem = combine.rpartition("_")[0]  # its tile is that of the cache in the query's dtype
            assert any(name.startswith(stem) for name in CATALOGUE)
        if kernel["role"] in {"attention_paged", "cache_append"}:
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
            assert kernel["role"] != "attention_bwd_bias" or bias_sum(kernel["name"]) in CATALOGUE
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


@needs_cuobjdump
@every_image
def test_no_dtype_in_the_image_of_another(image):
    """bf16 in an sm_75 image is the case that matters most: that chip has none."""
    dtype = dtype_of(image)
    if not dtype:  # copies bytes
        return
    if dtype in ("fp32", "tf32"):
        assert dtype in FP32_PRODUCTS[family_of(image)]
        for opcodes in report.opcodes(image).values():
            products = {opcode for opcode in opcodes if opcode.startswith("HMMA")}
            assert all(opcode.endswith("TF32") for opcode in products)
        return
    assert dtype in FAMILIES[family_of(image)].dtypes
    in_names, in_ptx, in_code = FOREIGN[dtype]
    if "_fp8_" in image.name and dtype == "bf16":  # an fp8 cache is multiplied in fp16
        return
    names = report.symbols(image)
    assert not [name for name in names if re.search(in_names, name)]
    for (kernel, chip), opcodes in report.opcodes(image).items():
        strangers = {opcode for opcode in opcodes if re.search(in_code, opcode)}
        assert not strangers, f"{kernel} for {chip}"
        # What comes from either half is multiplied in TF32 where it is differentiated twice.
        products = {
            opcode
            for opcode in opcodes
            if opcode.startswith(("HMMA", "HGMMA")) and "TF32" not in opcode
        }
        assert all(("BF16" in opcode) == (dtype == "bf16") for opcode in products)
    if chip_of(image) in FAMILIES[family_of(image)].ptx:
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


@every_image
def test_the_compiler_had_nothing_to_complain_of(image):
    """It serialises products whose registers are touched too early, and says so: C7510, C7520."""
    log = image.with_suffix(".log")
    if not log.exists():
        pytest.skip("the fatbins were compiled elsewhere")
    assert not re.findall(r".*(?:C75\d\d|warning).*", log.read_text())


def strange_fp32_code(kernel: str, opcodes: Counter[str]) -> list[str]:
    wanted, foreign = FP32_CODE[CATALOGUE[kernel]["family"]]
    found = [f"has {x}" for x in opcodes if re.match(rf"(?:{foreign}|{SHARED_SUMS})", x)]
    products = CATALOGUE[kernel]["block_q"] > 0
    lacks = [x for x in wanted if products and not any(code.startswith(x) for code in opcodes)]
    return found + [f"has no {x}" for x in lacks]


def strange_code(kernel: str, chip: str, opcodes: Counter[str]) -> list[str]:
    """What a kernel's instructions lack, or have and should not."""
    if CATALOGUE[kernel]["dtype"] == "float32":
        return strange_fp32_code(kernel, opcodes)
    role, family = CATALOGUE[kernel]["role"], FAMILIES[CATALOGUE[kernel]["family"]]

    def some(pattern: str) -> list[str]:
        return [opcode for opcode in opcodes if re.match(pattern, opcode)]

    if role in SECOND_ROWS + SECOND_TILES:  # the same bits in every run
        tf32 = r"HMMA\.1688\.F32\.TF32"
        product = tf32 if CATALOGUE[kernel]["family"] == "sm80" else "FFMA"
        found = [f"has {opcode}" for opcode in some(SHARED_SUMS)]
        found += [f"has {opcode}" for opcode in some("HMMA|HGMMA") if not re.match(product, opcode)]
        return found + [f"has no {product}"] * (role in SECOND_TILES and not some(product))
    short = is_short(*(CATALOGUE[kernel][x] for x in ("head_dim", "block_q", "block_k")))
    # Of short sequences dQ is computed after the others, and nobody adds it up.
    products = role in WITH_PRODUCTS or (short and role in FINISH)
    foreign = some(rf".*(?:{family.foreign})")
    # Over pages Hopper reads small tiles as Ampere does: its work is reading the cache.
    as_ampere = role == "attention_paged" and CATALOGUE[kernel]["family"] == "sm90"
    copies = role == "attention_paged_chunk"  # pages that are too small for the copy engine
    if BY_ROWS.search(kernel) or role in GATHERED or as_ampere or copies:
        foreign = [opcode for opcode in foreign if "LDGSTS" not in opcode]
    found = [f"has {opcode}" for opcode in foreign]
    packed = "_packed_" in kernel
    instructions = PACKED if packed else family.instructions
    if as_ampere:
        instructions = FAMILIES["sm80"].instructions
    wanted = [re.escape(prefix) for prefix in instructions if products]
    if BY_ROWS.search(kernel):  # in chunks, in the background
        wanted.append(r"LDGSTS\.E.*\.ZFILL")
    wanted += [r"LDGSTS\.E\.BYPASS\.128"] if copies else []
    hopper = CATALOGUE[kernel]["family"] == "sm90"
    if role in MOE_FEW:  # from global memory to the MMAs
        wanted += [r"HMMA\.16816", r"LDG\.E.*\.128"]
    elif hopper and role[:4] == "moe_":  # rows end anywhere: no copy engine stores
        wanted += [r"STG\.E\.128"] if role not in MOE_ROWS or role == "moe_combine" else []
        wanted += [r"LDGSTS\.E\.BYPASS\.128"] if role in GATHERED else []
    elif hopper and products:  # the copy engine stores, but for sums, which are single numbers
        wanted += [r"UTMASTG"] if role != BIAS_SUM and not as_ampere else []
    elif hopper:
        wanted += [r"STG\.E\.128"] if role == "attention_bias_align" else []
    elif "paged" in role:  # rows leave in pairs of columns
        wanted += []
    elif role not in (*SINGLE_NUMBERS, *MOE_ROWS) or role == "moe_combine":
        wanted.append(r"STG\.E\.128")
    if hopper and products:  # tickets are integers; only a backward pass adds numbers
        adds = role in BACKWARD and not packed
        found += [f"has {x}" for x in some(SHARED_SUMS + r".*F32") if not adds]
        # Where the compiler loses sight of warps being together, the main loop loses a tenth.
        divergent = sum(opcodes[x] for x in some(r"BRA\.DIV"))
        found += [f"has {divergent} BRA.DIV"] if role in FORWARD and divergent > 2 else []
        # Where a cluster begins and ends, for a ticket and for turns; not in the main loop, which
        # took a fifth longer with one for each block that was done with.
        fences = sum(opcodes[x] for x in some(r"MEMBAR.*GPU"))
        found += [f"has {fences} MEMBAR.GPU"] if fences > 6 else []
    elif role in BACKWARD and not short:  # four numbers at once from Hopper on
        wanted.append(r"REDG?\.E\.ADD\.F32" + (r"x4\b" if chip == "sm_90" else r"\."))
    elif role in BACKWARD or role in ("moe_count", "moe_sort"):  # tickets and counts are integers
        found += [f"has {opcode}" for opcode in some(SHARED_SUMS + r".*F32")]
    else:  # everything else has the same bits in every run
        found += [f"has {opcode}" for opcode in some(SHARED_SUMS)]
        if not products and role not in MOE_FEW:
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

    kernels, short = (
        {
            (k["family"], k["role"]): name
            for name, k in CATALOGUE.items()
            if is_short(k["head_dim"], k["block_q"], k["block_k"]) == which
            and k["dtype"] != "float32"
        }
        for which in (False, True)
    )
    good = "HMMA.16816.F32 LDSM.16.M88.4 LDGSTS.E.BYPASS.128.ZFILL STG.E.128 BAR.RED.OR"
    if "sm80" in INFO["families"]:
        single, four = "RED.E.ADD.F32.FTZ.RN", "REDG.E.ADD.F32x4.FTZ.RN"
        for bias in ("", "_bias"):
            forward, backward = (kernels["sm80", f"attention_{x}{bias}"] for x in ("fwd", "bwd"))
            assert not strange_code(forward, "sm_80", codes(good))
            assert strange_code(forward, "sm_80", codes(good.replace("16816", "1688")))
            assert strange_code(forward, "sm_80", codes(good.replace("LDGSTS", "LDG")))
            assert strange_code(forward, "sm_80", codes(good + " RED.E.ADD.F32.FTZ.RN.STRONG.GPU"))
            atomic = " ATOMG.E.ADD.F32.FTZ.RN.STRONG.GPU"
            assert strange_code(forward, "sm_90", codes(good + atomic))
            assert strange_code(backward, "sm_80", codes(good))
            assert not strange_code(backward, "sm_80", codes(f"{good} {single}"))
            assert strange_code(backward, "sm_90", codes(f"{good} {single}"))
            assert not strange_code(backward, "sm_90", codes(f"{good} {four}"))
        total, finish = (kernels["sm80", role] for role in (BIAS_SUM, "attention_bwd_dq"))
        assert not strange_code(total, "sm_90", codes(good))
        assert not strange_code(total, "sm_90", codes(good.replace("STG.E.128", "STG.E.U16")))
        assert strange_code(total, "sm_90", codes(f"{good} {four}")), "the same bits in every run"
        assert strange_code(total, "sm_90", codes(good.replace("HMMA", "FFMA")))
        assert not strange_code(finish, "sm_90", codes("LDG.E.128 STG.E.128"))
        assert strange_code(finish, "sm_90", codes("HMMA.16816.F32 STG.E.128"))
        for role in ("attention_bwd", "attention_bwd_dq", "attention_bwd_bias_dq"):
            assert not strange_code(short["sm80", role], "sm_90", codes(good))
            assert strange_code(short["sm80", role], "sm_90", codes(f"{good} {four}"))
            assert strange_code(short["sm80", role], "sm_90", codes("LDG.E.128 STG.E.128"))
        for role in sum(MOE_PRODUCTS.values(), ()):
            assert not strange_code(kernels["sm80", role], "sm_90", codes(good))
            assert strange_code(kernels["sm80", role], "sm_90", codes(f"{good} {four}"))
            assert strange_code(kernels["sm80", role], "sm_90", codes(good.replace("HMMA", "FFMA")))
        count = kernels["sm80", "moe_count"]
        assert not strange_code(count, "sm_80", codes("LDG.E STG.E ATOMS.ADD"))
        assert strange_code(count, "sm_80", codes(f"LDG.E STG.E {single}"))
        assert strange_code(kernels["sm80", "moe_combine"], "sm_80", codes("LDG.E STG.E"))
        rows = kernels["sm80", "attention_bias_align"]
        assert not strange_code(rows, "sm_90", codes("LDG.E LDG.E.U16 STG.E.128"))
        assert strange_code(rows, "sm_90", codes("LDG.E.U16 STG.E.U16"))
        assert strange_code(rows, "sm_90", codes("HMMA.16816.F32 STG.E.128"))
        for role in SECOND_TILES:
            tf32 = "HMMA.1688.F32.TF32 STG.E"
            assert not strange_code(kernels["sm80", role], "sm_90", codes(tf32))
            assert strange_code(kernels["sm80", role], "sm_90", codes(f"{tf32} {single}"))
            assert strange_code(kernels["sm80", role], "sm_90", codes("FFMA STG.E"))
            assert strange_code(kernels["sm80", role], "sm_90", codes(f"{tf32} HMMA.16816.F32"))
        for product in FP32_PRODUCTS["sm80"]:
            forward = f"sm80_attention_fwd_{product}_d64_128x32"
            good32 = "HMMA.1688.F32.TF32 LDGSTS.E.BYPASS.128.ZFILL STG.E.64 BAR.RED.OR"
            assert not strange_code(forward, "sm_90", codes(good32))
            assert strange_code(forward, "sm_90", codes(good32 + " RED.E.ADD.F32.FTZ.RN"))
            assert strange_code(forward, "sm_90", codes(good32.replace("1688", "16816")))
            assert strange_code(forward, "sm_90", codes("FFMA LDGSTS.E.BYPASS.128"))
    if "sm75" in INFO["families"]:
        forward = kernels["sm75", "attention_fwd"]
        exact = "sm75_attention_fwd_fp32_d64_64x32"
        assert not strange_code(exact, "sm_75", codes("FFMA SHFL.IDX STG.E.64.SYS"))
        assert strange_code(exact, "sm_75", codes("FFMA SHFL.IDX HMMA.1688.F32"))
        assert strange_code(forward, "sm_75", codes(good))
        assert not strange_code(forward, "sm_75", codes("HMMA.1688.F32 LDSM.16 STG.E.128.SYS"))
    if "sm90" in INFO["families"]:
        hopper = " ".join((*FAMILIES["sm90"].instructions, "UTMASTG.4D"))
        names = [name for name in CATALOGUE if name.startswith("sm90_")]
        plain = {
            CATALOGUE[name]["role"]: name
            for name in names
            if "_packed_" not in name and not BY_ROWS.search(name)
        }
        for kernel in filter(BY_ROWS.search, names):
            assert strange_code(kernel, "sm_90", codes(hopper))
            copies = " LDGSTS.E.BYPASS.128.ZFILL"
            assert not strange_code(kernel, "sm_90", codes(hopper + copies))
        for role in ("attention_fwd", "attention_fwd_bias", "attention_bwd", "attention_bwd_bias"):
            kernel = plain[role]
            assert not strange_code(kernel, "sm_90", codes(hopper + 6 * " MEMBAR.ALL.GPU"))
            assert strange_code(kernel, "sm_90", codes(hopper + 7 * " MEMBAR.ALL.GPU"))
            assert strange_code(kernel, "sm_90", codes(hopper.replace("UTMASTG.4D", "")))
        tokens = " ".join((*PACKED, "UTMASTG.3D"))
        for which in ("_fwd_packed_", "_bwd_packed_fp16_d16_"):
            packed = next(name for name in names if which in name)
            assert not strange_code(packed, "sm_90", codes(tokens))
            assert strange_code(packed, "sm_90", codes(hopper))
            assert strange_code(packed, "sm_90", codes(tokens + " REDG.E.ADD.F32.FTZ.RN"))
        total = plain[BIAS_SUM]
        assert not strange_code(total, "sm_90", codes("HGMMA.64x64x16.F32 UTMALDG.4D STG.E.U16"))
        assert strange_code(total, "sm_90", codes("HMMA.16816.F32 UTMALDG.4D STG.E.U16"))
        assert strange_code(total, "sm_90", codes(hopper + " REDG.E.ADD.F32.FTZ.RN"))
        rows = plain["attention_bias_align"]
        assert not strange_code(rows, "sm_90", codes("LDG.E LDG.E.U16 STG.E.128"))
        assert strange_code(rows, "sm_90", codes("LDG.E.U16 STG.E.U16"))
        for role in sum(MOE_PRODUCTS.values(), ()):
            copies = " LDGSTS.E.BYPASS.128" if role in GATHERED else ""
            good = f"HGMMA.64x256x16.F32 UTMALDG.3D STG.E.128{copies}"
            assert not strange_code(plain[role], "sm_90", codes(good))
            assert strange_code(plain[role], "sm_90", codes(good.replace("HGMMA", "HMMA")))
            assert strange_code(plain[role], "sm_90", codes(good.replace("STG.E.128", "STG.E.U16")))
            assert strange_code(plain[role], "sm_90", codes(good + " REDG.E.ADD.F32.FTZ.RN"))
            other = good.replace(copies, "") if copies else good + " LDGSTS.E.BYPASS.128"
            assert strange_code(plain[role], "sm_90", codes(other))


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
    assert (ROOT / "python/flashmoe_science/lib/libflashmoe.so").stat().st_size < 160e6


def test_compile_times():
    """Under 60 s of processor time for one image, as measured when it was compiled."""
    seconds = {image.stem: image.with_suffix(".seconds") for image in IMAGES}
    seconds = {name: float(file.read_text()) for name, file in seconds.items() if file.exists()}
    if not seconds:
        pytest.skip("the fatbins were compiled elsewhere")
    assert len(seconds) == len(IMAGES)
    assert max(seconds.values()) < 60, seconds
