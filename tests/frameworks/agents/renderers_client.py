"""renderers' own client, as verifiers and prime-rl call it: two turns of token ids.

Run in its own environment: ``python renderers_client.py URL MODEL_FOLDER``.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from openai import AsyncOpenAI
from renderers.client import generate
from renderers.default import DefaultRenderer
from transformers import AutoTokenizer

SAMPLING = {"max_tokens": 9, "temperature": 0.9, "top_p": 0.9, "seed": 3}
READ = ("prompt_ids", "completion_ids", "completion_logprobs", "sampling_mask", "content")


async def main(url: str, folder: str) -> None:
    client = AsyncOpenAI(base_url=f"{url}/v1", api_key="none")
    call: dict[str, Any] = {
        "client": client,
        "renderer": DefaultRenderer(AutoTokenizer.from_pretrained(folder)),
        "messages": [{"role": "user", "content": "one two"}],
        "model": "policy",
        "sampling_params": SAMPLING,
        "cache_salt": "1",
    }
    first = await generate(**call)
    later = [*first["prompt_ids"], *first["completion_ids"], 7, 8]
    second = await generate(**call, prompt_ids=later)
    print(json.dumps([{name: turn[name] for name in READ} for turn in (first, second)]))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
