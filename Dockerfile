# One node in a container:
#   docker build -t noloco-node .
#   docker run -p 31337:31337 -v noloco:/data noloco-node \
#       run /app/configs/tiny.yaml --host 0.0.0.0 --port 31337 --initial-peers /ip4/…/tcp/…/p2p/…
#
# For a GPU, name PyTorch's wheel index for its CUDA version and start with `docker run --gpus all`:
#   docker build --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu128 -t noloco-node:cuda .
FROM python:3.11-slim

ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu

RUN useradd --create-home --uid 1000 node && mkdir /data && chown node:node /data
WORKDIR /app

COPY constraints.txt ./
RUN pip install --no-cache-dir --index-url "${TORCH_INDEX}" torch=="$(sed -n 's/^torch==//p' constraints.txt)"

COPY pyproject.toml README.md LICENSE ./
COPY noloco_node ./noloco_node
RUN pip install --no-cache-dir -c constraints.txt .
COPY configs ./configs

USER node
# Run folders are relative to the working folder: what a node keeps (identity, events, weights) lands in the volume.
VOLUME /data
WORKDIR /data
EXPOSE 31337
ENTRYPOINT ["noloco-node"]
CMD ["--help"]
