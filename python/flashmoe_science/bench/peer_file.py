"""Anybody's implementation as a peer, from a file of theirs: `bench --peer FILE.py`.

The file is a Python module. It has one of these functions, or more; tensors come with their
gradients wanted where a backward pass is timed, and the output has the layout of q, or x.

  attention(q, k, v, causal)
      q (B, S, H, D), k and v (B, S, Hkv, D): the dense workloads. With LAYOUT = "BHSD" in the file
      they are (B, H, S, D) instead; in memory the tokens come first either way on a GPU. A call may
      need one more parameter, and a file that lacks it is no peer there:
        bias            (B, H, S, S), or (1, H, S, S) for all: pair_bias, fp32_bias (in fp32),
                        diffusion, triangle
        window          (left, right), how many keys a query sees beside its own: wN shapes
        deterministic   True: the workload deterministic
        mask            (B, H, S, S), or (B, 1, S, S) for all heads, in bool: the workload mask
        dropout_p, seed the workload dropout. It must drop the pairs that ours drops
      For second derivatives its gradients must have gradients.
  attention_varlen(q, k, v, cu_seqlens, max_seqlen, causal)
      q (T, H, D), k and v (T, Hkv, D), sequence i from cu_seqlens[i] to cu_seqlens[i + 1] (int32):
      ragged, crystals, mixed_lengths. With bias (the sum of n * n, H): those with a pair bias.
  attention_paged(q, k_cache, v_cache, block_table, seq_lens, cu_seqlens_q, max_seqlen_q,
                  max_seqlen_k)
      q (T, H, D), caches (blocks, page, Hkv, D), block_table (B, n), seq_lens (B,) with the new
      tokens among them, cu_seqlens_q (B + 1,), all int32; causal, the last query sees all keys of
      its sequence: the paged workloads. With k_scale and v_scale, fp32 numbers on the device: those
      whose caches are float8_e4m3fn.
  cache_append(k, v, k_cache, v_cache, slot_mapping)
      k and v (T, H, D), slot_mapping (T,) in int64; it writes to the caches: append. With k_scale
      and v_scale: where these are float8_e4m3fn.
  moe(x, gate_up, down, ids, weights)
      x (T, d), gate_up (E, 2n, d) with the rows of the gate first, down (E, d, n), ids (T, k), and
      weights (T, k) in fp32, or None where all are 1: SwiGLU experts, the moe workloads.

It may have NAME, how the peer is called (else the file's name), and supports(case), which is asked
before each row and answers True, or False, or why not in a few words. Of case it can read
workload, dtype ("bf16"), direction ("fwd", "bwd", "fwd+bwd") and shape with batch, heads, kv_heads,
length, dim, causal, window, queries, page and e4m3, or with tokens, width, inner, experts and
top_k, or with tokens, heads, dim, page and e4m3.

A peer is checked against float64, gradients included where they are timed, by the rule that ours is
held to. One that is wrong is reported as wrong and not timed, and so is one that raises.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from flashmoe_science.bench.case import (
    Case,
    Implementation,
    Tensors,
    as_it_is,
    no_change,
    tokens_first,
)

LAYOUTS = ("BSHD", "BHSD")
FUNCTIONS = ("attention", "attention_varlen", "attention_paged", "cache_append", "moe")


class NotSupported(Exception):
    """The file has nothing for a row, and says why."""


@dataclass(frozen=True)
class PeerFile:
    """A file that was loaded."""

    name: str
    path: Path
    module: ModuleType

    @classmethod
    def load(cls, path: Path) -> PeerFile:
        """ValueError where there is no such file, it fails, or it is no peer."""
        if not path.is_file():
            raise ValueError(f"--peer {path}: no such file")
        folder = str(path.resolve().parent)
        if folder not in sys.path:
            sys.path.append(folder)  # a file may import what lies beside it
        spec = importlib.util.spec_from_file_location(f"flashmoe_peer_{path.stem}", path)
        if spec is None or spec.loader is None:
            raise ValueError(f"--peer {path}: not a Python file")
        module = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except Exception as error:  # whatever a stranger's file does
            raise ValueError(f"--peer {path}: {type(error).__name__}: {error}") from error
        if not any(hasattr(module, name) for name in FUNCTIONS):
            raise ValueError(f"--peer {path}: has none of {'(), '.join(FUNCTIONS)}()")
        if (layout := getattr(module, "LAYOUT", LAYOUTS[0])) not in LAYOUTS:
            raise ValueError(f"--peer {path}: LAYOUT {layout!r} is not one of {', '.join(LAYOUTS)}")
        return cls(str(getattr(module, "NAME", path.stem)), path, module)

    def implementation(self, spec: Any, case: Case) -> Implementation:
        """The file's way to compute a case; NotSupported where it has none. spec is a RowSpec."""
        if "model" in case.keywords:
            raise NotSupported("a model's step is PyTorch's or ours: a file has no model")
        supports = getattr(self.module, "supports", None)
        answer = supports(spec) if supports else True
        if isinstance(answer, str) or not answer:
            raise NotSupported(answer or "supports() says no")
        tell = functools.partial(Implementation, in_full=True, tf32=case.ours.tf32)
        if "ids" in case.keywords:
            return tell(bound_experts(self.function("moe", case), case))
        if "slot_mapping" in case.keywords:
            return tell(bound_append(self.function("cache_append", case), case))
        if "block_table" in case.keywords:
            return tell(bound_paged(self.function("attention_paged", case), case))
        packed = "cu_seqlens" in case.keywords
        function = self.function("attention_varlen" if packed else "attention", case)
        transposed = not packed and getattr(self.module, "LAYOUT", LAYOUTS[0]) == "BSHD"
        run = case.wrap(bound(function, case.keywords, transposed))
        # Tensors whose derivatives are wanted twice stay as they are; on a GPU tokens are first.
        relaid = transposed and case.wrap is as_it_is
        return tell(run, tokens_first if relaid else no_change)

    def function(self, name: str, case: Case) -> Callable[..., torch.Tensor]:
        """The module's function of that name, if it takes what the case must tell it."""
        function = getattr(self.module, name, None)
        if function is None:
            raise NotSupported(f"{self.path.name} has no {name}()")
        known = inspect.signature(function).parameters.values()
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in known):
            wanted = [*case.keywords, *(["bias"] if "bias" in case.leaves else [])]
            missing = [w for w in wanted if w not in {parameter.name for parameter in known}]
            if missing:
                raise NotSupported(f"its {name}() has no parameter {', '.join(missing)}")
        return function


def bound_experts(
    function: Callable[..., torch.Tensor], case: Case
) -> Callable[[Tensors], torch.Tensor]:
    """function for the leaves of a case of experts."""

    def run(leaves: Tensors) -> torch.Tensor:
        experts = (leaves["x"], leaves["gate_up"], leaves["down"])
        return function(*experts, case.keywords["ids"], leaves.get("weights"))

    return run


def bound_paged(
    function: Callable[..., torch.Tensor], case: Case
) -> Callable[[Tensors], torch.Tensor]:
    """function for the leaves of a case over pages."""

    def run(leaves: Tensors) -> torch.Tensor:
        return function(leaves["q"], leaves["k_cache"], leaves["v_cache"], **case.keywords)

    return run


def bound_append(function: Callable[..., None], case: Case) -> Callable[[Tensors], torch.Tensor]:
    """function for the leaves of a case of writing to a cache, which is the output."""

    def run(leaves: Tensors) -> torch.Tensor:
        function(*leaves["new"], *leaves["cache"], **case.keywords)
        return leaves["cache"]

    return run


def bound(
    function: Callable[..., torch.Tensor], keywords: dict[str, Any], transposed: bool
) -> Callable[[Tensors], torch.Tensor]:
    """function for the leaves of a case; transposed by views, which copy nothing."""

    def run(leaves: Tensors) -> torch.Tensor:
        bias = {"bias": leaves["bias"]} if "bias" in leaves else {}
        if not transposed:
            return function(leaves["q"], leaves["k"], leaves["v"], **keywords, **bias)
        q, k, v = (leaves[name].transpose(1, 2) for name in "qkv")
        return function(q, k, v, **keywords, **bias).transpose(1, 2)

    return run


def load_all(paths: list[Path], taken: list[str]) -> list[PeerFile]:
    """The files in order; ValueError where two implementations would have one name."""
    names, found = set(taken), []
    for path in paths:
        found.append(PeerFile.load(path))
        if found[-1].name in names:
            raise ValueError(f"--peer {path}: there is a {found[-1].name} already; set NAME")
        names.add(found[-1].name)
    return found
