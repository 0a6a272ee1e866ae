"""`specrollout serve`: load the model, listen, and finish running requests before ending."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import signal
import socket
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import count

import rich
import uvicorn
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from rollout.engine.spmd import OpenEngine, launch_ranks, run_spmd
from rollout.errors import InvalidInputError, RolloutError
from rollout.offline.hydra_config import checked_config, register_schema, run_hydra
from rollout.offline.progress import loading_model
from rollout.open_engine import open_engine
from rollout.server.app import make_app
from rollout.server.config import LogLevel, ServeConfig, ServerConfig
from rollout.server.http_protocol import HttpProtocol
from rollout.server.load_log import log_load
from rollout.server.serving import Serving
from rollout.server.streams import call_soon

log = logging.getLogger(__name__)

_OTHER_FILES = 1024  # than connections: the model's, logs, pipes
_LAST_BYTES_SECONDS = 5  # that readers have for answers which are complete when the server ends


def run_serve(arguments: Sequence[str]) -> None:
    """Ends after Ctrl-C or SIGTERM. Raises InvalidInputError and what the model's loading raises,
    and OmegaConf's errors for values that do not fit."""
    register_schema("serve_schema", ServeConfig)
    failures: list[Exception] = []  # Hydra would say more of them

    def run(config: DictConfig) -> None:
        try:
            serve_config = serve_config_from(config)
            launch_ranks(serve_config.ranks, serve_config.model, ["serve", *arguments])
            serve(serve_config)
        except (RolloutError, OmegaConfBaseException, OSError) as error:
            failures.append(error)

    run_hydra("serve", ServeConfig, arguments, run)
    if failures:
        raise failures[0]


def serve_config_from(config: DictConfig) -> ServeConfig:
    """The composed configuration as checked dataclasses. Raises InvalidInputError."""
    if HydraConfig.initialized() and HydraConfig.get().mode is RunMode.MULTIRUN:
        raise InvalidInputError("--multirun", True, "a server is one")
    return checked_config(config, ServeConfig, "specrollout serve")


def serve(config: ServeConfig) -> None:
    """Serve until a signal comes. Of several ranks each makes this call, and rank 0 listens.

    Raises InvalidInputError for an address that cannot be had, and EngineStateError where the
    engine of several ranks has failed: only new ranks make another one.
    """
    _set_log_levels(config.server.log_level)
    opened = partial(open_engine, config.engine, config.spec, config.cluster)
    run_spmd(config.ranks, opened, partial(_serve, config))


def _serve(config: ServeConfig, opened: OpenEngine) -> None:
    allow_open_files(config.server.max_connections + _OTHER_FILES)
    with contextlib.closing(_bound(config.server)) as listener:  # before the model is waited for
        with loading_model(rich.get_console(), config.model.path) as progress:
            engine = opened(progress)
        with contextlib.closing(engine), contextlib.closing(Serving(engine, config)) as serving:
            server = _Server(
                uvicorn.Config(
                    make_app(serving),
                    http=HttpProtocol,
                    ws="none",  # nothing here speaks it
                    limit_concurrency=config.server.max_connections,
                    log_config=None,
                    access_log=config.server.access_log,
                    lifespan="off",
                    server_header=False,
                    timeout_graceful_shutdown=_LAST_BYTES_SECONDS,
                )
            )
            with asyncio.Runner(loop_factory=server.config.get_loop_factory()) as runner:
                runner.run(_until_stopped(server, serving, listener))
            if config.ranks.size > 1:
                serving.loop.require_open()


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """uvicorn would stop listening at the first signal; `_until_stopped` handles signals."""
        yield


async def _until_stopped(server: _Server, serving: Serving, listener: socket.socket) -> None:
    """The first signal drains, the second aborts, the third exits; a failed rank drains too."""
    event_loop = asyncio.get_running_loop()
    stop = event_loop.create_future()
    running = event_loop.create_task(server.serve([listener]))
    draining: asyncio.Task[None] | None = None

    signals = count(1)

    def on_signal() -> None:
        number = next(signals)
        if number == 1:
            stop.set_result(None)
        elif number == 2:
            serving.end_drain()
        elif draining is not None:
            draining.cancel()
            server.force_exit = True

    for number in (signal.SIGINT, signal.SIGTERM):
        event_loop.add_signal_handler(number, on_signal)
    if serving.serve_config.ranks.size > 1:
        serving.loop.broken.add_done_callback(lambda _: call_soon(event_loop, on_signal))
    while not server.started and not running.done():
        await asyncio.sleep(0.01)
    if server.started:
        _say_ready(serving, listener)
    load_log = event_loop.create_task(log_load(serving))
    await asyncio.wait({running, stop}, return_when=asyncio.FIRST_COMPLETED)
    if stop.done():
        if serving.num_unfinished:
            seconds = serving.config.drain_seconds
            log.info(
                "stopping: %d requests have %g seconds to finish; once more: they are aborted",
                serving.num_unfinished,
                seconds,
            )
        draining = event_loop.create_task(serving.drain())
        await asyncio.wait({draining})
        server.should_exit = True
    await running
    load_log.cancel()
    with contextlib.suppress(asyncio.CancelledError, RolloutError):
        await load_log
    if draining is not None and not draining.cancelled():
        draining.result()


def _say_ready(serving: Serving, listener: socket.socket) -> None:
    host, port = listener.getsockname()[:2]
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    config = serving.config
    if config.api_key is not None and config.admin_key is None:
        log.warning(
            "calls that change weights, corpora or memory are refused: SPECROLLOUT_ADMIN_KEY is "
            "not set"
        )
    keys = "without keys, for this machine alone" if config.is_loopback else "with an api key"
    if config.is_loopback and config.api_key is not None:
        keys = "with an api key, for this machine alone"
    log.info("serving %s at %s (%s)", serving.model_name, url, keys)


def _bound(config: ServerConfig) -> socket.socket:
    try:
        family, kind, _, _, address = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:  # a name that is unknown, a port that is taken
        raise InvalidInputError(
            "server.port", config.port, f"cannot listen on {config.host}: {error.strerror}"
        ) from error
    return bound


def _set_log_levels(level: LogLevel) -> None:
    logging.getLogger().setLevel(level.value.upper())
    if level is not LogLevel.debug:  # what it says at info, we say in one line
        logging.getLogger("uvicorn.error").setLevel(logging.WARNING)


def allow_open_files(count: int) -> None:
    """Raise the limit to ``count``, as far as this user may; shells often start with 1,024."""
    allowed, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    if allowed == unlimited or allowed >= count:
        return
    raised = count if most == unlimited else min(count, most)
    resource.setrlimit(resource.RLIMIT_NOFILE, (raised, most))
    if raised < count:
        log.warning(
            "this process may open %d files, which is less than the %d that server.max_connections "
            "asks for: raise `ulimit -n`, or lower it",
            raised,
            count,
        )
