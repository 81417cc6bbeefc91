#!/usr/bin/env bash
# Makes .venv for a machine without a GPU: Python 3.11, pinned dependencies, SGLang and Megatron-Core.
# Idempotent: does nothing when the environment already matches pyproject.toml and constraints/cpu.txt.
#
#   scripts/setup.sh [--torch-index URL] [--recreate]
#
#   --torch-index URL   where to take torch from, e.g. PyTorch's own CPU index: about 1 GB instead of 5 GB.
#                       Without it pip's default index decides; the CUDA build works without a GPU too.
#   --recreate          start from an empty .venv
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

torch_index=${FLEXFLOOR_TORCH_INDEX:-}
recreate=
while [ $# -gt 0 ]; do
  case "$1" in
    --torch-index) [ $# -ge 2 ] || { echo "setup: --torch-index needs a URL" >&2; exit 2; }; torch_index=$2; shift 2 ;;
    --torch-index=*) torch_index=${1#*=}; shift ;;
    --recreate) recreate=1; shift ;;
    -h|--help) sed -n '2,10s/^# \{0,1\}//p' "$0"; exit 0 ;;
    *) echo "setup: unknown option '$1'; known: --torch-index URL, --recreate" >&2; exit 2 ;;
  esac
done

find_python() {
  local candidate
  for candidate in ${FLEXFLOOR_PYTHON:-} python3.11 python3 python; do
    if command -v "$candidate" >/dev/null && "$candidate" - <<'PY' 2>/dev/null; then
import sys
sys.exit(sys.version_info[:2] != (3, 11))
PY
      command -v "$candidate"
      return
    fi
  done
  echo "setup: needs Python 3.11 (the CPU profile is pinned for it); set FLEXFLOOR_PYTHON to its path" >&2
  exit 1
}

python=$(find_python)
stamp=$({ cat pyproject.toml constraints/cpu.txt scripts/setup.sh; echo "$torch_index $PWD"; "$python" -V; } | sha256sum | cut -d' ' -f1)
if [ -z "$recreate" ] && [ "$(cat .venv/flexfloor.stamp 2>/dev/null)" = "$stamp" ]; then
  exit 0
fi

need_kib=$((10 * 1024 * 1024))
[ -n "$torch_index" ] && need_kib=$((5 * 1024 * 1024))
free_kib=$(df -Pk . | awk 'NR==2 {print $4}')
if [ "$free_kib" -lt "$need_kib" ] && [ ! -d .venv ]; then
  echo "setup: $((free_kib / 1048576)) GiB free here, $((need_kib / 1048576)) GiB needed for .venv and pip's cache." >&2
  echo "       Free some space, or take torch's CPU build with --torch-index (about 4 GiB in all)." >&2
  exit 1
fi

log() { printf 'setup [%3ds] %s\n' "$SECONDS" "$*"; }
log "making .venv with $("$python" -V) (about 2 minutes with a fast network; $((free_kib / 1048576)) GiB free)"
[ -n "$recreate" ] && rm -rf .venv
[ -x .venv/bin/python ] || "$python" -m venv .venv
pip() { .venv/bin/python -m pip --disable-pip-version-check --quiet --no-input "$@" 2> >(grep -v '^WARNING: Location' >&2); }

pip install --upgrade 'pip>=24' 'setuptools>=77' wheel
log "torch"
if [ -n "$torch_index" ]; then
  pip install --index-url "$torch_index" --constraint constraints/cpu.txt torch
else
  pip install --constraint constraints/cpu.txt torch
fi
log "dependencies of SGLang on CPU, Megatron-Core, tools"
# setuptools warns of every editable install; what it warns of cannot happen from this folder.
PYTHONWARNINGS=ignore pip install --constraint constraints/cpu.txt --editable '.[cpu,dev]'
log "SGLang, torchvision and mbridge without their own pins"
pip install --constraint constraints/cpu.txt --no-deps sglang==0.5.23 torchvision mbridge
echo "$stamp" > .venv/flexfloor.stamp
log "done: .venv ($(du -sh .venv | cut -f1))"
