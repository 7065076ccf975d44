"""Count of the moments at which a tensor that outlives a step has got other memory.

Whoever keeps addresses from one step to the next compares the count; whoever moves a tensor raises it.
"""

count = 0
