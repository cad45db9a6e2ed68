# The service (`rlvr serve`) in an image: Debian's Python, a virtual environment, one user without rights.
#
#   docker compose up                                    # service, PostgreSQL, Prometheus: see compose.yaml
#   docker build -t rlvr .                               # text endpoints: no torch in the image
#   docker build -t rlvr --build-arg EXTRAS=serve,postgres,judge,math,rules,train,tinker .
#                                                        # with an engine
#
# deploy/prove_image.sh runs these very steps on a Debian root where no Docker engine is to be had.
FROM debian:bookworm-slim AS build
ARG EXTRAS=service,postgres,judge,math,rules
RUN apt-get update && apt-get install -y --no-install-recommends python3 python3-venv && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/rlvr
WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY rlvr ./rlvr
RUN /opt/rlvr/bin/pip install --no-cache-dir --disable-pip-version-check -c constraints.txt ".[${EXTRAS}]" \
    && /opt/rlvr/bin/pip uninstall --yes setuptools pip \
    && find /opt/rlvr -type d -name tests -prune -exec rm -r {} +

FROM debian:bookworm-slim
RUN apt-get update && apt-get install -y --no-install-recommends python3 && rm -rf /var/lib/apt/lists/* \
    && useradd --system --uid 10001 --create-home --home-dir /state rlvr
COPY --from=build /opt/rlvr /opt/rlvr
ENV PATH=/opt/rlvr/bin:$PATH PYTHONUNBUFFERED=1 HOST=0.0.0.0 PORT=3035 RLVR_STATE=/state
USER rlvr
WORKDIR /state
VOLUME /state
EXPOSE 3035
HEALTHCHECK --interval=10s --timeout=3s --start-period=10s CMD ["python3", "-c", \
    "import os, urllib.request as u; u.urlopen(f'http://127.0.0.1:{os.environ[\"PORT\"]}/health/live', timeout=2)"]
# A container is reached from outside, so an API key is needed: RLVR_API_KEYS.
CMD ["rlvr", "serve"]
