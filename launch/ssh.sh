#!/usr/bin/env bash
# Trains a recipe on the first of several machines that answers, and goes on with the next one after exit 75 or where the
# machine has gone (255).
#
#   MIRROR=s3://bucket/runs/my FTCLI_SOURCE=dist/ftcli-1.0.0-py3-none-any.whl bash launch/ssh.sh my.yaml spot1 spot2
#
# The recipe, files of the same folder that it may name, and a wheel are copied to ftcli/ on the machine. With
# MIRROR every machine goes on where the last one stopped; credentials are those that the machines have.
set -euo pipefail
recipe="${1:?a recipe}"
shift
[ $# -gt 0 ] || { echo "name at least one machine" >&2; exit 2; }
: "${MIRROR:?where the run is copied to, such as s3://bucket/runs/name}" "${FTCLI_SOURCE:?what to give to pip}"
here=$(cd "$(dirname "$0")" && pwd)

on() { # on HOST: copies what is needed and trains there
    local host=$1 source=$FTCLI_SOURCE files=("$recipe" "$here/run.sh")
    if [ -f "$FTCLI_SOURCE" ]; then
        files+=("$FTCLI_SOURCE")
        source=$(basename "$FTCLI_SOURCE")
    fi
    ssh "$host" mkdir -p ftcli || return 255
    scp -q "${files[@]}" "$host:ftcli/" || return 255
    # shellcheck disable=SC2029 # it is to be expanded here
    ssh "$host" "cd ftcli && MIRROR='$MIRROR' FTCLI_SOURCE='$source' bash run.sh train '$(basename "$recipe")'"
}

status=255
for host in "$@"; do
    status=0
    on "$host" || status=$?
    [ "$status" -eq 75 ] || [ "$status" -eq 255 ] || break
    echo "$host ended with $status; going on elsewhere" >&2
done
exit "$status"
