#!/bin/sh
# Trains a recipe to its end on a machine that may be taken away, and comes back to it after each time.
#
#   sh preemptible.sh recipes/gemma2-9b.yaml [options of `ftcli train`]
#
# SIGTERM makes ftcli finish its step, write a checkpoint and exit with 75: only then is it worth starting again. Any
# other status ends the loop and is passed on: 0 done, 2 recipe, 3 machine or disk, 4 data, 5 memory, 6 diverged,
# 130 Ctrl-C. A SIGTERM to this script goes to ftcli, and the script exits with 75: whoever has sent it (Slurm, a spot
# market, Kubernetes) starts the script again elsewhere, with the same run directory on a disk that stays.
set -u

stopping=no
child=
# To ftcli alone: a terminal sends Ctrl-C to it as well, and a second signal would stop it at once.
trap 'stopping=75; [ -z "$child" ] || kill -TERM "$child" 2>/dev/null' TERM
trap 'stopping=130' INT

train() {
    ftcli train "$@" --resume auto &
    child=$!
    wait "$child"
    status=$?
    # A trapped signal ends `wait`, not ftcli.
    while [ "$stopping" != no ] && kill -0 "$child" 2>/dev/null; do
        wait "$child"
        status=$?
    done
    return "$status"
}

until train "$@"; do
    if [ "$status" -ne 75 ] || [ "$stopping" != no ]; then
        exit "$status"
    fi
    sleep "${PAUSE:-10}" &
    wait $!
    # A signal in the pause: nothing runs that it could stop, and nothing may start.
    [ "$stopping" = no ] || exit "$stopping"
done
