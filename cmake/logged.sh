#!/bin/sh
# logged.sh LOG COMMAND...: runs the command with its output in LOG, and shows it only on failure.
log=$1
shift
"$@" > "$log" 2>&1 || { cat "$log"; exit 1; }
