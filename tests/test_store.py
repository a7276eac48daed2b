"""Calibrations are found by what they hold for, survive whatever happens while they are written, and are never believed when
they belong to something else."""

import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import tomllib
from pathlib import Path

import attrs
import pytest

from dspark.calibrate import store as store_module
from dspark.calibrate.curve import best_cap
from dspark.calibrate.record import SCHEMA, Calibration, Identity, facts, read, write
from dspark.calibrate.store import BROKEN, LOCK, Store, store_dir
from dspark.errors import InputError
from dspark.platform import Machine
from tests.simulated import machine as simulated

HERE = Machine(
    backend="cpu",
    chip="Ryzen 9",
    architecture="x86_64",
    memory_bytes=64_000_000_000,
    cores=16,
    os="Linux 6.1",
    mlx="0.32.4",
    blas="openblas",
)
WHO = Identity("llama 30x576", "dspark block 7", "4-bit/32 x 210", "mlx", "float32")


def calibration(cap: int = 3, identity: Identity = WHO, machine: Machine = HERE) -> Calibration:
    return Calibration(
        facts(machine),
        identity,
        simulated("knee"),
        "2026-08-30",
        12.5,
        ("noisy",),
        {"cap": {"start": cap}},
    )


@pytest.fixture
def store(tmp_path) -> Store:
    return Store(tmp_path / "cache")


def kept(store: Store) -> list[Path]:
    return sorted(p for p in store.folder.rglob("*.toml") if p.is_file())


def test_what_is_saved_is_found_again(store):
    path = store.save(calibration(), HERE, "recipes/SmolLM2 135M")
    assert path.parent.name == HERE.id
    assert path.name == f"recipes-smollm2-135m-{WHO.digest}.toml"
    found = store.load(HERE, WHO)
    assert found == (calibration(), None, path)
    assert best_cap(found.calibration.costs, (0.8,), 0, "dspark") == best_cap(simulated("knee"), (0.8,), 0, "dspark")


def test_nothing_is_found_where_nothing_was_saved(store):
    assert store.load(HERE, WHO) == (None, None, None)
    assert not store.folder.exists(), "asking creates nothing"


def test_a_file_holds_changed_keys_and_figures_and_can_be_read_by_people(store):
    text = store.save(calibration(), HERE, "chat").read_text()
    assert set(tomllib.loads(text)) == {"schema", "cap", "measured"}
    assert text.startswith("# Written by dspark")
    assert 'chip = "Ryzen 9"' in text
    assert "start = 3" in text
    assert max(map(len, text.splitlines())) < 200
    assert len(text.splitlines()) < 80
    assert "8.9, 12.8, 16.2" in text, "a curve stands on one line"


def test_numbers_on_one_line_mean_the_same(store):
    text = write(calibration())
    assert read(text, HERE, WHO) == calibration()
    assert write(read(text, HERE, WHO)) == text


def test_source_says_chip_version_date_and_knees():
    assert calibration().source() == (
        "Ryzen 9, mlx 0.32.4, 2026-08-30, dearer at 2 rows (+44 %); cheaper at 8 rows (-37 %)"
    )


def test_a_renamed_recipe_keeps_its_file(store):
    first = store.save(calibration(3), HERE, "old name")
    second = store.save(calibration(5), HERE, "new name")
    assert first == second
    assert kept(store) == [first]
    assert store.load(HERE, WHO).calibration.start == 5


def test_a_moved_folder_keeps_its_files(store, tmp_path):
    store.save(calibration(), HERE, "chat")
    store.folder.rename(tmp_path / "elsewhere")
    assert Store(tmp_path / "elsewhere").load(HERE, WHO).calibration == calibration()


@pytest.mark.parametrize("field", Identity._fields)
def test_another_model_quantisation_kernel_or_dtype_is_another_recipe(store, field):
    store.save(calibration(), HERE, "chat")
    other = WHO._replace(**{field: "something else"})
    assert store.load(HERE, other).calibration is None
    store.save(calibration(7, other), HERE, "chat")
    assert store.load(HERE, WHO).calibration.start == 3
    assert store.load(HERE, other).calibration.start == 7


@pytest.mark.parametrize(("field", "value"), [("mlx", "0.33.0"), ("os", "Linux 6.2"), ("cores", 8), ("blas", "none")])
def test_another_mlx_or_machine_measures_again_and_says_why(store, field, value):
    store.save(calibration(), HERE, "chat")
    found = store.load(HERE._replace(**{field: value}), WHO)
    assert found.calibration is None
    assert f"{field} {getattr(HERE, field)}" in found.note
    assert str(value) in found.note


def test_a_few_bytes_of_memory_more_or_less_are_the_same_machine(store):
    store.save(calibration(), HERE, "chat")
    assert store.load(HERE._replace(memory_bytes=HERE.memory_bytes - 300_000_000), WHO).calibration is not None
    assert store.load(HERE._replace(memory_bytes=128_000_000_000), WHO).calibration is None


def test_a_file_under_a_wrong_name_is_not_believed(store):
    """Somebody copied a folder from another machine, or a file from another recipe."""
    there = HERE._replace(chip="M3 Max", backend="metal")
    store.save(calibration(machine=there), there, "chat")
    (store.folder / there.id).rename(store.folder / HERE.id)
    found = store.load(HERE, WHO)
    assert found.calibration is None
    assert "M3 Max" in found.note or "metal" in found.note
    other = WHO._replace(dtype="bfloat16")
    path = kept(store)[0]
    path.rename(path.with_name(f"chat-{other.digest}.toml"))
    assert store.load(there, other).calibration is None


def test_another_chip_says_nothing_of_this_one(store):
    store.save(calibration(), HERE, "chat")
    assert store.load(HERE._replace(chip="M3 Max"), WHO) == (None, None, None)


@pytest.mark.parametrize("schema", [0, SCHEMA + 1])
def test_another_schema_is_measured_again(store, schema):
    path = store.save(calibration(), HERE, "chat")
    path.write_text(path.read_text().replace(f"schema = {SCHEMA}", f"schema = {schema}"))
    found = store.load(HERE, WHO)
    assert found.calibration is None
    assert "schema" in found.note
    store.save(calibration(4), HERE, "chat")
    assert store.load(HERE, WHO).calibration.start == 4


def broken(text: str) -> list[bytes]:
    table = tomllib.loads(text)
    del table["measured"]["costs"]["grids"]
    return [
        b"",
        b"\xff\xfe\x00",
        text[: len(text) // 2].encode(),
        text.replace("[measured]", "[weighed]").encode(),
        text.replace("8.9", "-8.9", 1).encode(),
        text.replace("8.9", '"fast"', 1).encode(),
        text.replace("widths", "breadths", 1).encode(),
        text.replace('date = "2026-08-30"', "date = 3").encode(),
        text.replace("schema = 1", 'schema = "1"').encode(),
        b"[" * 5000,
    ]


@pytest.mark.parametrize("case", range(10))
def test_a_broken_file_is_set_aside_with_a_sentence(store, case):
    path = store.save(calibration(), HERE, "chat")
    path.write_bytes(broken(path.read_text())[case])
    damaged = path.read_bytes()
    found = store.load(HERE, WHO)
    assert found.calibration is None
    assert found.note.startswith(f"{path}: is no calibration (")
    assert "\n" not in found.note
    assert not path.exists()
    assert path.with_name(path.name + BROKEN).read_bytes() == damaged
    assert store.load(HERE, WHO) == (None, None, None)
    store.save(calibration(4), HERE, "chat")
    assert store.load(HERE, WHO).calibration.start == 4


def test_a_file_that_may_not_be_read_is_no_end(store, monkeypatch):
    path = store.save(calibration(), HERE, "chat")

    def refuse(self, **how):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_text", refuse)
    found = store.load(HERE, WHO)
    assert found.calibration is None
    assert "Permission denied" in found.note
    assert path.exists()


def test_a_folder_that_cannot_be_written_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="DSPARK_CALIBRATION_CACHE") as error:
        Store(tmp_path / "file").save(calibration(), HERE, "chat")
    assert "\n" not in str(error.value)
    with Store(tmp_path / "file").measuring(HERE):
        pass


def test_a_changed_key_cannot_hide_the_figures(store):
    with pytest.raises(InputError, match="measured"):
        store.save(attrs.evolve(calibration(), changes={"measured": 3}), HERE, "chat")


# ---- several processes ----------------------------------------------------------------------------------------------


def write_often(folder: str, caps: range) -> None:
    for cap in caps:
        Store(folder).save(calibration(cap), HERE, f"name {cap}")


def test_two_writers_and_a_reader_never_see_half_a_file(store):
    context = multiprocessing.get_context("spawn")
    writers = [
        context.Process(target=write_often, args=(str(store.folder), range(start, start + 40))) for start in (100, 200)
    ]
    for writer in writers:
        writer.start()
    seen = set()
    while any(writer.is_alive() for writer in writers):
        found = store.load(HERE, WHO)
        assert found.note is None
        if found.calibration:
            seen.add(found.calibration.start)
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    assert len(kept(store)) == 1, "two processes that save the same recipe share a file"
    assert store.load(HERE, WHO).calibration.start in (139, 239)
    assert seen <= {*range(100, 140), *range(200, 240)}
    assert not list(store.folder.rglob("*.part"))


KILLED = """
    import os, signal, sys
    from dspark.calibrate import store
    from tests.test_store import calibration, HERE
    at = sys.argv[2]
    def die(*args, **how): os.kill(os.getpid(), signal.SIGKILL)
    if at == "half":
        class Half:
            def __init__(self, file): self.file = file
            def __enter__(self): return self
            def __exit__(self, *exc): pass
            def write(self, text): self.file.write(text[: len(text) // 2]); self.file.flush(); die()
        real = open
        store.open = lambda path, mode="r", **how: Half(real(path, mode, **how)) if mode == "w" else real(path, mode, **how)
    else:
        setattr(store.os, at, die)
    store.Store(sys.argv[1]).save(calibration(9), HERE, "chat")
"""


def kill_while_saving(store: Store, at: str) -> None:
    code = textwrap.dedent(KILLED)
    root = str(Path(__file__).parent.parent)
    env = os.environ | {"PYTHONPATH": root}
    done = subprocess.run(
        [sys.executable, "-c", code, str(store.folder), at], cwd=root, env=env, timeout=60, check=False
    )
    assert done.returncode == -signal.SIGKILL


@pytest.mark.parametrize("at", ["half", "fsync", "replace"])
def test_a_kill_while_writing_leaves_what_was_there(store, at):
    store.save(calibration(3), HERE, "chat")
    kill_while_saving(store, at)
    assert len(list(store.folder.rglob("*.part"))) == 1, "the control: the process died in the middle of it"
    assert store.load(HERE, WHO).calibration.start == 3
    store.save(calibration(4), HERE, "chat")
    assert store.load(HERE, WHO).calibration.start == 4
    assert not list(store.folder.rglob("*.part"))


def test_writing_in_place_would_be_caught(store, monkeypatch):
    """The control of the tests above: a store that writes over its file loses it when it is killed."""
    path = store.save(calibration(3), HERE, "chat")
    monkeypatch.setattr(store_module, "_replace", lambda path, text: path.write_text(text[: len(text) // 2]))
    store.save(calibration(4), HERE, "chat")
    assert store.load(HERE, WHO).calibration is None
    assert path.with_name(path.name + BROKEN).exists()


def test_a_file_mended_while_it_was_being_set_aside_is_used(store, monkeypatch):
    path = store.save(calibration(3), HERE, "chat")
    good = path.read_text()
    path.write_text("half")
    real = store_module._locked

    def mend(lock, *args):
        path.write_text(good)
        return real(lock, *args)

    monkeypatch.setattr(store_module, "_locked", mend)
    assert store.load(HERE, WHO).calibration == calibration(3)


def test_one_measures_while_the_other_waits_and_then_finds_the_result(store):
    events = []
    inside, go = threading.Event(), threading.Event()

    def first():
        with store.measuring(HERE):
            inside.set()
            go.wait(10)
            events.append("measured")
            store.save(calibration(6), HERE, "chat")

    thread = threading.Thread(target=first)
    thread.start()
    assert inside.wait(10)

    def waiting():
        events.append("waiting")
        go.set()

    with store.measuring(HERE, waiting):
        events.append(store.load(HERE, WHO).calibration.start)
    thread.join(10)
    assert events == ["waiting", "measured", 6]


def test_the_lock_of_a_dead_process_is_free(store):
    kill_while_saving(store, "replace")
    start = time.monotonic()
    store.save(calibration(5), HERE, "chat")
    assert time.monotonic() - start < 60
    assert (store.folder / HERE.id / LOCK).exists()


# ---- where ----------------------------------------------------------------------------------------------------------


def test_the_variable_decides_where(monkeypatch, tmp_path):
    monkeypatch.setenv("DSPARK_CALIBRATION_CACHE", str(tmp_path / "mine"))
    assert Store().folder == tmp_path / "mine"
    monkeypatch.setenv("DSPARK_CALIBRATION_CACHE", "~/mine")
    assert store_dir() == Path.home() / "mine"


def test_a_checkout_keeps_its_own_and_an_installed_package_the_users(monkeypatch, tmp_path):
    monkeypatch.delenv("DSPARK_CALIBRATION_CACHE", raising=False)
    assert store_dir() == Path(__file__).parent.parent / "calibration_cache"
    monkeypatch.setenv("DSPARK_CACHE", str(tmp_path / "user"))
    monkeypatch.setattr(store_module, "__file__", str(tmp_path / "site-packages/dspark/calibrate/store.py"))
    assert store_dir() == tmp_path / "user" / "calibration"
