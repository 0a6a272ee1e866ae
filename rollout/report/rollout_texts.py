"""The texts of prompts and rollouts, read from the files that the runs wrote, bounded."""

from __future__ import annotations

import errno
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rollout.report.key_figures import decimal
from rollout.report.run import Run, number

MAX_ROLLOUTS = 200  # whose texts a report holds, for all runs
_MAX_PROMPT_LETTERS = 2000
_MAX_TEXT_LETTERS = 4000
_TITLE_LETTERS = 90
_PLACE = re.compile(
    rb'\{"prompt_index": (\d{1,18}), "sample_index": (\d{1,18}),'
)  # as the job writes rows
_REWARDS = ("reward", "score")

Place = tuple[int, int]  # prompt index and sample index


@dataclass(frozen=True, slots=True)
class RolloutText:
    """The prompt and text of a rollout, cut to what a page can hold."""

    prompt: str
    text: str
    reward: float | None


class RolloutTexts:
    """Texts of a sample of the runs' rollouts: the slowest, and others spread evenly."""

    def __init__(self, runs: list[Run]) -> None:
        self.chosen: dict[int, list[int]] = {}  # by run: indices, the slowest first
        self.notes: list[str] = []
        self._texts: dict[int, dict[Place, RolloutText]] = {}
        self._prompts: dict[int, dict[int, str]] = {}
        for run in runs:
            indices = _sample(run, MAX_ROLLOUTS // len(runs))
            self.chosen[id(run)] = indices
            places = {_place(run, index) for index in indices}
            found = self._read(run, {place for place in places if min(place) >= 0})
            self._texts[id(run)] = found
            self._prompts[id(run)] = {place[0]: each.prompt for place, each in found.items()}

    def of(self, run: Run, index: int) -> RolloutText | None:
        """The text of a rollout, or None where it is not known."""
        return self._texts[id(run)].get(_place(run, index))

    def prompt(self, run: Run, index: int) -> str:
        """The prompt of a rollout, cut; empty where it is not known."""
        return self._prompts[id(run)].get(_place(run, index)[0], "")

    def title(self, run: Run, index: int) -> str:
        """The prompt's begin on one line, after its index."""
        name = "?" if (prompt := _place(run, index)[0]) < 0 else str(prompt)
        text = first_line(self.prompt(run, index))
        return f"{name}: {text}" if text else name

    def sample_name(self, run: Run, index: int) -> str:
        """Prompt index and sample index."""
        return ".".join("?" if part < 0 else str(part) for part in _place(run, index))

    def tip(self, run: Run, index: int) -> str:
        """A few lines on a rollout."""
        tokens = decimal(run.rollouts["generated_tokens"][index], 0)
        accepted = decimal(run.accept_length(index), 2)
        return (
            f"{self.title(run, index)}\nsample {self.sample_name(run, index)}: {tokens} tokens, "
            f"accept length {accepted}, finished by {run.finish_reasons[index]}"
        )

    def _read(self, run: Run, places: set[Place]) -> dict[Place, RolloutText]:
        named = run.settings.get("output")
        if not isinstance(named, str) or not places:
            return {}
        found: dict[Place, RolloutText] = {}
        try:
            path = _output(named, run.path.parent)
            with path.open("rb") as file:
                for line in file:
                    begins = _PLACE.match(line)
                    if begins and (int(begins[1]), int(begins[2])) not in places:
                        continue  # most lines of a big output, and they are long
                    row = _parse(line)
                    place = _place_of(row)
                    if place in places:
                        found[place] = _text(row)
                    if len(found) == len(places):
                        break
        except OSError as error:
            shown = first_line(named)
            self.notes.append(f"Texts of rollouts are missing: output {shown}: {error.strerror}.")
        return found


def _output(named: str, folder: Path) -> Path:
    """The file that a run wrote its rollouts to, where it was or beside the log. Raises OSError."""
    for path in (Path(named), folder / Path(named).name):
        if path.is_file():  # and no pipe that would never end
            if path.suffix == ".parquet":
                raise OSError(errno.EINVAL, "texts are read from JSONL alone")
            return path
    raise OSError(errno.ENOENT, "there is no such file")


def first_line(text: str) -> str:
    """The begin of a text on one line."""
    line = " ".join(text[: 4 * _TITLE_LETTERS].split())
    return (
        line
        if len(line) <= _TITLE_LETTERS
        else line[: _TITLE_LETTERS - 1] + "\N{HORIZONTAL ELLIPSIS}"
    )


def _sample(run: Run, size: int) -> list[int]:
    """A sample of at most ``size`` rollouts: the slowest, and as many spread over the rest."""
    taken = run.ended_seconds - run.began_seconds
    slowest_first = np.argsort(-np.nan_to_num(taken, nan=-1.0), kind="stable")
    if len(slowest_first) <= size:
        return [int(index) for index in slowest_first]
    slowest, rest = slowest_first[: size // 2], slowest_first[size // 2 :]
    spread = rest[np.linspace(0, len(rest) - 1, size - len(slowest)).astype(int)]
    return [int(index) for index in (*slowest, *spread)]


def _place(run: Run, index: int) -> Place:
    prompt, sample = (run.rollouts[name][index] for name in ("prompt_index", "sample_index"))
    return _whole(prompt), _whole(sample)


def _whole(value: float) -> int:
    return int(value) if np.isfinite(value) else -1


def _parse(line: bytes) -> Mapping[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return row if isinstance(row, dict) else {}


def _place_of(row: Mapping[str, Any]) -> Place:
    return _whole(number(row.get("prompt_index"))), _whole(number(row.get("sample_index")))


def _text(row: Mapping[str, Any]) -> RolloutText:
    prompt = row.get("prompt", row.get("messages", row.get("prompt_ids", "")))
    rewards = [value for name in _REWARDS if (value := number(row.get(name))) == value]
    text = row.get("text")
    shown = text if isinstance(text, str) else f"token ids {row.get('token_ids')}"
    return RolloutText(
        prompt=_cut(_prompt_text(prompt), _MAX_PROMPT_LETTERS),
        text=_cut(shown, _MAX_TEXT_LETTERS),
        reward=rewards[0] if rewards else None,
    )


def _prompt_text(prompt: object) -> str:
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, list) and prompt and all(isinstance(each, dict) for each in prompt):
        messages = [(each.get("role"), each.get("content")) for each in prompt]
        if len(messages) == 1:
            return str(messages[0][1])
        return "\n".join(f"{role}: {content}" for role, content in messages)
    return f"token ids {prompt}" if prompt else ""


def _cut(text: str, letters: int) -> str:
    left = len(text) - letters
    return text if left <= 0 else f"{text[:letters]}\N{HORIZONTAL ELLIPSIS} ({left:,} more letters)"
