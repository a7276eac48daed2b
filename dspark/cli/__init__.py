"""The command line. Nothing heavy is imported before a command runs."""

from __future__ import annotations

from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run `dspark` with these arguments (by default the process's) and return its exit code."""
    from dspark.cli.app import run_command

    return run_command(argv)


__all__ = ["main"]
