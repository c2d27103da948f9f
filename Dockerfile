# A worker: docker build -t mtask . && docker run mtask PACKAGE.MODULE:APP --uri URI
# The web page: docker run --entrypoint mtask-web mtask --host 0.0.0.0 --uri URI, with MTASK_WEB_TOKENS
FROM python:3.12-slim

WORKDIR /service
COPY pyproject.toml README.md LICENSE ./
COPY mtask ./mtask
RUN pip install --no-cache-dir '.[web]' && useradd --system --uid 10001 mtask
COPY examples ./examples

# The folder that apps are imported from.
ENV PYTHONPATH=/service PYTHONUNBUFFERED=1
USER mtask
ENTRYPOINT ["mtask-worker"]
