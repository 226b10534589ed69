#!/usr/bin/env bash
# What every launcher here runs on the machine: installs ftcli where it is missing, and trains a recipe whose run lies in
# a bucket as well. Passes ftcli's exit status on: 75 means that the same command goes on elsewhere.
#
#   FTCLI_SOURCE   what to give to pip: a wheel, an address of a repository, or ftcli[remote] of an index
#   MIRROR         where the run is copied to, such as s3://bucket/runs/name; without it the disk has to stay
#
#   bash run.sh train my.yaml [options of ftcli]
set -euo pipefail

if ! command -v ftcli >/dev/null; then
    python3 -m venv "${FTCLI_VENV:-$HOME/.ftcli}"
    PATH="${FTCLI_VENV:-$HOME/.ftcli}/bin:$PATH"
    command -v ftcli >/dev/null || pip install --quiet "${FTCLI_SOURCE:?what to give to pip}" s3fs aiohttp
fi
command="${1:?train or grpo}" recipe="${2:?a recipe}"
shift 2
[ -z "${MIRROR:-}" ] || set -- --set "run.mirror=$MIRROR" "$@"
exec ftcli "$command" "$recipe" "$@"
