"""The one limit of tests that wait: it ends what hangs and decides no result."""

HANG_SECONDS = 900.0
"""Ten times what the longest wait takes on a slow machine that does other work as well."""
