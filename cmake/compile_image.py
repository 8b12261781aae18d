"""Compiles one kernel file to a fatbin, or takes it from the cache of those compiled before.

    compile_image.py compile --root SRC --source FILE --output IMAGE.fatbin -- NVCC FLAGS...
    compile_image.py clear

The cache is in $FLASHMOE_CACHE, else $XDG_CACHE_HOME/flashmoe, else ~/.cache/flashmoe. An image is
found by the hash of what goes into it: the compiler's version, the flags, the source and every
project header that it includes, without comments. No path of the machine is in the hash, so another
clone finds it too. One file holds an entry, and it appears under its name only when it is complete:
builds that run at the same time share the cache, and at worst compile the same image twice. Beyond
$FLASHMOE_CACHE_MB (default 2048) the entries that were not used for longest go.

Beside IMAGE.fatbin: IMAGE.log, what the compiler said (registers, spills, warnings); IMAGE.seconds,
the processor time it took, which unlike wall time does not depend on what else the machine does;
IMAGE.fatbin.d, the files it depends on. All of them come from the cache as well.
"""

import argparse
import hashlib
import os
import re
import resource
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

SUFFIX = ".image"
# "header", or MACRO where a flag -DMACRO="header" says which.
INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*(?:"([^"]+)"|([A-Za-z_]\w*))', re.M)

# A comment, or something that may have // in it: a string or a character.
CODE = re.compile(r'("(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\')|//[^\n]*|/\*.*?\*/', re.S)


def cache_folder() -> Path:
    if own := os.environ.get("FLASHMOE_CACHE"):
        return Path(own) / "images"
    caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(caches) / "flashmoe" / "images"


def included_files(source: Path, root: Path, flags: list[str]) -> list[Path]:
    """The source and the project's headers that it includes, however deep, in a fixed order.

    Conditions are not evaluated: a header that only some build reads costs a compilation too many,
    never one too few. What is in <brackets> belongs to the compiler, whose version is hashed.
    """
    macros = dict(flag[2:].split("=", 1) for flag in flags if re.match(r"-D\w+=", flag))
    found, waiting = [], [source]
    while waiting:
        file = waiting.pop()
        if file in found:
            continue
        found.append(file)
        for name, macro in INCLUDE.findall(file.read_text()):
            name = name or macros.get(macro, "").strip('"')
            places = [file.parent / name, root / name]
            waiting += [place.resolve() for place in places if place.is_file()][:1]
    return sorted(found)


def code_of(file: Path) -> bytes:
    """A file without its comments, without indentation and empty lines: what changes the image."""
    text = CODE.sub(lambda found: found[1] or " ", file.read_text())
    return "\n".join(line for x in text.splitlines() if (line := x.strip())).encode()


def key_of(compiler: list[str], source: Path, root: Path, files: list[Path]) -> str:
    version = subprocess.run([compiler[0], "--version"], check=True, capture_output=True)
    parts = [b"2", version.stdout, *(flag.encode() for flag in compiler[1:])]
    parts.append(os.path.relpath(source, root).encode())
    for file in files:
        parts += [os.path.relpath(file, root).encode(), code_of(file)]
    digest = hashlib.sha256()
    for part in parts:  # lengths, so that no two lists of parts run into the same bytes
        digest.update(b"%d\n" % len(part) + part)
    return digest.hexdigest()


def outputs(image: Path) -> dict[str, Path]:
    return {end: image.with_suffix(f".{end}") for end in ("fatbin", "log", "seconds")}


def take(entry: Path, image: Path) -> bool:
    """Copies an entry's files to where the build wants them, the image last."""
    try:
        with zipfile.ZipFile(entry) as packed:
            contents = {end: packed.read(end) for end in outputs(image)}  # checks their checksums
        os.utime(entry)
    except (OSError, KeyError, zipfile.BadZipFile):
        return False
    for end, path in reversed(outputs(image).items()):
        path.write_bytes(contents[end])
    return True


def put(entry: Path, image: Path) -> None:
    """Adds an entry, then drops the oldest ones beyond the limit. A cache that cannot be written
    must not fail a build."""
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(suffix=".tmp", dir=entry.parent)
        with (
            os.fdopen(handle, "wb") as file,
            zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as packed,
        ):
            for end, path in outputs(image).items():
                packed.write(path, end)
        os.replace(name, entry)
        prune(entry.parent, int(os.environ.get("FLASHMOE_CACHE_MB") or 2048) * 1_000_000)
    except OSError as error:
        print(f"flashmoe: the image cache cannot be written: {error}", file=sys.stderr)


def prune(folder: Path, limit_bytes: int) -> None:
    """Files may vanish meanwhile: another build prunes as well."""
    entries = []
    for path in [*folder.glob(f"*{SUFFIX}"), *folder.glob("*.tmp")]:
        try:
            status = path.stat()
        except FileNotFoundError:
            continue
        entries.append((status.st_mtime, status.st_size, path))
    total = sum(size for _, size, _ in entries)
    for _, size, path in sorted(entries):
        if total <= limit_bytes:
            break
        path.unlink(missing_ok=True)
        total -= size


def run_compiler(compiler: list[str], source: Path, root: Path, image: Path) -> int:
    """Runs it with its output in the log, which is shown only on failure."""
    command = [*compiler, f"-I{root}", "-o", str(image), str(source)]
    with outputs(image)["log"].open("wb") as log:
        status = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT).returncode
    if status:
        image.unlink(missing_ok=True)
        sys.stderr.write(outputs(image)["log"].read_text(errors="replace"))
        return status
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    outputs(image)["seconds"].write_text(f"{used.ru_utime + used.ru_stime:.2f}\n")
    return 0


def compile_image(compiler: list[str], source: Path, root: Path, image: Path) -> int:
    files = included_files(source, root, compiler)
    escaped = [str(file).replace(" ", "\\ ") for file in files]
    image.with_name(f"{image.name}.d").write_text(f"{image}: {' '.join(escaped)}\n")
    entry = cache_folder() / f"{key_of(compiler, source, root, files)}{SUFFIX}"
    if take(entry, image):
        return 0
    if status := run_compiler(compiler, source, root, image):
        return status
    put(entry, image)
    return 0


def clear() -> int:
    folder = cache_folder()
    entries = [*folder.glob(f"*{SUFFIX}"), *folder.glob("*.tmp")]
    for path in entries:
        path.unlink(missing_ok=True)
    print(f"{len(entries)} images removed from {folder}")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("clear", help="removes every image from the cache")
    compiling = commands.add_parser("compile")
    compiling.add_argument("--root", type=Path, required=True, help="where #include starts")
    compiling.add_argument("--source", type=Path, required=True)
    compiling.add_argument("--output", type=Path, required=True)
    compiling.add_argument("compiler", nargs="+", help="after --: the compiler and its flags")
    args = parser.parse_args()
    if args.command == "clear":
        return clear()
    source, root = args.source.resolve(), args.root.resolve()
    return compile_image(args.compiler, source, root, args.output)


if __name__ == "__main__":
    sys.exit(main())
