"""As much of vLLM as TRL's clients import, with gloo in the place of NCCL: they need no engine of vLLM."""

__version__ = "0.31.0"
LLM = RequestOutput = SamplingParams = object
