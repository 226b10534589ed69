# ftcli for NVIDIA GPUs. The CUDA libraries are those that torch's wheels bring; the driver is the host's.
#
#   docker build -t ftcli .
#   docker run --rm --init --gpus all --stop-timeout 600 -v "$PWD:/work" ftcli train my.yaml
#
FROM python:3.11.14-slim-bookworm AS build
WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY ftcli ftcli
COPY kernels kernels
COPY recipes recipes
RUN python -m pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:3.11.14-slim-bookworm
# Triton compiles a small launcher for each kernel: a C compiler and the C library's headers. Debian's fixes are wanted
# as they come, so their versions are not pinned; everything of Python is.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev git \
    && rm -rf /var/lib/apt/lists/*
COPY constraints.txt /tmp/constraints.txt
COPY --from=build /wheels /tmp/wheels
RUN python -m pip install --no-cache-dir -c /tmp/constraints.txt /tmp/wheels/*.whl \
    bitsandbytes==0.50.2 gguf compressed-tensors tensorboard math-verify s3fs aiohttp \
    && rm -rf /tmp/wheels /tmp/constraints.txt \
    && useradd --create-home --uid 10001 ftcli \
    && install --directory --owner ftcli /work
ENV NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    PYTHONUNBUFFERED=1
USER 10001
WORKDIR /work
# Without a GPU in sight: asking the GPU would take half a gigabyte of it from the run that is going on.
HEALTHCHECK --interval=10m --timeout=2m --start-period=1m CMD ["env", "CUDA_VISIBLE_DEVICES=", "ftcli", "doctor", "--quiet"]
ENTRYPOINT ["ftcli"]
CMD ["--help"]
