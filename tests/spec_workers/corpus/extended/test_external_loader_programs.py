"""External corpora in forked children and in programs that end without closing them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.hang import HANG_SECONDS

ROOT = str(Path(__file__).resolve().parents[4])


FORKED = """
import os, threading
import numpy as np
from ngram_native import Corpus
from spec_workers.corpus.external_loader import ExternalLoader
from tests.helpers.hang import HANG_SECONDS

gate, begun = threading.Event(), threading.Event()

def documents():
    yield [np.arange(9, dtype=np.int32)]
    begun.set()
    assert gate.wait(HANG_SECONDS)

corpus = Corpus(max_bytes=1 << 20, max_external_bytes=256 << 20)
loads = ExternalLoader(corpus, max_tokens=100, max_loading=1)
loads.start("ready", [[np.arange(9, dtype=np.int32)]])
loads.wait("ready")
loads.start("loading", documents())
loads.start("waiting", [[np.arange(5, dtype=np.int32)]])
assert begun.wait(HANG_SECONDS)
with loads._changed:  # as another thread may hold it at the wrong moment
    child = os.fork()
if child == 0:
    corpus.check_integrity()
    fails = [status for status in loads.statuses() if status.name != "ready"]
    assert [status.state for status in fails] == ["failed", "failed"]
    assert all("forked" in status.error for status in fails)
    assert loads.publish() == ["ready"]
    for name in ("loading", "waiting"):
        loads.start(name, [[np.arange(5, dtype=np.int32)]])
        assert loads.wait(name, HANG_SECONDS).state == "ready"
    assert loads.publish() == ["loading", "waiting"]
    loads.remove("ready")
    loads.close()
    corpus.check_integrity()
    os._exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
gate.set()
assert loads.wait("waiting", HANG_SECONDS).state == "ready"
assert loads.publish() == ["loading", "ready", "waiting"]
loads.close()
"""


ENDLESS = """
import itertools, sys, time
import numpy as np
from ngram_native import Corpus
from spec_workers.corpus.external_loader import ExternalLoader

loads = ExternalLoader(Corpus(max_external_bytes=1 << 30), max_tokens=10**9, max_loading=2)
loads.start("endless", (time.sleep(0.01) or [np.zeros(10, np.int32)] for _ in itertools.count()))
loads.start("large", [[np.zeros(20_000_000, np.int32)]])
loads.start("waits", [[np.zeros(10, np.int32)]])
while loads.statuses()[1].num_tokens == 0:
    time.sleep(0.01)
"""


@pytest.mark.parametrize("program", [FORKED, ENDLESS], ids=["forked child", "no close"])
def test_programs_load_anew_in_forks_and_end_without_close(program):
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        capture_output=True, text=True, timeout=HANG_SECONDS, cwd=ROOT,
    )  # fmt: skip
    assert (run.returncode, run.stderr) == (0, "")
