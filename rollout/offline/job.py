"""The job: check, resume, generate, write; stopped between two steps by the first Ctrl-C."""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, Self

from rich.console import Console

from rollout.engine.protocol import Engine
from rollout.engine.spmd import OpenEngine, run_spmd
from rollout.engine.worker_factory import WorkerFactory
from rollout.errors import RolloutError
from rollout.offline.config import ChatTemplateMode, RunConfig
from rollout.offline.fingerprint import fingerprint
from rollout.offline.job_corpus import JobCorpus
from rollout.offline.output import RolloutOutput, output_lock
from rollout.offline.output_rows import rollout_columns
from rollout.offline.paths import JobPaths
from rollout.offline.progress import JobProgress, loading_model, reading_prompts
from rollout.offline.prompt_check import check_rows
from rollout.offline.prompt_tokens import TokenizedPrompts
from rollout.offline.prompts import PromptFile, PromptRow
from rollout.offline.run_log import RunLog
from rollout.offline.summary import JobResult, JobStatus, Summary
from rollout.open_engine import open_with
from rollout.types import FinishReason, Rollout, SamplingParams


class StopSignals:
    """While the context lasts, these signals are noted in ``received`` instead of obeyed.

    They are SIGINT, SIGTERM and SIGHUP, the last unless it is ignored, as under nohup. A second one
    finds the former handlers in place. Off the main thread, where Python allows no handlers,
    nothing is noted.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._former: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            numbers = [signal.SIGINT, signal.SIGTERM]
            if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
                numbers.append(signal.SIGHUP)
            for number in numbers:
                self._former[number] = signal.signal(number, self._note)
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = signal.Signals(number)
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)

    def __exit__(self, *error: object) -> None:
        self._restore()


log = logging.getLogger(__name__)

_QUEUED_PER_RUNNING = 4  # enough for the scheduler to choose from, however long the file is


def run_job(config: RunConfig, factory: WorkerFactory, console: Console | None = None) -> JobResult:
    """Generate ``sampling.n`` rollouts for each prompt of ``data.path`` into ``output.path``.

    Goes on with an output that the same job left unfinished. Progress and summary go to
    ``console`` (default: standard output). Of several ranks each makes this call: rank 0 reads,
    writes and reports, the others run the model with it.

    Raises InvalidInputError before any work for prompts that cannot be used, OutputError for an
    output that is another run's or cannot be written, and whatever the engine raises for the model;
    rollouts finished before are in the output.
    """
    opened = partial(open_with, config.engine, factory, config.cluster)
    result = run_spmd(config.ranks, opened, partial(_run, config, console or Console()))
    return result or JobResult(JobStatus.FOLLOWED, Path(config.output.path or ""))


def _run(config: RunConfig, console: Console, opened: OpenEngine) -> JobResult:
    paths = JobPaths(config)
    paths.check()
    path = paths.output
    with ExitStack() as at_end:
        file = PromptFile(config.data)
        columns = rollout_columns(config.output, config.sampling)
        with reading_prompts(console) as read:
            prompts = check_rows(file, config.data.on_error, path, columns, read)
        at_end.enter_context(output_lock(path))
        output = RolloutOutput(
            paths, config.output, config.sampling, fingerprint(config, file.sha256)
        )
        if output.completion is not None:
            log.info("%s is complete (%d rollouts), nothing to do; output.overwrite=true replaces "
                     "it", path, output.completion.rollouts)  # fmt: skip
            return JobResult(JobStatus.NOTHING_TO_DO, path)
        with loading_model(console, config.model.path) as progress:
            engine = opened(progress)
        at_end.callback(engine.close)
        tokens = TokenizedPrompts(prompts, engine, config)
        at_end.callback(output.close)
        output.open(prompts)
        corpus = JobCorpus(engine, paths, config.output.corpus_seconds)
        corpus.restore()
        total = prompts.num_prompts * config.sampling.n
        if output.num_done:
            log.info("resuming: %d of %d rollouts are in %s", output.num_done, total, path)
        summary = Summary(
            output=path,
            resumed=output.num_done,
            replicas=config.cluster.replicas,
            log=paths.log,
            remedy=_empty_remedy(config.data.chat_template),
        )
        with (
            StopSignals() as stop,
            RunLog(config, paths, engine) as run_log,
            JobProgress(console, total, output.num_done, config.log.seconds) as progress,
        ):
            job = _Job(config, engine, tokens, output, corpus, summary)
            job.generate(stop, run_log, progress)
            summary.skipped_prompts = len(prompts.skipped)
            if job.failed:
                raise RolloutError(
                    f"{len(job.failed)} rollouts failed, the first at {job.failed[0]}; the "
                    f"others are in {path}"
                )
        if stop.received is None:
            output.finish(prompts)
        else:
            summary.output = paths.journal
        summary.print(console)
    if stop.received is not None:
        return JobResult(JobStatus.STOPPED, path, summary, stop.received)
    return JobResult(JobStatus.COMPLETED, path, summary)


def _empty_remedy(mode: ChatTemplateMode) -> str:
    if mode is ChatTemplateMode.never:
        return "data.chat_template=auto applies the model's chat template"
    return "check the prompts and sampling.stop"


class _Submitted(NamedTuple):
    row: PromptRow
    step: int  # the engine's last one before


class _Job:
    def __init__(
        self,
        config: RunConfig,
        engine: Engine,
        tokens: TokenizedPrompts,
        output: RolloutOutput,
        corpus: JobCorpus,
        summary: Summary,
    ) -> None:
        self._params: SamplingParams = config.sampling
        self._engine = engine
        self._output = output
        self._corpus = corpus
        self._summary = summary
        self._missing = self._missing_samples(tokens)
        self._max_submitted = _QUEUED_PER_RUNNING * engine.max_running
        self._submitted: dict[tuple[int, int], _Submitted] = {}
        self.failed: list[str] = []

    def _missing_samples(
        self, tokens: TokenizedPrompts
    ) -> Iterator[tuple[PromptRow, list[int], int]]:
        """Row, token ids and sample index of what is still to be made, prompt by prompt."""
        for row, token_ids in tokens.rows(lambda row: not self._missing_of(row)):
            for sample_index in self._missing_of(row):
                yield row, token_ids.tolist(), sample_index

    def _missing_of(self, row: PromptRow) -> list[int]:
        """The samples of a prompt that are not in the output."""
        return [each for each in range(self._params.n) if not self._output.has(row.index, each)]

    def generate(self, stop: StopSignals, run_log: RunLog, progress: JobProgress) -> None:
        started = time.perf_counter()
        while stop.received is None:
            self._submit()
            if not self._engine.has_unfinished:
                break
            ended = self._engine.step()
            submitted = [self._submitted.pop(_key(rollout)) for rollout in ended]
            for rollout, each in zip(ended, submitted, strict=True):
                if rollout.finish_reason is FinishReason.ERROR:
                    # Not written, so that the same command tries it again.
                    where = f"{each.row.where}, sample {rollout.sample_index}"
                    self.failed.append(f"{where}: {rollout.error}")
                    continue
                self._output.append(rollout, each.row)
                self._summary.empty += rollout.is_empty
                self._summary.rollouts += 1
            # After they were written: a log that fails loses no rollout.
            for rollout, each in zip(ended, submitted, strict=True):
                run_log.rollout(rollout, each.step)
            run_log.step(self._summary.rollouts)
            progress.update(self._output.num_done, self._engine.metrics())
            self._corpus.tend()
        self._summary.seconds = time.perf_counter() - started
        self._summary.metrics = self._engine.metrics()
        self._summary.corpus = self._corpus.finish()
        self._summary.corpus_was_empty = self._corpus.was_empty
        run_log.finish()

    def _submit(self) -> None:
        while len(self._submitted) < self._max_submitted:
            following = next(self._missing, None)
            if following is None:
                break
            row, token_ids, sample_index = following
            self._engine.submit(
                token_ids, self._params, prompt_index=row.index, sample_index=sample_index
            )
            step = self._engine.last_step.step
            self._submitted[row.index, sample_index] = _Submitted(row, step)


def _key(rollout: Rollout) -> tuple[int, int]:
    return rollout.prompt_index, rollout.sample_index
