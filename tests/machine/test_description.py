"""The machine as one value."""

import json
import subprocess
import sys

import psutil

from sarathi_tune.machine.description import describe_machine
from sarathi_tune.machine.gpu import open_gpu
from tests.machine.test_gpu import FakeNvml


def test_this_machine_in_json() -> None:
    machine = describe_machine()
    document = json.loads(json.dumps(machine.as_dict()))
    assert document["gpu"] is None
    assert document["cpu"]["threads"] >= 1
    assert 0 < document["memory"]["available_bytes"] <= document["memory"]["total_bytes"]
    assert document["memory"]["total_bytes"] <= psutil.virtual_memory().total


def test_a_gpu_names_the_machine() -> None:
    gpu, _ = open_gpu(nvml=FakeNvml(), environment={})
    machine = describe_machine(gpu)
    assert machine.name == "NVIDIA H100 80GB HBM3"
    assert machine.as_dict()["gpu"]["compute_capability"] == "9.0"


def test_needs_no_torch() -> None:
    modules = "sarathi_tune.machine.description, sarathi_tune.machine.conditions"
    code = f"import sys, {modules}; print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"
