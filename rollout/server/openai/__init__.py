"""OpenAI's dialect, with vLLM's extra fields."""
