"""Parts of bench_server.py; its tests use them too."""
