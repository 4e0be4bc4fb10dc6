#!/usr/bin/env bash
# What happens when two versions meet? Builds the version before once, lets it work while this one migrates and works beside
# it, and judges what they leave by a receiver's book and the rows. `make upgrade` calls it; scripts/upgrade.py does it.
# REV=2ac8c0f is the version before, DATABASE=sqlite|postgres|mysql|all, THIS=path a binary of this one that is there already.
set -euo pipefail
cd "$(dirname "$0")/.."

rev=${REV:-2ac8c0f} databases=${DATABASE:-all}
case $databases in
    all) databases="sqlite postgres mysql" ;;
    sqlite | postgres | mysql) ;;
    *) echo "DATABASE is sqlite, postgres, mysql or all, not $databases" >&2 && exit 2 ;;
esac

commit=$(git rev-parse --verify --quiet "$rev^{commit}") || { echo "there is no revision $rev" >&2 && exit 2; }
tree=target/against/$commit
that=$tree/target/release/postrider
if [[ ! -x $that ]]; then
    echo "building $rev (${commit:0:12}), once" >&2
    [[ -e $tree/.git ]] || { git worktree prune && git worktree add --detach "$tree" "$commit" >&2; }
    (cd "$tree" && CARGO_TARGET_DIR=target cargo build --locked --release)
fi
this=${THIS:-}
if [[ -z $this ]]; then
    cargo build --locked --release
    this=${CARGO_TARGET_DIR:-target}/release/postrider
fi

only=
[[ $databases == postgres ]] && only=--postgres-only
[[ $databases == mysql ]] && only=--mysql-only
run=(python3 scripts/upgrade.py "$(realpath "$that")" "$(realpath "$this")" $databases)
if [[ $databases == sqlite ]]; then
    exec "${run[@]}"
fi
# Servers whose URL is set already are not started.
exec cargo run --locked -q -p proving --bin with-databases -- $only -- "${run[@]}"
