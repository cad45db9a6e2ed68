#!/usr/bin/env bash
# Builds the image of ./Dockerfile, step by step, where no Docker engine runs: buildah carries the steps out in a chroot, on
# a plain Debian root that debootstrap makes. Then the service is started from the image's own root and asked.
#
#   sudo apt-get install buildah debootstrap && sudo deploy/prove_image.sh [work folder]
#
# EXTRA_BUILD may hold more options for `buildah bud` (the volumes and settings of a private package index, say).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
work=${1:-$(mktemp -d)}
mkdir -p "$work"
buildah() { command buildah --root "$work/storage" --runroot "$work/run" --storage-driver vfs "$@"; }

[ -x "$work/root/usr/bin/apt-get" ] || debootstrap --variant=minbase --include=ca-certificates bookworm "$work/root"
base=$(buildah from scratch)
buildah copy -q "$base" "$work/root" / >/dev/null
buildah commit -q "$base" docker.io/library/debian:bookworm-slim >/dev/null
# shellcheck disable=SC2086 # several options
buildah bud --format docker --isolation chroot --pull-never -q ${EXTRA_BUILD:-} -t rlvr .
made=$(buildah from --pull-never localhost/rlvr)
root=$(buildah mount "$made")
echo "built: $(du -sh --apparent-size "$root" | cut -f1) in $root"

port=${PORT:-3935}
key=proof-$RANDOM$RANDOM$RANDOM
env -i /usr/sbin/chroot --userspec=10001:10001 "$root" /usr/bin/env PATH=/opt/rlvr/bin:/usr/bin:/bin HOME=/state \
    HOST=127.0.0.1 PORT="$port" RLVR_STATE=/state RLVR_API_KEYS="$key" sh -c 'cd /state && exec rlvr serve' &
server=$!
trap 'kill $server 2>/dev/null || true' EXIT
for _ in $(seq 100); do
    if curl -fsS -H "Authorization: Bearer $key" "http://127.0.0.1:$port/health" 2>/dev/null; then
        echo
        echo "the service of the image answers"
        exit 0
    fi
    sleep 0.1
done
echo "the service of the image did not answer within 10 s" >&2
exit 1
