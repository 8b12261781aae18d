"""The house in order: who may use what and where, formatting, sizes, symbols, the README."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NATIVE = (".h", ".cc", ".c", ".cuh", ".cu", ".inl")

# What, its pattern in code without comments, and where it may be; an empty tuple: nowhere.
ROOMS = [
    ("asm", r"\b(?:asm|__asm__|__asm)\s*(?:\(|\w)", ("src/cuda/ptx/",)),
    ("torch headers", r"#\s*include\s*[<\"](?:torch|ATen|c10|caffe2)/", ("src/torch/",)),
    ("Python.h", r"#\s*include\s*[<\"](?:Python\.h|pybind11/)", ()),
    (
        "driver calls",
        r"\b(?:dlopen|dlsym|cu[A-Z]\w*)\s*\(",
        (
            "src/cuda/runtime/driver",
            "src/cuda/runtime/launch",
            "src/cuda/runtime/tensor_map",
            "tests/cpp/fake_libcuda",
            "tests/cpp/test_emulated_gpu",  # finds a kernel by its name
        ),
    ),
    ("the CUDA runtime", r"\bcuda[A-Z]\w*\s*\(", ()),
]
# What the files of a room may include of src. core and the CUDA runtime know no operator; device
# code goes from the bottom up, and mma_sync knows nothing of sm90.
SHARED = r"cuda/(?:ptx/|tile/)"
OF_ATTENTION = r"cuda/attention/(?:[^/]*\.cuh|paged\.h|params\.h|tiles\.h)"
FAMILIES = r"cuda/attention/(?:sm90|mma_sync)/"
LAYERS = {
    "src/core/": r"core/|flashmoe/(?:plan|status|tensor)\.h",
    "src/cuda/runtime/": (
        r"core/|cuda/runtime/|flashmoe/(?:device|plan|status|tensor)\.h|images\.inc"
    ),
    "src/cuda/ptx/": r"cuda/ptx/",
    "src/cuda/tile/": SHARED,
    "src/cuda/tma/": r"cuda/(?:ptx/|tile/|tma/)",
    "src/cuda/attention/mma_sync/": rf"{SHARED}|{OF_ATTENTION}|cuda/attention/mma_sync/",
    "src/cuda/moe/mma_sync/": rf"{SHARED}|cuda/moe/(?:[^/]*\.cuh|params\.h|tiles\.h|mma_sync/)",
    "src/cuda/moe/sm90/": (rf"{SHARED}|cuda/tma/|cuda/moe/(?:[^/]*\.cuh|params\.h|tiles\.h|sm90/)"),
    "src/cuda/moe/": r"core/|cuda/(?:moe|runtime|ptx|tile|tma)/|flashmoe/",
    "src/cuda/attention/sm90/": rf"{SHARED}|{OF_ATTENTION}|cuda/tma/|{FAMILIES}",
}
# Headers that a program with neither torch nor CUDA can include.
PUBLIC = r"#\s*include\s*[<\"](?:cuda|torch|ATen|c10)"


def run(*command: str | Path, **options) -> subprocess.CompletedProcess:
    return subprocess.run(
        [str(part) for part in command], cwd=ROOT, capture_output=True, text=True, **options
    )


def files() -> list[str]:
    """What belongs to the repository: tracked, or new and not ignored."""
    listed = run("git", "ls-files", "--cached", "--others", "--exclude-standard", "-z")
    if listed.returncode:
        pytest.skip("not a git checkout")
    return sorted(name for name in set(listed.stdout.split("\0")) if (ROOT / name).is_file())


def native() -> list[str]:
    return [name for name in files() if name.endswith(NATIVE)]


def without_comments(text: str) -> str:
    return re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.DOTALL)


def intruders(name: str, text: str) -> list[str]:
    """Which rooms' rules this file breaks."""
    code = without_comments(text)
    found = [
        what
        for what, pattern, homes in ROOMS
        if not name.startswith(homes or "\0") and re.search(pattern, code)
    ]
    if name.startswith("include/") and re.search(PUBLIC, code):
        found.append("a public header")
    return found


def tool(name: str) -> str:
    """Beside the running Python, where `make` installs it, or on the PATH."""
    beside = Path(sys.executable).parent / name
    path = str(beside) if beside.exists() else shutil.which(name)
    if path is None:
        pytest.skip(f"{name} is not installed")
    return path


def test_everything_is_in_its_room():
    broken = {name: intruders(name, (ROOT / name).read_text()) for name in native()}
    assert not {name: rules for name, rules in broken.items() if rules}


@pytest.mark.parametrize(
    "name, text, rule",
    [
        ("src/cuda/attention/mma_sync/fwd.cuh", 'asm volatile("bar.sync 0;");', "asm"),
        ("src/cpu/product.h", '__asm__("nop");', "asm"),
        ("src/attention/plan.cc", "#include <torch/csrc/stable/tensor.h>", "torch headers"),
        ("include/flashmoe/attention.h", '#include "ATen/ATen.h"', "torch headers"),
        ("src/torch/call.cc", "#include <Python.h>", "Python.h"),
        ("src/cpu/attention/backend.cc", 'dlopen("libcuda.so.1", RTLD_NOW);', "driver calls"),
        ("src/cuda/attention/catalogue.cc", "cuLibraryLoadData(&library, image);", "driver calls"),
        ("src/cuda/runtime/driver.cc", "cudaMalloc(&p, 4);", "the CUDA runtime"),
        ("include/flashmoe/attention.h", "#include <cuda_fp16.h>", "a public header"),
    ],
)
def test_an_intruder_would_be_found(name, text, rule):
    """The rooms are mostly empty still, so the rules themselves need a test."""
    assert rule in intruders(name, f"int a;\n{text}\nint b;\n")
    assert rule not in intruders(name, f"int a;  // {text}\n/* {text} */\n")


def strange_includes(name: str, text: str) -> list[str]:
    """What a file includes of src and should know nothing of."""
    room = max((room for room in LAYERS if name.startswith(room)), key=len, default=None)
    included = re.findall(r'#\s*include\s*"([^"]*)"', without_comments(text))
    return [path for path in included if room and not re.match(LAYERS[room], path)]


def test_device_code_is_in_layers():
    broken = {name: strange_includes(name, (ROOT / name).read_text()) for name in native()}
    assert not {name: paths for name, paths in broken.items() if paths}


@pytest.mark.parametrize(
    "name, included",
    [
        ("src/core/text.h", "attention/problem.h"),
        ("src/cuda/runtime/launch.cc", "cuda/attention/params.h"),
        ("src/cuda/runtime/launch.cc", "flashmoe/attention.h"),
        ("src/cuda/ptx/mma.cuh", "cuda/tile/dtype.cuh"),
        ("src/cuda/tile/copy.cuh", "cuda/attention/params.h"),
        ("src/cuda/tma/pipeline.cuh", "cuda/attention/sm90/params.h"),
        ("src/cuda/attention/mma_sync/fwd.cuh", "cuda/attention/sm90/tiles.h"),
        ("src/cuda/attention/mma_sync/fwd.cuh", "cuda/tma/pipeline.cuh"),
        ("src/cuda/moe/mma_sync/up.cuh", "cuda/attention/params.h"),
        ("src/cuda/moe/planner.cc", "cuda/attention/families.h"),
        ("src/cuda/moe/mma_sync/up.cuh", "cuda/moe/catalogue.h"),
        ("src/cuda/moe/mma_sync/up.cuh", "cuda/moe/sm90/params.h"),
        ("src/cuda/moe/sm90/up.cuh", "cuda/moe/mma_sync/up.cuh"),
    ],
)
def test_a_strange_include_would_be_found(name, included):
    assert strange_includes(name, f'#include "{included}"\n') == [included]
    assert not strange_includes("src/cuda/attention/choose.cc", f'#include "{included}"\n')


def test_residents_are_welcome():
    for name, text in (
        ("src/cuda/ptx/mma.cuh", 'asm volatile("mma.sync");'),
        ("src/torch/convert.h", "#include <torch/csrc/stable/tensor.h>"),
        ("src/cuda/runtime/driver.cc", 'dlopen("libcuda.so.1", RTLD_NOW);'),
        ("src/cuda/runtime/launch.cc", "cuLaunchKernelEx(&config, kernel, params, nullptr);"),
    ):
        assert not intruders(name, text)


def test_clang_format():
    checked = run(tool("clang-format"), "--dry-run", "--Werror", *native())
    lines = [line for line in checked.stderr.splitlines() if "error:" in line]
    assert checked.returncode == 0, "\n".join(["run `make format`:", *lines[:20]])


def test_ruff_check():
    checked = run(tool("ruff"), "check", "--no-cache", ".")
    assert checked.returncode == 0, checked.stdout[-4000:]


def test_ruff_format():
    checked = run(tool("ruff"), "format", "--no-cache", "--check", ".")
    assert checked.returncode == 0, f"run `make format`:\n{checked.stdout[-2000:]}"


def test_no_large_files():
    sizes = {name: (ROOT / name).stat().st_size for name in files()}
    assert sizes
    assert not {name: size for name, size in sizes.items() if size > 1_000_000}


def test_no_build_output_is_tracked():
    stray = re.compile(r"\.(?:so|o|a|pyc|whl|fatbin|cubin)$|(?:^|/)(?:build|dist|\.venv)/")
    assert not [name for name in files() if stray.search(name)]


def test_readme_starts_with_the_two_commands():
    """The first commands a reader meets are the ones that work on a fresh clone."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.DOTALL)
    shell = [
        body for language, body in blocks if language in ("", "sh", "bash", "shell", "console")
    ]
    lines = [line.removeprefix("$ ").split("#")[0].strip() for line in "\n".join(shell).split("\n")]
    assert [line for line in lines if line][:2] == ["make bench", "make test"]


# What the linker sees. Only after a build; `make test` builds first.


def symbols(path: Path, *options: str) -> list[tuple[str, str]]:
    """(kind, demangled name) of each symbol the file defines."""
    listed = run(tool("nm"), "--demangle", "--defined-only", *options, path)
    assert listed.returncode == 0, listed.stderr
    matches = re.findall(r"^[0-9a-f]+ (\w) (.*)$", listed.stdout, re.M)
    assert matches, f"{path} defines nothing"
    return matches


def kernel_objects() -> list[tuple[str, Path]]:
    """(target, object file) of each CPU target in the release build."""
    found = []
    for folder in sorted((ROOT / "build/release/CMakeFiles").glob("flashmoe_cpu_*.dir")):
        target = folder.name.removeprefix("flashmoe_cpu_").removesuffix(".dir")
        found += [(target, path) for path in sorted(folder.rglob("*.o"))]
    return found


def leaks(target: str, defined: list[tuple[str, str]]) -> list[str]:
    """Functions that the linker could share between targets.

    An inline function that is not inlined becomes a weak symbol, and the linker keeps one copy for
    the whole library, perhaps the one compiled for AVX-512. So every function with external linkage
    must have its target in its name.
    """
    own = re.compile(rf"\b(?:target_)?{re.escape(target)}\b(?:::|$|\()")
    return [name for kind, name in defined if kind in "WT" and not own.search(name)]


def test_no_code_leaks_between_cpu_targets():
    objects = kernel_objects()
    if not objects:
        pytest.skip("nothing is built in build/release")
    leaking = {str(path): leaks(target, symbols(path)) for target, path in objects}
    assert not {path: names for path, names in leaking.items() if names}


def test_a_leak_would_be_found():
    weak = [
        ("W", "std::vector<float>::size() const"),
        ("W", "flashmoe::cpu::avx2::dot(float const*, int)"),
        ("t", "flashmoe::cpu::(anonymous namespace)::dot(float const*, int)"),
        ("W", "flashmoe::cpu::neon_bf16::dot(float const*, int)"),
        ("W", "flashmoe::cpu::neon::dot(float const*, int)"),
    ]
    assert leaks("avx2", weak) == [weak[0][1], weak[3][1], weak[4][1]]
    assert leaks("neon", weak) == [weak[0][1], weak[1][1], weak[3][1]]


def library(name: str) -> Path:
    path = ROOT / "python/flashmoe_science/lib" / name
    if not path.exists():
        pytest.skip(f"{name} is not built")
    return path


def test_the_library_exports_its_api_and_nothing_else():
    exported = symbols(library("libflashmoe.so"), "--dynamic")
    assert not [name for _, name in exported if not name.startswith(("flashmoe::", "flash_"))]
    names = {name.split("(")[0].split("[")[0] for _, name in exported}
    assert {"flashmoe::plan", "flashmoe::run", "flashmoe::explain"} <= names
    assert {
        f"flash_{operator}_{p}_{t}"
        for operator in ("attention", "moe")
        for p in ("forward", "backward")
        for t in ("fp16", "bf16")
    } <= names


@pytest.mark.parametrize("name", ["libflashmoe.so", "libflashmoe_torch.so"])
def test_the_library_needs_no_cuda_and_no_python(name):
    listed = run(tool("readelf"), "--dynamic", "--wide", library(name)).stdout
    needed = re.findall(r"\(NEEDED\).*\[(.*?)\]", listed)
    allowed = r"lib(stdc\+\+|gcc_s|c|m|pthread|dl|rt)\.so\.\d+|ld-linux.*"
    if name == "libflashmoe_torch.so":
        allowed += r"|libflashmoe\.so|libtorch(_cpu)?\.so"
    assert needed and not [lib for lib in needed if not re.fullmatch(allowed, lib)]
