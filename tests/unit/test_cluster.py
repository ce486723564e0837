"""Detection of a machine's devices, from a fake driver and a fake file system."""

import os
from pathlib import Path

import psutil
import pytest

from ringmaster.codec import from_json, to_json
from ringmaster.tasks.cluster import Cluster, Device, Node, cpu_slots, detect, gpus


class FakeNvml:
    """The part of pynvml that detection calls. num_gpus: the number of GPUs, or None without a driver."""

    class NVMLError(Exception):
        pass

    def __init__(self, num_gpus: int | None) -> None:
        self.num_gpus = num_gpus
        self.num_open = 0

    def nvmlInit(self) -> None:
        if self.num_gpus is None:
            raise self.NVMLError("NVML Shared Library Not Found")
        self.num_open += 1

    def nvmlShutdown(self) -> None:
        self.num_open -= 1

    def nvmlDeviceGetCount(self) -> int:
        return self.num_gpus or 0

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetName(self, handle: int) -> str:
        return "NVIDIA H200"

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return f"GPU-{handle}{handle}{handle}"

    def nvmlDeviceGetEnforcedPowerLimit(self, handle: int) -> int:
        if handle:
            raise self.NVMLError("Not Supported")
        return 700_000

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> object:
        class Memory:
            total = 141 * 2**30

        return Memory


NO_DRIVER = FakeNvml(None)


@pytest.fixture(autouse=True)
def four_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 4, 5})
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The files of a machine on which CPUs 0 and 4 are the threads of one core, and CPUs 1 and 5 of another."""
    for cpu in (0, 1, 4, 5):
        write(tmp_path / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list", f"{cpu % 4},{cpu % 4 + 4}\n")
    write(tmp_path / "proc/cpuinfo", "processor\t: 0\nmodel name\t: AMD EPYC 9654\n")
    write(tmp_path / "proc/self/cgroup", "0::/jobs/mine\n")
    return tmp_path


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_the_power_limit_of_a_gpu_is_known_where_nvml_says_it():
    assert [gpu.power_limit_w for gpu in gpus(nvml=FakeNvml(2))] == [700.0, None]


def test_auto_takes_the_gpus_and_shares_the_cores_among_them():
    nvml = FakeNvml(2)
    cluster = detect(nvml=nvml)
    assert [(d.kind, d.index, d.cores, d.uuid) for d in cluster.devices] == [
        ("gpu", 0, (0, 1), "GPU-000"),
        ("gpu", 1, (4, 5), "GPU-111"),
    ]
    assert cluster.devices[0].memory_bytes == 141 * 2**30
    assert cluster.device_kind() == "NVIDIA H200"
    assert nvml.num_open == 0


def test_auto_takes_a_slot_for_each_physical_core_where_there_is_no_gpu(root: Path):
    for nvml in (NO_DRIVER, FakeNvml(0)):
        cluster = detect(nvml=nvml, root=root)
        assert [(d.kind, d.index, d.cores) for d in cluster.devices] == [("cpu", 0, (0, 4)), ("cpu", 1, (1, 5))]
        assert cluster.device_kind() == "AMD EPYC 9654, 2 cores"


def test_cpus_are_cores_where_the_kernel_does_not_tell(tmp_path: Path):
    assert [slot.cores for slot in cpu_slots(root=tmp_path)] == [(0,), (1,), (4,), (5,)]


def test_threads_are_parted_where_there_would_be_a_single_slot(root: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 4})
    assert [slot.cores for slot in cpu_slots(root=root)] == [(0,), (4,)]


def test_a_single_cpu_is_a_single_slot(root: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {5})
    assert [slot.cores for slot in cpu_slots(root=root)] == [(5,)]


@pytest.mark.parametrize(
    ("number", "cores"),
    [(1, [(0, 1, 4, 5)]), (2, [(0, 4), (1, 5)]), (3, [(0,), (1,), (4,)]), (4, [(0,), (1,), (4,), (5,)])],
)
def test_asked_slots_are_equal_and_disjoint(number: int, cores: list[tuple[int, ...]], root: Path):
    cluster = detect({"cpu": number}, nvml=FakeNvml(2), root=root)
    assert [device.cores for device in cluster.devices] == cores


def test_memory_is_shared_evenly_within_the_limits_of_every_control_group(root: Path):
    (whole,) = cpu_slots(1, root=root)
    assert whole.memory_bytes == psutil.virtual_memory().total
    write(root / "sys/fs/cgroup/jobs/mine/memory.max", "max\n")
    write(root / "sys/fs/cgroup/jobs/memory.max", "4000000\n")
    assert [slot.memory_bytes for slot in cpu_slots(2, root=root)] == [2_000_000, 2_000_000]
    write(root / "sys/fs/cgroup/memory.max", "1000000\n")
    assert [slot.memory_bytes for slot in cpu_slots(2, root=root)] == [500_000, 500_000]


def test_memory_limits_of_the_first_version_of_control_groups_count_too(root: Path):
    write(root / "proc/self/cgroup", "4:memory:/box\n3:cpu,cpuacct:/box\n0::/\n")
    write(root / "sys/fs/cgroup/memory/box/memory.limit_in_bytes", "3000000\n")
    assert [slot.memory_bytes for slot in cpu_slots(2, root=root)] == [1_500_000, 1_500_000]


@pytest.mark.parametrize(
    ("quota", "num_slots"), [("max 100000", 4), ("250000 100000", 2), ("50000 100000", 1), ("900000 100000", 4)]
)
def test_no_more_slots_than_the_control_group_gives_time_for(quota: str, num_slots: int, tmp_path: Path):
    write(tmp_path / "proc/self/cgroup", "0::/\n")
    write(tmp_path / "sys/fs/cgroup/cpu.max", f"{quota}\n")
    assert len(cpu_slots(root=tmp_path)) == num_slots


def test_the_quota_of_the_first_version_counts_too(tmp_path: Path):
    write(tmp_path / "proc/self/cgroup", "3:cpu:/box\n")
    write(tmp_path / "sys/fs/cgroup/cpu/box/cpu.cfs_quota_us", "200000\n")
    write(tmp_path / "sys/fs/cgroup/cpu/box/cpu.cfs_period_us", "100000\n")
    assert len(cpu_slots(root=tmp_path)) == 2


@pytest.mark.parametrize(
    ("visible", "indices"),
    [("1", [1]), ("0,2", [0, 2]), ("GPU-22", [2]), ("", []), ("-1", []), ("NoDevFiles", [])],
)
def test_gpus_hidden_from_cuda_are_left_alone(visible: str, indices: list[int], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [gpu.index for gpu in gpus(nvml=FakeNvml(3))] == indices


def test_more_gpus_than_cores_share_them_all():
    assert {gpu.cores for gpu in gpus(nvml=FakeNvml(8))} == {(0, 1, 4, 5)}


@pytest.mark.parametrize(("number", "indices"), [(1, [0]), (3, [0, 1, 2]), ("all", [0, 1, 2])])
def test_asked_gpus(number: int | str, indices: list[int]):
    assert [device.index for device in detect({"gpu": number}, nvml=FakeNvml(3)).devices] == indices


@pytest.mark.parametrize(
    ("devices", "nvml", "message"),
    [
        ({"gpu": "all"}, NO_DRIVER, r"no GPU that NVIDIA's driver shows. To fix: write `devices: auto`"),
        ({"gpu": 3}, FakeNvml(2), "3 GPUs are requested of 2. To fix: request 1 to 2, or all"),
        (
            {"cpu": 5},
            NO_DRIVER,
            "5 CPU slots are requested of 4 cores that this process may use. To fix: request 1 to 4",
        ),
        ({"cpu": 0}, NO_DRIVER, "0 CPU slots are requested"),
        ({"cpu": "all"}, NO_DRIVER, "are unknown. To fix"),
        ({"cpu": 1, "gpu": 1}, NO_DRIVER, "are unknown. To fix"),
        ("my-pool", NO_DRIVER, "are unknown. To fix"),
    ],
)
def test_what_the_machine_does_not_have_is_refused_with_the_remedy(devices, nvml, message: str):
    with pytest.raises(ValueError, match=message):
        detect(devices, nvml=nvml)


def test_a_cluster_comes_back_from_json():
    device = Device(kind="gpu", index=0, name="NVIDIA H200", memory_bytes=1, cores=(0, 1), uuid="GPU-0")
    cluster = Cluster(nodes=(Node(name="a", devices=(device,)),))
    assert from_json(Cluster, to_json(cluster)) == cluster


def test_kinds_that_differ_are_all_named():
    fast = Device(kind="gpu", index=0, name="NVIDIA H200", memory_bytes=1, cores=())
    slow = Device(kind="cpu", index=0, name="EPYC", memory_bytes=1, cores=(0,))
    assert Cluster(nodes=(Node(name="a", devices=(fast, slow, slow)),)).device_kind() == "EPYC, 1 core + NVIDIA H200"
