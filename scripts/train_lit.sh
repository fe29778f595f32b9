#!/usr/bin/env bash
# Trains on a TPU slice: creates or reuses it, installs this checkout on all workers, launches, follows worker 0, and
# restarts after preemption.
#
#   scripts/train_lit.sh --name NAME --zone ZONE --type v5litepod-256 [OPTION ...] -- TRAIN_ARGUMENT ...
#
#   --project PROJECT   default: that of gcloud's configuration
#   --version VERSION   software of the machines, default tpu-ubuntu2204-base
#   --spot              cheaper machines that may be preempted
#   --install COMMAND   what installs lit-het on a worker, in the unpacked checkout; default: into .venv, with pip
#   --env NAME=VALUE    a variable for training, may be given several times
#   --restarts N        how often to restart if workers end but the slice is alive, default 10
#   --delete            delete the slice after training has succeeded
#   --plan              before all, compile the step for the slice here, and stop if it does not fit (lit-het plan)
#   --dry-run           print the commands instead of running them
#
# TRAIN_ARGUMENTs go to `lit-het train --distributed --start-or-resume`. The run directory must lie on storage that all
# workers share. Ctrl-C does not stop the training; the same command follows it again. See docs/distributed.md.
set -euo pipefail

usage() { sed -n '2,/^set/s/^# \{0,1\}//p' "$0" | grep -v '^set'; }
die() { echo "train_lit.sh: $*" >&2; exit 1; }
message() { echo "train_lit.sh: $*" >&2; }

name='' zone='' type='' project='' version=tpu-ubuntu2204-base spot='' restarts=10 delete=''
plan='' dry_run='' environment=()
install='command -v python3.11 >/dev/null || { sudo apt-get -qq update && sudo apt-get -qqy install python3.11-venv; }'
install+='; PYTHON=python3.11 && source scripts/environment.sh "[tpu,gcs]"'
while [ $# -gt 0 ]; do
  case "$1" in
    --name | --zone | --type | --project | --version | --install | --restarts)
      [ $# -gt 1 ] || die "$1 needs a value"
      printf -v "${1#--}" %s "$2"
      shift 2
      ;;
    --env)
      [[ ${2-} == [A-Za-z_]*=* ]] || die "--env takes NAME=VALUE"
      environment+=("$2")
      shift 2
      ;;
    --spot) spot=yes && shift ;;
    --delete) delete=yes && shift ;;
    --plan) plan=yes && shift ;;
    --dry-run) dry_run=yes && shift ;;
    --help | -h) usage && exit ;;
    --) shift && break ;;
    *) die "unknown option $1; see scripts/train_lit.sh --help" ;;
  esac
done
for option in name zone type; do [ -n "${!option}" ] || die "--$option is missing; see scripts/train_lit.sh --help"; done
config='' planned=()
for ((i = 1; i <= $#; i++)); do
  case "${!i}" in
    # Flags of `lit-het train` alone, the first with a value.
    --members) i=$((i + 1)) && continue ;;
    --members=* | --allow-commands) continue ;;
    --config) ((i < $#)) && j=$((i + 1)) && config="${!j}" ;;
    --config=*) config="${!i#--config=}" ;;
    --resume | --start-or-resume | --distributed) die "${!i} is added by this script; leave it out" ;;
  esac
  planned+=("${!i}")
done
[ -n "$config" ] || die "no --config FILE after --; see scripts/train_lit.sh --help"
[[ $restarts =~ ^[0-9]+$ ]] || die "--restarts $restarts is no number"
cd "$(dirname "$0")/.."
# Workers get HEAD; absolute paths must be shared by all workers.
[[ $config == /* ]] || git cat-file -e "HEAD:${config%%:*}" 2>/dev/null ||
  die "--config ${config%%:*} is not in HEAD, which workers get: commit it, or give an absolute path that they share"
if [ -n "$plan" ]; then
  here="$(command -v lit-het || echo .venv/bin/lit-het)"
  "$here" plan --topology "$type" "${planned[@]}" || die "the step cannot be planned for $type, or does not fit (--plan)"
fi

where=(--zone "$zone")
[ -z "$project" ] || where+=(--project "$project")
poll="${TRAIN_LIT_POLL_SECONDS:-30}"
scratch="$(mktemp -d)"
trap 'rm -rf "$scratch"' EXIT

exec 3>&1
# In a dry run commands are only printed.
run() {
  if [ -n "$dry_run" ]; then
    local word
    for word in "$@"; do [[ $word =~ ^[A-Za-z0-9_./:=+@,-]+$ ]] && printf '%s ' "$word" || printf '%s ' "${word@Q}"; done
    echo
  else
    "$@"
  fi
}
on_workers() { # WORKERS COMMAND
  run gcloud compute tpus tpu-vm ssh "$name" "${where[@]}" --worker "$1" --command "$2"
}
state() {
  local describe=(gcloud compute tpus queued-resources describe "$name" "${where[@]}" --format 'value(state.state)')
  [ -z "$dry_run" ] || { run "${describe[@]}" >&3 && echo NONE && return; }
  "${describe[@]}" 2>"$scratch/error" ||
    { grep -qi 'not.found' "$scratch/error" && echo NONE || { cat "$scratch/error" >&2 && return 1; }; }
}

provide_slice() {
  local found
  while true; do
    found="$(state)" || die "gcloud cannot get the state of $name"
    case "$found" in
      ACTIVE) return ;;
      FAILED | SUSPENDED | SUSPENDING)
        message "$name is $found: deleting and requesting it again"
        run gcloud compute tpus queued-resources delete "$name" "${where[@]}" --force --quiet
        ;;
      NONE)
        run gcloud compute tpus queued-resources create "$name" --node-id "$name" "${where[@]}" \
          --accelerator-type "$type" --runtime-version "$version" ${spot:+--spot}
        [ -z "$dry_run" ] || return 0
        ;;
      *) message "$name is $found; next check in $poll s" && sleep "$poll" ;;
    esac
  done
}

install_on_workers() {
  local archive="$scratch/lit-het.tar.gz"
  [ -z "$(git status --porcelain --untracked-files=no)" ] || message "uncommitted changes are not installed on workers: they get HEAD"
  run git archive --format tar.gz --output "$archive" HEAD
  run gcloud compute tpus tpu-vm scp "$archive" "$name:lit-het.tar.gz" "${where[@]}" --worker all
  on_workers all "mkdir -p lit-het && tar -xzf lit-het.tar.gz -C lit-het && cd lit-het && { $install; }"
}

launch() { # detached, so that the training survives the connection
  local command
  printf -v command '%q ' env ${environment[@]+"${environment[@]}"} .venv/bin/lit-het train --distributed \
    --start-or-resume "$@"
  command="$command> train.log 2>&1; echo \$? > exit_code"
  command="setsid nohup bash -c ${command@Q} < /dev/null > /dev/null 2>&1 & echo \$! > train.pid"
  on_workers all "cd lit-het && rm -f exit_code && { mv -f train.log train.log.before 2>/dev/null || true; } && { $command; }"
}

follow() {
  local log="$scratch/train.log"
  on_workers 0 "cd lit-het && tail -n +$(($(wc -l <"$log") + 1)) --pid \$(cat train.pid) -F train.log 2>/dev/null" |
    tee -a "$log" || true
}

exit_codes() { # one a worker: a number, "running" or "lost"
  on_workers all '{ cd lit-het && cat exit_code || { kill -0 $(cat train.pid) && echo running || echo lost; }; } 2>/dev/null'
}
wait_for_exit_codes() { # retries: a broken connection does not mean that training has ended
  until codes="$(exit_codes)"; do
    [ "$(state)" = ACTIVE ] || { codes=lost && break; }
    message "workers do not answer; next check in $poll s" && sleep "$poll"
  done
}

trap 'message "training continues; the same command follows it again, and this command stops it:
  gcloud compute tpus tpu-vm ssh $name ${where[*]} --worker all --command \"pkill -TERM -s \\\$(cat lit-het/train.pid)\""
  exit 130' INT

while true; do
  provide_slice
  : >"$scratch/train.log"
  [ -n "$dry_run" ] || wait_for_exit_codes
  if [[ ${codes-} != *running* ]]; then
    install_on_workers
    launch "$@"
  else
    message "$name is already training"
  fi
  while true; do
    follow
    wait_for_exit_codes
    [ -z "$dry_run" ] || { echo "$codes" && codes=0; }
    [[ $codes == *running* ]] || break
    sleep 1
  done
  if ! grep -qv '^0$' <<<"$codes"; then
    [ -z "$delete" ] || run gcloud compute tpus queued-resources delete "$name" "${where[@]}" --force --quiet
    exit 0
  fi
  # 1 is an error that a restart would repeat. Workers that lost another one, or were stopped by a signal, exit with 75.
  ! grep -q '^1$' <<<"$codes" || die "training has ended with an error: see the last lines above, or train.log of workers"
  codes="$(tr '\n' ' ' <<<"$codes")"
  if [ "$(state)" != ACTIVE ]; then
    message "the slice was preempted (workers: ${codes% }): resuming training"
  else
    [ $((restarts--)) -gt 0 ] || die "workers have ended too often (${codes% })"
    message "workers have ended (${codes% }): resuming training"
    on_workers all 'pkill -KILL -s $(cat lit-het/train.pid) || true; tail -n 5 lit-het/train.log' || true
  fi
done
