"""Clocks for tests of the benchmark. None looks at the time, so that no load makes a test fail."""

from __future__ import annotations

import dataclasses

import torch

from flashmoe_science.bench import timing
from flashmoe_science.bench.case import Case, Implementation, Shape
from flashmoe_science.bench.workloads import WORKLOADS

CPU = torch.device("cpu")
ONE_TURN = timing.Schedule(1, 0.001)


class FakeCpuClock(timing.CpuClock):
    """A wall clock that its calls set forward themselves: now += milliseconds."""

    def __init__(self) -> None:
        self.now = 0.0

    def once(self, call):
        start = self.now
        call()
        return self.now - start


@dataclasses.dataclass
class FakeGraph:
    calls: list

    def replay(self):
        for call in self.calls:
            call()


class FakeCudaClock(timing.CudaClock):
    """A CUDA clock without CUDA: a graph is its list of calls, and every call takes call_ms.

    The first sample of an implementation takes first_ms, for a kernel that must be compiled. A call
    outside of a graph takes host_ms more, for a host that is too slow.
    """

    def __init__(self, call_ms=1.0, first_ms=1.0, can_capture=True, host_ms=0.0) -> None:
        self.flush = torch.empty(1000, dtype=torch.int8)
        self.call_ms, self.first_ms, self.can_capture = call_ms, first_ms, can_capture
        self.host_ms = host_ms
        self.seen: set[int] = set()
        self.load_ms = 0.1  # one round
        self.events: list[str] = []  # "pause" and the names of implementations that have one

    def sample(self, call, reset, count, expected_ms=0):
        reset()
        call()
        caller = getattr(call, "__self__", None)
        if isinstance(caller, FakeGraph):
            return [self.call_ms * len(caller.calls)] * count
        implementation = getattr(caller, "implementation", None)
        first = implementation is not None and id(implementation) not in self.seen
        self.seen.add(id(implementation))
        return [(self.first_ms if first else self.call_ms) + self.host_ms] * count

    def pause(self):
        self.events.append("pause")

    def host_us(self, call, reset, count):
        return 1.0

    def capture(self, calls):
        if not self.can_capture:
            raise RuntimeError("operation not permitted\nwhen stream is capturing")
        return FakeGraph(calls)


def scripted(clock, calls: list[str], ms: dict[str, float]) -> Case:
    """A case whose implementations take given milliseconds and write their names down."""

    def fake(name: str) -> Implementation:
        def run(leaves):
            calls.append(name)
            if isinstance(clock, FakeCpuClock):
                clock.now += ms[name]
            return leaves["q"] * 1.0

        return Implementation(run)

    case = WORKLOADS["dense"].make(Shape.parse("1,4,8,8"), torch.float32, CPU)
    peers = {name: fake(name) for name in ms if name != timing.OURS}
    return dataclasses.replace(case, ours=fake(timing.OURS), peers=peers)
