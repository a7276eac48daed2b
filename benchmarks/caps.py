"""Derived, best fixed and adaptive cap against plain decoding: `python -m benchmarks.caps [RECIPE]`.

1. The cost curve of this machine: what is stored, or measured now (--fresh measures anyway).
2. For each set of prompts, acceptance traces of the target's own greedy answers, and rounds replayed on them at the curve's
   milliseconds: every fixed cap, the derived ones, the adaptive one, plain decoding. No noise of timing is in these figures.
   --json keeps traces and curve, and --replay FILE replays them in seconds, without a model; with --curve CALIBRATION.toml
   on another machine's curve. There also all kinds as sessions of one engine, the adaptive cap told --told CALIBRATION.toml
   in place of what rounds take, and the first drafted round behind others taking --waking MS longer.
3. With --pairs N, real sessions of the same four arms in turn, N times a prompt: medians of paired ratios.
4. With --varied N, real sessions of adaptive and plain in turn, N pairs on each of 40 varied prompts: the 95 % interval of each
   prompt's mean ratio, and how many lie wholly below 0.98.

Prints Markdown; --json keeps every figure.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import attrs

from benchmarks.cap_replays import FOOT, HEAD, in_a_row, line_of, row, stored_curve, stored_traces, to_dict
from dspark.blas import open_blas
from dspark.caps import AdaptiveCap
from dspark.errors import UserError

BOUND = 0.98
VARIED = Path(__file__).parent / "varied.txt"


def main() -> None:
    options = _options()
    if options.replay:
        _again(options)
    else:
        _measured(options)


def _measured(options: argparse.Namespace) -> None:
    open_blas()
    import dspark
    from dspark.bench.arms import greedy
    from dspark.calibrate.apply import apply, asked_of, label_of
    from dspark.calibrate.calibrator import calibrate
    from dspark.platform import machine

    recipe = dspark.load(options.recipe, options.set)
    engine = greedy(recipe.bind(calibration="off"))
    outcome = calibrate(
        engine, label_of(recipe, engine), asked=asked_of(recipe), again=options.fresh, progress=_progress
    )
    _progress()
    engine = apply(engine, outcome.calibration, outcome.path)
    here, costs = machine(), outcome.calibration.costs
    report: dict[str, Any] = {"command": shlex.join(["python", "-m", "benchmarks.caps", *sys.argv[1:]])}
    report |= {"machine": here._asdict(), "recipe": recipe.path, "date": time.strftime("%Y-%m-%d")}
    print(f"{here.chip}, {here.backend}, mlx {here.mlx}, BLAS {here.blas}, {report['date']}: `{report['command']}`\n")
    print(f"curve of {outcome.calibration.date}, measured in {outcome.calibration.seconds:.0f} s, {outcome.path}")
    for note in outcome.notes:
        print(f"note: {note}")
    report["curve"] = costs.to_dict()
    best = _replays(engine, costs, options, report)
    if options.pairs:
        _paired_sets(engine, costs, options, best, report)
    if options.varied:
        _varied(engine, options, report)
    if options.json:
        _keep(options.json, report)


def _keep(path: str, report: dict[str, Any]) -> None:
    Path(path).write_text(json.dumps(report) + "\n", encoding="utf-8")


def _again(options: argparse.Namespace) -> None:
    """Replay stored traces, on their own curve or on another one."""
    try:
        kinds, costs = stored_traces(options.replay)
        costs = stored_curve(options.curve) if options.curve else costs
        told = stored_curve(options.told) if options.told else costs
    except UserError as error:
        sys.exit(str(error))
    print(f"traces of {options.replay}, curve of {options.curve or options.replay}\n{HEAD}")
    rows, start = {}, start_for(costs)
    for name, traces in kinds.items():
        found = row(traces, costs, start)
        rows[name] = to_dict(found, traces)
        print(line_of(name, found), flush=True)
    print(FOOT)
    one = in_a_row(AdaptiveCap(start=start_for(told)), kinds, costs, told, options.waking)
    print("\nAs sessions of one engine, one after the other, times plain decoding (accepted length):")
    print("; ".join(f"{name} {found.ratio:.3f} ({found.accepted:.2f})" for name, found in one.items()))
    if options.json:
        _keep(options.json, {"curve": costs.to_dict(), "replays": rows})


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("recipe", nargs="?", default="smollm2-135m")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--fresh", action="store_true", help="measure the curve whatever is stored")
    parser.add_argument("--sets", default="chat,code,math,copy")
    parser.add_argument("--prompts", type=int, default=3, help="of each set")
    parser.add_argument("--tokens", type=int, default=96, help="of an answer, in traces and pairs of the sets")
    parser.add_argument("--pairs", type=int, default=0, help="real sessions of each arm on each prompt")
    parser.add_argument("--varied", type=int, default=0, help="pairs on each of the 40 varied prompts")
    parser.add_argument("--varied-tokens", type=int, default=32)
    parser.add_argument("--json", metavar="FILE", help="keep all figures, the traces and the curve")
    parser.add_argument("--replay", metavar="FILE", help="replay the traces of such a file; no model is loaded")
    parser.add_argument(
        "--curve", metavar="CALIBRATION.toml", help="with --replay: on this curve instead of the file's"
    )
    parser.add_argument(
        "--told", metavar="CALIBRATION.toml", help="with --replay: the curve that the adaptive cap goes by"
    )
    parser.add_argument("--waking", type=float, default=0.0, metavar="MS", help="with --replay: see above")
    return parser.parse_args()


# ---- replays --------------------------------------------------------------------------------------------------------


def _replays(engine: Any, costs: Any, options: argparse.Namespace, report: dict[str, Any]) -> dict[str, int]:
    """Print the table of replays and return the best fixed cap of each set."""
    from benchmarks.traces import record
    from dspark.bench.prompts import read_set

    start, rows, best = start_for(costs), {}, {}
    print(HEAD)
    for name in options.sets.split(","):
        traces = []
        for i, text in enumerate(read_set(name).prompts[: options.prompts]):
            _progress(i, options.prompts, f"traces of {name}")
            traces.append(record(engine, engine.encode(text), options.tokens))
        _progress()
        found = row(traces, costs, start)
        best[name], rows[name] = found.best, to_dict(found, traces)
        print(line_of(name, found), flush=True)
    print(FOOT)
    report["replays"] = rows
    return best


def start_for(costs: Any) -> int:
    """The cap that calibration derives while no text is known; for lookup alone the longest that it drafts, which is what an
    open cap allows."""
    from dspark.calibrate.calibrator import derived_for

    source = costs.sources[-1]
    return costs.longest(source) if source == "lookup" else derived_for(costs, source).cap


# ---- real sessions --------------------------------------------------------------------------------------------------


def with_cap(engine: Any, cap: Any) -> Any:
    """The engine under another cap; its sessions learn from one another and from no other engine's."""
    return attrs.evolve(engine, pipeline=attrs.evolve(engine.pipeline, cap=cap))


def decode_s(engine: Any, ids: tuple[int, ...], tokens: int) -> float:
    """Seconds a token from the end of prefill on."""
    with engine.open(ids, max_tokens=tokens) as session:
        for _ in session:
            pass
        return session.result.decode_s / max(session.result.generated_tokens, 1)


def _paired_sets(engine: Any, costs: Any, options: argparse.Namespace, best: dict[str, int], report: Any) -> None:
    from dspark.bench.arms import plain
    from dspark.bench.prompts import read_set
    from dspark.caps import FixedCap

    print("\n| prompts | best fixed cap | derived cap | adaptive |\n|---|---|---|---|")
    derived, found = start_for(costs), {}
    for name in options.sets.split(","):
        arms = {"best": with_cap(engine, FixedCap(best[name])), "derived": with_cap(engine, FixedCap(derived))}
        arms["adaptive"] = with_cap(engine, AdaptiveCap(start=derived))
        arms["plain"] = plain(engine)
        ratios: dict[str, list[list[float]]] = {arm: [] for arm in arms if arm != "plain"}
        for i, text in enumerate(read_set(name).prompts[: options.prompts]):
            ids, of_prompt = engine.encode(text), {arm: [] for arm in ratios}
            for n in range(options.pairs + 1):
                _progress(i * options.pairs + n, options.prompts * options.pairs, f"pairs of {name}")
                order = list(arms) if n % 2 else list(arms)[::-1]
                took = {arm: decode_s(arms[arm], ids, options.tokens) for arm in order}
                # The first pass warms up.
                for arm in ratios if n else ():
                    of_prompt[arm].append(took["plain"] / took[arm])
            for arm, values in of_prompt.items():
                ratios[arm].append(values)
        _progress()
        found[name] = ratios
        cells = [f"{_middle(ratios[arm])}" for arm in ratios]
        print(f"| {name} | {best[name]}: {cells[0]} | {derived}: {cells[1]} | {cells[2]} |", flush=True)
    print(
        f"\nTimes plain decoding, medians and quartiles of {options.pairs} pairs on each of {options.prompts} prompts."
    )
    report["pairs"] = found


def _middle(ratios: list[list[float]]) -> str:
    values = sorted(r for prompt in ratios for r in prompt)
    quarter = len(values) // 4
    return f"{statistics.median(values):.3f} ({values[quarter]:.3f} to {values[-1 - quarter]:.3f})"


def _varied(engine: Any, options: argparse.Namespace, report: dict[str, Any]) -> None:
    from dspark.bench.arms import plain

    prompts = VARIED.read_text(encoding="utf-8").splitlines()
    bare, rows = plain(engine), []
    for text in prompts[:2]:
        for arm in (engine, bare):
            decode_s(arm, engine.encode(text), options.varied_tokens)
    for i, text in enumerate(prompts):
        ids, ratios = engine.encode(text), []
        for n in range(options.varied):
            _progress(i * options.varied + n, len(prompts) * options.varied, "varied prompts")
            order = (engine, bare) if n % 2 else (bare, engine)
            took = {arm is bare: decode_s(arm, ids, options.varied_tokens) for arm in order}
            ratios.append(took[True] / took[False])
        rows.append((text, ratios, *interval(ratios)))
    _progress()
    rows.sort(key=lambda row: row[2])
    below = [row for row in rows if row[4] < BOUND]
    print(f"\n40 varied prompts, adaptive, {options.varied} pairs each, {options.varied_tokens} tokens:")
    print(f"* {len(below)} whose 95 % interval of paired ratios to plain lies wholly below {BOUND}")
    middle = statistics.median(row[2] for row in rows)
    print(f"* means from {rows[0][2]:.3f} to {rows[-1][2]:.3f}, median {middle:.3f}; the five lowest:")
    print("\n| prompt | ratio to plain | 95 % interval |\n|---|---|---|")
    for text, _, mean, low, high in [*below, *rows[len(below) : 5]]:
        print(f"| {text[:60]} | {mean:.3f} | {low:.3f} to {high:.3f} |")
    report["varied"] = [{"prompt": t, "ratios": r, "mean": m, "low": lo, "high": hi} for t, r, m, lo, hi in rows]


# Two-sided 95 % points of Student's t by degrees of freedom.
T95 = {
    1: 12.706,
    2: 4.303,
    3: 3.182,
    4: 2.776,
    5: 2.571,
    6: 2.447,
    7: 2.365,
    8: 2.306,
    9: 2.262,
    10: 2.228,
    15: 2.131,
    20: 2.086,
}


def interval(ratios: list[float]) -> tuple[float, float, float]:
    """Geometric mean and 95 % interval of it, by Student's t on the logarithms."""
    logs = [math.log(r) for r in ratios]
    mean = statistics.fmean(logs)
    if len(logs) < 2:
        return math.exp(mean), 0.0, math.inf
    free = max(n for n in T95 if n <= len(logs) - 1)
    half = T95[free] * statistics.stdev(logs) / math.sqrt(len(logs))
    return math.exp(mean), math.exp(mean - half), math.exp(mean + half)


def _progress(done: int = 0, total: int = 0, what: str = "") -> None:
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[2K{what} {f'{done} of {total}' if total else ''}"[:100])
        sys.stderr.flush()


if __name__ == "__main__":
    main()
