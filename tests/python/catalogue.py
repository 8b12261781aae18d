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
    "sm90": Family({"sm_90a"}, set(), {"fp16", "bf16"}, ("HGMMA", "UTMALDG"), r"HMMA\.1688|LDGSTS"),
}
FORWARD = {"attention_fwd", "attention_fwd_bias"}
BACKWARD = {"attention_bwd", "attention_bwd_bias"}
FINISH = {"attention_bwd_dq", "attention_bwd_bias_dq"}
BIAS_SUM = "attention_bwd_bias_sum"
TORCH_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}

INFO = json.loads(torch.ops.flashmoe.build_info())
CATALOGUE = {kernel["name"]: kernel for kernel in INFO.get("kernels", [])}
# The images that the library holds: the build folder may have others, of an earlier build.
HELD = {kernel["image"] for kernel in CATALOGUE.values()}
IMAGES = [image for image in report.fatbins() if image.stem in HELD]

needs_images = pytest.mark.skipif(
    not IMAGES, reason="this build has no CUDA kernels: make build FLASHMOE_FAMILIES=all"
)
# Plans are compared over all chips.
needs_all_families = pytest.mark.skipif(
    not IMAGES or set(INFO["families"]) != set(FAMILIES),
    reason="this build lacks kernels of some family: make build FLASHMOE_FAMILIES=all",
)


def dtype_of(image: Path) -> str:
    """sm80_attention_fwd_fp16_d64 -> fp16"""
    return re.search(r"_([a-z]+16)(?:_d\d+)?$", image.stem)[1]


def beside(kernel: str, part: str) -> str:
    """sm80_attention_bwd_bias_fp16_d64_64x64 -> sm80_attention_bwd_bias_dq_fp16_d64_64x64"""
    return re.sub(r"_([a-z]+16_d)", rf"_{part}_\1", kernel)


def bias_sum(kernel: str) -> str:
    """The kernel that sums the gradient of a shared bias after that one; its tile is its own."""
    image = CATALOGUE[kernel]["image"]
    found = [k for k, x in CATALOGUE.items() if (x["role"], x["image"]) == (BIAS_SUM, image)]
    assert len(found) == 1, f"{kernel}: {found}"
    return found[0]
