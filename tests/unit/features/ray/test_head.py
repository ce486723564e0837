import os
import stat
import subprocess
import sys

import psutil

from ringmaster.features.ray import head
from ringmaster.features.ray.ray_engine import head_environment, token_file


def test_the_token_is_its_owners_alone_and_is_kept(tmp_path):
    file = token_file(tmp_path)
    file.parent.mkdir()
    head.make_token(file)
    token = file.read_text()
    assert len(token) >= 32 and stat.S_IMODE(file.stat().st_mode) == 0o600
    head.make_token(file)
    assert file.read_text() == token


def test_a_cluster_of_one_machine_is_on_loopback_alone(tmp_path):
    command = head.command(port=7001, folder=tmp_path)
    assert "--node-ip-address=127.0.0.1" in command and "--include-dashboard=false" in command
    assert head_environment(tmp_path, port=7001)["RAY_AUTH_MODE"] == "token"


def test_the_nodes_of_a_home_are_found_by_their_environment(tmp_path):
    named = {**os.environ, "RINGMASTER_ALLOCATION": "ray:node-1", "RINGMASTER_HOME": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env=named) as node:
        assert head.nodes_of(tmp_path) == [psutil.Process(node.pid)]
        assert head.nodes_of(tmp_path / "other") == []
        node.stdin.close()
