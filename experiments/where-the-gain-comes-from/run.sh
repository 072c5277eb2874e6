#!/usr/bin/env bash
# All runs, three at a time on one GPU; none is started after DEADLINE seconds.
# usage: run.sh TOKENS RESULTS [DEADLINE]
set -u
here=$(cd "$(dirname "$0")" && pwd); tokens=$1 results=$2 deadline=${3:-100000}
export here tokens results deadline began=$(date +%s)
one() {
  [ $(($(date +%s) - began)) -lt "$deadline" ] || { echo "not started: $1 $2"; exit 0; }
  [ -e "$results/$1-$2.json" ] || python3 "$here/probe.py" train "$tokens" "$1" "$2" --out "$results" 2>&1 | grep -v Warning
}
export -f one
printf '%s\n' "altup 1800" "dense 2296" "dense 1800" "f1224 1800" "altup+sub+reduce 1800" "ve 1800" "ve+altup+sub+reduce 1800" \
  "altup+fixed 1800" "x0 1800" "bigram 1800" "altup+reduce 1800" "altup+sub 1800" "recycled 1800" "hc+reduce 1800" |
  xargs -P 3 -L 1 bash -c 'one $0 $1'
