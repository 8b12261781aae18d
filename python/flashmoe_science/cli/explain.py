"""For given shapes and options, what would run and why each better kernel was passed over.

Nothing is computed and no memory is used, so any size and any chip can be asked about. The exit
code is 1 when nothing can run the problem.
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from flashmoe_science.cli import load

if TYPE_CHECKING:
    import torch

SUMMARY = "what would run for given shapes, and why"
EXAMPLES = """\
examples:
  python -m flashmoe_science explain --batch 2 --heads 8 --kv-heads 2 --len 512 --dim 64 --causal
  python -m flashmoe_science explain --len 1 --kv-len 4096 --window 1024,0 --key-lengths
  python -m flashmoe_science explain --len 4096 --dim 128 --dtype fp16 --backward --device sm_75
  python -m flashmoe_science explain --len 384 --bias 1,8,384,384 --backward --device sm_90
  python -m flashmoe_science explain --batch 64 --len 31 --ragged --dtype bf16
  python -m flashmoe_science explain --paged --batch 64 --kv-heads 2 --len 1 --kv-len 8192 --causal
  python -m flashmoe_science explain --paged --page 64 --fp8 --len 512 --kv-len 8192 --dtype bf16
  python -m flashmoe_science explain --append --batch 64 --len 1 --kv-heads 8 --dim 128 --fp8
  python -m flashmoe_science explain --moe --tokens 4096 --width 512 --inner 256 --experts 64 --k 4
  python -m flashmoe_science explain --moe --dtype bf16 --activation gelu --backward --device sm_90
"""
ACTIVATIONS = ("swiglu", "geglu", "reglu", "silu", "gelu", "relu")
GATED = ACTIVATIONS[:3]
DTYPES = {"fp64": "float64", "fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}


def size(text: str) -> int:
    """Reads a length, which may be 0."""
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not a size")
    return int(text)


def integers(text: str) -> tuple[int, ...]:
    """Reads "1,8,512,512"."""
    try:
        return tuple(int(word) for word in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of integers") from None


def pair(text: str) -> tuple[int, int]:
    """Reads "128,0"."""
    numbers = integers(text)
    if len(numbers) != 2:
        raise argparse.ArgumentTypeError(f"{text!r} is not LEFT,RIGHT")
    return numbers


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `explain`, named as those of the functions it answers for."""
    add = parser.add_argument
    add("--dtype", choices=list(DTYPES), default="fp32", help="default: fp32")
    add("--backward", action="store_true", help="the backward pass instead of the forward pass")
    add("--device", metavar="cpu|sm_NN", help="another machine. default: this one")
    add_attention_arguments(parser.add_argument_group("attention"))
    add_moe_arguments(parser.add_argument_group("mixture of experts"))


def add_attention_arguments(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--batch", type=size, default=1, metavar="N", help="batch, or sequences. default: 1")
    add("--heads", type=size, default=8, metavar="N", help="query heads. default: 8")
    add("--kv-heads", type=size, metavar="N", help="key and value heads. default: as --heads")
    add("--len", type=size, default=512, metavar="N", dest="length", help="queries. default: 512")
    add("--kv-len", type=size, metavar="N", help="keys. default: as --len")
    add("--dim", type=size, default=64, metavar="N", help="head dim. default: 64")
    add("--value-dim", type=size, metavar="N", help="head dim of the values. default: as --dim")
    add("--bias", type=integers, metavar="SHAPE",
        help="of the bias: 1,8,512,512; packed with --ragged: sum of n*m, heads")  # fmt: skip
    add("--bias-dtype", choices=list(DTYPES), help="default: as --dtype")
    add("--causal", action="store_true", help="rows see no later key")
    add("--window", type=pair, metavar="LEFT,RIGHT", help="keys seen on each side, -1 = no limit")
    add("--scale", type=float, help="default: 1 / sqrt(dim)")
    add("--softcap", type=float, help="c of c * tanh(x / c)")
    add("--sinks", action="store_true", help="a sink for every query head, in fp32")
    add("--key-lengths", action="store_true", help="a key length for every batch entry")
    add("--ragged", action="store_true", help="packed sequences of at most --len and --kv-len")
    add("--paged", action="store_true",
        help="at most --len new tokens of each sequence over --kv-len keys in pages")  # fmt: skip
    add("--append", action="store_true",
        help="writing --len new tokens of each sequence to a cache for --kv-len keys")  # fmt: skip
    add("--page", type=size, default=16, metavar="N", help="keys of a page. default: 16")
    add("--fp8", action="store_true", help="a cache in float8_e4m3fn, with a scale")
    add("--deterministic", action="store_true", help="a bitwise reproducible backward pass")
    add(
        "--derivative",
        choices=["tangent", "second"],
        help="forward mode, or the backward pass of the backward pass",
    )


def add_moe_arguments(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--moe", action="store_true", help="ask about a mixture of experts instead of attention")
    add("--tokens", type=size, default=1024, metavar="T", help="default: 1024")
    add("--width", type=size, default=512, metavar="D", help="of a token. default: 512")
    add("--inner", type=size, default=256, metavar="N", help="width inside. default: 256")
    add("--experts", type=size, default=8, metavar="E", help="default: 8")
    add("--k", type=size, default=2, metavar="K", help="experts of a token. default: 2")
    add("--activation", choices=ACTIVATIONS, default="swiglu", help="default: swiglu")
    add("--biases", action="store_true", help="biases before the activation and after the experts")
    add("--no-weights", action="store_true", help="all weights are 1")
    add("--transposed", action="store_true",
        help="experts lie as (E, D, 2N) and (E, N, D) in memory")  # fmt: skip
    add("--inference", action="store_true", help="keep nothing for a backward pass")


def run(args: argparse.Namespace) -> int:
    """Runs `explain` and returns the exit code."""
    if problem := load.problem():
        print(problem, file=sys.stderr)
        return 1
    from flashmoe_science import explain, explain_append, explain_moe, explain_paged

    ask, given = explain, arguments
    if args.moe:
        ask, given = explain_moe, moe_arguments
    elif args.paged:
        ask, given = explain_paged, paged_arguments
    elif args.append:
        ask, given = explain_append, append_arguments
    try:
        text = ask(**given(args), device=args.device or best_device())
    except (RuntimeError, ValueError, TypeError) as error:
        print(f"cannot run: {str(error).strip()}", file=sys.stderr)
        return 1
    print(text.rstrip())
    return 0


def best_device() -> str:
    """This machine's first GPU where the library has kernels for any, else the CPU."""
    from flashmoe_science.bench import machine

    gpus = machine.gpus() if machine.build_info()["families"] else []
    return gpus[0]["capability"] if gpus else "cpu"


def meta(*size: int, dtype: str) -> torch.Tensor:
    import torch

    return torch.empty(size, dtype=getattr(torch, dtype), device="meta")


def moe_arguments(args: argparse.Namespace) -> dict[str, Any]:
    """The keyword arguments of explain_moe(), with meta tensors of the shapes asked for."""
    dtype, wide = DTYPES[args.dtype], "float64" if args.dtype == "fp64" else "float32"
    rows = (2 if args.activation in GATED else 1) * args.inner

    def experts(*size: int) -> torch.Tensor:
        if args.transposed:
            return meta(size[0], size[2], size[1], dtype=dtype).mT
        return meta(*size, dtype=dtype)

    given: dict[str, Any] = {
        "x": meta(args.tokens, args.width, dtype=dtype).requires_grad_(not args.inference),
        "gate_up": experts(args.experts, rows, args.width),
        "down": experts(args.experts, args.width, args.inner),
        "ids": meta(args.tokens, args.k, dtype="int32"),
        "activation": args.activation,
        "backward": args.backward,
    }
    if not args.no_weights:
        given["weights"] = meta(args.tokens, args.k, dtype=wide)
    if args.biases:
        given["up_bias"] = meta(args.experts, rows, dtype=dtype)
        given["down_bias"] = meta(args.experts, args.width, dtype=dtype)
    return given


def key_sizes(args: argparse.Namespace) -> tuple[int, int, int]:
    """Heads and number of the keys, and the values' head dim."""
    return (
        args.heads if args.kv_heads is None else args.kv_heads,
        args.length if args.kv_len is None else args.kv_len,
        args.dim if args.value_dim is None else args.value_dim,
    )


def refuse(args: argparse.Namespace, option: str, names: tuple[str, ...]) -> None:
    """Options that would be left out in silence."""
    for name in names:
        if getattr(args, name):
            raise ValueError(f"--{name.replace('_', '-')} means nothing with {option}")


def cache_arguments(args: argparse.Namespace) -> dict[str, Any]:
    """A cache for all keys of every sequence, and its scales where it is fp8."""
    if args.page == 0:
        raise ValueError("--page is 0; a page has at least 1 key")
    kv_heads, kv_len, value_dim = key_sizes(args)
    blocks, given = args.batch * -(-kv_len // args.page), {}
    for name, dim in (("k", args.dim), ("v", value_dim)):
        dtype = "float8_e4m3fn" if args.fp8 else DTYPES[args.dtype]
        given[f"{name}_cache"] = meta(blocks, args.page, kv_heads, dim, dtype=dtype)
        if args.fp8:
            given[f"{name}_scale"] = meta(dtype="float32")
    return given


def append_arguments(args: argparse.Namespace) -> dict[str, Any]:
    """The keyword arguments of explain_append()."""
    scores = ("causal", "window", "scale", "softcap", "sinks")
    passes = ("backward", "derivative", "deterministic")
    refuse(args, "--append", (*scores, *passes, "bias", "key_lengths", "ragged"))
    dtype, tokens = DTYPES[args.dtype], args.batch * args.length
    kv_heads, _, value_dim = key_sizes(args)
    return cache_arguments(args) | {
        "k": meta(tokens, kv_heads, args.dim, dtype=dtype),
        "v": meta(tokens, kv_heads, value_dim, dtype=dtype),
        "slot_mapping": meta(tokens, dtype="int64"),
    }


def paged_arguments(args: argparse.Namespace) -> dict[str, Any]:
    """The keyword arguments of explain_paged(): every sequence as long as the maxima allow."""
    names = ("backward", "derivative", "bias", "key_lengths", "ragged", "deterministic")
    refuse(args, "--paged", names)
    dtype, (_, kv_len, _) = DTYPES[args.dtype], key_sizes(args)
    given: dict[str, Any] = cache_arguments(args) | {
        "q": meta(args.batch * args.length, args.heads, args.dim, dtype=dtype),
        "block_table": meta(args.batch, -(-kv_len // args.page), dtype="int32"),
        "seq_lens": meta(args.batch, dtype="int32"),
        "max_seqlen_q": args.length,
        "max_seqlen_k": kv_len,
        "causal": args.causal,
        "window": args.window,
        "scale": args.scale,
        "softcap": args.softcap,
    }
    if args.length != 1:
        given["cu_seqlens_q"] = meta(args.batch + 1, dtype="int32")
    if args.sinks:
        given["sinks"] = meta(args.heads, dtype="float32")
    return given


def arguments(args: argparse.Namespace) -> dict[str, Any]:
    """The keyword arguments of explain(), with meta tensors of the shapes asked for."""
    dtype = DTYPES[args.dtype]
    kv_heads, kv_len, value_dim = key_sizes(args)
    options: dict[str, Any] = {
        "causal": args.causal,
        "window": args.window,
        "scale": args.scale,
        "softcap": args.softcap,
        "backward": args.backward,
        "deterministic": args.deterministic,
        "derivative": args.derivative,
    }
    if args.bias is not None:
        options["bias"] = meta(*args.bias, dtype=DTYPES[args.bias_dtype or args.dtype])
    if args.sinks:
        options["sinks"] = meta(args.heads, dtype="float32")
    if args.key_lengths:
        options["key_lengths"] = meta(args.batch, dtype="int32")
    if args.ragged:
        offsets = meta(args.batch + 1, dtype="int32")
        return options | {
            "q": meta(args.batch * args.length, args.heads, args.dim, dtype=dtype),
            "k": meta(args.batch * kv_len, kv_heads, args.dim, dtype=dtype),
            "v": meta(args.batch * kv_len, kv_heads, value_dim, dtype=dtype),
            "cu_seqlens_q": offsets,
            "cu_seqlens_k": offsets,
            "max_seqlen_q": args.length,
            "max_seqlen_k": kv_len,
        }
    return options | {
        "q": meta(args.batch, args.heads, args.length, args.dim, dtype=dtype),
        "k": meta(args.batch, kv_heads, kv_len, args.dim, dtype=dtype),
        "v": meta(args.batch, kv_heads, kv_len, value_dim, dtype=dtype),
    }
