"""Small calls for compute-sanitizer: every kernel of every family, with gradients.

    python3 tools/sanitize.py memcheck racecheck initcheck synccheck     judges what the tools say
    python3 tests/gpu/sanitize.py --family sm90 --part 0/4               a fourth of its calls

Forward in both its tiles, split and combined, backward in any order and in turn, ragged, masks and
lengths, a bias and its gradient, strides, edge lengths, head dims of every bucket; second
derivatives; a mixture of experts and its router in every tile, with either order of weights. No
pytest, and the arithmetic around the calls is the CPU's: the tools slow every kernel down, and only
ours are of interest. Exits with 1 where a result is far off; the tests judge precisely.
"""

import argparse
import os
import sys
from dataclasses import replace
from pathlib import Path

# Every tensor an allocation of its own: in torch's pools reading past an end hits a neighbour.
os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "python"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "python"))

import torch
from families import COMPLETE, DTYPES, EVERY_DTYPE, FAMILIES, has
from sanitize_calls import (
    CALLS,
    DEVICE,
    EXPERTS,
    FP32,
    FP32_CALLS,
    OVER_PAGES,
    SECOND_CALLS,
    SM90_CALLS,
    Call,
    Experts,
)

import flashmoe_science as fm
import moe_oracle
import oracle
import pages
import second_oracle


def sanitize_experts(call: Experts, dtype: torch.dtype) -> list[str]:
    """What is far off."""
    os.environ["FLASHMOE_TILE"] = call.tile
    case = call.case(dtype, True)
    moved = case.to(DEVICE)
    for name in ("x", "gate_up", "down", "grad_out"):
        setattr(moved, name, call.layout(getattr(case, name)))
    got = moe_oracle.ours(moved)
    logits = torch.randn(37, call.shape[3]).to(dtype)
    k = min(call.shape[4], call.shape[3])
    leaf = logits.to(DEVICE).requires_grad_()
    _, got["weights"] = fm.route(leaf, k)
    (got["dlogits"],) = torch.autograd.grad(got["weights"].sum(), leaf)
    want = moe_oracle.reference(case)
    exact = logits.double().requires_grad_()
    _, want["weights"] = moe_oracle.route(exact, k)
    (want["dlogits"],) = torch.autograd.grad(want["weights"].sum(), exact)
    eps = torch.finfo(dtype).eps
    found = {name: x.detach() for name, x in got.items()}
    return [name for name, x in found.items() if far_off(name, x, want[name].detach(), eps)]


def takes(family: str, call: Experts) -> bool:
    """Whether the family has the tile, and kernels for such widths."""
    T, d, n, *_ = call.shape
    if family not in COMPLETE and (d % 8 or n % 8 or T == 0):
        return False
    return not call.tile or has(family, "moe_up", tuple(int(x) for x in call.tile.split("x")))


def far_off(name: str, got: torch.Tensor, want: torch.Tensor, eps: float) -> bool:
    got = got.cpu().double()
    if got.shape != want.shape or not torch.equal(got == -torch.inf, want == -torch.inf):
        return True
    if want.numel() == 0:
        return False
    error = (got - want).where(want.isfinite(), 0).abs()
    if name == "lse":
        return not (error <= max(1e-3, 32 * eps)).all()
    return not (error <= 32 * eps * max(1.0, want.abs().max().item())).all()  # also for NaN


def on_device(call: Call, case: oracle.Case) -> oracle.Case:
    moved = oracle.Case(
        *(call.layout(x) for x in (case.q, case.k, case.v, case.grad_out)),
        grad_lse=case.grad_lse.to(DEVICE),
        options=case.options,
        deterministic=case.deterministic,
        needs=case.needs,
        dropout=case.dropout,
        max_q=case.max_q,
        max_k=case.max_k,
    )
    if call.bias:
        moved.bias = call.bias.layout(case.bias)
    for name in ("sinks", "key_lengths", "cu_q", "cu_k"):
        tensor = getattr(case, name)
        setattr(moved, name, None if tensor is None else tensor.to(DEVICE))
    return moved


def judge(
    family: str, name: str, call: Call, results: tuple[dict, dict], dtype: torch.dtype
) -> bool:
    """Says how a call went, and returns whether something is far off."""
    got, want = results
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    eps = {"fp32": 2**-18, "tf32": 2**-10}.get(name) or torch.finfo(dtype).eps
    bad = [result for result in got if far_off(result, got[result], want[result], eps)]
    verdict = f"FAR OFF: {', '.join(bad)}" if bad else "fine"
    print(f"{family} {name} {call}: {verdict}", flush=True)
    return bool(bad)


def sanitize(family: str, name: str, call: Call, deterministic: bool) -> bool:
    """Runs a call in that dtype; whether something is far off."""
    dtype = EVERY_DTYPE.get(name, torch.float32)
    torch.set_float32_matmul_precision("high" if name == "tf32" else "highest")
    case = call.case(dtype, deterministic)
    got = oracle.ours(on_device(call, case))
    return judge(family, name, call, (got, oracle.reference(case)), dtype)


def sanitize_second(family: str, name: str, call: Call) -> bool:
    """The same for all second derivatives of a call, and how its results move."""
    dtype = EVERY_DTYPE[name]
    torch.set_float32_matmul_precision("highest")  # a call before may have changed it
    case = call.case(dtype, deterministic=True)
    tangents = second_oracle.tangents_of(case, seed=0)
    moved = {name: x.to(DEVICE) for name, x in tangents.items()}
    got = second_oracle.differentiate_twice(on_device(call, case), moved, second_oracle.call_ours)
    return judge(family, name, call, (got, second_oracle.reference(case, tangents)), dtype)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--family", action="append", choices=FAMILIES, help="repeatable")
    parser.add_argument("--part", metavar="I/N", default="0/1", help="every N-th call, from I on")
    given = parser.parse_args()
    first, step = map(int, given.part.split("/"))
    torch.manual_seed(0)
    failures = 0
    for family in given.family or FAMILIES:
        dtypes, calls = FAMILIES[family], SM90_CALLS if family == "sm90" else CALLS
        os.environ["FLASHMOE_FAMILY"] = family
        for i, call in list(enumerate(calls))[first::step]:
            failures += sanitize(family, dtypes[i // 2 % len(dtypes)], call, bool(i % 2))
        for name in FP32.get(family, ()):
            for call in FP32_CALLS[first::step]:
                failures += sanitize(family, name, call, deterministic=True)
        names = [name for name in EVERY_DTYPE if name in (*dtypes, "fp32")]
        calls = SECOND_CALLS if has(family, "attention_second_keys") else []
        for i, call in list(enumerate(calls))[first::step]:
            failures += sanitize_second(family, names[i % len(names)], call)
        calls = [call for call in EXPERTS if takes(family, call)]
        calls = calls if has(family, "moe_up") else []
        for call, name in [(call, name) for call in calls for name in dtypes][first::step]:
            bad = sanitize_experts(call, DTYPES[name])
            failures += bool(bad)
            verdict = f"FAR OFF: {', '.join(bad)}" if bad else "fine"
            print(f"{family} {name} {call}: {verdict}", flush=True)
        os.environ["FLASHMOE_TILE"] = ""
        calls = OVER_PAGES if has(family, "attention_paged") else []
        for problem, name in [(x, name) for x in calls for name in dtypes][first::step]:
            dtype = str(DTYPES[name]).removeprefix("torch.")
            made = pages.build(replace(problem, dtype=dtype), DEVICE)
            bad = oracle.compare(made.exact, pages.ours(made), made.rounded)
            failures += bool(bad)
            verdict = f"FAR OFF: {', '.join(bad)}" if bad else "fine"
            print(f"{family} {name} {problem}: {verdict}", flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
