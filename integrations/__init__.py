"""Adapters between trainers and the clients; each needs its trainer's package, and none is imported by
anything else.
"""
