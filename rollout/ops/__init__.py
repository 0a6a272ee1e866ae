"""Ops: a folder for each kernel, with its plain reference beside the fast forms."""
