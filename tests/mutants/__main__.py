"""Puts small faults into the sources, one at a time, and asks whether the tests catch each.

    python -m tests.mutants --count 150 --seed 1 --json before.json
    python -m tests.mutants --replay before.json --json after.json    # the same ones, other tests

A mutant is caught when a test fails, crashes or takes several times as long as it does. Only test
files that run the mutated statement are asked, the quickest first: which they are is measured once
for a state of sources and tests. Works in build/mutants; exit code 1 where a replay catches fewer.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from queue import SimpleQueue

from tests.mutants.coverage_map import CoverageMap, TestFile, coverage_map
from tests.mutants.mutation import Mutation, all_mutations, by_line
from tests.mutants.results import Outcome, Result, print_results, read_results, write_results
from tests.mutants.workbench import ROOT, Workbench

FOLDER = ROOT / "build" / "mutants"
TIMES_LONGER = 5.0  # than without the fault: it hangs
SPARE_SECONDS = 30.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=150)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="where results are written")
    parser.add_argument("--replay", type=Path, help="results whose mutants are tried again")
    parser.add_argument("--tests", nargs="+", default=["tests"], metavar="PATH")
    parser.add_argument(
        "--seconds-per-mutant", type=float, default=120.0, help="of a core (default: 120)"
    )
    parser.add_argument("--jobs", type=int, default=1)
    options = parser.parse_args()
    before = read_results(options.replay) if options.replay else None
    lines = by_line(all_mutations(ROOT))
    if before is None:
        rng = random.Random(options.seed)
        mutations = [rng.choice(line) for line in rng.sample(lines, options.count)]
    else:
        known = {mutation.key: mutation for line in lines for mutation in line}
        mutations = [known[key] for key in before if key in known]
        print(f"{len(before) - len(mutations)} of {len(before)} mutants have lost their line")
    with ExitStack() as at_end:
        benches: SimpleQueue[Workbench] = SimpleQueue()
        for index in range(options.jobs):
            bench = Workbench(FOLDER / f"bench{index}")
            at_end.callback(bench.close)
            benches.put(bench)
        bench = benches.get()
        covered = coverage_map(bench, options.tests, FOLDER / "map.json")
        benches.put(bench)
        results = _try_all(mutations, benches, covered, options.seconds_per_mutant, options.jobs)
    print_results(results)
    if options.json:
        write_results(options.json, results)
    lost = [] if before is None else [
        result
        for result in results
        if result.outcome is Outcome.SURVIVED and before[result.mutation.key] is Outcome.CAUGHT
    ]  # fmt: skip
    for result in lost:
        print(f"caught before: {result.mutation.file}:{result.mutation.edit.line}")
    return 1 if lost else 0


def _try_all(
    mutations: Sequence[Mutation],
    benches: SimpleQueue[Workbench],
    covered: CoverageMap,
    budget: float,
    jobs: int,
) -> list[Result]:
    def one(mutation: Mutation) -> Result:
        bench = benches.get()
        try:
            result = _try(mutation, bench, covered, budget)
        finally:
            benches.put(bench)
        print(result.line, flush=True)
        return result

    with ThreadPoolExecutor(jobs) as threads:
        return list(threads.map(one, mutations))


def _try(mutation: Mutation, bench: Workbench, covered: CoverageMap, budget: float) -> Result:
    """Run what covers it, as far as the budget of seconds goes, though one file at least."""
    started, cpu_seconds = time.monotonic(), 0.0
    covering = covered.covering(mutation)
    chosen: list[TestFile] = []
    spent = 0.0
    for each in covering:
        spent += each.cpu_seconds
        if chosen and spent > budget:
            break
        chosen.append(each)
    diff = mutation.diff((ROOT / mutation.file).read_bytes())

    def result(outcome: Outcome, test: str = "") -> Result:
        seconds = time.monotonic() - started
        return Result(
            mutation, outcome, test, len(chosen), len(covering), seconds, cpu_seconds, diff
        )

    if not chosen:
        return result(Outcome.SURVIVED)
    with bench.mutated(mutation) as is_built:
        if not is_built:
            return result(Outcome.NOT_BUILT)
        limits = [TIMES_LONGER * each.seconds + SPARE_SECONDS for each in chosen]
        answer = bench.run([each.path for each in chosen], limits, log="mutant.log")
    cpu_seconds = answer["cpu_seconds"]
    if answer["code"] == 0:
        return result(Outcome.SURVIVED)
    return result(Outcome.CAUGHT, answer["failed"] or f"exit code {answer['code']}")


if __name__ == "__main__":
    sys.exit(main())
