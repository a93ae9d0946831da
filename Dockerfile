# syntax=docker/dockerfile:1
#
# The nsq command in a small image, for a user without rights.
#
#   docker build -t nsqtools .
#   docker run --rm -i nsqtools pub -t clicks --nsqd-tcp-address nsqd:4150 < clicks.log
#   docker build -t nsqtools:spark --build-arg EXTRAS=spark,spark-java .
#   docker build -t nsqtools:nsqd --target nsqd .
#
# Only the target nsqd has a HEALTHCHECK: it is the only one that serves, and can be asked. The
# others do one job and end, and their exit status says how.

ARG PYTHON=3.13

FROM python:${PYTHON}-slim AS build
# The extras of the package, with commas: fast, spark, spark-java
ARG EXTRAS="fast"
WORKDIR /src
COPY pyproject.toml README.md CHANGELOG.md LICENSE ./
COPY completions ./completions
COPY man ./man
COPY nsqtools ./nsqtools
# An environment without pip of its own. Bytecode is compiled once and for all: it is not compared
# with its source when it is loaded.
RUN --mount=type=cache,target=/root/.cache/pip \
    python -m venv --without-pip /opt/nsqtools \
    && python -m pip --python /opt/nsqtools/bin/python install --no-compile "/src${EXTRAS:+[$EXTRAS]}" \
    && /opt/nsqtools/bin/python -m compileall -q -j 0 --invalidation-mode unchecked-hash /opt/nsqtools/lib

FROM python:${PYTHON}-slim AS base
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
