#!/usr/bin/env bash
# Sets everything up and runs every check: lint, types, import rules, docs, unit and integration tests.
#
#   scripts/test.sh [--full] [--unit] [--torch-index URL] [pytest arguments ...]
#
#   --full   also the long tests (marker `full`)
#   --unit   only lint, types, docs and unit tests (seconds)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

setup_args=()
marks="not full and not gpu"
paths=(tests)
while [ $# -gt 0 ]; do
  case "$1" in
    --torch-index) [ $# -ge 2 ] || { echo "test: --torch-index needs a URL" >&2; exit 2; }; setup_args+=("$1" "$2"); shift 2 ;;
    --torch-index=*|--recreate) setup_args+=("$1"); shift ;;
    --full) marks="not gpu"; shift ;;
    --unit) paths=(tests/unit); shift ;;
    -h|--help) sed -n '2,8s/^# \{0,1\}//p' "$0"; exit 0 ;;
    *) break ;;
  esac
done
scripts/setup.sh ${setup_args[@]+"${setup_args[@]}"}

# Nothing but the report page's tests needs it, and they say so where it is missing.
case "${paths[0]}" in tests/unit) ;; *) scripts/browser.sh >/dev/null || true ;; esac

# Daemons may lie outside a user's PATH. pytest names the skipped tests once more at its end.
has() { (PATH="$PATH:/usr/sbin" && command -v "$1" >/dev/null); }
if [ "${paths[0]}" = tests ] && ! { has slurmctld && has slurmd && has munged; }; then
  echo "**** SLURM is not installed: tests/integration/slurm is SKIPPED, the batch scripts are NOT TESTED." >&2
  echo "**** To test them: apt-get install -y --no-install-recommends slurm-wlm munge (no service is needed)" >&2
fi

step() { printf '\n== %s\n' "$*"; "$@"; }
export PATH="$PWD/.venv/bin:$PATH"
step ruff check .
step mypy
step lint-imports
# Refuses links that lead nowhere and pages that are in no menu; with --quiet it would not count them. The theme
# advertises its successor unless told not to.
export NO_MKDOCS_2_WARNING=1
step mkdocs build --strict
if [ "$#" -gt 0 ] || [ "${paths[0]}" != tests ]; then
  step pytest -m "$marks" "${paths[@]}" "$@"
else
  # Unit tests share the cores; the others start servers that want the machine for themselves.
  step pytest -m "$marks" -n logical tests/unit
  step pytest -m "$marks" --durations=15 --ignore=tests/unit tests
fi
