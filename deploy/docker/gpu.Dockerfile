# Both services on NVIDIA GPUs, on top of vLLM's own image: it has matching builds of
# torch, CUDA and vLLM, and rollout nodes usually have it already.
#
#   docker build -f deploy/docker/gpu.Dockerfile --target draft-trainer -t slipstream/draft-trainer:gpu .
#   docker build -f deploy/docker/gpu.Dockerfile --target rollout-server -t slipstream/rollout-server:gpu .
#   docker build -f deploy/docker/gpu.Dockerfile --target ray -t slipstream/ray:gpu .
ARG VLLM=vllm/vllm-openai:v0.32.0
ARG PYTHON=python:3.11.14-slim-bookworm

FROM ${PYTHON} AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /build
COPY deploy/requirements/cpu.lock ./
# The protobuf and the grpcio that run the wheel's generated code must not be older than it.
RUN awk '/^[^ ]/ { keep = /^(hatchling|editables|grpcio|grpcio-tools|protobuf|packaging|pathspec|pluggy|trove-classifiers|setuptools|typing-extensions)==/ } keep' cpu.lock >build.lock \
    && awk '/^[^ ]/ { keep = /^(grpcio|grpcio-health-checking|grpcio-reflection|protobuf|xxhash|tyro|typeguard|docstring-parser|matplotlib|contourpy|cycler|fonttools|kiwisolver|pyparsing)==/ } keep' cpu.lock >run.lock \
    && python -m pip install --quiet --no-deps --require-hashes -r build.lock
COPY deploy/requirements deploy/requirements
COPY pyproject.toml README.md LICENSE ./
COPY proto proto
COPY draft_trainer draft_trainer
COPY policy_bridge policy_bridge
COPY rollout_server rollout_server
# Releases name the commit that made them; there is no .git here to ask.
ARG COMMIT=""
RUN echo "${COMMIT}" >proto/slipstream/_commit \
    && python -m pip wheel --quiet --no-deps --no-build-isolation --no-index --wheel-dir wheels .

FROM ${VLLM} AS base
USER 0
# Not the whole lock: the packages of vLLM's image (torch, pydantic, starlette, rich ...) match its CUDA.
RUN --mount=type=bind,from=build,source=/build,target=/build \
    python3 -m pip install --no-cache-dir --quiet --no-deps --require-hashes -r /build/run.lock \
    && python3 -m pip install --no-cache-dir --quiet --no-deps /build/wheels/*.whl \
    && python3 -c "import draft_trainer.cli.main, rollout_server.cli, slipstream.serving.server, vllm" \
    && useradd --uid 10001 slipstream \
    && install --directory --owner=10001 --group=10001 /var/lib/slipstream
# /tmp is what a read-only root leaves for caches.
ENV HOME=/tmp PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
USER 10001:10001
WORKDIR /var/lib/slipstream

FROM base AS draft-trainer
EXPOSE 50051 9464
HEALTHCHECK --interval=15s --timeout=6s --start-period=60s --retries=3 \
    CMD ["python3", "-m", "slipstream.serving.server", "127.0.0.1:50051"]
ENTRYPOINT ["draft-trainer"]
CMD ["serve", "--config", "/etc/slipstream/trainer.toml"]

FROM base AS rollout-server
EXPOSE 8000 50061
HEALTHCHECK --interval=15s --timeout=6s --start-period=600s --retries=3 \
    CMD ["python3", "-m", "slipstream.serving.server", "127.0.0.1:50061"]
ENTRYPOINT ["rollout-server"]
CMD ["--help"]

# Ray's head and workers, which start rollout servers (deploy/ray).
FROM base AS ray
USER 0
# `ray up` copies its files with rsync, and starts the container with a shell in the place of vLLM's entry point.
# It sets up the head; the head's container sets up the workers by ssh. KubeRay to 1.5 probes with wget.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends openssh-client rsync wget \
    && rm -rf /var/lib/apt/lists/* \
    && python3 -m pip install --no-cache-dir --quiet "ray[default]==2.60.0"
USER 10001:10001
HEALTHCHECK NONE
ENTRYPOINT []
CMD ["ray", "--help"]
