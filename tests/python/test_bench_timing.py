"""The benchmark's clocks: who is timed when, how often, and what is inside the clock."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import types

import pytest
import torch
from rich.console import Console

import flashmoe_science as fm
from catalogue import needs_all_families
from clocks import CPU, ONE_TURN, FakeCpuClock, FakeCudaClock, scripted
from flashmoe_science.bench import accuracy, host, report, runner, timing
from flashmoe_science.bench.case import Implementation, Shape, tokens_first
from flashmoe_science.bench.results import RESTED, SUSTAINED
from flashmoe_science.bench.workloads import WORKLOADS


def in_runs(calls: list[str]) -> list[str]:
    """Names without repetitions in a row."""
    return [name for i, name in enumerate(calls) if i == 0 or calls[i - 1] != name]


def test_everyone_has_turns_forth_and_back():
    calls: list[str] = []
    clock = FakeCpuClock()
    case = scripted(clock, calls, {"ours": 2, "a": 2, "b": 3})
    schedule = timing.Schedule(3, 0.006)
    found = timing.measure(case, ["a", "b"], "fwd", clock, schedule)
    forth = ["ours", "a", "b"]
    assert in_runs(calls) == in_runs([*forth, *forth, *forth[::-1], *forth])
    assert list(found) == [SUSTAINED], "the only regime of a CPU"
    timings = found[SUSTAINED]
    assert [len(turn) for turn in timings["a"].turns] == [3, 3, 3], "as many as fit the budget"
    assert [len(turn) for turn in timings["b"].turns] == [2, 2, 2]
    assert timings["a"].ms == 2 and timings["b"].ms == 3


def test_a_time_is_the_median_of_the_medians():
    timed = timing.Timing([[1, 1, 9], [5, 5, 5], [3, 4, 90]])
    assert timed.ms == 4 and not timed.few and len(timed.samples) == 9
    assert runner.as_data(timed, flops=8e6)["turn_medians_ms"] == [1, 5, 4]
    assert runner.as_data(timed, flops=8e6)["gflops"] == 2


def test_regimes_differ_by_the_same_pause_before_every_turn():
    clock = FakeCudaClock()
    case = scripted(clock, clock.events, {"ours": 1, "a": 1})
    schedule = timing.Schedule(2, 0.002, (SUSTAINED, RESTED))
    found = timing.measure(case, ["a"], "fwd", clock, schedule)
    assert list(found) == [SUSTAINED, RESTED]
    events = clock.events
    until = events.index("pause")
    # Both calls of an implementation before its turns; a round ahead that does not count; two more.
    ahead, counted = ["ours", "a"], ["ours", "a", "a", "ours"]
    assert events[:until] == ["ours", "ours", "a", "a", *ahead, *counted]
    assert events[until:] == [e for name in counted for e in ("pause", name)]
    for timings in found.values():
        assert all(len(t.turns) == 2 for t in timings.values()), "the round ahead is not among them"
        assert timings["ours"].host_us == 1.0


def test_a_sustained_load_begins_before_it_counts():
    clock = FakeCudaClock()
    clock.load_ms = 9.0
    case = scripted(clock, clock.events, {"ours": 1, "a": 1})
    schedule = timing.Schedule(1, 0.002, (SUSTAINED, RESTED))
    timing.measure(case, ["a"], "fwd", clock, schedule)
    # Two samples of 1 ms a turn: 4 ms a round, so three rounds ahead and one that counts.
    until = clock.events.index("pause")
    assert clock.events[4:until] == ["ours", "a"] * 4
    assert clock.events[until:] == ["pause", "ours", "pause", "a"]


class Event:
    """torch.cuda.Event, on a device whose time goes on by a millisecond an event."""

    now = 0.0

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        Event.now += 1.0
        self.at = Event.now

    def elapsed_time(self, other):
        return other.at - self.at


def test_every_call_of_a_gpu_finds_another_cache(monkeypatch):
    """The order of what the device is given: reset, flush, perhaps a wait, event, call, event."""
    done: list[str] = []
    clock = object.__new__(timing.CudaClock)
    clock.flush = type("Flush", (), {"zero_": lambda self: done.append("flush")})()
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: done.append("wait"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: done.append("synchronize"))
    call, reset = (lambda: done.append("call")), (lambda: done.append("reset"))
    assert clock.sample(call, reset, 3, expected_ms=1e6) == [1.0] * 3
    once = ["reset", "flush", "call"]
    assert done == ["reset", "flush", "wait", "call", *once, *once, "synchronize"]
    monkeypatch.setattr(timing.time, "sleep", lambda seconds: done.append(f"{seconds} s"))
    clock.pause()
    assert done[-2:] == ["synchronize", f"{timing.PAUSE_S} s"], "nothing runs during the pause"


def test_a_regime_can_be_left_out():
    clock = FakeCudaClock()
    case = scripted(clock, clock.events, {"ours": 1})
    assert list(timing.measure(case, [], "fwd", clock, ONE_TURN)) == [SUSTAINED]
    assert "pause" not in clock.events


@pytest.mark.parametrize(
    ("sample_ms", "samples", "warm_up"),
    [(0.01, timing.MOST_SAMPLES, 2), (2, 25, 2), (30, 2, 1), (90, 2, 1), (101, 1, 0)],
)
def test_how_many_calls_a_turn_has(sample_ms, samples, warm_up):
    assert timing.samples_per_turn(sample_ms, 0.05) == samples
    assert timing.warm_up_calls(sample_ms) == warm_up


def test_a_far_slower_peer_is_not_repeated():
    calls: list[str] = []
    clock = FakeCpuClock()
    case = scripted(clock, calls, {"ours": 50, "fast": 2, "slow": 400})
    schedule = timing.Schedule(3, 0.01)
    timings = timing.measure(case, ["fast", "slow"], "fwd", clock, schedule)[SUSTAINED]
    assert calls.count("slow") == 1
    assert timings["slow"].few and timings["slow"].ms == 400
    assert calls.count("ours") > 4, "ours is always measured, however slow"
    data = runner.as_data(timings["slow"], flops=1.0)
    assert data["samples"] == 1 and data["few_samples"]


@pytest.mark.parametrize("change", [{"baseline": "slow"}, {"in_full": True}])
def test_a_peer_that_was_asked_for_is_always_repeated(change):
    """The peer a row's ratio is about, and one that comes from a file."""
    calls: list[str] = []
    clock = FakeCpuClock()
    case = scripted(clock, calls, {"ours": 1, "fast": 1, "slow": 30})
    if "in_full" in change:
        slow = dataclasses.replace(case.peers["slow"], **change)
        case = dataclasses.replace(case, peers={**case.peers, "slow": slow})
    else:
        case = dataclasses.replace(case, **change)
    schedule = timing.Schedule(3, 0.01)
    timings = timing.measure(case, ["fast", "slow"], "fwd", clock, schedule)[SUSTAINED]
    assert len(timings["slow"].turns) == 3 and not timings["slow"].few


def test_a_big_case_is_tried_on_a_few_heads(threads):
    threads(1)
    calls: list[str] = []
    clock = FakeCpuClock()
    case = scripted(clock, calls, {"ours": 2, "fast": 2, "slow": 200})
    clock.big_flops = 0
    schedule = timing.Schedule(3, 0.01)
    timings = timing.measure(case, ["fast", "slow"], "fwd", clock, schedule)[SUSTAINED]
    assert timings["slow"].estimated_from_heads == 1
    assert timings["slow"].ms == 4 * 200, "the time of one head of four, times four"
    assert timings["fast"].estimated_from_heads is None and not timings["fast"].few
    assert "estimated_from_heads" in runner.as_data(timings["slow"], flops=1.0)


def test_compiling_is_not_timed():
    calls: list[str] = []
    clock = FakeCudaClock(first_ms=10_000.0)
    case = scripted(clock, calls, {"ours": 1, "a": 1})
    timings = timing.measure(case, ["a"], "fwd", clock, timing.Schedule(2, 0.001))[SUSTAINED]
    for found in timings.values():
        assert found.ms == 1.0 and len(found.turns) == 2, "nobody is dropped for a slow start"


def test_the_device_waits_for_a_slow_host_and_for_no_other():
    assert timing.cycles_to_wait(None, 0.0) == 500_000, "0.25 ms at 2 GHz before a first call"
    assert timing.cycles_to_wait(100e-6, 0.0) == 400_000, "half as long again, and 0.05 ms"
    assert timing.cycles_to_wait(100e-6, 150e-6) == 100_000, "the call before runs meanwhile"
    assert timing.cycles_to_wait(30e-6, 1e-3) == 0, "a load without gaps"
    assert timing.cycles_to_wait(1.0, 0.0) == 4_000_000, "at most 2 ms"


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
        def sample(self, call, reset, count, expected_ms=0):
            calls.append("clock starts")
            times = super().sample(call, reset, count)
            calls.append("clock stops")
            return times

    assert len(bound.sample(Clock(), 3)) == 3
    assert calls == ["forward", "clock starts", *["backward"] * 3, "clock stops"]
    assert bound.leaves["q"].grad is None and bound.out is None, "what was saved is given back"


def test_the_gradient_comes_in_the_layout_of_the_output():
    case = WORKLOADS["dense"].make(Shape.parse("2,3,5,8"), torch.float32, CPU)
    transposed = Implementation(lambda x: tokens_first({}, x["q"] * x["k"] * x["v"])[1])
    bound = timing.Runner(transposed, case, "bwd")
    bound.sample(timing.CpuClock(), 1)
    assert bound.grad.transpose(1, 2).is_contiguous() and torch.equal(bound.grad, case.grad)


def graph_timing(case, clock, direction="fwd", schedule=ONE_TURN):
    """What a workload of short calls finds out about ours."""
    return timing.measure(case, [], direction, clock, schedule, in_graph=True)[SUSTAINED]["ours"]


def test_short_calls_are_timed_as_a_graph_over_copies():
    seen: list[int] = []
    case = WORKLOADS["decode"].make(Shape.parse("1,2,8,4,kv2"), torch.float32, CPU)
    ours = Implementation(lambda leaves: seen.append(leaves["k"].data_ptr()) or leaves["q"])
    case = dataclasses.replace(case, ours=ours, peers={})
    clock = FakeCudaClock(0.125, 0.125)
    size = sum(t.nbytes for t in case.leaves.values())
    assert clock.copies(size) == 1 + 1000 // size == 2, "together more than the cache"
    assert clock.copies(10**9) == 1
    ours = graph_timing(case, clock, schedule=timing.Schedule(1, 0.006))
    assert ours.method == "CUDA graph of 16 calls" and ours.ms == 0.125
    assert len(ours.turns[0]) == 3, "of 2 ms each: a sample is the whole graph"
    first_calls = 2
    replayed = seen[first_calls:][:16]
    assert replayed[0] != replayed[1] and replayed[:2] * 8 == replayed, "copies in turn"


def test_the_load_ahead_counts_every_call_of_a_graph():
    seen: list[int] = []
    case = WORKLOADS["decode"].make(Shape.parse("1,2,8,4,kv2"), torch.float32, CPU)
    ours = Implementation(lambda leaves: seen.append(1) or leaves["q"])
    case = dataclasses.replace(case, ours=ours, peers={})
    clock = FakeCudaClock(0.125, 0.125)
    clock.load_ms = 9.0
    graph_timing(case, clock, schedule=timing.Schedule(1, 0.006))
    # Graphs of 16 calls, 2 ms. Three samples a turn: two turns are load enough, and one counts. The
    # clock replays a graph once for each, and before them two first calls and once for an estimate.
    assert len(seen) <= 2 + 16 * (1 + 2 + 1)


@pytest.mark.parametrize("direction", ["fwd", "fwd+bwd"])
def test_a_graph_is_as_long_as_its_device_time_wants(direction):
    """A host that is slower than the device makes a call look long, and its graph too short."""
    case = WORKLOADS["pair_bias"].make(Shape.parse("1,2,8,4"), torch.float32, CPU)
    ours = graph_timing(case, FakeCudaClock(0.25, 0.25, host_ms=1.0), direction)
    assert ours.method == "CUDA graph of 8 calls" and ours.ms == 0.25
    assert graph_timing(case, FakeCudaClock(3.0), direction).method == "CUDA graph of 1 calls"
    assert timing.calls_in_graph(1e-9) == timing.GRAPH_CALLS and timing.calls_in_graph(1.5) == 2


def test_both_passes_are_in_a_graph(monkeypatch):
    """Every call of it goes both ways on leaves of its own, and leaves no gradient behind."""
    went: list[str] = []
    case = WORKLOADS["dense"].make(Shape.parse("1,2,8,8"), torch.float32, CPU)
    case = dataclasses.replace(case, leaves={"q": case.leaves["q"]})
    ours = Implementation(lambda x: Node.apply(x["q"], went))
    bound = timing.Runner(ours, case, "fwd+bwd", in_graph=True)
    clock = FakeCudaClock(1.0)
    assert bound.make_graph(clock, 1.0) == 1.0 and len(bound.inputs) == 2
    bound.reset()
    went.clear()
    bound.graph.replay()
    assert went == ["forward", "backward"] * 2
    assert all(x["q"].is_leaf and x["q"].grad is None for x in bound.inputs)
    assert bound.inputs[0]["q"].data_ptr() != bound.inputs[1]["q"].data_ptr()
    alone = timing.Runner(ours, case, "bwd", in_graph=True)
    assert alone.make_graph(clock, 1.0) == 1.0 and alone.graph is None, "its forward pass is eager"


@contextlib.contextmanager
def noted(done: list[str], name: str, fails: bool = False):
    done.append(f"enter {name}")
    try:
        yield
    finally:
        if fails:  # before it has cleaned up, as torch.cuda.graph
            raise RuntimeError("capture invalidated")
        done.append(f"leave {name}")


@pytest.mark.parametrize("fails", [False, True])
def test_a_capture_is_on_one_stream_and_leaves_nothing_behind(monkeypatch, fails):
    """What the device is given: a call that warms up, then all of them, both on the same stream."""
    done: list[str] = []
    stream = types.SimpleNamespace(wait_stream=lambda other: done.append(f"wait for {other}"))
    state = types.SimpleNamespace(graphsafe_get_state=lambda: "fresh")
    mine = types.SimpleNamespace(graphsafe_set_state=lambda x: done.append(f"{x} generator"))
    for name, fake in {
        "CUDAGraph": lambda: "graph",
        "Stream": lambda: stream,
        "current_stream": lambda: "default",
        "current_device": lambda: 0,
        "default_generators": [mine],
        "stream": lambda x: noted(done, "stream") if x is stream else None,
        "graph": lambda x, stream: noted(done, x, fails),
    }.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(torch, "Generator", lambda device: state)
    clock = object.__new__(timing.CudaClock)
    clock.failed = []
    calls = [lambda: done.append("a"), lambda: done.append("b")]
    begin = ["wait for default", "enter stream", "a", "enter graph", "a", "b"]
    if not fails:
        assert clock.capture(calls) == "graph" and clock.failed == []
        assert done == [*begin, "leave graph", "leave stream"]
        return
    with pytest.raises(RuntimeError, match="invalidated"):
        clock.capture(calls)
    assert done == [*begin, "fresh generator", "leave stream"] and clock.failed == ["graph"]


def test_the_first_error_of_a_capture_is_said():
    case = WORKLOADS["decode"].make(Shape.parse("1,2,8,4,kv2"), torch.float32, CPU)
    clock = FakeCudaClock(2.0, 2.0)

    def capture(calls):
        try:
            raise RuntimeError("operation not permitted when stream is capturing\nand more")
        finally:
            raise ValueError("capture invalidated")

    clock.capture = capture
    ours = graph_timing(case, clock)
    assert ours.method.endswith("no CUDA graph: operation not permitted when stream is capturing")


def test_what_cannot_be_captured_is_timed_by_events():
    case = WORKLOADS["decode"].make(Shape.parse("1,2,8,4,kv2"), torch.float32, CPU)
    ours = graph_timing(case, FakeCudaClock(2.0, 2.0, can_capture=False))
    assert ours.ms == 2
    assert ours.method == "events; no CUDA graph: operation not permitted"
    ours = graph_timing(case, FakeCudaClock(32.0, 32.0))
    assert ours.method == "events; no CUDA graph: a call takes more than 10 ms"
    dense = WORKLOADS["dense"].make(Shape.parse("1,2,8,4"), torch.float32, CPU)
    ours = timing.measure(dense, [], "bwd", FakeCudaClock(), ONE_TURN)[SUSTAINED]["ours"]
    assert ours.method == "events"


def test_a_far_slower_peer_is_told_by_device_time():
    """A host that is slow to launch a peer does not drop it, and one dropped says its method."""
    case = WORKLOADS["dense"].make(Shape.parse("1,2,8,4"), torch.float32, CPU)
    slow = FakeCudaClock(0.5, 0.5)
    times = {"ours": 0.5, "math": 0.5, "flash": 4.0}

    def sample(call, reset, count, expected_ms=0):
        graph = getattr(call, "__self__", None)
        calls = getattr(graph, "calls", [])
        name = calls[0].func.__self__.implementation.backend if calls else "eager"
        return [times[name or "ours"] * len(calls) if calls else 5.0] * count

    slow.sample = sample
    timings = timing.measure(case, ["math", "flash"], "fwd", slow, ONE_TURN, in_graph=True)
    timings = timings[SUSTAINED]
    assert timings["math"].ms == 0.5 and len(timings["math"].turns[0]) == 2
    assert timings["flash"].turns == [[4.0]] and timings["flash"].method.startswith("CUDA graph")


def test_host_times_of_both_ways_and_passes(monkeypatch):
    monkeypatch.setattr(host, "ROUND", 3)
    found = host.times(torch.device("cpu"))
    assert set(found) == set(report.HOST_CALLS)
    for key, times in found.items():
        assert set(times) == {"ours", "sdpa", *(["hook"] if key != "paged" else [])}
        assert all(0 < us < 1e6 for us in times.values())
    text = io.StringIO()
    report.print_host_times(Console(file=text, width=200), {"host_us": found})
    assert text.getvalue().count("through enable_sdpa()") == 3


def test_host_times_are_of_the_family_that_is_forced_but_of_no_tile(monkeypatch):
    monkeypatch.setenv("FLASHMOE_FAMILY", "sm75")
    monkeypatch.setenv("FLASHMOE_TILE", "128x128,80x128")
    seen = []
    names = ("FLASHMOE_FAMILY", "FLASHMOE_TILE")
    monkeypatch.setattr(host, "us_of", lambda *_: seen.append([os.environ.get(x) for x in names]))
    host.times(torch.device("cpu"))
    assert seen and all(forced == ["sm75", None] for forced in seen)
    assert os.environ["FLASHMOE_TILE"] == "128x128,80x128"


@needs_all_families
@pytest.mark.parametrize("chip", ["sm_75", "sm_80", "sm_90"])
def test_every_chip_runs_the_calls_that_host_times_make(chip):
    """explain() raises where none of the kernels does: sm_75 has none in bf16."""
    q = torch.empty(1, 1, 64, 64, dtype=host.DTYPE)
    assert "_attention_bwd_" in fm.explain(q, q, q, backward=True, device=chip)
    token, cache = q[:, :, 0], torch.empty(4, 16, 1, 64, dtype=host.DTYPE)
    table = torch.empty(1, 4, dtype=torch.int32)
    lens = torch.empty(1, dtype=torch.int32)
    bounds = {"max_seqlen_q": 1, "max_seqlen_k": 64}
    plan = fm.explain_paged(token, cache, cache, table, lens, **bounds, device=chip)
    assert "_attention_paged_" in plan
