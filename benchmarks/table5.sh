#!/usr/bin/env bash
# The paper's Table 5 (arXiv 2603.05353) on the GPUs of this machine, with a timer that is the same for all arms: from the
# request on all ranks to the first token on rank 0. The model by default is the shape that the paper's times fit,
# with random weights; give another as the first argument. Appends to benchmarks/results/parallel.jsonl as it goes.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
model="${1:-shape:qwen3-14b}"
ranks="${RANKS:-4}"
out="${OUT:-benchmarks/results/parallel.jsonl}"
lengths="${LENGTHS:-8192 16384 32768}"
options=(--device "${DEVICE:-cuda}" --dtype "${DTYPE:-bfloat16}" --repeats "${REPEATS:-5}")

# One GPU first (plain full prefill), then all: full prefill by a balanced ring and by all-gather, InfoFlow cold and with
# stored chunks. One long document, so that chunks are as long as the paper's: a part for each rank, and 2K.
for tokens in $lengths; do
  for chunk_tokens in $(printf '%s\n' $((tokens / ranks)) 2048 | sort -nru); do
    infoflow-kv bench sp "${options[@]}" --model "$model" --ranks "1,$ranks" --tokens "$tokens" --join \
      --chunk-tokens "$chunk_tokens" --arms ring,gather,infoflow --layouts Q,H --states cold,cached --budgets .15 \
      --out "$out"
  done
done
