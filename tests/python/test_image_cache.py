"""The cache of compiled images (cmake/compile_image.py), with a compiler that counts its runs."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from collections import Counter
from pathlib import Path

import pytest

TABLE = ['-DTABLE="room/table.h"']
ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "cmake" / "compile_image.py"
sys.path.insert(0, str(ROOT / "tools"))

import kernel_report  # noqa: E402

COMPILER = """#!/bin/sh
# "Compiles" by joining its flags and the source; a source with the word broken fails.
[ "$1" = --version ] && { echo "fake compiler ${FAKE_VERSION:-1}"; exit 0; }
echo run >> "$FAKE_RUNS"
flags=$* output= source=
while [ $# -gt 0 ]; do
  case $1 in -o) output=$2; shift ;; *) source=$1 ;; esac
  shift
done
grep -q broken "$source" && { echo "error: $source is broken"; exit 3; }
sleep "${FAKE_SECONDS:-0}"
echo "$flags" | sed 's/ -I.*//' > "$output"
cat "$source" >> "$output"
head -c "${FAKE_BYTES:-0}" /dev/urandom >> "$output"
echo "says something"
"""


class Clone:
    """A source tree with one kernel file, and what it takes to compile it."""

    def __init__(self, home: Path, cache: Path):
        self.home, self.cache, self.runs = home, cache, home / "runs"
        for name, text in {
            "room/kernel.cu": '#include "room/a.h"\n#include <cstdint>\n#include TABLE\nkernel\n',
            "room/table.h": "rows\n",
            "room/a.h": '#pragma once\n  #  include "b.h"\n',  # beside it, not from the root
            "room/b.h": '#pragma once\n#include "room/a.h"\nfirst\n',  # a circle, and that is fine
            "room/other.h": "nobody includes this\n",
        }.items():
            path = home / "src" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        self.compiler = home / "compiler"
        self.compiler.write_text(COMPILER)
        self.compiler.chmod(0o755)
        self.runs.touch()

    def start(self, *flags: str, output: str = "x.fatbin", **variables: str) -> subprocess.Popen:
        places = {"root": "src", "source": "src/room/kernel.cu", "output": output}
        options = [f"--{name}={self.home / place}" for name, place in places.items()]
        return subprocess.Popen(
            [sys.executable, SCRIPT, "compile", *options, "--", self.compiler, *TABLE, *flags],
            env=os.environ
            | {"FLASHMOE_CACHE": str(self.cache), "FAKE_RUNS": str(self.runs)}
            | variables,
            stderr=subprocess.PIPE,
            text=True,
        )

    def compile(self, *flags: str, output: str = "x.fatbin", **variables: str) -> bytes:
        """What was made; the compiler's runs are counted in `compiled`."""
        (self.home / output).unlink(missing_ok=True)
        process = self.start(*flags, output=output, **variables)
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors
        return (self.home / output).read_bytes()

    @property
    def compiled(self) -> int:
        return len(self.runs.read_text().split())

    @property
    def entries(self) -> list[Path]:
        return sorted((self.cache / "images").iterdir())


@pytest.fixture
def clone(tmp_path) -> Clone:
    return Clone(tmp_path / "clone", tmp_path / "cache")


def test_what_was_compiled_before_is_taken(clone):
    first = clone.compile("-O3")
    assert clone.compile("-O3") == first and clone.compiled == 1
    assert clone.compile("-O3", output="y.fatbin") == first and clone.compiled == 1
    for end in ("log", "seconds", "fatbin.d"):
        assert (clone.home / f"y.{end}").exists()
    assert (clone.home / "y.log").read_text() == "says something\n"
    assert 0 <= float((clone.home / "y.seconds").read_text()) < 10


def test_another_clone_hits_as_well(clone, tmp_path):
    other = Clone(tmp_path / "else" / "where", clone.cache)
    assert clone.compile() == other.compile()
    assert (clone.compiled, other.compiled) == (1, 0)


def test_whatever_goes_into_it_is_a_miss(clone):
    clone.compile("-O3")
    clone.compile("-O2")
    assert clone.compiled == 2
    clone.compile("-O3", FAKE_VERSION="2")
    assert clone.compiled == 3
    for number, name in enumerate(("kernel.cu", "a.h", "b.h", "table.h"), start=4):
        path = clone.home / "src/room" / name
        before = path.read_text()
        path.write_text(before + "changed\n")
        clone.compile("-O3")
        assert clone.compiled == number, name
        path.write_text(before)
        clone.compile("-O3")
        assert clone.compiled == number, f"{name} as it was before"
    (clone.home / "src/room/other.h").write_text("changed\n")
    clone.compile("-O3")
    assert clone.compiled == 7


def test_comments_do_not_go_into_it(clone):
    path = clone.home / "src/room/a.h"
    path.write_text(before := path.read_text() + 'const char* a = "/* b // c"; char d = \'"\';\n')
    clone.compile()
    path.write_text("// one\n\n" + before.replace("\n", " // two\n") + "  /* three\nfour */\n")
    clone.compile()
    assert clone.compiled == 1
    for changed in ("/* b // C", "/* b // c d"):
        path.write_text(before.replace("/* b // c", changed))
        clone.compile()
    assert clone.compiled == 3


def test_ninja_learns_of_every_header(clone):
    clone.compile()
    target, files = (clone.home / "x.fatbin.d").read_text().split(": ")
    assert target == str(clone.home / "x.fatbin")
    assert {Path(file).name for file in files.split()} == {"kernel.cu", "a.h", "b.h", "table.h"}


def test_a_failure_is_shown_and_not_kept(clone):
    source = clone.home / "src/room/kernel.cu"
    good = source.read_text()
    source.write_text("broken\n")
    process = clone.start()
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 3 and "is broken" in errors
    assert not (clone.home / "x.fatbin").exists() and not (clone.cache / "images").exists()
    source.write_text(good)
    clone.compile()


def test_two_at_once(clone, tmp_path):
    """All compile, one of the entries stays, and every result is whole."""
    clones = [clone, *(Clone(tmp_path / f"other{i}", clone.cache) for i in range(3))]
    processes = [x.start(FAKE_SECONDS="0.5") for x in clones]
    assert [process.wait(timeout=60) for process in processes] == [0] * 4
    assert len(clone.entries) == 1
    images = {(x.home / "x.fatbin").read_bytes() for x in clones}
    assert images == {clone.compile()}


def test_a_damaged_entry_is_compiled_again(clone):
    first = clone.compile()
    (entry,) = clone.entries
    whole = entry.read_bytes()
    flipped = bytearray(whole)
    flipped[60] ^= 1  # in the compressed image
    for damage in (whole[: len(whole) // 2], bytes(flipped), b""):
        entry.write_bytes(damage)
        before = clone.compiled
        assert clone.compile() == first
        assert clone.compiled == before + 1


def test_the_cache_is_bounded_and_keeps_what_was_used_last(clone):
    limit = {"FLASHMOE_CACHE_MB": "1", "FAKE_BYTES": "300000"}
    for number in range(3):
        clone.compile(f"-n{number}", **limit)
    for age, number in ((30, 0), (20, 1), (10, 2)):  # as if used so many seconds ago
        entry = next(x for x in clone.entries if f"-n{number}".encode() in flags_of(x))
        os.utime(entry, (entry.stat().st_atime - age, entry.stat().st_mtime - age))
    clone.compile("-n0", **limit)  # used again
    assert clone.compiled == 3
    clone.compile("-n3", **limit)
    kept = {flags_of(entry).split()[-1] for entry in clone.entries}
    assert kept == {b"-n0", b"-n2", b"-n3"}


def flags_of(entry: Path) -> bytes:
    return zipfile.ZipFile(entry).read("fatbin").split(b"\n")[0]


def test_it_can_be_cleared(clone):
    clone.compile()
    foreign = clone.cache / "images" / "notes.txt"
    foreign.write_text("not ours")
    environment = os.environ | {"FLASHMOE_CACHE": str(clone.cache)}
    done = subprocess.run(
        [sys.executable, SCRIPT, "clear"], env=environment, capture_output=True, text=True
    )
    assert done.stdout.startswith("1 images removed") and clone.entries == [foreign]
    clone.compile()
    assert clone.compiled == 2


def test_a_cache_that_cannot_be_written_fails_no_build(clone):
    clone.cache.write_text("a file where a folder should be")
    clone.compile()
    clone.compile()
    assert clone.compiled == 2


def test_where_it_is(monkeypatch, tmp_path):
    sys.path.insert(0, str(SCRIPT.parent))
    import compile_image

    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("FLASHMOE_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert compile_image.cache_folder() == tmp_path / ".cache/flashmoe/images"
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert compile_image.cache_folder() == Path("/x/flashmoe/images")
    monkeypatch.setenv("FLASHMOE_CACHE", "/y")
    assert compile_image.cache_folder() == Path("/y/images")


def test_instructions_are_counted_once(monkeypatch, tmp_path):
    counted = []

    def count(image: Path):
        counted.append(image.read_bytes())
        return {("kernel", "sm_80"): Counter({"HMMA.16816.F32": len(counted)})}

    monkeypatch.setenv("FLASHMOE_CACHE", str(tmp_path))
    monkeypatch.setattr(kernel_report, "count_opcodes", count)
    opcodes, image = kernel_report.opcodes.__wrapped__, tmp_path / "some.fatbin"
    image.write_bytes(b"code")
    first = opcodes(image)
    assert opcodes(image) == first == {("kernel", "sm_80"): Counter({"HMMA.16816.F32": 1})}
    image.write_bytes(b"other code")
    assert opcodes(image) != first and counted == [b"code", b"other code"]
    (kept,) = (path for path in (tmp_path / "images").iterdir() if "1}" in path.read_text())
    kept.write_text("half of an ent")
    image.write_bytes(b"code")
    assert opcodes(image)["kernel", "sm_80"]["HMMA.16816.F32"] == 3
    monkeypatch.setenv("FLASHMOE_CACHE", str(image))  # no folder
    opcodes(image)
    assert len(counted) == 4
