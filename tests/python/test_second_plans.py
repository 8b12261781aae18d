"""Plans of forward mode and second derivatives on GPUs. Asks the planner only: no GPU."""

from __future__ import annotations

import re

import pytest
import torch

import flashmoe_science as fm
from catalogue import needs_all_families

pytestmark = needs_all_families

# Chips, the family that they get, and its dtypes.
CHIPS = [
    ("sm_75", "sm75", (torch.float32, torch.float16)),
    ("sm_80", "sm80", (torch.float32, torch.float16, torch.bfloat16)),
    ("sm_86", "sm80", (torch.float32, torch.float16, torch.bfloat16)),
    ("sm_90", "sm80", (torch.float32, torch.float16, torch.bfloat16)),
    ("sm_120", "sm80", (torch.float32, torch.float16, torch.bfloat16)),
]
every_chip = pytest.mark.parametrize("chip, family, dtypes", CHIPS, ids=[row[0] for row in CHIPS])
every_derivative = pytest.mark.parametrize("derivative", ["tangent", "second"])


def meta(*shape, dtype=torch.float16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def plan_of(lead=(2,), heads=4, n=70, m=45, d=64, dv=None, dtype=torch.float16, **options) -> str:
    q, k = meta(*lead, heads, n, d, dtype=dtype), meta(*lead, heads, m, d, dtype=dtype)
    v = meta(*lead, heads, m, dv or d, dtype=dtype)
    return fm.explain(q, k, v, **{"device": "sm_90", "derivative": "second"} | options)


def launches(text: str) -> list[tuple[str, tuple[int, ...]]]:
    """Each kernel's role, and its grid."""
    found = re.findall(r"^ +sm\d+_attention_(\w+)_\w+: grid (\d+) x (\d+) x (\d+)", text, re.M)
    return [(role, tuple(int(x) for x in grid)) for role, *grid in found]


@every_chip
@every_derivative
def test_every_chip_has_them(chip, family, dtypes, derivative):
    for dtype in dtypes:
        text = plan_of(dtype=dtype, device=chip, derivative=derivative)
        kernel = re.search(r"^ +kernel +(\w+)$", text, re.M)[1]
        assert kernel.startswith(f"{family}_attention_{derivative}")
        assert "\n  bitwise reproducible" in text and "for every head dim" in text


@every_derivative
def test_turing_has_no_bf16(derivative):
    with pytest.raises(RuntimeError, match=r"sm75.*bfloat16.*\.cpu\(\)"):
        plan_of(dtype=torch.bfloat16, device="sm_75", derivative=derivative)


def test_a_family_without_them_is_refused_by_name(monkeypatch):
    monkeypatch.setenv("FLASHMOE_FAMILY", "sm90")
    with pytest.raises(RuntimeError, match="sm90: has no kernels of second derivatives"):
        plan_of()


@every_derivative
def test_a_tile_that_is_forced_is_that_of_other_passes(derivative, monkeypatch):
    want = plan_of(derivative=derivative)
    monkeypatch.setenv("FLASHMOE_FAMILY", "sm80")
    monkeypatch.setenv("FLASHMOE_TILE", "128x128")
    assert launches(plan_of(derivative=derivative)) == launches(want)


@pytest.mark.parametrize("d, dv, chunks", [(1, 1, 1), (64, 64, 1), (65, 8, 2), (8, 65, 2)])
def test_results_come_in_chunks_of_columns(d, dv, chunks):
    """Tiles of 32 rows, and for each chunk of 64 columns of the results."""
    roles = dict(launches(plan_of(d=d, dv=dv)))
    assert roles["second_queries"] == (3 * -(-d // 64), 4, 2)
    assert roles["second_keys"] == (2 * chunks, 4, 2)
    ((_, grid),) = launches(plan_of(d=d, dv=dv, derivative="tangent"))
    assert grid == (3 * -(-dv // 64), 4, 2)


def test_what_is_launched():
    plain = ["second_rows", "second_queries", "second_keys"]
    assert [role for role, _ in launches(plan_of())] == plain
    own = plan_of(bias=meta(2, 4, 70, 45))
    assert [role for role, _ in launches(own)] == plain, "no other sum than that of the tile"
    sinks = meta(88, dtype=torch.float32)
    shared = plan_of(lead=(8,), heads=88, bias=meta(88, 70, 45), sinks=sinks)
    expected = ["second_rows", "second_sinks", "second_queries", "second_keys", "second_bias_sum"]
    assert [role for role, _ in launches(shared)] == expected
    few = plan_of(lead=(300,), heads=1, bias=meta(70, 45))
    roles = [role for role, _ in launches(few)]
    assert roles[-2:] == ["second_bias_sum"] * 2 and "what shares the bias, in" in few


@pytest.mark.parametrize("chip, beside", [("sm_75", []), ("sm_80", []), ("sm_90", ["keys"])])
def test_who_runs_beside_the_launch_before(chip, beside):
    """The kernel by keys needs nothing of the one by queries. All others wait."""
    text = plan_of(device=chip, bias=meta(70, 45), sinks=meta(4, dtype=torch.float32))
    assert (
        re.findall(r"attention_second_(\w+)_fp16: .*, overlaps the launch before", text) == beside
    )


@every_derivative
def test_ragged(derivative):
    cu = meta(301, dtype=torch.int32)
    lengths = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": 70, "max_seqlen_k": 70}
    for heads in (1, 4):
        for dtype in (torch.float32, torch.bfloat16):
            x = meta(9300, 4, 100, dtype=dtype)
            bias = meta(300 * 31 * 31, heads, dtype=dtype)
            options = {"bias": bias, "device": "sm_90", "derivative": derivative, **lengths}
            found = dict(launches(fm.explain(x, x, x, **options)))
            slots = 9300 // 32 + 300 + 1
            assert found["ragged_blocks"][1] == (2 if derivative == "tangent" or heads > 1 else 3)
            if derivative == "tangent":
                assert found["tangent"] == (4 * slots, 2, 1)
                continue
            assert found["second_queries"] == found["second_keys"] == (4 * slots, 2, 1)
            assert ("second_bias_sum" in found) == (heads == 1)


def workspace(text: str) -> float:
    return float(re.search(r"^ +workspace +([\d.]+) MiB$", text, re.M)[1])


def test_the_workspace_is_linear_in_the_length():
    """Four numbers for each row of queries."""
    for n in (1024, 65536):
        assert workspace(plan_of(n=n, m=n, bias=meta(2, 4, n, n))) == 8 * n * 16 / 2**20
    assert workspace(plan_of(n=65536, m=65536, derivative="tangent")) == 0


def test_more_sequences_than_a_grid_holds():
    text = plan_of(lead=(70000,), n=3, m=3)
    assert "slices     2" in text
    assert dict(launches(text))["second_keys"] == (1, 4, 35000)
