"""The HTTP front end: SGLang's and OpenAI's endpoints over one connection to an engine. Needs ``caesura[serve]``.

Invariants: no torch in this process; every route has an access class, enforced in one place (``auth.py``); nothing here
holds engine state: what is answered comes from the engine, so several front ends may serve one.
"""
