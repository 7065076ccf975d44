"""The demo of an agent: a policy learns to look numbers up with a tool, over chats in OpenAI's API.

The agent is a loop around the unmodified ``openai`` client, as everybody writes one. The warm-up shows more
guesses than calls, so that reinforcement learning has to find out that the tool is worth a turn.
"""
