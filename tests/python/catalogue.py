"""What tests of compiled kernels and of plans share: the families, and the kernels of this build.

Written over families, so that a new one only adds its line to the table.
"""

from __future__ import annotations

import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import flashmoe_science  # noqa: F401  registers the ops

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import kernel_report as report  # noqa: E402


@dataclass(frozen=True)
class Family:
    machine_code: frozenset[str]  # chips
    ptx: frozenset[str]
    dtypes: frozenset[str]
    head_dims: tuple[int, ...]
    instructions: tuple[str, ...]  # that each kernel with products has
    foreign: str  # a pattern of instructions that none of its kernels has


INSTRUCTIONS = {
    "sm75": (("HMMA.1688", "LDSM"), r"HMMA\.16816|LDGSTS|F32x\d"),
    "sm80": (("HMMA.16816", "LDSM", "LDGSTS.E.BYPASS.128"), r"HMMA\.1688|HGMMA|UTMA"),
    "sm90": (("HGMMA", "UTMALDG"), r"HMMA\.1688|LDGSTS"),
}
TORCH_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
SHORT_DTYPES = {str(dtype).removeprefix("torch."): name for name, dtype in TORCH_DTYPES.items()}

# fp32 by three TF32 products or by FMAs, and by one: attention's alone, in kernels/fp32.h.
FP32_PRODUCTS = {"sm75": ("fp32",), "sm80": ("fp32", "tf32")}

INFO = json.loads(torch.ops.flashmoe.build_info())
# The library's own table; what a family's machine code must look like is the tests' to say.
FAMILIES = {
    row["name"]: Family(
        frozenset(row["machine_code"]),
        frozenset([row["ptx"].replace("compute", "sm")] if row["ptx"] else []),
        frozenset(SHORT_DTYPES[dtype] for dtype in row["dtypes"]),
        tuple(row["head_dims"]),
        *INSTRUCTIONS[row["name"]],
    )
    for row in INFO["cuda_families"]
}
FORWARD = {"attention_fwd", "attention_fwd_bias", "attention_fwd_dropout"}
PAIRS = {"attention_paged_decode", "attention_paged"}  # over pages, tiles of (query, head)
PAGED = {*PAIRS, "attention_paged_chunk"}
BACKWARD = {"attention_bwd", "attention_bwd_bias", "attention_bwd_dropout"}
FINISH = {f"{role}_dq" for role in BACKWARD}
BIAS_SUM = "attention_bwd_bias_sum"
# Products of a mixture of experts, by the table that has their tiles.
MOE_PRODUCTS = {
    "kRows": ("moe_up", "moe_down", "moe_bwd_act"),
    "kTokens": ("moe_bwd_weights",),
}
CATALOGUE = {kernel["name"]: kernel for kernel in INFO.get("kernels", [])}
# The images that the library holds: the build folder may have others, of an earlier build.
HELD = {f"{kernel['image']}.{chip}" for kernel in CATALOGUE.values() for chip in kernel["chips"]}
IMAGES = [image for image in report.fatbins() if image.stem in HELD]

needs_images = pytest.mark.skipif(
    not IMAGES, reason="this build has no CUDA kernels: make build FLASHMOE_FAMILIES=all"
)
# Plans are compared over all chips.
EVERY_CHIP = {(name, chip) for name, family in FAMILIES.items() for chip in family.machine_code}
needs_all_families = pytest.mark.skipif(
    not IMAGES
    or {(k["family"], chip) for k in CATALOGUE.values() for chip in k["chips"]} != EVERY_CHIP,
    reason="this build lacks kernels of some family: make build FLASHMOE_FAMILIES=all",
)


def dtype_of(image: Path) -> str:
    """sm80_attention_fwd_fp16_d64.sm_90.fatbin -> fp16; "" where kernels have none"""
    found = re.search(r"_([a-z]+(?:16|32))(?:_d\d+)?(?:\.|$)", image.name)
    return found[1] if found else ""


def chip_of(image: Path) -> str:
    """sm80_attention_fwd_fp16_d64.sm_90.fatbin -> sm_90"""
    return image.name.split(".")[1]


def beside(kernel: str, part: str) -> str:
    """sm80_attention_bwd_bias_fp16_d64_64x64 -> sm80_attention_bwd_bias_dq_fp16_d64_64x64"""
    return re.sub(r"_([a-z]+(?:16|32)_d)", rf"_{part}_\1", kernel)


def bias_sum(kernel: str) -> str:
    """The kernel that sums the gradient of a shared bias after that one; its tile is its own."""

    def of(name: str) -> tuple:
        k = CATALOGUE[name]
        return k["family"], dtype_of(Path(k["image"])), k["head_dim"]

    found = [
        name for name, k in CATALOGUE.items() if k["role"] == BIAS_SUM and of(name) == of(kernel)
    ]
    assert len(found) == 1, f"{kernel}: {found}"
    return found[0]
