"""A small policy learns to spell words backwards, by policy gradient on tokens sampled by Caesura.

Three processes, two cores: the scheduler samples, the trainer (:mod:`.trainer`) learns, and this package's
:mod:`.loop` moves groups from one to the other and weights back: pause in place, update, continue.
"""
