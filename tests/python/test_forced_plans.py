"""Plans of the family and the tile that the environment asks for. Asks the planner only: no GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import flashmoe_science as fm
from catalogue import CATALOGUE, FAMILIES, FORWARD, INFO, dtype_of, needs_all_families
from plans import SHAPE, problem, spec, told

pytestmark = needs_all_families


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
        fm.explain(*problem("bf16"), device="sm_100")


def test_forcing_the_cpu_refuses_cuda_tensors(monkeypatch):
    monkeypatch.setenv("FLASHMOE_FAMILY", "cpu")
    with pytest.raises(RuntimeError, match=r"FLASHMOE_FAMILY is cpu.*\.cpu\(\)"):
        fm.explain(*problem(), device="sm_100")
    assert told(fm.explain(*problem(), device="cpu"))["kernel"].startswith("cpu_")


def test_a_family_that_does_not_exist_is_named(monkeypatch):
    monkeypatch.setenv("FLASHMOE_FAMILY", "sm42")
    with pytest.raises(RuntimeError, match=r"FLASHMOE_FAMILY is sm42; it must be sm75, sm80"):
        fm.explain(*problem(), device="sm_100")
    monkeypatch.setenv("FLASHMOE_FAMILY", "")
    fm.explain(*problem(), device="sm_100")


def test_a_tile_can_be_forced(monkeypatch):
    """Every forward tile of the lists; tests/cpp/test_plan_cuda.cc has the backward ones."""
    for name, kernel in CATALOGUE.items():
        if kernel["role"] not in FORWARD or not dtype_of(Path(kernel["image"])).endswith("16"):
            continue
        chip = "sm_75" if kernel["family"] == "sm75" else "sm_90"
        monkeypatch.setenv("FLASHMOE_TILE", f"{kernel['block_q']}x{kernel['block_k']}")
        monkeypatch.setenv("FLASHMOE_FAMILY", kernel["family"])
        # A bias that stays in shared memory has at most 512 keys.
        keys = 500 if kernel["role"].endswith("_bias") and kernel["block_q"] == 256 else 517
        tensors = problem(dtype_of(Path(kernel["image"])), kernel["head_dim"], m=keys)
        if "_fwd_packed_" in name:  # of ragged batches, which test_hopper_plans.py has
            continue
        floats = kernel["family"] != "sm90" or "_bias_float_" in name
        lead = (SHAPE["batch"], SHAPE["heads_q"]) if "_bias_rows_" in name else ()
        wide = torch.float32 if floats else tensors[0].dtype
        wide = torch.bool if "_fwd_mask_" in name else wide
        bias = spec(*lead, 300, keys, dtype=wide) if kernel["role"].endswith("_bias") else None
        softcap = 3.0 if "_fwd_general_" in name else 0.0
        options = {"softcap": softcap, "dropout_p": 0.1 if "_dropout_" in name else 0.0}
        plan = told(fm.explain(*tensors, bias=bias, **options, device=chip))
        assert plan["kernel"] == name


@pytest.mark.parametrize("tile", ["", "64", "64x", "64x64x64", "axb", "64 x 64 ", "1x1", "-64x64"])
def test_a_tile_that_does_not_exist_is_named(tile, monkeypatch):
    monkeypatch.setenv("FLASHMOE_TILE", tile)
    if not tile:
        fm.explain(*problem(), device="sm_100")
        return
    with pytest.raises(RuntimeError, match=rf"FLASHMOE_TILE .*{tile}.*\d+x\d+"):
        fm.explain(*problem(), device="sm_100")
    assert told(fm.explain(*problem(), device="cpu"))["kernel"].startswith("cpu_")
