"""The version of the code that a batch ran with."""

import subprocess

from ringmaster.tasks.recording.rows import code_version


def git(folder, *words):
    subprocess.run(
        ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", folder, *words], check=True, capture_output=True
    )


def test_a_folder_in_git_is_told_by_its_commit_and_whether_it_was_changed(tmp_path, monkeypatch):
    monkeypatch.delenv("GIT_DIR", raising=False)
    (tmp_path / "models.py").write_text("x = 1")
    git(tmp_path, "init")
    git(tmp_path, "add", "models.py")
    git(tmp_path, "commit", "-m", "first")
    version = code_version(tmp_path)
    assert version.startswith("git ") and len(version) == len("git ") + 40
    (tmp_path / "notes.txt").write_text("not tracked")
    assert code_version(tmp_path) == version
    (tmp_path / "models.py").write_text("x = 2")
    assert code_version(tmp_path) == f"{version}+changes"


def test_any_other_folder_is_told_by_our_version(tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert code_version(tmp_path).startswith("ringmaster ")
    assert code_version(None) == code_version(tmp_path) == code_version(tmp_path / "gone")
