"""What the families' tables list, kernel by kernel, and what tests of the images share.

Read from the headers of the tables, not from the library, whose catalogue must say the same.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from catalogue import (
    BACKWARD,
    BIAS_SUM,
    CATALOGUE,
    FAMILIES,
    FORWARD,
    IMAGES,
    INFO,
    MOE_PRODUCTS,
    PAGED,
    ROOT,
    report,
)

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
    "attention_bwd_key_sum": 4,
    "attention_bwd_sinks": 4,
}
FP32_ROWS = ("attention_ragged_blocks", "attention_bwd_preprocess", "attention_bwd_sinks")
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
WITH_PRODUCTS = FORWARD | BACKWARD | PAGED | {BIAS_SUM, *sum(MOE_PRODUCTS.values(), ())}

every_image = pytest.mark.parametrize("image", IMAGES, ids=lambda image: image.stem)
needs_cuobjdump = pytest.mark.skipif(
    report.find_cuobjdump() is None,
    reason="cuobjdump is not installed: pip install nvidia-cuda-cuobjdump",
)


@pytest.fixture(scope="module", autouse=True)
def read_images(request):
    """All at once and only where they are needed: most of the time of these tests."""
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
    "kFwdPackedBias": ("fwd_packed_bias", "fwd_packed_bias"),
    "kBwdPacked": ("bwd_packed", "bwd_packed"),
    "kBwdPackedBias": ("bwd_packed_bias", "bwd_packed_bias"),
    "kBwdWhole": ("bwd_whole", "bwd_whole"),
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
    "kPagedDecode": ("paged_decode", "paged"),
    "kPagedDecodeFp8": ("paged_decode_fp8", "paged_fp8"),
    "kPaged": ("paged", "paged"),
    "kPagedFp8": ("paged_fp8", "paged_fp8"),
    "kPagedChunk": ("paged_chunk", "paged_chunk"),
    "kPagedChunkRows": ("paged_chunk_rows", "paged_chunk"),
    "kPagedChunkFp8": ("paged_chunk_fp8", "paged_chunk_fp8"),
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
            chunk = table.startswith("kPagedChunk")
            warps, ctas = (4 * (q // 64 + 1), 1) if chunk else (numbers[3], numbers[6])
            role = "attention_" + name.removesuffix("_fp8").removesuffix("_rows")
            found[f"{family}_attention_{name}_{tile}"] = Listed(image, role, (d, q, k), warps, ctas)
            if table == "kPaged":
                for role, warps in (("paged_tickets", 1), ("paged_combine", 4)):
                    small = Listed(image, f"attention_{role}", (d, q, k), warps)
                    found[f"{family}_attention_{role}_{tile}"] = small
    return found


def listed_second(family: str) -> dict[str, Listed]:
    """Kernels of forward mode and second derivatives, by name."""
    found = {}
    for dtype in {"fp32", *FAMILIES[family].dtypes} if family != "sm90" else ():
        image = f"{family}_attention_second_{dtype}"
        for role in SECOND_ROWS:
            found[f"{family}_{role}_{dtype}"] = Listed(image, role)
        # Tiles of 16 bits take half the memory; two sums of keys take the registers of a fourth.
        halves = family == "sm80" and dtype != "fp32"
        for role in SECOND_TILES:
            ctas = 4 if halves and role != "attention_second_keys" else 3
            found[f"{family}_{role}_{dtype}"] = Listed(image, role, (0, 32, 32), 4, ctas)
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
                    numbers[-2] if table == "kBwd" and "bias" not in name else numbers[-1],
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
                elif kind == "Sm90WholeBwdTile":
                    warps, ctas = 8, 1
                elif kind in COLUMNS:
                    warps, ctas = (numbers[column] for column in COLUMNS[kind])
                else:  # sm90, whose warpgroups follow from the tile
                    by_keys = table == "kBwdBias" and d <= 32
                    consumers = q // 64 if kind == "Sm90FwdTile" else k // 64 if by_keys else 2
                    warps = 4 * (consumers + 1)
                    ctas = numbers[4] if kind == "Sm90FwdTile" and len(numbers) > 4 else 1
                image = f"{family}_attention_{image}_{dtype}_d{d}"
                role = "attention_" + re.sub("_(?:general|packed|rows|float|whole)$", "", name)
                role = role.replace("_mask", "_bias").replace("_packed", "")
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
