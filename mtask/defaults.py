"""Where mtask connects to if nothing says otherwise."""

DEFAULT_DATABASE = "mtask"
DEFAULT_URI = "mongodb://127.0.0.1:27017/?directConnection=false"
