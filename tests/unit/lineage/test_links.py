from ringmaster.model_lineage.pages import links


def test_paths_are_those_of_the_ui():
    assert links.run_path("1", "abc").startswith("#/experiments/1/runs/abc?")
    assert links.model_version_path("llama-lr0.001", 3).startswith("#/models/llama-lr0.001/versions/3?")
    assert links.logged_model_path("1", "m-1").startswith("#/experiments/1/models/m-1?")
    assert links.artifact_path("1", "abc", "plan/a b.svg").startswith(
        "#/experiments/1/runs/abc/artifacts/plan/a%20b.svg?"
    )


def test_names_cannot_break_out_of_a_link():
    assert links.link("a](http://evil)", links.model_version_path("x/..)", 1)) == (
        "[a\\](http&#58;//evil)](#/models/x%2F..%29/versions/1?workflowType=machine_learning)"
    )
