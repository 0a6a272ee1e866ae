"""Clients and servers of bench_server.py; the server's tests use the clients too."""
