#!/usr/bin/env bash
# Makes a drafter in the way of the default one (failfast_jax/assets/smollm2-135m-instruct): two hours on two CPU cores.
#
#   examples/make_default_drafter.sh FOLDER
#
# Four commands, each of which continues where it was stopped: kill the script and start it again as you like. The
# result is FOLDER/run/drafter; copied over the assets folder it is the default.
set -euo pipefail
out=${1:?usage: make_default_drafter.sh FOLDER}
assets=$(cd "$(dirname "$0")/../failfast_jax/assets" && pwd)

# 1. and 2. The target writes prompts of all kinds, then prompts that ask for code, and answers them.
python -m failfast_jax.train selfgen --out "$out/general" --documents 2048 --batch-size 32 --shard-size 256
python -m failfast_jax.train selfgen --out "$out/code" --documents 512 --batch-size 32 --shard-size 256 --seed 7 \
  --openings "$assets/code_openings.txt"

# 3. Two layers that read the target's hidden states, with a Markov head and a confidence head.
python -m failfast_jax.train --out "$out/run" --data "$out/general" "$out/code" --skip-short \
  --family dspark --layers 28,29 --row-features 9,14,19,24,28,29 --rows 7 --borrow --draft-vocab 8192 \
  --markov-rank 32 --confidence-for greedy --confidence-weight 0.5 --ce-weight 0.5 --l1-weight 0.5 \
  --prefix-fraction 0.1 --seq-len 320 --feature-cache "$out/features" \
  --steps 1400 --batch 8 --anchors 64 --learning-rate 3e-3 --eval-every 350

# 4. Speed on the documents held out, against plain decoding and lookup: report/summary.json.
python -m failfast_jax.bench --dataset "$out/run/held_out.npz" --drafter "$out/run/drafter" \
  --methods vanilla,lookup,dspark,failfast --limit 24 --max-new-tokens 64 --out "$out/report"
