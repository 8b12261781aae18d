"""tools/sanitize.py tells the tools' own errors from ours; the compute-sanitizer is made up."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import sanitize  # noqa: E402

BWD = "sm90_attention_bwd_fp16_d64_128x128"
RACE = f"""\
========= COMPUTE-SANITIZER
========= Error: Race reported between Write access at {BWD}+0x1c0
=========     and Read access at {BWD}+0x280 [4 hazards]
=========     and Write access at {BWD}+0x1c0 [8 hazards]
=========
========= Warning: Race reported between Read access at {BWD}+0x300 in attention_bwd.cuh:12
=========     and Write access at {BWD}+0x280 in attention_bwd.cuh:14 [4 hazards]
=========
sm90 fp16 d64 200 x 300: fine
========= RACECHECK SUMMARY: 2 hazards displayed (1 error, 1 warning)
"""
CLEAN = """\
========= COMPUTE-SANITIZER
sm80 fp16 d64 200 x 300: fine
========= ERROR SUMMARY: 0 errors
"""
MEMORY = """\
========= COMPUTE-SANITIZER
========= Invalid __global__ read of size 16 bytes
=========     at sm80_attention_fwd_fp16_d64_128x128+0x7f0
=========     by thread (31,0,0) in block (1,0,0)
=========     Address 0x7f3c7ec000fc is out of bounds
=========     Saved host backtrace up to driver entry point at kernel launch time
=========         Host Frame: launch [0x527bb] in libflashmoe.so
=========
sm80 fp16 d64 200 x 300: fine
========= ERROR SUMMARY: 1 error
"""
INIT = """\
========= COMPUTE-SANITIZER
========= Uninitialized __global__ memory read of size 16 bytes
=========     at sm90_attention_bwd_preprocess_fp16+0x120
=========     by thread (0,0,0) in block (0,0,0)
=========
========= Host API uninitialized memory access on access by cuMemcpyDtoHAsync source.
=========     Uninitialized access at 0x7f3c7ec000fc
=========
sm90 fp16 d64 200 x 300: fine
========= ERROR SUMMARY: 2 errors
"""


def test_reports_are_read():
    first, second = sanitize.reports_in(RACE)
    assert first.name == second.name == BWD
    assert first.places == ("0x1c0", "0x280", "0x1c0") and second.places == ("0x300", "0x280")
    assert sanitize.reports_in(CLEAN) == []
    (memory,) = sanitize.reports_in(MEMORY)
    assert memory.name == "sm80_attention_fwd_fp16_d64_128x128" and memory.places == ("0x7f0",)
    assert memory.title == "Invalid __global__ read of size 16 bytes"
    kernel, copy = sanitize.reports_in(INIT)
    assert kernel.name == "sm90_attention_bwd_preprocess_fp16"
    assert copy.name == "sm90 cuMemcpyDtoHAsync"


def test_names_of_templates_are_those_of_plans():
    """As compute-sanitizer of CUDA 13.0 writes them."""
    written = "void sm90_attention_bwd_fp16<(int)64, (int)128, (int)128>(a::Sm90BwdParams)"
    first, second = sanitize.reports_in(RACE.replace(BWD, written))
    assert first.name == second.name == BWD
    assert first.places == ("0x1c0", "0x280", "0x1c0")
    plain = "void sm90_attention_bwd_preprocess_fp16(a::Sm90BwdParams)"
    kernel, _ = sanitize.reports_in(INIT.replace("sm90_attention_bwd_preprocess_fp16", plain))
    assert kernel.name == "sm90_attention_bwd_preprocess_fp16" and kernel.places == ("0x120",)


def test_places_of_older_versions_are_read():
    old = "========= Error: Race reported between Write access at 0x68 in sm90_attention_bwd_x\n"
    old += "========= and Read access at 0x78 in sm90_attention_bwd_x [20 hazards]\n"
    (report,) = sanitize.reports_in(old)
    assert report.name == "sm90_attention_bwd_x" and report.places == ("0x68", "0x78")


def test_what_is_known_is_counted():
    reports = sanitize.reports_in(RACE)
    new, known = sanitize.judge("racecheck", reports, {BWD: 2})
    assert new == [] and len(known) == 1 and "2 reports" in known[0]
    for fewer in ({BWD: 1}, {}):
        (words,) = sanitize.judge("racecheck", reports, fewer)[0]
        assert BWD in words and f"{fewer.get(BWD, 0)} are known" in words
    # The same of another tool, or of another kernel, is nobody's error but ours.
    assert sanitize.judge("synccheck", reports, {BWD: 2})[0]
    others = ("sm80_attention_bwd_x", "sm90_attention_fwd_x", "sm90_attention_bwd_dq_x")
    for kernel in (*others, "sm90_attention_bwd_whole_x"):
        other = sanitize.reports_in(RACE.replace(BWD, kernel))
        assert sanitize.judge("racecheck", other, {kernel: 9})[0]


@pytest.fixture
def say(tmp_path, monkeypatch, capsys):
    """Runs the script with a compute-sanitizer that says this; returns its status and words."""
    counts = tmp_path / "known.json"
    counts.write_text("{}")
    monkeypatch.setattr(sanitize, "COUNTS", counts)

    def run(text: str, *arguments: str, status: int = 0, then: str = "") -> tuple[int, str]:
        tool = tmp_path / "compute-sanitizer"
        (tmp_path / "said").write_text(text)
        tool.write_text(f"#!/bin/sh\ncat {tmp_path / 'said'}\n{then}\nexit {status}\n")
        tool.chmod(0o755)
        monkeypatch.setattr(sanitize, "find_sanitizer", lambda: str(tool))
        monkeypatch.setattr(sys, "argv", ["sanitize.py", *arguments])
        return sanitize.main(), capsys.readouterr().out

    run.counts = counts
    return run


def test_a_line_for_each_tool(say):
    status, words = say(CLEAN, "memcheck", "synccheck", "--jobs", "2")
    assert status == 0
    assert [line.split(":")[0] for line in words.splitlines()] == ["memcheck", "synccheck"]
    assert "2 calls, 0 new" in words


def test_what_hangs_is_ended_and_what_it_said_is_judged(say):
    # Its child has the pipe as well.
    status, words = say(RACE, "racecheck", "--jobs", "2", "--limit", "1", then="sleep 60 & wait")
    assert status == 1
    assert "2 of 2 processes failed" in words and "exit status -9" in words and "new: " in words


def test_new_reports_fail(say):
    for text, tool in ((MEMORY, "memcheck"), (MEMORY, "initcheck"), (RACE, "racecheck")):
        status, words = say(text, tool, "--jobs", "1")
        assert status == 1 and "new: " in words
    assert say(INIT, "initcheck", "--jobs", "1")[0] == 1
    say.counts.write_text(json.dumps({"initcheck": {"sm90_attention_bwd_preprocess_fp16": 1}}))
    assert say(INIT, "initcheck", "--jobs", "1")[0] == 0
    # No other family stores its results by TMA: what it copies to the host was never written.
    assert say(INIT.replace("sm90 fp16", "sm80 fp16"), "initcheck", "--jobs", "1")[0] == 1


def test_numbers_are_recorded(say):
    assert say(RACE, "racecheck", "--jobs", "1", "--record")[0] == 0
    assert json.loads(say.counts.read_text()) == {"racecheck": {BWD: 2}}
    assert say(RACE, "racecheck", "--jobs", "1")[0] == 0
    more = RACE.replace("+0x300", "+0x310") + RACE
    assert say(more, "racecheck", "--jobs", "1")[0] == 1


def test_failures_of_the_calls_fail(say):
    assert say(CLEAN, "memcheck", status=1)[0] == 1
    assert say(CLEAN.replace(": fine", ": FAR OFF: dq"), "memcheck")[0] == 1
    assert say("", "memcheck")[0] == 1  # nothing was called
