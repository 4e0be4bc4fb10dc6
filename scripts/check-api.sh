#!/usr/bin/env bash
# Lets Schemathesis try everything `openapi.json` of a live server says, and much it does not say: no 5xx, no undocumented
# status, no answer that is not as described. Once with a token, on an embedded database of its own.
set -euo pipefail
cd "$(dirname "$0")/.."

postrider=$(realpath "${CARGO_TARGET_DIR:-target}/debug/postrider")
tools=target/tools/schemathesis
if [[ ! -x $tools/bin/schemathesis ]]; then
    python3 -m venv "$tools"
    "$tools/bin/pip" install --quiet --disable-pip-version-check schemathesis==4.32.5
fi
schemathesis=$(realpath "$tools/bin/schemathesis")

folder=$(mktemp -d)
trap 'kill $(jobs -p) 2>/dev/null || true; wait; rm -rf "$folder"' EXIT
cd "$folder"
"$postrider" stand-in openmemory --listen 127.0.0.1:0 >openmemory &
for _ in $(seq 100); do
    [[ -s openmemory ]] && break
    sleep 0.1
done
memory=$(sed -n 's/^listening on //p' openmemory)
printf '[lane.work]\ncourier = "noop"\n[memory]\nurl = "%s"\n[auth]\nmode = "always"\n' "$memory" >postrider.toml
token=$("$postrider" token create --scope admin | head -n 1)
"$postrider" serve --listen 127.0.0.1:0 >listening 2>log &
for _ in $(seq 100); do
    [[ -s listening ]] && break
    sleep 0.1
done
url=$(sed -n 's/^listening on //p' listening)
# Limits are in bytes where a schema counts characters, so what it takes for valid or invalid is not quite what we do.
"$schemathesis" run "$url/openapi.json" --checks all --exclude-checks positive_data_acceptance,negative_data_rejection \
    --max-examples "${EXAMPLES:-50}" --no-color \
    -H "Authorization: Bearer $token"
