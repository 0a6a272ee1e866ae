"""Small faults put into the sources one by one, to learn whether the tests notice."""
