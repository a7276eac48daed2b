"""Every test runs on MLX's bundled CPU BLAS, where a row is computed alike at every width, so equality can be exact."""

import os

os.environ["DSPARK_BLAS"] = "none"
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")

import mlx.core as mx
import pytest

mx.set_default_device(mx.cpu)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Where CI runs (DSPARK_CI=1) a skipped test is a failure: a promise that nothing checked."""
    report = yield
    if os.environ.get("DSPARK_CI") == "1" and report.skipped:
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid} was skipped, which counts as a failure in CI"
    return report
