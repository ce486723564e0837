from ringmaster.model_lineage import model_pages


def test_paths_are_those_of_the_ui():
    assert model_pages.run_path("1", "abc").startswith("#/experiments/1/runs/abc?")
    assert model_pages.model_version_path("llama-lr0.001", 3).startswith("#/models/llama-lr0.001/versions/3?")
    assert model_pages.logged_model_path("1", "m-1").startswith("#/experiments/1/models/m-1?")
    assert model_pages.artifact_path("1", "abc", "plan/a b.svg").startswith(
        "#/experiments/1/runs/abc/artifacts/plan/a%20b.svg?"
    )


def test_names_cannot_break_out_of_a_link():
    assert model_pages.link("a](http://evil)", model_pages.model_version_path("x/..)", 1)) == (
        "[a\\](http&#58;//evil)](#/models/x%2F..%29/versions/1?workflowType=machine_learning)"
    )
