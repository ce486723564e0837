"""Device telemetry while segments run: GPUs by a fake driver, CPU slots by the process under test."""

import os
import subprocess
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

from ringmaster.model_lineage.records import MetricPoint
from ringmaster.tasks.cluster import Device
from ringmaster.tasks.device_monitor import EVENT_EVERY_S, STRANGER_SAMPLES, Telemetry, pids_are_known
from ringmaster.tasks.execution.dispatch import PlannedSegment
from ringmaster.tasks.execution.engine import SegmentCall, SegmentTelemetry
from ringmaster.tasks.execution.execution_events import GangReport, SegmentEnded
from ringmaster.tasks.recording.rows import EnergyMeter, telemetry_points
from ringmaster.techniques.processes.gang_events import Beat, DeviceTelemetry, Outcome
from tests.unit.execution.fakes import open_journal


class FakeGpu:
    """A GPU that draws 500 W. `counts` says whether it has an energy counter."""

    def __init__(self, *, counts=True):
        self.counts, self.energy_mj, self.power_mw = counts, 7_000_000, 500_000
        self.ecc, self.remapped, self.pages, self.xids, self.pids, self.is_lost = 0, (0, 0, 0, 0), 0, [], [], False


class FakeNvml:
    """The part of pynvml that the device monitor calls."""

    NVML_ERROR_NOT_SUPPORTED, NVML_ERROR_NOT_FOUND, NVML_ERROR_TIMEOUT, NVML_ERROR_GPU_IS_LOST = 3, 6, 10, 15
    NVML_TEMPERATURE_GPU = NVML_VOLATILE_ECC = 0
    NVML_CLOCK_SM = NVML_MEMORY_ERROR_TYPE_UNCORRECTED = NVML_FEATURE_ENABLED = 1
    nvmlEventTypeXidCriticalError = 8

    class NVMLError(Exception):
        def __init__(self, value):
            super().__init__(f"error {value}")
            self.value = value

    def __init__(self, gpus):
        self.gpus = {f"GPU-{i}": gpu for i, gpu in enumerate(gpus)}

    def nvmlInit(self):
        pass

    def _checked(self, gpu, answer):
        if gpu.is_lost:
            raise self.NVMLError(self.NVML_ERROR_GPU_IS_LOST)
        if answer is None:
            raise self.NVMLError(self.NVML_ERROR_NOT_SUPPORTED)
        return answer

    def nvmlDeviceGetHandleByUUID(self, uuid):
        return self._checked(self.gpus[uuid], self.gpus[uuid])

    def nvmlDeviceGetMemoryInfo(self, gpu):
        return self._checked(gpu, SimpleNamespace(used=20 * 10**9, total=80 * 10**9))

    def nvmlDeviceGetUtilizationRates(self, gpu):
        return self._checked(gpu, SimpleNamespace(gpu=90))

    def nvmlDeviceGetPowerUsage(self, gpu):
        return self._checked(gpu, gpu.power_mw)

    def nvmlDeviceGetEnforcedPowerLimit(self, gpu):
        return self._checked(gpu, 1_000_000)

    def nvmlDeviceGetTotalEnergyConsumption(self, gpu):
        return self._checked(gpu, gpu.energy_mj if gpu.counts else None)

    def nvmlDeviceGetTemperature(self, gpu, sensor):
        return self._checked(gpu, 61)

    def nvmlDeviceGetClockInfo(self, gpu, clock):
        return self._checked(gpu, None)

    def nvmlDeviceGetComputeRunningProcesses(self, gpu):
        return self._checked(gpu, [SimpleNamespace(pid=pid) for pid in gpu.pids])

    def nvmlDeviceGetTotalEccErrors(self, gpu, error_type, counter):
        return self._checked(gpu, gpu.ecc)

    def nvmlDeviceGetRemappedRows(self, gpu):
        return self._checked(gpu, gpu.remapped)

    def nvmlDeviceGetRetiredPagesPendingStatus(self, gpu):
        return self._checked(gpu, gpu.pages)

    def nvmlEventSetCreate(self):
        return []

    def nvmlDeviceRegisterEvents(self, gpu, kinds, events):
        events.append(gpu)

    def nvmlEventSetWait_v2(self, events, timeout_ms):
        for gpu in events:
            if gpu.xids:
                return SimpleNamespace(eventData=gpu.xids.pop(0))
        raise self.NVMLError(self.NVML_ERROR_TIMEOUT)


class Bench:
    """A node's telemetry on a simulated clock."""

    def __init__(self, *gpus, **options):
        self.gpus, self.now_s = gpus, 0.0
        devices = [
            Device(kind="gpu", index=i, name="H", memory_bytes=1, cores=(), uuid=f"GPU-{i}") for i in range(len(gpus))
        ]
        self.telemetry = Telemetry(
            "n0",
            devices,
            nvml=FakeNvml(gpus),
            knows_pids=True,
            clock=lambda: self.now_s,
            wall=lambda: 1000.0 + self.now_s,
            **options,
        )

    def pass_s(self, seconds):
        """Advances the clock, and adds the energy that each GPU draws."""
        for _ in range(seconds):
            self.now_s += 1.0
            for gpu in self.gpus:
                gpu.energy_mj += gpu.power_mw
            self.telemetry.sample()


@pytest.mark.parametrize("counts", [True, False])
def test_energy_is_that_of_the_segment_by_a_counter_or_by_power(counts):
    bench = Bench(FakeGpu(counts=counts), FakeGpu(counts=counts))
    bench.pass_s(5)
    bench.telemetry.begin(3, (1,))
    assert bench.telemetry.due_events() == {}
    bench.pass_s(int(EVENT_EVERY_S))
    (word,) = bench.telemetry.due_events().values()
    assert isinstance(word, DeviceTelemetry) and word.node == "" and word.wall_s == 1015.0
    device = word.devices["1"]
    assert set(word.devices) == {"1"} and device["kind"] == "gpu"
    assert device["energy_j"] == pytest.approx(5000.0)
    assert device["utilization"] == pytest.approx(0.9) and device["memory_share"] == pytest.approx(0.25)
    assert device["power_w"] == pytest.approx(500.0) and "clock_mhz" not in device
    bench.gpus[1].power_mw = 300_000
    bench.pass_s(4)
    assert bench.telemetry.due_events() == {}
    last = bench.telemetry.end(3).devices["1"]["energy_j"]
    assert last == pytest.approx(6200.0, rel=0.02)
    assert bench.telemetry.end(3) is None


def test_what_is_broken_is_told_and_what_has_recovered_is_not():
    gpus = [FakeGpu() for _ in range(6)]
    gpus[0].ecc = 2  # known when the node was registered
    bench = Bench(*gpus)
    bench.pass_s(1)
    assert bench.telemetry.health() == {}
    gpus[0].ecc = 5
    gpus[1].is_lost = True
    gpus[2].xids = [31, 79]
    gpus[3].xids = [13]  # the fault of a program, not of the device
    gpus[4].remapped = (0, 1, 1, 0)
    gpus[5].pages = 1
    bench.pass_s(1)
    health = bench.telemetry.health()
    assert set(health) == {"0", "1", "2", "4", "5"}
    assert health["0"].startswith("3 uncorrected ECC errors")
    assert health["1"] == "has fallen off the bus"
    assert health["2"].startswith("Xid 79.")
    gpus[0].ecc, gpus[1].is_lost, gpus[4].remapped, gpus[5].pages = 0, False, (0, 1, 0, 0), 0
    bench.pass_s(1)
    assert set(bench.telemetry.health()) == {"2"}


def test_a_stranger_is_told_after_some_samples_and_our_own_never():
    ours = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        gpus = [FakeGpu(), FakeGpu()]
        gpus[0].pids, gpus[1].pids = [os.getppid()], [os.getpid(), ours.pid]
        bench = Bench(*gpus)
        bench.pass_s(STRANGER_SAMPLES - 1)
        assert bench.telemetry.health() == {}
        bench.pass_s(1)
        assert bench.telemetry.health() == {
            "0": f"in use by process {os.getppid()}, which does not belong to Ringmaster"
        }
        gpus[0].pids = []
        bench.pass_s(1)
        assert bench.telemetry.health() == {}
    finally:
        ours.communicate(b"\n")


def test_a_driver_that_hangs_takes_its_devices_out_of_the_plan():
    bench = Bench(FakeGpu())
    bench.telemetry.start()
    bench.telemetry.close()
    bench.now_s += 60.0
    assert bench.telemetry.health() == {"0": "the driver has not answered for 60 s"}


def test_a_container_with_process_ids_of_its_own_is_known(tmp_path):
    (tmp_path / "proc/self/ns").mkdir(parents=True)
    assert not pids_are_known(tmp_path)
    (tmp_path / "proc/self/ns/pid").symlink_to("pid:[4026531836]")
    assert pids_are_known(tmp_path)
    (tmp_path / "proc/self/ns/pid").unlink()
    (tmp_path / "proc/self/ns/pid").symlink_to("pid:[4026532000]")
    assert not pids_are_known(tmp_path)


def test_a_cpu_slot_tells_what_we_do_on_its_cores():
    cores = tuple(sorted(os.sched_getaffinity(0)))
    now_s = iter(range(100))
    telemetry = Telemetry("n0", [Device(kind="cpu", index=0, name="cpu", memory_bytes=1 << 30, cores=cores)])
    telemetry._probes[0].clock = lambda: float(next(now_s))
    telemetry.begin(1, (0,), is_part=True)
    telemetry.sample()
    # CPU time within one second of the fake clock; the kernel counts hundredths of a second.
    until_s = time.process_time() + 0.05
    while time.process_time() < until_s:
        pass
    telemetry.sample()
    word = telemetry.end(1)
    assert word.node == "n0"
    device = word.devices["0"]
    assert 0.0 < device["utilization"] <= 1.0 and device["memory_bytes"] > 10**7
    assert "energy_j" not in device and telemetry.health() == {}


def test_words_become_points_named_as_the_system_metrics_of_mlflow():
    bench = Bench(FakeGpu())
    bench.telemetry.begin(1, (0,))
    bench.pass_s(3)
    points = {point.key: point for point in telemetry_points(bench.telemetry.end(1))}
    assert points["system/gpu_0_utilization_percentage"].value == pytest.approx(90.0)
    assert points["system/gpu_0_memory_usage_megabytes"].value == pytest.approx(20_000.0)
    assert points["system/gpu_0_power_usage_watts"].value == pytest.approx(500.0)
    assert {point.timestamp_ms for point in points.values()} == {1_003_000}
    bench.telemetry.begin(2, (0,), is_part=True)
    bench.pass_s(1)
    assert all(point.key.startswith("system/n0/gpu_0_") for point in telemetry_points(bench.telemetry.end(2)))


def said(number, node, *joules):
    devices = {str(i): {"kind": "gpu", "energy_j": used} for i, used in enumerate(joules)}
    event = DeviceTelemetry(wall_s=1.0, node=node, devices=devices)
    return GangReport(number=number, job="a", event=event)


def ended(number):
    segment = PlannedSegment(job="a", option=0, last_step=1, devices=(), start_s=0.0, end_s=1.0)
    return SegmentEnded(number=number, segment=segment, outcome=Outcome(status="done"), decision="")


def test_the_energy_of_a_job_is_the_sum_over_segments_nodes_and_recorders(tmp_path):
    journal = open_journal(tmp_path)
    journal.write_job("a")
    first = EnergyMeter(journal)
    for event in (said(1, "n0", 5.0, 6.0), said(1, "n0", 10.0, 20.0), said(1, "n1", 4.0)):
        first.handle_event(event)
    assert [point.value for point in first.end(ended(1), at_ms=5)["a"]] == [34.0]
    assert first.end(ended(2), at_ms=6) == {}  # a segment on CPU slots
    second = EnergyMeter(journal)
    second.handle_event(said(3, "", 6.0))
    points = second.end(ended(3), at_ms=7)
    assert points == {"a": [MetricPoint("system/energy_joules", 40.0, 2, 7)]}
    assert second.end(ended(3), at_ms=7) == points  # repeated, as MLflow was unavailable
    journal.close()


def test_jobs_that_are_trained_together_share_what_their_devices_have_taken(tmp_path):
    journal = open_journal(tmp_path)
    for name in "ab":
        journal.write_job(name)
    energy = EnergyMeter(journal)
    energy.handle_event(said(1, "", 8.0))
    points = energy.end(replace(ended(1), members=("b",)), at_ms=5)
    assert {job: [point.value for point in found] for job, found in points.items()} == {"a": [4.0], "b": [4.0]}
    journal.close()


def test_gangs_on_this_machine_say_what_their_devices_do():
    bench = Bench(FakeGpu(), FakeGpu())
    bench.pass_s(1)
    measured = SegmentTelemetry(bench.telemetry)
    heard = {1: [], 2: []}

    def call(number):
        order, device = None, ("n0", number - 1)
        on_event = heard[number].append
        return SegmentCall(
            label="", order=order, num_ranks=1, on_event=on_event, number=number, job="a", batch="", devices=(device,)
        )

    with measured.segment(call(1)) as say, measured.segment(call(2)):
        say(Beat())
        assert [len(events) for events in heard.values()] == [1, 0]
        bench.pass_s(int(EVENT_EVERY_S))
        say(Beat())  # a segment's call passes on what is due for all segments
    for number, events in heard.items():
        words = [event for event in events if isinstance(event, DeviceTelemetry)]
        assert [set(word.devices) for word in words] == [{str(number - 1)}] * 2
        assert words[-1].devices[str(number - 1)]["energy_j"] == pytest.approx(5000.0)
