# A node in a container, for GPUs and processors alike:
#   docker build -t noloco-node .
#   docker run --gpus all -p 31337:31337 -v noloco:/data noloco-node join /ip4/…/tcp/…/p2p/…
#
# PyPI's torch brings CUDA with it, and computes on the processor where no GPU is shown to the container. Without CUDA
# the image is several gigabytes smaller:
#   docker build --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cpu -t noloco-node:cpu .
#
# deploy/verify-image builds this file and runs a node from what comes out.
ARG BASE_IMAGE=python:3.11-slim

FROM ${BASE_IMAGE} AS build
ARG TORCH_INDEX=https://pypi.org/simple
ENV PIP_NO_CACHE_DIR=1 PIP_NO_COMPILE=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
ENV PIP_EXTRA_INDEX_URL=${TORCH_INDEX} PIP_CONSTRAINT=/build/constraints.txt
WORKDIR /build
RUN python3 -m venv /opt/noloco
COPY constraints.txt ./
RUN /opt/noloco/bin/pip install "torch==$(sed -n 's/^torch==//p' constraints.txt)"
COPY pyproject.toml README.md LICENSE ./
RUN /opt/noloco/bin/python -c "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['dependencies'], sep='\n')" > requirements.txt \
    && /opt/noloco/bin/pip install -r requirements.txt
COPY noloco_node ./noloco_node
RUN /opt/noloco/bin/pip install --no-deps . && /opt/noloco/bin/pip uninstall --yes pip
# What training never reads goes: tests, headers, static libraries, test programs. Then only what a node imports is
# compiled: of some 250 MB of compiled modules most belong to models of transformers that nobody asked for.
WORKDIR /opt/noloco
RUN find lib -type d \( -name tests -o -name test \) -prune -exec rm -rf {} + \
    && find lib -name '*.a' -delete \
    && find lib/python3*/site-packages/torch/bin -type f ! -name torch_shm_manager -delete \
    && rm -rf include lib/python3*/site-packages/torch/include lib/python3*/site-packages/pyarrow/include \
        lib/python3*/site-packages/pyarrow/*flight* \
        lib/python3*/site-packages/numpy/_core/include \
    && find lib -name __pycache__ -prune -exec rm -rf {} + \
    && bin/python -c "import datasets, noloco_node.diagnostics.doctor, noloco_node.launch.local_run, noloco_node.node.daemon, noloco_node.node.seed, noloco_node.diagnostics.status" \
    && bin/noloco-node config validate tiny

FROM ${BASE_IMAGE}
ARG VERSION=0.1.0
LABEL org.opencontainers.image.title="noloco-node" \
      org.opencontainers.image.description="One node of a decentralised training run: serves a pipeline stage, averages with random fellows" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.licenses="Apache-2.0"
# tini passes SIGTERM on to the node alone, which ends its p2pd itself, after the work under way is finished.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends tini \
    && rm -rf /var/lib/apt/lists/* /var/cache/apt /var/cache/debconf/*-old /var/log/*.log /var/log/apt \
    && useradd --uid 1000 --home-dir /data --no-create-home --shell /usr/sbin/nologin node \
    && install --directory --owner=node --group=node /data
COPY --from=build /opt/noloco /opt/noloco
ENV PATH=/opt/noloco/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    XDG_CACHE_HOME=/data/cache \
    HF_HOME=/data/cache/huggingface \
    MPLCONFIGDIR=/data/cache/matplotlib \
    NOLOCO_NODE_HOST=0.0.0.0 \
    NOLOCO_NODE_PORT=31337 \
    NOLOCO_NODE_METRICS_HOST=0.0.0.0 \
    NOLOCO_NODE_METRICS_PORT=9100
USER 1000:1000
# Run folders are relative to the working folder: identity, checkpoints, events and caches land in the volume.
VOLUME /data
WORKDIR /data
EXPOSE 31337 9100
STOPSIGNAL SIGTERM
# Alive, not ready: a volunteer that waits for a run must not be started again.
HEALTHCHECK --interval=30s --timeout=5s --start-period=120s --retries=3 CMD ["noloco-node", "health"]
ENTRYPOINT ["/usr/bin/tini", "--", "noloco-node"]
CMD ["--help"]
