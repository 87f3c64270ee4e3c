#!/usr/bin/env bash
# Makes a block-diffusion drafter for the default target, and an autoregressive one of the same layers; then drafts with
# the first.
#
#   pip install -e ".[train]" && examples/make_diffusion_drafter.sh FOLDER [MINUTES]
#
# An eighth of the minutes (10) goes to data. The results are FOLDER/final/drafter and FOLDER/ar/drafter, each trained
# for 0.55 of them: the first one begins as an autoregressive drafter. The same command again trains both further, on
# the same data. Compiling and measuring come on top: some six minutes on two CPU cores.
set -euo pipefail
out=${1:?usage: make_diffusion_drafter.sh FOLDER [MINUTES]}
minutes=${2:-10}

# A command that ends for its time ends with status 3.
within() { "${@:2}" --minutes "$(times "$1")" || [ $? -eq 3 ]; }
times() { awk "BEGIN {print $1 * $minutes}"; }

# 1. The target writes prompts of all kinds, then prompts that ask for code, then word problems, and answers them.
selfgen() {
  within 0.04 python -m failfast_jax.train selfgen --documents 4096 --batch-size 32 --shard-size 32 "$@"
}
[ -d "$out/ar" ] || {
  selfgen --out "$out/general"
  openings="$(dirname "$0")/../failfast_jax/assets"
  selfgen --out "$out/code" --seed 7 --openings "$openings/code_openings.txt"
  selfgen --out "$out/problems" --seed 21 --openings "$openings/word_problem_openings.txt"
}

# 2. Eight of its thirty layers, evenly spread but for the first and last ones, learn to go without the others.
train() {
  python -m failfast_jax.train --family standalone --data "$out/general" "$out/code" "$out/problems" --skip-short \
    --held-out 16 --warmup 20 "$@"
}
endless=(--steps 20000 --schedule constant)
autoregressive() {
  within "$1" train --out "$out/ar" --layers 0,1,6,12,18,24,28,29 --block-size 1 --batch 8 --learning-rate 2e-3 \
    "${endless[@]}"
}
autoregressive 0.17

# 3. The same layers learn to fill blocks of 16, at the end at a falling rate.
blocks=(--block-size 16 --batch 4 --corruption draft --drawn-blocks 24 --position-decay 6)
within 0.3 train --out "$out/run" --start "$out/ar/drafter" "${blocks[@]}" --learning-rate 1e-3 "${endless[@]}"
rm -rf "$out/final"
train --out "$out/final" --start "$out/run/drafter" "${blocks[@]}" --learning-rate 8e-4 \
  --steps "$(printf %.0f "$(times 2)")"

# 4. The autoregressive drafter goes on, so that both have had the same time.
autoregressive 0.38

# 5. Algorithm 1 of the paper with it: `--trace trace.html` shows each round.
python -m failfast_jax.generate --drafter "$out/final/drafter" --method failfast --spec-len 3 \
  --trace "$out/trace.html" --prompt "Write the numbers from 1 to 30, one on each line."
