"""Features of installed distributions are found by their entry points, and refused where they cannot be used."""

import importlib
import json
import logging
import py_compile
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest

from ringmaster import features
from ringmaster.errors import InputError
from ringmaster.feature_check import feature_findings, refuse_faulty_features, refuse_faulty_modules
from ringmaster.feature_hooks import HOOKS, OF_PROCESSES
from ringmaster.flows.commands import lineage
from ringmaster.flows.commands import pool as pool_commands
from ringmaster.flows.commands.parameters import with_values
from ringmaster.flows.pool import controller, node
from ringmaster.flows.services import metrics_server, up_and_down
from ringmaster.flows.train_batch import run_stages
from ringmaster.tasks.batch import Batch
from ringmaster.techniques.data.inference import infer_kind
from ringmaster.techniques.job_features import feature_of
from ringmaster.techniques.job_specs import DataSpec, ModelSpec
from ringmaster.techniques.processes import loaded_files
from tests.unit.features.installed import install, installed

JOB = """
from dataclasses import dataclass
from typing import Annotated
from ringmaster.techniques.job_features import Description, FileKeys, JobFeature

@dataclass(frozen=True, kw_only=True)
class Own(JobFeature):
    {key}: Annotated[bool, Description("true or false")] = False

@dataclass(frozen=True, kw_only=True)
class OwnKeys(FileKeys):
    {key}: Annotated[bool, Description("true or false")] = False
"""
COMMANDS = """
from ringmaster.flows.commands.parameters import with_parameters

def own(): pass

def with_own(command):
    def call(*, size, **options):
        command(**options)
    return with_parameters(command, call, size=(int, 1))
"""
JOB_KEY = {"job": JOB.format(key="soup") + "JOB_FEATURES = (Own,)"}


def faults_with(site, **packages):
    """Returns the faults of installed features."""
    with installed(site, packages):
        return [f"{each.message}. To fix: {each.remedy}" for each in feature_findings()]


def test_modules_of_installed_features_follow_the_built_in_ones(tmp_path):
    with installed(tmp_path, {"noted": JOB_KEY}):
        assert features.packages()[-1].name == "noted"
        assert features.modules("job")[-1].__name__ == "noted.job"
        assert "noted.trainer" not in [module.__name__ for module in features.modules("trainer")]
        refuse_faulty_features()


def test_each_folder_is_a_feature_after_those_whose_order_matters():
    folders = {file.parent.name for file in Path(features.__file__).parent.glob("*/__init__.py")}
    assert {name.rpartition(".")[2] for name in features.BUILTIN} == folders
    assert features.BUILTIN[: len(features.ORDER)] == features.ORDER


def test_what_built_in_features_list_has_the_form_that_the_table_says():
    for kind, lists in HOOKS.items():
        for module in features.modules(kind, only_builtin=True):
            present = [name for name in lists if hasattr(module, name)]
            assert present, module
            assert all(lists[name].entries(getattr(module, name)) is not None for name in present)


FORM = """
from ringmaster.flows.job_forms import JobForm
class Own(JobForm, title="Own"): pass
JOB_FORMS = (Own,)
"""
RECORD = """
from dataclasses import dataclass
from ringmaster.tasks.storage.journal import RecordFeature
@dataclass(frozen=True, kw_only=True)
class Own(RecordFeature):
    own: int = 0
RECORD_FEATURES = (Own,)
"""
SWEEP = """
from ringmaster.tasks.sweeping.early_stopping import StoppingPolicy
class Own(StoppingPolicy):
    own: int = 0
STOPPING_POLICIES = (Own,)
"""
TERMS = """
from ringmaster.tasks.planning.term_features import TermsFeature
class Own(TermsFeature):
    key = "own"
TERMS_FEATURES = (Own,)
"""


SUITE = """
from ringmaster.tasks.batch.sections import Section
from ringmaster.tasks.evaluation.suite_tests import SuiteTests
class Keys(Section):
    slices: list[int] = []
class Own(SuiteTests):
    keys = Keys
    entries = on_held_out = findings = run = lambda *_: ()
SUITE_TESTS = (Own(),)
"""


@pytest.mark.parametrize(
    ("kind", "text", "what"),
    [
        ("job", JOB_KEY["job"], "key of jobs 'soup'"),
        ("job", JOB.format(key="own") + "BATCH_KEYS = (OwnKeys,)", "key of batches 'own'"),
        ("commands", COMMANDS + "COMMANDS = {'Train': (own,)}", "command 'own'"),
        ("commands", COMMANDS + "OPTIONS = {'run': with_own}", "command 'run --size'"),
        ("commands", "FILE_SCHEMAS = (('own', dict),)", "kind of file 'own'"),
        ("execute", "REQUESTS = {'own': print}", "kind of requests 'own'"),
        ("execute", "STEERED_VALUES = (('own', int),)", "key of steering requests 'own'"),
        ("execute", RECORD, "field of the records of jobs 'own'"),
        ("routes", "PAGES = {'own': '/own'}", "page of a pool 'own'"),
        ("forms", FORM, "section of the form that changes jobs 'Own'"),
        ("sweep", SWEEP, "key of early stopping 'own'"),
        ("terms", TERMS, "key of terms 'own'"),
    ],
)
def test_a_name_that_two_installed_features_take_is_refused_with_both(kind, text, what, tmp_path):
    packages = {name: {kind: text} for name in ("alpha", "beta")}
    fault, *_ = faults_with(tmp_path, **packages)  # keys of batches are keys of sweeps, too
    assert fault.startswith(f"the {what} is of alpha (distribution alpha) and of beta (distribution beta)")
    assert "To fix: `pip uninstall alpha` or `pip uninstall beta`, or ask the author of beta" in fault


@pytest.mark.parametrize(
    ("kind", "text", "what"),
    [
        ("job", JOB.format(key="store") + "JOB_FEATURES = (Own,)", "jobs 'store' is of ringmaster.features.stores"),
        ("job", JOB.format(key="num_steps") + "ENTRY_KEYS = (OwnKeys,)", "key of jobs 'num_steps' is of Ringmaster"),
        ("job", JOB.format(key="space") + "BATCH_KEYS = (OwnKeys,)", "key of sweeps 'space' is of Ringmaster"),
        ("commands", COMMANDS + "own.__name__ = 'up'\nCOMMANDS = {'Train': (own,)}", "command 'up' is of Ringmaster"),
        ("commands", COMMANDS.replace("size", "seed") + "OPTIONS = {'plan': with_own}", "'plan --seed' is of Ring"),
        ("commands", "FILE_SCHEMAS = (('endpoint', dict),)", "file 'endpoint' is of ringmaster.features.endpoint"),
        ("execute", "REQUESTS = {'cancel': print}", "kind of requests 'cancel' is of Ringmaster itself"),
        ("routes", "PAGES = {'mlflow': '/own'}", "page of a pool 'mlflow' is of Ringmaster itself"),
        ("job", "INFERRED_KINDS = (('chat', ('Model',)),)", "kind of data that is inferred 'chat' is of Ringmaster"),
        ("suite", SUITE, "key of files of tests 'slices' is of Ringmaster itself"),
    ],
)  # fmt: skip
def test_nothing_of_ringmaster_is_replaced(kind, text, what, tmp_path):
    faults = faults_with(tmp_path, alpha={kind: text})
    assert any(what in fault and "and of alpha (distribution alpha)" in fault for fault in faults)


def test_entry_points_of_one_name_in_two_distributions_are_refused(tmp_path):
    groups = ("techniques", "losses", "metrics", "data_sources", "engines", "objectives")
    for name in ("alpha", "beta"):
        lines = "".join(f"[ringmaster.{group}]\nown = {name}:Own\n" for group in groups)
        install(tmp_path, name, {"job": JOB.format(key=name) + "JOB_FEATURES = (Own,)"}, entry_points=lines)
    with installed(tmp_path, {}):
        texts = [each.message for each in feature_findings()]
    both = "'own' is of alpha:Own (distribution alpha) and of beta:Own (distribution beta)"
    assert len(texts) == len(groups) and all(both in text for text in texts)


OPTIONS_THAT_FAIL = "def fail(command): 1 / 0\nOPTIONS = {'plan': fail}"
KEYS_THAT_FAIL = (
    JOB.format(key="own")
    + """
    @classmethod
    def job_keys(cls): return {}["own"]

ENTRY_KEYS = (OwnKeys,)
"""
)


@pytest.mark.parametrize(
    ("modules", "problem"),
    [
        ({"pages": "import missing_library"}, "pages cannot be imported: ModuleNotFoundError: No module named"),
        ({"pages": "RECORD_HOOKS = (1,)"}, "pages: RECORD_HOOKS is something else. To fix: write what is a tuple of"),
        ({"pages": "RECORD_HOOKS = {}"}, "pages: RECORD_HOOKS is something else"),
        ({"pages": "RECORD_HOOK = ()"}, "write RECORD_HOOKS"),
        ({"job": JOB_KEY["job"], "trainers": "TRAINER_CALLBACKS = ()"}, "rename trainers.py to trainer.py"),
        ({"jobs": "x = 1"}, "has no module of job, trainer"),
        ({**JOB_KEY, "__init__": "LOSSES = {}"}, "add entry points of the group ringmaster.losses"),
        ({**JOB_KEY, "__init__": "MODEL_LOSSES = {}"}, "MODEL_LOSSES is read of built-in features alone"),
        ({**JOB_KEY, "__init__": "FORMER_MODULES = {}"}, "FORMER_MODULES is read of built-in features alone"),
        ({"job": KEYS_THAT_FAIL}, "job: ENTRY_KEYS cannot be used: KeyError: 'own'"),
        ({"commands": OPTIONS_THAT_FAIL}, "OPTIONS cannot be used: ZeroDivisionError"),
    ],
)  # fmt: skip
def test_a_feature_that_cannot_be_used_is_refused_with_its_distribution_and_left_out_until_then(
    modules, problem, tmp_path, caplog
):
    with installed(tmp_path, {"alpha": modules}), caplog.at_level(logging.WARNING):
        assert all(module.__name__ != "alpha.pages" for module in features.modules("pages"))
        with pytest.raises(InputError, match="alpha") as refused:
            refuse_faulty_features()
        with pytest.raises(InputError, match="alpha"):
            Batch.of(name="b", jobs=[])
    assert any(problem in str(fault) for fault in refused.value.faults)
    assert "pages" not in modules or "the feature alpha (distribution alpha) is left out" in caplog.text


ROUTES = """
from starlette.routing import Route
def own(pool, is_ending):
    return [Route("{path}", print)]
{name} = own
"""


@pytest.mark.parametrize(
    ("path", "name", "what"), [("/own", "ROUTES", "is of alpha (dist"), ("/metrics", "KEYED_ROUTES", "of Ringmaster")]
)
def test_routes_of_another_feature_or_of_ringmaster_are_left_out(path, name, what, tmp_path, monkeypatch, caplog):
    text = {"routes": ROUTES.format(path=path, name=name)}
    with installed(tmp_path, {"alpha": text, "beta": text}), caplog.at_level(logging.WARNING):
        own = {each: each.module("routes") for each in features.installed_packages()}
        monkeypatch.setattr(metrics_server, "modules_by_package", lambda kind: own)
        routes, keyed = metrics_server.routes_of_features(None, lambda: False)
    assert [each.path for each in (*routes, *keyed)] == [path] * (path == "/own")
    assert f"{name} of beta (distribution beta) are left out: the HTTP route {path!r} is of" in caplog.text
    assert what in caplog.text


def test_options_of_two_features_give_a_command_what_both_have():
    given = []

    def up(when_up=()):
        given.extend(when_up)

    def with_own(command, value):
        return lambda **options: command(**with_values(options, "when_up", value))

    with_own(with_own(up, 1), 2)()
    assert given == [2, 1]


def test_a_batch_is_refused_with_all_faults_of_features_and_its_own(tmp_path):
    modules = {"pages": "import missing_library", "trainers": "TRAINER_CALLBACKS = ()"}
    with installed(tmp_path, {"alpha": modules}), pytest.raises(InputError) as refused:
        Batch.of(name="b", jobs=[])
    texts = list(map(str, refused.value.faults))
    assert all(any(part in text for text in texts) for part in ("alpha.pages cannot", "trainers.py", "has no job"))


def test_a_process_that_trains_refuses_a_faulty_module_of_its_own(tmp_path):
    with installed(tmp_path, {"alpha": {**JOB_KEY, OF_PROCESSES: "import missing_library"}}):
        refuse_faulty_features()  # which imports nothing that training alone needs
        with pytest.raises(InputError, match=r"alpha.trainer cannot be imported.*pip uninstall alpha"):
            refuse_faulty_modules(OF_PROCESSES)


def test_a_job_whose_feature_is_not_installed_here_is_refused():
    with pytest.raises(ValueError, match=r"no feature has the key unknown of a job. To fix: install here"):
        feature_of("unknown", 1)


FAULTY = {**JOB_KEY, "pages": "import missing_library"}


@pytest.mark.parametrize(
    ("start", "modules"),
    [
        (lambda: controller.serve_pool(None, notice=print), FAULTY),
        (lambda: node.serve_flows(None, name="n", notice=print), FAULTY),
        (lambda: node.serve_until_stopped(None, notice=print), FAULTY),
        (lambda: node.serve_until_stopped(None, notice=print), {**JOB_KEY, OF_PROCESSES: "import missing_library"}),
        (lambda: run_stages(None, None), FAULTY),
    ],
)
def test_what_runs_batches_refuses_faulty_features_when_it_begins(start, modules, tmp_path):
    with installed(tmp_path, {"alpha": modules}), pytest.raises(InputError, match=r"alpha.* cannot be imported"):
        start()


def test_a_pool_that_is_up_shows_its_address_also_with_faulty_features(tmp_path, monkeypatch):
    shown = []
    monkeypatch.setattr(up_and_down, "is_up", lambda home: True)
    monkeypatch.setattr(up_and_down, "print_states", shown.append)
    monkeypatch.setattr(pool_commands, "_print_ignored", shown.append)
    monkeypatch.setattr(pool_commands, "_show_pool", lambda *_, **__: shown.append("address"))
    with installed(tmp_path, {"alpha": FAULTY}):
        pool_commands.up(None)
    assert "address" in shown


CONDITIONAL = """
from ringmaster.techniques.training.callbacks import TrainerCallback
class Own(TrainerCallback): pass
if False:
    TRAINER_CALLBACKS = (Own,)
"""
TAKES_A_FILE = """
import inspect
def with_own(command):
    assert inspect.signature(command).parameters["batch_file"]
    return command
OPTIONS = {"run": with_own}
"""


@pytest.mark.parametrize(
    "modules",
    [
        {"client": "OPTIONS = {}"},
        {"job": JOB_KEY["job"].replace("import Desc", "import BATCH_KEY, Desc")},
        {"job": JOB_KEY["job"] + "\nBATCH_KEY = 'own'"},
        {"pages": "OWN = 1"},
        {OF_PROCESSES: CONDITIONAL},
        {"commands": TAKES_A_FILE},
    ],
)
def test_a_feature_that_works_is_not_refused_for_its_names(modules, tmp_path, monkeypatch):
    monkeypatch.setattr("ringmaster.techniques.job_features.BATCH_KEY", (), raising=False)
    with installed(tmp_path, {"alpha": {**JOB_KEY, **modules}}):
        refuse_faulty_features()
        refuse_faulty_modules(OF_PROCESSES)


@pytest.mark.parametrize("is_compiled", [True, False])
def test_a_module_of_a_feature_may_be_a_package_or_compiled(is_compiled, tmp_path):
    with installed(tmp_path, {"alpha": JOB_KEY}):
        file = tmp_path / "alpha" / "job.py"
        if is_compiled:
            py_compile.compile(file, file.with_suffix(".pyc"))
            file.unlink()
        else:
            file.with_suffix("").mkdir()
            file.rename(file.with_suffix("") / "__init__.py")
        refuse_faulty_features()
        assert features.modules("job")[-1].__name__ == "alpha.job"


@pytest.mark.parametrize("library", ["importlib.metadata", "importlib_metadata"])
def test_a_distribution_without_metadata_is_reported_as_one_without_a_name(tmp_path, library):
    importlib.import_module(library)  # the second one finds distributions, too, from then on
    install(tmp_path, "alpha", FAULTY)
    (tmp_path / "alpha-1.0.dist-info" / "METADATA").unlink()
    (fault,) = faults_with(tmp_path, beta={"job": JOB.format(key="own") + "JOB_FEATURES = (Own,)"})
    assert fault.startswith("alpha.pages cannot be imported")
    assert "To fix: delete its folder *.dist-info, or ask" in fault


@pytest.mark.parametrize("package", ["alpha", "ringmaster.features.stores"])
def test_a_package_that_two_distributions_name_is_one_feature_and_refused(package, tmp_path):
    install(tmp_path, "alpha", JOB_KEY)
    install(tmp_path, "beta", {})
    (tmp_path / "beta-1.0.dist-info" / "entry_points.txt").write_text(
        f"[{features.ENTRY_POINT_GROUP}]\none = {package}\nother = {package}\n"
    )
    with installed(tmp_path, {}):
        assert [each.name for each in features.packages()].count(package) == 1
        (fault,) = feature_findings()
    first = "alpha" if package == "alpha" else "Ringmaster itself"
    assert fault.message == f"the feature {package} is named by two distributions: {first} and beta"
    assert fault.remedy == "`pip uninstall beta`"


@pytest.mark.filterwarnings("ignore:.*found in sys.modules")  # a second copy of the command line
def test_a_command_of_a_group_of_ringmaster_stays(tmp_path, monkeypatch):
    monkeypatch.setattr(lineage.app, "registered_commands", [*lineage.app.registered_commands])
    text = COMMANDS + "def show(): pass\nCOMMANDS = {'lineage': (show, own)}"
    with installed(tmp_path, {"alpha": {"commands": text}}):
        runpy.run_module("ringmaster.flows.cli", run_name="cli", alter_sys=True)
        every = [(each.name or each.callback.__name__, each.callback) for each in lineage.app.registered_commands]
    (show,) = (call for name, call in every if name == "show")
    assert show.__module__.startswith("ringmaster.") and "own" in dict(every)


@pytest.mark.filterwarnings("ignore:.*found in sys.modules")  # a second copy of the command line
def test_options_that_cannot_be_used_are_left_out_of_the_command_line(tmp_path, caplog):
    with installed(tmp_path, {"alpha": {"commands": OPTIONS_THAT_FAIL}}), caplog.at_level(logging.WARNING):
        app = runpy.run_module("ringmaster.flows.cli", run_name="cli", alter_sys=True)["app"]
    assert "plan" in [each.name for each in app.registered_commands]
    assert "options of alpha (distribution alpha) for plan left out: ZeroDivisionError" in caplog.text


def test_a_server_that_has_left_out_a_feature_counts_as_changed(tmp_path, monkeypatch):
    sent = []
    monkeypatch.setattr("ringmaster.feature_hooks.left_out", left_out := set())
    monkeypatch.setattr(loaded_files, "left_out", left_out)
    with installed(tmp_path, {"alpha": FAULTY}):
        for kind in ("job", "pages"):
            features.modules(kind)
            loaded_files.report_changed(SimpleNamespace(send=sent.append), None)
    assert sent == [{"changed": []}, {"changed": ["alpha"]}]


KINDS_OF_CLASSIFIERS = [
    ("BertForSequenceClassification", "text-classification"),
    ("BertForTokenClassification", "token-classification"),
    ("ViTForImageClassification", "image-classification"),
]


@pytest.mark.parametrize(("architecture", "kind"), KINDS_OF_CLASSIFIERS)
def test_an_installed_kind_leaves_classifiers_of_other_columns_alone(architecture, kind, tmp_path):
    (tmp_path / "rows.jsonl").write_text(json.dumps({"premises": "a"}))
    text = f"INFERRED_KINDS = (('preference-of-alpha', ({architecture!r},)),)"
    data, model = DataSpec(path=str(tmp_path / "rows.jsonl")), ModelSpec(architecture=architecture)
    with installed(tmp_path, {"alpha": {"job": text}}), pytest.MonkeyPatch.context() as patch:
        has_columns = "ringmaster.techniques.data.inference._has_columns"
        patch.setattr(has_columns, lambda kind, spec, there: False)
        assert infer_kind(data, model) == kind
