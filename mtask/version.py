"""The version of mtask, read from the metadata of the installed package."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("mtask")
except PackageNotFoundError:  # mtask runs from a source tree and is not installed
    __version__ = "0+unknown"
