"""Every test runs on MLX's bundled CPU BLAS, where a row is computed alike at every width, so equality can be exact."""

import atexit
import os
import shutil
import tempfile

os.environ["DSPARK_BLAS"] = "none"
# What tests measure is nothing to keep.
os.environ["DSPARK_CALIBRATION_CACHE"] = tempfile.mkdtemp(prefix="dspark-tests-")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")

import mlx.core as mx
import pytest

atexit.register(shutil.rmtree, os.environ["DSPARK_CALIBRATION_CACHE"], ignore_errors=True)
mx.set_default_device(mx.cpu)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Where CI runs (DSPARK_CI=1) a skipped test is a failure: a promise that nothing checked."""
    report = yield
    if os.environ.get("DSPARK_CI") == "1" and report.skipped:
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid} was skipped, which counts as a failure in CI"
    return report
