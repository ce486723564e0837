"""The parameters of a job's run."""

from ringmaster.model_lineage.ledger.runs import flat_params
from ringmaster.tasks.recording.rows import job_params
from ringmaster.techniques import DataSpec, Job, ModelSpec

LLAMA = ModelSpec(architecture="LlamaForCausalLM")


def params_of(data, *, columns=(), **changes):
    job = Job(name="a", model=LLAMA, data=data, num_steps=1, **changes)
    return flat_params(job_params(job, columns=dict(columns)))


def test_a_loss_has_its_options_also_where_they_are_the_defaults():
    data = DataSpec(kind="preference", path="a.jsonl")
    found = params_of(data, loss="dpo", loss_options={"beta": 0.3}, columns=(("chosen", "better"),))
    options = {name: value for name, value in found.items() if name.startswith("loss")}
    assert options == {"loss": "dpo", "loss.beta": 0.3, "loss.label_smoothing": 0.0, "loss.loss_type": "sigmoid"}
    assert (found["data.kind"], found["data.chosen_column"]) == ("preference", "better")
    assert "data.packing" not in found


def test_data_has_its_kind_and_the_options_of_that():
    found = params_of(DataSpec(path="a.txt", seq_len=8))
    assert (found["data.kind"], "loss" in found) == ("language-modeling", False)
    found = params_of(DataSpec(kind="chat", path="a.jsonl", packing=True))
    assert (found["data.padding"], found["data.sampling"], found["data.packing"]) == ("longest", "random", True)
    found = params_of(DataSpec(kind="image-classification", path="a/**", kwargs={"image_size": 8}))
    assert (found["data.kwargs.image_size"], found["data.kwargs.mode"]) == (8, "RGB")


def test_a_loss_of_a_package_that_is_not_installed_here_has_what_was_given():
    found = params_of(DataSpec(path="a.txt", seq_len=8), loss="elsewhere", loss_options={"gamma": 2.0})
    assert (found["loss"], found["loss.gamma"]) == ("elsewhere", 2.0)
