"""A long random run of one server and one dataset job, compared with undisturbed ones."""
