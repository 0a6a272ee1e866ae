"""A mismatch as tables in the terminal."""

from __future__ import annotations

from collections.abc import Iterator

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from rollout.trainers.mismatch.result import Mismatch

MAX_OPS = 8


def figures(found: Mismatch) -> Iterator[tuple[str, str]]:
    """The figures by name, in words for their units."""
    yield "rollouts, tokens", f"{found.rollouts:,}, {found.tokens:,}"
    yield "largest difference, logprobs of the sampled tokens", f"{found.max_difference:.3g}"
    yield "mean of these", f"{found.mean_difference:.3g}"
    yield (
        "largest difference, logits of all tokens in every row",
        f"{found.max_logit_difference:.3g}",
    )
    yield "engine against the rollouts' own logprobs", f"{found.engine_difference:.3g}"
    ratio = found.ratio
    yield "ratios: least, mean, largest", f"{ratio.min:.4f}, {ratio.mean:.4f}, {ratio.max:.4f}"
    yield "ratios outside 0.8 to 1.2", f"{ratio.outside:.2%}"
    yield (
        "KL(engine || trainer), nats: mean, largest",
        (f"{found.divergence.mean:.3g}, {found.divergence.max:.3g}"),
    )
    yield "entropy of trainer and engine, nats", f"{found.entropy[0]:.4f}, {found.entropy[1]:.4f}"
    yield "rows whose most likely token differs", f"{found.flips:.2%}"
    for bucket in found.by_version if len(found.by_version) > 1 else ():
        yield f"weight version {bucket.name}: mean, largest", f"{bucket.mean:.3g}, {bucket.max:.3g}"


def print_mismatch(console: Console, found: Mismatch) -> None:
    """Print the figures, the largest ops, and the suspects."""
    numbers = Table(box=box.SIMPLE_HEAD, show_header=False)
    for name, value in figures(found):
        numbers.add_row(name, value)
    console.print(numbers)
    ops = Table("op", "difference", "rounding explains", "share", box=box.SIMPLE_HEAD)
    for op in found.ops[:MAX_OPS]:
        mark = "" if op.is_explained else "[bold red]"
        ops.add_row(
            f"{mark}{op.where}", f"{op.difference:.2g}", f"{op.rounding:.1g}", f"{op.share:.1%}"
        )
    if found.ops:
        console.print(ops)
    for note in found.notes:
        console.print(note, highlight=False)
    for place, suspect in enumerate(found.suspects[:MAX_OPS], start=1):
        text = f"[bold]{place}. {suspect.cause}[/] {escape(suspect.sentence)}"
        console.print(text, highlight=False, soft_wrap=True)
    if not found.suspects:
        console.print("[bold]no suspect[/]: trainer and engine agree", highlight=False)
