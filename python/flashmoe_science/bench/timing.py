"""Clocks: how long implementations of one case take, measured side by side.

Everyone has turns, as many calls as fit a budget each. In every round each implementation has one,
and every other round goes backwards: a machine that warms up or slows down favours nobody, and
nobody always follows the same one, who may leave a GPU cooler than others do. A time is the median
of the medians of the turns.

There are two regimes. Sustained: turn follows turn without a pause, and a GPU is at its power limit
as in training. Rested: the same pause comes before every turn, and everyone finds a GPU whose clock
is high. A CPU has the first one only.

The time is boxed: a peer far slower than the best one is called once and not again, and where even
one call would be long, that call is made on a few heads and scaled (marked as an estimate).

On a GPU every call finds the L2 cache filled with something else, and the time is the device's;
what launching costs the host is told apart (host_us). Workloads of short calls are captured in CUDA
graphs, many calls in one launch, forward or forward and backward: between their kernels the device
waits for no host. Where that fails, calls are timed like the others, and their "method" says why.
Steps of a whole model are timed by the wall clock, as they follow each other: there the host shows.
"""

from __future__ import annotations

import functools
import math
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field

import torch

from flashmoe_science.bench.case import (
    Case,
    Implementation,
    Outputs,
    Tensors,
    forced_backend,
)
from flashmoe_science.bench.results import OURS, REGIMES, RESTED, SUSTAINED

Call = Callable[[], None]

FAR_SLOWER = 4.0  # times the best peer: such a peer cannot decide a row, so it is not timed further
FEW_SAMPLES = 6  # below this, a row says so
BIG_FLOPS = 2e9  # of a CPU forward pass: first calls are made on a few heads
LONG_MS = 100.0  # a call this long gets one sample a turn: it averages over its own noise
MOST_SAMPLES = 200  # of a turn
GRAPH_MS = 2.0  # that a CUDA graph takes, if its calls are few enough: launching it takes 5 us
GRAPH_CALLS = 256  # at most, in a CUDA graph
EAGER_MS = 10.0  # from here on the host is so far ahead of a call that a graph changes nothing
HOST_CALLS = 20  # at most, for host_us
PAUSE_S = 0.15  # of a rested GPU before every turn


@dataclass(frozen=True)
class Schedule:
    """Who is timed when: turns of each implementation, seconds for each of them, regimes."""

    turns: int
    budget_s: float
    regimes: tuple[str, ...] = (SUSTAINED,)


# The pause is so much longer than a turn of a GPU that the turn ends before the clock is lowered.
SCHEDULES = {"cpu": Schedule(3, 0.05), "cuda": Schedule(4, 0.04, REGIMES)}


@dataclass
class Timing:
    """What is known about one implementation on one row. No turns and a reason: it cannot run."""

    turns: list[list[float]] = field(default_factory=list)  # milliseconds, one list a turn
    reason: str | None = None
    estimated_from_heads: int | None = None
    host_us: float | None = None  # CUDA: until the call returned, the device still running
    method: str | None = None  # of the turns: which clock

    @property
    def ms(self) -> float | None:
        """The median of the turns' medians."""
        return statistics.median(map(statistics.median, self.turns)) if self.turns else None

    @property
    def samples(self) -> list[float]:
        return [ms for turn in self.turns for ms in turn]

    @property
    def few(self) -> bool:
        return len(self.samples) < FEW_SAMPLES


class CpuClock:
    """Wall time of calls that return when they are done."""

    big_flops = BIG_FLOPS
    again_below_ms = 300.0  # a first call this short is made again: it includes one-time costs
    method = "wall clock"
    load_ms = 0.0  # of calls ahead of a sustained regime, which do not count

    def once(self, call: Call) -> float:
        """Milliseconds of one call."""
        start = time.perf_counter()
        call()
        return (time.perf_counter() - start) * 1e3

    def sample(self, call: Call, reset: Call, count: int, expected_ms: float = 0) -> list[float]:
        """Milliseconds of count calls, with reset() before each and outside the clock."""
        times = []
        for _ in range(count):
            reset()
            times.append(self.once(call))
        return times

    def host_us(self, call: Call, reset: Call, count: int) -> float | None:
        return None

    def pause(self) -> None:
        """Before a turn of the rested regime, which a CPU has not."""


class CudaClock:
    """Device time by events, each call finding the L2 cache filled with something else."""

    big_flops = float("inf")  # a GPU does the whole thing in milliseconds
    # The first call may load or compile kernels: cuDNN takes half a second, FlexAttention many.
    again_below_ms = float("inf")
    method = "events"
    load_ms = 100.0  # a GPU takes as long to reach its power limit

    def __init__(self, device: torch.device) -> None:
        properties = torch.cuda.get_device_properties(device)
        l2_bytes = max(getattr(properties, "L2_cache_size", 0), 32 << 20)
        self.flush = torch.empty(2 * l2_bytes, dtype=torch.int8, device=device)
        self.failed: list[torch.cuda.CUDAGraph] = []

    def sample(self, call: Call, reset: Call, count: int, expected_ms: float = 0) -> list[float]:
        """Milliseconds of count calls that are expected to take so long each; 0: unknown."""
        pairs, host_s, running_s = [], None, 0.0
        for _ in range(count):
            reset()
            self.flush.zero_()
            if cycles := cycles_to_wait(host_s, running_s):
                torch.cuda._sleep(cycles)
            pairs.append([torch.cuda.Event(enable_timing=True) for _ in range(2)])
            pairs[-1][0].record()
            start = time.perf_counter()
            call()
            # The least of all: a host that waits for room in the queue is not slow.
            spent_s = time.perf_counter() - start
            host_s = spent_s if host_s is None else min(host_s, spent_s)
            pairs[-1][1].record()
            running_s = expected_ms / 1e3
        torch.cuda.synchronize()
        return [start.elapsed_time(end) for start, end in pairs]

    def pause(self) -> None:
        torch.cuda.synchronize()
        time.sleep(PAUSE_S)

    def copies(self, size_bytes: int) -> int:
        """How many inputs of a size, read in turn, never find themselves in L2."""
        return 1 + self.flush.nbytes // max(size_bytes, 1)

    def capture(self, calls: list[Call]) -> torch.cuda.CUDAGraph:
        """The calls as one launch; an exception where they cannot be captured."""
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        # Autograd runs a backward pass on the stream of its forward pass: all on the one that is
        # captured. A capture that fails leaves it current, and the outer context does not.
        with torch.cuda.stream(stream):
            calls[0]()  # loads kernels and makes plans, which a capture must not
            try:
                with torch.cuda.graph(graph, stream=stream):
                    for call in calls:
                        call()
            except Exception:
                # A capture that fails keeps the generator for itself, and nobody else can draw.
                generator = torch.cuda.default_generators[torch.cuda.current_device()]
                fresh = torch.Generator(device="cuda")
                generator.graphsafe_set_state(fresh.graphsafe_get_state())
                self.failed.append(graph)  # the allocator still asks it whose memory is whose
                raise
        return graph

    def host_us(self, call: Call, reset: Call, count: int) -> float | None:
        """Median time until a call returns, on an idle device."""
        times = []
        for _ in range(count):
            reset()
            torch.cuda.synchronize()
            start = time.perf_counter()
            call()
            times.append((time.perf_counter() - start) * 1e6)
        torch.cuda.synchronize()
        return statistics.median(times)


class CudaWallClock(CudaClock):
    """Wall time of calls that follow each other, as in a training loop: of host and device."""

    method = "wall clock"

    def sample(self, call: Call, reset: Call, count: int, expected_ms: float = 0) -> list[float]:
        """Their mean, for each of them: where one ends on the device is not known to the host."""
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(count):
            reset()
            call()
        torch.cuda.synchronize()
        return [(time.perf_counter() - start) * 1e3 / count] * count


def cycles_to_wait(host_s: float | None, running_s: float) -> int:
    """Clock cycles of nothing on the device before a call that takes the host so long to enqueue.

    The host has then enqueued the whole call before the first event is reached, and launching stays
    out of the measurement. A call before it that runs longer leaves no need to wait: a device that
    idles between calls is not under a sustained load. What the host takes is not known before the
    first call of a turn. At most 2 ms.
    """
    needed_s = 0.25e-3 if host_s is None else 0.05e-3 + 1.5 * host_s
    return int(min(max(0.0, needed_s - running_s), 2e-3) * 2e9)


Clock = CpuClock | CudaClock


def make_clock(device: torch.device, waits_for_host: bool = False) -> Clock:
    """The device's clock, on a GPU without or with what its calls wait for the host."""
    if device.type == "cpu":
        return CpuClock()
    return CudaWallClock(device) if waits_for_host else CudaClock(device)


class Runner:
    """One implementation bound to its inputs: call() is what gets timed."""

    def __init__(
        self, implementation: Implementation, case: Case, direction: str, in_graph: bool = False
    ) -> None:
        self.implementation = implementation
        self.direction = direction
        self.backward = direction != "fwd"
        leaves, self.grad = implementation.prepare(case.leaves, case.grad)
        self.leaves = {n: t.detach().requires_grad_(self.backward) for n, t in leaves.items()}
        self.out: Outputs | None = None  # of the forward pass, while "bwd" is timed
        # A backward pass alone would need its forward pass on the stream that is captured.
        self.prefers_graph = in_graph and direction != "bwd"
        self.graph: torch.cuda.CUDAGraph | None = None
        self.graph_calls = 0
        self.why_no_graph = ""

    def call(self) -> None:
        if self.direction == "bwd":
            torch.autograd.grad(self.out, list(self.leaves.values()), self.grad, retain_graph=True)
            return
        out = self.implementation.run(self.leaves)
        if self.backward:
            torch.autograd.backward(out, self.grad)

    def reset(self) -> None:
        for leaf in self.leaves.values():
            leaf.grad = None

    def check_gradients(self) -> None:
        """A peer that leaves out a gradient is not one: it would be timed for less work."""
        if self.direction == "fwd+bwd":
            missing = [name for name, leaf in self.leaves.items() if leaf.grad is None]
            if missing:
                raise RuntimeError(f"gives no gradient of {', '.join(missing)}")

    @contextmanager
    def ready(self) -> Iterator[None]:
        """The backend forced, gradients on or off, and for "bwd" the forward pass done.

        Entered around many calls, not each: entering costs as much as a small kernel. What the
        forward pass saved is given back at the end, since others are measured in between.
        """
        grad_mode = nullcontext() if self.backward else torch.no_grad()
        with forced_backend(self.implementation), grad_mode:
            if self.backward:
                self.out = self.implementation.run(self.leaves)
                # In the layout of the output, as a model's next layer would give it.
                self.grad = in_layout_of(self.out, self.grad)
            if self.direction != "bwd":
                self.out = None
            try:
                yield
            finally:
                self.out = None

    @property
    def calls_of_sample(self) -> int:
        return self.graph_calls if self.graph else 1

    def sample(self, clock: Clock, count: int, expected_ms: float = 0) -> list[float]:
        """Milliseconds of count calls; of the calls in a graph, count means."""
        if self.graph is None:
            with self.ready():
                return clock.sample(self.call, self.reset, count, expected_ms)
        whole_ms = expected_ms * self.calls_of_sample
        times = clock.sample(self.graph.replay, self.reset, count, whole_ms)
        return [ms / self.calls_of_sample for ms in times]

    def turn(self, clock: Clock, schedule: Schedule, estimate_ms: float) -> list[float]:
        """Milliseconds of the calls of one turn, without those that warm up."""
        sample_ms = estimate_ms * self.calls_of_sample
        warm_up = warm_up_calls(sample_ms)
        count = warm_up + samples_per_turn(sample_ms, schedule.budget_s)
        return self.sample(clock, count, estimate_ms)[warm_up:]

    def make_graph(self, clock: Clock, estimate_ms: float) -> float:
        """Captures calls of about GRAPH_MS together, if wanted; milliseconds of one, as known now.

        The estimate of a call outside of a graph may be the host's time. A graph that turns out far
        too short is made again.
        """
        if not (self.prefers_graph and isinstance(clock, CudaClock)):
            return estimate_ms
        if estimate_ms > EAGER_MS:
            self.why_no_graph = f"a call takes more than {EAGER_MS:.0f} ms"
            return estimate_ms
        try:
            for _ in range(2):
                self.graph_calls = calls_in_graph(estimate_ms)
                with self.ready():
                    self.graph = clock.capture(self.calls_on_copies(clock))
                estimate_ms = min(self.sample(clock, 2))
                if estimate_ms * self.graph_calls > GRAPH_MS / 2:
                    break
        except Exception as error:  # an implementation that cannot be captured is timed otherwise
            self.graph = None
            first = error.__context__ or error  # ending a capture that failed is an error, too
            self.why_no_graph = (str(first).strip() or type(first).__name__).splitlines()[0]
        return estimate_ms

    def calls_on_copies(self, clock: CudaClock) -> list[Call]:
        """The calls of a graph, on copies of the inputs in turn: none finds its own in L2."""
        copies = clock.copies(sum(t.nbytes for t in self.leaves.values()))
        self.inputs = [self.leaves]  # the graph reads them, and this gradient
        self.graph_grad = self.grad
        for _ in range(min(copies, self.graph_calls) - 1):
            clones = {n: t.detach().clone() for n, t in self.leaves.items()}
            self.inputs.append({n: t.requires_grad_(self.backward) for n, t in clones.items()})
        calls = [functools.partial(self.call_on, leaves) for leaves in self.inputs]
        return [calls[i % len(calls)] for i in range(self.graph_calls)]

    def call_on(self, leaves: Tensors) -> None:
        """A call whose gradients nobody keeps: not even the next call of a graph."""
        out = self.implementation.run(leaves)
        if self.backward:
            torch.autograd.grad(out, list(leaves.values()), self.grad)

    def method(self, clock: Clock) -> str:
        if self.graph:
            return f"CUDA graph of {self.graph_calls} calls"
        return clock.method + (f"; no CUDA graph: {self.why_no_graph}" if self.why_no_graph else "")

    def host_us(self, clock: Clock, count: int) -> float | None:
        with self.ready():
            return clock.host_us(self.call, self.reset, count)


def in_layout_of(out: Outputs, grad: Outputs) -> Outputs:
    if isinstance(out, tuple):
        return tuple(in_layout_of(*pair) for pair in zip(out, grad, strict=True))
    return torch.empty_like(out).copy_(grad)


def cannot_run(error: Exception, caught: list[warnings.WarningMessage]) -> str:
    """Why a call failed, in one line. PyTorch puts the reason for "no kernel" in warnings."""
    lines = [str(error), *(str(w.message).split("(Triggered")[0] for w in caught)]
    # The first sentence says it; what follows lists every dispatch key there is. A warning that
    # ends in "because:" has its reason in a later one, or keeps it to itself.
    sentences = [line.strip().split("\n")[0].split(". ")[0].rstrip(". ") for line in lines]
    useful = dict.fromkeys(s for s in sentences if s and not s.endswith("because:"))
    return f"{type(error).__name__}: {'; '.join(useful)}"


def first_call(
    implementation: Implementation, case: Case, direction: str, clock: Clock
) -> tuple[float, int]:
    """Milliseconds of an early call, scaled to all heads, and the heads it was made on."""
    heads = case.heads
    if case.flops > clock.big_flops:
        # Enough heads to keep every thread busy: PyTorch's backward pass has one thread per head.
        heads = min(case.heads, -(-torch.get_num_threads() // case.group) * case.group)
    part = case.take_heads(heads) if heads < case.heads else case
    runner = Runner(implementation, part, direction)
    ms = runner.sample(clock, 1)[0]
    if ms < clock.again_below_ms:
        ms = runner.sample(clock, 1)[0]
    runner.check_gradients()
    return ms * case.heads / heads, heads


def calls_in_graph(call_ms: float) -> int:
    """How many calls make a graph that takes GRAPH_MS, within reason."""
    return max(1, min(GRAPH_CALLS, math.ceil(GRAPH_MS / max(call_ms, 1e-3))))


def samples_per_turn(sample_ms: float, budget_s: float) -> int:
    """How many samples fit the budget, within reason."""
    if sample_ms > LONG_MS:
        return 1
    return max(2, min(MOST_SAMPLES, int(budget_s * 1e3 / max(sample_ms, 1e-3))))


def warm_up_calls(sample_ms: float) -> int:
    """Calls before those of a turn, for caches, allocator and threads; a long one needs none."""
    return 2 if sample_ms < 10 else 1 if sample_ms < LONG_MS else 0


def measure(
    case: Case,
    peers: list[str],
    direction: str,
    clock: Clock,
    schedule: Schedule,
    in_graph: bool = False,
) -> dict[str, dict[str, Timing]]:
    """Times one pass of ours and the named peers: a Timing by regime and then name, ours first."""
    implementations = {OURS: case.ours, **{name: case.peers[name] for name in peers}}
    first = {name: Timing() for name in implementations}
    estimates: dict[str, float] = {}
    runners: dict[str, Runner] = {}
    for name, implementation in implementations.items():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                estimate, heads = first_call(implementation, case, direction, clock)
                runner = Runner(implementation, case, direction, in_graph)
                estimates[name] = runner.make_graph(clock, estimate)
            except Exception as error:
                first[name].reason = cannot_run(error, caught)
                continue  # an out-of-memory error lands here too, and says so in the table
        runners[name] = runner
        first[name].estimated_from_heads = heads if heads < case.heads else None
    peer_estimates = [ms for name, ms in estimates.items() if name != OURS]
    limit = FAR_SLOWER * min(peer_estimates, default=float("inf"))
    kept = {OURS, case.baseline, *(n for n, i in implementations.items() if i.in_full)}
    for name in [name for name, ms in estimates.items() if name not in kept and ms > limit]:
        first[name].turns.append([estimates.pop(name)])
        first[name].method = runners.pop(name).method(clock)
    found = {}
    for regime in schedule.regimes:
        timed = run_turns(runners, estimates, clock, schedule, regime)
        found[regime] = {name: timed.get(name, first[name]) for name in implementations}
    for name, runner in runners.items():
        count = min(HOST_CALLS, samples_per_turn(estimates[name], schedule.budget_s))
        host_us = runner.host_us(clock, count)
        for timings in found.values():
            timings[name].host_us = host_us
    return found


def run_turns(
    runners: dict[str, Runner],
    estimates: dict[str, float],
    clock: Clock,
    schedule: Schedule,
    regime: str,
) -> dict[str, Timing]:
    """The turns of everyone in one regime; a sustained one begins on a chip that is busy."""
    timings = {name: Timing() for name in runners}
    busy_ms = 0.0
    while regime == SUSTAINED and runners and busy_ms < clock.load_ms:
        for name, runner in runners.items():
            busy_ms += runner.calls_of_sample * sum(runner.turn(clock, schedule, estimates[name]))
    for round_ in range(schedule.turns):
        for name in order_of(round_, list(runners)):
            if regime == RESTED:
                clock.pause()
            timings[name].turns.append(runners[name].turn(clock, schedule, estimates[name]))
    for name, timing in timings.items():
        timing.method = runners[name].method(clock)
    return timings


def order_of(round_: int, names: list[str]) -> list[str]:
    """Forth and back."""
    return names[::-1] if round_ % 2 else names
