#!/bin/sh
# Builds cpu.Dockerfile without a Docker daemon or an image registry, and starts the result.
# Needs root on Debian, with `apt-get install buildah debootstrap`. Ten minutes, 20 GiB of disk.
#
#   sh deploy/docker/prove.sh FOLDER
#
# Debian's own Python stands in for the base image. PIP_CONF, a pip.conf, and WHEELS, a folder that
# it may name, are seen by pip inside, where the machine needs them.
set -eu
folder=$(mkdir -p "$1" && cd "$1" && pwd)
cd "$(dirname "$0")/../.."

buildah() {
	command buildah --root "$folder/images" --runroot "$folder/run" "$@"
}

if ! buildah images --quiet localhost/python >/dev/null 2>&1; then
	debootstrap --variant=minbase --include=python3,python3-venv,python3-pip,ca-certificates \
		bookworm "$folder/rootfs" >"$folder/debootstrap.log"
	ln -sf python3 "$folder/rootfs/usr/bin/python"
	base=$(buildah from scratch)
	buildah copy --quiet "$base" "$folder/rootfs" /
	buildah commit --quiet "$base" localhost/python
	buildah rm "$base"
	rm -rf "$folder/rootfs"
fi

# With layers, so that the next run reuses them.
buildah bud --isolation chroot --network host --layers \
	--volume /etc/ssl/certs:/etc/ssl/certs:ro \
	${PIP_CONF:+--volume "$PIP_CONF:/etc/pip.conf:ro"} ${WHEELS:+--volume "$WHEELS:$WHEELS:ro"} \
	--build-arg PYTHON=localhost/python --build-arg COMMIT="$(git rev-parse --short=12 HEAD)" \
	--file deploy/docker/cpu.Dockerfile --target demo --tag localhost/slipstream-demo .

box=$(buildah from localhost/slipstream-demo)
trap 'buildah rm "$box"' EXIT
inside() {
	buildah run --isolation chroot "$box" -- "$@"
}
# Checks the user, the packages, and that both services and the demo start.
test "$(inside id -u)" = 10001
inside python -c "from slipstream.metrics import code_version; print(code_version())"
inside draft-trainer serve --help >/dev/null
inside rollout-server serve --help=slipstream | grep -q -- --control-port
inside python -m examples.torch_loop.train --help >/dev/null
# A service that listens on loopback of the host, probed as the image's health check does.
inside sh -c '
	demo=/opt/demo/examples/arithmetic_grpo
	printf "[server]\nport = 0\nmetrics_port = 0\n[draft]\ninitial = \"%s/draft\"\nregistry = \"releases\"\n" \
		$demo >/tmp/trainer.toml
	draft-trainer serve --config /tmp/trainer.toml >/tmp/out & server=$!
	until address=$(sed -n "s/.*ready: grpc=\([^ ]*\).*/\1/p" /tmp/out) && [ -n "$address" ]; do
		kill -0 $server || exit 1
		sleep 1
	done
	python -m slipstream.serving.server "$address" && kill $server && wait $server'
echo "the image is sound"
