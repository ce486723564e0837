import subprocess
import sys

import pytest

from ringmaster.registry import resolve


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A user's module, next to the batch file."""
    (tmp_path / "mine_dotted.py").write_text("def build(): return 7\nclass Net:\n    def make(): return 8\n")
    (tmp_path / "mine_broken.py").write_text("import no_such_dependency\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield "mine_dotted"
    sys.modules.pop("mine_dotted", None)


def test_finds_functions_and_what_is_inside_classes(module):
    assert resolve(f"{module}:build")() == 7
    assert resolve(f"{module}:Net.make")() == 8
    assert resolve("os.path:join")("a", "b") == "a/b"


@pytest.mark.parametrize(
    ("dotted", "says"),
    [
        ("mine_dotted.build", "package.module:function"),
        ("mine_dotted:", "package.module:function"),
        (":build", "package.module:function"),
        ("__main__:build", "module of its own"),
        ("no_such_module:build", "no module 'no_such_module'.*next to the batch file"),
        ("mine_dotted.deeper:build", "no module 'mine_dotted.deeper'"),
        ("mine_dotted:bild", "did you mean build"),
        ("mine_dotted:Net.zzz", "no 'Net.zzz'"),
    ],
)
def test_a_wrong_name_says_what_to_do(module, dotted, says):
    with pytest.raises(ValueError, match=says):
        resolve(dotted)


def test_a_missing_import_inside_the_users_module_is_told_as_such(module):
    with pytest.raises(ModuleNotFoundError, match="no_such_dependency"):
        resolve("mine_broken:build")


@pytest.mark.parametrize(
    "name",
    [
        "ringmaster.registry",
        "ringmaster.techniques.data",
        "ringmaster.techniques.models",
    ],
)
def test_torch_is_not_imported(name):
    """A planning process reads data and names without the cost of importing torch."""
    code = f"import sys, {name}; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
