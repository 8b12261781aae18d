"""A few small calls for compute-sanitizer: every forward kernel, edge lengths, strides, groups.

    compute-sanitizer --tool memcheck --error-exitcode 1 python3 tests/gpu/sanitize.py

No pytest, and the arithmetic around the calls is the CPU's: the tools slow every kernel down, and
only ours are of interest. Exits with 1 where a result is far off; test_cuda.py judges precisely.
"""

import os
import sys
from pathlib import Path

# Every tensor an allocation of its own: in torch's pools reading past an end hits a neighbour.
os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "python"))

import torch

import flashmoe_science as fm

FP16, BF16 = torch.float16, torch.bfloat16


def as_it_is(x: torch.Tensor) -> torch.Tensor:
    return x.cuda()


def rows_first(x: torch.Tensor) -> torch.Tensor:
    """(B, S, H, D) in memory."""
    return x.transpose(1, 2).contiguous().cuda().transpose(1, 2)


def rows_apart(x: torch.Tensor) -> torch.Tensor:
    """Aligned rows with room between them that nobody has written: initcheck sees who reads it."""
    wide = torch.empty(*x.shape[:-1], x.shape[-1] + 8, dtype=x.dtype, device="cuda")
    return wide[..., : x.shape[-1]].copy_(x)


def odd_rows(x: torch.Tensor) -> torch.Tensor:
    """Rows that are not 16-byte aligned, and are copied."""
    wide = torch.empty(*x.shape[:-1], x.shape[-1] + 1, dtype=x.dtype, device="cuda")
    return wide[..., : x.shape[-1]].copy_(x)


# dtype, D, causal, (B, Hq, Hk, Sq, Sk), scale, layout
CALLS = [
    (FP16, 64, False, (1, 2, 2, 1, 1), None, as_it_is),
    (FP16, 64, True, (2, 4, 2, 129, 65), None, as_it_is),
    (FP16, 128, False, (1, 4, 1, 63, 191), None, rows_first),
    (FP16, 128, True, (1, 2, 1, 17, 130), -0.2, as_it_is),
    (BF16, 64, False, (2, 2, 1, 130, 64), 0.0, rows_apart),
    (BF16, 64, True, (1, 8, 2, 200, 200), None, rows_first),
    (BF16, 128, False, (3, 1, 1, 128, 128), None, as_it_is),
    (BF16, 128, True, (1, 2, 2, 257, 255), None, rows_apart),
    (FP16, 64, True, (1, 2, 1, 97, 31), None, odd_rows),
    (BF16, 128, False, (1, 1, 1, 2, 331), 1.0, odd_rows),
    (BF16, 64, False, (1, 2, 1, 70, 0), None, as_it_is),
    (FP16, 128, True, (1, 1, 1, 0, 70), None, as_it_is),
]


def reference(q, k, v, causal: bool, scale: float | None):
    """out and lse in float64 on the CPU."""
    q, k, v = (x.double() for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    n, m = q.shape[2], k.shape[2]
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if causal:
        hidden = torch.arange(m) > torch.arange(n)[:, None] + m - n
        scores = scores.masked_fill(hidden, -torch.inf)
    lse = scores.logsumexp(-1) if m else scores.new_full(scores.shape[:-1], -torch.inf)
    weights = (scores - lse.where(lse.isfinite(), 0)[..., None]).exp()
    return weights @ v, lse


def far_off(got: torch.Tensor, want: torch.Tensor, limit: float) -> bool:
    got = got.cpu().double()
    if got.shape != want.shape or not torch.equal(got == -torch.inf, want == -torch.inf):
        return True
    error = (got - want).where(want.isfinite(), 0).abs()
    return not (error <= limit).all()  # also for NaN


def main() -> int:
    torch.manual_seed(0)
    failures = 0
    for dtype, d, causal, (batch, hq, hk, n, m), scale, layout in CALLS:
        shapes = ((batch, hq, n, d), (batch, hk, m, d), (batch, hk, m, d))
        host = [torch.randn(shape).to(dtype) for shape in shapes]
        tensors = [layout(x) for x in host]
        out, lse = fm.flash_attention(*tensors, causal=causal, scale=scale, return_lse=True)
        torch.cuda.synchronize()
        want_out, want_lse = reference(*host, causal, scale)
        bad = far_off(out, want_out, 32 * torch.finfo(dtype).eps) or far_off(lse, want_lse, 1e-3)
        failures += bad
        mask = "causal" if causal else "full"
        print(f"{'FAR OFF' if bad else 'fine':8}{dtype} d{d} {mask} {n} x {m} {layout.__name__}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
