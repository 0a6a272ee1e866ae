#!/usr/bin/env bash
# verl's own trainer against the wheel of this tree, in an environment of its own (about 3 GB).
#   VENV=/some/folder tests/frameworks/verl/run.sh [pytest arguments]
set -euo pipefail
ROOT=$(cd "$(dirname "$0")/../../.." && pwd)
VENV=${VENV:-$ROOT/build/venv-verl}
export GOMP_SPINCOUNT=${GOMP_SPINCOUNT:-10000}
# Ray starts dozens of processes, and each would compile all that it imports.
unset PYTHONDONTWRITEBYTECODE
WHEELS=$(mktemp -d)
trap 'rm -rf "$WHEELS"' EXIT
test -x "$VENV/bin/python" || "${PYTHON:-python3}" -m venv "$VENV"
"$VENV/bin/python" -m pip wheel -q --no-deps --wheel-dir "$WHEELS" "$ROOT"
"$VENV/bin/python" -m pip install -q --no-compile "${TORCH:-torch==2.13.0}" pytest pytest-timeout \
  "$(echo "$WHEELS"/specrollout-*.whl)[verl]"
# The same version is installed already where the environment is used again.
"$VENV/bin/python" -m pip install -q --no-deps --force-reinstall "$WHEELS"/specrollout-*.whl
cd "$ROOT/tests/frameworks/verl" # from the root, the packages' sources would hide the wheel's
exec "$VENV/bin/python" -m pytest --rootdir "$PWD" --confcutdir "$PWD" -c /dev/null -q --durations=0 "$@"
