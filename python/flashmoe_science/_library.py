"""Loads the compiled library and tells torch the shapes of what its ops return."""

from __future__ import annotations

from pathlib import Path

import torch

LIBRARY = Path(__file__).parent / "lib" / "libflashmoe_torch.so"


def _load() -> None:
    if not LIBRARY.exists():
        raise ImportError(
            f"flashmoe_science: {LIBRARY} is missing. In a checkout run `make build`; "
            "otherwise reinstall the package with `pip install --no-build-isolation .`"
        )
    try:
        torch.ops.load_library(LIBRARY)
    except OSError as error:
        raise ImportError(
            f"flashmoe_science: cannot load {LIBRARY} with torch {torch.__version__} "
            f"(2.10 or newer is needed): {error}"
        ) from error


_load()


INPUTS = ("key", "value", "bias", "key_lengths", "cu_seqlens_q", "cu_seqlens_k")
RESULTS = ("out", "lse", "grad_out", "grad_lse")


def _check_devices(query, names, tensors) -> None:
    """A fake kernel is also what runs when a meta tensor stands among real ones."""
    for name, tensor in zip(names, tensors, strict=True):
        if tensor is not None and tensor.device != query.device:
            raise RuntimeError(
                f"{name} is on {tensor.device} and query on {query.device}; "
                "move it with .to(query.device)"
            )


@torch.library.register_fake("flashmoe::attention")
@torch.library.register_fake("flashmoe::attention_forward")
def _attention_fake(query, key, value, bias, key_lengths, cu_q, cu_k, *options):
    _check_devices(query, INPUTS, (key, value, bias, key_lengths, cu_q, cu_k))
    if query.shape[-1] == value.shape[-1]:
        out = torch.empty_like(query)
    else:
        out = query.new_empty((*query.shape[:-1], value.shape[-1]))
    lse_dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    return out, query.new_empty(query.shape[:-1], dtype=lse_dtype)


@torch.library.register_fake("flashmoe::attention_backward")
def _attention_backward_fake(
    grad_out, grad_lse, out, lse, query, key, value, bias, key_lengths, cu_q, cu_k, *rest
):
    inputs = (key, value, bias, key_lengths, cu_q, cu_k)
    _check_devices(query, (*INPUTS, *RESULTS), (*inputs, out, lse, grad_out, grad_lse))
    needs = rest[-4:]
    likes = (query, key, value, query if bias is None else bias)
    wanted = (*needs[:3], needs[3] and bias is not None)
    return tuple(
        torch.empty_like(like) if want else like.new_empty((0,))
        for like, want in zip(likes, wanted, strict=True)
    )


forward = torch.ops.flashmoe.attention_forward.default
backward = torch.ops.flashmoe.attention_backward.default
attention = torch.ops.flashmoe.attention.default
explain = torch.ops.flashmoe.explain.default
