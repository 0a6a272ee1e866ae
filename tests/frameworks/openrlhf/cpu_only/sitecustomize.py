"""Lets OpenRLHF's trainer run without a GPU: on PYTHONPATH, every interpreter runs this file.

Ray is made to wait for a slow machine.

OpenRLHF calls torch.cuda by name. When it is imported, those calls are turned to the CPU, and
DeepSpeed is told to compile nothing: Adam is torch's and collectives are gloo's. Nothing else is
changed, and what does not import OpenRLHF is left alone. OPENRLHF_FLOAT32=1 makes it train float32
parameters, which its command line has no word for.
"""

import importlib.abc
import importlib.util
import os
import sys


class AfterImport(importlib.abc.MetaPathFinder):
    """Calls ``action(module)`` once the module of that name has been imported."""

    def __init__(self, name, action):
        self.name, self.action = name, action

    def find_spec(self, name, path, target=None):
        if name != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def execute_and_act(module):
            execute(module)
            self.action(module)

        spec.loader.exec_module = execute_and_act
        return spec


class CpuDevice(str):
    """``cpu`` for who places a tensor, number 0 for who writes ``cuda:{number}``."""

    def __format__(self, spec):
        return "0"


def turn_cuda_to_cpu(_):
    import torch
    import torch.distributed.device_mesh as mesh

    torch.cuda.current_device = lambda: CpuDevice("cpu")
    torch.cuda.current_stream = lambda *args: None
    for name in ("set_device", "synchronize", "empty_cache"):
        setattr(torch.cuda, name, lambda *args: None)
    real = mesh.init_device_mesh
    mesh.init_device_mesh = lambda device, *args, **kwargs: real("cpu", *args, **kwargs)


def let_ray_be_slow(services):
    from ray_sessions import patient

    vars(services).update(patient(services))


def load_float32(module):
    import torch

    module.convert_to_torch_dtype = lambda name: torch.float32


def train_on_a_cpu(module):
    from rollout.trainers.deepspeed import prepare_deepspeed

    prepare_deepspeed()
    real = module.get_train_ds_config

    def config(*args, optim_config=None, **kwargs):
        if os.environ.get("OPENRLHF_FLOAT32"):
            kwargs["param_dtype"] = "fp32"
        if optim_config is not None:
            params = optim_config["params"] | {"torch_adam": True}
            optim_config = optim_config | {"params": params}
        return real(*args, optim_config=optim_config, **kwargs)

    module.get_train_ds_config = config


ACTIONS = {
    "openrlhf": turn_cuda_to_cpu,
    "openrlhf.utils.deepspeed.deepspeed": train_on_a_cpu,
    "ray._private.services": let_ray_be_slow,
}
if os.environ.get("OPENRLHF_FLOAT32"):
    ACTIONS["openrlhf.utils.utils"] = load_float32
for name, action in ACTIONS.items():
    sys.meta_path.insert(0, AfterImport(name, action))
