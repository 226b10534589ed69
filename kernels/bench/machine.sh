#!/usr/bin/env bash
# Measures this machine for docs/performance.md.
#
#   kernels/bench/machine.sh FOLDER [steps] [kernels] [memory]
#
# steps: training steps of the shipped recipes, and evaluation (7 minutes on an H200). kernels: the operations, attention,
# and products at first and under load (4). memory: the estimate against what is allocated (4). All three by default.
set -uo pipefail
out=${1:?usage: kernels/bench/machine.sh FOLDER [steps] [kernels] [memory]}
shift
parts=${*:-steps kernels memory}
python=${PYTHON:-python3}
mkdir -p "$out"
out=$(cd "$out" && pwd)
cd "$(dirname "$0")/../.."

step() { # NAME RECIPE POLICY [OPTION...]: the training step, 2 x 4096 tokens
  local name=$1 recipe=$2 policy=$3
  shift 3
  "$python" -m ftcli bench "recipes/$recipe.yaml" --batch 2 --seq 4096 --steps 10 --json \
    --set "train.gradient_checkpointing=$policy" "$@" > "$out/$name.json" 2> "$out/$name.log" || echo "$name: exit $?"
}

steps() {
  step llama3.1-8b-none llama3.1-8b false --profile
  step gemma2-9b-none gemma2-9b false --profile
  for recipe in llama3.1-8b gemma2-9b; do
    for policy in selective true offload; do step "$recipe-$policy" $recipe $policy; done
    # What `auto` makes of a card with 40 GB.
    step "$recipe-auto-40gb" $recipe auto --set train.memory_budget_gib=39.4
    step "$recipe-fp8" $recipe false --set quantization.method=fp8 --profile
    step "$recipe-nf4" $recipe-qlora false --profile
    step "$recipe-eval" $recipe false --eval
  done
  step qwen3-8b-none qwen3-8b false
  step mistral-7b-none llama3.1-8b false --set model.name_or_path=mistralai/Mistral-7B-v0.3
  step llama3.1-8b-nf4-lean llama3.1-8b-qlora offload --batch 1 --seq 2048
  local full=(--set model.name_or_path=Qwen/Qwen3-4B --set lora=null)
  step qwen3-4b-full qwen3-8b false "${full[@]}" --profile
  step qwen3-4b-full-bf16 qwen3-8b false "${full[@]}" --set train.pure_bf16=true --set train.bf16_stochastic_round=true
}

kernels() {
  "$python" kernels/bench/matmul.py > "$out/matmul.txt" 2>&1
  "$python" kernels/bench/fp8.py > "$out/fp8.txt" 2>&1
  "$python" kernels/bench/nf4.py > "$out/nf4.txt" 2>&1
  "$python" kernels/bench/attention.py --cases gemma2 llama > "$out/attention.txt" 2>&1
  "$python" kernels/bench/ops.py --compile > "$out/ops.txt" 2>&1
}

memory() {
  "$python" kernels/bench/memory.py --json "$out/memory.json" --table "$out/memory.md" --seconds 150 \
    > "$out/memory.txt" 2> "$out/memory.log" || echo "memory: exit $?"
}

for part in $parts; do "$part"; done
