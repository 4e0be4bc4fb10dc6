#!/usr/bin/env bash
# Checks the Prometheus rules with promtool: the one on the path, or Debian's, unpacked (not installed) below target/.
set -euo pipefail
cd "$(dirname "$0")/.."

promtool=$(command -v promtool || true)
if [[ -z $promtool ]]; then
    promtool=target/tools/prometheus/usr/bin/promtool
    if [[ ! -x $promtool ]]; then
        mkdir -p target/tools/prometheus
        # Downloading needs the package lists, which a fresh machine does not have.
        (cd target/tools && { apt-get download -qq prometheus 2>/dev/null || { apt-get update -qq && apt-get download -qq prometheus; }; } &&
            dpkg -x prometheus_*.deb prometheus && rm prometheus_*.deb)
    fi
fi
"$promtool" check rules deploy/prometheus/*.rules.yml
