"""CONTRIBUTING's map has every folder and every source file, and the documents hang together."""

from __future__ import annotations

import fnmatch
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# Folders whose files the map lists one by one, in every folder below them too.
LISTED = ("src/", "include/")
MOST_COLUMNS = 120


def tracked() -> list[str]:
    """What belongs to the repository: tracked, or new and not ignored."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    return sorted(name for name in set(listed.stdout.split("\0")) if (ROOT / name).is_file())


def read_map(text: str) -> dict[str, list[str]]:
    """The files of each folder, as patterns: a folder stands at the margin, its files are indented
    below it."""
    section = text.split("## A map of the house")[1].split("\n## ")[0]
    folders: dict[str, list[str]] = {}
    for line in section.split("```")[1].splitlines():
        if not line.strip():
            continue
        name = line.split()[0]
        if not line.startswith(" "):
            assert name.endswith("/"), f"a folder ends with /: {line}"
            assert name not in folders, f"{name} is in the map twice"
            files = folders.setdefault(name, [])
        else:
            assert len(line.split()) > 1, f"what is it for? {line}"
            files.append(name)
    return folders


def differences(folders: dict[str, list[str]], names: list[str]) -> list[str]:
    """What the map lacks or has too much, for a repository with these files."""
    present: dict[str, list[str]] = {}
    for name in names:
        folder, slash, file = name.rpartition("/")
        if slash:
            present.setdefault(folder + slash, []).append(file)
    wrong = [f"{folder} is not in the map" for folder in present if folder not in folders]
    # A folder of folders needs no line of its own, and may have one.
    wrong += [
        f"{folder} does not exist"
        for folder in folders
        if not any(other.startswith(folder) for other in present)
    ]
    for folder, patterns in folders.items():
        files = present.get(folder, [])
        if not patterns and not folder.startswith(LISTED):
            continue
        for pattern in patterns:
            if not fnmatch.filter(files, pattern):
                wrong.append(f"{folder}{pattern} does not exist")
        for file in files:
            times = sum(fnmatch.fnmatchcase(file, pattern) for pattern in patterns)
            if times != 1:
                wrong.append(f"{folder}{file} is in the map {times} times")
    return wrong


def test_map_is_complete():
    folders = read_map((ROOT / "CONTRIBUTING.md").read_text())
    wrong = differences(folders, tracked())
    assert not wrong, "\n" + "\n".join(wrong)


HOUSE = """
## A map of the house
```
src/a/          a room
    one.*       the first
    two.h       the second

tools/          tools
```
## Rules
"""
FILES = ["README.md", "src/a/one.h", "src/a/one.cc", "src/a/two.h", "tools/x.py"]


@pytest.mark.parametrize(
    "added, removed, found",
    [
        ([], [], None),
        (["tools/y.py"], [], None),
        (["src/a/three.h"], [], "src/a/three.h is in the map 0 times"),
        (["src/b/one.h"], [], "src/b/ is not in the map"),
        (["docs/log/cpu.md"], [], "docs/log/ is not in the map"),
        ([], ["src/a/two.h"], "src/a/two.h does not exist"),
        ([], ["tools/x.py"], "tools/ does not exist"),
    ],
)
def test_a_difference_would_be_found(added, removed, found):
    names = [name for name in FILES + added if name not in removed]
    assert differences(read_map(HOUSE), names) == ([found] if found else [])


def documents() -> list[str]:
    return [name for name in tracked() if name.endswith(".md")]


def without_code(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)


def headings(text: str) -> list[str]:
    return re.findall(r"^#+ +(.*?) *$", without_code(text), flags=re.MULTILINE)


def anchor(heading: str) -> str:
    """As GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def broken_links(name: str, text: str) -> list[str]:
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", without_code(text)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, section = target.partition("#")
        file = (ROOT / name).parent / path if path else ROOT / name
        there = file.exists()
        if there and section:
            there = section in map(anchor, headings(file.read_text()))
        if not there:
            broken.append(target)
    return broken


def test_links_lead_somewhere():
    broken = {name: broken_links(name, (ROOT / name).read_text()) for name in documents()}
    assert not {name: targets for name, targets in broken.items() if targets}


def test_a_broken_link_would_be_found():
    text = "[a](nowhere.md) [b](#no) [c](README.md) [d](https://example.org) [e](README.md#no)\n"
    assert broken_links("CHANGELOG.md", text) == ["nowhere.md", "#no", "README.md#no"]


def missing_files(text: str, names: list[str]) -> list[str]:
    """Source files that a document names, by their path or the end of it, and that do not exist."""
    named = re.findall(r"`([\w/.]+\.(?:h|cc|cuh|cu|py|sh|cmake))`", text)
    return [name for name in named if not any(f"/{path}".endswith(f"/{name}") for path in names)]


def test_files_that_documents_name_exist():
    names = tracked()
    missing = {name: missing_files((ROOT / name).read_text(), names) for name in documents()}
    assert not {name: files for name, files in missing.items() if files}
    assert missing_files("see `a/b.h`, `b.h`, `c/b.h` and `x.cuh`", ["a/b.h"]) == ["c/b.h", "x.cuh"]


def test_documents_that_sources_name_exist():
    for name in tracked():
        if not name.startswith(("src/", "include/", "python/", "tools/", "cmake/", "examples/")):
            continue
        for path in re.findall(r"docs/[\w/]+\.md", (ROOT / name).read_text(errors="replace")):
            assert (ROOT / path).exists(), f"{name} names {path}"


def test_no_heading_twice():
    for name in documents():
        found = headings((ROOT / name).read_text())
        assert len(found) == len(set(found)), (
            f"{name}: {sorted(set(h for h in found if found.count(h) > 1))}"
        )


def wide_lines(text: str) -> list[int]:
    """Tables and what is generated between markers may be wider."""
    generated = r"<!-- (\w+):begin -->.*?<!-- \1:end -->"
    text = re.sub(generated, lambda block: "\n" * block[0].count("\n"), text, flags=re.DOTALL)
    return [
        number
        for number, line in enumerate(text.splitlines(), 1)
        if len(line) > MOST_COLUMNS and not line.lstrip().startswith("|")
    ]


def test_lines_fit():
    wide = {name: wide_lines((ROOT / name).read_text()) for name in documents()}
    assert not {name: lines for name, lines in wide.items() if lines}


def test_a_wide_line_would_be_found():
    wide = "x" * (MOST_COLUMNS + 1)
    assert wide_lines(f"{wide[1:]}\n{wide}\n| {wide}\n") == [2]
    assert wide_lines(f"<!-- a:begin -->\n{wide}\n<!-- a:end -->\n{wide}\n") == [4]
