"""Stand-in for the part of vLLM that TRL's clients import, with gloo in the place of NCCL."""

__version__ = "0.31.0"
LLM = RequestOutput = SamplingParams = object
