"""Ops that write to their arguments and have no derivative: who asks for one is refused."""

from __future__ import annotations

import torch
from torch import is_grad_enabled
from torch._C import _increment_version as note_writes
from torch.autograd import forward_ad

from ._derivatives import (
    Refusals,
    below_autograd,
    give_autograd,
    hear_of_writes,
    without_autograd,
)

# note_writes(tensors): a backward pass that has saved one of these for itself will fail, as after
# any other write.


class ForwardOnly:
    """What autograd and torch.func may know of such an op, and the refusal of all else.

    Traced graphs hold the op, which comes by here. What is called eagerly is its twin `unchecked`,
    after refuse() and with note_writes(): through the dispatcher both cost 10 us.
    """

    def __init__(self, op, function: str, inputs: dict[str, int], written: tuple[int, ...]):
        """``function``: the op's public name. ``inputs``: arguments that could have a gradient, and
        where they are among the op's; ``written``: where those are that it writes to.
        """
        self.function, self.names = function, tuple(inputs)
        self.refusals = Refusals(f"{function} has no forward-mode derivative", "")

        def refuse_then_run(*args) -> None:
            self.refuse([args[i] for i in inputs.values()])
            below_autograd(op)(*args)

        def note_then_run(keys, *args) -> None:
            note_writes([args[i] for i in written if args[i] is not None])
            with torch._C._AutoDispatchBelowADInplaceOrView():
                op.redispatch(keys & torch._C._after_ADInplaceOrView_keyset, *args)

        def refuse_vmap(info, dims, *args) -> None:
            raise NotImplementedError(
                f"{function} has no vmap: pass the sequences of all samples in one call"
            )

        name = op._schema.name.removeprefix("flashmoe::")
        give_autograd(name, refuse_then_run)
        hear_of_writes(name, note_then_run)
        without_autograd(f"{name}_unchecked")
        torch.library.register_vmap(f"flashmoe::{name}", refuse_vmap)

    def refuse(self, tensors) -> None:
        """Fails where a derivative would be lost in silence; ``tensors`` in the order of inputs."""
        if is_grad_enabled():
            for tensor in tensors:  # any() of a generator takes twice as long
                if tensor is not None and tensor.requires_grad:
                    self._fail(tensors)
        if forward_ad._current_level >= 0:
            self.refusals.refuse_tangents(tensors)

    def _fail(self, tensors) -> None:
        named = zip(self.names, tensors, strict=True)
        wanting = [name for name, x in named if x is not None and x.requires_grad]
        raise NotImplementedError(
            f"{self.function} has no gradient, and {', '.join(wanting)} would need one. Call it "
            f"under torch.no_grad() or torch.inference_mode(), or pass {wanting[0]}.detach(); "
            "flash_attention and flash_attention_varlen have gradients"
        )
