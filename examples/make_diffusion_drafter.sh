#!/usr/bin/env bash
# Makes a block-diffusion drafter for the default target, and an autoregressive one of the same layers; then drafts with
# the first.
#
#   examples/make_diffusion_drafter.sh FOLDER [MINUTES]
#
# A fifth of the minutes (10) goes to data, two fifths to each drafter. The results are FOLDER/run/drafter and
# FOLDER/ar/drafter; the same command again trains both for as long once more, on the same data. Compiling and measuring
# come on top: some four minutes on two CPU cores.
set -euo pipefail
out=${1:?usage: make_diffusion_drafter.sh FOLDER [MINUTES]}
minutes=${2:-10}

# A command that ends for its time ends with status 3.
within() { "${@:2}" --minutes "$(awk "BEGIN {print $1 * $minutes}")" || [ $? -eq 3 ]; }

# 1. The target writes prompts of all kinds and answers them.
[ -d "$out/ar" ] ||
  within 0.2 python -m failfast_jax.train selfgen --out "$out/data" --documents 4096 --batch-size 32 --shard-size 32

# 2. Eight of its thirty layers, evenly spread but for the first and last ones, learn to go without the others.
train() {
  python -m failfast_jax.train --family standalone --data "$out/data" --skip-short --held-out 16 --batch 8 \
    --steps 20000 --schedule constant --learning-rate 2e-3 --warmup 20 "$@"
}
within 0.4 train --out "$out/ar" --layers 0,1,6,12,18,24,28,29 --block-size 1

# 3. The same layers learn to fill blocks of 16.
within 0.4 train --out "$out/run" --start "$out/ar/drafter" --block-size 16 --corruption draft --drawn-blocks 48

# 4. Algorithm 1 of the paper with it: `--trace trace.html` shows each round.
python -m failfast_jax.generate --drafter "$out/run/drafter" --method failfast --spec-len 8 --max-spec-len 64 \
  --trace "$out/trace.html" --prompt "Write the numbers from 1 to 30, one on each line."
