"""The key figures of one run, as text with units."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rollout.report.run import Run, number, ratio, total

UNKNOWN = "-"


def figures(run: Run) -> dict[str, str]:
    """Figures by name, in the order of the page. The names are the same for every run."""
    return {
        "settings": _settings(run),
        "rollouts": _rollouts(run),
        "generated tokens": count(counter(run, "generated_tokens")),
        "generating time": seconds(run.seconds),
        "tokens/s": count(tokens_per_second(run)),
        "engine steps": _steps(run),
        "accept length": decimal(accept_length(run)),
        "draft tokens proposed / verified / accepted": _nodes(run),
        "accepted of verified": _accepted(run),
        "preemptions": count(_preemptions(run)),
        "peak memory": _memory(run),
    }


def count(value: float | None) -> str:
    """A whole number with thousands separators; UNKNOWN for None, NaN and infinities."""
    return UNKNOWN if value is None or not np.isfinite(value) else f"{value:,.0f}"


def decimal(value: float | None, digits: int = 3) -> str:
    """A number with ``digits`` decimals; UNKNOWN for None, NaN and infinities."""
    return UNKNOWN if value is None or not np.isfinite(value) else f"{value:,.{digits}f}"


def percent(value: float | None) -> str:
    """A share in per cent; UNKNOWN for None, NaN and infinities."""
    return UNKNOWN if value is None or not np.isfinite(value) else f"{value:.1%}"


def seconds(value: float | None) -> str:
    """A duration in seconds, minutes or hours; UNKNOWN for None, NaN and infinities."""
    if value is None or not np.isfinite(value):
        return UNKNOWN
    if value < 120:
        return f"{value:.1f} s"
    hours, minutes = divmod(round(value) // 60, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {round(value) % 60:02} s"


_SPECS = {
    "none": "no drafts",
    "ngram": "n-gram drafts",
    "eagle": "EAGLE drafts",
    "mtp": "MTP drafts",
    "hybrid": "n-gram and neural drafts",
}


def described(settings: Mapping[str, Any]) -> dict[str, str]:
    spec = settings.get("spec")
    target = spec.get("_target_") if isinstance(spec, Mapping) else spec
    kind = str(target or "").removesuffix(".build").rpartition(".")[2]
    words = {"spec": _SPECS.get(kind, kind)} if kind else {}
    for name in ("budget", "num_draft_tokens", "corpus_path"):
        if isinstance(spec, Mapping) and spec.get(name) is not None:
            words[name] = f"{name} {spec[name]}"
    for name in ("model", "data"):
        if name in settings:
            words[name] = str(settings[name])
    for name in ("temperature", "n", "max_new_tokens", "max_running", "seed", "exact", "replicas"):
        if name in settings:
            words[name] = f"{name} {settings[name]}"
    return words


def _settings(run: Run) -> str:
    shown = described(run.settings)
    return (
        ", ".join(text for name, text in shown.items() if name not in ("model", "data")) or UNKNOWN
    )


def name_runs(runs: Sequence[Run]) -> None:
    """Name each run by what tells it from the others: settings, else its file and number."""
    if len(runs) < 2:
        return
    descriptions = [described(run.settings) for run in runs]
    differing = [
        name
        for name in dict.fromkeys(name for each in descriptions for name in each)
        if len({each.get(name) for each in descriptions}) > 1
    ]
    # Only drafting has its options: they say nothing beside its name where all of those differ.
    if len({each.get("spec") for each in descriptions}) == len(runs):
        differing = ["spec", *(name for name in differing if name in ("model", "temperature"))]
    names = [", ".join(each[name] for name in differing if name in each) for each in descriptions]
    several_files = len({run.path for run in runs}) > 1
    for run, name in zip(runs, names, strict=True):
        own = run.path.stem if several_files else f"run {run.number}"
        if several_files and sum(other.path == run.path for other in runs) > 1:
            own += f", run {run.number}"
        run.name = _printable(f"{name} ({own})" if name else own)


def _printable(text: str) -> str:
    """The text for a terminal, to which some letters would be commands or cannot be written."""
    return "".join(letter if letter.isprintable() else "\ufffd" for letter in text)


def _rollouts(run: Run) -> str:
    if not run.num_rollouts:
        return UNKNOWN if run.num_steps else "0"
    reasons = Counter(run.finish_reasons).most_common()
    return f"{run.num_rollouts:,} ({', '.join(f'{many:,} {reason}' for reason, many in reasons)})"


def counter(run: Run, name: str) -> float:
    """The engine's total; else the sum over steps; else, for a thinned log, over rollouts."""
    known = number(run.totals.get(name))
    if np.isfinite(known):
        return known
    from_rollouts = run.num_rollouts and (not run.num_steps or run.steps_per_line > 1)
    return total((run.rollouts if from_rollouts else run.steps)[name])


def _preemptions(run: Run) -> float:
    """Preemptions of the run. A step's line holds the total so far, so steps are not summed up."""
    so_far = run.steps["preemptions"]
    so_far = so_far[np.isfinite(so_far)]
    if len(so_far) and not np.isfinite(number(run.totals.get("preemptions"))):
        return float(so_far[-1])
    return counter(run, "preemptions")


def tokens_per_second(run: Run) -> float | None:
    """Generated tokens per second of generation; None where no time is known."""
    return ratio(counter(run, "generated_tokens"), run.seconds)


def _steps(run: Run) -> str:
    known = number(run.totals.get("steps"))
    if np.isfinite(known) and known != run.num_steps:
        return f"{known:,.0f}, {run.num_steps:,} of them logged"
    return count(run.num_steps)


def accept_length(run: Run) -> float | None:
    """Tokens per target forward of a request; None where nothing was sampled."""
    known = number(run.totals.get("accept_length"))
    if np.isfinite(known) and known > 0:
        return known
    return ratio(total(run.steps["generated_tokens"]), total(run.steps["sampling"]))


def _nodes(run: Run) -> str:
    return " / ".join(count(counter(run, name)) for name in ("proposed", "drafted", "accepted"))


def _accepted(run: Run) -> str:
    verified = counter(run, "drafted")
    if not verified:
        return UNKNOWN
    share = counter(run, "accepted") / verified
    return f"{percent(share)}, estimated {percent(counter(run, 'expected_accepted') / verified)}"


def _memory(run: Run) -> str:
    known = np.append(run.steps["peak_memory_bytes"], number(run.totals.get("peak_memory_bytes")))
    known = known[np.isfinite(known)]
    return f"{known.max() / 2**20:,.0f} MiB" if len(known) else UNKNOWN
