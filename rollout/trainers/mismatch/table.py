"""A mismatch as tables in the terminal."""

from __future__ import annotations

from collections.abc import Iterator

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rollout.trainers.mismatch.result import Mismatch

_MAX_ROWS = 8  # of ops and of suspects


def figures(found: Mismatch) -> Iterator[tuple[str, str]]:
    """The figures by name."""
    ratio, divergence, entropy = found.ratio, found.divergence, found.entropy
    yield "rollouts, tokens", f"{found.rollouts:,}, {found.tokens:,}"
    largest, mean = found.max_difference, found.mean_difference
    yield "logprobs: largest, mean", f"{largest:.3g}, {mean:.3g}"
    yield "logits of all tokens, every row: largest", f"{found.max_logit_difference:.3g}"
    yield "engine against the rollouts' logprobs", f"{found.engine_difference:.3g}"
    yield "ratios: least, mean, largest", f"{ratio.min:.4f}, {ratio.mean:.4f}, {ratio.max:.4f}"
    yield "ratios outside 0.8 to 1.2", f"{found.outside:.2%}"
    yield "KL(engine, trainer), nats: mean, largest", f"{divergence.mean:.3g}, {divergence.max:.3g}"
    yield "entropy of trainer and engine, nats", f"{entropy[0]:.4f}, {entropy[1]:.4f}"
    yield "rows whose most likely token differs", f"{found.flips:.2%}"
    for version, each in found.by_version.items() if len(found.by_version) > 1 else ():
        yield f"version {version}: largest, mean", f"{each.max:.3g}, {each.mean:.3g}"


def verdicts(found: Mismatch) -> Iterator[tuple[str, str]]:
    """The likeliest causes, each with its sentence."""
    if not found.suspects:
        yield "no suspect", "trainer and engine agree"
    for suspect in found.suspects[:_MAX_ROWS]:
        yield suspect.cause, suspect.sentence
    if more := len(found.suspects[_MAX_ROWS:]):
        yield "others", f"{more}, in the file of --json"


def print_mismatch(console: Console, found: Mismatch) -> None:
    """Print the figures, the largest ops, and the suspects."""
    numbers = Table(box=box.SIMPLE_HEAD, show_header=False)
    for name, value in figures(found):
        numbers.add_row(name, value)
    ops = Table("op", "difference", "rounding explains", "share", box=box.SIMPLE_HEAD)
    for op in found.ops[:_MAX_ROWS]:
        values = (op.where, f"{op.difference:.2g}", f"{op.rounding:.1g}", f"{op.share:.1%}")
        ops.add_row(*values, style="" if op.is_explained else "bold red")
    console.print(numbers, *([ops] if found.ops else []), *found.notes)
    for cause, sentence in verdicts(found):
        console.print(Text.assemble((f"{cause}: ", "bold"), sentence), soft_wrap=True)
