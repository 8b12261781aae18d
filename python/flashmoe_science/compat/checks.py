"""Refusals that name the caller's argument: the ops below know it by another name and shape."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch._C import _are_functorch_transforms_active
from torch.compiler import is_compiling


def check_tensor(
    name: str, tensor: Tensor, shape: str, sizes: tuple[int, ...] | None = None
) -> None:
    """``shape`` names the dimensions, with ``...`` for more of them; ``sizes``: what they are."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor {shape}, not {type(tensor).__name__}")
    more = "..." in shape
    dims, rank = tensor.dim(), shape.count(", ") + 1 - more
    if dims < rank or (dims > rank and not more):
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}; it must be {shape}")
    if sizes is not None and tuple(tensor.shape) != sizes:
        raise ValueError(
            f"{name} has shape {tuple(tensor.shape)}; it must be {shape}, which is {sizes} here"
        )


def check_integers(
    name: str, tensor: Tensor, like: Tensor, shape: str, sizes: tuple[int, ...] | None = None
) -> None:
    """Lengths or indices, on the device of ``like``."""
    check_tensor(name, tensor, shape, sizes)
    if tensor.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"{name} is {tensor.dtype}; it must be int32 or int64")
    if tensor.device != like.device:
        raise ValueError(f"{name} is on {tensor.device} and q on {like.device}")


def check_int(name: str, number) -> None:
    # __index__ is not called: it would fix a size that torch.compile holds as a symbol.
    if not isinstance(number, int) and not hasattr(number, "__index__"):
        raise TypeError(f"{name} must be an int, not {number!r}")


def check_together(**arguments) -> bool:
    """Whether they are given: all or none."""
    given = [name for name, value in arguments.items() if value is not None]
    if given and len(given) < len(arguments):
        raise ValueError(f"{' and '.join(arguments)} must be given together; only {given[0]} is")
    return bool(given)


def traced() -> bool:
    """Whether something records or transforms the call, so that nothing is known of its values."""
    return is_compiling() or _are_functorch_transforms_active()


def readable(tensor: Tensor) -> bool:
    """Whether its values can be looked at without waiting for a device."""
    return tensor.is_cpu and type(tensor) is Tensor and not traced()


def within(values: Tensor, low: int, high: int) -> bool:
    """Whether all are: what nearly every call asks, in one pass and without a mask."""
    if values.numel() == 0:
        return True
    least, most = values.aminmax()
    return low <= least.item() and most.item() <= high


def refuse_values(name: str, values: Tensor, good: Tensor, limits: Callable[..., str]) -> None:
    """Names the first entry that is not good; ``limits(*index)`` says what it must be."""
    if good.all():
        return
    index = good.logical_not().nonzero()[0].tolist()
    place = ", ".join(map(str, index))
    raise ValueError(
        f"{name}[{place}] is {values[tuple(index)].item()}; it must be {limits(*index)}"
    )


def descale(name: str, scale: Tensor | None, batch: int) -> Tensor | None:
    """flash-attn's scales are (batch, key heads); ours are of a head, or of all."""
    if not isinstance(scale, Tensor) or scale.dim() < 2:
        return scale
    if scale.dim() != 2 or scale.shape[0] != batch:
        raise ValueError(f"{name} has shape {tuple(scale.shape)}; it must be (batch, key heads)")
    if batch > 1 and scale.stride(0) != 0:
        raise NotImplementedError(
            f"{name} has a scale for each sequence; a cache here has one, or one for each key "
            "head. Pass () or (heads,), or that expanded to (batch, heads)"
        )
    return scale[0] if batch else scale.new_ones(scale.shape[1])


def refuse_q_descale(q_descale: Tensor | None) -> None:
    if q_descale is not None:
        raise NotImplementedError(
            "q_descale is not supported: queries are not fp8 here; pass them in 16 bits"
        )
