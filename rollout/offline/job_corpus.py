"""The job's side of the corpus: read at the start, saved beside the output, watched in between.

The corpus decides nothing but speed, so whatever goes wrong with its file is a warning, and the
job goes on without.
"""

from __future__ import annotations

import logging
import time

from rollout.engine.draft_corpus import ExternalState
from rollout.engine.protocol import Engine
from rollout.errors import InvalidInputError
from rollout.offline.paths import JobPaths

log = logging.getLogger(__name__)

_WATCH_SECONDS = 1.0
_COLD = "cold"


class JobCorpus:
    """The corpus of a job's engine; does nothing where its worker has none.

    Under the output's lock: half-written files beside the corpus are of jobs that died.
    """

    def __init__(self, engine: Engine, paths: JobPaths, seconds: float) -> None:
        """``seconds`` between two saves; 0: the file is neither read nor written."""
        self._engine = engine
        self._has_corpus = engine.corpus_tokens is not None
        self._paths = paths
        self._path = paths.corpus
        self._seconds = seconds
        self._keeps = self._has_corpus and seconds > 0  # a file
        self._start = _COLD
        self._saved_at = self._watched_at = time.monotonic()
        self._logged: set[tuple[str, ...]] = set()  # names, with why they were not loaded
        if self._num_tokens:  # spec.corpus_path was given
            self._start = _warm(self._num_tokens)

    def restore(self) -> None:
        """Go on with the corpus that an earlier run of this job saved, if it did.

        Before the first step, while configured external corpora take no room yet.
        """
        if not self._keeps:
            return
        self._remove_half_saved()
        if not self._path.exists():
            if self._num_tokens:  # so that the same command finds it, whatever it overwrote
                self._save()
            return
        try:
            self._engine.load_corpus(self._path)
        except (InvalidInputError, OSError, MemoryError) as error:
            reason = str(error) or "not enough memory"
            log.warning("drafts start without the earlier run's corpus: %s", reason)
        else:
            self._start = _warm(self._num_tokens)
            log.info("corpus: %s", self._start)

    def tend(self) -> None:
        """Report what has happened to the corpora, and save when it is time. Called between two
        steps."""
        now = time.monotonic()
        if now - self._watched_at >= _WATCH_SECONDS:
            self._watched_at = now
            self._report()
        if self._keeps and now - self._saved_at >= self._seconds:
            self._save()

    def finish(self) -> str:
        """Save for the run that goes on, or for the next epoch. Returns the summary's line."""
        if not self._has_corpus:
            return ""
        self._report()
        if self._keeps:
            self._save()
        shown = f"{self._start}; {self._num_tokens:,} tokens now"
        if self._keeps and self._path.exists():
            shown += f", in {self._path} ({self._path.stat().st_size / 1e6:.1f} MB)"
        return shown

    @property
    def was_empty(self) -> bool:
        """Whether the corpus started empty, and is saved for the next epoch."""
        return self._keeps and self._start == _COLD

    @property
    def _num_tokens(self) -> int:
        return self._engine.corpus_tokens or 0

    def _save(self) -> None:
        try:
            self._engine.save_corpus(self._path)
        except (InvalidInputError, OSError) as error:  # such as a folder of that name
            log.warning("%s was not saved, so a resumed job drafts less: %s", self._path, error)
        self._remove_half_saved()  # by a replica that died
        self._saved_at = time.monotonic()

    def _remove_half_saved(self) -> None:
        """Remove half-saved files of dead processes. Call it only while no replica saves."""
        for scratch in self._paths.half_saved():
            try:
                scratch.unlink(missing_ok=True)
            except OSError as error:
                log.warning("%s was left by a process that died and stays: %s", scratch, error)

    def _report(self) -> None:
        """Log each external corpus once when it is published, each failure once."""
        if not self._has_corpus:
            return
        for each in self._engine.external_corpora():
            if each.state is ExternalState.PUBLISHED and self._is_news(each.name):
                log.info("external corpus %s loaded: %d tokens", each.name, each.num_tokens)
            if each.error is not None and self._is_news(each.name, each.error):
                log.warning("external corpus %s was not loaded: %s", each.name, each.error)

    def _is_news(self, *fact: str) -> bool:
        known = fact in self._logged
        self._logged.add(fact)
        return not known


def _warm(num_tokens: int) -> str:
    return f"warm, {num_tokens:,} tokens"
