"""Names of devices."""

from __future__ import annotations

import platform
from pathlib import Path

import torch

from spec_workers.target import target_worker as module
from spec_workers.target.target_worker import device_name


def test_a_cpu_is_named_with_its_threads():
    name = device_name(torch.device("cpu"))
    assert name == device_name(torch.device("cpu"))
    processor, _, threads = name.rpartition(", ")
    assert processor
    assert threads == f"{torch.get_num_threads()} threads"


def test_the_model_is_read_where_linux_says_it(tmp_path, monkeypatch):
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nmodel\t\t: 85\nmodel name\t: Some CPU: fast\n\n")
    monkeypatch.setattr(platform, "system", lambda: "Linux")
    monkeypatch.setattr(module, "Path", lambda path: cpuinfo)
    assert device_name(torch.device("cpu")).startswith("Some CPU: fast, ")


def test_elsewhere_the_platform_is_asked(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "Path", lambda path: Path(tmp_path / "nothing"))
    monkeypatch.setattr(platform, "processor", lambda: "")
    monkeypatch.setattr(platform, "machine", lambda: "a machine")
    assert device_name(torch.device("cpu")).startswith("a machine, ")


def test_a_gpu_is_named_by_its_driver(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"GPU {device.index}")
    assert device_name(torch.device("cuda", 1)) == "GPU 1"
