"""The version, as the package's metadata tells it."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("mtask")
except PackageNotFoundError:  # a source tree that is not installed
    __version__ = "0+unknown"
