"""The engine behind HTTP: sglang's dialect, OpenAI's, and a status page."""
