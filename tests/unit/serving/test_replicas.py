"""A base on several devices: each client is on one replica, and has the bits that it has on one device."""

import pytest

from ringmaster.codec import from_json
from ringmaster.errors import InputError
from ringmaster.features.endpoint.compute.endpoint import Endpoint
from ringmaster.features.endpoint.compute.process import calls_of, tensor_to_json
from ringmaster.features.endpoint.compute.requests import EndpointLimits
from ringmaster.features.endpoint.server.compute_link import CallFailed, ComputeProcessDied, ComputeSettings
from ringmaster.features.endpoint.server.endpoint_file import BaseEntry
from ringmaster.features.endpoint.server.endpoint_server import check_base, served_devices
from ringmaster.features.endpoint.server.replicas import ReplicaLink, link_on
from tests.unit.serving.clients import LinkInProcess, entry_of
from tests.unit.serving.served import request_of, write_base

LIMITS = {"max_adapters": 8, "max_rank": 8, "seq_len": 64}
NAMES = ("ann", "bob", "cid")


class EndpointInProcess(LinkInProcess):
    """Calls an endpoint in this process."""

    def start(self):
        self._settings.folder.mkdir(parents=True, exist_ok=True)
        limits = from_json(EndpointLimits, self._settings.limits)
        self._endpoint = Endpoint(base=self._settings.base, limits=limits, folder=self._settings.folder)
        self._calls = calls_of(self._endpoint)

    def close(self):
        super().close()
        self._endpoint.close()


def opened(folder, *, num_devices, base="base", kind=LinkInProcess):
    folder.mkdir(exist_ok=True)
    settings = ComputeSettings(base=base, limits=LIMITS, folder=folder)
    link = link_on([settings] * num_devices, kind)
    link.start()
    return link


def add(link, name, *, rank=2):
    link.call("add", client=name, spec={"rank": rank, "seed": 1})


def loss_of(name, **options):
    request = request_of(name, **options)
    rows = [
        {"tokens": list(row.tokens), "inputs": {key: tensor_to_json(each) for key, each in row.loss_inputs.items()}}
        for row in request.rows
    ]
    return {"client": name, "rows": rows, "loss": "cross_entropy", "config": {}, "with_gradients": True}


@pytest.fixture
def replicas(tmp_path):
    return opened(tmp_path / "two", num_devices=2)


def test_new_clients_go_to_the_replica_with_the_fewest_and_stay_there(replicas, tmp_path):
    for name in NAMES:
        add(replicas, name)
    assert [replicas._places[name] for name in NAMES] == [0, 1, 0]
    replicas.call("remove", client="ann")
    add(replicas, "dan")
    assert replicas._places["dan"] in (0, 1) and "ann" not in replicas.call("clients")
    places = dict(replicas._places)
    fewer = opened(tmp_path / "two", num_devices=1)
    assert isinstance(fewer, ReplicaLink) and fewer._places == places
    assert set(fewer.call("clients")) == {"bob", "cid", "dan"}


def test_one_device_has_no_replicas(tmp_path):
    assert not isinstance(opened(tmp_path / "one", num_devices=1), ReplicaLink)


def test_each_client_has_the_losses_of_one_device_in_the_order_of_the_requests(tmp_path):
    base = write_base(tmp_path / "base")
    losses = {}
    for num_devices in (1, 2):
        link = opened(tmp_path / str(num_devices), num_devices=num_devices, base=base, kind=EndpointInProcess)
        for i, name in enumerate(NAMES):
            add(link, name, rank=2 + i)
        losses[num_devices] = []
        for step in range(2):
            results = link.call("compute", requests=[loss_of(name, lengths=(9 + i,), seed=step + 10 * i)
                                                     for i, name in enumerate(NAMES)])  # fmt: skip
            losses[num_devices] += [each["metrics"]["loss:sum"].hex() for each in results]
            steps = link.call("step", steps=[{"client": name, "learning_rate": 0.01} for name in NAMES[::-1]])
            assert all("grad_norm" in each for each in steps)
        assert {name: each["step"] for name, each in link.call("clients").items()} == dict.fromkeys(NAMES, 2)
        link.close()
    assert losses[2] == losses[1]


def test_a_call_that_one_replica_refuses_is_refused_for_its_clients_alone(replicas):
    add(replicas, "ann")
    add(replicas, "bob")
    broken = replicas._links[1].call
    replicas._links[1].call = lambda name, **values: _raise(CallFailed("no memory")) if name == "compute" else broken(
        name, **values
    )  # fmt: skip
    results = replicas.call("compute", requests=[loss_of("ann"), loss_of("bob")])
    assert "metrics" in results[0] and results[1]["refusal"] == "no memory"


def test_a_sample_takes_all_its_turns_on_one_replica_and_many_are_divided(replicas):
    calls = {}
    for place, link in enumerate(replicas._links):
        link.call = lambda name, place=place, **values: {
            id: calls.setdefault(id, []).append(place) or {"place": place} for id in values["requests"]
        }
    requests = {f"sampler:{i}": {"client": None} for i in range(20)}
    for _ in range(3):
        answers = replicas.call("sample", requests=requests, num_tokens=4, begun=[*requests])
        assert [*answers] == [*requests]
    assert all(len(places) == 3 and len(set(places)) == 1 for places in calls.values())
    assert {places[0] for places in calls.values()} == {0, 1}


def test_a_replica_that_dies_ends_the_call_and_the_next_start_has_all_clients(replicas):
    add(replicas, "ann")
    add(replicas, "bob")
    replicas._links[1].kill()
    with pytest.raises(ComputeProcessDied):
        replicas.call("compute", requests=[loss_of("ann"), loss_of("bob")])
    replicas.start()
    assert set(replicas.call("clients")) == {"ann", "bob"}


@pytest.mark.parametrize(
    ("asked", "num_gpus", "names", "cores"),
    [
        ({"device": None}, 0, ["cpu"], [()]),
        ({"device": None, "devices": 2}, 0, ["cpu", "cpu"], [(0, 1), (2, 3)]),
        ({"device": None}, 2, ["cuda:0"], [()]),
        ({"device": "cuda:1"}, 2, ["cuda:1"], [()]),
        ({"device": None, "devices": 2}, 2, ["cuda:0", "cuda:1"], [(), ()]),
        ({"devices": 2, "device": "cpu"}, 2, ["cpu", "cpu"], [(0, 1), (2, 3)]),
    ],
)
def test_a_machine_serves_on_its_gpus_or_on_shares_of_its_cores(monkeypatch, asked, num_gpus, names, cores):
    monkeypatch.setattr("ringmaster.tasks.cluster.gpus", lambda: [object()] * num_gpus)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 2, 3, 4})
    devices = served_devices(entry_of(**asked).serve)
    assert ([each.name for each in devices], [each.cores for each in devices]) == (names, cores)


def test_more_devices_than_a_machine_has_are_refused(monkeypatch):
    monkeypatch.setattr("ringmaster.tasks.cluster.gpus", lambda: [object()])
    with pytest.raises(InputError, match="2 are asked for, and this machine has 1 GPUs"):
        served_devices(entry_of(devices=2, device=None).serve)


def test_clients_of_a_base_keep_its_dtype(tmp_path):
    base = BaseEntry.model_construct(name="tiny", from_pretrained="base")
    (tmp_path / "base.json").write_text('{"name": "tiny", "from_pretrained": "base"}')  # of an earlier release
    check_base(tmp_path, base)
    with pytest.raises(InputError, match="in bf16, and the clients"):
        check_base(tmp_path, BaseEntry.model_construct(name="tiny", from_pretrained="base", dtype="bf16"))


def _raise(error):
    raise error


def test_samples_that_are_given_up_are_dropped_by_all_replicas(replicas, tmp_path):
    assert replicas.call("sample", requests={}, num_tokens=1, begun=[]) == {}
    calls = [file.read_text().splitlines()[-1] for file in sorted(tmp_path.rglob("calls.jsonl"))]
    assert calls == ['["sample", []]'] * 2
