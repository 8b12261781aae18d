"""The benchmark's rows about caches, second derivatives, fp32, dropout and masks, at small sizes.

Each is right, or refused with the planner's words; what PyTorch lacks on this chip says why.
"""

from __future__ import annotations

import pytest
import torch
from helpers import DEVICE

from flashmoe_science.bench import runner, timing
from flashmoe_science.bench.workloads import WORKLOADS

SHAPES = {
    "paged_decode": ("3,8,300,128,kv2,p16", "3,8,300,128,kv2,p1", "3,8,300,128,kv2,p16,e4m3"),
    "paged_uneven": ("5,8,200,128,kv2,p16", "5,8,200,128,kv2,p64,e4m3"),
    "paged_mixed": ("3,8,300,128,kv2,q70,p16", "3,8,300,128,kv2,q70,p16,e4m3"),
    "paged_prefill": ("2,8,300,128,kv2,q130,p16",),
    "append": ("64,8,128,16", "700,8,128,16", "64,8,128,16,e4m3"),
    "second": ("2,4,70,64", "1,4,50,64,bias"),
    "second_crystals": ("9,4,100,64",),
    "fp32": ("1,4,200,64", "1,4,100,64,bias", "1,4,200,64,tf32"),
    "dropout": ("1,4,200,64", "1,4,200,64,causal"),
    "mask": ("2,4,200,64", "2,4,200,64,shared"),
}


@pytest.mark.parametrize(("name", "shape"), [(n, s) for n, every in SHAPES.items() for s in every])
def test_a_row_is_right_or_refused(name, shape):
    workload, device = WORKLOADS[name], torch.device(DEVICE)
    schedule = timing.Schedule(1, 0.001)
    clock = timing.make_clock(device)
    if device.type == "cuda":
        # Results are checked here and times are not: calls may find their inputs in L2. To fill it
        # with copies of small inputs would take up to a minute a row.
        clock.flush = clock.flush[: 1 << 20]
    setting = runner.Setting(device, workload.peers(device.type), [], clock, schedule)
    for spec in runner.rows_of([name], [shape], None, None, device.type):
        for row in runner.run_row(spec, setting):
            check, found = row["check"], row["implementations"]
            if check["status"] == "refused":
                assert "no CUDA kernel of this build" in check["reason"]
                assert found["ours"]["ms"] is None
                continue
            assert check["status"] == "ok", check
            assert found["ours"]["ms"] > 0 and row["family"]
            graph = device.type == "cuda" and workload.in_graph and spec.direction != "bwd"
            assert found["ours"]["method"].startswith("CUDA graph") == graph, found["ours"]
            assert all(i["ms"] or i["reason"] for i in found.values())
            for own in ("contiguous", "sixteen_bits", "apart", "decodes", "chunk", "mask_as_bias"):
                if own in found:
                    assert found[own]["ms"], (own, found[own])
