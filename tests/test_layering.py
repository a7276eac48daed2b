"""Imports go one way, and `import dspark` does no work."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "dspark"
LAYERS = (
    {"errors", "records", "blas", "blas_setup", "cache", "cuda_switches", "platform", "shipped"},
    {"buffers"},
    {"models", "kernels"},
    {"checkpoints"},
    {"stages", "caps"},
    {"pipeline", "blocks", "transcript", "prompt", "rows", "round", "shadow", "states"},
    {"session", "explain"},
    {"engine"},
    {"recipe", "calibrate", "telemetry", "train", "bench", "assemble"},
    {"cli", "__main__"},
)
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}


def place(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def imports(source: str) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [a.name for a in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found.append(node.module)
    return [name for name in found if name.split(".")[0] == "dspark"]


def upward(home: str, source: str) -> list[str]:
    """Imports of a module in `home` that go against the order."""
    return [name for name in imports(source) if place(name) and LEVEL[place(name)] > LEVEL[home]]


def modules() -> list[Path]:
    return sorted(p for p in ROOT.rglob("*.py") if p != ROOT / "__init__.py")


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_go_one_way(path):
    home = path.relative_to(ROOT).parts[0].removesuffix(".py")
    assert home in LEVEL, f"{home} has no place in the order of layers; give it one"
    assert upward(home, path.read_text()) == []


def test_an_upward_import_is_caught():
    assert upward("buffers", "from dspark.session import Session") == ["dspark.session"]
    assert upward("session", "def f():\n    import dspark.cli") == ["dspark.cli"]
    assert upward("session", "from dspark.errors import DsparkError") == []


def test_importing_dspark_loads_no_mlx():
    code = (
        "import sys, dspark; print([m for m in ('mlx', 'mlx_lm', 'transformers', 'rich', 'typer') if m in sys.modules])"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
    )


# ---- stages do not read the device ------------------------------------------------------------------------------------

READS = {"item", "tolist", "eval", "async_eval", "synchronize", "asarray"}


def reads(source: str) -> list[str]:
    """Calls in a stage's source that would wait for the device."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name in READS:
                found.append(name)
    return found


ALLOWED = {"prefill.py": ["eval"]}


@pytest.mark.parametrize("path", sorted((ROOT / "stages").rglob("*.py")), ids=lambda p: str(p.relative_to(ROOT)))
def test_stages_do_not_read_the_device(path):
    assert reads(path.read_text()) == ALLOWED.get(path.name, [])


def test_a_read_in_a_stage_is_caught():
    assert reads("def f(x):\n    return x.item() + mx.eval(x)") == ["item", "eval"] or reads("x.item()") == ["item"]


def test_modules_and_functions_stay_small():
    long = {str(p.relative_to(ROOT)): n for p in modules() if (n := len(p.read_text().splitlines())) > 400}
    assert long == {}
    functions = {
        f"{p.relative_to(ROOT)}:{node.name}": node.end_lineno - node.lineno + 1
        for p in modules()
        for node in ast.walk(ast.parse(p.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno - node.lineno + 1 > 80
    }
    assert functions == {}
