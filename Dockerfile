# The nsq command in a small image, for a user without rights.
#
#   docker build -t nsqtools .
#   docker run --rm -i nsqtools pub -t clicks --nsqd-tcp-address nsqd:4150 < clicks.log
#   docker build -t nsqtools:spark --build-arg EXTRAS=standard,spark,spark-java .
#   docker build -t nsqtools:nsqd --target nsqd .
#
# Only the target nsqd has a HEALTHCHECK: it is the only one that serves, and can be asked. The
# others do one job and end, and their exit status says how.
#
# Packages are those of .ci/constraints.txt, by version and hash; .ci/lock renews it. The base image
# is named by a tag, which changes with the security updates of Debian and Python. For a build that
# can be repeated give it by digest, and renew that every month:
#
#   docker buildx imagetools inspect python:3.13-slim --format '{{.Manifest.Digest}}'
#   docker build --build-arg BASE=python:3.13-slim@sha256:... -t nsqtools .

ARG PYTHON=3.13
ARG BASE=python:${PYTHON}-slim

FROM ${BASE} AS build
# Extras of the package, with commas: standard, http, auth-regex, authd, mcp, parquet, delta, object-store, spark, spark-java
ARG EXTRAS="standard,http,auth-regex"
WORKDIR /src
COPY pyproject.toml README.md CHANGELOG.md LICENSE ./
COPY completions ./completions
COPY man ./man
COPY nsqtools ./nsqtools
COPY .ci/constraints.txt .ci/uv.txt ./
# An environment without pip of its own; uv compares the hashes of constraints, too. Bytecode is compiled once and for all: it is not compared
# with its source when it is loaded.
RUN --mount=type=cache,target=/root/.cache/pip \
    python -m pip install --no-compile --require-hashes --target /src/installer --requirement uv.txt \
    && python -m venv --without-pip /opt/nsqtools \
    && PYTHONPATH=/src/installer python -m uv pip install --no-cache \
        --python /opt/nsqtools/bin/python --constraint constraints.txt \
        --build-constraint constraints.txt "/src${EXTRAS:+[$EXTRAS]}" \
    && /opt/nsqtools/bin/python -m compileall -q -j 0 --invalidation-mode unchecked-hash /opt/nsqtools/lib

FROM ${BASE} AS base
ARG VERSION="unknown"
LABEL org.opencontainers.image.title="nsqtools" \
      org.opencontainers.image.description="One nsq command for the NSQ message queue" \
      org.opencontainers.image.licenses="MIT" \
      org.opencontainers.image.version="${VERSION}"
RUN useradd --uid 10001 --create-home --shell /usr/sbin/nologin nsq \
    && mkdir /data \
    && chown nsq:nsq /data
COPY --from=build /opt/nsqtools /opt/nsqtools
ENV PATH=/opt/nsqtools/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONSAFEPATH=1
USER 10001:10001
WORKDIR /data

FROM base AS nsqd
EXPOSE 4150 4151
HEALTHCHECK --interval=10s --timeout=5s --start-period=5s --retries=3 \
    CMD ["nsq", "ping", "--nsqd-http-address", "127.0.0.1:4151", "--quiet"]
ENTRYPOINT ["nsq", "nsqd"]
CMD ["--data-path=/data"]

FROM base AS nsq
ENTRYPOINT ["nsq"]
CMD ["--help"]
