#!/usr/bin/env bash
# Is this faster than another revision? Builds that one once, runs both in turns on the same servers, and prints the mean
# of this / that with its standard error, per database. `make bench-against REV=main BENCH=drain` calls it.
# PAIRS=10, MESSAGES=…, DATABASE=sqlite|postgres|mysql|all; arguments go to both.
set -euo pipefail
cd "$(dirname "$0")/.."

rev=${REV:?which revision? REV=main} bench=${BENCH:-drain} pairs=${PAIRS:-10} databases=${DATABASE:-all}
case $databases in
    all) databases="sqlite postgres mysql" ;;
    sqlite | postgres | mysql) ;;
    *) echo "DATABASE is sqlite, postgres, mysql or all, not $databases" >&2 && exit 2 ;;
esac
[[ $pairs =~ ^[1-9][0-9]*$ ]] || { echo "PAIRS is a number from 1 on, not $pairs" >&2 && exit 2; }

commit=$(git rev-parse --verify --quiet "$rev^{commit}") || { echo "there is no revision $rev" >&2 && exit 2; }
tree=target/against/$commit
that=$tree/target/release/postrider
if [[ ! -x $that ]]; then
    echo "building $rev (${commit:0:12}), once" >&2
    [[ -e $tree/.git ]] || { git worktree prune && git worktree add --detach "$tree" "$commit" >&2; }
    (cd "$tree" && CARGO_TARGET_DIR=target cargo build --locked --release)
fi
cargo build --locked --release
this=${CARGO_TARGET_DIR:-target}/release/postrider

if [[ $databases != sqlite && -z ${POSTRIDER_TEST_POSTGRES:-} ]]; then
    exec cargo run --locked -q -p proving --bin with-databases -- scripts/bench-against.sh "$@"
fi

# Beside the servers' data, on a disk: in memory SQLite would be measured without its syncs.
work=$(mktemp -d "${TMPDIR:-/var/tmp}/postrider-against-XXXXXX")
trap 'rm -rf "$work"' EXIT

run() { # run BINARY URL FILE
    "$1" --database "$2" --json bench "$bench" ${MESSAGES:+--messages "$MESSAGES"} "${@:4}" >>"$3"
}

for database in $databases; do
    case $database in
        sqlite) url=sqlite://$work/bench.db ;;
        postgres) url=$POSTRIDER_TEST_POSTGRES ;;
        mysql) url=$POSTRIDER_TEST_MYSQL ;;
    esac
    for ((pair = 1; pair <= pairs; pair++)); do
        printf '\r%s: pair %d of %d ' "$database" "$pair" "$pairs" >&2
        # Whoever goes second finds warm caches: each does as often.
        if ((pair % 2)); then
            run "$this" "$url" "$work/$database.this" "$@" && run "$that" "$url" "$work/$database.that" "$@"
        else
            run "$that" "$url" "$work/$database.that" "$@" && run "$this" "$url" "$work/$database.this" "$@"
        fi
    done
    printf '\r\033[K' >&2
done

python3 - "$work" "$bench" "${commit:0:12}" $databases <<'PYTHON'
import json, math, statistics, sys

work, bench, commit, *databases = sys.argv[1:]


def figures(path):
    """One list of figures per name, in the order of the runs."""
    found = {}
    for line in open(path):
        for name, value in json.loads(line).items():
            rate = name.endswith("per_second") and "limit" not in name and not name.startswith("paced")
            if (rate or name in ("p50_ms", "p99_ms")) and isinstance(value, (int, float)) and value > 0:
                found.setdefault(name, []).append(value)
    return found


print(f"bench {bench}, this against {commit}; above 1 this is faster")
print(f"{'database':10} {'figure':28} {'pairs':>5} {'this':>12} {'that':>12} {'this/that':>10} {'± s.e.':>8}")
for database in databases:
    this, that = (figures(f"{work}/{database}.{which}") for which in ("this", "that"))
    names = sorted((n for n in this if len(this[n]) == len(that.get(n, []))), key=lambda n: (n != "per_second", n))
    for name in names:
        # Of times less is better.
        ratios = [b / a if name.endswith("_ms") else a / b for a, b in zip(this[name], that[name])]
        error = statistics.stdev(ratios) / math.sqrt(len(ratios)) if len(ratios) > 1 else float("nan")
        means = (statistics.mean(this[name]), statistics.mean(that[name]))
        print(f"{database:10} {name:28} {len(ratios):5} {means[0]:12,.1f} {means[1]:12,.1f} {statistics.mean(ratios):10.3f} {error:8.3f}")
PYTHON
