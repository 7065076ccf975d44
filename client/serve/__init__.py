"""The HTTP front end: SGLang's and OpenAI's endpoints over one connection to an engine (``caesura[serve]``).

Invariants: no torch in this process; every route has an access class, enforced in one place
(``middleware.py``); nothing here holds state of the engine, so several front ends may serve one.
"""
