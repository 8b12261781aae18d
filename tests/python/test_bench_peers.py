"""Peers from files: `bench --peer FILE.py` checks anybody's implementation, then times it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from bench_rows import ATTENTION
from clocks import CPU
from flashmoe_science.__main__ import main
from flashmoe_science.bench import accuracy, peer_file, runner
from flashmoe_science.bench.case import Shape
from flashmoe_science.bench.peer_file import NotSupported, PeerFile
from flashmoe_science.bench.workloads import WORKLOADS

RIGHT = """
import torch.nn.functional as F

def attention(q, k, v, causal):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    gqa = q.shape[1] != k.shape[1]
    out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=gqa)
    return out.transpose(1, 2)
"""
WRONG = (
    RIGHT
    + """
right = attention

def attention(q, k, v, causal):
    return right(q, k, v, causal) * 0.9
"""
)
RAISING = """
def attention(q, k, v, causal):
    raise NotImplementedError("only on the moon")
"""
WITHOUT_BACKWARD = (
    RIGHT
    + """
forward = attention

def attention(q, k, v, causal):
    return forward(q, k, v, causal).detach()
"""
)
WRONG_GRADIENT = (
    RIGHT
    + """
forward = attention

def attention(q, k, v, causal):
    return forward(q, k, v.detach(), causal) + 0 * v.mean()
"""
)
# As libraries with kernels of their own are: an autograd.Function that wants tensors without gaps.
LIBRARY = """
import torch
import torch.nn.functional as F

def forward(q, k, v, causal):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    gqa = q.shape[1] != k.shape[1]
    out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=gqa)
    return out.transpose(1, 2).contiguous()

class Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, causal, deterministic):
        assert all(x.is_contiguous() for x in (q, k, v))
        ctx.save_for_backward(q, k, v)
        ctx.causal = causal
        return forward(q, k, v, causal)

    @staticmethod
    def backward(ctx, dout):
        assert dout.is_contiguous()
        leaves = [x.detach().requires_grad_() for x in ctx.saved_tensors]
        with torch.enable_grad():
            out = forward(*leaves, ctx.causal)
        return *torch.autograd.grad(out, leaves, dout), None, None

def attention(q, k, v, causal=False, deterministic=False):
    return Attention.apply(q, k, v, causal, deterministic)
"""
EVERYTHING = """
import torch
import torch.nn.functional as F

NAME = "everything"
LAYOUT = "BHSD"

def seen(queries, keys, causal, window):
    behind = torch.arange(queries)[:, None] - torch.arange(keys)
    mask = (behind >= 0) if causal else torch.ones(queries, keys, dtype=bool)
    return mask & (behind <= window[0]) if window else mask

def attention(q, k, v, causal, bias=None, window=None, deterministic=False, mask=None,
              dropout_p=0.0, seed=None):
    gqa = q.shape[1] != k.shape[1]
    if dropout_p:
        from flashmoe_science.bench import dropout
        return dropout.attention({"q": q, "k": k, "v": v}, causal, dropout_p, int(seed))
    if mask is None:
        mask = bias if bias is not None else seen(q.shape[2], k.shape[2], causal, window)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=gqa)

def attention_varlen(q, k, v, cu_seqlens, max_seqlen, causal, bias=None):
    outs, start, ends = [], 0, cu_seqlens.tolist()
    lengths = [b - a for a, b in zip(ends, ends[1:])]
    assert max(lengths) == max_seqlen
    biases = [None] * len(lengths) if bias is None else bias.split([n * n for n in lengths])
    for n, own in zip(lengths, biases):
        x = [t[start:start + n].transpose(0, 1) for t in (q, k, v)]
        mask = None if own is None else own.T.unflatten(1, (n, n))
        gqa = q.shape[1] != k.shape[1]
        out = F.scaled_dot_product_attention(
            *(t[None] for t in x), attn_mask=mask, is_causal=causal, enable_gqa=gqa)
        outs.append(out[0].transpose(0, 1))
        start += n
    return torch.cat(outs)
"""


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / f"{name}.py"
    path.write_text(text)
    return path


@pytest.fixture
def bench(tmp_path):
    """Runs `bench` with peers from files; returns (exit code, rows by pass)."""

    def run(files: dict[str, str], options: str = "--shape 2,4,17,8,kv2,causal") -> tuple:
        command = ["bench", "--device", "cpu", "--dtype", "fp32", "--budget", "0.001", "--no-plot"]
        for name, text in files.items():
            command += ["--peer", str(write(tmp_path, name, text))]
        command += ["--out", str(tmp_path), *options.split()]
        code = main(command)
        results = json.loads((tmp_path / "results.json").read_text())
        assert results["peer_files"] == {name: f"{name}.py" for name in files}
        return code, {row["pass"]: row for row in results["rows"]}

    return run


def test_a_right_peer_is_checked_and_timed(bench, capsys):
    code, rows = bench({"right": RIGHT}, "--shape 2,4,17,8,kv2,causal --peers math --pass fwd,bwd")
    assert code == 0
    for row in rows.values():
        assert list(row["implementations"]) == ["ours", "math", "right"]
        peer = row["implementations"]["right"]
        assert peer["ms"] > 0 and len(peer["turn_medians_ms"]) == 3 and row["ratios"]["right"] > 0
        assert peer["check"]["status"] == "ok"
    errors = [set(row["implementations"]["right"]["check"]["errors"]) for row in rows.values()]
    assert errors[0] == {"out max", "out rms"} and "grad_k rms" in errors[1]
    assert "right" in capsys.readouterr().out


@pytest.mark.parametrize("workload", ["dense", "gqa", "deterministic"])
def test_a_library_is_called_without_copies_in_both_passes(bench, workload):
    options = f"--workload {workload} --shape 2,4,17,8,kv2,causal --pass bwd,fwd+bwd,fwd"
    _, rows = bench({"library": LIBRARY}, options)
    assert list(rows) == [p for p in ("bwd", "fwd+bwd", "fwd") if p in WORKLOADS[workload].passes]
    for row in rows.values():
        assert row["implementations"]["library"]["check"]["status"] == "ok"
        assert row["ratios"]["library"] > 0


def test_a_wrong_peer_is_said_and_not_timed(bench, capsys):
    code, rows = bench({"wrong": WRONG, "right": RIGHT}, "--shape 1,2,16,8 --pass fwd")
    assert code == 0, "ours is right"
    peer = rows["fwd"]["implementations"]["wrong"]
    assert peer["ms"] is None and peer["check"]["status"] == "failed"
    assert "out" in peer["reason"] and "is off by" in peer["reason"]
    assert "wrong" not in rows["fwd"]["ratios"] and "right" in rows["fwd"]["ratios"]
    text = capsys.readouterr().out
    assert "wrong is wrong and not timed: out" in text


def test_a_wrong_gradient_is_found_where_it_is_timed(bench):
    _, rows = bench({"careless": WRONG_GRADIENT}, "--shape 1,2,16,8 --pass fwd,bwd,fwd+bwd")
    found = {p: row["implementations"]["careless"] for p, row in rows.items()}
    assert found["fwd"]["ms"] > 0, "the forward pass alone is right"
    for direction in ("bwd", "fwd+bwd"):
        assert found[direction]["ms"] is None and "grad_v" in found[direction]["reason"]


def test_a_peer_that_raises_says_why(bench, capsys):
    code, rows = bench({"raising": RAISING}, "--shape 1,2,16,8 --pass fwd")
    assert code == 0
    peer = rows["fwd"]["implementations"]["raising"]
    assert peer["ms"] is None and peer["reason"] == "NotImplementedError: only on the moon"
    assert "raising cannot run: NotImplementedError: only on the moon" in capsys.readouterr().out


def test_a_peer_without_a_backward_pass_runs_forward(bench):
    _, rows = bench({"half": WITHOUT_BACKWARD}, "--shape 1,2,16,8 --pass fwd,bwd")
    assert rows["fwd"]["implementations"]["half"]["ms"] > 0
    assert rows["bwd"]["implementations"]["half"]["reason"] == "RuntimeError: gives no gradient"


@pytest.mark.parametrize("name", ATTENTION)
def test_a_peer_is_told_what_a_workload_needs(tmp_path, name):
    options = WORKLOADS[name].options
    words = ["kv2"] if "kv" in options else []
    words += ["causal"] if "causal" in options else []
    words += ["w5"] if "window" in options else []
    shape = Shape.parse(",".join(["3,4,13,8", *words]))
    case = WORKLOADS[name].make(shape, torch.float32, CPU)
    spec = runner.RowSpec(name, shape, "fp32", "fwd+bwd")
    peer = PeerFile.load(write(tmp_path, "peer", EVERYTHING))
    assert peer.name == "everything"
    verdict = accuracy.Oracle(case, True).verdict(peer.implementation(spec, case))
    assert verdict.ok, verdict.worst
    assert ("grad_bias rms" in verdict.deviations) == ("bias" in case.leaves)


@pytest.mark.parametrize(
    ("workload", "shape", "reason"),
    [
        ("pair_bias", "1,2,8,8", "attention() has no parameter bias"),
        ("window", "1,2,8,8,causal,w3", "attention() has no parameter window"),
        ("deterministic", "1,2,8,8", "attention() has no parameter deterministic"),
        ("ragged", "2,2,8,8", "peer.py has no attention_varlen()"),
        ("mask", "1,2,8,8", "attention() has no parameter mask"),
        ("dropout", "1,2,8,8", "attention() has no parameter dropout_p, seed"),
        ("paged_decode", "2,2,8,8", "peer.py has no attention_paged()"),
    ],
)
def test_a_peer_that_lacks_something_is_none(tmp_path, workload, shape, reason):
    peer = PeerFile.load(write(tmp_path, "peer", RIGHT))
    shape = Shape.parse(shape)
    case = WORKLOADS[workload].make(shape, torch.float32, CPU)
    with pytest.raises(NotSupported) as error:
        peer.implementation(runner.RowSpec(workload, shape, "fp32", "fwd"), case)
    assert reason in str(error.value)


def test_a_peer_says_what_it_supports(tmp_path):
    text = (
        RIGHT
        + """
def supports(case):
    assert (case.workload, case.dtype, case.direction) == ("dense", "fp32", "bwd")
    return "only head dim 64" if case.shape.dim != 64 else case.shape.length < 10
"""
    )
    peer = PeerFile.load(write(tmp_path, "peer", text))
    for shape, reason in (
        ("1,2,8,8", "only head dim 64"),
        ("1,2,12,64", "supports"),
        ("1,2,8,64", None),
    ):
        shape = Shape.parse(shape)
        case = WORKLOADS["dense"].make(shape, torch.float32, CPU)
        spec = runner.RowSpec("dense", shape, "fp32", "bwd")
        if reason is None:
            assert peer.implementation(spec, case).in_full
            continue
        with pytest.raises(NotSupported, match=reason):
            peer.implementation(spec, case)


def test_tokens_come_first_and_nothing_is_copied(tmp_path, monkeypatch):
    peer = PeerFile.load(write(tmp_path, "peer", RIGHT))
    seen = []

    def watched(q, k, v, causal):
        seen.extend([q, k, v])
        return q

    monkeypatch.setattr(peer.module, "attention", watched)
    shape = Shape.parse("2,4,5,8,kv2")
    case = WORKLOADS["dense"].make(shape, torch.float32, CPU)
    made = peer.implementation(runner.RowSpec("dense", shape, "fp32", "fwd"), case)
    leaves, _ = made.prepare(case.leaves, case.grad)
    out = made.run(leaves)
    assert [tuple(x.shape) for x in seen] == [(2, 5, 4, 8), (2, 5, 2, 8), (2, 5, 2, 8)]
    assert all(x.is_contiguous() for x in seen) and out.shape == case.grad.shape
    assert seen[0].data_ptr() == leaves["q"].data_ptr() == out.data_ptr()


def test_a_file_may_import_what_lies_beside_it(bench, tmp_path):
    write(tmp_path, "their_library", RIGHT)
    _, rows = bench(
        {"adapter": "from their_library import attention"}, "--shape 1,2,8,8 --pass fwd"
    )
    assert rows["fwd"]["implementations"]["adapter"]["check"]["status"] == "ok"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("x = 1", "none of attention(), attention_varlen(), attention_paged(), cache_append(), "),
        ("raise ImportError('built for another chip')", "ImportError: built for another chip"),
        ("LAYOUT = 'SBHD'\ndef attention(q, k, v, causal): ...", "LAYOUT 'SBHD'"),
        ("NAME = 'flash'\ndef attention(q, k, v, causal): ...", "there is a flash already"),
        ("NAME = 'ours'\ndef attention(q, k, v, causal): ...", "there is a ours already"),
    ],
)
def test_a_file_that_is_no_peer_is_refused(tmp_path, capsys, text, complaint):
    path = write(tmp_path, "stranger", text)
    assert main(["bench", "--device", "cpu", "--peer", str(path)]) == 2
    assert complaint in capsys.readouterr().err


def test_two_files_need_two_names(tmp_path):
    paths = [write(tmp_path, "a", RIGHT), write(tmp_path, "b", "NAME = 'a'" + RIGHT)]
    with pytest.raises(ValueError, match="there is a a already"):
        peer_file.load_all(paths, [])


def test_without_an_oracle_a_peer_is_not_timed(tmp_path):
    peer = PeerFile.load(write(tmp_path, "peer", RIGHT))
    shape = Shape.parse("1,2,8,8")
    case = WORKLOADS["dense"].make(shape, torch.float32, CPU)
    spec = runner.RowSpec("dense", shape, "fp32", "fwd")
    _, checks = runner.add_peer_files(case, spec, [peer], None)
    assert checks["peer"]["status"] == "unchecked"
