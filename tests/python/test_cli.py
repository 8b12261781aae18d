"""The command line as a person meets it: doctor and explain, in health and in trouble."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import flashmoe_science
from flashmoe_science.__main__ import main
from flashmoe_science.bench import attention, moe
from flashmoe_science.cli import doctor

PACKAGE = Path(flashmoe_science.__file__).parent
FAMILIES = set(json.loads(torch.ops.flashmoe.build_info())["families"])
needs_kernels = pytest.mark.skipif(
    not {"sm75", "sm80"} <= FAMILIES, reason="built without some of the CUDA kernels"
)


def run_as_user(*arguments: str, python_path: Path = PACKAGE.parent) -> subprocess.CompletedProcess:
    environment = os.environ | {"PYTHONPATH": str(python_path)}
    command = [sys.executable, "-m", "flashmoe_science", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)


def meta(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(*size, dtype=dtype, device="meta")


def test_doctor_finds_a_healthy_machine():
    done = run_as_user("doctor")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "verdict: healthy" in done.stdout
    info = json.loads(torch.ops.flashmoe.build_info())
    assert info["cpu_target"] in done.stdout
    assert torch.__version__ in done.stdout


def test_doctor_json_has_every_check(capsys):
    assert main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["healthy"] and report["threads"] == torch.get_num_threads()
    on_cpu = {(c["dtype"], c["workload"]) for c in report["checks"] if c["device"] == "cpu"}
    assert on_cpu == {(d, w) for d in doctor.DTYPES for w, _ in doctor.CHECKS}
    assert all(0 < check["error"] <= check["limit"] for check in report["checks"])
    cpu = report["backends"][0]
    assert cpu["device"] == "cpu" and cpu["forward"] == cpu["backward"] == list(doctor.DTYPES)
    assert report["moe_backends"][0] == {**cpu, "device": "cpu"}
    for backend in (*report["backends"], *report["moe_backends"]):
        assert len(backend["forward"]) == 4 or backend["why_not"], "no reason given"


def test_doctor_tells_of_the_environment(monkeypatch, capsys):
    """Who forced a tile last week should not have to guess why calls are refused."""
    for name in doctor.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert main(["doctor", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["environment"] == {}
    monkeypatch.setenv("FLASHMOE_TILE", "1x1")
    assert main(["doctor"]) == 0
    assert "  FLASHMOE_TILE      1x1\n" in capsys.readouterr().out


def test_doctor_finds_one_wrong_number(monkeypatch, capsys):
    right = attention.flash_attention

    def wrong(q, k, v, **options):
        out = right(q, k, v, **options)
        mask = torch.zeros_like(out)
        mask[0, 0, -1, -1] = 0.05
        return out + mask

    monkeypatch.setattr(attention, "flash_attention", wrong)
    assert main(["doctor"]) == 1
    text = capsys.readouterr().out
    assert "WRONG" in text and "verdict: broken" in text


def test_doctor_finds_one_wrong_expert(monkeypatch, capsys):
    def wrong(x, gate_up, down, ids, weights):
        down = torch.cat([down[:3], 1.1 * down[3:4], down[4:]])
        return flashmoe_science.moe(x, gate_up, down, ids, weights)

    monkeypatch.setattr(moe, "moe", wrong)
    assert main(["doctor"]) == 1
    wrong = [line for line in capsys.readouterr().out.splitlines() if "WRONG" in line]
    assert len(wrong) == 8 and all(" moe" in line for line in wrong), "both, in every dtype"


def test_doctor_reports_a_call_that_fails(monkeypatch, capsys):
    def broken(*args, **options):
        raise RuntimeError("the kernel is on strike")

    monkeypatch.setattr(attention, "flash_attention_varlen", broken)
    assert main(["doctor"]) == 1
    assert "FAILED: the kernel is on strike" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["doctor", "bench"])
def test_without_the_library_it_says_how_to_build(tmp_path, command):
    ignore = shutil.ignore_patterns("lib", "__pycache__")
    shutil.copytree(PACKAGE, tmp_path / "flashmoe_science", ignore=ignore)
    done = run_as_user(command, python_path=tmp_path)
    assert done.returncode == 1
    assert "make build" in done.stdout + done.stderr
    assert "pip install" in done.stdout + done.stderr
    assert "healthy" not in done.stdout


def test_explain_says_what_explain_says():
    arguments = "--batch 2 --heads 8 --kv-heads 2 --len 96 --kv-len 128 --dim 64 --value-dim 32"
    options = "--dtype bf16 --window 128,0 --bias 1,8,96,128 --bias-dtype fp32 --softcap 30"
    more = "--key-lengths --scale 0.5 --backward --deterministic --device cpu"
    done = run_as_user("explain", *f"{arguments} {options} {more}".split())
    assert done.returncode == 0, done.stderr
    bf16 = torch.bfloat16
    expected = flashmoe_science.explain(
        meta(2, 8, 96, 64, dtype=bf16),
        meta(2, 2, 128, 64, dtype=bf16),
        meta(2, 2, 128, 32, dtype=bf16),
        bias=meta(1, 8, 96, 128),
        window=(128, 0),
        scale=0.5,
        softcap=30.0,
        key_lengths=meta(2, dtype=torch.int32),
        deterministic=True,
        backward=True,
        device="cpu",
    )
    assert done.stdout.strip() == expected.strip()


def test_explain_ragged(capsys):
    command = "explain --ragged --batch 5 --heads 4 --len 31 --dim 16 --causal --device cpu"
    assert main(command.split()) == 0
    offsets = meta(6, dtype=torch.int32)
    q = meta(5 * 31, 4, 16)
    lengths = {"max_seqlen_q": 31, "max_seqlen_k": 31}
    expected = flashmoe_science.explain(
        q, q, q, causal=True, cu_seqlens_q=offsets, cu_seqlens_k=offsets, **lengths, device="cpu"
    )
    assert capsys.readouterr().out.strip() == expected.strip()


def test_explain_paged(capsys):
    command = "explain --paged --page 8 --batch 5 --heads 6 --kv-heads 2 --kv-len 33 --dim 16"
    bf16, integer = torch.bfloat16, torch.int32
    given = {
        "block_table": meta(5, 5, dtype=integer),
        "seq_lens": meta(5, dtype=integer),
        "max_seqlen_k": 33,
        "device": "cpu",
    }
    decode = command + " --len 1 --causal --window 9,-1 --sinks --softcap 3 --device cpu"
    assert main(decode.split()) == 0
    caches = [meta(25, 8, 2, 16) for _ in "kv"]
    options = {"window": (9, -1), "softcap": 3.0, "sinks": meta(6)}
    expected = flashmoe_science.explain_paged(meta(5, 6, 16), *caches, **given, **options)
    assert capsys.readouterr().out.strip() == expected.strip()

    chunk = command + " --len 7 --value-dim 12 --fp8 --scale 0.5 --dtype bf16 --device cpu"
    assert main(chunk.split()) == 0
    caches = [meta(25, 8, 2, dim, dtype=torch.float8_e4m3fn) for dim in (16, 12)]
    options = {"causal": False, "scale": 0.5, "max_seqlen_q": 7, "k_scale": 1.0, "v_scale": 1.0}
    options["cu_seqlens_q"] = meta(6, dtype=integer)
    expected = flashmoe_science.explain_paged(
        meta(35, 6, 16, dtype=bf16), *caches, **given, **options
    )
    assert capsys.readouterr().out.strip() == expected.strip()


def test_explain_append(capsys):
    command = "explain --append --page 8 --batch 5 --heads 6 --kv-heads 2 --kv-len 33 --dim 16"
    command += " --len 1 --value-dim 12 --fp8 --device cpu"
    assert main(command.split()) == 0
    caches = [meta(25, 8, 2, dim, dtype=torch.float8_e4m3fn) for dim in (16, 12)]
    expected = flashmoe_science.explain_append(
        *(meta(5, 2, dim) for dim in (16, 12)),
        *caches,
        meta(5, dtype=torch.int64),
        k_scale=1.0,
        v_scale=1.0,
        device="cpu",
    )
    assert capsys.readouterr().out.strip() == expected.strip()
    assert "5 tokens" in expected and "pages of 8 in float8_e4m3fn, scaled" in expected


@pytest.mark.parametrize("option", ["--causal", "--window 8,0", "--derivative second"])
def test_options_that_mean_nothing_are_refused(capsys, option):
    assert main(["explain", "--append", *option.split()]) == 1
    assert f"{option.split()[0]} means nothing with --append" in capsys.readouterr().err


def test_explain_of_experts_says_what_explain_moe_says(capsys):
    shape = "--tokens 40 --width 24 --inner 20 --experts 7 --k 3 --dtype bf16 --device cpu"
    bf16 = torch.bfloat16
    given = {
        "x": meta(40, 24, dtype=bf16),
        "gate_up": meta(7, 24, 20, dtype=bf16).mT,
        "down": meta(7, 20, 24, dtype=bf16).mT,
        "ids": meta(40, 3, dtype=torch.int32),
        "up_bias": meta(7, 20, dtype=bf16),
        "down_bias": meta(7, 24, dtype=bf16),
        "weights": meta(40, 3),
        "activation": "gelu",
        "device": "cpu",
    }
    options = "--activation gelu --biases --transposed"
    assert main(["explain", "--moe", *shape.split(), *options.split(), "--backward"]) == 0
    said = flashmoe_science.explain_moe(**given, backward=True)
    assert capsys.readouterr().out.strip() == said.strip()
    del given["up_bias"], given["down_bias"], given["weights"]
    for more, x in (("", given["x"].requires_grad_()), ("--inference", given["x"].detach())):
        options = f"--activation gelu --transposed --no-weights {more}"
        assert main(["explain", "--moe", *shape.split(), *options.split()]) == 0
        said = flashmoe_science.explain_moe(**{**given, "x": x})
        assert capsys.readouterr().out.strip() == said.strip()


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ("--heads 8 --kv-heads 3", "heads"),
        ("--moe --device sm_1", "device"),
        ("--moe --dtype fp64 --device sm_90", "CUDA"),
        ("--len 64 --bias 1,8,64,63", "bias"),
        ("--paged --bias 1,8,64,63", "--bias"),
        ("--paged --backward", "--backward"),
        ("--paged --page 0", "page"),
        ("--paged --heads 8 --kv-heads 3", "heads"),
        ("--paged --dim 513", "513"),
        ("--window 4,-2", "window"),
        ("--dim 512", "512"),
        ("--device sm_1", "device"),
        ("--device sm_90 --dtype fp64", "sm_90"),
        ("--device sm_75 --dtype bf16", "sm_75"),
    ],
)
def test_explain_refuses(capsys, arguments, named):
    assert main(["explain", *arguments.split()]) == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("cannot run: ") and named in shown.err


@needs_kernels
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--len 1 --kv-len 100000 --dtype bf16 --device sm_90", "splits     the keys, in "),
        (
            "--len 1 --kv-len 100000 --dtype bf16 --device sm_90",
            "    sm80_attention_combine_bf16: grid ",
        ),
        (
            "--dtype fp16 --backward --device sm_75",
            "    sm75_attention_bwd_preprocess_fp16: grid ",
        ),
        (
            "--dtype fp16 --backward --device sm_75",
            "    sm75_attention_bwd_dq_fp16_d64",
        ),
        ("--dtype fp16 --backward --device sm_75", "  not bitwise reproducible"),
        ("--dtype fp16 --backward --deterministic --device sm_75", "  bitwise reproducible\n"),
    ],
)
def test_explain_for_other_machines(capsys, arguments, words):
    assert main(["explain", *arguments.split()]) == 0
    assert words in capsys.readouterr().out


@needs_kernels
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--dtype bf16 --device sm_75", "sm75: has no kernels for bfloat16"),
        ("--dtype fp64 --bias 512,512 --device sm_90", "take float32, float16 and bfloat16"),
    ],
)
def test_explain_says_what_a_gpu_cannot(capsys, arguments, words):
    assert main(["explain", *arguments.split()]) == 1
    assert words in capsys.readouterr().err


@needs_kernels
def test_doctor_knows_what_each_chip_can_run(capsys):
    assert main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    runs = {backend["device"]: backend for backend in report["backends"]}
    for chip, dtypes in {"sm_75": ["fp32", "fp16"], "sm_80": ["fp32", "fp16", "bf16"]}.items():
        assert runs[chip]["forward"] == runs[chip]["backward"] == dtypes
    assert "bfloat16" in runs["sm_75"]["why_not"]["bf16"]


@pytest.mark.parametrize("command", [[], ["doctor"], ["explain"], ["bench"]])
def test_help_has_examples(capsys, command):
    with pytest.raises(SystemExit) as stop:
        main([*command, "--help"])
    assert stop.value.code == 0
    assert "examples:" in capsys.readouterr().out


@pytest.mark.parametrize(
    "line", ["", "nothing", "explain --len -1", "explain --window 3", "explain --moe --k two"]
)
def test_bad_usage(capsys, line):
    with pytest.raises(SystemExit) as stop:
        main(line.split())
    assert stop.value.code == 2
    assert "usage:" in capsys.readouterr().err


def test_a_reader_who_has_enough_is_no_error():
    """As head -1 leaves: no traceback."""
    command = [sys.executable, "-m", "flashmoe_science", "bench", "--list"]
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE.parent)}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
    ) as process:
        process.stdout.close()
        said = process.stderr.read().decode()
    assert process.returncode == 141 and said == ""
