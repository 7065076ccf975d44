"""The demo of adapters: three of one base learn to spell words differently, side by side on one engine.

The base is warmed up on all spellings and does not know which is asked for. Each adapter has a trainer and a
loop of its own, and is swapped under its own name while the engine goes on for all of them.
"""
