"""How many files and connections this process may have open."""

from __future__ import annotations

import logging
import resource

log = logging.getLogger(__name__)


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
