#!/usr/bin/env bash
# Starts the service, with settings from the environment and whatever options are given:
#
#   PORT=3035 LLM_ENDPOINT=http://localhost:3031/generate ./scripts/start-rlvr-service.sh
#   ./scripts/start-rlvr-service.sh --demo
#
# Uses the clone's own .venv (`make setup`) where there is one, else the `rlvr` that is installed.
set -euo pipefail
clone="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
if [[ -x "$clone/.venv/bin/rlvr" ]]; then
    exec "$clone/.venv/bin/rlvr" serve "$@"
elif command -v rlvr > /dev/null; then
    exec rlvr serve "$@"
fi
echo 'rlvr is not installed: run `make setup` in the clone, or pip install "rlvr[serve]"' >&2
exit 127
