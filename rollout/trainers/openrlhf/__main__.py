"""``python -m rollout.trainers.openrlhf [--specrollout.<name> <value> ...] [OpenRLHF's arguments]``

Runs `openrlhf.cli.train_ppo_ray` as it is installed.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence
from functools import partial

from rollout.errors import EngineStateError, RolloutError
from rollout.trainers.openrlhf import stand_ins
from rollout.trainers.openrlhf.arguments import TrainerArguments, read_arguments
from rollout.trainers.openrlhf.options import OwnOptions, split_arguments
from rollout.trainers.openrlhf.stand_ins import (
    BACKEND_VARIABLE,
    EXACT_VARIABLE,
    TIMEOUT_VARIABLE,
)

_OPENRLHF_ENVIRONMENT = {
    "TOKENIZERS_PARALLELISM": "true",
    "NCCL_DEBUG": "WARN",
    "RAY_ENABLE_ZERO_COPY_TORCH_TENSORS": "1",
}
"""The environment that OpenRLHF gives Ray's workers where it starts Ray. Variables that are set
win."""


def main(arguments: Sequence[str]) -> None:
    """Leaves by SystemExit, naming the argument, before anything starts; raises what the trainer
    raises."""
    missing = [name for name in ("ray", "openrlhf") if not stand_ins.is_installed(name)]
    if missing:
        sys.exit(
            f"error: {' and '.join(missing)} not installed: in a clone of specrollout, "
            "pip install torch==2.13.0 '.[openrlhf]', then pip install --no-deps openrlhf==0.11.2"
        )
    if {"-h", "--help"} & set(arguments):
        print(f"{__doc__}\nBoth kinds of options are in docs/openrlhf.md; OpenRLHF's follow.\n")
        sys.argv = ["openrlhf.cli.train_ppo_ray", "--help"]
        stand_ins.install()
        runpy.run_module("openrlhf.cli.train_ppo_ray", run_name="__main__", alter_sys=True)
    try:
        options, rest = split_arguments(arguments)
        trainer = read_arguments(rest, has_flash_attn=stand_ins.is_installed("flash_attn"))
    except RolloutError as error:
        sys.exit(f"error: {error}")
    stand_ins.install()
    _start_ray(options, trainer)
    import openrlhf.trainer.ray as trainer_ray

    from rollout.trainers.openrlhf.engines import create_engines

    # OpenRLHF has no extension point for engines. train_ppo_ray takes this name from this module
    # when it is run, below; nothing else of OpenRLHF is replaced.
    trainer_ray.create_vllm_engines = partial(create_engines, options, trainer)
    sys.argv = ["openrlhf.cli.train_ppo_ray", *rest]
    runpy.run_module("openrlhf.cli.train_ppo_ray", run_name="__main__", alter_sys=True)


def _start_ray(options: OwnOptions, trainer: TrainerArguments) -> None:
    import ray

    if ray.is_initialized():
        raise EngineStateError("the launcher starts Ray, or joins RAY_ADDRESS: call it before that")
    environment = {
        name: os.environ.get(name, default) for name, default in _OPENRLHF_ENVIRONMENT.items()
    }
    environment[BACKEND_VARIABLE] = trainer.sync_backend
    environment[TIMEOUT_VARIABLE] = str(options.sync_timeout)
    environment[EXACT_VARIABLE] = str(int(options.exact_training))
    ray.init(
        runtime_env={"env_vars": environment, "worker_process_setup_hook": stand_ins.SETUP_HOOK}
    )


if __name__ == "__main__":
    main(sys.argv[1:])
