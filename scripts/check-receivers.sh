#!/usr/bin/env bash
# Lets the receivers of examples/ take webhooks of a live server: Python and Node with the official standardwebhooks
# packages, and Node's own crypto for ed25519. Each must handle an event before, and another during, a rotation.
set -euo pipefail
cd "$(dirname "$0")/.."

postrider=$(realpath "${CARGO_TARGET_DIR:-target}/debug/postrider")
receivers=$(realpath examples/receivers)
tools=$PWD/target/tools/receivers
if ! command -v node >/dev/null; then
    sudo=; [[ $(id -u) == 0 ]] || sudo="sudo -n"
    $sudo apt-get update -q && $sudo apt-get install -q -y --no-install-recommends nodejs npm
fi
if [[ ! -d $tools/python ]]; then
    python3 -m venv "$tools/python"
    "$tools/python/bin/pip" install --quiet --disable-pip-version-check standardwebhooks==1.1.0
fi
if [[ ! -d $tools/node_modules ]]; then
    npm install --silent --no-audit --no-fund --prefix "$tools" standardwebhooks@1.1.1
fi
# Node looks for packages beside the script.
cp "$receivers"/*.mjs "$tools/"

folder=$(mktemp -d)
trap 'kill $(jobs -p) 2>/dev/null || true; wait; rm -rf "$folder"' EXIT
cd "$folder"
printf '[webhooks]\nallow_http = true\nallow_cidrs = ["127.0.0.0/8"]\nmax_retry_limit = 2\nbase_delay_sec = 1\n' >postrider.toml
"$postrider" serve --listen 127.0.0.1:0 >listening 2>log &
for _ in $(seq 100); do [[ -s listening ]] && break; sleep 0.1; done
url=$(sed -n 's/^listening on //p' listening)

field() { python3 -c 'import json, sys; print(json.load(sys.stdin)[sys.argv[1]])' "$1"; }
free_port() { python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'; }
post() { curl -sf -X POST "$url$1" -H 'content-type: application/json' -d "$2"; }

# name, event type, kind of signature, command
take() {
    local name=$1 kind=$2; shift 2
    local port subscription id secret
    port=$(free_port)
    subscription=$(post /v1/subscriptions "{\"url\":\"http://127.0.0.1:$port/\",\"event_types\":[\"$name.*\"],\"signature\":\"$kind\"}")
    id=$(field id <<<"$subscription")
    secret=$(field secret <<<"$subscription")
    WEBHOOK_SECRET=$secret WEBHOOK_PUBLIC_KEY=$secret "$@" "$port" >"$name.log" 2>&1 &
    for _ in $(seq 100); do python3 -c "import socket; socket.create_connection(('127.0.0.1', $port), 1)" 2>/dev/null && break; sleep 0.1; done
    post /v1/events "{\"event_type\":\"$name.first\",\"payload\":{\"n\":1,\"text\":\"Grüße 你好\"}}" >/dev/null
    # The receiver goes on with the old secret: while it is being rotated both sign.
    post "/v1/subscriptions/$id/rotate-secret" '{"overlap":"1h"}' >/dev/null
    post /v1/events "{\"event_type\":\"$name.second\",\"payload\":[2]}" >/dev/null
    for _ in $(seq 100); do
        [[ $(grep -c '^handled' "$name.log") == 2 ]] && { echo "$name: both events verified"; return; }
        grep -q refused "$name.log" && break
        sleep 0.1
    done
    echo "$name did not verify:"; cat "$name.log" log; return 1
}

take python v1 "$tools/python/bin/python" "$receivers/receiver.py"
take node v1 node "$tools/receiver.mjs"
take ed25519 v1a node "$tools/receiver-ed25519.mjs"
