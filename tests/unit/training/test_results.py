"""What the techniques and the features of others return of a job, as its result."""

from types import SimpleNamespace

import pytest

from ringmaster.techniques.black_box import checked_result, checked_trial
from ringmaster.techniques.processes.gang_events import JobResult, OutcomeStatus
from ringmaster.techniques.processes.worker import _with_features
from ringmaster.techniques.training.callbacks import TrainerCallback
from ringmaster.techniques.training.job_session import JobSession

JOB = SimpleNamespace(total_steps=3)


class Noting(TrainerCallback):
    """A callback with a value of its own, and one of the result's."""

    def __init__(self, **values):
        self.values = values

    def after_export(self, state, reporter):
        return self.values

    def final_values(self, metrics):
        return {"ended_early": True, "loss_before": metrics["loss"] + 1.0}


def test_a_result_has_the_values_of_all_callbacks_and_features(tmp_path):
    session = JobSession.__new__(JobSession)
    session.rank_job = SimpleNamespace(
        callbacks=(Noting(pages=2), Noting(compared=())),
        order=SimpleNamespace(model_dir=str(tmp_path)),
        ranks=SimpleNamespace(sum=lambda values: values),
        export=lambda folder, root: None,
        num_evaluated_rows=lambda: 4,
        next_step=3,
    )
    session._root, session._reporter, session._sender = str(tmp_path), None, None
    session.progress = SimpleNamespace(flush=lambda: None)
    session._saver = SimpleNamespace(finish=lambda: None, has_failed=False)
    session._metrics, session._result = {"loss": 0.5}, JobResult(first_step=0)
    session.export()
    result = session.end(OutcomeStatus.DONE)
    assert (result.ended_early, result.compared, result.step) == (True, (), 3)
    assert result.others == {"pages": 2, "loss_before": 1.5}
    feature = SimpleNamespace(segment_result=lambda cache_dir: {"packages": 7})
    order = SimpleNamespace(job=SimpleNamespace(features=(feature,)), cache_dir=str(tmp_path))
    assert _with_features(result, order).others == {**result.others, "packages": 7}


def test_a_technique_of_others_may_return_the_json_form_of_its_results():
    assert checked_trial({"status": "done"}) == checked_trial(JobResult(status=OutcomeStatus.DONE))
    ended = checked_result({"status": "done", "step": 3, "metrics": {"loss": 1.0}, "pages": 2}, JOB)
    assert (ended.step, ended.metrics, ended.others) == (3, {"loss": 1.0}, {"pages": 2})


@pytest.mark.parametrize("result", [None, {}, {"status": "fine"}, JobResult()])
def test_a_trial_without_a_result_is_refused(result):
    with pytest.raises(ValueError, match=r"its profile returned .* To fix: a JobResult whose status is one of done, "):
        checked_trial(result)


def test_a_result_of_a_wrong_shape_is_refused_with_what_is_wrong():
    with pytest.raises(ValueError, match=r"its run returned .*'metrics': 5.*: an object is wanted, not 5. To fix: a "):
        checked_result({"status": "done", "step": 3, "metrics": 5}, JOB)
