"""Tasks of EleutherAI's lm-evaluation-harness as metrics: `lm-eval/TASK`, or `lm-eval/TASK/MEASURE`.

A task is one of the library's own, or a YAML file in a folder `lm_eval_tasks` on the import path, such as next to
the batch file. Paths of data files in it are relative to it. The extra `lm-eval` is needed.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import yaml

from ringmaster.compat.lm_eval import task_config
from ringmaster.extras import require_extra
from ringmaster.techniques.metric import ModelMetric

if TYPE_CHECKING:
    from ringmaster.techniques.metric import Values

FAMILY, FOLDER = "lm-eval", "lm_eval_tasks"
FEWSHOT_SEED = 1234  # as in the library's own command


@cache
def lm_eval_metric(rest: str) -> type[LmEvalTask]:
    """Returns the metric of a task, "TASK" for its first measure or "TASK/MEASURE".

    Raises ValueError where the extra is not installed, or there is no such task or measure.
    """
    name = f"{FAMILY}/{rest}"
    require_extra(FAMILY, feature=f"the metric {name}")
    task, _, wanted = rest.partition("/")
    measures = _measures(_plain_config(task_file(task)))
    if wanted and wanted not in measures:
        raise ValueError(f"metric {name}: the task has no {wanted}. To fix: name one of {', '.join(measures)}")
    measure = wanted or next(iter(measures))
    fields = {
        "name": name,
        "sums": (name,),
        "higher_is_better": measures[measure],
        "task": task,
        "measure_name": measure,
    }
    return type("LmEvalTask", (LmEvalTask,), fields)


class LmEvalTask(ModelMetric):
    """One measure of one task, over its documents.

    task: the task's name. measure_name: of the task's `metric_list`, by the first of its filters.
    """

    task: ClassVar[str]
    measure_name: ClassVar[str]

    def num_rows(self) -> int:
        """Returns the number of documents."""
        return len(self._loaded().eval_docs)

    def measure(self, model: Any, rows: Sequence[int], *, tokenizer_dir: Path | None, batch_size: int) -> Values:
        """Returns the measure of some documents, [rows] or [rows, k] for those that are sums and weights."""
        from lm_eval.evaluator import evaluate
        from lm_eval.models.huggingface import HFLM
        from transformers import AutoTokenizer

        if tokenizer_dir is None:
            raise ValueError(f"metric {self.name}: the data has no tokenizer. To fix: give data of text")
        if not rows:
            return np.zeros(0)
        tokenizer = AutoTokenizer.from_pretrained(tokenizer_dir, local_files_only=True)
        with _untied(model):
            lm = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size)
            tasks = {"tasks": {self.task: self._loaded()}, "groups": {}, "group_map": {}}
            result: Any = evaluate(lm, tasks, samples={self.task: list(rows)}, bootstrap_iters=0)
        samples = result["samples"][self.task]
        first = samples[0]["filter"]
        by_doc = {each["doc_id"]: each[self.measure_name] for each in samples if each["filter"] == first}
        try:
            return np.asarray([by_doc[row] for row in rows], dtype=np.float64)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"metric {self.name}: its values of documents are not numbers. To fix: name another measure of the task"
            ) from error

    def value_of_rows(self, rows: Mapping[str, Values], counts: Values) -> Values:
        """Returns the task's aggregation of the documents, each as often as it is counted."""
        values = [tuple(each) if isinstance(each, list) else each for each in rows[self.name].tolist()]
        samples = np.atleast_2d(counts).astype(int)
        numbers = [np.repeat(np.arange(len(values)), each) for each in samples]
        result = [self._aggregate([values[number] for number in each]) for each in numbers]
        return np.asarray(result).reshape(counts.shape[:-1])

    @cached_property
    def _aggregate(self) -> Callable[[list[Any]], float]:
        aggregate: Callable[[list[Any]], float] = self._loaded().aggregation()[self.measure_name]
        return aggregate

    def _loaded(self) -> Any:
        """Returns the task with its documents. Raises ValueError where they cannot be read."""
        from lm_eval.tasks import TaskManager

        file = task_file(self.task)
        try:
            config = task_config(file)
            options = config.get("dataset_kwargs") or {}
            if "data_files" in options:
                config["dataset_kwargs"] = {**options, "data_files": _absolute(options["data_files"], file.parent)}
            loaded = TaskManager(include_defaults=False).load([config])
        except (ImportError, LookupError, OSError, RuntimeError, TypeError, ValueError) as error:
            raise ValueError(
                f"metric {self.name}: its documents cannot be read: {' '.join(str(error).split())}. To fix: correct "
                f"{file}, or give its data files by dataset_kwargs.data_files"
            ) from error
        (task,) = loaded["tasks"].values()
        if task.get_config("num_fewshot") is None:
            task.set_config(key="num_fewshot", value=0)
        task.set_fewshot_seed(seed=FEWSHOT_SEED)
        return task


@cache
def task_file(task: str) -> Path:
    """Returns the YAML file of a task. Raises ValueError where there is none.

    The files are searched as text: the library's own index of its thousands of tasks takes many seconds.
    """
    library = find_spec("lm_eval")
    assert library is not None and library.submodule_search_locations is not None, "the extra is installed"
    own = [Path(path, FOLDER).absolute() for path in sys.path]
    line = re.compile(rf"^task:\s*([\"']?){re.escape(task)}\1\s*(#.*)?$".encode(), re.MULTILINE)
    for folder in (*own, Path(library.submodule_search_locations[0], "tasks")):
        for file in sorted(folder.rglob("*.yaml")):
            if line.search(file.read_bytes()):
                return file
    raise ValueError(
        f"metric {FAMILY}/{task}: there is no task {task!r}. To fix: name a task of lm-eval (no group), or put its "
        f"YAML file in a folder {FOLDER} next to the batch file"
    )


class _TaskMetadataLoader(yaml.SafeLoader):
    """Reads names of functions as text: only metadata is needed, in processes that need not import the library."""


_TaskMetadataLoader.add_multi_constructor("!", lambda loader, suffix, node: loader.construct_scalar(node))


def _plain_config(file: Path) -> dict[str, Any]:
    config: dict[str, Any] = yaml.load(file.read_bytes(), Loader=_TaskMetadataLoader)  # noqa: S506 - a SafeLoader
    included = config.pop("include", ())
    base: dict[str, Any] = {}
    for each in [included] if isinstance(included, str) else included:
        base |= _plain_config(file.parent / each)
    return base | config


def _absolute(files: Any, folder: Path) -> Any:
    if isinstance(files, Mapping):
        return {split: _absolute(each, folder) for split, each in files.items()}
    if isinstance(files, (list, tuple)):
        return [_absolute(each, folder) for each in files]
    return files if "://" in files else str(folder / files)


def _measures(config: Mapping[str, Any]) -> dict[str, bool]:
    """Returns whether more is better, by measure, in the task's order."""
    named: list[dict[str, Any]] = config.get("metric_list") or []
    result = {each["metric"]: each.get("higher_is_better") for each in named}
    if not named or None in result.values():
        from lm_eval.api.registry import DEFAULT_METRIC_REGISTRY, is_higher_better

        result = result or dict.fromkeys(DEFAULT_METRIC_REGISTRY[config.get("output_type", "generate_until")])
        result = {name: is_higher_better(name) if known is None else known for name, known in result.items()}
    return {name: bool(known) for name, known in result.items()}


@contextmanager
def _untied(model: Any) -> Iterator[None]:
    """Keeps the library from tying the model's weights again, which a trained head may have left."""
    model.tie_weights = lambda *_, **__: None
    try:
        yield
    finally:
        del model.tie_weights
