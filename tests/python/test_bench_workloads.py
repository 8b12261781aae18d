"""The benchmark's workloads: rows beside our own, windows, lengths, and which kernels run them."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from bench_rows import ATTENTION, flops_of
from clocks import CPU, ONE_TURN
from flashmoe_science.bench import attention, peers, ragged, runner, timing, workloads
from flashmoe_science.bench.accuracy import check, heads_to_compare
from flashmoe_science.bench.case import Implementation, Shape
from flashmoe_science.bench.workloads import WORKLOADS

CUDA = torch.device("cuda")
TABLES = {
    "head_dims": workloads.HEAD_DIMS,
    "gqa": workloads.GQA,
    "window": workloads.WINDOW,
    "mixed_lengths": workloads.MIXED_LENGTHS,
}


@pytest.mark.parametrize("workload", TABLES)
def test_rows_lie_beside_rows_of_as_many_flops(workload):
    shapes = WORKLOADS[workload].shapes["cuda"]
    assert len(set(shapes)) == len(shapes)
    assert all(str(Shape.parse(shape)) == shape for shape in shapes), "or goals would not find them"
    for shape, others in TABLES[workload].items():
        for other in others:
            assert other in shapes and other not in TABLES[workload]
            share = flops_of(workload, shape) / flops_of(workload, other)
            if workload == "window":
                assert 0.115 < share < 0.125, "of 16,384 keys at most 1,024"
            else:
                assert 0.96 < share < 1.04


def test_the_rows_are_those_that_were_asked_for():
    assert {(Shape.parse(s).dim, Shape.parse(s).length) for s in workloads.HEAD_DIMS} == {
        (96, 1024), (96, 4096), (192, 1024), (192, 4096)
    }  # fmt: skip
    assert {(Shape.parse(s).heads, Shape.parse(s).kv_heads) for s in workloads.GQA} == {
        (32, 8), (64, 8)
    }  # fmt: skip
    lengths = ragged.uniform_lengths(64, 4096)
    # Every version of Python draws these, or the rows of two machines are not about the same thing.
    assert (len(lengths), sum(lengths), lengths[:3]) == (64, 146_158, [3558, 1677, 3204])
    assert 100 <= min(lengths) < 300 and 4000 < max(lengths) <= 4096
    assert min(ragged.uniform_lengths(1000, 4096)) >= 100 and min(ragged.uniform_lengths(99, 9)) > 0


def test_a_shape_has_a_window():
    shape = Shape.parse("1,4,1024,64,kv2,causal,w128")
    assert shape.window == 128 and shape.causal and str(shape) == "1,4,1024,64,kv2,causal,w128"
    assert Shape.parse("3,4,9,8,causal,even").even
    for length, window in ((7, 1), (7, 3), (7, 7), (7, 9), (64, 16)):
        seen = peers.window_mask(length, window, CPU)
        assert Shape(1, 1, length, 8, causal=True, window=window).pairs == seen.sum()
    assert Shape.parse("1,1,10,8").pairs == 100 and Shape.parse("1,1,10,8,causal").pairs == 50


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_window_is_that_of_the_library(dtype):
    case = WORKLOADS["window"].make(Shape.parse("2,4,40,8,kv2,causal,w6"), dtype, CPU)
    assert case.ours.run.keywords == {"causal": True, "window": (5, 0)}
    assert check(case, backward=True).ok and case.scores == 2 * 4 * (21 + 34 * 6)
    assert case.reference_scores == 2 * 4 * 40 * 40, "of which few heads fit, where they are long"
    assert heads_to_compare(dataclasses.replace(case, reference_scores=1 << 25)) == 2
    wider = attention.our_dense(causal=True, window=(6, 0))
    assert not check(dataclasses.replace(case, ours=wider), backward=True).ok


@pytest.mark.parametrize("name", ["dense", "decode", "deterministic", "pair_bias", "triangle"])
def test_dense_cases_of_a_gpu_have_their_tokens_first(monkeypatch, name):
    """For everyone: a layout that only peers get would be another condition."""
    relaid = []
    monkeypatch.setattr(attention, "tokens_first", lambda x, g: relaid.append([*x]) or (x, g))
    shape = Shape.parse("2,4,8,16")
    with FakeTensorMode():
        case = WORKLOADS[name].make(shape, torch.bfloat16, CUDA)
    assert relaid == [[*case.leaves]]
    WORKLOADS[name].make(shape, torch.bfloat16, CPU)
    assert len(relaid) == 1, "a CPU has heads first, as ever"


def test_even_lengths_are_dense():
    case = WORKLOADS["mixed_lengths"].make(Shape.parse("3,4,21,8,even"), torch.float32, CPU)
    assert case.leaves["q"].shape == (3, 4, 21, 8) and not case.lengths
    case = WORKLOADS["mixed_lengths"].make(Shape.parse("3,4,21,8"), torch.float32, CPU)
    assert len(case.lengths) == 3 and case.leaves["q"].shape == (sum(case.lengths), 4, 8)


def test_a_peer_that_a_case_lacks_is_left_out(monkeypatch):
    """Packed sequences on a GPU have varlen_attn alone, the dense ones beside them no varlen."""
    right = attention.make_ragged
    monkeypatch.setattr(
        attention,
        "make_ragged",
        lambda shape, dtype, device, draw: right(shape, dtype, CPU, draw=draw),
    )
    case = attention.make_mixed_lengths(Shape.parse("3,4,21,8"), torch.float32, CUDA)
    assert list(case.peers) == ["varlen"]
    made = dataclasses.replace(WORKLOADS["mixed_lengths"], make=lambda *_: case)
    monkeypatch.setitem(WORKLOADS, "mixed_lengths", made)
    spec = runner.RowSpec("mixed_lengths", Shape.parse("3,4,21,8"), "fp32", "fwd")
    setting = runner.Setting(CPU, ["math", "varlen"], [], timing.CpuClock(), ONE_TURN)
    (found,) = runner.run_row(spec, setting)
    assert list(found["implementations"]) == ["ours"], "math is asked for, and is none of its peers"


@pytest.mark.parametrize("name", ATTENTION)
def test_every_row_knows_its_kernels(name):
    case = WORKLOADS[name].make(Shape.parse("2,4,9,8"), torch.float32, CPU)
    kernels = runner.kernels_of(case, "fwd+bwd")
    assert list(kernels) == ["fwd", "bwd"] and runner.family_of(kernels) == "cpu"
    assert kernels["fwd"].endswith("attention_fwd") and kernels["bwd"].endswith("attention_bwd")


def test_the_family_is_that_of_the_pass():
    def plan(leaves, backward):
        return f"a call\n  options    none\n  kernel     sm{80 if backward else 90}_attention_x\n"

    case = WORKLOADS["dense"].make(Shape.parse("1,2,8,8"), torch.float32, CPU)
    case = dataclasses.replace(case, ours=Implementation(case.ours.run, explain=plan))
    families = [runner.family_of(runner.kernels_of(case, p)) for p in runner.PASSES]
    assert families == ["sm90", "sm80", "sm90+sm80"]
    refused = dataclasses.replace(case, ours=Implementation(case.ours.run, explain=refuse))
    assert runner.kernels_of(refused, "fwd") == {}


def refuse(leaves, backward):
    raise RuntimeError("no CUDA kernel of this build can run this")
