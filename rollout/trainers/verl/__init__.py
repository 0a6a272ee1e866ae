"""specrollout as a rollout engine of verl.

`options` and `sampling` know nothing of verl; the other modules import it.
"""
