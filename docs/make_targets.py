"""Writes docs/targets.md: what each family of targets gets, found on tiny models of it. `python docs/make_targets.py`."""

# ruff: noqa: E402 (the format must be chosen before MLX loads)

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ.setdefault("DSPARK_BLAS", "none")

import mlx.core as mx

from dspark.buffers.batch import batch_of
from dspark.buffers.probe import prove
from dspark.buffers.single import SingleBuffers
from dspark.errors import BindError
from dspark.models.target import Target
from dspark.stages.rollback import RollbackAuto
from tests.families import FAMILIES, NOT_BUILT, build

PAGE = ROOT / "docs" / "targets.md"
HEAD = """\
# Targets

Written by `python docs/make_targets.py` from tiny random models (float32, CPU, mlx {mlx}, mlx-lm {lm}, mlx-vlm {vlm}); the
tests decode every one of them plain and drafted, alone and in batches, and compare token for token. A model that is not
listed is not refused for it: the plan is made from what its layers cache, and proved on the loaded model.

* **rollback**: how the caches come back to the tokens that stand, and what a rejected draft costs (docs/rollback.md).
* **blocks**: whether a block of rows gives bit for bit the logits of single rows ("exact"), or other orders of summing move
  them in the last places ("rounding": wrapped windows, Mamba-2, latent attention). On a GPU it is rounding everywhere.
* **batch**: whether rows of different lengths share one forward; where they do not, they go one after another, and `explain`
  says so.
* **taps**: whether hidden states can be had, as drafters other than lookup need them.

| family | caches | rollback | a rejection costs | blocks | batch | taps |
|---|---|---|---|---|---|---|
"""


def row(name: str) -> str:
    """One line of the table."""
    target = Target(build(name))
    shown = name.replace("vlm/", "mlx-vlm: ")
    plan = RollbackAuto().plan(target)
    try:
        proof = prove(target, plan)
    except BindError as error:
        return f"| {shown} | {caches(plan)} | refused: {error} | | | | |"
    buffers = SingleBuffers(target.make_caches(), proof.plan)
    buffers.forward(target, mx.array([[1, 2, 3]]))
    buffers.settle((3,), ())
    reason = getattr(batch_of(target, buffers), "reason", None)
    taps = "yes" if "taps" in target.provides else "no"
    exact = "exact" if proof.noise == 0 else "rounding"
    batch = "shared" if reason is None else "one by one"
    return f"| {shown} | {caches(plan)} | {methods(plan)} | {costs(plan)} | {exact} | {batch} | {taps} |"


def caches(plan) -> str:
    return ", ".join(sorted({layer.cache for layer in plan.layers}))


def methods(plan) -> str:
    return ", ".join(sorted({layer.roller.method for layer in plan.layers}))


def costs(plan) -> str:
    found = sorted({layer.roller.cost for layer in plan.layers} - {"nothing"})
    return "; ".join(found) or "nothing"


def page(names=tuple(FAMILIES)) -> str:
    head = HEAD.format(mlx=version("mlx"), lm=version("mlx-lm"), vlm=version("mlx-vlm"))
    missing = "\n".join(f"* {name}: {why}" for name, why in NOT_BUILT.items())
    return f"{head}{chr(10).join(map(row, names))}\n\n## Not tried\n\n{missing}\n"


if __name__ == "__main__":
    # A process of its own: the one that makes all documents may hold another BLAS already.
    if sys.argv[1:] != ["--here"]:
        subprocess.run([sys.executable, __file__, "--here"], check=True, env={**os.environ, "DSPARK_BLAS": "none"})
    else:
        mx.set_default_device(mx.cpu)
        PAGE.write_text(page(), encoding="utf-8")
