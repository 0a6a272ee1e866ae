"""Every path that a job reads, writes, renames or removes.

<output>                 JSONL: the rollouts so far. Parquet: there only when complete
<output>.partial.jsonl   Parquet only: the rollouts so far, until they are compacted
<output>.run.json        what decides the content, and whether it is complete
<output>.corpus          the draft corpus; decides nothing, see job_corpus.py
<output>.corpus.learned.json   lengths of rollouts
<output>.log             the log of the run, unless it is elsewhere or off; see run_log.py
<output>.tensorboard     a folder of event files, for log.tracker=tensorboard
<output>.lock            who writes them
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from rollout.engine.durable_files import SHARED_SCRATCH, scratch_file
from rollout.engine.learned_file import learned_file
from rollout.errors import InvalidInputError
from rollout.hub import MODEL_SUFFIXES
from rollout.offline.config import RunConfig


def lock_file(output: Path) -> Path:
    """The file by which a process says that it writes ``output``; see `output_lock`."""
    return output.with_name(output.name + ".lock")


class JobPaths:
    """The paths of one job, by purpose.

    A link given as the output is followed: two jobs that name one file differently see each
    other's lock.
    """

    def __init__(self, config: RunConfig) -> None:
        """Raises InvalidInputError without an output."""
        if config.output.path is None:
            raise InvalidInputError("output.path", None, "must name a .jsonl or .parquet file")
        self._config = config
        given = Path(config.output.path)
        self.output = Path(os.path.realpath(given)) if given.is_symlink() else given
        if self.output.suffix != given.suffix:
            raise InvalidInputError(
                "output.path", str(given), f"is a link to {self.output}: must end as that does"
            )
        self.is_parquet = given.suffix == ".parquet"
        self.journal = self._beside(".partial.jsonl") if self.is_parquet else self.output
        self.record = self._beside(".run.json")
        self.corpus = self._beside(".corpus")
        self.learned = learned_file(self.corpus)
        log = config.log.jsonl
        self.log = None if log is None else Path(log)
        if log == "auto":
            self.log = self._beside(".log")
        self.tensorboard = self._beside(".tensorboard")

    def half_saved(self) -> list[Path]:
        """Scratch files left by jobs and replicas that died while they saved the corpus."""
        names = tuple(saved.name + SHARED_SCRATCH for saved in (self.corpus, self.learned))
        folder = self.output.parent
        there = folder.iterdir() if folder.is_dir() else ()
        return [path for path in there if path.name.startswith(names)]

    def check(self) -> None:
        """Raise InvalidInputError where the job would write what it reads, or a file twice.

        Links are followed.
        """
        inputs = {os.path.realpath(path): field for field, path in self._read()}
        written: dict[str, str] = {}
        for field, given, path in self._written():
            if (path == self.output and _is_no_file(path)) or (path == self.log and path.is_dir()):
                raise InvalidInputError(field, given, "must name a file, and is none")
            own = "" if str(path) == given else f"the job writes {path} too, which "
            target = os.path.realpath(path)
            if target in inputs:
                raise InvalidInputError(field, given, f"{own}is {inputs[target]}: give another")
            if target in written:
                raise InvalidInputError(
                    field, given, f"{own}is written for {written[target]}: give another"
                )
            written[target] = field

    def require_unread(self, field: str, given: Path) -> None:
        """Raise InvalidInputError where a file to be written is one that is read."""
        for read, path in self._read():
            if os.path.realpath(path) == os.path.realpath(given):
                raise InvalidInputError(field, str(given), f"is {read}: give another")

    def _beside(self, suffix: str) -> Path:
        return self.output.with_name(self.output.name + suffix)

    @property
    def _own(self) -> list[Path]:
        files = [self.record, scratch_file(self.record), self.corpus, self.learned]
        files.append(self.tensorboard)
        if self.is_parquet:
            files += [self.journal, scratch_file(self.output)]
        return [*files, *self.half_saved(), lock_file(self.output)]

    def _written(self) -> Iterator[tuple[str, str, Path]]:
        given = str(self._config.output.path)
        yield "output.path", given, self.output
        for path in self._own:
            yield "output.path", given, path
        if self.log is not None:
            yield "log.jsonl", str(self.log), self.log

    def _read(self) -> Iterator[tuple[str, Path]]:
        """The field that names each file; of a model's folder, what models are made of."""
        yield "data.path", Path(self._config.data.path)
        model, spec = self._config.model, self._config.spec
        folders = {
            "model.path": model.path,
            "model.tokenizer": model.tokenizer,
            "spec.draft_path": spec.get("draft_path"),
        }
        for field, folder in folders.items():
            if isinstance(folder, str):
                for path in self._model_files(Path(folder)):
                    yield f"read from {field}", path
        external = spec.get("external_corpora")
        if isinstance(external, dict):
            for name, file in external.items():
                yield f"spec.external_corpora.{name}", Path(str(file))
        corpus = spec.get("corpus_path")
        if isinstance(corpus, str) and os.path.realpath(corpus) != os.path.realpath(self.corpus):
            yield "spec.corpus_path", Path(corpus)  # its own is read before it is replaced
            yield "spec.corpus_path", learned_file(corpus)

    def _model_files(self, folder: Path) -> Iterator[Path]:
        own = {os.path.realpath(path) for path in (self.output, *self._own)}
        for path in folder.iterdir() if folder.is_dir() else ():
            if path.suffix in MODEL_SUFFIXES and os.path.realpath(path) not in own:
                yield path


def _is_no_file(path: Path) -> bool:
    return path.exists() and not path.is_file()
