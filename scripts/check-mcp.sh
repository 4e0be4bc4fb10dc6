#!/usr/bin/env bash
# Lets the official MCP client (Python, from PyPI) and the MCP inspector (from npm) list and call the tools of a live server
# over HTTP and of `postrider mcp` over standard input and output.
set -euo pipefail
cd "$(dirname "$0")/.."

postrider=$(realpath "${CARGO_TARGET_DIR:-target}/debug/postrider")
script=$(realpath scripts/check_mcp.py)
tools=$PWD/target/tools/mcp
if ! command -v npm >/dev/null; then
    sudo=; [[ $(id -u) == 0 ]] || sudo="sudo -n"
    $sudo apt-get update -q && $sudo apt-get install -q -y --no-install-recommends nodejs npm
fi
if [[ ! -x $tools/python/bin/pip ]]; then
    python3 -m venv "$tools/python"
    "$tools/python/bin/pip" install --quiet --disable-pip-version-check mcp==2.3.0
fi
# The inspector wants a newer Node than distributions have; npm brings that too.
if [[ ! -d $tools/node_modules ]]; then
    npm install --silent --no-audit --no-fund --prefix "$tools" node@22 @modelcontextprotocol/inspector@2.12.0
fi
export PATH=$tools/node_modules/.bin:$PATH

folder=$(mktemp -d)
trap 'kill $(jobs -p) 2>/dev/null || true; wait; rm -rf "$folder"' EXIT
cd "$folder"
listening() { for _ in $(seq 100); do [[ -s $1 ]] && break; sleep 0.1; done; sed -n 's/^listening on //p' "$1"; }
"$postrider" stand-in openmemory --listen 127.0.0.1:0 >openmemory &
printf '[memory]\nurl = "%s"\n' "$(listening openmemory)" >postrider.toml
"$postrider" serve --listen 127.0.0.1:0 >server 2>log &
url=$(listening server)/mcp

"$tools/python/bin/python" "$script" "$postrider" "$url"

# transport, where
inspect() {
    local name=$1; shift
    mcp-inspector --cli "$@" --method tools/list >tools.json
    grep -q '"memory_store"' tools.json && grep -q '"reconcile"' tools.json
    mcp-inspector --cli "$@" --method tools/call --tool-name memory_store --tool-arg "payload_md=by the inspector, $name" >stored.json
    grep -q '"action": "allow"' stored.json
    echo "inspector-$name: listed and called"
}
inspect http "$url" --transport http
inspect stdio "$postrider" mcp
