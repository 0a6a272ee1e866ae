"""A weight update that several HTTP calls bring."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from rollout.engine.protocol import Engine
from rollout.errors import EngineStateError, InvalidInputError, WeightUpdateError
from rollout.models.checkpoint import listed
from rollout.server.version_labels import VersionLabels
from rollout.weights.adapter_folder import AdapterFolder
from rollout.weights.disk_source import DiskSource
from rollout.weights.manifest import Manifest
from rollout.weights.source import TensorSource, WeightSource
from rollout.weights.update_counts import UpdateCounts
from rollout.weights.update_options import UpdateOptions
from rollout.weights.versions import TARGET

Options = dict[str, Any]
"""The fields of UpdateOptions that a caller gave; ``weight_version`` may be a label."""


class HttpWeightUpdate:
    """The weight update that is under way over HTTP, with the options its calls gave.

    Trainers written for sglang pause generation, send an update as several calls, a bucket of
    tensors each, and continue. So while generation is paused a call that brings some of the tensors
    opens an update, those that follow belong to it, and continuing commits it. As nothing is
    generated in between, no token can tell it from one call that brings them all.

    A call that fails ends the update it belongs to. Every method runs on the engine's thread.
    """

    def __init__(self) -> None:
        self._options: Options | None = None  # None: no update is open
        self._manifest: Manifest | None = None  # what `begin` was told is going to come
        self._label: str | None = None  # of the open update
        self._has_loaded = False
        self._ends_with_pause = False
        self.labels = VersionLabels()
        self.adapter_name: str | None = None  # of the LoRA adapter that is in the weights

    @property
    def selector(self) -> str:
        """The models that the open update is for; without one, those of a call that names none."""
        return UpdateOptions.of(self._options or {}).selector

    def begin(self, engine: Engine, manifest: Manifest | None, options: Options) -> None:
        """Raises what `RolloutEngine.begin_weight_update` does."""
        options, label = _without_label(options)
        engine.begin_weight_update(manifest, **options)
        self._options, self._manifest, self._label = options, manifest, label
        self._has_loaded = self._ends_with_pause = False

    def load_adapter(self, engine: Engine, name: str, folder: Path) -> None:
        """Put PEFT's adapter in a folder into the weights, in place of an earlier one.

        Raises InvalidInputError for one that replaces tensors of the base, and what
        `RolloutEngine.update_weights` does.
        """
        self._require_none()
        if whole := AdapterFolder(folder).whole:
            raise InvalidInputError(
                "lora_path", str(folder),
                f"replaces {listed(whole)} of the base, which unloading could not restore: send "
                "merged weights",
            )  # fmt: skip
        self._update(engine, DiskSource(folder))
        self.adapter_name = name

    def unload_adapter(self, engine: Engine) -> None:
        """Take the adapter out again: the weights are the base, bit for bit."""
        self._require_none()
        self._update(engine, TensorSource({}), lora_scaling=1.0)
        self.adapter_name = None

    def announce(self, engine: Engine, name: int | str) -> None:
        """Name the weights of the open update, or those in use, from the next token on.

        The name in use changes nothing. Raises what `RolloutEngine.update_weights` does.
        """
        if self._options is not None:
            options, self._label = _without_label({"weight_version": name})
            self._options = {**self._options, "weight_version": None, **options}
        elif self.labels.of(engine.weight_version) != str(name):
            before = engine.weight_version
            engine.update_weights(
                TensorSource({}), selector=TARGET, partial=True, flush_cache=False,
                weight_version=before + 1 if isinstance(name, str) else name,
            )  # fmt: skip
            self.labels.note(before, engine.weight_version, name)

    def _update(self, engine: Engine, source: WeightSource, **options: Any) -> UpdateCounts | None:
        before = engine.weight_version
        counts = engine.update_weights(source, **_without_label(options)[0])
        self.labels.note(before, engine.weight_version, options.get("weight_version"))
        return counts

    def _require_none(self) -> None:
        if self._options is not None:
            raise WeightUpdateError("an update is under way; end or abandon it first")

    def end(self, engine: Engine, weight_version: int | None = None) -> dict[str, Any]:
        """Commit; the answer. Raises what `RolloutEngine.end_weight_update` does."""
        options, self._options = self._options, None
        name: int | str | None = weight_version
        if name is None:
            name = self._label or (options or {}).get("weight_version")
        before = engine.weight_version
        try:
            counts = engine.end_weight_update(None if isinstance(name, str) else name)
        except InvalidInputError as error:
            if error.field == "weight_version":  # the update is still open
                self._options = options
            raise
        self.labels.note(before, engine.weight_version, name)
        self._forget_adapter(options or {})
        return self._committed(engine, counts)

    def abandon(self, engine: Engine, reason: str) -> None:
        self._options = None
        engine.abandon_weight_update(reason)

    def load(self, engine: Engine, source: WeightSource, options: Options) -> dict[str, Any]:
        """Load one call's tensors. Returns the answer, whose message says what became of them.

        What is wrong with the source is left for the engine to raise: a sender may be waiting for
        it to receive.
        """
        if self._options is None and engine.is_paused:
            self._open_for_bucket(engine, source, options)
        if self._options is None:
            counts = self._update(engine, source, **options)
            self._forget_adapter(_without_label(options)[0])
            return self._committed(engine, counts)
        options, label = _without_label(options)
        self._label = label or self._label
        try:
            engine.update_weights(source, **self._new_options(engine, options))
        except BaseException as error:
            self.abandon(engine, f"it failed: {error}")
            raise
        self._has_loaded = True
        ends = "/continue_generation" if self._ends_with_pause else "/end_weight_update"
        return {"message": f"loaded, as a part of the update that {ends} commits"}

    def continue_generation(self, engine: Engine) -> dict[str, Any]:
        """Commit what was opened by its first bucket, and let generation go on; the answer.

        Raises what `RolloutEngine.end_weight_update` does, and WeightUpdateError while the weights
        are torn: requests would wait, and a client that asks twice must not take that for success.
        Generation is still paused then.
        """
        answer = {}
        if self._options is not None and self._ends_with_pause:
            answer = self.end(engine)
        if self._options is None:
            _refuse_torn(engine)
        engine.continue_generation()
        return answer | {"message": "generation goes on"}

    def _committed(self, engine: Engine, counts: UpdateCounts | None) -> dict[str, Any]:
        """The answer to the call that committed: ``stored`` and ``ignored`` are tensors by part."""
        answer = {} if counts is None else asdict(counts)
        return answer | {
            "message": f"the weights are version {self.labels.of(engine.weight_version)}"
        }

    def _forget_adapter(self, options: Options) -> None:
        """An update was committed. Where it reached the target and brought every tensor, or other
        adapters, the named one is no longer in the weights."""
        committed = UpdateOptions.of(options)
        reaches_target = committed.selector in ("all", TARGET)
        if reaches_target and (not committed.partial or committed.lora_scaling is not None):
            self.adapter_name = None

    def _open_for_bucket(self, engine: Engine, source: WeightSource, options: Options) -> None:
        """Opens an update, unless the tensors are a whole one or none at all, or not known."""
        try:
            manifest = source.manifest()
        except InvalidInputError:
            return
        if manifest is None:
            return
        try:
            engine.begin_weight_update(manifest, **_without_label(options)[0])
        except InvalidInputError:
            pass
        else:
            engine.abandon_weight_update()  # nothing was written
            return
        try:
            self.begin(engine, None, options)
        except (InvalidInputError, WeightUpdateError):
            return  # as a call of its own it meets the same error
        self._ends_with_pause = True

    def _new_options(self, engine: Engine, options: Options) -> Options:
        """Options of a later call that the first one did not have, which the engine refuses.

        Before anything is loaded it is taken over: sglang's begin_weight_update has no options, and
        the calls that follow bring them.
        """
        assert self._options is not None
        known = UpdateOptions.of(self._options)
        new = {name: value for name, value in options.items() if getattr(known, name) != value}
        if not new or self._has_loaded:
            return new
        engine.abandon_weight_update()  # nothing was written
        try:
            engine.begin_weight_update(self._manifest, **(self._options | new))
        except (InvalidInputError, WeightUpdateError):
            return new
        self._options = self._options | new
        return {}


def _without_label(options: Options) -> tuple[Options, str | None]:
    """The options for an engine, and the label of the version that they make."""
    label = options.get("weight_version")
    if not isinstance(label, str):
        return options, None
    return {name: value for name, value in options.items() if name != "weight_version"}, label


def _refuse_torn(engine: Engine) -> None:
    """Raises WeightUpdateError while the weights are torn: only whole ones allow a partial update.
    Released weights are neither whole nor torn."""
    try:
        engine.begin_weight_update(partial=True)
    except EngineStateError:
        return
    engine.abandon_weight_update()  # nothing was written
