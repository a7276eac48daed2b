"""Where dspark keeps what it fetched for this user: `DSPARK_CACHE`, else the platform's cache folder."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def cache_dir() -> Path:
    """The user's cache folder for dspark; nothing is created by asking.

    `DSPARK_CACHE` decides; else `~/Library/Caches/dspark` on macOS, else `$XDG_CACHE_HOME/dspark` or `~/.cache/dspark`.
    """
    if chosen := os.environ.get("DSPARK_CACHE", "").strip():
        return Path(chosen).expanduser()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "dspark"
    xdg = os.environ.get("XDG_CACHE_HOME", "").strip()
    # The XDG rules ask that a relative path is ignored.
    base = Path(xdg) if xdg and Path(xdg).is_absolute() else Path.home() / ".cache"
    return base / "dspark"
