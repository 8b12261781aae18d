"""What tests of plans share: problems without memory, and a plan read from its explanation."""

from __future__ import annotations

import re

import torch

from catalogue import TORCH_DTYPES

SHAPE = {"batch": 3, "heads_q": 8, "heads_k": 2, "n": 300, "m": 517}


def spec(*shape: int, dtype=torch.float16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def problem(dtype="fp16", d=64, dv=0, **sizes: int) -> list[torch.Tensor]:
    batch, heads_q, heads_k, n, m = (SHAPE | sizes).values()
    q, k, v = (batch, heads_q, n, d), (batch, heads_k, m, d), (batch, heads_k, m, dv or d)
    return [spec(*shape, dtype=TORCH_DTYPES[dtype]) for shape in (q, k, v)]


LAUNCH = re.compile(
    r"^    (?P<kernel>\S+): grid (\d+) x (\d+) x (\d+), (\d+) threads, (\d+) bytes of shared memory"
    r"(?P<rest>.*)$",
    re.M,
)


def told(text: str) -> dict[str, object]:
    """A plan from its explanation."""
    kernel = re.search(r"^ +kernel +(\S+)$", text, re.M)[1]
    launches = list(LAUNCH.finditer(text))
    names = [launch["kernel"] for launch in launches]
    # One that is launched twice in a row (a sum, then the sum of its parts) counts once.
    names = [name for i, name in enumerate(names) if i == 0 or names[i - 1] != name]
    main = names.index(kernel) if kernel in names else len(names)
    numbers = next((x.groups()[1:6] for x in launches if x["kernel"] == kernel), None)
    tile = re.search(r"tile +(\d+) queries x (\d+) keys", text)
    splits = re.search(
        r"^ +splits +the (?:keys|queries), in (\d+)(?:, of (\d+) tiles of keys)?$", text, re.M
    )
    slices = re.search(r"^ +slices +(\d+), each a part of the (heads|batch)$", text, re.M)
    bias_splits = re.search(r"^ +splits +what shares the bias, in (\d+)$", text, re.M)
    return {
        "kernel": kernel,
        "before": names[:main],
        "after": names[main + 1 :],
        "splits": int(splits[1]) if splits else 1,
        "split_tiles": int(splits[2] or 0) if splits else 0,
        "slices": (int(slices[1]), slices[2]) if slices else (1, None),
        "bias_splits": int(bias_splits[1]) if bias_splits else 1,
        "grid": tuple(int(x) for x in numbers[:3]) if numbers else None,
        "threads": int(numbers[3]) if numbers else None,
        "shared_bytes": int(numbers[4]) if numbers else None,
        "block_q": int(tile[1]),
        "block_k": int(tile[2]),
    }
