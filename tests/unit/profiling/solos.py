"""Jobs that may share a base, with preflights and profiles of each alone."""

from ringmaster.tasks.cluster import Cluster, Device, Node
from ringmaster.tasks.profiling.group_layouts import classes
from ringmaster.techniques import Adapter, DataSpec, Job, ModelSpec, Profile
from ringmaster.techniques.model_facts import ModelFacts
from ringmaster.techniques.preflight_result import Candidate, Preflight

FACTS = ModelFacts(num_parameters=250, parameter_bytes=1000, largest_layer_bytes=100, num_layers=1, has_dropout=False)
MODEL = ModelSpec(architecture="LlamaForCausalLM", config={"hidden_size": 32})


def job(name, **changes):
    plain = {"model": MODEL, "data": DataSpec(source="python-stdlib", seq_len=16), "adapter": Adapter()}
    return Job(name=name, **{**plain, "global_batch_size": 4, "num_steps": 2000, **changes})


def preflight(job, *, own_bytes=100, facts=FACTS):
    whole = Candidate(
        technique="single",
        config={"micro_batch": job.global_batch_size, "recompute": "none"},
        num_devices=1,
        num_ranks=1,
        least_bytes=FACTS.parameter_bytes + own_bytes,
    )
    return Preflight(job=job.name, data={}, facts=facts, candidates=(whole,), refusals=())


def alone(step_s=1.0, num_devices=1, **changes):
    plain = {"startup_s": 2.0, "save_s": 0.1, "evaluate_s": 0.5, "export_s": 0.2, "peak_bytes": 1100}
    config = {"micro_batch": 4, "recompute": "none"}
    given = {"technique": "single", "config": config, "num_devices": num_devices, "num_ranks": 1, "step_s": step_s}
    return Profile(**{**given, **plain, **changes})


def classes_of(jobs, *, profiles=None, preflights=None):
    preflights = {j.name: preflight(j) for j in jobs} | (preflights or {})
    profiles = {j.name: (alone(),) for j in jobs} | (profiles or {})
    return classes(jobs, preflights, profiles, keys={j.name: "key" for j in jobs})


def members(num, **options):
    (found,) = classes_of([job(f"job-{i:02}") for i in range(num)], **options)
    return found


def cluster(num_devices, *, kind="cpu", memory_bytes=1 << 30):
    devices = [Device(kind=kind, index=i, name="x", memory_bytes=memory_bytes, cores=(i,)) for i in range(num_devices)]
    return Cluster(nodes=(Node(name="here", devices=tuple(devices)),))


def names(groups):
    return [tuple(solo.job.name for solo in group) for group in groups]
