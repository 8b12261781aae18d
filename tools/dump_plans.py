"""What explain() says of a broad list of problems on every chip, as JSON lines.

    python tools/dump_plans.py > plans.jsonl

Run it on two builds that have the same kernels: a diff of what they print shows every plan that a
change of the planner changed. Tensors are meta tensors, so neither memory nor a GPU is needed.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator

import torch

import flashmoe_science as fm

# A chip, and the family that is forced on it or none.
MACHINES = [(chip, None) for chip in ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100")]
MACHINES += [("sm_90", "sm75"), ("sm_90", "sm80"), ("sm_90", "sm90")]
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
HEAD_DIMS = (1, 8, 16, 20, 32, 33, 48, 64, 72, 96, 100, 128, 136, 160, 192, 200, 256)

# (batch, heads of queries, heads of keys, queries, keys)
SIZES = {
    "one pair": (1, 1, 1, 1, 1),
    "small": (2, 6, 2, 300, 517),
    "square": (2, 16, 16, 4096, 4096),
    "grouped": (1, 32, 4, 2048, 2048),
    "many heads": (4, 64, 1, 100, 3000),
    "odd": (3, 5, 5, 997, 1009),
    "one tile": (1, 1, 1, 64, 64),
    "decode": (8, 32, 8, 1, 8192),
    "decode one": (1, 32, 8, 1, 100000),
    "few queries": (2, 8, 2, 5, 4000),
    "cross": (2, 8, 8, 4096, 77),
    "short": (640, 4, 4, 32, 32),
    "shorter": (900, 2, 1, 17, 31),
    "not so short": (640, 4, 4, 33, 32),
    "many batches": (70000, 1, 1, 5, 3),
    "long": (1, 2, 2, 65536, 65536),
    "triangle": (512, 4, 4, 512, 512),
    "large": (8, 16, 16, 4096, 4096),
    "large groups": (8, 64, 16, 4096, 4096),
    "no batch": (0, 2, 2, 10, 10),
    "no queries": (2, 2, 2, 0, 10),
    "no keys": (2, 2, 2, 10, 0),
}
OPTIONS = {
    "causal": {"causal": True},
    "window": {"window": (100, 20)},
    "left": {"window": (128, -1)},
    "causal window": {"window": (256, 0), "causal": True},
    "softcap": {"softcap": 30.0},
    "softcap causal": {"softcap": 30.0, "causal": True},
    "scale": {"scale": 0.3},
    "negative scale": {"scale": -0.3},
    "deterministic": {"deterministic": True},
    "deterministic causal": {"deterministic": True, "causal": True},
    "deterministic softcap": {"deterministic": True, "softcap": 5.0},
    "all of them": {"causal": True, "window": (90, 7), "softcap": 7.0, "scale": -0.4},
}
# What a bias has for itself of batch, heads, queries and keys.
BIASES = {
    "own": (1, 1, 1, 1),
    "of heads": (0, 1, 1, 1),
    "of batches": (1, 0, 1, 1),
    "one matrix": (0, 0, 1, 1),
    "of keys": (1, 1, 0, 1),
    "of queries": (1, 1, 1, 0),
    "one number": (0, 0, 0, 0),
}


def rows_first(x: torch.Tensor) -> torch.Tensor:
    """(B, S, H, D) in memory."""
    return torch.empty_like(x.transpose(-3, -2)).contiguous().transpose(-3, -2)


def rows_apart(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], x.shape[-1] + 24)[..., : x.shape[-1]]


def odd_rows(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], x.shape[-1] + 1)[..., : x.shape[-1]]


def transposed(x: torch.Tensor) -> torch.Tensor:
    return x.mT.contiguous().mT


def expanded(x: torch.Tensor) -> torch.Tensor:
    """The same for all batches."""
    return x[:1].expand(x.shape)


LAYOUTS = [rows_first, rows_apart, odd_rows, transposed, expanded]


def dense(dtype: torch.dtype, sizes, d: int, dv: int = 0) -> list[torch.Tensor]:
    batch, hq, hk, n, m = sizes
    shapes = (batch, hq, n, d), (batch, hk, m, d), (batch, hk, m, dv or d)
    return [torch.empty(shape, dtype=dtype, device="meta") for shape in shapes]


def ragged(dtype, sizes, d, dv=0, integer=torch.int32, longest=0) -> tuple[list, dict]:
    """Sequences that have the sizes' lengths on average."""
    batch, hq, hk, n, m = sizes
    shapes = (batch * n, hq, d), (batch * m, hk, d), (batch * m, hk, dv or d)
    cu = torch.empty(batch + 1, dtype=integer, device="meta")
    lengths = {"cu_seqlens_q": cu, "cu_seqlens_k": cu}
    lengths |= {"max_seqlen_q": longest or n, "max_seqlen_k": longest or m}
    return [torch.empty(shape, dtype=dtype, device="meta") for shape in shapes], lengths


def bias_of(sizes, own, dtype) -> torch.Tensor:
    batch, hq, _, n, m = sizes
    shape = [size if has else 1 for size, has in zip((batch, hq, n, m), own, strict=True)]
    return torch.empty(shape, dtype=dtype, device="meta")


def problems(dtype: torch.dtype) -> Iterator[tuple[str, list, dict]]:
    """Name, tensors and options of each."""
    some = {name: SIZES[name] for name in ("small", "square", "grouped", "odd", "short", "decode")}
    for name, sizes in SIZES.items():
        for d in (64, 128, 256) if name in some else (64,):
            yield f"{name} d{d}", dense(dtype, sizes, d), {}
            if min(sizes) > 0:
                yield f"ragged {name} d{d}", *ragged(dtype, sizes, d)
    for d in HEAD_DIMS:
        for dv in sorted({d, 64, max(d // 2, 1)}):
            for name in ("small", "square", "short"):
                yield f"{name} d{d}/{dv}", dense(dtype, SIZES[name], d, dv), {"causal": True}
            tensors, lengths = ragged(dtype, SIZES["square"], d, dv)
            yield f"ragged square d{d}/{dv}", tensors, lengths | {"causal": True}
    for name, sizes in some.items():
        for option, options in OPTIONS.items():
            for d in (64, 128):
                yield f"{name} d{d} {option}", dense(dtype, sizes, d), options
            tensors, lengths = ragged(dtype, sizes, 64)
            yield f"ragged {name} {option}", tensors, lengths | options
        for integer in (torch.int32, torch.int64):
            lengths = torch.empty(sizes[0], dtype=integer, device="meta")
            yield f"{name} {integer} key lengths", dense(dtype, sizes, 64), {"key_lengths": lengths}
            tensors, options = ragged(dtype, sizes, 64, integer=integer, longest=sizes[3] * 3)
            yield f"ragged {name} {integer}", tensors, options
        for layout in LAYOUTS:
            tensors = dense(dtype, sizes, 64)
            yield f"{name} {layout.__name__}", [layout(x) for x in tensors], {}
            yield f"{name} keys {layout.__name__}", [tensors[0], layout(tensors[1]), tensors[2]], {}
    yield from problems_with_a_bias(dtype)


def problems_with_a_bias(dtype) -> Iterator[tuple[str, list, dict]]:
    names = ("small", "square", "odd", "short", "shorter", "decode", "few queries", "triangle")
    for name in (*names, "large", "large groups", "no keys", "many batches"):
        sizes = SIZES[name]
        for own, has in BIASES.items():
            for bias_dtype in (dtype, torch.float32):
                bias = bias_of(sizes, has, bias_dtype)
                words = f"{name} bias {own} {bias_dtype}"
                yield words, dense(dtype, sizes, 64), {"bias": bias}
                if name != "small":
                    continue
                for layout in (rows_apart, odd_rows, transposed):
                    options = {"bias": layout(bias), "causal": True}
                    yield f"{words} {layout.__name__}", dense(dtype, sizes, 64), options
                for d in HEAD_DIMS:
                    options = {"bias": bias, "deterministic": d % 16 == 0}
                    yield f"{words} d{d}", dense(dtype, sizes, d), options
        _, hq, _, n, m = sizes
        for heads in sorted({1, hq}):
            for bias_dtype in (dtype, torch.float32):
                tensors, lengths = ragged(dtype, sizes, 64)
                pairs = (sizes[0] * n * m, heads)
                bias = torch.empty(pairs, dtype=bias_dtype, device="meta")
                words = f"ragged {name} bias of {heads} {bias_dtype}"
                yield words, tensors, lengths | {"bias": bias}
                yield f"{words} transposed", tensors, lengths | {"bias": transposed(bias)}
                options = {"bias": bias, "softcap": 5.0, "deterministic": True}
                yield f"{words} softcap deterministic", tensors, lengths | options


def plan(tensors: list, options: dict, backward: bool, chip: str) -> list[str]:
    try:
        text = fm.explain(*tensors, **options, backward=backward, device=chip)
    except (RuntimeError, ValueError) as error:
        text = f"refused: {error}"
    return text.splitlines()


def main() -> int:
    for chip, family in MACHINES:
        os.environ.pop("FLASHMOE_FAMILY", None)
        if family:
            os.environ["FLASHMOE_FAMILY"] = family
        for dtype, torch_dtype in DTYPES.items():
            for name, tensors, options in problems(torch_dtype):
                for backward in (False, True):
                    words = (chip, family or "any", dtype, "bwd" if backward else "fwd", name)
                    said = plan(tensors, options, backward, chip)
                    print(json.dumps({"problem": " ".join(words), "plan": said}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
