# dflash-server in a container, for the CPU unless the arguments say otherwise. See docs/running.md.
#
#   docker build -t dflash-server .
#
# For NVIDIA GPUs (the host needs the NVIDIA Container Toolkit):
#
#   docker build -t dflash-server:cuda . \
#     --build-arg BUILD_IMAGE=nvidia/cuda:12.6.3-devel-ubuntu24.04 \
#     --build-arg RUN_IMAGE=nvidia/cuda:12.6.3-runtime-ubuntu24.04 \
#     --build-arg CMAKE_ARGS="-DGGML_CUDA=on -DGGML_NATIVE=off"
#
# Both images must be of one Debian or Ubuntu, with Python 3.11 or later.
ARG BUILD_IMAGE=debian:bookworm-slim
ARG RUN_IMAGE=debian:bookworm-slim

# ---- the compiler's stage: llama.cpp is built from source here, and left behind with its tools
FROM ${BUILD_IMAGE} AS build
ARG DEBIAN_FRONTEND=noninteractive
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3 python3-venv g++ \
    && rm -rf /var/lib/apt/lists/*
# Not for the processor that builds, which may know more than the one that runs.
ARG CMAKE_ARGS="-DGGML_NATIVE=off"
ENV CMAKE_ARGS=${CMAKE_ARGS}
WORKDIR /source
# What the package needs first: it takes the minutes, and changes seldom. A change of the code alone
# is built in seconds from here.
COPY pyproject.toml ./
RUN python3 -m venv /opt/dflash \
    && python3 -c 'import tomllib; project = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
print(*project["dependencies"], *project["optional-dependencies"]["otel"], sep="\n")' > needed.txt \
    && /opt/dflash/bin/pip install --no-cache-dir -r needed.txt
COPY README.md LICENSE ./
COPY dflash_trio ./dflash_trio
RUN /opt/dflash/bin/pip install --no-cache-dir '.[otel]'

# ---- what runs
FROM ${RUN_IMAGE}
ARG DEBIAN_FRONTEND=noninteractive
# libgomp1: llama.cpp's threads.
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3 libgomp1 \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 10001 --user-group --no-create-home --shell /usr/sbin/nologin dflash
COPY --from=build /opt/dflash /opt/dflash
ENV PATH=/opt/dflash/bin:${PATH} PYTHONUNBUFFERED=1
USER 10001
VOLUME ["/models"]
EXPOSE 8080
STOPSIGNAL SIGTERM
# 503 while it loads, which counts only after the start period, and when no model can serve.
# With --tls-cert it has to be another: docs/running.md has one.
HEALTHCHECK --interval=30s --timeout=5s --start-period=10m --retries=3 \
    CMD ["python3", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8080/health', timeout=4)"]
ENTRYPOINT ["dflash-server", "--host", "0.0.0.0", "--port", "8080"]
CMD ["--help"]
