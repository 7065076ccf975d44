"""``caesura serve --replicas N``: several engines of one host as processes, behind one door that takes every command."""
