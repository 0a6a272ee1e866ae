"""Logits to tokens and logprobs, and acceptance along draft trees."""
