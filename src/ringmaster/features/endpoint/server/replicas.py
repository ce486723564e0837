"""A base on several devices: each has a replica of it, in a process of its own, and each client is on one of them.

A client's rows, gradients and steps are computed by its replica alone, so it has the bits that it would have on one
device. A new client goes to the replica with the fewest; samples of checkpoints go to any. A replica keeps its clients'
states in a folder of its own: where there are fewer devices than replicas, some devices have several.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from ringmaster.features.endpoint.server.compute_link import (
    CallFailed,
    ComputeLink,
    ComputeProcessDied,
    ComputeSettings,
)
from ringmaster.files import folders_in


@dataclass(frozen=True, kw_only=True)
class ComputeDevice:
    """A device that computes. name: such as "cpu". cores: of a share of the processor; empty for all of it."""

    name: str
    cores: tuple[int, ...] = ()


CPU = ComputeDevice(name="cpu")
FOLDER = "replicas"
"""In the folder of a base: the folders of its further replicas, by number; that of the base itself is replica 0."""
Requests = Mapping[Any, Mapping[str, Any]]


def replica_folder(folder: Path, number: int) -> Path:
    """Returns the folder of a replica."""
    return folder / FOLDER / str(number) if number else folder


def num_replicas(folder: Path) -> int:
    """Returns how many replicas of a base have been there."""
    return 1 + max((int(each.name) for each in folders_in(folder / FOLDER) if each.name.isdecimal()), default=0)


def link_on(
    devices: Sequence[ComputeSettings], link_of: Callable[[ComputeSettings], ComputeLink] = ComputeLink
) -> ComputeLink:
    """Returns the link to a base on some devices.

    devices: The settings of a process on each, all with the folder of the base.
    """
    folder = devices[0].folder
    num = max(len(devices), num_replicas(folder))
    settings = [replace(devices[i % len(devices)], folder=replica_folder(folder, i)) for i in range(num)]
    return link_of(settings[0]) if num == 1 else ReplicaLink([link_of(each) for each in settings])


class ReplicaLink(ComputeLink):
    """Calls to the processes of all replicas. Where one of them dies, all are started again."""

    def __init__(self, links: Sequence[ComputeLink]) -> None:
        self._links = links
        self._threads = ThreadPoolExecutor(len(links), thread_name_prefix="replica")
        self._places: dict[str, int] = {}  # by client, the number of its replica

    @property
    def pid(self) -> int | None:
        """The id of the first process."""
        return self._links[0].pid

    def start(self) -> None:
        """Starts the processes, and returns once all have loaded the base. Raises CallFailed where one cannot."""
        self._all([link.start for link in self._links])
        clients = self._all([partial(link.call, "clients") for link in self._links])
        self._places = {client: i for i, own in enumerate(clients) for client in own}

    def call(self, name: str, /, **values: Any) -> Any:
        """Returns the answer to a call. Raises ComputeProcessDied, or CallFailed with the reason."""
        if name in ("compute", "step"):
            key = "steps" if name == "step" else "requests"
            numbered = dict(enumerate(values[key]))
            answers = self._divided(name, lambda own: {key: [*own.values()]}, numbered)
            return [answers[i] for i in numbered]
        if name == "sample":
            if not values["requests"]:  # samples that go on no more are given up
                self._all([partial(link.call, name, **values) for link in self._links])
            answers = self._divided(name, lambda own: {**values, "requests": own}, values["requests"])
            return {id: answers[id] for id in values["requests"]}
        if name == "clients" or (name == "forget_gradients" and values["client"] is None):
            states = self._all([partial(link.call, name, **values) for link in self._links])
            return {client: state for own in states if own for client, state in own.items()}
        return self._of_one(name, values)

    def kill(self) -> None:
        """Kills the processes, from any thread."""
        for link in self._links:
            link.kill()

    def close(self) -> None:
        """Ends the processes."""
        self._all([link.close for link in self._links])

    def _of_one(self, name: str, values: Mapping[str, Any]) -> Any:
        """Calls the replica of a client; for a new one, and the price of one, that with the fewest."""
        client = values.get("client", "")
        place = self._places.get(client, self._emptiest())
        answer = self._links[place].call(name, **values)
        if name == "add":
            self._places[client] = place
        elif name == "remove":
            self._places.pop(client, None)
        return answer

    def _emptiest(self) -> int:
        held = list(self._places.values())
        return min(range(len(self._links)), key=held.count)

    def _divided(
        self, name: str, values_of: Callable[[Requests], Mapping[str, Any]], requests: Requests
    ) -> Mapping[Hashable, Any]:
        """Has each replica compute the requests of its clients, at once; returns the answers by the requests' keys.

        values_of: the values of the call for some of the requests.
        """
        shares: dict[int, dict[Any, Mapping[str, Any]]] = {}
        for key, request in requests.items():
            shares.setdefault(self._place_of(key, request), {})[key] = request

        def answers_of(place: int, own: Requests) -> Mapping[Hashable, Any]:
            try:
                answers = self._links[place].call(name, **values_of(own))
            except CallFailed as error:  # what others have computed counts
                return {key: {"refusal": str(error), "category": "server"} for key in own}
            return answers if isinstance(answers, Mapping) else dict(zip(own, answers, strict=True))

        acts = [partial(answers_of, place, own) for place, own in shares.items()]
        return {key: answer for answers in self._all(acts) for key, answer in answers.items()}

    def _place_of(self, key: Hashable, request: Mapping[str, Any]) -> int:
        """Returns the replica of a request. A sample of a checkpoint takes all its turns on one that its id decides."""
        if (client := request["client"]) is None:
            return zlib.crc32(str(key).encode()) % len(self._links)
        return self._places.get(client, 0)

    def _all(self, acts: Sequence[Callable[[], Any]]) -> list[Any]:
        """Does all at once, and waits for all of them. Raises ComputeProcessDied where a process has died."""
        futures: list[Future[Any]] = [self._threads.submit(act) for act in acts]
        errors = [error for future in futures if (error := future.exception()) is not None]
        if errors:
            raise next((each for each in errors if isinstance(each, ComputeProcessDied)), errors[0])
        return [future.result() for future in futures]
