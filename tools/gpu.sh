#!/usr/bin/env bash
# Everything to be checked on a machine with a GPU, where the kernels are already compiled: builds the host library
# against that machine's torch, then tests. The python3 at hand is used as it is, and nothing is installed.
set -u
cd "$(dirname "$0")/.." || exit 2

usage() {
  cat <<'TEXT'
tools/gpu.sh [--jobs N] [--all] [--sanitize] [--family F] [--bench] [--no-build] [FATBINS] [-- BENCH_ARGUMENTS...]

  FATBINS      folder of compiled kernels (default: build/release/fatbins)
  --jobs N     GPU tests in so many processes at once (default: a core each, 14 at most)
  --all        also ctest and the tests that need no GPU
  --sanitize   also compute-sanitizer (tools/sanitize.py): memcheck, racecheck, initcheck, synccheck
  --family F   sanitize only this family; repeatable
  --bench      also python3 -m flashmoe_science bench BENCH_ARGUMENTS
  --no-build   use the library as it is

The GPU tests always run. The full output of each step is in build/gpu/STEP.log. Exits with 1 if a step failed.
TEXT
}

fatbins=build/release/fatbins
build=yes all=no sanitize=no bench=no
families=()
jobs=$(nproc)
[ "$jobs" -gt 14 ] && jobs=14
while [ $# -gt 0 ]; do
  case $1 in
    -h | --help) usage; exit 0 ;;
    --jobs) jobs=${2:?--jobs wants a number}; shift ;;
    --all) all=yes ;;
    --sanitize) sanitize=yes ;;
    --family) families+=(--family "${2:?--family wants a name}"); shift ;;
    --bench) bench=yes ;;
    --no-build) build=no ;;
    --) shift; break ;;
    -*) echo "tools/gpu.sh: unknown option $1" >&2; usage >&2; exit 2 ;;
    *) fatbins=$1 ;;
  esac
  shift
done
# What is left are the benchmark's arguments.
case $jobs in
  '' | 0* | *[!0-9]*) echo "tools/gpu.sh: --jobs $jobs: wants a number from 1 on" >&2; exit 2 ;;
esac

logs=build/gpu
mkdir -p "$logs"
summary=()
failed=no

note() { summary+=("$(printf '%-12s %-8s %7s' "$1" "$2" "$3")"); }

# step NAME COMMAND...: runs the command with its output in NAME.log; shows the end of it where it failed.
step() {
  local name=$1 start seconds
  shift
  printf '== %s\n' "$name"
  start=$(date +%s.%N)
  "$@" > "$logs/$name.log" 2>&1
  local status=$?
  seconds=$(awk -v a="$start" -v b="$(date +%s.%N)" 'BEGIN { printf "%.1f", b - a }')
  if [ "$status" -eq 0 ]; then
    note "$name" passed "$seconds"
    tail -n 1 "$logs/$name.log"
  else
    note "$name" FAILED "$seconds"
    failed=yes
    tail -n "${TAIL:-60}" "$logs/$name.log"
  fi
  return "$status"
}

finish() {
  printf '\n%-12s %-8s %7s\n' step verdict seconds
  printf '%s\n' "${summary[@]}"
  [ "$failed" = no ]
  exit
}

python=$(command -v python3) || { echo "tools/gpu.sh: no python3" >&2; exit 2; }
export PYTHONPATH="$PWD/python${PYTHONPATH:+:$PYTHONPATH}"
PATH=$(dirname "$python"):$PATH
export PATH

machine() {
  "$python" -c '
import torch
print(f"torch {torch.__version__}, CUDA {torch.version.cuda}")
for i in range(torch.cuda.device_count()):
    print(f"cuda:{i} {torch.cuda.get_device_name(i)}")
assert torch.cuda.is_available(), "torch sees no GPU: every GPU test would be skipped"
'
}

build_library() {
  # An environment file of our own: the usual one would make a virtual environment where a package is missing.
  printf 'PYTHON := %s\n' "$python" > "$logs/environment.mk"
  make build ENV="$logs/environment.mk" FLASHMOE_FATBINS="$(realpath "$fatbins")"
}

# A machine that was given the files only: the commit came along with the kernels.
if ! git rev-parse -q --verify HEAD > /dev/null 2>&1 && [ -f "$fatbins/commit" ]; then
  FLASHMOE_COMMIT=$(cat "$fatbins/commit")
  export FLASHMOE_COMMIT
fi

step machine machine || finish
if [ "$build" = yes ]; then
  if ! ls "$fatbins"/*.fatbin > /dev/null 2>&1; then
    echo "tools/gpu.sh: no fatbins in $fatbins; compile them with 'make build' where there is an nvcc" >&2
    note build FAILED 0
    failed=yes
    finish
  fi
  step build build_library || finish
fi
# Most of a test's time is the oracle's and the processor's: a core for each process. What needs the whole card comes
# after.
gpu_tests() {
  local i status=0 pids=()
  local -x OMP_NUM_THREADS=1
  rm -f "$logs"/gpu_tests.*.log
  for ((i = 0; i < jobs; i++)); do
    "$python" -m pytest -q -p no:cacheprovider --part "$i/$jobs" --ignore tests/gpu/test_large.py \
      tests/gpu > "$logs/gpu_tests.$i.log" 2>&1 &
    pids+=($!)
  done
  for i in "${!pids[@]}"; do
    wait "${pids[$i]}" || { status=1; tail -n 60 "$logs/gpu_tests.$i.log"; }
  done
  tail -q -n 1 "$logs"/gpu_tests.*.log
  return "$status"
}
step gpu_tests gpu_tests
step large_tests "$python" -m pytest -q -p no:cacheprovider tests/gpu/test_large.py
if [ "$all" = yes ]; then
  step ctest ctest --test-dir build/release --output-on-failure
  step python_tests "$python" -m pytest -q tests/python
fi
if [ "$sanitize" = yes ]; then
  for tool in memcheck racecheck initcheck synccheck; do
    step "$tool" "$python" tools/sanitize.py "$tool" --jobs "$jobs" "${families[@]}"
  done
fi
if [ "$bench" = yes ]; then
  step bench "$python" -m flashmoe_science bench "$@" && cat "$logs/bench.log"
fi
finish
