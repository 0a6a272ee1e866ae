"""The figures of one run, as text with units."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import numpy as np

from rollout.report.run import Columns, Run, number, ratio, total

UNKNOWN = "-"
PHASES = ("forward", "draft", "sample", "schedule")


def figures(run: Run) -> dict[str, str]:
    """The figures by name, in the order they are shown. Every run has the same names."""
    return {
        "settings": _settings(run),
        "rollouts": _rollouts(run),
        "generated tokens": count(_generated(run)),
        "generating time": seconds(run.seconds),
        "tokens/s": count(ratio(_generated(run), run.seconds)),
        "engine steps": _steps(run),
        "accept length": decimal(_accept_length(run)),
        "nodes proposed / verified / accepted": _nodes(run),
        "accepted of verified": _accepted(run),
        "milliseconds per step, predicted / real": _step_time(run),
        "gain, predicted / real": _gain(run),
        "time": _shares(run),
        "preemptions": count(_preemptions(run)),
        "peak memory": _memory(run),
    }


def count(value: float | None) -> str:
    """A whole number; unknown ones as `UNKNOWN`."""
    return UNKNOWN if value is None or not np.isfinite(value) else f"{value:,.0f}"


def decimal(value: float | None, digits: int = 3) -> str:
    """A number with so many digits behind the point."""
    return UNKNOWN if value is None or not np.isfinite(value) else f"{value:,.{digits}f}"


def percent(value: float | None) -> str:
    """A share as a percentage."""
    return UNKNOWN if value is None or not np.isfinite(value) else f"{value:.1%}"


def seconds(value: float | None) -> str:
    """A time span in the unit that suits it."""
    if value is None or not np.isfinite(value):
        return UNKNOWN
    if value < 120:
        return f"{value:.1f} s"
    hours, minutes = divmod(round(value) // 60, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {round(value) % 60:02} s"


def name_of(settings: Mapping[str, object]) -> str | None:
    """How drafts were made: ``ngram`` of ``spec_workers.ngram.build``."""
    spec = settings.get("spec")
    target = spec.get("_target_") if isinstance(spec, Mapping) else spec
    return None if not target else str(target).removesuffix(".build").rpartition(".")[2]


def _settings(run: Run) -> str:
    settings = run.settings
    parts = [f"spec={name_of(settings)}"] if name_of(settings) else []
    options = settings.get("spec")
    if isinstance(options, Mapping):
        of_drafts = ("budget", "num_draft_tokens", "corpus_path")
        parts += [f"{name}={options[name]}" for name in of_drafts if options.get(name) is not None]
    shown = ("temperature", "n", "max_new_tokens", "max_running")
    parts += [f"{name}={settings[name]}" for name in shown if name in settings]
    return ", ".join(parts) or UNKNOWN


def _rollouts(run: Run) -> str:
    if not run.num_rollouts:
        return UNKNOWN if run.num_steps else "0"
    reasons = Counter(run.finish_reasons).most_common()
    return f"{run.num_rollouts:,} ({', '.join(f'{many:,} {reason}' for reason, many in reasons)})"


def _counter(run: Run, name: str) -> float:
    """The engine's own total; else what all steps add up to; else, of a thinned log, rollouts."""
    known = number(run.totals.get(name))
    if np.isfinite(known):
        return known
    from_rollouts = run.num_rollouts and (not run.num_steps or run.steps_per_line > 1)
    return total((run.rollouts if from_rollouts else run.steps)[name])


def _preemptions(run: Run) -> float:
    """No `_counter` where steps tell: each step's line holds those of all steps up to it."""
    so_far = run.steps["preemptions"]
    so_far = so_far[np.isfinite(so_far)]
    if len(so_far) and not np.isfinite(number(run.totals.get("preemptions"))):
        return float(so_far[-1])
    return _counter(run, "preemptions")


def _generated(run: Run) -> float:
    return _counter(run, "generated_tokens")


def _steps(run: Run) -> str:
    known = number(run.totals.get("steps"))
    if np.isfinite(known) and known != run.num_steps:
        return f"{known:,.0f}, {run.num_steps:,} of them logged"
    return count(run.num_steps)


def _accept_length(run: Run) -> float | None:
    known = number(run.totals.get("accept_length"))
    if np.isfinite(known) and known > 0:
        return known
    return ratio(total(run.steps["generated_tokens"]), total(run.steps["sampling"]))


def _nodes(run: Run) -> str:
    return " / ".join(count(_counter(run, name)) for name in ("proposed", "drafted", "accepted"))


def _accepted(run: Run) -> str:
    verified = _counter(run, "drafted")
    if not verified:
        return UNKNOWN
    share = _counter(run, "accepted") / verified
    return f"{percent(share)}, estimated {percent(_counter(run, 'expected_accepted') / verified)}"


def _step_time(run: Run) -> str:
    has_forecast = run.has_forecast
    if not has_forecast.any():
        return UNKNOWN
    predicted, real = (
        run.steps["predicted_ms"][has_forecast].mean(),
        run.step_ms[has_forecast].mean(),
    )
    error = np.median(
        np.abs(
            run.steps["predicted_ms"][has_forecast] / np.maximum(run.step_ms[has_forecast], 1e-9)
            - 1
        )
    )
    return f"{predicted:.2f} / {real:.2f}, half of the steps within {error:.0%}"


def _gain(run: Run) -> str:
    if not run.has_forecast.any():
        return UNKNOWN
    predicted, real = (_counter(run, name) / 1e3 for name in ("predicted_gain_ms", "gain_ms"))
    return f"{predicted:+.2f} s / {real:+.2f} s"


def phase_milliseconds(steps: Columns) -> dict[str, np.ndarray]:
    """[steps] by phase; `rest` is what is left of the whole."""
    phases = {phase: np.nan_to_num(steps[f"{phase}_ms"]) for phase in PHASES}
    whole = np.nan_to_num(steps["total_ms"])
    return phases | {"rest": np.maximum(whole - np.sum(list(phases.values()), axis=0), 0.0)}


def _shares(run: Run) -> str:
    phases = {name: total(values) for name, values in phase_milliseconds(run.steps).items()}
    whole = sum(phases.values())
    if not whole:
        return UNKNOWN
    return ", ".join(f"{name} {ms / whole:.1%}" for name, ms in phases.items())


def _memory(run: Run) -> str:
    known = np.append(run.steps["peak_memory_bytes"], number(run.totals.get("peak_memory_bytes")))
    known = known[np.isfinite(known)]
    return f"{known.max() / 2**20:,.0f} MiB" if len(known) else UNKNOWN
