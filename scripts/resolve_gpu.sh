#!/usr/bin/env bash
# Resolves the `gpu` extra for Python 3.11 and 3.12 without installing it, and writes constraints/gpu.txt.
# transformer-engine's torch part exists as source only and needs a CUDA toolkit to be looked at, so it is left out.
#
#   scripts/resolve_gpu.sh [--check]      --check: only resolve, leave constraints/gpu.txt as it is
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" --quiet --disable-pip-version-check install 'uv>=0.5' 2>/dev/null
"$work/venv/bin/python" - <<'PY' | sed 's/\[pytorch\]//' > "$work/gpu.in"
import tomllib

with open("pyproject.toml", "rb") as file:
    project = tomllib.load(file)["project"]
print("\n".join(project["dependencies"] + project["optional-dependencies"]["gpu"]))
PY
for version in 3.11 3.12; do
  "$work/venv/bin/uv" pip compile --quiet --no-header --no-annotate --no-emit-index-url \
    --python-version "$version" --output-file "$work/$version.txt" "$work/gpu.in"
  echo "Python $version: $(grep -E '^(sglang|torch|megatron-core|transformer-engine)==' "$work/$version.txt" | tr '\n' ' ')"
done
[ "${1:-}" = --check ] && exit 0
{
  echo "# What the gpu extra resolved to on Python 3.11 (scripts/resolve_gpu.sh); not yet run on a GPU."
  cat "$work/3.11.txt"
} > constraints/gpu.txt
