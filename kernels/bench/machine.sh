#!/usr/bin/env bash
# Measures this machine for docs/performance.md: training steps of the shipped recipes, the operations, attention, and
# the matmul rate at first and under load.
#
#   kernels/bench/machine.sh results/
set -uo pipefail
out=${1:?usage: kernels/bench/machine.sh FOLDER}
python=${PYTHON:-python3}
cd "$(dirname "$0")/../.."
mkdir -p "$out"

step() { # NAME RECIPE [OPTION...]: the training step, 2 x 4096 tokens
  local name=$1 recipe=$2
  shift 2
  "$python" -m ftcli bench "recipes/$recipe.yaml" --batch 2 --seq 4096 --steps 10 --json "$@" \
    > "$out/$name.json" 2> "$out/$name.log" || echo "$name: exit $?"
}

policy() { echo "--set train.gradient_checkpointing=$1"; }

for recipe in llama3.1-8b gemma2-9b; do
  # shellcheck disable=SC2046  # the words are separate on purpose
  step "$recipe-none" $recipe $(policy false) --profile
  for keep in selective true offload; do step "$recipe-$keep" $recipe $(policy $keep); done
done
# shellcheck disable=SC2046
step qwen3-8b-none qwen3-8b $(policy false)
# shellcheck disable=SC2046
step mistral-7b-none llama3.1-8b $(policy false) --set model.name_or_path=mistralai/Mistral-7B-v0.3
for recipe in llama3.1-8b gemma2-9b; do
  # shellcheck disable=SC2046
  step "$recipe-fp8" $recipe $(policy false) --set quantization.method=fp8 --profile
done
for recipe in llama3.1-8b gemma2-9b; do
  # shellcheck disable=SC2046
  step "$recipe-nf4" $recipe-qlora $(policy false) --profile
done
# shellcheck disable=SC2046
step llama3.1-8b-nf4-lean llama3.1-8b-qlora $(policy offload) --batch 1 --seq 2048
for recipe in llama3.1-8b gemma2-9b; do
  # shellcheck disable=SC2046
  step "$recipe-eval" $recipe $(policy false) --eval
done
"$python" kernels/bench/fp8.py > "$out/fp8.txt" 2>&1
"$python" kernels/bench/nf4.py > "$out/nf4.txt" 2>&1
"$python" kernels/bench/matmul.py > "$out/matmul.txt" 2>&1
"$python" kernels/bench/attention.py --cases gemma2 llama > "$out/attention.txt" 2>&1
"$python" kernels/bench/ops.py --compile > "$out/ops.txt" 2>&1
"$python" kernels/bench/memory.py --json "$out/memory.json" --table "$out/memory.md" --seconds 150 \
  > "$out/memory.txt" 2> "$out/memory.log" || echo "memory: exit $?"
