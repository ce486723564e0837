"""Environments of jobs: made once, never used half made, and of the lock as the batch has read it."""

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from ringmaster.codec import from_json, to_json
from ringmaster.errors import BatchFileError, InterpreterError
from ringmaster.features.environment import installation
from ringmaster.features.environment.installation import describe, made
from ringmaster.features.environment.job import RESULT, EnvironmentSpec
from ringmaster.features.environment.lock_files import kept
from ringmaster.tasks.batch import Batch
from ringmaster.tasks.pool.node_hooks import store_facts
from ringmaster.tasks.profiling.preflight_runs import preflight_key
from ringmaster.tasks.profiling.profile_store import speed_key
from ringmaster.tasks.storage.database import Database, file_url
from ringmaster.tasks.storage.journal import Journal
from ringmaster.tasks.storage.message_store import GangShare
from ringmaster.techniques import Job
from ringmaster.techniques.processes.order import TRAIN, GangOrder
from ringmaster.techniques.training.rank_job import weights_digest
from tests.unit.environments.locks import batch_of, write_lock, write_wheel
from tests.unit.pool.node.test_agent import SLOTS, Site, until

TOOLS = {"tinytools": {"tinytools.py": "NUMBER = 7\n"}}
DATA = {
    **dict.fromkeys(("kind", "seq_len", "vocab_size", "num_labels", "image_size", "num_channels")),
    "num_held_out": 1,
}


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("RINGMASTER_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def root(home):
    return home / "cache" / "environments"


def environment_of(batch: Batch) -> EnvironmentSpec:
    found = batch.jobs[0].feature(EnvironmentSpec)
    assert found is not None
    return found


def stand_in_for_uv(file: Path, script: str, monkeypatch) -> None:
    """Replaces uv by a program that runs a shell script, in which "$UV" is uv."""
    file.write_text(f"#!/bin/sh\nUV={installation.uv_program()}\n{script}")
    file.chmod(0o755)
    monkeypatch.setattr(installation, "uv_program", lambda: str(file))


def keys_of(job: Job) -> list[str]:
    return [weights_digest(job, data_digest=""), preflight_key(job, weights={}), speed_key(job, DATA)]


def test_a_lock_becomes_a_python_with_its_packages(home, tmp_path):
    write_lock(tmp_path / "batch", TOOLS)
    environment = environment_of(batch_of(tmp_path / "batch", "{lock: uv.lock}"))
    found = environment.installed(home / "cache")
    assert found.packages == {"tinytools": "1.0"}
    printed = subprocess.check_output([found.python, "-c", "import tinytools; print(tinytools.NUMBER)"], text=True)
    assert printed == "7\n"
    result = environment.segment_result(cache_dir=home / "cache")[RESULT]
    assert result == {"digest": environment.digest, "python": found.version, "packages": {"tinytools": "1.0"}}
    assert environment.installed(tmp_path / "cache of a reproduction") == found


def test_its_digest_is_of_what_the_lock_defines(home, tmp_path):
    """Another place changes nothing, another lock everything: the weights, the preflight and the times of steps."""
    first, moved, other = tmp_path / "first", tmp_path / "moved", tmp_path / "other"
    write_lock(first, TOOLS)
    write_lock(moved, TOOLS)
    write_lock(other, {"tinytools": {"tinytools.py": "NUMBER = 8\n"}})
    jobs = [batch_of(folder, "{lock: uv.lock}").jobs[0] for folder in (first, moved, other)]
    assert jobs[0] == jobs[1]
    assert all(one != another for one, another in zip(keys_of(jobs[0]), keys_of(jobs[2]), strict=True))
    asked = environment_of(batch_of(first, "{lock: uv.lock, python: '3.99'}"))
    assert asked.digest != environment_of(batch_of(first, "{lock: uv.lock}")).digest


def test_a_lock_that_is_changed_later_does_not_change_the_batch(home, tmp_path):
    lock = write_lock(tmp_path / "batch", TOOLS)
    batch = batch_of(tmp_path / "batch", "{lock: uv.lock}")
    lock.unlink()
    (tmp_path / "batch" / "tinytools-1.0-py3-none-any.whl").unlink()
    again = Batch.of(name="again", jobs=batch.jobs, folder=tmp_path)
    assert again.jobs == batch.jobs
    stored = from_json(Job, to_json(batch.jobs[0]))
    assert environment_of(replace(batch, jobs=(stored,))).installed(home / "cache").packages == {"tinytools": "1.0"}


def test_makers_at_the_same_time_make_it_once(root, tmp_path, monkeypatch):
    key = kept(write_lock(tmp_path / "batch", TOOLS), python="3.11", root=root)
    log = tmp_path / "calls"
    stand_in_for_uv(tmp_path / "uv", f'echo call >> {log}\nexec "$UV" "$@"\n', monkeypatch)
    with ThreadPoolExecutor(4) as threads:
        found = [*threads.map(lambda _: made(key, lock="uv.lock", root=root), range(4))]
    assert log.read_text() == "call\n"
    assert all(each == found[0] for each in found)


MAKER = """
import sys
from pathlib import Path
from ringmaster.features.environment import installation
installation.uv_program = lambda: sys.argv[3]
installation.made(sys.argv[1], lock="uv.lock", root=Path(sys.argv[2]))
"""


def test_a_maker_that_is_killed_leaves_nothing_that_is_used(root, tmp_path, monkeypatch):
    """uv outlives it, holding the lock: nobody makes the environment again beside it."""
    key = kept(write_lock(tmp_path / "batch", TOOLS), python="3.11", root=root)
    begun, end = tmp_path / "begun", tmp_path / "end"
    os.mkfifo(begun)
    os.mkfifo(end)
    script = f'mkdir -p "$UV_PROJECT_ENVIRONMENT/half"\necho begun > {begun}\nread word < {end}\n'
    with monkeypatch.context() as patched:
        stand_in_for_uv(tmp_path / "uv", script, patched)
    maker = subprocess.Popen([sys.executable, "-c", MAKER, key, str(root), str(tmp_path / "uv")])
    assert begun.read_text() == "begun\n"
    maker.send_signal(signal.SIGKILL)
    maker.wait()
    with ThreadPoolExecutor(1) as threads:
        second = threads.submit(made, key, lock="uv.lock", root=root)
        with pytest.raises(TimeoutError):
            second.result(timeout=0.3)  # however slow the machine is, it has to wait
        end.write_text("word\n")
        found = second.result()
    assert found.packages == {"tinytools": "1.0"}
    assert not (Path(found.python).parents[1] / "half").exists()


def test_one_whose_python_has_gone_is_made_again(root, tmp_path):
    key = kept(write_lock(tmp_path / "batch", TOOLS), python="3.11", root=root)
    first = made(key, lock="uv.lock", root=root)
    Path(first.python).unlink()
    assert made(key, lock="uv.lock", root=root) == first
    assert Path(first.python).is_file()


def test_a_failure_has_the_words_of_uv(home, tmp_path):
    write_lock(tmp_path / "batch", TOOLS)
    write_wheel(tmp_path / "batch", "tinytools", {"tinytools.py": "NUMBER = 9\n"})  # not what was locked
    environment = environment_of(batch_of(tmp_path / "batch", "{lock: uv.lock}"))
    with pytest.raises(InterpreterError, match=r"uv cannot make that of uv\.lock: .*Hash mismatch.*To fix: ") as raised:
        environment.installed(home / "cache")
    assert "\n" not in str(raised.value)


def test_a_node_gets_the_files_of_a_lock_from_the_database(home, tmp_path):
    """It shares no folder with whoever submits the batch."""
    write_lock(tmp_path / "batch", TOOLS)
    batch = batch_of(tmp_path / "batch", "{lock: uv.lock}")
    with closing(Database(file_url(tmp_path / "pool.db"))) as database:
        store_facts(batch.jobs, Journal(database, batch="b-1"))
        home.rename(tmp_path / "elsewhere")
        site = Site(database)
        try:
            order = GangOrder(
                purpose=TRAIN,
                job=batch.jobs[0],
                technique="t:T",
                config={},
                slots=SLOTS,
                folder="1",
                cache_dir=str(tmp_path / "node" / "cache"),
            )
            shares = {"n": (site.host.incarnation, GangShare(order=order, num_ranks=1))}
            site.message_store.give(1, batch="b-1", shares=shares)
            until(lambda: site.started)
        finally:
            site.end()
    assert environment_of(batch).installed(tmp_path / "node" / "cache").packages == {"tinytools": "1.0"}


def test_files_that_are_not_kept_here_are_named(root):
    with pytest.raises(InterpreterError, match=r"uv\.lock \(digest abc\) are not kept on this machine"):
        made("abc", lock="uv.lock", root=root)


def test_a_requirements_file_with_versions_is_a_lock(home, tmp_path):
    wheel = write_wheel(tmp_path / "batch", "tinytools", TOOLS["tinytools"])
    (tmp_path / "batch" / "requirements.txt").write_text(f"# made by hand\n./{wheel}\n")
    environment = environment_of(batch_of(tmp_path / "batch", "{lock: requirements.txt}"))
    assert environment.installed(home / "cache").packages == {"tinytools": "1.0"}


def test_a_pylock_is_a_lock(home, tmp_path):
    lock = write_lock(tmp_path / "batch", TOOLS)
    uv = installation.uv_program()
    assert uv is not None
    command = [uv, "export", "--quiet", "--frozen", "--offline", "--format", "pylock.toml", "-o", "pylock.toml"]
    subprocess.run(command, cwd=lock.parent, check=True, stdout=subprocess.DEVNULL)
    environment = environment_of(batch_of(lock.parent, "{lock: pylock.toml}"))
    assert environment.installed(home / "cache").packages == {"tinytools": "1.0"}


def test_a_python_that_exists_is_asked_for_its_packages(home, tmp_path):
    write_lock(tmp_path / "batch", TOOLS)
    found = environment_of(batch_of(tmp_path / "batch", "{lock: uv.lock}")).installed(home / "cache")
    environment = environment_of(batch_of(tmp_path, f"{{python: {found.python}}}"))
    assert environment.digest == describe(found.python).digest
    assert environment.installed(home / "cache") == describe(found.python)
    uv = installation.uv_program()
    assert uv is not None
    subprocess.run([uv, "pip", "uninstall", "--quiet", "--python", found.python, "tinytools"], check=True)
    with pytest.raises(InterpreterError, match="have changed since the batch was read"):
        environment.installed(home / "cache")


def test_a_python_without_torch_trains_by_commands_alone(home, tmp_path):
    write_lock(tmp_path / "batch", TOOLS)
    job = batch_of(tmp_path / "batch", "{lock: uv.lock}").jobs[0]
    with pytest.raises(InterpreterError, match=r"uv\.lock cannot train: Ringmaster needs .*torch\S* \(it has none\)"):
        job.interpreter(str(home / "cache"))
    command = replace(job, model=replace(job.model, architecture=None, command=("python", "train.py")))
    assert command.interpreter(str(home / "cache"))


@pytest.mark.parametrize(
    ("environment", "why"),
    [
        ("{lock: other.lock}", "there is no file 'other.lock'"),
        ("{lock: notes.md}", "notes.md is no lock"),
        ("{lock: alone/uv.lock}", "has no pyproject.toml beside it"),
        ("{lock: loose.txt}", "gives no version of 'torch>=2'"),
        ("{lock: elsewhere.txt}", "outside its folder"),
        ("{lock: missing.txt}", "which is not there"),
        ("{lock: broken.toml}", "cannot be read"),
        ("{python: nowhere/python}", "there is no Python 'nowhere/python'"),
        ("{python: /bin/false}", "/bin/false is no Python that runs"),
        ("{}", "names no Python"),
        ("{lock: 7}", "lock"),
        ("uv.lock", "environment"),
    ],
)
def test_what_is_no_environment_is_refused_in_its_line(home, tmp_path, environment, why):
    (tmp_path / "alone").mkdir()
    (tmp_path / "alone" / "uv.lock").write_text("version = 1\n")
    (tmp_path / "notes.md").write_text("")
    (tmp_path / "loose.txt").write_text("numpy==2.0\ntorch>=2\n")
    (tmp_path / "elsewhere.txt").write_text("../a-1.0-py3-none-any.whl\n")
    (tmp_path / "missing.txt").write_text("./a-1.0-py3-none-any.whl\n")
    (tmp_path / "broken.toml").write_text("packages = [\n")
    with pytest.raises(BatchFileError) as raised:
        batch_of(tmp_path, environment)
    (fault,) = raised.value.faults
    assert why in str(fault)
    assert fault.line == 1


def test_without_uv_a_lock_is_refused_and_a_python_is_not(home, tmp_path, monkeypatch):
    write_lock(tmp_path, TOOLS)
    monkeypatch.setattr("ringmaster.features.environment.batch.uv_program", lambda: None)
    with pytest.raises(BatchFileError, match="uv, which makes environments, is not installed"):
        batch_of(tmp_path, "{lock: uv.lock}")
    assert environment_of(batch_of(tmp_path, f"{{python: {sys.executable}}}")).digest


def test_names_that_only_its_packages_have_are_left_to_its_preflight(home, tmp_path):
    write_lock(tmp_path, TOOLS)
    model = "{factory: 'tinytools:net'}, data: {factory: 'tinytools:rows'}, loss: 'tinytools:loss', num_steps: 1"
    assert batch_of(tmp_path, "{lock: uv.lock}", model=model).jobs[0].loss == "tinytools:loss"
    command = "{command: [only-there, x]}, data: {source: command}, num_steps: 1"
    assert batch_of(tmp_path, "{lock: uv.lock}", model=command).jobs[0].model.command == ("only-there", "x")
    with pytest.raises(BatchFileError, match="module tinytools cannot be found"):
        batch_of(tmp_path, "null", model=model)
