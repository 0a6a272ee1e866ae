"""Clients and servers of bench_server.py; the server's tests and the soak use the clients too."""
