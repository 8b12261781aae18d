"""The benchmark's mixtures of experts: shapes, cases, peers, a run as a user makes it."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

from clocks import CPU
from flashmoe_science.__main__ import main
from flashmoe_science.bench import accuracy, memory, moe, plot, report, runner, timing
from flashmoe_science.bench.moe import MOE_WORKLOADS, MoeShape
from flashmoe_science.bench.peer_file import NotSupported, PeerFile
from flashmoe_science.bench.results import compare
from flashmoe_science.bench.workloads import WORKLOADS

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))

import goals

# Widths that grouped_mm takes: its rows begin at multiples of 16 bytes.
SHAPES = {"moe": "13,16,24,5,2", "moe_elements": "40,16,24,89,1", "moe_decode": "3,16,24,5,2"}


def make(name: str, dtype=torch.float32, shape: str | None = None):
    return WORKLOADS[name].make(MoeShape.parse(shape or SHAPES[name]), dtype, CPU)


def test_they_are_among_the_workloads():
    assert set(MOE_WORKLOADS) == set(SHAPES) <= set(WORKLOADS)
    for workload in MOE_WORKLOADS.values():
        for shapes in workload.shapes.values():
            assert all(str(MoeShape.parse(shape)) == shape for shape in shapes)


@pytest.mark.parametrize(
    "text, complaint",
    [
        ("4,8,256,64", "expected tokens"),
        ("4,8,256,64,2,1", "expected tokens"),
        ("4,8,256,64,two", "expected tokens"),
        ("4,8,0,64,2", "at least 1"),
        ("4,8,16,2,3", "3 of 2 experts"),
    ],
)
def test_bad_shapes_are_named(capsys, text, complaint):
    assert main(["bench", "--workload", "moe", "--shape", text]) == 2
    assert complaint in capsys.readouterr().err


def test_an_atom_is_of_one_element(capsys):
    with pytest.raises(ValueError, match="one element"):
        make("moe_elements", shape="8,16,16,89,2")


def test_elements_are_those_of_the_materials_project():
    counts = moe.atoms_by_element()
    assert len(counts) == 89 and counts["O"] == 18231355
    ids = moe.element_ids(65536, 89)
    shares = [count / 65536 for _, count in Counter(ids).most_common()]
    assert shares[0] == pytest.approx(0.37, abs=0.01), "oxygen"
    assert len(shares) < 89, "the rarest do not come up"
    assert ids == moe.element_ids(65536, 89), "always the same"
    assert max(moe.element_ids(100, 4)) == 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SHAPES)
def test_peers_compute_the_same_thing(name, dtype):
    """A peer that computes something else would make the comparison meaningless."""
    case = make(name, dtype)
    assert list(case.peers) == ["loop", "grouped_mm", "transformers", "transformers_batched"]
    oracle = accuracy.Oracle(case, backward=True)
    assert set(oracle.exact) == {"out", *(f"grad_{leaf}" for leaf in case.leaves)}
    for peer, implementation in {"ours": case.ours, **case.peers}.items():
        verdict = oracle.verdict(implementation, reproducible=peer == "ours")
        # transformers rounds the weights of tokens to the dtype of x.
        rounded = dtype == torch.bfloat16 and peer.startswith("transformers")
        assert verdict.ok or rounded, (peer, verdict.worst)


def test_without_transformers_its_peers_cannot_run(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers.integrations.moe", None)
    clock, case = timing.CpuClock(), make("moe")
    schedule = timing.Schedule(1, 0.001)
    found = timing.measure(case, ["loop", "transformers"], "fwd", clock, schedule)["sustained"]
    assert found["loop"].ms and found["transformers"].ms is None
    assert "transformers" in found["transformers"].reason


@pytest.mark.parametrize("name", SHAPES)
def test_a_wrong_expert_would_be_found(name, monkeypatch):
    case = make(name)
    right = moe.moe
    monkeypatch.setattr(moe, "moe", lambda *args: right(*args, activation="geglu"))
    assert not accuracy.check(case, backward=True).ok


def test_work_is_counted():
    case = make("moe", torch.bfloat16)
    T, d, n, E, k = 13, 16, 24, 5, 2
    assert case.flops == 6 * T * k * d * n and case.scores == T * k
    flops = [WORKLOADS["moe"].flops_of_pass(p) for p in runner.PASSES]
    assert flops == [1, 2, 3]
    decode = make("moe_decode", torch.bfloat16)
    touched = len(set(decode.keywords["ids"].flatten().tolist()))
    assert decode.bytes == touched * 3 * d * n * 2 and case.bytes == 0
    inputs = sum(leaf.nbytes for leaf in case.leaves.values())
    assert memory.needed_bytes(case, backward=False) == inputs + case.grad.nbytes
    kept = T * k * 2 * n * 2 + 4 * (E + 1 + T * k)
    assert memory.needed_bytes(case, backward=True) == 2 * (inputs + case.grad.nbytes) + kept


def test_what_the_backward_pass_keeps_is_what_is_counted():
    from torch.autograd.graph import saved_tensors_hooks

    case, saved = make("moe"), {}
    leaves = {name: leaf.detach().requires_grad_() for name, leaf in case.leaves.items()}
    theirs = {leaf.data_ptr() for leaf in (*leaves.values(), case.keywords["ids"])}
    with saved_tensors_hooks(lambda x: saved.update({x.data_ptr(): x.nbytes}) or x, lambda x: x):
        case.ours.run(leaves)
    assert sum(size for where, size in saved.items() if where not in theirs) == case.kept


@pytest.mark.parametrize("name", SHAPES)
def test_every_row_knows_its_kernels(name):
    kernels = runner.kernels_of(make(name), "fwd+bwd")
    assert kernels["fwd"].endswith("moe_fwd") and kernels["bwd"].endswith("moe_bwd")
    assert runner.family_of(kernels) == "cpu"


PEER = """
import torch
import torch.nn.functional as F

NAME = "theirs"

def moe(x, gate_up, down, ids, weights):
    gate, up = torch.einsum("ehd,td->teh", gate_up, x).chunk(2, -1)
    each = torch.einsum("edn,ten->ted", down, F.silu(gate) * up)
    weights = torch.ones(ids.shape) if weights is None else weights
    chosen = F.one_hot(ids, gate_up.shape[0]).to(x.dtype) * weights[..., None].to(x.dtype)
    return torch.einsum("tke,ted->td", chosen, each)
"""


def test_a_peer_from_a_file(tmp_path):
    path = tmp_path / "peer.py"
    path.write_text(PEER)
    peer = PeerFile.load(path)
    for name, shape in SHAPES.items():
        case, spec = make(name), runner.RowSpec(name, MoeShape.parse(shape), "fp32", "fwd+bwd")
        assert accuracy.Oracle(case, True).verdict(peer.implementation(spec, case)).ok
    path.write_text("def attention(q, k, v, causal): return q\n")
    with pytest.raises(NotSupported, match=r"has no moe\(\)"):
        PeerFile.load(path).implementation(spec, case)


def test_a_run_as_a_user_makes_it(tmp_path, capsys, threads):
    peer = tmp_path / "peer.py"
    peer.write_text(PEER)
    options = f"--workload {','.join(SHAPES)} --shape 40,16,24,89,1 --dtype fp32,bf16 --device cpu"
    options += f" --budget 0.001 --threads 1 --peer {peer} --out {tmp_path}"
    assert main(["bench", *options.split()]) == 0
    text = capsys.readouterr().out
    assert "mixture of experts on" in text and "T,d,n,E,k" in text and "theirs" in text
    found = json.loads((tmp_path / "results.json").read_text())
    rows = {(r["workload"], r["dtype"], r["pass"]) for r in found["rows"]}
    assert len(rows) == len(found["rows"]) == 2 * (2 + 2 + 1)
    for row in found["rows"]:
        assert row["check"]["status"] == "ok" and row["family"] == "cpu"
        asked = WORKLOADS[row["workload"]].peers("cpu")
        assert list(row["implementations"]) == ["ours", *asked, "theirs"]
        assert ("gb_per_s" in row["implementations"]["ours"]) == (row["workload"] == "moe_decode")
    assert (tmp_path / "results.png").stat().st_size > 10_000


def test_headings_say_what_rows_are_about():
    dense, experts = ({"workload": name} for name in ("dense", "moe"))
    assert report.operators_of([dense, dense]) == "attention"
    assert report.operators_of([experts]) == "mixture of experts"
    assert report.sizes_of([dense, experts]) == "B,H,S,D or T,d,n,E,k"
    assert report.label_of("grouped_mm") == "PyTorch grouped_mm"
    many = [{"shape": {}, "label": str(i), "workload": "moe", "dtype": "", "pass": ""} for i in range(9)]  # fmt: skip  # noqa: E501
    assert len(plot.panels_of(many)) == 1


def table(device: str, ratio: float, **changes) -> list[dict]:
    """Every default row, in which the named peers take our time times a ratio."""
    dtypes = ("fp32", "bf16") if device == "cpu" else ("bf16",)
    rows = []
    for spec in runner.rows_of(("moe", "moe_elements"), None, dtypes, None, device):
        peers = {"loop": ratio * 3, "grouped_mm": ratio, "transformers": 0.1} | changes
        found = {"ours": {"ms": 1.0}, **{name: {"ms": ms} for name, ms in peers.items()}}
        row = {"workload": spec.workload, "label": str(spec.shape), "dtype": spec.dtype}
        row |= {"pass": spec.direction, "shape": dataclasses.asdict(spec.shape), "flops": 1.0}
        row |= {"regime": "sustained", "check": {"status": "ok"}, "implementations": found}
        row |= {"family": "sm80" if device == "cuda" else "cpu"}
        rows.append(row | compare(found))
    return rows


def test_goals_are_about_their_rows():
    for device, counts in (("cpu", [4, 4, 2, 2]), ("cuda", [4, 2, 2])):
        found = goals.standings(table(device, 2.1), device)
        assert [len(s.ratios) for s in found] == counts
        assert {s.verdict for s in found} == {"met"}, "whatever transformers takes"
    assert found[0].goal.against == "grouped_mm"


@pytest.mark.parametrize(
    "device, ratio, changes, missed",
    [
        ("cpu", 1.49, {}, 2 + 8),  # of the small ones and of the elements both means, and all rows
        ("cpu", 1.19, {}, 2 + 8 + 1 + 2),
        ("cpu", 0.99, {}, 2 + 8 + 2 + 4),
        ("cpu", 9.0, {"loop": 0.9}, 2 + 8 + 2 + 4),  # the better of the two counts
        ("cuda", 1.9, {}, 2 + 4),
        ("cuda", 1.1, {}, 3 + 8),
        ("cuda", 2.1, {"loop": 0.5}, 0),
    ],
)
def test_every_miss_is_noticed(device, ratio, changes, missed):
    assert len(goals.missed_goals(table(device, ratio, **changes), device)) == missed
