"""Bad calls: each is refused with an error that names the argument, and nothing crashes."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

import flashmoe_science as fm

ERRORS = (RuntimeError, TypeError, ValueError)


def dense(**changes):
    """A good call, changed: tensors by name, options as they are."""
    call = {
        "q": torch.randn(2, 4, 5, 8),
        "k": torch.randn(2, 2, 7, 8),
        "v": torch.randn(2, 2, 7, 6),
    }
    return fm.flash_attention(**{**call, **changes})


def ragged(**changes):
    call = {
        "q": torch.randn(9, 4, 8),
        "k": torch.randn(11, 2, 8),
        "v": torch.randn(11, 2, 6),
        "cu_seqlens_q": torch.tensor([0, 4, 9]),
        "cu_seqlens_k": torch.tensor([0, 8, 11]),
        "max_seqlen_q": 5,
        "max_seqlen_k": 8,
    }
    return fm.flash_attention_varlen(**{**call, **changes})


def zeros(*shape, dtype=torch.float32, device=None):
    return torch.zeros(shape, dtype=dtype, device=device)


def test_the_unchanged_calls_are_good():
    assert dense().shape == (2, 4, 5, 6)
    assert ragged().shape == (9, 4, 6)


Q, K, V, B = r"query|\bq\b", r"key|\bk\b", r"value|\bv\b", "bias"
half, double, integer = torch.float16, torch.float64, torch.int32

DENSE = {
    # dtype
    "integers": ({"q": zeros(2, 4, 5, 8, dtype=integer)}, Q),
    "booleans": ({"q": zeros(2, 4, 5, 8, dtype=torch.bool)}, Q),
    "complex": ({"q": zeros(2, 4, 5, 8, dtype=torch.complex64)}, Q),
    "float8": ({"q": zeros(2, 4, 5, 8, dtype=torch.float8_e4m3fn)}, Q),
    "complex key": ({"k": zeros(2, 2, 7, 8, dtype=torch.complex64)}, K),
    "half key": ({"k": zeros(2, 2, 7, 8, dtype=half)}, K),
    "double value": ({"v": zeros(2, 2, 7, 6, dtype=double)}, V),
    "double bias": ({"bias": zeros(5, 7, dtype=double)}, B),
    "half bias to float32": ({"bias": zeros(5, 7, dtype=half)}, B),
    "boolean bias of another shape": ({"bias": zeros(7, 5, dtype=torch.bool)}, B),
    "integer bias": ({"bias": zeros(5, 7, dtype=integer)}, B),
    "double sinks": ({"sinks": zeros(4, dtype=double)}, "sinks.*float64.*float32"),
    "half sinks to float32": ({"sinks": zeros(4, dtype=half)}, "sinks.*float16.*float32"),
    "integer sinks": ({"sinks": zeros(4, dtype=integer)}, "sinks.*int32"),
    # device
    "key elsewhere": ({"k": zeros(2, 2, 7, 8, device="meta")}, K),
    "value elsewhere": ({"v": zeros(2, 2, 7, 6, device="meta")}, V),
    "bias elsewhere": ({"bias": zeros(5, 7, device="meta")}, B),
    "sinks elsewhere": ({"sinks": zeros(4, device="meta")}, "sinks"),
    "lengths elsewhere": ({"key_lengths": zeros(2, dtype=integer, device="meta")}, "key_lengths"),
    "query elsewhere": ({"q": zeros(2, 4, 5, 8, device="meta")}, rf"{Q}|{K}"),
    # type
    "query is a list": ({"q": [[1.0]]}, Q),
    "query is None": ({"q": None}, Q),
    "key is None": ({"k": None}, K),
    "value is None": ({"v": None}, V),
    "bias is a number": ({"bias": 1.0}, B),
    "sinks are a list": ({"sinks": [1.0] * 4}, "sinks"),
    "lengths are a list": ({"key_lengths": [3, 7]}, "key_lengths"),
    "scale is text": ({"scale": "large"}, "scale"),
    "softcap is text": ({"softcap": "large"}, "softcap"),
    "causal is a tensor": ({"causal": torch.tensor([True, False])}, "causal"),
    # A number is taken from a tensor only where no gradient is lost by it.
    "scale with a gradient": ({"scale": torch.tensor(0.5, requires_grad=True)}, "scale"),
    "dropout below 0": ({"dropout_p": -0.1}, "dropout_p"),
    "dropout above 1": ({"dropout_p": 1.5}, "dropout_p"),
    "dropout is text": ({"dropout_p": "x"}, "dropout_p.*str"),
    "dropout is NaN": ({"dropout_p": float("nan")}, "dropout_p"),
    "dropout is a tensor": ({"dropout_p": torch.tensor(0.5)}, "dropout_p"),
    "seed is text": ({"dropout_p": 0.1, "seed": "1"}, "seed"),
    "seed is a fraction": ({"dropout_p": 0.1, "seed": 1.5}, "seed"),
    "seed of 65 bits": ({"dropout_p": 0.1, "seed": 2**63}, "seed"),
    "seed of another dtype": ({"dropout_p": 0.1, "seed": zeros(dtype=integer)}, "seed"),
    "two seeds": ({"dropout_p": 0.1, "seed": zeros(2, dtype=torch.int64)}, "seed"),
    "no seed": ({"dropout_p": 0.1, "seed": zeros(0, dtype=torch.int64)}, "seed"),
    "seed elsewhere": ({"dropout_p": 0.1, "seed": zeros(dtype=torch.int64, device="meta")}, "seed"),
    "softcap with a gradient": ({"softcap": torch.tensor(5.0, requires_grad=True)}, "softcap"),
    # rank
    "no heads dimension": ({"q": zeros(2, 5, 8)}, Q),
    "a vector": ({"q": zeros(8)}, Q),
    "a number": ({"q": zeros()}, Q),
    "nine dimensions": ({"q": zeros(1, 1, 1, 1, 1, 2, 4, 5, 8)}, Q),
    "key of another rank": ({"k": zeros(2, 7, 8)}, K),
    "value of another rank": ({"v": zeros(1, 2, 2, 7, 6)}, V),
    "bias of a higher rank": ({"bias": zeros(1, 2, 4, 5, 7)}, B),
    # shape
    "batch of the key": ({"k": zeros(3, 2, 7, 8)}, K),
    "batch of the value": ({"v": zeros(1, 2, 7, 6)}, V),
    "head dim of the key": ({"k": zeros(2, 2, 7, 9)}, K),
    "length of the value": ({"v": zeros(2, 2, 6, 6)}, V),
    "heads of the value": ({"v": zeros(2, 4, 7, 6)}, V),
    "head ratio": ({"k": zeros(2, 3, 7, 8), "v": zeros(2, 3, 7, 6)}, r"(?s)query.*key"),
    "more key heads": ({"k": zeros(2, 8, 7, 8), "v": zeros(2, 8, 7, 6)}, r"(?s)query.*key"),
    "no heads": ({"q": zeros(2, 0, 5, 8)}, Q),
    "no key heads": ({"k": zeros(2, 0, 7, 8), "v": zeros(2, 0, 7, 6)}, K),
    "head dim 0": ({"q": zeros(2, 4, 5, 0), "k": zeros(2, 2, 7, 0)}, Q),
    "head dim 257": ({"q": zeros(2, 4, 5, 257), "k": zeros(2, 2, 7, 257)}, Q),
    "value head dim 0": ({"v": zeros(2, 2, 7, 0)}, V),
    "value head dim 257": ({"v": zeros(2, 2, 7, 257)}, V),
    "bias rows": ({"bias": zeros(6, 7)}, B),
    "bias columns": ({"bias": zeros(5, 6)}, B),
    "bias heads": ({"bias": zeros(2, 5, 7)}, B),
    "bias batch": ({"bias": zeros(3, 1, 5, 7)}, B),
    "empty bias": ({"bias": zeros(5, 0)}, B),
    "sinks of key heads": ({"sinks": zeros(2)}, r"sinks.*\(2,\).*\(4,\)"),
    "sinks with a batch": ({"sinks": zeros(2, 4)}, r"sinks.*\(2, 4\).*\(4,\)"),
    "a sink": ({"sinks": zeros()}, r"sinks.*\(\).*\(4,\)"),
    "no sinks": ({"sinks": zeros(0)}, r"sinks.*\(0,\).*\(4,\)"),
    # lengths
    "length past the end": ({"key_lengths": torch.tensor([7, 8])}, r"key_lengths.*8"),
    "negative length": ({"key_lengths": torch.tensor([7, -1])}, r"key_lengths.*-1"),
    "enormous length": ({"key_lengths": torch.tensor([2**62, 1])}, "key_lengths"),
    "lengths as floats": ({"key_lengths": torch.tensor([7.0, 3.0])}, "key_lengths"),
    "lengths as bytes": ({"key_lengths": torch.tensor([7, 3], dtype=torch.uint8)}, "key_lengths"),
    "too many lengths": ({"key_lengths": torch.tensor([7, 3, 1])}, "key_lengths"),
    "lengths per head": ({"key_lengths": torch.tensor([[7, 3], [1, 2]])}, "key_lengths"),
    # options
    "window below -1": ({"window": (-2, 0)}, r"window.*-2"),
    "right window below -1": ({"window": (0, -7)}, r"window.*-7"),
    "window of one": ({"window": (3,)}, "window"),
    "window of three": ({"window": (1, 2, 3)}, "window"),
    "window is a number": ({"window": 3}, "window"),
    "window of text": ({"window": "no"}, "window"),
    "window of fractions": ({"window": (1.5, 2)}, "window"),
    "window of None": ({"window": (None, 2)}, "window"),
    "window past 64 bits": ({"window": (2**70, 2)}, "window"),
    "negative softcap": ({"softcap": -1.0}, r"softcap.*-1"),
    "softcap NaN": ({"softcap": float("nan")}, "softcap"),
    # Past float32, in which scores are.
    "softcap too large": ({"softcap": 1e39}, r"softcap.*1e\+39"),
    "softcap too small": ({"softcap": 1e-39}, "softcap.*1e-39"),
    "softcap too small for the scale": ({"scale": 1e10, "softcap": 1e-35}, "softcap.*1e-35"),
    "scale too large": ({"scale": -1e39}, r"scale.*-1e\+39"),
    "softcap infinite": ({"softcap": float("inf")}, "softcap"),
    "scale NaN": ({"scale": float("nan")}, "scale"),
    "scale infinite": ({"scale": float("-inf")}, "scale"),
    "unknown option": ({"dropout": 0.1}, "dropout"),
}
CU = r"cu_seqlens_[qk]"
RAGGED = {
    "dense tensors": ({"q": zeros(2, 4, 5, 8)}, Q),
    "integer query": ({"q": zeros(9, 4, 8, dtype=integer)}, Q),
    "half key": ({"k": zeros(11, 2, 8, dtype=half)}, K),
    "head ratio": ({"k": zeros(11, 3, 8), "v": zeros(11, 3, 6)}, r"(?s)query.*key"),
    "tokens of the value": ({"v": zeros(10, 2, 6)}, V),
    "no start at 0": ({"cu_seqlens_q": torch.tensor([1, 4, 9])}, r"cu_seqlens_q.*1"),
    "falling": ({"cu_seqlens_q": torch.tensor([0, 4, 3])}, "cu_seqlens_q"),
    "falling keys": ({"cu_seqlens_k": torch.tensor([0, 8, 7])}, "cu_seqlens_k"),
    "negative": ({"cu_seqlens_q": torch.tensor([0, -4, 9])}, "cu_seqlens_q"),
    "overrun": ({"cu_seqlens_q": torch.tensor([0, 5, 10])}, r"cu_seqlens_q.*10"),
    "overrun keys": ({"cu_seqlens_k": torch.tensor([0, 8, 12])}, r"cu_seqlens_k.*12"),
    "enormous": ({"cu_seqlens_k": torch.tensor([0, 8, 2**62])}, "cu_seqlens_k"),
    "wraps around": ({"cu_seqlens_k": torch.tensor([0, 2**63 - 1, -(2**63)])}, "cu_seqlens_k"),
    "longer than stated": ({"max_seqlen_q": 4}, r"max_seqlen_q.*4"),
    "longer keys than stated": ({"max_seqlen_k": 7}, r"max_seqlen_k.*7"),
    "negative maximum": ({"max_seqlen_q": -1}, "max_seqlen_q"),
    "maximum is a fraction": ({"max_seqlen_k": 8.5}, "max_seqlen_k"),
    "maximum is None": ({"max_seqlen_k": None}, "max_seqlen_k"),
    "one sequence more": ({"cu_seqlens_k": torch.tensor([0, 3, 8, 11])}, CU),
    "no entries": ({"cu_seqlens_q": torch.tensor([], dtype=integer)}, "cu_seqlens_q"),
    "as a column": ({"cu_seqlens_q": torch.tensor([[0], [4], [9]])}, "cu_seqlens_q"),
    "a number": ({"cu_seqlens_q": torch.tensor(9)}, "cu_seqlens_q"),
    "floats": ({"cu_seqlens_q": torch.tensor([0.0, 4.0, 9.0])}, "cu_seqlens_q"),
    "bytes": ({"cu_seqlens_k": torch.tensor([0, 8, 11], dtype=torch.uint8)}, "cu_seqlens_k"),
    "two dtypes": ({"cu_seqlens_k": torch.tensor([0, 8, 11], dtype=integer)}, CU),
    "a list": ({"cu_seqlens_q": [0, 4, 9]}, "cu_seqlens_q"),
    "missing": ({"cu_seqlens_q": None}, "cu_seqlens_q"),
    "both missing": ({"cu_seqlens_q": None, "cu_seqlens_k": None}, "cu_seqlens_q"),
    "elsewhere": ({"cu_seqlens_k": torch.tensor([0, 8, 11], device="meta")}, "cu_seqlens_k"),
    "a dense bias": ({"bias": zeros(2, 4, 5, 8)}, B),
    "bias rows": ({"bias": zeros(46, 4)}, r"bias.*46.*47"),
    "more bias rows": ({"bias": zeros(48, 1)}, r"bias.*48.*47"),
    "bias heads": ({"bias": zeros(47, 2)}, B),
    "bias without heads": ({"bias": zeros(47)}, B),
    "bias dtype": ({"bias": zeros(47, 4, dtype=half)}, B),
    "sinks of tokens": ({"sinks": zeros(9)}, r"sinks.*\(9,\).*\(4,\)"),
    "sinks dtype": ({"sinks": zeros(4, dtype=half)}, "sinks.*float16.*float32"),
    "sinks elsewhere": ({"sinks": zeros(4, device="meta")}, "sinks"),
    "sinks are a number": ({"sinks": 1.0}, "sinks"),
    "window": ({"window": (-3, 0)}, "window"),
    "softcap": ({"softcap": -0.5}, "softcap"),
    "key_lengths": ({"key_lengths": torch.tensor([8, 3])}, "key_lengths"),
}


@pytest.mark.parametrize("grad", [False, True], ids=["", "grad"])
@pytest.mark.parametrize("what", DENSE)
def test_bad_dense_call(what, grad, capfd):
    check(dense, *DENSE[what], grad, capfd)


@pytest.mark.parametrize("grad", [False, True], ids=["", "grad"])
@pytest.mark.parametrize("what", RAGGED)
def test_bad_ragged_call(what, grad, capfd):
    check(ragged, *RAGGED[what], grad, capfd)


def check(call, changes, pattern, grad, capfd):
    if grad:  # the same through autograd
        changes = {
            name: x.clone().requires_grad_()
            if isinstance(x, torch.Tensor) and x.is_floating_point() and not x.requires_grad
            else x
            for name, x in changes.items()
        }
    with pytest.raises(ERRORS, match=pattern) as raised:
        call(**changes)
    message = str(raised.value)
    assert ".cc" not in message and "API call failed" not in message, "no message for people"
    printed = capfd.readouterr()
    assert printed.err == "" and printed.out == "", "an error is raised, not printed"


def test_a_bias_that_is_a_word_of_torch_is_refused():
    """Its numbers are not written: only SDPA knows what is meant."""
    for bias in (causal_upper_left(5, 7), causal_lower_right(5, 7)):
        for call in (dense, ragged):
            with pytest.raises(TypeError, match=r"bias is a CausalBias.*causal=True"):
                call(bias=bias)


def test_explain_refuses_the_same():
    q, k, v = zeros(2, 4, 5, 8), zeros(2, 2, 7, 8), zeros(2, 2, 7, 6)
    for changes, pattern in (
        ({"bias": zeros(6, 7)}, "bias"),
        ({"window": (-2, 0)}, "window"),
        ({"softcap": -1.0}, "softcap"),
        ({"device": "toaster"}, "device.*toaster"),
    ):
        with pytest.raises(ERRORS, match=pattern):
            fm.explain(q, k, v, **changes)


# The ops, called past the Python functions: what autograd or a saved graph could get wrong.


def backward_arguments():
    q, k, v = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 7, 8), torch.randn(2, 2, 7, 6)
    options = (0, 0, False, -1, -1, None, 0.0, True, False, 0.0, None)
    sinks = torch.randn(4)
    out, lse = torch.ops.flashmoe.attention_forward(q, k, v, None, sinks, *[None] * 3, *options)
    named = {"grad_out": torch.randn_like(out), "grad_lse": torch.randn_like(lse)}
    named |= {"out": out, "lse": lse, "query": q, "key": k, "value": v, "bias": None}
    named["sinks"] = sinks
    named |= {"key_lengths": None, "cu_seqlens_q": None, "cu_seqlens_k": None}
    return named, (*options, True, True, True, False, True)


@pytest.mark.parametrize(
    "name, value",
    [
        ("grad_out", zeros(2, 4, 5, 7)),
        ("grad_out", zeros(2, 4, 5, 6, dtype=double)),
        ("grad_lse", zeros(2, 4, 6)),
        ("grad_lse", zeros(2, 4, 5, dtype=half)),
        ("out", zeros(2, 4, 5, 8)),
        ("out", zeros(2, 4, 5, 6, dtype=half)),
        ("lse", zeros(2, 4, 5, 1)),
        ("lse", zeros(2, 4, 5, dtype=double)),
        ("key", zeros(2, 2, 8, 8)),
        ("sinks", zeros(2)),
        ("sinks", zeros(4, device="meta")),
        ("out", zeros(2, 4, 5, 6, device="meta")),
        ("lse", zeros(2, 4, 5, device="meta")),
        ("grad_out", zeros(2, 4, 5, 6, device="meta")),
    ],
)
def test_bad_backward_call(name, value):
    named, options = backward_arguments()
    assert torch.ops.flashmoe.attention_backward(*named.values(), *options)[0].isfinite().all()
    named[name] = value
    with pytest.raises(RuntimeError, match=rf"\b{name}\b" if name != "key" else "value"):
        torch.ops.flashmoe.attention_backward(*named.values(), *options)


# Sizes that overflow. In a process of its own with little memory, so that an attempt to allocate
# or to walk them fails there, and quickly.

HUGE = """
import resource, torch
import flashmoe_science as fm

def zero(*shape):
    return torch.zeros(1).expand(shape)

good = dict(q=torch.randn(1, 4, 5, 8), k=torch.randn(1, 2, 7, 8), v=torch.randn(1, 2, 7, 8))
calls = {
    "query past 2^63 bytes": (dict(q=zero(1, 4, 2**57, 8)), "query"),
    "key past 2^63 bytes": (dict(k=zero(1, 2, 2**58, 8), v=zero(1, 2, 2**58, 8)), "key"),
    "bias past 2^63 bytes": (
        dict(q=zero(1, 1, 2**40, 1), k=zero(1, 1, 2**22, 1), v=zero(1, 1, 2**22, 1),
             bias=zero(2**40, 2**22)), "bias"),
    "more than 2^63 scores": (
        dict(q=zero(1, 1, 2**40, 1), k=zero(1, 1, 2**40, 1), v=zero(1, 1, 2**40, 1)), ""),
    "result larger than memory": (dict(q=zero(1, 4, 2**40, 8)), ""),
    "a batch of 2^50": (
        dict(q=zero(2**50, 1, 1, 1), k=zero(2**50, 1, 1, 1), v=zero(2**50, 1, 1, 1)), ""),
}
resource.setrlimit(resource.RLIMIT_AS, (6 << 30, 6 << 30))
for name, (changes, argument) in calls.items():
    try:
        fm.flash_attention(**{**good, **changes})
    except (RuntimeError, MemoryError) as error:
        assert argument in str(error), f"{name}: {error}"
    else:
        raise AssertionError(f"{name}: no error")
# Nothing to do is legal at any size: 2^50 batches of no rows.
empty = fm.flash_attention(zero(2**50, 1, 0, 1), zero(2**50, 1, 0, 1), zero(2**50, 1, 0, 1))
assert empty.shape == (2**50, 1, 0, 1)
# And so is a small result over memory that is small, whatever the strides say.
wide = torch.zeros(1).as_strided((1, 1, 1, 8), (2**61, 2**61, 2**61, 0))
assert fm.flash_attention(wide, wide, wide).shape == (1, 1, 1, 8)
print("fine")
"""


def test_sizes_that_overflow(checkout):
    run = subprocess.run(
        [sys.executable, "-c", HUGE],
        env={**os.environ, "PYTHONPATH": str(checkout / "python"), "OMP_NUM_THREADS": "2"},
        capture_output=True,
        text=True,
        timeout=40,
    )
    assert run.stdout.strip() == "fine", f"{run.returncode}: {run.stderr[-3000:]}"


def test_a_refusal_leaves_everything_as_it_was():
    good = ragged()
    for changes, _ in RAGGED.values():
        with pytest.raises(ERRORS):
            ragged(**changes)
    torch.manual_seed(0)
    first = ragged()
    torch.manual_seed(0)
    assert torch.equal(first, ragged()) and good.isfinite().all()
