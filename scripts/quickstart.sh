#!/usr/bin/env bash
# Sets everything up and runs the main job: RL of a tiny MoE on real SGLang (4 expert-parallel ranks) and real
# Megatron-Core (2 ranks), on a machine without a GPU. About 10 minutes on 2 cores after the set-up.
#
#   scripts/quickstart.sh [--torch-index URL] [Hydra overrides ...]
#
# Overrides go to flexfloor-train, e.g. `scripts/quickstart.sh seed=1 num_steps=10`.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

setup_args=()
while [ $# -gt 0 ]; do
  case "$1" in
    --torch-index) [ $# -ge 2 ] || { echo "quickstart: --torch-index needs a URL" >&2; exit 2; }; setup_args+=("$1" "$2"); shift 2 ;;
    --torch-index=*|--recreate) setup_args+=("$1"); shift ;;
    -h|--help) sed -n '2,8s/^# \{0,1\}//p' "$0"; exit 0 ;;
    *) break ;;
  esac
done
scripts/setup.sh ${setup_args[@]+"${setup_args[@]}"}
exec .venv/bin/flexfloor-train experiment=quickstart "$@"
