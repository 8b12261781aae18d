"""Whatever a plan launches on a chip has machine code for it, where its family has any.

sm_90 images leave out what the planner never takes there (kernels/hopper_rows.h). Asks the planner
only: no GPU.
"""

from __future__ import annotations

import itertools
import re

import pytest
import torch

import flashmoe_science as fm
from catalogue import CATALOGUE, FAMILIES, TORCH_DTYPES, needs_all_families
from plans import problem, spec
from test_plans import capability, runs

pytestmark = needs_all_families
CHIPS = ("sm_75", "sm_80", "sm_86", "sm_87", "sm_89", "sm_90", "sm_100", "sm_120")
HEAD_DIMS = (8, 16, 32, 48, 64, 80, 96, 128, 160, 192, 224, 256)
# Batch, query heads, key heads, queries, keys: long, wide, short, one query, few blocks, odd.
SHAPES = (
    (2, 16, 16, 4096, 4096),
    (16, 16, 4, 1024, 1024),
    (600, 8, 8, 20, 31),
    (600, 8, 8, 64, 64),
    (64, 8, 1, 1, 4096),
    (1, 2, 2, 300, 8192),
    (3, 6, 3, 517, 129),
)


def runs_on(code: str, chip: str) -> bool:
    """Whether machine code for one chip runs on another: within its generation, from it on."""
    here, there = capability(chip), capability(code)
    if code.endswith("a"):
        return here == there
    return here // 10 == there // 10 and here >= there


def check_code(text: str, chip: str) -> set[str]:
    launched = set(re.findall(r"^    (\S+): grid ", text, re.M))
    assert launched, text
    for name in launched:
        kernel = CATALOGUE[name]
        native = {code for code in FAMILIES[kernel["family"]].machine_code if runs_on(code, chip)}
        # Of several the newest is loaded: sm_90 before sm_80, which would not run there anyway.
        assert native <= set(kernel["chips"]), f"{name} has no machine code for {chip}"
    return launched


def problems(dtype: str, d: int):
    for batch, heads_q, heads_k, n, m in SHAPES:
        sizes = {"batch": batch, "heads_q": heads_q, "heads_k": heads_k, "n": n, "m": m}
        tensors = problem(dtype, d, **sizes)
        for options in ({}, {"causal": True}, {"softcap": 20.0}, {"deterministic": True}):
            yield tensors, options
        yield tensors, {"bias": spec(heads_q, n, m, dtype=TORCH_DTYPES[dtype])}
        yield tensors, {"bias": spec(batch, 1, n, m, dtype=torch.float32), "causal": True}
        yield tensors, {"bias": spec(batch, 1, n, m, dtype=torch.bool)}
        yield tensors, {"dropout_p": 0.1}
        q, k, v = tensors
        shared = [x[:1].expand(batch, heads_k, m, d) for x in (k, v)]  # sm90 refuses these
        yield [q, *shared], {}
    for batch, length in ((8, 4096), (4096, 20), (64, 150)):
        offsets = {f"cu_seqlens_{x}": spec(batch + 1, dtype=torch.int32) for x in "qk"}
        longest = {f"max_seqlen_{x}": 2 * length for x in "qk"}
        packed = [spec(batch * length, 8, d, dtype=TORCH_DTYPES[dtype])] * 3
        yield packed, offsets | longest


@pytest.mark.parametrize("dtype", TORCH_DTYPES)
@pytest.mark.parametrize("chip", CHIPS)
def test_what_a_plan_launches_has_machine_code(chip, dtype):
    if not runs(chip, dtype):
        pytest.skip(f"no family has {dtype} for {chip}")
    seen: set[str] = set()
    for d, backward in itertools.product(HEAD_DIMS, (False, True)):
        for tensors, options in problems(dtype, d):
            if "deterministic" in options and not backward:
                continue
            text = fm.explain(*tensors, **options, backward=backward, device=chip)
            seen |= check_code(text, chip)
    assert len(seen) > 30, "a grid that asks for few kernels shows little"


@pytest.mark.parametrize("dtype", TORCH_DTYPES)
def test_the_grid_would_find_a_tile_that_is_left_out(dtype):
    """Each tile that sm_90 lacks is taken on a chip with less shared memory."""
    left_out = {
        name
        for name, kernel in CATALOGUE.items()
        if kernel["family"] == "sm80" and "sm_90" not in kernel["chips"]
        and kernel["dtype"] == str(TORCH_DTYPES[dtype]).removeprefix("torch.")
    }  # fmt: skip
    assert left_out
    seen = set()
    for chip, d in itertools.product(("sm_80", "sm_86"), HEAD_DIMS):
        for tensors, options in problems(dtype, d):
            text = fm.explain(*tensors, **options, backward=True, device=chip)
            seen |= set(re.findall(r"^    (\S+): grid ", text, re.M))
    assert left_out <= seen
