"""specrollout as a rollout engine of verl.

`options`, `sampling` and `seeds` know nothing of verl; the other modules import it.
"""
