"""Which kernel families there are to test, and what each has. Asked of the library."""

from __future__ import annotations

import json
import os

import torch

import flashmoe_science as fm

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
# fp32 has kernels of its own in the families that carry every option: test_fp32.py.
EVERY_DTYPE = DTYPES | {"fp32": torch.float32}
KERNELS = json.loads(torch.ops.flashmoe.build_info()).get("kernels", [])
# These carry every option there is: that one of them refuses a call is an error. What another
# refuses is not tested of it; test_sm90.py says what that may be.
COMPLETE = ("sm80", "sm75")
# A tile that meets a NaN or an infinity is computed once more, row by row, and rounded otherwise.
RECOMPUTES = ("sm90",)


def forced() -> str | None:
    return os.environ.get("FLASHMOE_FAMILY")


def refusal(*tensors, **options) -> str:
    """Why the planner cannot run a call with the family that is forced; "" where it can."""
    try:
        fm.explain(*tensors, **options)
    except RuntimeError as error:
        return str(error)
    return ""


def runs_here(family: str) -> bool:
    """Whether this machine's GPU, or the H200 that a machine without one plans for, runs it."""
    major, minor = torch.cuda.get_device_capability() if torch.cuda.is_available() else (9, 0)
    q = torch.empty(1, 1, 128, 64, dtype=torch.float16, device="meta")
    before = forced()
    os.environ["FLASHMOE_FAMILY"] = family
    try:
        return not refusal(q, q, q, device=f"sm_{10 * major + minor}")
    finally:
        del os.environ["FLASHMOE_FAMILY"]
        if before:
            os.environ["FLASHMOE_FAMILY"] = before


def dtypes_of(family: str) -> tuple[str, ...]:
    there = {kernel["dtype"] for kernel in KERNELS if kernel["family"] == family}
    return tuple(name for name, dtype in DTYPES.items() if str(dtype).split(".")[1] in there)


def has(family: str, role: str, tile: tuple[int, int] | None = None) -> bool:
    """Whether the family has a kernel that does that, with this tile or with any."""
    return any(
        kernel["family"] == family
        and kernel["role"] == role
        and tile in (None, (kernel["block_q"], kernel["block_k"]))
        for kernel in KERNELS
    )


# Best first. A build without kernels has one to rehearse the tests with, on the CPU.
FAMILIES = {
    family: dtypes_of(family)
    for family in dict.fromkeys(kernel["family"] for kernel in KERNELS)
    if runs_here(family)
} or {"sm80": tuple(DTYPES)}
