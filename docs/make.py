"""Make the documents that are made from code: `make docs`. Each maker is a program of its own in this folder."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

HERE = Path(__file__).parent


def main() -> None:
    sys.path.insert(0, str(HERE.parent))
    for maker in sorted(HERE.glob("make_*.py")):
        print(f"docs: {maker.name}", flush=True)
        runpy.run_path(str(maker), run_name="__main__")


if __name__ == "__main__":
    main()
