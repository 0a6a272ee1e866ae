"""Flags and positional words of a command, as Hydra's KEY=VALUE."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import get_type_hints

from hydra._internal.utils import get_args_parser

from rollout.config import KEY_OF
from rollout.errors import InvalidInputError
from rollout.sampling.parameter_names import FIELD_OF
from rollout.validation import did_you_mean

_KEY_OF = {
    **KEY_OF,
    "model": "model.path",
    "model_path": "model.path",
    "served_model_name": "server.model_name",
    "num_speculative_tokens": "spec.num_draft_tokens",
    "tensor_parallel_size": "parallel=tensor parallel.size",
    "tp_size": "parallel=tensor parallel.size",
    "tp": "parallel=tensor parallel.size",
    "data_parallel_size": "cluster=ray cluster.replicas",
    "dp_size": "cluster=ray cluster.replicas",
    "dp": "cluster=ray cluster.replicas",
}  # fmt: skip
_HAS_ANOTHER_MEANING = frozenset({"memory.kv_fraction"})
"""Keys that mean less, or more, than the options after which others would choose them."""

_WORDS = ("model.path", "data.path")


def with_model_path(argument: str) -> str:
    """Expand ``model=FOLDER`` to ``model.path=FOLDER`` if FOLDER has a slash or a config.json.

    No option of the config group has a slash, so a missing folder is reported as a missing folder.
    """
    name, _, folder = argument.partition("=")
    is_model = "/" in folder or Path(folder, "config.json").is_file()
    return f"model.path={_quoted(folder)}" if name == "model" and is_model else argument


def take_flags(arguments: Sequence[str], kind: type) -> tuple[list[str], list[str]]:
    """The overrides that flags stand for, and the other arguments.

    ``--max-running 8`` sets the key whose last part is ``max_running``, if no other key of the
    configuration ``kind`` ends so. vLLM's and SGLang's names of options stand for the same keys.

    Raises InvalidInputError for a flag without a value.
    """
    parser = argparse.ArgumentParser(
        add_help=False, allow_abbrev=False, exit_on_error=False, argument_default=argparse.SUPPRESS
    )
    keys, texts = _keys_by_name(kind), set(_text_keys(kind))
    for name, key in keys.items():
        if key not in _HAS_ANOTHER_MEANING or key.endswith(f".{name}"):
            spellings = dict.fromkeys((f"--{name.replace('_', '-')}", f"--{name}"))
            parser.add_argument(*spellings, dest=name)
    try:
        given, rest = parser.parse_known_args(arguments)
    except argparse.ArgumentError as error:
        flag = str(error.argument_name).partition("/")[0]
        raise InvalidInputError(flag, None, error.message) from error
    overrides: list[str] = []
    for name, value in vars(given).items():
        *group, key = keys[name].split()
        if not group or value != "1":  # one rank or one replica is no group of them
            overrides += [*group, f"{key}={_quoted(value) if key in texts else value}"]
    return overrides, rest


def words_as_overrides(words: Sequence[str], kind: type, given: Sequence[str] = ()) -> list[str]:
    """KEY=VALUE as they are; the first other word is the model, of a job the second the prompts,
    as far as neither they nor the overrides ``given`` set those.

    Raises InvalidInputError for a further one.
    """
    are_overrides = {
        word: with_model_path(word)
        for word in words
        if not _is_path(word) and (word.find("=") > 0 or word.startswith("~"))
    }
    named = {each.partition("=")[0] for each in (*given, *are_overrides.values())}
    keys = iter([key for key in _WORDS if key in keys_of(kind) and key not in named])
    overrides = []
    for word in words:
        if word in are_overrides:
            overrides.append(are_overrides[word])
        elif (key := next(keys, None)) is not None:
            overrides.append(f"{key}={_quoted(word)}")
        else:
            raise InvalidInputError("arguments", word, "must be KEY=VALUE or --flag VALUE")
    return overrides


def hydra_arguments(arguments: Sequence[str], kind: type) -> list[str]:
    """The arguments as Hydra reads them: its own options, and KEY=VALUE for all else.

    Raises InvalidInputError for a flag that neither it nor `take_flags` knows.
    """
    overrides, rest = take_flags(arguments, kind)
    given, unknown = get_args_parser().parse_known_intermixed_args(rest)
    for flag in unknown:
        hint = key_hint(flag.partition("=")[0].lstrip("-").replace("-", "_"), kind)
        raise InvalidInputError("arguments", flag, f"no such flag{hint} (see --help)")
    options = [each for each in rest if each not in given.overrides]
    return [*options, *words_as_overrides(given.overrides, kind, overrides), *overrides]


def key_hint(name: str, kind: type) -> str:
    """``, did you mean KEY?`` for the key of ``kind`` that is most like ``name``, or that is the
    same by another name; else nothing."""
    by_name = _keys_by_name(kind)
    return did_you_mean(name, [*keys_of(kind), *by_name], by_name)


def keys_of(kind: type, section: str = "") -> Iterator[str]:
    """Every key of a configuration's dataclass, sections included."""
    hints = get_type_hints(kind)
    for field in fields(kind):
        yield f"{section}{field.name}"
        part = hints[field.name]
        if isinstance(part, type) and is_dataclass(part):
            yield from keys_of(part, f"{section}{field.name}.")


def _keys_by_name(kind: type) -> Mapping[str, str]:
    """Names that stand for one key each: the last part of it, and what other engines call it."""
    keys = list(keys_of(kind))
    names = [key.rpartition(".")[2] for key in keys]
    own = {name: key for name, key in zip(names, keys, strict=True) if names.count(name) == 1}
    theirs = _KEY_OF | {name: f"sampling.{field}" for name, field in FIELD_OF.items()}
    sections = {key for key in keys if "." not in key}
    return own | {
        name: key for name, key in theirs.items() if key.split()[-1].partition(".")[0] in sections
    }


def _is_path(word: str) -> bool:
    """Whether a word is a path even with an equals sign in it, as in ``runs/step=100``."""
    return word.startswith(("/", "./", "../")) or Path(word).exists()


def _text_keys(kind: type, section: str = "") -> Iterator[str]:
    for name, hint in get_type_hints(kind).items():
        if hint in (str, str | None):
            yield f"{section}{name}"
        elif isinstance(hint, type) and is_dataclass(hint):
            yield from _text_keys(hint, f"{section}{name}.")


def _quoted(text: str) -> str:
    """The text as Hydra and OmegaConf read it unchanged: no number, no null, no interpolation."""
    plain = re.sub(r"(\\*)\$\{", r"\1\1\\${", text)
    return "'" + re.sub(r"(\\*)('|\Z)", _escaped, plain) + "'"


def _escaped(found: re.Match[str]) -> str:
    backslashes, quote = found.groups()
    return 2 * backslashes + (quote and "\\'")
