"""Where popvlm keeps what takes long to make: models that were put together, and plans that were calibrated."""

import os
from pathlib import Path


def folder() -> Path:
    """`POPVLM_CACHE`, by default `~/.cache/popvlm`."""
    return Path(os.environ.get("POPVLM_CACHE") or Path.home() / ".cache" / "popvlm")
