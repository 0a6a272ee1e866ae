"""The dataset job: a file of prompts in, a file of rollouts out, stopped and resumed at will."""

from rollout.errors import OutputError
from rollout.offline.config import (
    ChatTemplateMode,
    DataConfig,
    LogConfig,
    OnError,
    OutputConfig,
    RunConfig,
)
from rollout.offline.job import run_job
from rollout.offline.summary import JobResult, JobStatus, SweepTable

__all__ = [
    "ChatTemplateMode",
    "DataConfig",
    "JobResult",
    "JobStatus",
    "LogConfig",
    "OnError",
    "OutputConfig",
    "OutputError",
    "RunConfig",
    "SweepTable",
    "run_job",
]
