#!/usr/bin/env bash
# One optimizer step of Llama-3.1-8B in NF4, LoRA of rank 32 on all seven linears, on one row as long as can be, with
# activations in host memory. Prints the JSON of `ftcli bench`; its messages go to stderr.
#
#   kernels/bench/longest.sh [TOKENS] [MORE OPTIONS OF ftcli bench...]
#
# LIMIT_GB (default 80; 0: none) is what torch's allocator and CUDA's context may take together, in 10^9 bytes: the
# step runs as on a card of that size. About five minutes on an H200, and 84 GiB of free host memory at 343,040 tokens.
set -euo pipefail
tokens=${1:-343040}
shift $(($# > 0 ? 1 : 0))
python=${PYTHON:-python3}
recipe=${RECIPE:-recipes/llama3.1-8b-qlora.yaml}
limit=${LIMIT_GB:-80}
cd "$(dirname "$0")/../.."

# Host memory is pinned by 8 threads: 1 to 2 GB/s by one. Pages of freed blocks can serve blocks of any size.
conf=expandable_segments:True,pinned_use_cuda_host_register:True,pinned_num_register_threads:8
if [ "$limit" != 0 ] && command -v nvidia-smi > /dev/null; then
  mib=$(nvidia-smi --query-gpu=memory.total --format=csv,noheader,nounits | head -n 1)
  # 1 GB is left to CUDA's context.
  share=$(awk -v gb="$limit" -v mib="$mib" 'BEGIN { s = (gb - 1) * 1e9 / (mib * 1048576); printf "%.4f", s < 1 ? s : 1 }')
  capped=$conf,per_process_memory_fraction:$share
  if PYTORCH_CUDA_ALLOC_CONF=$capped "$python" -c 'import torch; torch.zeros(1, device="cuda")' 2> /dev/null; then
    conf=$capped
  else
    echo "this torch cannot be kept to $limit GB; the peak is measured all the same" >&2
  fi
fi
echo "PYTORCH_CUDA_ALLOC_CONF=$conf" >&2
PYTORCH_CUDA_ALLOC_CONF=$conf "$python" -m ftcli bench "$recipe" --batch 1 --seq "$tokens" --steps 0 --json \
  --set lora.r=32 --set lora.alpha=64 --set train.gradient_checkpointing=offload "$@"
