# The worker: docker build -t mtask . && docker run --init -e MTASK_URI=URI mtask PACKAGE.MODULE:APP
# The web page: docker build --target web -t mtask-web . && docker run -e MTASK_URI=URI -e MTASK_WEB_TOKENS=JSON mtask-web
# Your own app: an image `FROM mtask` that copies it into /service. docs/operations.md tells more.

# What is needed to build stays in this stage.
FROM python:3.12-slim AS build
WORKDIR /build
COPY pyproject.toml README.md LICENSE ./
COPY mtask ./mtask
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .
# The extras of mtask, comma-separated or empty: --build-arg EXTRAS=web,motor
ARG EXTRAS=web
RUN python -m venv --without-pip /opt/mtask \
    && pip --python /opt/mtask/bin/python install --no-cache-dir --compile "$(echo /wheels/mtask-*.whl)${EXTRAS:+[$EXTRAS]}"

FROM python:3.12-slim AS runtime
# The number of the user, so that Kubernetes can tell that it is not root.
RUN useradd --system --uid 10001 --no-create-home --shell /usr/sbin/nologin mtask \
    && install --directory --owner=10001 /run/mtask /service
COPY --from=build /opt/mtask /opt/mtask
# PYTHONPATH: the folder that apps are imported from. The root file system may be read-only: nothing compiles at run time.
ENV PATH=/opt/mtask/bin:$PATH PYTHONPATH=/service PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
WORKDIR /service
USER 10001
STOPSIGNAL SIGTERM

FROM runtime AS web
EXPOSE 8787
HEALTHCHECK --interval=15s --timeout=5s --start-period=30s --retries=3 \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8787/healthz', timeout=4)"]
ENTRYPOINT ["mtask-web", "--host", "0.0.0.0", "--port", "8787"]

# The last stage is what `docker build` makes without --target.
FROM runtime AS worker
COPY examples ./examples
ENV MTASK_HEALTH_FILE=/run/mtask/health
HEALTHCHECK --interval=15s --timeout=5s --start-period=60s --retries=3 CMD ["mtask-health", "/run/mtask/health"]
ENTRYPOINT ["mtask-worker"]
