"""The processes behind Ray's actors."""

from __future__ import annotations

import contextlib

import psutil

from tests.helpers.hang import wait_until


def replica_processes(driver: int | None = None) -> list[psutil.Process]:
    """The replica processes of the Ray that the process ``driver`` started; default: this
    process."""
    found = []
    for process in psutil.Process(driver).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            # Asked once: of one that has just died nothing is left the second time.
            if "".join(process.cmdline()[:1]).startswith("ray::ReplicaActor"):
                found.append(process)
    return sorted(found, key=lambda process: process.pid)


def placement_groups() -> list[str]:
    """The names of the placement groups that Ray has or tries to place."""
    from ray.util import placement_group_table

    found = placement_group_table().values()
    return [each["name"] for each in found if each["state"] != "REMOVED"]


def wait_until_gone(processes: list[psutil.Process]) -> None:
    wait_until(lambda: not any(map(_lives, processes)))


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
