"""Bad calls of the experts and the router: each is refused, naming the argument."""

from __future__ import annotations

import pytest
import torch

import flashmoe_science as fm
from test_errors import check, zeros

OPS = torch.ops.flashmoe
half, double, integer = torch.float16, torch.float64, torch.int32


def good() -> dict:
    return {
        "x": torch.randn(5, 4),
        "gate_up": torch.randn(3, 6, 4),
        "down": torch.randn(3, 4, 3),
        "ids": torch.randint(3, (5, 2)),
        "weights": torch.rand(5, 2),
    }


def call(**changes):
    return fm.moe(**{**good(), **changes})


def route(**changes):
    return fm.route(**{"logits": torch.randn(5, 4), "k": 2, **changes})


def test_the_unchanged_calls_are_good():
    assert call().shape == (5, 4)
    assert call(up_bias=zeros(3, 6), down_bias=zeros(3, 4)).shape == (5, 4)
    assert route()[0].shape == (5, 2)


MOE = {
    # dtype
    "integers": ({"x": zeros(5, 4, dtype=integer)}, "x"),
    "complex": ({"x": zeros(5, 4, dtype=torch.complex64)}, "x"),
    "float8": ({"x": zeros(5, 4, dtype=torch.float8_e4m3fn)}, "x"),
    "half gate_up": ({"gate_up": zeros(3, 6, 4, dtype=half)}, "gate_up"),
    "double down": ({"down": zeros(3, 4, 3, dtype=double)}, "down"),
    "half up_bias": ({"up_bias": zeros(3, 6, dtype=half)}, "up_bias"),
    "double down_bias": ({"down_bias": zeros(3, 4, dtype=double)}, "down_bias"),
    "ids as floats": ({"ids": zeros(5, 2)}, "ids"),
    "ids as bytes": ({"ids": zeros(5, 2, dtype=torch.uint8)}, "ids"),
    "ids as booleans": ({"ids": zeros(5, 2, dtype=torch.bool)}, "ids"),
    "weights as integers": ({"weights": zeros(5, 2, dtype=integer)}, "weights"),
    "complex weights": ({"weights": zeros(5, 2, dtype=torch.complex64)}, "weights"),
    # device
    "gate_up elsewhere": ({"gate_up": zeros(3, 6, 4, device="meta")}, "gate_up"),
    "down elsewhere": ({"down": zeros(3, 4, 3, device="meta")}, "down"),
    "ids elsewhere": ({"ids": zeros(5, 2, dtype=integer, device="meta")}, "ids"),
    "weights elsewhere": ({"weights": zeros(5, 2, device="meta")}, "weights"),
    "up_bias elsewhere": ({"up_bias": zeros(3, 6, device="meta")}, "up_bias"),
    "down_bias elsewhere": ({"down_bias": zeros(3, 4, device="meta")}, "down_bias"),
    "x elsewhere": ({"x": zeros(5, 4, device="meta")}, "x"),
    # type
    "x is None": ({"x": None}, "x must be"),
    "x is a list": ({"x": [[1.0]]}, "x must be"),
    "gate_up is None": ({"gate_up": None}, "gate_up"),
    "down is None": ({"down": None}, "down"),
    "ids are None": ({"ids": None}, "ids"),
    "ids are a list": ({"ids": [[0, 1]]}, "ids"),
    "weights are a number": ({"weights": 0.5}, "weights"),
    "up_bias is a number": ({"up_bias": 0.5}, "up_bias"),
    "activation is a function": ({"activation": torch.relu}, "activation"),
    "activation is None": ({"activation": None}, "activation"),
    # rank
    "x is a number": ({"x": zeros()}, r"\bx\b"),
    "ids are one number": ({"ids": torch.tensor(1)}, "ids"),
    "ids without k": ({"ids": torch.randint(3, (5,))}, "ids"),
    "gate_up of one expert": ({"gate_up": zeros(6, 4)}, "gate_up"),
    "down of one expert": ({"down": zeros(4, 3)}, "down"),
    "four dimensions": ({"gate_up": zeros(1, 3, 6, 4)}, "gate_up"),
    "up_bias of one expert": ({"up_bias": zeros(6)}, "up_bias"),
    "down_bias of one expert": ({"down_bias": zeros(4)}, "down_bias"),
    # shape
    "width of gate_up": ({"gate_up": zeros(3, 6, 5)}, r"gate_up.*4"),
    "width of down": ({"down": zeros(3, 5, 3)}, r"down.*4"),
    "transposed down": ({"down": zeros(3, 3, 4)}, "down"),
    "experts of down": ({"down": zeros(2, 4, 3)}, r"down has 2.*3"),
    "inner width": ({"down": zeros(3, 4, 4)}, r"gate_up has 6 rows.*8"),
    "no gate": ({"activation": "silu"}, r"gate_up has 6 rows.*3"),
    "a gate too many": ({"down": zeros(3, 4, 6)}, r"gate_up has 6 rows.*12"),
    "tokens of ids": ({"ids": torch.randint(3, (4, 2))}, "ids"),
    "tokens of weights": ({"weights": zeros(4, 2)}, "weights"),
    "k of weights": ({"weights": zeros(5, 3)}, "weights"),
    "experts of up_bias": ({"up_bias": zeros(2, 6)}, "up_bias"),
    "width of up_bias": ({"up_bias": zeros(3, 3)}, "up_bias"),
    "width of down_bias": ({"down_bias": zeros(3, 6)}, "down_bias"),
    "leading dimensions": ({"x": zeros(5, 1, 4)}, r"ids has shape \(5, 2\).*\(5, 1\)"),
    "leading dimensions of weights": (
        {"x": zeros(1, 5, 4), "ids": torch.randint(3, (1, 5, 2))},
        r"weights has shape \(5, 2\).*\(1, 5, 2\)",
    ),
    "swapped leading dimensions": (
        {
            "x": zeros(2, 3, 4),
            "ids": torch.randint(3, (3, 2, 2)),
            "weights": zeros(3, 2, 2),
        },
        r"ids has shape \(3, 2, 2\).*\(2, 3\)",
    ),
    # options
    "an unknown activation": ({"activation": "tanh"}, r"activation is 'tanh'.*'swiglu'.*'relu'"),
    "an activation in capitals": ({"activation": "SwiGLU"}, "activation is 'SwiGLU'"),
    "unknown option": ({"dropout": 0.1}, "dropout"),
}
ROUTE = {
    "integers": ({"logits": zeros(5, 4, dtype=integer)}, "logits"),
    "a list": ({"logits": [[1.0]]}, "logits must be"),
    "a number": ({"logits": zeros()}, "logits"),
    "more than there are": ({"k": 5}, r"k is 5.*4"),
    "negative": ({"k": -1}, r"\bk\b|ids"),
    "k is a fraction": ({"k": 1.5}, r"\bk\b"),
    "k is a tensor": ({"k": torch.tensor(2)}, "k must be a number"),
    "k is None": ({"k": None}, r"\bk\b"),
    "an unknown scoring": ({"scoring": "tanh"}, "scoring is 'tanh'.*'softmax' or 'sigmoid'"),
    "scoring is None": ({"scoring": None}, "scoring"),
    "normalize is a tensor": ({"normalize": torch.tensor(True)}, "normalize must be a number"),
    "bias of other experts": ({"bias": zeros(3)}, "bias"),
    "bias of each token": ({"bias": zeros(5, 4)}, "bias"),
    "integer bias": ({"bias": zeros(4, dtype=integer)}, "bias"),
    "bias elsewhere": ({"bias": zeros(4, device="meta")}, "bias"),
    "bias is a number": ({"bias": 1.0}, "bias"),
}


@pytest.mark.parametrize("grad", [False, True], ids=["", "grad"])
@pytest.mark.parametrize("what", MOE)
def test_bad_call(what, grad, capfd):
    check(call, *MOE[what], grad, capfd)


@pytest.mark.parametrize("grad", [False, True], ids=["", "grad"])
@pytest.mark.parametrize("what", ROUTE)
def test_bad_route(what, grad, capfd):
    check(route, *ROUTE[what], grad, capfd)


# The ops, called past the Python functions: what autograd or a saved graph could get wrong.


def backward_arguments() -> dict:
    given = good()
    inputs = (given["x"], given["gate_up"], given["down"], None, None)
    out, pre, routing = OPS.moe_forward(*inputs, given["ids"], given["weights"], "swiglu", True)
    named = {"grad_out": torch.randn_like(out), "pre": pre, "routing": routing}
    names = ("x", "gate_up", "down", "up_bias", "down_bias")
    named |= dict(zip(names, inputs, strict=True))
    return named | {"ids": given["ids"], "weights": given["weights"], "activation": "swiglu"}


@pytest.mark.parametrize(
    "name, value",
    [
        ("grad_out", zeros(5, 5)),
        ("grad_out", zeros(5, 4, dtype=double)),
        ("grad_out", zeros(5, 4, device="meta")),
        ("pre", zeros(10, 1, 6)),
        ("pre", zeros(0)),
        ("pre", zeros(10, 2, 3, dtype=half)),
        ("pre", zeros(10, 2, 3, device="meta")),
        ("routing", zeros(13, dtype=integer)),
        ("routing", zeros(0, dtype=integer)),
        ("routing", zeros(14, dtype=torch.int64)),
        ("routing", zeros(14, dtype=integer, device="meta")),
        ("weights", zeros(5, 2, dtype=half)),
    ],
)
def test_bad_backward_call(name, value):
    named, needs = backward_arguments(), (True, True, True, False, False, True)
    assert OPS.moe_backward(*named.values(), *needs)[0].isfinite().all()
    named[name] = value
    with pytest.raises(RuntimeError, match=rf"\b{name}\b"):
        OPS.moe_backward(*named.values(), *needs)
