#!/bin/sh
# On the machine with the card, from the repository's root: the wheels that were carried there, and the package by its import
# name, into a folder of their own; nothing of the machine's Python is changed. Then: export PYTHONPATH=build/gpu-site
set -eu
wheels=${WHEELS:-build/gpu-wheels}
site=${SITE:-build/gpu-site}
rm -rf "$site"
mkdir -p "$site"
if ls "$wheels"/*.whl >/dev/null 2>&1; then
    "${PYTHON:-python3}" -m pip install --quiet --no-index --no-deps --no-compile --target "$site" "$wheels"/*.whl
else
    echo "no wheels in $wheels: whatever this Python has must do" >&2
fi
ln -s "$(pwd)" "$site/caesura"
