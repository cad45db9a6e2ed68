# What KubeRay needs on top of an image with rlvr and torch: Ray's job server, and wget for the probes of its pods.
# Not yet built. From the root of a clone:
#
#   docker build -t rlvr:train --build-arg EXTRAS=train,ray .
#   docker build -t rlvr:ray -f deploy/ray.Dockerfile .
FROM rlvr:train
USER root
COPY constraints.txt /tmp/constraints.txt
RUN apt-get update && apt-get install -y --no-install-recommends python3-pip wget && rm -rf /var/lib/apt/lists/* \
    && python3 -m pip --python /opt/rlvr/bin/python install --no-cache-dir -c /tmp/constraints.txt "ray[default]"
USER rlvr
