"""The REST API of `mtask web`: FastAPI over the asyncio client. It needs the extra `web`."""
