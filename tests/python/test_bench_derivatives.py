"""The benchmark's workloads of second derivatives, fp32, dropout and masks."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

import test_dropout
from clocks import CPU, FakeCudaClock
from flashmoe_science.__main__ import main
from flashmoe_science.bench import accuracy, attention, dropout, memory, options, runner, timing
from flashmoe_science.bench.case import Shape, each, forced_backend, named
from flashmoe_science.bench.peer_file import PeerFile
from flashmoe_science.bench.workloads import WORKLOADS

DTYPES = (torch.float32, torch.bfloat16)
SECOND = {"second": "2,4,13,8,bias", "second_crystals": "5,4,20,8"}


def make(name: str, shape: str, dtype=torch.float32):
    return WORKLOADS[name].make(Shape.parse(shape), dtype, CPU)


def test_outputs_are_one_or_many():
    x = torch.ones(2)
    assert torch.equal(each(torch.neg, x), -x) and named(x) == {"out": x}
    assert [float(y[0]) for y in each(torch.neg, (x, 2 * x))] == [-1, -2]
    assert [*named((x, x))] == ["out_0", "out_1"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", ["2,4,13,8", "2,4,13,8,kv2", "1,4,9,8,bias"])
def test_second_derivatives_are_right(shape, dtype):
    case = make("second", shape, dtype)
    inputs = ["q", "k", "v", *(["bias"] if "bias" in shape else [])]
    oracle = accuracy.Oracle(case, backward=True)
    wanted = {f"out_{i}" for i in range(len(inputs))} | {f"grad_{n}" for n in (*inputs, "dout")}
    assert set(oracle.exact) == wanted
    for implementation in (case.ours, case.peers["math"]):
        verdict = oracle.verdict(implementation)
        assert verdict.ok, verdict.worst


def test_the_oracle_is_the_derivative_of_the_derivative():
    """By differences of the first gradients, which the other tests know to be right."""
    case = accuracy.in_double(make("second", "1,2,5,4,bias"))
    found = accuracy.compute(case.reference, case, backward=True)
    step = {name: torch.randn_like(leaf) * 1e-6 for name, leaf in case.leaves.items()}

    def gradients(sign: float) -> tuple:
        leaves = {n: (leaf + sign * step[n]).requires_grad_() for n, leaf in case.leaves.items()}
        return case.reference.run(leaves)

    change = sum(
        ((after - before) * grad).sum()
        for after, before, grad in zip(gradients(1), gradients(-1), case.grad, strict=True)
    )
    slope = sum((found[f"grad_{name}"] * x).sum() for name, x in step.items())
    assert change.item() / 2 == pytest.approx(slope.item(), rel=1e-6)


@pytest.mark.parametrize("name", SECOND)
def test_a_wrong_second_derivative_would_be_found(name, monkeypatch):
    case = make(name, SECOND[name])
    assert accuracy.check(case, backward=True).ok
    for function in ("flash_attention", "flash_attention_varlen"):
        right = getattr(attention, function)
        # Of the same first gradient where v is, and another second one.
        monkeypatch.setattr(attention, function, lambda *a, _right=right, **o: off(_right(*a, **o)))
    verdict = accuracy.check(case, backward=True)
    assert not verdict.ok and all(
        deviation.ok for name, deviation in verdict.deviations.items() if name.startswith("out_")
    )


def off(out: torch.Tensor) -> torch.Tensor:
    """out, whose backward pass loses some of its own gradient."""

    class Off(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return 0.5 * grad + 0.5 * grad.detach()

    return Off.apply(out)


@pytest.mark.parametrize("name", SECOND)
def test_some_heads_are_a_smaller_case(name):
    case = make(name, SECOND[name], torch.float64)
    part = case.take_heads(2)
    assert part.leaves["dout"].shape[1] == 2 and part.grad[0].shape[1] == 2
    whole, some = (accuracy.compute(case.ours, c, True) for c in (case, part))
    for result, values in some.items():
        assert torch.equal(values, whole[result][:, : values.shape[1]]), result


def test_passes_and_work_of_second_derivatives():
    workload, case = WORKLOADS["second"], make("second", "2,4,13,8")
    assert workload.passes_for(None, "cuda") == ["bwd", "fwd+bwd"] and workload.in_graph
    assert workload.dtypes_for(None, "cuda") == ["fp32", "bf16"]
    forward = 4 * 2 * 4 * 13 * 13 * 8
    assert case.flops == 3.5 * forward, "both passes of attention"
    assert case.flops * workload.flops_of_pass("bwd") == pytest.approx(6 * forward)
    assert case.flops * workload.flops_of_pass("fwd+bwd") == pytest.approx(9.5 * forward)
    inputs = sum(leaf.nbytes for leaf in case.leaves.values())
    outputs = sum(grad.nbytes for grad in case.grad)
    lse = 2 * 4 * 13 * 4
    assert memory.needed_bytes(case, backward=True) == 2 * (inputs + outputs) + lse


@pytest.mark.parametrize("name", SECOND)
def test_kernels_of_second_derivatives(name):
    kernels = runner.kernels_of(make(name, SECOND[name]), "fwd+bwd")
    assert kernels["fwd"].endswith("attention_bwd") and kernels["bwd"].endswith("attention_second")


@pytest.mark.parametrize("direction", ["bwd", "fwd+bwd"])
def test_second_derivatives_are_timed(direction):
    case = make("second", "1,2,8,8")
    bound = timing.Runner(case.ours, case, direction, in_graph=True)
    assert len(bound.sample(timing.CpuClock(), 2)) == 2
    bound.check_gradients()
    bound.make_graph(FakeCudaClock(1.0), 1.0)
    assert (bound.graph is not None) == (direction == "fwd+bwd")
    if bound.graph:
        bound.graph.replay()


PEER = """
import torch
import torch.nn.functional as F

def attention(q, k, v, causal, bias=None, mask=None):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    weights = (q @ k.mT * q.shape[-1] ** -0.5 + (0 if bias is None else bias)).softmax(-1)
    return (weights @ v).transpose(1, 2)
"""


def test_a_peer_from_a_file_is_derived_twice(tmp_path):
    path = tmp_path / "peer.py"
    path.write_text(PEER)
    case = make("second", "2,4,13,8,bias")
    spec = runner.RowSpec("second", None, "fp32", "fwd+bwd")
    implementation = PeerFile.load(path).implementation(spec, case)
    assert accuracy.Oracle(case, True).verdict(implementation).ok


def test_tf32_is_for_everyone_and_for_no_other_row(tmp_path):
    before = torch.get_float32_matmul_precision()
    for text, wanted in (("1,2,9,8", "highest"), ("1,2,9,8,tf32", "high")):
        case = make("fp32", text)
        for implementation in (case.ours, case.reference, *case.peers.values()):
            with forced_backend(implementation):
                assert torch.get_float32_matmul_precision() == wanted
        assert accuracy.check(case, backward=True).ok
    (tmp_path / "peer.py").write_text(PEER)
    spec = runner.RowSpec("fp32", None, "fp32", "fwd")
    assert PeerFile.load(tmp_path / "peer.py").implementation(spec, case).tf32
    assert torch.get_float32_matmul_precision() == before
    with pytest.raises(KeyError), forced_backend(case.ours):
        raise KeyError
    assert torch.get_float32_matmul_precision() == before


def test_the_largest_error_of_tf32_may_be_a_step_more():
    oracle = accuracy.Oracle(make("fp32", "1,2,9,8"), backward=False)
    allowed = [dataclasses.replace(oracle.case.ours, tf32=tf32) for tf32 in (False, True)]
    plain, tf32 = (oracle.verdict(ours).deviations for ours in allowed)
    more = tf32["out max"].limit - plain["out max"].limit
    assert more == pytest.approx(oracle.exact["out"].abs().max().item() * 2**-10)
    assert tf32["out rms"].limit == plain["out rms"].limit


def test_fp32_has_one_dtype(capsys):
    assert WORKLOADS["fp32"].dtypes_for(None, "cuda") == ["fp32"]
    assert main(["bench", "--workload", "fp32", "--dtype", "bf16", "--device", "cpu"]) == 2
    assert "--dtype: workload fp32 has only fp32" in capsys.readouterr().err


def test_dropped_pairs_are_those_of_philox():
    """Against what the tests of dropout wrote down for themselves."""
    size = torch.Size((2, 3, 37, 70))
    for p, seed in ((0.1, options.SEED), (0.5, 7), (0.9, -1)):
        found = dropout.kept(size, p, seed, torch.empty(0, dtype=torch.float64))
        assert torch.equal(found, test_dropout.kept(seed, p, *size))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", ["2,4,33,8", "2,4,33,8,kv2,causal"])
def test_dropout_is_compared_and_peers_are_not(shape, dtype):
    case = make("dropout", shape, dtype)
    assert accuracy.check(case, backward=True).ok
    assert all(peer.another for peer in case.peers.values()) and case.baseline == "math"
    seed = torch.tensor(options.SEED + 1)
    other = {"causal": "causal" in shape, "dropout_p": options.DROPPED, "seed": seed}
    wrong = dataclasses.replace(case, ours=attention.our_dense(**other))
    assert not accuracy.check(wrong, backward=True).ok


@pytest.mark.parametrize("shared", ["", ",shared"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_mask_is_bytes(dtype, shared):
    case = make("mask", f"2,4,33,8,kv2{shared}", dtype)
    mask = case.ours.run.keywords["mask"]
    assert mask.dtype == torch.bool and mask.shape == (2, 1 if shared else 4, 33, 33)
    assert case.peers["mask_as_bias"].run.keywords["mask"].dtype == dtype
    oracle = accuracy.Oracle(case, backward=True)
    for name in ("math", "mask_as_bias"):
        assert oracle.verdict(case.peers[name]).ok, name
    assert oracle.verdict(case.ours).ok
    other = attention.our_dense(mask=mask.roll(1, -1))
    assert not accuracy.check(dataclasses.replace(case, ours=other), backward=True).ok
    assert not case.keywords["mask"].is_floating_point() and "mask" in case.keywords


def test_a_run_as_a_user_makes_it(tmp_path, capsys, threads):
    options = "--workload second,second_crystals,dropout,mask,fp32 --shape 2,2,13,8 --dtype fp32"
    options += f" --device cpu --budget 0.001 --threads 1 --out {tmp_path}"
    assert main(["bench", *options.split()]) == 0
    text = capsys.readouterr().out
    assert "second derivatives of attention on" in text
    rows = json.loads((tmp_path / "results.json").read_text())["rows"]
    assert len(rows) == 2 + 2 + 2 + 2 + 2 and all(r["check"]["status"] == "ok" for r in rows)
    best = {row["workload"]: row["best_peer"] for row in rows}
    assert best["second"] == best["second_crystals"] == best["dropout"] == "math"
