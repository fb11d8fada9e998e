# Both services on a CPU, from the packages that `make demo` and `make test` use.
#
#   docker build -f deploy/docker/cpu.Dockerfile --target draft-trainer -t slipstream/draft-trainer:cpu .
#   docker build -f deploy/docker/cpu.Dockerfile --target rollout-server -t slipstream/rollout-server:cpu .
#   docker build -f deploy/docker/cpu.Dockerfile --target demo -t slipstream/demo:cpu .
#
# The targets share every layer; they differ in what they start. Name the base by its digest
# (--build-arg PYTHON=python@sha256:...) if you do not trust a tag to stay the same.
ARG PYTHON=python:3.11.14-slim-bookworm

FROM ${PYTHON} AS build
# An index with CPU builds of torch saves gigabytes; pip reads this variable. Names no secret.
ARG PIP_EXTRA_INDEX_URL=""
ENV PATH=/opt/slipstream/bin:$PATH PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /build
# The packages first: they change less often than the code. As in the Makefile, without what only
# developers run. Where no index has torch's CPU build, its CUDA build comes with CUDA's packages.
COPY rollout_server/install_cpu.py rollout_server/install_cpu.py
COPY deploy/requirements deploy/requirements
RUN python -m venv /opt/slipstream && python rollout_server/install_cpu.py
COPY pyproject.toml README.md LICENSE ./
COPY proto proto
COPY draft_trainer draft_trainer
COPY policy_bridge policy_bridge
COPY rollout_server rollout_server
# Releases name the commit that made them; there is no .git here to ask.
ARG COMMIT=""
RUN echo "${COMMIT}" >proto/slipstream/_commit \
    && python -m pip install --quiet --no-deps --no-build-isolation --no-index .

FROM ${PYTHON} AS base
# vLLM links libnuma; its CPU kernels and the trainer's are compiled at the first start.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ libnuma1 \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 10001 slipstream \
    && install --directory --owner=10001 --group=10001 /var/lib/slipstream
COPY --from=build /opt/slipstream /opt/slipstream
# Nothing is fetched from a model hub: models are mounted. /tmp is what a read-only root leaves for
# caches.
ENV PATH=/opt/slipstream/bin:$PATH HOME=/tmp PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
# By number: Kubernetes' runAsNonRoot cannot look a name up.
USER 10001:10001
WORKDIR /var/lib/slipstream

FROM base AS draft-trainer
EXPOSE 50051 9464
HEALTHCHECK --interval=15s --timeout=6s --start-period=60s --retries=3 \
    CMD ["python", "-m", "slipstream.serving.server", "127.0.0.1:50051"]
ENTRYPOINT ["draft-trainer"]
CMD ["serve", "--config", "/etc/slipstream/trainer.toml"]

FROM base AS rollout-server
EXPOSE 8000 50061
# Loading a model takes minutes; SERVING means that the engine can generate.
HEALTHCHECK --interval=15s --timeout=6s --start-period=600s --retries=3 \
    CMD ["python", "-m", "slipstream.serving.server", "127.0.0.1:50061"]
ENTRYPOINT ["rollout-server"]
CMD ["--help"]

# The tiny policy of `make demo` and its draft, for the demonstrations in deploy/.
FROM base AS demo
COPY examples /opt/demo/examples
ENV PYTHONPATH=/opt/demo
HEALTHCHECK NONE
CMD ["python", "-m", "examples.torch_loop.train", "--help"]
