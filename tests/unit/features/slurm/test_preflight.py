"""What `ringmaster up` finds wrong with what it would ask of Slurm, on a cluster of two partitions."""

import math
import subprocess

import pytest

from ringmaster.features.slurm.slurm_engine import Slurm, SlurmOptions, numbers_of, seconds_of

PARTITIONS = """\
PartitionName=cpu AllowGroups=ALL Default={default} MaxTime=1-00:00:00 MinNodes=0 Nodes=c1 State=UP TotalCPUs=4
PartitionName=gpu AllowGroups=ALL Default=NO Hidden=NO MaxTime=08:00:00 MinNodes=0 Nodes=g[1-2] State=UP TotalCPUs=4
PartitionName=old AllowGroups=ALL Default=NO Hidden=NO MaxTime=UNLIMITED MinNodes=0 Nodes=c1 State=DOWN TotalCPUs=4
"""
NODES = """\
NodeName=c1 Arch=x86_64 Gres=(null) NodeAddr=c1 State=IDLE Partitions=cpu,old BootTime=2026-11-24T02:06:03
NodeName=g1 Arch=x86_64 Gres=gpu:a100:4(S:0-1) NodeAddr=g1 State={state} Partitions=gpu BootTime=2026-11-24T02:06:03
NodeName=g2 Arch=x86_64 Gres=gpu:t4:2,nvme:1 NodeAddr=g2 State=IDLE Partitions=gpu BootTime=2026-11-24T02:06:03
"""


class Site:
    """A cluster. refusal: what `sbatch --test-only` prints, of which `options` are the options."""

    def __init__(self, *, refusal="", default="YES", state="IDLE"):
        self.refusal, self.options = refusal, None
        self.said = {"partition": PARTITIONS.format(default=default), "node": NODES.format(state=state)}

    def run(self, command, input, env):
        if command[0] == "scontrol":
            return subprocess.CompletedProcess(command, 0, self.said[command[-1]], "")
        assert command[:2] == ["sbatch", "--test-only"]
        self.options = command[2:]
        return subprocess.CompletedProcess(command, 1 if self.refusal else 0, "", self.refusal)

    def faults(self, **asked):
        return SlurmOptions(**asked).refusals(Slurm(run=self.run))

    def asked(self):
        """What sbatch was asked of what a test chooses."""
        return [each for each in self.options if each.startswith(("--partition", "--time", "--gres"))]


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"partition": "gpu", "time": "8h", "gres": "gpu:4"},
        {"partition": "gpu", "gres": "gpu:t4:2,nvme"},
        {"time": "3m"},
        {"partition": "cpu,gpu", "time": "1-0", "gres": "gpu:A100:3"},
    ],
)
def test_what_the_cluster_has_is_asked_of_sbatch_as_it_is(asked):
    site = Site()
    assert site.faults(**asked) == []
    times = {"8h": "480", "3m": "3"}
    assert site.asked() == [f"--{name}={times.get(value, value)}" for name, value in asked.items()]


def test_all_faults_are_found_at_once_and_each_has_a_remedy():
    site = Site(refusal="sbatch: unrecognized option '--bogus'")
    found = site.faults(partition="gpu", time="9h", gres="gpu:8")
    assert len(found) == 3
    assert found[0] == "--time 9h is above the limit of partition gpu. To fix: at most --time 480m"
    assert "no node of partition gpu has that" in found[1] and "gpu:a100:4(S:0-1) or gpu:t4:2,nvme:1" in found[1]
    assert "unrecognized option '--bogus'" in found[2]
    assert all("To fix: " in fault for fault in found)
    assert site.asked() == ["--partition=gpu"], "sbatch is asked about the rest"


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"partition": "gpus"}, "--partition gpus is not in this cluster. To fix: choose one of cpu, gpu, old"),
        ({"partition": "old"}, "--partition old starts no jobs at present"),
        ({"time": "8x"}, "--time 8x is not a time"),
        ({"time": "2m"}, "--time 2m is too short: a node is emptied 120 s before its end. To fix: at least --time 3m"),
        ({"gres": "gpu:1"}, "no node of partition cpu has that. To fix: a node there has nothing"),
        ({"partition": "gpu", "gres": "gpu:t4:3"}, "no node of partition gpu"),
        ({"partition": "gpu", "gres": "gpu:4,nvme:1"}, "no node of partition gpu"),
    ],
)
def test_each_fault_is_named(asked, said):
    (fault,) = Site().faults(**asked)
    assert said in fault


def test_a_cluster_without_a_default_partition_has_to_be_told_one():
    site = Site(default="NO")
    (fault,) = site.faults()
    assert "no default partition. To fix: name one by --partition, of cpu, gpu, old" in fault
    assert len(site.faults(partition="nope", gres="gpu:9")) == 2
    assert site.options is None, "sbatch would only say again that it needs a partition"
    assert site.faults(partition="gpu") == []


@pytest.mark.parametrize(("state", "number"), [("IDLE", 1), ("MIXED+DRAIN", 0), ("DOWN*", 0)])
def test_nodes_that_are_drained_or_down_are_waited_for(state, number):
    site = Site(refusal="allocation failure: Requested node configuration is not available", state=state)
    assert len(site.faults(partition="gpu", gres="gpu:4")) == number


def test_a_cluster_that_is_away_and_commands_that_are_missing_are_the_only_faults(tmp_path, monkeypatch):
    def away(command, input, env):
        return subprocess.CompletedProcess(command, 1, "", "Unable to contact slurm controller (connect failure)")

    (fault,) = SlurmOptions(partition="nope").refusals(Slurm(run=away))
    assert "does not answer" in fault and "To fix" in fault
    monkeypatch.setenv("PATH", str(tmp_path))
    (fault,) = SlurmOptions(partition="nope").queried_faults(tmp_path)
    assert "sbatch, squeue, scancel, scontrol cannot be found" in fault


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30m", 1800),
        ("2d", 172_800),
        ("90", 5400),
        ("30:30", 1830),
        ("08:00:00", 28_800),
        ("1-12", 129_600),
        ("1-12:30", 131_400),
        ("7-00:00:01", 604_801),
        ("UNLIMITED", math.inf),
        ("infinite", math.inf),
    ],
)
def test_times_in_seconds(text, seconds):
    assert seconds_of(text) == seconds


@pytest.mark.parametrize("text", ["", "8x", "1:2:3:4", "-5"])
def test_other_texts_are_no_times(text):
    with pytest.raises(ValueError, match="is not a time"):
        seconds_of(text)


def test_generic_resources_are_counted_by_name_and_type():
    assert numbers_of("gpu:a100:4(S:0,1),gpu:t4:2,nvme") == {("gpu", "a100"): 4, ("gpu", "t4"): 2, ("nvme", ""): 1}
    assert numbers_of("gres:gpu:2") == {("gpu", ""): 2}
    assert numbers_of("") == {}


@pytest.mark.parametrize(
    ("asked", "is_fault"),
    [
        ({"exclusive": False}, True),  # a job that shares its node is given none
        ({}, False),
        ({"partition": "cpu,gpu"}, True),  # it may start on c1
        ({"exclusive": False, "gres": "gpu:2"}, False),
        ({"exclusive": False, "sbatch_options": ["--gpus-per-node=2"]}, False),
        ({"exclusive": False, "sbatch_options": ["-G", "2"]}, False),
        ({"exclusive": False, "sbatch_options": ["--tres-per-node", "gres:gpu:2"]}, False),
        ({"exclusive": False, "batch_script": "#!/bin/sh\n#SBATCH --gres=gpu:2\n"}, False),
        ({"exclusive": False, "batch_script": "#!/bin/sh\n# --gres=gpu:2\n", "gres": "nvme:1"}, True),
    ],
)
def test_gpus_that_are_to_serve_have_to_be_asked_for(asked, is_fault):
    found = Site().faults(**{"devices": "gpu:2", "partition": "gpu", **asked})
    assert [fault.startswith("--node-devices gpu:2: nothing requests GPUs from Slurm") for fault in found] == [
        True
    ] * is_fault
    assert all("To fix: --gres gpu:2" in fault for fault in found)


def test_gpus_of_which_slurm_does_not_know_need_not_be_asked_for():
    site = Site()
    site.said["node"] = "NodeName=c1 Gres=(null) State=IDLE Partitions=cpu\n"
    assert site.faults(devices="gpu:8") == []
