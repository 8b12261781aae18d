#!/bin/sh
# Installs the library into an empty prefix, builds the example programs against it as a stranger would,
# and runs them.    install_test.sh <cmake> <build folder> <source folder> [extra flags]
set -eu
cmake=$1
build=$2
source=$3
export CFLAGS="${4:-}" CXXFLAGS="${4:-}"  # sanitizers, when the library was built with them

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

"$cmake" --install "$build" --prefix "$work/prefix" >"$work/install.log" || { cat "$work/install.log"; exit 1; }
for language in cpp c; do
  "$cmake" -S "$source/examples/$language" -B "$work/$language" -DCMAKE_PREFIX_PATH="$work/prefix"
  "$cmake" --build "$work/$language"
  for example in attention moe; do
    echo "--- examples/$language/$example"
    "$work/$language/$example"
  done
done
