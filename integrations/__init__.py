"""Adapters between trainers and clients; each needs its trainer's package, and nothing else imports it."""
