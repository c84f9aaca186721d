#!/usr/bin/env bash
# The paper's Table 5 (arXiv 2603.05353) on the GPUs of this machine, with a timer that is the same for all arms: from the
# request on all ranks to the first token on rank 0. The model by default is the shape that the paper's times fit,
# with random weights; give another as the first argument. Appends to benchmarks/results/parallel.jsonl.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
model="${1:-shape:qwen3-14b}"
ranks="${RANKS:-4}"
out="${OUT:-benchmarks/results/parallel.jsonl}"

# One GPU first, then all: full prefill by a balanced ring and by all-gather, InfoFlow cold and with stored chunks.
for chunk_tokens in 2048 8192; do
  infoflow-kv bench sp --device cuda --dtype bfloat16 --model "$model" --ranks "1,$ranks" \
    --tokens 8192,16384,32768 --chunk-tokens "$chunk_tokens" --arms ring,gather,infoflow --layouts Q,H \
    --states cold,cached --budgets .15 --repeats 5 --out "$out"
done
