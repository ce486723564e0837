import sys
from dataclasses import replace

import pytest

from ringmaster.codec import to_json
from ringmaster.errors import EngineUnavailable
from ringmaster.features.ray.ray_engine import BrokerConnection, RayActors, cause
from ringmaster.tasks.pool.provider import Allocation, AllocationStatus
from ringmaster.tasks.pool.work_pool import FIRST_DELAY_S, WorkPoolProvider


class FakeRay:
    """A Ray cluster with room for any number of actors."""

    def __init__(self) -> None:
        self.actors: dict[str, Allocation] = {}

    def ask(self, call: str, *arguments: str) -> object:
        return getattr(self, call)(*arguments)

    def poll(self) -> object:
        return [to_json(each) for each in self.actors.values()]

    def start(self) -> str:
        id = f"ray:node-{len(self.actors)}"
        self.actors[id] = Allocation(id=id, status=AllocationStatus.PENDING)
        return id

    def end(self, id: str) -> None:
        is_pending = self.actors[id].status == AllocationStatus.PENDING
        self.become(AllocationStatus.ENDED if is_pending else AllocationStatus.LEAVING, id)

    def become(self, status: AllocationStatus, *ids: str, why: str = "") -> None:
        self.actors |= {id: replace(self.actors[id], status=status, why=why) for id in ids}

    def close(self) -> None:
        pass


@pytest.fixture
def ray() -> FakeRay:
    return FakeRay()


@pytest.fixture
def now_s() -> list[float]:
    return [0.0]


@pytest.fixture
def provider(ray, now_s):
    actors = RayActors(ray)
    return WorkPoolProvider(node_runs=actors, machines=actors, on_close=ray.close, clock=lambda: now_s[0])


def statuses(provider):
    provider.poll()
    return [each.status for each in provider.allocations().values()]


def serving(provider, ray, *, num_nodes):
    provider.request(num_nodes)
    provider.poll()
    ray.become(AllocationStatus.RUNNING, *ray.actors)
    provider.served(ray.actors)
    assert statuses(provider) == [AllocationStatus.RUNNING] * num_nodes


def test_as_many_actors_live_as_nodes_are_requested(ray, provider):
    serving(provider, ray, num_nodes=2)
    provider.request(3)
    assert statuses(provider) == [AllocationStatus.RUNNING] * 2
    provider.request(2)
    assert statuses(provider) == [AllocationStatus.RUNNING] * 2 + [AllocationStatus.PENDING]
    assert statuses(provider) == [AllocationStatus.RUNNING] * 2 + [AllocationStatus.ENDED]


def test_an_actor_that_is_lost_is_replaced_and_one_that_is_given_back_is_not(ray, provider):
    serving(provider, ray, num_nodes=2)
    first, second = ray.actors
    ray.become(AllocationStatus.LOST, first, why="its worker died")
    provider.poll()
    assert len(ray.actors) == 3
    provider.request(1)
    provider.release(second)
    provider.poll()
    assert ray.actors[second].status == AllocationStatus.LEAVING
    provider.poll()
    assert len(ray.actors) == 3


def test_an_actor_that_died_before_its_node_served_is_said_with_its_cause_and_not_replaced_at_once(
    ray, provider, now_s, caplog
):
    provider.request(1)
    provider.poll()
    ray.become(AllocationStatus.LOST, *ray.actors, why="No module named 'ringmaster'")
    provider.poll()
    assert "No module named 'ringmaster'" in caplog.text
    assert len(ray.actors) == 1
    now_s[0] = FIRST_DELAY_S
    provider.poll()
    assert len(ray.actors) == 2


ANSWERS_ONCE = """
import os, socket, sys
from ringmaster.techniques.processes.channel import Channel
channel = Channel(socket.socket(fileno=os.dup(0)))
request = channel.receive()
channel.send({"error": "no"} if request["call"] == "refuse" else {"result": [request["call"], *request["arguments"]]})
if request["call"] != "die":
    channel.receive()
"""


def test_a_process_that_talks_to_ray_and_ends_is_started_again_by_the_next_request(tmp_path):
    connection = BrokerConnection(log=tmp_path / "log", command=(sys.executable, "-c", ANSWERS_ONCE))
    assert connection.ask("end", "ray:one") == ["end", "ray:one"]
    with pytest.raises(EngineUnavailable):
        connection.ask("poll")
    with pytest.raises(EngineUnavailable, match="no"):
        connection.ask("refuse")
    connection.close()
    with pytest.raises(EngineUnavailable, match="ending"):
        connection.ask("poll")


def test_the_cause_of_an_actors_death_is_found_in_rays_message():
    message = """The actor died unexpectedly before finishing this task.
    \tclass_name: NodeActor
    \tactor_id: 25c9e3cfa01d8830ffe1209001000000
    The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR"""
    assert cause(message) == "The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR"
    assert cause("all of\n  it") == "all of it"
