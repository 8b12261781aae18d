"""Ops that write to their arguments and have no derivative: who asks for one is refused."""

from __future__ import annotations

import torch
from torch import is_grad_enabled
from torch._C import _increment_version as note_writes  # public as autograd.graph's, in 0.2 us more
from torch.autograd import forward_ad

from ._derivatives import Refusals, at_key, below_autograd, give_autograd, without_autograd


class ForwardOnly:
    """What autograd and torch.func may know of such an op, and the refusal of all else.

    Traced graphs hold the op, which comes by here. What is called eagerly is its twin `unchecked`,
    between refuse() and note_writes(), after which a backward pass that has saved what was written
    to will fail: the dispatcher takes 10 us to come by.
    """

    def __init__(self, op, unchecked, function: str, inputs: dict[str, int], written: dict):
        """``function``: the op's public name. ``inputs``: arguments that could have a gradient, and
        where they are among the op's. ``written``: the same for those it writes to.
        """
        self.function, self.names = function, tuple(inputs)
        self.refusals = Refusals(f"{function} has no forward-mode derivative", "")
        name, twin = (x._schema.name.removeprefix("flashmoe::") for x in (op, unchecked))

        def refuse_then_run(*args) -> None:
            self.refuse([args[i] for i in inputs.values()])
            below_autograd(op)(*args)

        def note_then_run(keys, *args) -> None:
            note_writes([args[i] for i in written.values() if args[i] is not None])
            with torch._C._AutoDispatchBelowADInplaceOrView():
                op.redispatch(keys & torch._C._after_ADInplaceOrView_keyset, *args)

        def refuse_vmap(info, dims, *args) -> None:
            raise NotImplementedError(
                f"{function} has no vmap: pass the sequences of all samples in one call"
            )

        def resolve_then_run(keys, *args) -> None:
            # torch's own way takes it for granted that an op returns what it writes to.
            for argument, i in written.items():
                if args[i] is not None and args[i].is_neg():
                    raise ValueError(f"{argument} is a lazily negated view; pass memory of its own")
            unchecked(*(x.resolve_neg() if isinstance(x, torch.Tensor) else x for x in args))

        give_autograd(name, refuse_then_run)
        without_autograd(twin)
        at_key(name, "ADInplaceOrView", note_then_run)
        at_key(name, "Negative", resolve_then_run)
        at_key(twin, "Negative", resolve_then_run)
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
