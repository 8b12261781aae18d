"""What calls cost the host, ours beside SDPA's: a model's training step waits for it between its
small kernels."""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Callable, Iterator
from unittest import mock

import torch

from flashmoe_science.bench.timing import Call

ROUND = 200  # calls of a round


DTYPE = torch.float16  # every family of kernels has it


@contextlib.contextmanager
def any_tile() -> Iterator[None]:
    """A tile that is forced for the rows need not exist for the small calls here."""
    with mock.patch.dict(os.environ):
        os.environ.pop("FLASHMOE_TILE", None)
        yield


@any_tile()
def times(device: torch.device) -> dict[str, dict[str, float]]:
    """Microseconds of the host for one small call, many in a row: ours, SDPA's, and the hook's."""
    import torch.nn.functional as F

    from flashmoe_science import enable_sdpa, flash_attention

    sdpa = F.scaled_dot_product_attention
    q = torch.randn(1, 1, 64, 64, dtype=DTYPE, device=device)
    found: dict[str, dict[str, float]] = {}
    for key, grad in (("without_grad", False), ("with_grad", True), ("with_backward", True)):
        inputs = [q.clone().requires_grad_(grad) for _ in range(3)]

        def call(attend: Callable, inputs: list[torch.Tensor] = inputs, key: str = key) -> None:
            out = attend(*inputs)
            if key == "with_backward":
                torch.autograd.grad(out, inputs, q)

        ours, theirs = (functools.partial(call, attend) for attend in (flash_attention, sdpa))
        found[key] = us_of(
            {
                "ours": (ours, contextlib.nullcontext),
                "sdpa": (theirs, contextlib.nullcontext),
                "hook": (theirs, enable_sdpa),
            },
            device,
        )
    found["paged"] = us_of(
        {name: (call, torch.no_grad) for name, call in paged_calls(device).items()}, device
    )
    return found


def paged_calls(device: torch.device) -> dict[str, Call]:
    """A decode over pages to memory that is given, and SDPA over the same keys."""
    import torch.nn.functional as F

    from flashmoe_science import flash_attention_paged

    q = torch.randn(1, 1, 64, dtype=DTYPE, device=device)
    cache = torch.randn(4, 16, 1, 64, dtype=DTYPE, device=device)
    table = torch.arange(4, dtype=torch.int32, device=device)[None]
    lens = torch.full((1,), 64, dtype=torch.int32, device=device)
    out, queries, keys = torch.empty_like(q), q[None], cache.view(1, 1, 64, 64)
    bounds = {"max_seqlen_q": 1, "max_seqlen_k": 64}
    return {
        "ours": lambda: flash_attention_paged(q, cache, cache, table, lens, **bounds, out=out),
        "sdpa": lambda: F.scaled_dot_product_attention(queries, keys, keys),
    }


def us_of(
    ways: dict[str, tuple[Call, Callable[[], contextlib.AbstractContextManager]]],
    device: torch.device,
) -> dict[str, float]:
    """The best of interleaved rounds of each: the host has other things to do, too."""
    found = {name: float("inf") for name in ways}
    for _ in range(7):
        for name, (call, context) in ways.items():
            with context():
                synchronize(device)
                start = time.perf_counter()
                for _ in range(ROUND):
                    call()
                each_us = (time.perf_counter() - start) / ROUND * 1e6
            found[name] = min(found[name], each_us)
    return found


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
