"""Draw docs/live.svg, the live view as the README shows it, from a run that was recorded in docs/live/.

    python docs/make_live.py                                           draw it again
    python docs/make_live.py smollm2-135m --file docs/live/prompt.txt  record `dspark run` with these arguments, then draw

Nothing is invented: rounds and text come from the events, names, dates and prefill from the run's JSON object.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

from dspark.telemetry.live import svg
from dspark.telemetry.panel import Facts
from dspark.telemetry.sinks import read_events

HERE = Path(__file__).parent
EVENTS, RUN, PICTURE = HERE / "live" / "events.jsonl", HERE / "live" / "run.json", HERE / "live.svg"


def record(args: list[str]) -> None:
    """Run `dspark run` with `args` and keep its events and its object, the command that was typed among them."""
    command = [sys.executable, "-m", "dspark", "run", *args, "--events", str(EVENTS), "--json", "--live", "off"]
    found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    RUN.write_text(json.dumps({"command": shlex.join(["dspark", "run", *args]), **found}, indent=1) + "\n")


def draw() -> str:
    """The picture of the recorded run."""
    about = json.loads(RUN.read_text())
    return svg(
        read_events(EVENTS),
        Facts(about["target"], about["drafter"], about["context_length"]),
        prompt_tokens=about["prompt_tokens"],
        prefill_s=about["prefill_s"],
        command=about["command"],
    )


if __name__ == "__main__":
    if len(sys.argv) > 1:
        record(sys.argv[1:])
    PICTURE.write_text(draw())
