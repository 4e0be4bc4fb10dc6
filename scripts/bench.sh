#!/usr/bin/env bash
# Runs every benchmark on the three databases; one file of JSON lines per database in target/bench/.
# Wants a release build and the two servers' URLs: `make bench` brings both. Arguments go to every benchmark.
set -euo pipefail
cd "$(dirname "$0")/.."

postrider=${CARGO_TARGET_DIR:-target}/release/postrider
results=target/bench
mkdir -p "$results"
# Beside the servers' data, on a disk: in memory SQLite would be measured without its syncs.
sqlite=$(mktemp -d "${TMPDIR:-/var/tmp}/postrider-bench-XXXXXX")
trap 'rm -rf "$sqlite"' EXIT

for database in sqlite postgres mysql; do
    case $database in
        sqlite) url=sqlite://$sqlite/bench.db ;;
        postgres) url=$POSTRIDER_TEST_POSTGRES ;;
        mysql) url=$POSTRIDER_TEST_MYSQL ;;
    esac
    : >"$results/$database.jsonl"
    for bench in limit enqueue drain latency backlog http webhooks; do
        "$postrider" --database "$url" --json bench "$bench" "$@" | tee -a "$results/$database.jsonl"
    done
done
