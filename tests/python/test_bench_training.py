"""The benchmark's training steps: whole models, their SDPA ours through the hook."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

from clocks import CPU
from flashmoe_science import sdpa
from flashmoe_science.__main__ import main
from flashmoe_science.bench import accuracy, memory, timing, training
from flashmoe_science.bench.peer_file import NotSupported, PeerFile
from flashmoe_science.bench.runner import RowSpec
from flashmoe_science.bench.training import MODELS, SDPA, TrainingShape
from flashmoe_science.bench.workloads import WORKLOADS


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    sizes = {"WIDTH": 32, "HEADS": 2, "LAYERS": 2, "WORDS": 40}
    for name, size in sizes.items():
        monkeypatch.setattr(training, name, size)


def make(model: str, dtype=torch.float32):
    return WORKLOADS["training"].make(TrainingShape(model, 2, 9), dtype, CPU)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("model", MODELS)
def test_steps_are_right(model, dtype):
    case = make(model, dtype)
    oracle = accuracy.Oracle(case, backward=True)
    for implementation in (case.ours, case.peers[SDPA]):
        verdict = oracle.verdict(implementation)
        assert verdict.ok, verdict.worst
    grads = {name for name in verdict.deviations if name.startswith("grad_")}
    assert all(name.endswith(" rms") for name in grads) and "out max" in verdict.deviations
    assert len(grads) == len(case.leaves) > 10, "of every parameter, tied ones once"
    assert "kernel" in case.ours.explain(case.leaves, True)
    assert memory.needed_bytes(case, True) is None and memory.measure(case, True) is None


@pytest.mark.parametrize("model", MODELS)
def test_the_hook_is_around_our_steps_alone(model, monkeypatch):
    """Attention that is wrong on purpose is found in ours, and PyTorch's has none of it."""
    case, right = make(model), sdpa.flash_attention
    calls = []

    def wrong(q, *args, **options):
        calls.append(options["causal"])
        return right(q, *args, **options) * 0.9

    monkeypatch.setattr(sdpa, "flash_attention", wrong)
    oracle = accuracy.Oracle(case, backward=True)
    assert not calls
    assert not oracle.verdict(case.ours).ok
    assert calls == [MODELS[model][1]] * training.LAYERS, "which layers are causal"
    assert oracle.verdict(case.peers[SDPA]).ok and len(calls) == training.LAYERS


def test_a_case_has_no_parts_and_files_have_no_models(tmp_path):
    case = make("llama")
    assert case.heads == case.group == 1 and accuracy.heads_to_compare(case) == 1
    (tmp_path / "peer.py").write_text("def attention(q, k, v, causal): return q\n")
    peer = PeerFile.load(tmp_path / "peer.py")
    spec = RowSpec("training", TrainingShape("llama", 2, 9), "fp32", "fwd+bwd")
    with pytest.raises(NotSupported, match="a file has no model"):
        peer.implementation(spec, case)


def test_flops_are_those_of_products():
    """Of llama, a layer: q, o of 32 x 32, k, v of 16 x 32, three of 1408 x 32; and 40 words."""
    tokens, weights = 2 * 9, 2 * (2 * 32 * 32 + 2 * 16 * 32 + 3 * 1408 * 32) + 40 * 32
    assert make("llama").flops == tokens * (2 * weights + 2 * 4 * 4.5 * 32)
    layer, words = 4 * 32 * 32 + 2 * 4 * 32 * 32, 40 * 32  # tied to those that are looked up
    assert make("gpt2").flops == tokens * (2 * (2 * layer + words) + 2 * 4 * 4.5 * 32)
    beyond = 32 * 32  # between the last layer and the words
    assert make("bert").flops == tokens * (2 * (2 * layer + beyond + words) + 2 * 4 * 9 * 32)


@pytest.mark.parametrize(
    "text", ["lama,4,512", "llama,4", "llama,0,512", "llama,4,x", "4,8,256,64"]
)
def test_bad_shapes_are_named(capsys, text):
    assert main(["bench", "--workload", "training", "--shape", text]) == 2
    said = capsys.readouterr().err
    assert "expected model,batch,length with a model of llama, gpt2, bert" in said


def test_without_transformers_it_says_what_to_install(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(training.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install transformers"):
        make("bert")


def test_a_run(tmp_path, capsys):
    options = "--workload training --shape gpt2,1,5 --dtype fp32 --device cpu --budget 0.001"
    assert main(["bench", *options.split(), "--out", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "training step on" in text and "model,B,S" in text and "gpt2,1,5" in text
    (row,) = json.loads((tmp_path / "results.json").read_text())["rows"]
    assert row["best_peer"] == SDPA and row["ratio"] > 0 and row["pass"] == "fwd+bwd"
    assert row["shape"] == {"model": "gpt2", "batch": 1, "length": 5}


def test_on_a_gpu_the_wall_clock_counts_the_host(monkeypatch):
    assert WORKLOADS["training"].waits_for_host
    assert [n for n, workload in WORKLOADS.items() if workload.waits_for_host] == ["training"]
    done, now = [], [0.0]

    def call():
        done.append("call")
        now[0] += 0.002

    def finish():
        done.append("synchronize")
        now[0] += 0.001

    monkeypatch.setattr(torch.cuda, "synchronize", finish)
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])
    clock = object.__new__(timing.CudaWallClock)
    times = clock.sample(call, lambda: done.append("reset"), 4)
    assert times == pytest.approx([2.25] * 4), "milliseconds: four calls, and what then still runs"
    assert done == ["synchronize", *["reset", "call"] * 4, "synchronize"]
    assert isinstance(timing.make_clock(CPU, waits_for_host=True), timing.CpuClock)


def test_a_turn_binds_a_model_to_its_parameters_once():
    case = make("llama")
    model = case.ours.run.__self__
    leaves = {name: leaf * 1.5 for name, leaf in case.leaves.items()}
    first = model.logits(leaves)
    assert model.bound is leaves
    torch.testing.assert_close(model.logits(leaves), first, rtol=0, atol=0)
    assert not torch.equal(model.logits(case.leaves), first)
    again = dataclasses.replace(case, leaves=leaves)
    torch.testing.assert_close(accuracy.compute(case.ours, again, False)["out"], first)
