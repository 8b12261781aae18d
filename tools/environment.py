"""Finds or makes the Python that `make` builds and tests with, and writes its path for make.

The python3 at hand is used in place when it already has everything (a GPU server without a network
is the usual case). Otherwise a virtual environment is made in .venv, and requirements-dev.txt is
installed there, with NVIDIA's compiler where kernels are to be compiled and there is no nvcc.
"""

import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
REQUIREMENTS = ROOT / "requirements-dev.txt"
CUDA_REQUIREMENTS = ROOT / "requirements-cuda.txt"
CUOBJDUMP_REQUIREMENTS = ROOT / "requirements-cuobjdump.txt"
sys.path.insert(0, str(ROOT / "cmake"))

import gpus  # noqa: E402

MODULES = [
    "hypothesis",
    "matplotlib",
    "numpy",
    "pytest",
    "rich",
    "scikit_build_core",
    "transformers",
]
COMMANDS = ["cmake", "ninja"]


def missing_here() -> list[str]:
    """What the running Python lacks."""
    missing = [m for m in MODULES if importlib.util.find_spec(m) is None]
    scripts = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    missing += [c for c in COMMANDS if shutil.which(c, path=scripts) is None]
    try:
        version = importlib.metadata.version("torch")
        if tuple(int(x) for x in version.split("+")[0].split(".")[:2]) < (2, 10):
            missing.append(f"torch>=2.10 (has {version})")
    except importlib.metadata.PackageNotFoundError:
        missing.append("torch>=2.10")
    return missing


def missing_for_kernels() -> list[Path]:
    """Requirements for compiling kernels and reading them, as far as the machine has neither."""
    families = os.environ.get("FLASHMOE_FAMILIES") or "auto"
    if families == "none" or (families == "auto" and not gpus.compute_capabilities()):
        return []
    homes = [os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH")] + ["/usr/local/cuda"]
    homes += [os.path.join(sysconfig.get_path("purelib"), "nvidia", "cu13")]
    places = [os.path.join(home, "bin") for home in homes if home]
    path = os.pathsep.join([os.environ.get("PATH", ""), *places])
    commands = {"cuobjdump": CUOBJDUMP_REQUIREMENTS}
    if not os.environ.get("FLASHMOE_FATBINS"):
        commands["nvcc"] = CUDA_REQUIREMENTS
    return [file for name, file in commands.items() if shutil.which(name, path=path) is None]


def make_venv() -> Path:
    """Creates .venv if need be, installs the requirements, and returns its Python."""
    python = VENV / "bin" / "python"
    if not python.exists():
        print(f"making a virtual environment in {VENV.name}", file=sys.stderr, flush=True)
        made = subprocess.run([sys.executable, "-m", "venv", str(VENV)], stdout=sys.stderr)
        if made.returncode:
            shutil.rmtree(VENV, ignore_errors=True)
            sys.exit(
                "cannot make a virtual environment with this python3. On Debian and Ubuntu install "
                "python3-venv, or activate any environment that has pip and torch >= 2.10."
            )
    files = [REQUIREMENTS, *missing_for_kernels()]
    names = " and ".join(file.name for file in files)
    print(f"installing {names} into .venv", file=sys.stderr, flush=True)
    command = [str(python), "-m", "pip", "install", "--disable-pip-version-check"]
    for file in files:
        command += ["-r", str(file)]
    if not sys.stderr.isatty():
        command += ["--progress-bar", "off"]
    if subprocess.run(command, stdout=sys.stderr).returncode:
        sys.exit(f"pip could not install {names}; its message is above.")
    return python


def main() -> None:
    output = Path(sys.argv[1])
    if sys.version_info < (3, 10):  # noqa: UP036  (the python3 at hand may be any)
        sys.exit(f"Python >= 3.10 is needed; python3 is {sys.version.split()[0]}.")
    missing = missing_here()
    # A GPU server that has everything but nvcc is used as it is; who asks for kernels gets them.
    if os.environ.get("FLASHMOE_FAMILIES") not in (None, "", "auto"):
        missing += ["nvcc" for file in missing_for_kernels() if file == CUDA_REQUIREMENTS]
    if missing:
        print(f"python3 lacks {', '.join(missing)}", file=sys.stderr)
        python = make_venv()
    else:
        python = Path(sys.executable)
    output.parent.mkdir(parents=True, exist_ok=True)
    text = f"PYTHON := {python}\nexport PATH := {python.parent}:$(PATH)\n"
    # Whole files, each in one process: their fixtures (a wheel, disassembled images) are made once.
    # In the order of tests/python/conftest.py, which an older xdist cannot keep.
    newer = "import xdist; assert [int(x) for x in xdist.__version__.split('.')[:2]] >= [3, 8]"
    if subprocess.run([python, "-c", newer], stderr=subprocess.DEVNULL).returncode == 0:
        text += "PYTEST_PARALLEL := -n $(JOBS) --dist loadfile --no-loadscope-reorder\n"
    output.write_text(text)
    print(f"using {python}", file=sys.stderr)


if __name__ == "__main__":
    main()
