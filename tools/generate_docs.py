"""Rewrites the parts of the documentation that are made from facts.

README.md                between <!-- support:begin --> and <!-- support:end -->: what runs where,
                         asked of the planner itself; <!-- speed:begin -->: the picture
docs/speed.md            for users: each workload beside its best peer, pictures in docs/speed/
bench/results/README.md  every row of every results file (tools/speed_docs.py)

--part support or --part speed does one of the two; the table of support is that of a build with all
families of kernels. With --check nothing is written, and the exit code is 1 if anything would
change.
"""

from __future__ import annotations

import argparse
import difflib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PARTS = ("support", "speed")
YES, NO = "\N{CHECK MARK}", "\N{EN DASH}"
DTYPES = {"fp64": "float64", "fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
Maker = Callable[..., Any]  # makes a meta tensor of a size, in the dtype asked about or another
Call = dict[str, Any]  # arguments of explain(), or of the function of that package named in "ask"


def backends() -> dict[str, tuple[str, ...]]:
    """The CPU and the oldest chip of every family of the library, with the dtypes to ask for."""
    import torch

    import flashmoe_science  # noqa: F401  (registers the ops)

    families = json.loads(torch.ops.flashmoe.build_info())["cuda_families"]
    chips = sorted(family["oldest"] for family in families)
    cpu = {"cpu": ("fp64", "fp32", "fp16", "bf16")}
    return cpu | {f"sm_{chip}": ("fp32", "fp16", "bf16") for chip in chips}


def dense(meta: Maker, lead: tuple = (2,), kv_heads: int = 4, dim: int = 64, value_dim: int = 0):
    """q, k, v of an ordinary call: 4 heads, 48 queries, 64 keys."""
    return {
        "q": meta(*lead, 4, 48, dim),
        "k": meta(*lead, kv_heads, 64, dim),
        "v": meta(*lead, kv_heads, 64, value_dim or dim),
    }


def ragged(meta: Maker) -> Call:
    """The same two sequences, packed."""
    offsets = meta(3, dtype="int32")
    return {
        "q": meta(80, 4, 32),
        "k": meta(100, 4, 32),
        "v": meta(100, 4, 32),
        "cu_seqlens_q": offsets,
        "cu_seqlens_k": offsets,
        "max_seqlen_q": 48,
        "max_seqlen_k": 64,
    }


def transposed(meta: Maker) -> Call:
    """(B, S, H, D) tensors seen as (B, H, S, D), with rows of odd length in between."""
    return {name: meta(2, 64, 4, 65)[..., :64].transpose(1, 2) for name in "qkv"}


def experts(meta: Maker, activation: str = "swiglu", bias: bool = False) -> Call:
    """48 tokens, 2 of 8 experts each."""
    rows = 2 * 64 if activation.endswith("glu") else 64
    biases = {"up_bias": meta(8, rows), "down_bias": meta(8, 32)} if bias else {}
    return {
        "ask": "explain_moe",
        "x": meta(48, 32),
        "gate_up": meta(8, rows, 32),
        "down": meta(8, 32, 64),
        "ids": meta(48, 2, dtype="int32"),
        "activation": activation,
        **biases,
    }


def paged(meta: Maker, dim: int = 64, cache: str | None = None, **options) -> list[Call]:
    """A decode, and a chunk of 48 tokens, of 2 sequences over 64 keys in pages of 16."""
    caches = {"k_cache": meta(8, 16, 2, dim), "v_cache": meta(8, 16, 2, dim)}
    if cache is not None:
        caches = {name: meta(8, 16, 2, dim, dtype=cache) for name in caches}
        caches |= {name: meta(dtype="float32") for name in ("k_scale", "v_scale")}
    table = {"block_table": meta(2, 4, dtype="int32"), "seq_lens": meta(2, dtype="int32")}
    call = {"ask": "explain_paged", **caches, **table, **options}
    chunk = {"cu_seqlens_q": meta(3, dtype="int32"), "max_seqlen_q": 48}
    return [{**call, "q": meta(2, 4, dim)}, {**call, **chunk, "q": meta(80, 4, dim)}]


ACTIVATIONS = ("swiglu", "geglu", "reglu", "silu", "gelu", "relu")

# What a row of the table asks: every call must be possible for a tick.
OPTIONS: dict[str, Callable[[Maker], list[Call]]] = {
    "head dims 64 and 128": lambda m: [dense(m, dim=d) for d in (64, 128)],
    "head dims 1 to 256": lambda m: [dense(m, dim=d) for d in (1, 8, 24, 33, 64, 128, 192, 256)],
    "values of another head dim": lambda m: [dense(m, value_dim=48)],
    "shared key heads (GQA, MQA)": lambda m: [dense(m, kv_heads=h) for h in (1, 2)],
    "more leading dimensions": lambda m: [dense(m, lead=(2, 3, 5))],
    "any strides": lambda m: [transposed(m)],
    "`causal`": lambda m: [dense(m) | {"causal": True}],
    "`window`": lambda m: [dense(m) | {"window": w} for w in ((8, 0), (-1, 4), (16, 16))],
    "`scale`, `softcap`": lambda m: [dense(m) | {"scale": 0.5, "softcap": 20.0}],
    "`key_lengths`": lambda m: [dense(m) | {"key_lengths": m(2, dtype="int32")}],
    "`bias` and its gradient": lambda m: [
        dense(m) | {"bias": m(*size)} for size in ((2, 4, 48, 64), (4, 48, 64), (2, 1, 1, 64))
    ],
    "`bias` in fp32": lambda m: [dense(m) | {"bias": m(2, 4, 48, 64, dtype="float32")}],
    "`bias` in bool: a mask": lambda m: [dense(m) | {"bias": m(4, 48, 64, dtype="bool")}],
    "`dropout_p`": lambda m: [dense(m) | {"dropout_p": 0.1}, ragged(m) | {"dropout_p": 0.1}],
    "`sinks` and their gradient": lambda m: [
        call | {"sinks": sinks}
        for call in (dense(m), ragged(m), dense(m) | {"bias": m(4, 48, 64)})
        for sinks in (m(4), m(4, dtype="float32"))
    ],
    "ragged": lambda m: [ragged(m), ragged(m) | {"causal": True}],
    "ragged with a packed `bias`": lambda m: [ragged(m) | {"bias": m(48 * 64 + 32 * 36, 4)}],
    "`deterministic=True`": lambda m: [dense(m) | {"deterministic": True}],
    "forward mode, second derivatives": lambda m: [
        call | {"derivative": name}
        for call in (dense(m) | {"bias": m(4, 48, 64)}, ragged(m))
        for name in ("tangent", "second")
    ],
    "pages of a cache": lambda m: [
        *paged(m, window=(8, 0)),
        *paged(m, softcap=20.0),
        *paged(m, sinks=m(4, dtype="float32")),
    ],
    "pages, head dims 64 to 512": lambda m: [
        call for dim in (64, 96, 128, 192, 256, 512) for call in paged(m, dim=dim)
    ],
    "pages, head dims 1 to 33": lambda m: [
        call for dim in (1, 8, 20, 24, 33) for call in paged(m, dim=dim)
    ],
    "pages in fp8 (e4m3)": lambda m: paged(m, cache="float8_e4m3fn"),
    "`moe`, every activation": lambda m: [experts(m, name) for name in ACTIVATIONS],
    "`moe` with biases": lambda m: [experts(m, name, bias=True) for name in ("swiglu", "gelu")],
}


def can_run(make_calls: Callable[[Maker], list[Call]], dtype: str, device: str, back: bool) -> bool:
    """Asks the planner."""
    import torch

    import flashmoe_science

    def meta(*size: int, dtype: str = dtype) -> torch.Tensor:
        return torch.empty(size, dtype=getattr(torch, dtype), device="meta")

    try:
        for call in make_calls(meta):
            name = call.pop("ask", "explain")
            if name != "explain_paged" and "derivative" not in call:  # these have no two passes
                call["backward"] = back
            getattr(flashmoe_science, name)(**call, device=device)
    except RuntimeError:
        return False
    return True


def support_cell(make_calls: Callable[[Maker], list[Call]], dtype: str, device: str) -> str:
    forward, backward = (can_run(make_calls, DTYPES[dtype], device, b) for b in (False, True))
    return YES if forward and backward else "forward" if forward else NO


def support_table() -> str:
    """option x dtype x backend, as the planner answers."""
    columns = [(device, dtype) for device, dtypes in backends().items() for dtype in dtypes]
    header = ["", *(f"{device} {dtype}" for device, dtype in columns)]
    lines = [markdown_row(header), markdown_row(["---", *[":-:"] * len(columns)])]
    for name, make_calls in OPTIONS.items():
        cells = [support_cell(make_calls, dtype, device) for device, dtype in columns]
        lines.append(markdown_row([name, *cells]))
    legend = (
        f"{YES} forward and backward (of pages forward, all there is), {NO} refused with an error "
        "that says so. sm_75 is T4, sm_80 A100 (8.6 and 8.9, RTX 30 and 40 and L4, answer alike), "
        "sm_90 H100 and H200. `python -m flashmoe_science explain` answers for any other call."
    )
    return "\n".join([*lines, "", legend])


def markdown_row(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def replace_block(text: str, name: str, content: str, path: Path) -> str:
    """text with what lies between the markers of name replaced by content."""
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        sys.exit(f"{path}: expected {begin} and then {end}, each once")
    head, rest = text.split(begin)
    return f"{head}{begin}\n{content}\n{end}{rest.split(end)[1]}"


def generated(root: Path, parts: list[str]) -> dict[str, str]:
    """What every file should be, by its path."""
    readme = root / "README.md"
    if not readme.exists():
        sys.exit(f"{readme} is missing")
    text, files = readme.read_text(), {}
    if "support" in parts:
        text = replace_block(text, "support", support_table(), readme)
    if "speed" in parts:
        import speed_docs
        from flashmoe_science.bench.workloads import WORKLOADS

        files, block = speed_docs.pages(root, WORKLOADS)
        text = replace_block(text, "speed", block, readme)
    return {"README.md": text, **files}


def left_over(root: Path, files: dict[str, str]) -> list[str]:
    """Pictures of results that are no longer there."""
    found = (root / "docs" / "speed").glob("*.svg")
    return sorted({str(path.relative_to(root)) for path in found} - files.keys())


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if out of date")
    parser.add_argument("--part", choices=PARTS, help="default: both")
    parser.add_argument("--root", type=Path, default=ROOT, help="where README.md and docs/ are")
    args = parser.parse_args(argv)
    parts = [args.part] if args.part else list(PARTS)
    files = generated(args.root, parts)
    stale = False
    for file, new in files.items():
        path = args.root / file
        old = path.read_text() if path.exists() else ""
        if new == old:
            continue
        stale = True
        if args.check:
            changes = difflib.unified_diff(old.splitlines(), new.splitlines(), file, "generated")
            print("\n".join([*list(changes)[:100], f"{file} is out of date: run `make docs`"]))
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(new)
            print(f"wrote {file}")
    for file in left_over(args.root, files) if "speed" in parts else ():
        stale = True
        if args.check:
            print(f"{file} is out of date: run `make docs`")
        else:
            (args.root / file).unlink()
            print(f"removed {file}")
    return 1 if args.check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
