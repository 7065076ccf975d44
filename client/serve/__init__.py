"""The HTTP front end: SGLang's, OpenAI's and vLLM's endpoints over one connection to an engine.

Invariants: no torch in this process; every route has an access class, enforced in ``middleware.py``; nothing
here holds state of the engine, so several front ends may serve one.
"""
