"""Random problems over every option: against the oracle, and the same bits with 1 and 2 threads."""

import pytest
from hypothesis import HealthCheck, given, settings

import oracle
from oracle import same_bits
from problems import build, problems, seeded

PROBLEMS = 1000
CHUNK = 50  # problems in one test, so that progress is seen


def complaints_about(problem, threads) -> list[str]:
    case = build(problem)
    threads(1)
    alone = oracle.ours(case)
    threads(2)
    together = oracle.ours(case)
    found = oracle.compare(case, together)
    for name in together:
        if not same_bits(alone[name], together[name]):
            found.append(f"{name}: 1 and 2 threads give different bits")
    return found


@pytest.mark.parametrize("first", range(0, PROBLEMS, CHUNK))
def test_random_problems(first, threads):
    failures = []
    for seed in range(first, first + CHUNK):
        problem = seeded(seed)
        if found := complaints_about(problem, threads):
            failures.append("\n  ".join([f"seed {seed}: {problem}", *found]))
    summary = f"{len(failures)} of {CHUNK} failed"
    assert not failures, "\n".join([summary, *failures[:5]])


# The same problems, chosen by hypothesis: no new seeds for the release, but failures shrink.
@settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(problem=problems())
def test_problems_by_hypothesis(problem, threads):
    found = complaints_about(problem, threads)
    assert not found, "\n  ".join([str(problem), *found])
