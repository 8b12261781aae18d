"""Experts of transformers' models by our kernels."""

from __future__ import annotations

import inspect

from torch import Tensor, nn

from ..moe import moe

__all__ = ["register_experts"]

NAME = "flashmoe"


def _refuse(experts: nn.Module, what: str) -> None:
    raise NotImplementedError(
        f"{type(experts).__name__} {what}, which flashmoe_science has no kernel for; use "
        'experts_implementation="eager" or "grouped_mm" for this model'
    )


def _curve(experts: nn.Module) -> str:
    """The activation function of one number: silu, gelu or relu."""
    from transformers.activations import GELUActivation, SiLUActivation

    function = experts.act_fn
    if isinstance(function, (nn.SiLU, SiLUActivation)) or function is nn.functional.silu:
        return "silu"
    if isinstance(function, GELUActivation) or function is nn.functional.gelu:
        return "gelu"
    if isinstance(function, nn.GELU) and function.approximate == "none":
        return "gelu"
    if isinstance(function, nn.ReLU) or function is nn.functional.relu:
        return "relu"
    name = type(function).__name__ if isinstance(function, nn.Module) else function
    _refuse(experts, f"has the activation {name}")


def _activation(experts: nn.Module) -> str:
    from transformers.integrations.moe import _default_apply_gate

    # A gate of the experts' own comes first: such experts need not have an act_fn.
    if experts.has_gate and type(experts)._apply_gate is not _default_apply_gate:
        _refuse(experts, "has a gate of its own (_apply_gate)")
    curve = _curve(experts)
    if not experts.has_gate:
        return curve
    return {"silu": "swiglu", "gelu": "geglu", "relu": "reglu"}[curve]


def _experts(
    self: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """The forward function of a module of experts, as ExpertsInterface calls it."""
    if not getattr(self, "is_concatenated", True):
        _refuse(self, "interleaves the rows of gate and up")
    if getattr(self, "has_post_expert_norm", False):
        _refuse(self, "normalizes the result of each expert")
    up = "gate_up_proj" if self.has_gate else "up_proj"
    weight, down = getattr(self, up), self.down_proj
    biases = {}
    if self.has_bias:
        biases = {"up_bias": getattr(self, f"{up}_bias"), "down_bias": self.down_proj_bias}
    if self.is_transposed:  # (E, d, 2n) storage, read in place
        weight, down = weight.mT, down.mT
    # Ids from num_experts on are another device's, under expert parallelism: no expert here either.
    return moe(hidden_states, weight, down, top_k_index, top_k_weights, _activation(self), **biases)


def register_experts() -> str:
    """Puts our experts into transformers (5.17 or newer), and returns their name, ``"flashmoe"``.

    For every model whose experts follow transformers' interface::

        model = AutoModelForCausalLM.from_pretrained(..., experts_implementation=register_experts())

    or ``model.set_experts_implementation("flashmoe")`` later. Experts that we cannot compute as the
    model means them (interleaved gates, gates with a clamp, other activations) are refused when
    they are called.
    """
    try:
        from transformers.integrations.moe import ExpertsInterface, use_experts_implementation

        if "has_gate" not in inspect.signature(use_experts_implementation).parameters:
            raise ImportError("the experts of this version do not say how their weights lie")
    except ImportError as error:
        raise ImportError(
            "register_experts() needs transformers >= 5.17, whose models take experts by name: "
            f"pip install 'transformers>=5.17'. ({error})"
        ) from error
    ExpertsInterface.register(NAME, _experts)
    return NAME
