"""An engine behind HTTP, in sglang's and OpenAI's dialects. Only here is FastAPI imported."""
