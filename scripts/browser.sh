#!/usr/bin/env bash
# Prints the path of a Chromium for the tests of the report page, and gets one first if there is none.
#
#   scripts/browser.sh
#
# Taken in this order: $FLEXFLOOR_CHROMIUM; a browser on PATH; .venv/chromium, which is unpacked from an npm package
# (x86_64, needs node and npm, no root: 70 MB to fetch, 220 MB on disk, about 20 seconds); as root on Debian and its
# kin apt's chromium (about 400 MB on disk, a minute).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

package=@sparticuz/chromium@153.0.0
sha256=20e5656fcdcf4118ede85edfb9d6bb9cc1bbb7ffb8b75622fffbcf36a835c3c0
folder=$PWD/.venv/chromium

find_browser() {
  local name
  if [ -n "${FLEXFLOOR_CHROMIUM:-}" ]; then
    echo "$FLEXFLOOR_CHROMIUM"
    return
  fi
  for name in chromium chromium-browser google-chrome-stable google-chrome "$folder/run"; do
    command -v "$name" && return
  done
  return 1
}

unpack_from_npm() {
  local work
  work=$(mktemp -d)
  trap 'rm -rf "$work"' RETURN
  (cd "$work" && npm pack --silent "$package") >/dev/null
  echo "$sha256  $(echo "$work"/*.tgz)" | sha256sum --check --quiet -
  tar -xzf "$work"/*.tgz -C "$work"
  mkdir -p "$work/chromium"
  node - "$work/package/bin" "$work/chromium" <<'JS'
const fs = require("fs"), zlib = require("zlib"), [from, to] = process.argv.slice(2);
for (const name of ["chromium", "al2023.tar", "fonts.tar", "swiftshader.tar"])
  fs.writeFileSync(`${to}/${name}`, zlib.brotliDecompressSync(fs.readFileSync(`${from}/${name}.br`)));
JS
  for archive in "$work"/chromium/*.tar; do tar -xf "$archive" -C "$work/chromium"; done
  rm "$work"/chromium/*.tar
  chmod +x "$work/chromium/chromium"
  # The package brings the libraries and a font, for a bare machine.
  cat > "$work/chromium/fonts.conf" <<XML
<?xml version="1.0"?><!DOCTYPE fontconfig SYSTEM "fonts.dtd">
<fontconfig><dir>/usr/share/fonts</dir><dir>$folder/fonts</dir><cachedir>$folder/font-cache</cachedir></fontconfig>
XML
  cat > "$work/chromium/run" <<'SH'
#!/bin/sh
here=$(dirname "$(readlink -f "$0")")
LD_LIBRARY_PATH="$here/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}" FONTCONFIG_PATH="$here" exec "$here/chromium" "$@"
SH
  chmod +x "$work/chromium/run"
  mkdir -p .venv
  rm -rf "$folder"
  mv "$work/chromium" "$folder"
}

find_browser && exit 0
if command -v npm >/dev/null && command -v node >/dev/null && [ "$(uname -sm)" = "Linux x86_64" ]; then
  unpack_from_npm || echo "browser: could not be taken from npm" >&2
fi
if ! find_browser >/dev/null && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
  { apt-get update && apt-get install -y --no-install-recommends chromium fonts-dejavu-core; } >&2 || true
fi
if ! find_browser; then
  echo "browser: none found, and none could be had without root (needs node and npm)." >&2
  echo "         Install Chromium or Chrome, or set FLEXFLOOR_CHROMIUM to its path." >&2
  exit 1
fi
