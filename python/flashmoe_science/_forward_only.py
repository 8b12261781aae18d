"""Ops without a derivative, which may write to their arguments: who asks for one is refused."""

from __future__ import annotations

import torch
from torch import is_grad_enabled
from torch._C import _are_functorch_transforms_active, _increment_version
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from ._derivatives import Refusals, at_key, below_autograd, give_autograd, without_autograd

# After _increment_version(tensors) a backward pass that has saved one of them for itself fails, as
# after any other write. autograd.graph.increment_version is the same in 0.2 us more.


class ForwardOnly:
    """Such an op, to be called with its arguments.

    Traced graphs and torch.func hold the op itself, which refuses by way of the dispatcher. That
    takes 10 us, so what is called eagerly is its twin `unchecked`.
    """

    def __init__(self, name: str, function: str):
        """``function``: the op's public name."""
        self.op = getattr(torch.ops.flashmoe, name).default
        self.unchecked = getattr(torch.ops.flashmoe, f"{name}_unchecked").default
        self.function = function
        # Where the op has which tensors, and which of them it writes to.
        arguments = self.op._schema.arguments
        self.tensors = {a.name: i for i, a in enumerate(arguments) if "Tensor" in str(a.type)}
        self.written = {a.name: i for i, a in enumerate(arguments) if a.is_write}
        self.refusals = Refusals(f"{function} has no forward-mode derivative", "")
        give_autograd(name, self._refuse_then_run)
        without_autograd(f"{name}_unchecked")
        torch.library.register_vmap(f"flashmoe::{name}", self._refuse_vmap)
        if self.written:
            at_key(name, "ADInplaceOrView", self._note_then_run)
            at_key(name, "Negative", self._resolve_then_run)
            at_key(f"{name}_unchecked", "Negative", self._resolve_then_run)

    def __call__(self, *args):
        # What traces or transforms a call needs an op to look at.
        if is_compiling() or _are_functorch_transforms_active():
            return self.op(*args)
        if is_grad_enabled() or forward_ad._current_level >= 0:
            self._refuse(args)
        results = self.unchecked(*args)
        if self.written:
            self._note_writes(args)
        return results

    def _refuse(self, args) -> None:
        """Fails where a derivative would be lost in silence."""
        if is_grad_enabled():
            for i in self.tensors.values():  # any() of a generator takes twice as long
                if args[i] is not None and args[i].requires_grad:
                    self._complain(args)
        if forward_ad._current_level >= 0:
            self.refusals.refuse_tangents([args[i] for i in self.tensors.values()])

    def _complain(self, args) -> None:
        given = {name: args[i] for name, i in self.tensors.items() if args[i] is not None}
        wanting = [name for name, tensor in given.items() if tensor.requires_grad]
        raise NotImplementedError(
            f"{self.function} has no gradient, and {', '.join(wanting)} would need one. Call it "
            f"under torch.no_grad() or torch.inference_mode(), or pass {wanting[0]}.detach(); "
            "flash_attention and flash_attention_varlen have gradients"
        )

    def _note_writes(self, args) -> None:
        _increment_version([args[i] for i in self.written.values() if args[i] is not None])

    # What the dispatcher comes by.

    def _refuse_then_run(self, *args):
        self._refuse(args)
        return below_autograd(self.op)(*args)

    def _note_then_run(self, keys, *args):
        self._note_writes(args)
        with torch._C._AutoDispatchBelowADInplaceOrView():
            return self.op.redispatch(keys & torch._C._after_ADInplaceOrView_keyset, *args)

    def _resolve_then_run(self, keys, *args):
        # torch's own way takes it for granted that an op returns what it writes to.
        for name, i in self.written.items():
            if args[i] is not None and args[i].is_neg():
                raise ValueError(f"{name} is a lazily negated view; pass memory of its own")
        return self.unchecked(
            *(x.resolve_neg() if isinstance(x, torch.Tensor) else x for x in args)
        )

    def _refuse_vmap(self, info, dims, *args):
        raise NotImplementedError(
            f"{self.function} has no vmap: pass the sequences of all samples in one call"
        )
