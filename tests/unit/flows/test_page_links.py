"""Links from a flow run to MLflow's pages, and back."""

from ringmaster.flows.batch.artifacts import flow_run_page, records_markdown
from ringmaster.flows.batch.result import BatchResult

RUN = "#/experiments/1/runs/abc?workflowType=machine_learning"


def result(**uris):
    jobs = tuple({"name": name, "model_uri": uri} for name, uri in uris.items())
    figures = {"makespan_s": 1.0, "value": 1.0, "idle_s": 0.0, "num_trials": 0, "profiling_s": 0.0}
    return BatchResult(
        batch="tiny", status="done", plan={}, objective="makespan", current_practice_s=None, jobs=jobs, **figures
    )


def test_the_batch_and_each_model_have_a_link():
    text = records_markdown(result(llama="models:/tiny.llama/3", vit=None), server="http://host:5000", run_path=RUN)
    assert f"(http://host:5000/{RUN})" in text
    page = "http://host:5000/#/models/tiny.llama/versions/3?workflowType=machine_learning"
    assert f"| llama | [tiny.llama version 3]({page}) |" in text
    assert "vit" not in text


def test_no_table_without_a_model():
    assert "|" not in records_markdown(result(vit=None), server="http://host:5000/", run_path=RUN)


def test_a_password_in_the_servers_address_stays_out_of_the_page():
    text = records_markdown(result(), server="https://ann:secret@host:5000", run_path=RUN)
    assert "secret" not in text
    assert f"(https://host:5000/{RUN})" in text


def test_outside_of_a_flow_run_there_is_no_page():
    assert flow_run_page() is None
