"""The benchmark's clocks: who is timed when, how often, and what is inside the clock."""

from __future__ import annotations

import dataclasses
import time

import torch

from flashmoe_science.bench import accuracy, runner, timing
from flashmoe_science.bench.case import Implementation, Shape, tokens_first
from flashmoe_science.bench.workloads import WORKLOADS

CPU = torch.device("cpu")


def fake_case(calls: list[str], seconds: dict[str, float]):
    """A case whose implementations sleep for given times and write their names down."""

    def fake(name: str) -> Implementation:
        def run(leaves):
            calls.append(name)
            time.sleep(seconds[name])
            return leaves["q"] * 1.0

        return Implementation(run)

    case = WORKLOADS["dense"].make(Shape.parse("1,4,8,8"), torch.float32, CPU)
    peers = {name: fake(name) for name in seconds if name != timing.OURS}
    return dataclasses.replace(case, ours=fake(timing.OURS), peers=peers)


def in_runs(calls: list[str]) -> list[str]:
    """Names without repetitions in a row."""
    return [name for i, name in enumerate(calls) if i == 0 or calls[i - 1] != name]


def test_order_is_peers_ours_ours_peers(monkeypatch):
    monkeypatch.setattr(timing, "FAR_SLOWER", 1e9)  # nobody is left out, on a busy machine either
    calls: list[str] = []
    case = fake_case(calls, {"ours": 0.002, "a": 0.002, "b": 0.003})
    timings = timing.measure(case, ["a", "b"], "fwd", timing.CpuClock(), budget_s=0.01)
    assert in_runs(calls) == ["ours", "a", "b", "a", "b", "ours", "b", "a"]
    assert all(len(t.rounds) == 2 for t in timings.values())
    assert timings["a"].ms >= 2 and timings["b"].ms >= 3


def test_the_clock_rests_before_each_round(monkeypatch):
    monkeypatch.setattr(timing, "FAR_SLOWER", 1e9)
    calls: list[str] = []

    class Clock(timing.CpuClock):
        def rest(self):
            calls.append("rest")

    case = fake_case(calls, {"ours": 0.001, "a": 0.001})
    timing.measure(case, ["a"], "fwd", Clock(), budget_s=0.01)
    rounds = ["rest", "a", "rest", "ours", "rest", "ours", "rest", "a"]
    assert in_runs(calls) == ["ours", "a", *rounds]


def test_a_far_slower_peer_is_not_repeated():
    calls: list[str] = []
    case = fake_case(calls, {"ours": 0.05, "fast": 0.002, "slow": 0.4})
    timings = timing.measure(case, ["fast", "slow"], "fwd", timing.CpuClock(), budget_s=0.01)
    assert calls.count("slow") == 1
    assert timings["slow"].few and timings["slow"].ms >= 400
    assert calls.count("ours") > 4, "ours is always measured, however slow"
    data = runner.as_data(timings["slow"], flops=1.0)
    assert data["samples"] == 1 and data["few_samples"]


def test_a_peer_that_bars_are_about_is_always_repeated():
    calls: list[str] = []
    clock = timing.CpuClock()
    clock.always = ("flash",)
    case = fake_case(calls, {"ours": 0.001, "fast": 0.001, "flash": 0.03})
    timings = timing.measure(case, ["fast", "flash"], "fwd", clock, budget_s=0.01)
    assert len(timings["flash"].rounds) == 2 and not timings["flash"].few


def test_a_big_case_is_tried_on_a_few_heads(threads):
    threads(1)
    calls: list[str] = []
    case = fake_case(calls, {"ours": 0.002, "fast": 0.002, "slow": 0.2})
    clock = timing.CpuClock()
    clock.big_flops = 0
    timings = timing.measure(case, ["fast", "slow"], "fwd", clock, budget_s=0.01)
    assert timings["slow"].estimated_from_heads == 1
    assert timings["slow"].ms >= 4 * 200, "the time of one head of four, times four"
    assert timings["fast"].estimated_from_heads is None and not timings["fast"].few
    assert "estimated_from_heads" in runner.as_data(timings["slow"], flops=1.0)


def test_gradients_do_not_pile_up_between_samples():
    case = WORKLOADS["pair_bias"].make(Shape.parse("1,2,8,8"), torch.float32, CPU)
    bound = timing.Runner(case.ours, case, "fwd+bwd")
    bound.sample(timing.CpuClock(), 3)
    expected = accuracy.compute(case.ours, case, backward=True)
    for name, leaf in bound.leaves.items():
        assert torch.equal(leaf.grad, expected[f"grad_{name}"])


class Node(torch.autograd.Function):
    """Notes which way it is gone through."""

    @staticmethod
    def forward(ctx, x, calls):
        ctx.calls = calls
        calls.append("forward")
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        ctx.calls.append("backward")
        return grad * 2, None


def test_the_backward_pass_alone_is_only_that():
    calls: list[str] = []
    case = WORKLOADS["dense"].make(Shape.parse("1,2,8,8"), torch.float32, CPU)
    case = dataclasses.replace(case, leaves={"q": case.leaves["q"]})
    bound = timing.Runner(Implementation(lambda x: Node.apply(x["q"], calls)), case, "bwd")

    class Clock(timing.CpuClock):
        def sample(self, call, reset, count):
            calls.append("clock starts")
            times = super().sample(call, reset, count)
            calls.append("clock stops")
            return times

    assert len(bound.sample(Clock(), 3)) == 3
    assert calls == ["forward", "clock starts", *["backward"] * 3, "clock stops"]
    assert bound.leaves["q"].grad is None and bound.out is None, "what was saved is given back"
    assert bound.sample(Clock(), 0) == [] and calls.count("forward") == 1


def test_the_gradient_comes_in_the_layout_of_the_output():
    case = WORKLOADS["dense"].make(Shape.parse("2,3,5,8"), torch.float32, CPU)
    transposed = Implementation(lambda x: tokens_first({}, x["q"] * x["k"] * x["v"])[1])
    bound = timing.Runner(transposed, case, "bwd")
    bound.sample(timing.CpuClock(), 1)
    assert bound.grad.transpose(1, 2).is_contiguous() and torch.equal(bound.grad, case.grad)


class FakeCudaClock(timing.CudaClock):
    """A CUDA clock without CUDA: a graph is its list of calls, and every replay takes 32 ms."""

    def __init__(self, can_capture: bool = True) -> None:
        self.flush = torch.empty(1000, dtype=torch.int8)
        self.can_capture = can_capture

    def sample(self, call, reset, count):
        call()
        return [32.0] * count

    def rest(self):
        pass

    def host_us(self, call, reset, count):
        return 1.0

    def capture(self, calls):
        if not self.can_capture:
            raise RuntimeError("operation not permitted\nwhen stream is capturing")

        class Graph:
            def replay(self):
                for call in calls:
                    call()

        return Graph()


def test_decode_is_timed_as_a_graph_over_copies():
    seen: list[int] = []
    case = WORKLOADS["decode"].make(Shape.parse("1,2,8,4,kv2"), torch.float32, CPU)
    ours = Implementation(lambda leaves: seen.append(leaves["k"].data_ptr()) or leaves["q"])
    case = dataclasses.replace(case, ours=ours, peers={})
    clock = FakeCudaClock()
    size = sum(t.nbytes for t in case.leaves.values())
    assert clock.copies(size) == 1 + 1000 // size == 2, "together more than the cache"
    assert clock.copies(10**9) == 1 and clock.copies(1) == timing.GRAPH_CALLS[1]
    timings = timing.measure(case, [], "fwd", clock, budget_s=0.001)
    ours = timings["ours"]
    assert ours.method == "CUDA graph of 16 calls" and ours.ms == 32 / 16
    assert seen[0] != seen[1] and seen[:2] * 8 == seen[:16], "copies in turn"


def test_what_cannot_be_captured_is_timed_by_events():
    case = WORKLOADS["decode"].make(Shape.parse("1,2,8,4,kv2"), torch.float32, CPU)
    timings = timing.measure(case, [], "fwd", FakeCudaClock(can_capture=False), budget_s=0.001)
    assert timings["ours"].ms == 32
    assert timings["ours"].method == "events; no CUDA graph: operation not permitted"
    dense = WORKLOADS["dense"].make(Shape.parse("1,2,8,4"), torch.float32, CPU)
    timings = timing.measure(dense, [], "bwd", FakeCudaClock(), budget_s=0.001)
    assert timings["ours"].method == "events"
