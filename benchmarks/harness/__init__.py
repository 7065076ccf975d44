"""The benchmark driver: what is run, on which engines, and how it is reported."""
