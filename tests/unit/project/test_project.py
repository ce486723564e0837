"""The project's files: consistent with each other, and free of paths or names of one machine."""

import ast
import os
import re
import shutil
import subprocess
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

from benchmarks.code_size import SHIPPED, tracked

ROOT = Path(__file__).parents[3]
TEXTS = {".py", ".md", ".yaml", ".yml", ".toml", ".txt", ".svg", ".json", ""}
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
MAKEFILE = (ROOT / "Makefile").read_text()
LOCKED = ("requirements.txt", ".ci/install.py", ".ci/lock_file.py")  # what installs by the lock reads
OTHER_VERSIONS = {"test-lowest", "test-newest"}  # they depend on what is published, not on the change alone


def texts() -> Iterator[Path]:
    """The project's text files, also those that are not committed yet, but not what its examples have written."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines()
    for path in map(ROOT.joinpath, listed):
        if path.is_file() and path.suffix in TEXTS:
            yield path


def make(*arguments: str, folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    # A make that runs these tests would pass its flags on to the makes below.
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    return subprocess.run(["make", *arguments], cwd=folder, env=environment, capture_output=True, text=True)


def rules() -> dict[str, str]:
    """Makefile targets and their prerequisites."""
    return dict(re.findall(r"^([a-z-]+):(.*?)(?:##.*)?$", MAKEFILE, re.MULTILINE))


def test_the_changelog_names_the_version():
    """A release's heading has a date. Between releases the version is the next one's, to differ from the last one."""
    headings = re.findall(r"^## \[(.+?)\](.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    version, _, development = PYPROJECT["project"]["version"].partition(".dev")
    if development:
        assert headings[0] == ("Unreleased", f" - will be {version}")
        headings = headings[1:]
        assert version not in [name for name, _ in headings]
    assert all(re.fullmatch(r" - \d{4}-\d\d-\d\d", date) for _, date in headings)
    assert development or headings[0][0] == version


@pytest.mark.parametrize(
    "target",
    [
        "demo",
        "test",
        "test-full",
        *sorted(OTHER_VERSIONS),
        "lint",
        "bench",
        "bench-planning",
        "clean",
        "help",
        "lock",
        "dist",
        "release-check",
    ],
)
def test_the_makefile_has_the_target(target: str):
    assert target in rules()
    done = make("--dry-run", target)
    assert done.returncode == 0, done.stderr


def test_make_help_tells_every_target_that_is_for_people():
    told = re.findall(r"^  make ([a-z-]+)", make("help").stdout, re.MULTILINE)
    phony = set(re.sub(r"\\\n", " ", MAKEFILE).split(".PHONY:")[1].splitlines()[0].split())
    assert set(told) == {target for target in phony if not target.startswith("check-")}


def project_copy(folder: Path) -> Path:
    (folder / ".ci").mkdir()
    for name in ("Makefile", "pyproject.toml", *LOCKED):
        shutil.copy(ROOT / name, folder / name)
    return folder


@pytest.mark.parametrize(
    ("fails_on", "told"),
    [
        ("version_info", 'needs Python 3.11 or newer; "{python}" is Python 3.9.2. To fix: '),
        ("ensurepip", "cannot make virtual environments. To fix: "),
    ],
)
def test_a_python_that_will_not_do_is_told_before_anything_is_made(fails_on: str, told: str, tmp_path: Path):
    python = tmp_path / "old-python"
    python.write_text(f'#!/bin/sh\ncase "$*" in --version) echo Python 3.9.2;; *{fails_on}*) exit 1;; esac\n')
    python.chmod(0o755)
    done = make("environment", f"PYTHON={python}", folder=project_copy(tmp_path))
    assert done.returncode != 0
    assert told.format(python=python) in done.stderr
    assert not (tmp_path / ".venv").exists()


def test_the_environment_is_made_again_only_where_what_it_holds_has_changed(tmp_path: Path):
    folder = project_copy(tmp_path)
    ready = folder / ".venv" / ".ready"
    ready.parent.mkdir()
    (ready.parent / ".packages").touch()
    ready.touch()
    newer = ready.stat().st_mtime + 10
    assert make("--question", "environment", folder=folder).returncode == 0
    for name in ("pyproject.toml", *LOCKED):
        before = (folder / name).stat().st_mtime
        os.utime(folder / name, (newer, newer))
        assert make("--question", "environment", folder=folder).returncode == 1, name
        os.utime(folder / name, (before, before))


@pytest.mark.parametrize("name", ["DO_NOT_TRACK", "MLFLOW_DISABLE_TELEMETRY", "PREFECT_SERVER_ANALYTICS_ENABLED"])
def test_make_lets_nothing_phone_home(name: str, tmp_path: Path):
    wrapper = tmp_path / "Makefile"
    wrapper.write_text(f'include {ROOT / "Makefile"}\nprint-it:\n\t@echo "$${name}"\n')
    expected = "false" if name.endswith("ENABLED") else "true"
    done = make("-f", str(wrapper), "print-it")
    assert done.stdout.split() == [expected], done.stderr


def test_hooks_check_what_make_lint_checks():
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    commands = {f"check-{hook['id']}" if hook["id"] != "docs" else "docs": hook["entry"] for hook in hooks}
    assert list(commands) == [*rules()["lint"].split(), "check-secrets"]
    for target, command in commands.items():
        recipe = make("--dry-run", "--always-make", target).stdout.splitlines()[-1]
        assert command == f"make {target}" or recipe == command.replace("--force-exclude", "."), target


def test_workflows_run_lint_and_every_suite():
    workflows = [yaml.safe_load(file.read_text()) for file in (ROOT / ".github" / "workflows").iterdir()]
    told = set(re.findall(r"\b(lint|test(?:-[a-z]+)?)\b", str([workflow["jobs"] for workflow in workflows])))
    assert told >= {"lint", *SUITES, *OTHER_VERSIONS}


def test_images_of_others_are_named_by_their_digests():
    """A tag can be moved to another image."""
    kubernetes = ROOT / "docs" / "kubernetes"
    files = [*(ROOT / ".github" / "workflows").iterdir(), *kubernetes.rglob("*.yaml"), kubernetes / "Dockerfile"]
    images = [image for file in files for image in re.findall(r"\b(?:image: |BASE_IMAGE=)(\S+)", file.read_text())]
    of_others = {image for image in images if image != "ringmaster"}
    assert len(of_others) >= 3
    assert [image for image in of_others if not re.search(r"@sha256:[0-9a-f]{64}$", image)] == []


def test_what_may_sign_and_upload_a_release_runs_none_of_our_code_and_comes_after_the_check():
    """Code that could be changed by a dependency, or by what it builds, never runs with these rights."""
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())["jobs"]
    trusted = {name for name, job in jobs.items() if "write" in job["permissions"].values()}
    assert trusted == {"attest", "publish"}
    for name in trusted:
        assert [step for step in jobs[name]["steps"] if "run" in step or "checkout" in step["uses"]] == [], name
    assert [jobs[name]["needs"] for name in ("check", "attest", "publish")] == ["build", "check", "attest"]
    assert "actions/cache" not in str(jobs)
    assert "./.github/actions" not in str(jobs), "it keeps a cache"


def ci(folder: Path, *, failing: str = "") -> tuple[subprocess.CompletedProcess[str], str]:
    """Runs `.ci/run` with a fake `make` that only logs its targets, and fails at one of them."""
    told = folder / "told"
    for name in ("initdb", "ip", "chromium"):  # nothing is installed
        (folder / name).write_text("#!/bin/sh\n")
    note = f'echo "$@" >> {told}; echo "$(nice) $@" >> {folder / "niceness"}'
    (folder / "make").write_text(f'#!/bin/sh\n{note}\ncase " $* " in *" {failing} "*) exit 2;; esac\n')
    for name in ("initdb", "ip", "chromium", "make"):
        (folder / name).chmod(0o755)
    environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}
    done = subprocess.run([ROOT / ".ci" / "run"], env=environment, capture_output=True, text=True, check=False)
    return done, told.read_text()


SUITES = ["test", *(target for target in rules() if target.startswith("test-") and target not in OTHER_VERSIONS)]


def test_ci_runs_lint_and_every_suite(tmp_path: Path):
    done, told = ci(tmp_path)
    assert done.returncode == 0, done.stderr
    targets = [
        next(word for word in line.split() if word in {"packages", "environment", "lint", *SUITES})
        for line in told.splitlines()
    ]
    assert targets[0] == "packages" and {*targets[: targets.index("environment")]} <= {"packages", "lint"}, (
        "suites that run beside each other would each make the environment"
    )
    assert {*targets} == {"packages", "environment", "lint", *SUITES}
    assert re.search(r"test-full PART=[0-9]+/120$", told, re.MULTILINE)
    assert re.search(r"^test-cluster PART=[1-3]/3$", told, re.MULTILINE)


def test_what_computes_all_the_time_in_ci_delays_no_suite_of_servers(tmp_path: Path):
    ci(tmp_path)
    lines = [line.split(" ", maxsplit=1) for line in (tmp_path / "niceness").read_text().splitlines()]
    yielding = {words.partition(" TIMEOUT_S")[0] for niceness, words in lines if int(niceness) > os.nice(0)}
    assert yielding == {"test", "--keep-going lint"}


def files_of(target: str, part: str) -> list[str]:
    """The test files, or folders of them, that a part of a suite runs."""
    command = ["make", "-n", "-o", ".ci/run", "READY=.ci/run", target, f"PART={part}"]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, text=True).stdout
    return re.findall(r"tests/\S+", said)


def test_each_file_with_long_tests_is_in_one_part_of_them():
    long = [file for file in (ROOT / "tests").rglob("test_*.py") if "mark.full" in file.read_text()]
    whole = files_of("test-full", "1/1")
    assert {str(file.relative_to(ROOT)) for file in long} <= set(whole)
    assert sorted(file for number in (1, 2, 3) for file in files_of("test-full", f"{number}/3")) == whole


def test_each_file_with_tests_of_pools_is_in_one_part_of_them_or_in_all():
    assert files_of("test-cluster", "1/1") == ["tests/cluster"]
    parts = [files_of("test-cluster", f"{number}/3") for number in (1, 2, 3)]
    assert all(len({*part}) == len(part) for part in parts)
    in_all = {*parts[0]} & {*parts[1]} & {*parts[2]}
    assert "tests/cluster/test_services.py" in in_all
    every = {str(file.relative_to(ROOT)) for file in (ROOT / "tests/cluster").rglob("test_*.py")}
    assert sorted(file for part in parts for file in part if file not in in_all) == sorted(every - in_all)


@pytest.mark.parametrize("target", ["lint", *SUITES])
def test_ci_fails_where_one_of_them_fails(target: str, tmp_path: Path):
    done, _ = ci(tmp_path, failing=target)
    assert done.returncode != 0
    assert re.search(rf"^(env .*)?make .*\b{target}\b.*: \d+ s, exit status 2\.$", done.stdout, re.MULTILINE)


def requirements() -> list[Requirement]:
    project = PYPROJECT["project"]
    extras = [line for lines in project["optional-dependencies"].values() for line in lines]
    found = [Requirement(line) for line in [*project["dependencies"], *extras]]
    return [requirement for requirement in found if requirement.name != project["name"]]


@pytest.mark.parametrize("requirement", requirements(), ids=lambda requirement: requirement.name)
def test_a_page_says_what_a_dependency_is_for(requirement: Requirement):
    assert f"**{requirement.name}**" in (ROOT / "docs" / "decisions" / "dependencies.md").read_text()


# Texts that belong to one person's machine or day, such as the path of this checkout.
FOREIGN = {
    "a home folder": r"/home/(?!me\b)\w+|/root\b|/Users/\w+",
    "where this checkout lies": re.escape(str(ROOT)) + r"\b",
    "an index of packages": r"(index-url|find.links)[ =]+['\"]?(?!https://download\.pytorch\.org/)(https?|file):",
    "unfinished work": r"\b([T]ODO|[F]IXME|[X]XX)\b",
    "a conflict": r"^(<{7}|>{7}) ",
    "a secret": r"BEGIN [A-Z ]*PRIVATE KEY|\b(ghp|gho|hf)_[A-Za-z0-9]{30}",
}


@pytest.mark.parametrize("what", FOREIGN)
def test_the_project_holds_nothing_of(what: str):
    pattern = re.compile(FOREIGN[what])
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}"
        for path in texts()
        if path != Path(__file__)
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), start=1)
        if pattern.search(line)
    ]
    assert not found, "\n".join(found)


def test_what_is_said_to_be_installed_is_this_project():
    """PyPI has another project of the package's name."""
    other = re.compile(r"\bringmaster\[[A-Za-z{$]")
    found = [str(path.relative_to(ROOT)) for path in texts() if other.search(path.read_text(errors="replace"))]
    assert found == []


def test_what_is_searched_is_the_whole_project():
    found = {str(path.relative_to(ROOT)) for path in texts()}
    assert {"Makefile", "README.md", "pyproject.toml", ".ci/run", "flows/cli.py", "docs/planning.md"} <= found


def test_the_license_is_the_one_that_is_named():
    text = (ROOT / "LICENSE").read_text()
    assert PYPROJECT["project"]["license"] == "Apache-2.0"
    assert "Apache License" in text
    assert "END OF TERMS AND CONDITIONS" in text


def entrypoints() -> list[str]:
    file = ROOT / "prefect.yaml"
    deployments = yaml.safe_load(file.read_text())["deployments"] if file.exists() else []
    scripts = [path.replace(":", ".") for path in PYPROJECT["project"]["scripts"].values()]
    return [*scripts, *(deployment["entrypoint"] for deployment in deployments)]


@pytest.mark.parametrize("entrypoint", entrypoints())
def test_an_entry_point_is_there(entrypoint: str):
    module, _, function = entrypoint.rpartition(".")
    file = ROOT / "src" / f"{module.replace('.', '/')}.py"
    defined = [node.name for node in ast.parse(file.read_text()).body if isinstance(node, ast.FunctionDef)]
    assert function in defined


def test_no_two_classes_have_one_name():
    places = defaultdict(list)
    for file in tracked(ROOT, SHIPPED, suffix=".py"):
        for node in ast.walk(ast.parse((ROOT / file).read_text())):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(f"{file}:{node.lineno}")
    assert not {name: files for name, files in places.items() if len(files) > 1}
