"""One rank of the GRPO example, as `launch` starts it, with the arguments in GRPO_ARGUMENTS."""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[3] / "examples" / "grpo_deepspeed.py"

if __name__ == "__main__":
    written = Path(sys.argv[1])
    sys.argv = [str(EXAMPLE), *json.loads(os.environ["GRPO_ARGUMENTS"])]
    sys.path.insert(0, str(EXAMPLE.parent))
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    written.write_text("null")
    sys.stdout.flush()
    os._exit(0)  # DeepSpeed's teardown of gloo ranks sometimes aborts
