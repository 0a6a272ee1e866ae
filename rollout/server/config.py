"""Configuration of the server: the engine's parts, where it listens, and what it refuses."""

from __future__ import annotations

import enum
import ipaddress
from dataclasses import dataclass, field

from rollout.errors import InvalidInputError
from rollout.offline.config import CommandConfig

_MIB = 2**20


class LogLevel(enum.StrEnum):
    """Log levels. Members are lower case because configuration files name members."""

    debug = "debug"
    info = "info"
    warning = "warning"
    error = "error"


class ToolParserName(enum.StrEnum):
    """Formats in which models write calls of tools."""

    auto = "auto"  # by the chat template's text
    none = "none"
    hermes = "hermes"
    llama3 = "llama3"
    mistral = "mistral"
    qwen3_coder = "qwen3_coder"
    deepseek = "deepseek"
    glm45 = "glm45"


class ReasoningParserName(enum.StrEnum):
    """Formats in which models write their reasoning."""

    auto = "auto"  # by the chat template's text
    none = "none"
    think = "think"


@dataclass(kw_only=True, slots=True)
class ServerConfig:
    host: str = "127.0.0.1"  # any other than loopback needs an api_key
    port: int = 30000  # 0: any free one
    # Asked of every call, as `Authorization: Bearer KEY`. Better given in the environment, as
    # SPECROLLOUT_API_KEY and SPECROLLOUT_ADMIN_KEY: command lines are seen by other users.
    api_key: str | None = field(default=None, repr=False)
    admin_key: str | None = field(default=None, repr=False)  # weights, corpora, memory, pausing
    model_name: str | None = None  # in answers; default: the model folder's name, or the hub's
    seed: int | None = None  # of requests that bring none; default: another one at every start
    max_body_bytes: int = 64 * _MIB
    max_weights_body_bytes: int = 64 * 1024 * _MIB  # of one that brings weights
    max_batch: int = 1024  # samples of one call
    max_prompt_len: int | None = None  # tokens; default: what the context leaves
    max_queue: int = 4096  # samples, running and waiting, of all clients
    max_connections: int = 4096  # of all clients, idle ones included
    drain_seconds: float = 30.0  # that running requests have to finish after SIGTERM
    weights_root: str | None = None  # weights are read from files below this folder; default: none
    corpora_root: str | None = None  # corpora are read from files below it; default: none
    profile_root: str | None = None  # profiles are written to this folder; default: none
    tool_parser: ToolParserName = ToolParserName.auto  # how the model writes calls of tools
    reasoning_parser: ReasoningParserName = ReasoningParserName.auto  # and its reasoning
    log_level: LogLevel = LogLevel.info
    access_log: bool = False  # a line per request

    def __post_init__(self) -> None:
        if not 0 <= self.port < 2**16:
            raise InvalidInputError("server.port", self.port, "must be in [0, 65536)")
        for name in ("api_key", "admin_key"):
            if getattr(self, name) is not None and not _is_key(getattr(self, name)):
                raise InvalidInputError(
                    f"server.{name}", "...", "must be printable ASCII without spaces, not empty"
                )
        if self.admin_key is not None and self.admin_key == self.api_key:
            raise InvalidInputError("server.admin_key", "...", "must differ from server.api_key")
        if not self.is_loopback and self.api_key is None:
            raise InvalidInputError(
                "server.host",
                self.host,
                "is open to other machines: set SPECROLLOUT_API_KEY, or listen on 127.0.0.1",
            )
        for name in (
            "max_body_bytes", "max_weights_body_bytes", "max_batch", "max_queue", "max_connections",
        ):  # fmt: skip
            if getattr(self, name) < 1:
                raise InvalidInputError(f"server.{name}", getattr(self, name), "must be >= 1")
        if self.max_prompt_len is not None and self.max_prompt_len < 1:
            raise InvalidInputError("server.max_prompt_len", self.max_prompt_len, "must be >= 1")
        if self.max_batch > self.max_queue:
            raise InvalidInputError(
                "server.max_batch", self.max_batch, f"must be <= max_queue={self.max_queue}"
            )
        if not self.drain_seconds >= 0:
            raise InvalidInputError("server.drain_seconds", self.drain_seconds, "must be >= 0")

    @property
    def is_loopback(self) -> bool:
        """Whether only programs of this machine can reach the server."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False


@dataclass(kw_only=True, slots=True)
class ServeConfig(CommandConfig):
    server: ServerConfig = field(default_factory=ServerConfig)


def _is_key(key: str) -> bool:
    return key.isascii() and key.isprintable() and bool(key) and " " not in key
