"""The demo of images: a small Stable Diffusion 3 learns the colours of its prompts while Caesura serves it.

A pipeline of 0.7 million parameters is made from nothing and trained so that it draws good shapes in mostly
wrong colours; Flow-GRPO (Liu et al., 2025, arXiv 2505.05470) then teaches it the colours from a reward that
looks at the pictures.
"""
