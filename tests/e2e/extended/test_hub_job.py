"""A job whose model and prompts are on a hub of this machine."""

from __future__ import annotations

import shutil

import pyarrow as pa
import pyarrow.parquet as pq

from tests.helpers.forked import forked, run_module
from tests.helpers.hang import HANG_SECONDS
from tests.helpers.loopback_hub import loopback_hub
from tests.helpers.small_jobs import read_rows


def test_a_job_of_names_alone(text_model_path, tmp_path):
    repositories = tmp_path / "hub" / "someone"
    shutil.copytree(text_model_path, repositories / "tiny")
    (repositories / "questions" / "data").mkdir(parents=True)
    for split, texts in (("train", ["one two"]), ("test", ["three", "four"])):
        table = pa.table({"question": texts, "answer": range(len(texts))})
        pq.write_table(table, repositories / "questions" / "data" / f"{split}.parquet")
    output, log = tmp_path / "out.jsonl", tmp_path / "job.log"
    job = [
        "model=someone/tiny", "data.path=someone/questions", "data.split=test", "spec=none",
        f"output.path={output}", f"hydra.run.dir={tmp_path}/hydra", "memory.max_kv_tokens=64",
        "sampling.max_new_tokens=4",
    ]  # fmt: skip
    with loopback_hub(tmp_path / "hub") as hub:
        here = hub.environment(tmp_path)
        for environment in (here, here | {"HF_HUB_OFFLINE": "1"}):
            child = forked(run_module, "rollout.cli", *job, log=log, environment=environment)
            child.join(HANG_SECONDS)
            assert child.exitcode == 0, log.read_text()
    assert "nothing to do" in log.read_text()
    rows = read_rows(output)
    assert [(row["prompt"], row["answer"]) for row in rows] == [("three", 0), ("four", 1)]
